"""A bf16 linear in plain torch.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Rows of one library call when rows must not depend on how many there are.
ROW_BLOCK = 16


def bf16_linear_reference(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual: torch.Tensor | None,
    deterministic: bool,
) -> torch.Tensor:
    """Return x W^T (+ bias), rounded, then + residual, rounded again; contiguous [..., N].

    The product is torch's own, which accumulates in fp32. `deterministic` gives the library
    blocks of 16 rows (zeros behind the last), always one problem size, hence one choice of its
    kernels.
    """
    if not deterministic:
        product = F.linear(x, weight_NK, bias_N)
    else:
        x_MK = x.reshape(-1, x.shape[-1])
        padding = -x_MK.shape[0] % ROW_BLOCK
        blocks = F.pad(x_MK, (0, 0, 0, padding)).split(ROW_BLOCK)
        product = torch.cat([F.linear(block, weight_NK, bias_N) for block in blocks])
        product = product[: x_MK.shape[0]].view(*x.shape[:-1], weight_NK.shape[0])
    if residual is not None:
        product = product + residual
    return product.contiguous()
