"""The MTP layer's input in Triton: one launch for two norms, the embedding and the cat.

A program norms one half of a row. The next kernel may start at once: a linear then reads its
weight meanwhile.

Shape legend: B batch, S query tokens, C hidden, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm_compile.ops._triton import supports_pdl


@triton.jit(do_not_specialize=["stride_ib", "stride_is", "num_steps"])
def mtp_input_kernel(
    ids,
    stride_ib,
    stride_is,
    hidden,
    stride_hb,
    stride_hs,
    stride_hc,
    embedding,
    embedding_norm,
    hidden_norm,
    eps,
    out,
    num_steps,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = row // num_steps
    step = row - sequence * num_steps
    column = tl.arange(0, BLOCK_C)
    inside = column < C
    is_hidden = tl.program_id(1) == 1
    norm = hidden_norm if is_hidden else embedding_norm
    weight = tl.load(norm + column, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if is_hidden:
        at = hidden + sequence * stride_hb + step * stride_hs + column * stride_hc
    else:
        token = tl.load(ids + sequence * stride_ib + step * stride_is)
        at = embedding + token * C + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    normed = (x * rstd).to(out.dtype.element_ty)
    result = (normed.to(tl.float32) * weight.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + (row * 2 + tl.program_id(1)) * C + column, result, mask=inside)


def mtp_input_triton(
    ids_BS: torch.Tensor,
    hidden_BSC: torch.Tensor,
    embedding_VC: torch.Tensor,
    embedding_norm_C: torch.Tensor,
    hidden_norm_C: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Launch the kernel."""
    batch_size, num_steps, num_columns = hidden_BSC.shape
    out_BSX = hidden_BSC.new_empty(batch_size, num_steps, 2 * num_columns)
    if not out_BSX.numel():
        return out_BSX
    has_pdl = supports_pdl(ids_BS.device)
    mtp_input_kernel[(batch_size * num_steps, 2)](
        ids_BS,
        *ids_BS.stride(),
        hidden_BSC,
        *hidden_BSC.stride(),
        embedding_VC,
        embedding_norm_C,
        hidden_norm_C,
        eps,
        out_BSX,
        num_steps,
        C=num_columns,
        BLOCK_C=triton.next_power_of_2(num_columns),
        PDL=has_pdl,
        num_warps=8 if num_columns > 1024 else 4,
        **({"launch_pdl": True} if has_pdl else {}),
    )
    return out_BSX
