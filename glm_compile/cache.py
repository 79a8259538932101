"""PagedCache: latents and index keys in pages, one length per sequence.

A transformers Cache for unmodified GlmMoeDsa models. Tokens of a step are written at positions
`lengths[b]` onwards; every read returns the whole allocated length and the mask says what counts,
so no shape depends on a position and a compiled forward never recompiles for one.

A step that does not fit is refused before it writes: an eager one, and one that the glm backend
compiled, wherever the host knows the lengths without waiting. That is always so on the CPU, and on
another device while numbers and lists move them (`capacity`). Where only the device knows, nothing
is written outside, the lengths go on counting, and `check_capacity` tells.

Sequences may have different lengths (`advance` with a tensor). transformers' own mask has one
offset for the batch and would be silently wrong then, so such a cache refuses to be asked for it
and names `causal_mask`.

Shape letters: B batch, S query tokens of the step, T cached tokens (allocated), L kv_lora, P rope
dim, D index head dim, K selected tokens, X width of a cached row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from glm_compile.arguments import check_device, check_integer, describe, is_integer
from glm_compile.capacity import full_message, held_tokens, note_held
from glm_compile.errors import ConfigError, UnsupportedError
from glm_compile.model_facts import FULL, GlmDsaConfig, attentions_of
from glm_compile.ops.causal_mask import causal_mask
from glm_compile.ops.draft_seed import draft_seed
from glm_compile.ops.paged_cache import (
    PAGE_SIZE,
    advance,
    key_page_bytes,
    paged_gather,
    paged_gather_fp8,
    paged_write,
    paged_write_fp8,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FP8 = torch.float8_e4m3fn
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PagedLayer(CacheLayerMixin):
    """Pages of one decoder layer. `key_pages` is None for a layer without an indexer of its own."""

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, latent_pages: torch.Tensor, key_pages: torch.Tensor | None, batch_size: int):
        super().__init__()
        self.latent_pages = latent_pages
        self.key_pages = key_pages
        self.batch_size = batch_size
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: pages are allocated with the cache."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("lengths belong to the cache: call PagedCache.update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotImplementedError("lengths belong to the cache: call PagedCache.get_mask_sizes")

    def get_seq_length(self) -> int:
        raise NotImplementedError("lengths belong to the cache: call PagedCache.get_seq_length")

    def get_max_length(self) -> int:
        raise NotImplementedError("lengths belong to the cache: call PagedCache.get_max_length")


class PagedCache(Cache):
    """Cache of a GlmMoeDsa model with a length per sequence.

    Args:
        config: the model's config (or GlmDsaConfig, or the contents of a config.json).
        batch_size: number of sequences; beam search needs batch times beams.
        max_cache_len: tokens that each sequence can hold.
        dtype: dtype that the model computes in: of the latents, and of the index keys unless
            `index_dtype` says FP8. None takes the config's, else torch's default.
        index_dtype: None for index keys in `dtype` (exact), or torch.float8_e4m3fn for FP8 keys
            with one float32 scale per token.
        device: None for torch's default device.
        num_mtp_layers: MTP layers that keep their rows here, behind the decoder layers; their index
            is `config.num_hidden_layers + i`. They roll back together with the rest.
        memory: a cache of the same layers, dtypes and device with at least as many pages: the new
            one keeps its tokens there, so that only one of them may hold any at a time.

    Attributes:
        lengths: int32 [B], tokens held by each sequence. Its address never changes.
        block_table: int32 [B, pages per sequence], page that holds tokens 64*i to 64*i+63.
        layers: PagedLayer per layer; each owns its tensors.
        auto_advance: whether the last write of a forward of the decoder layers advances the lengths
            by the step's tokens. Loops that accept a part of them set it to False and call
            `advance`.
    """

    layers: list[PagedLayer]  # type: ignore[assignment]

    def __init__(
        self,
        config: PreTrainedConfig | Mapping[str, Any] | GlmDsaConfig,
        batch_size: int,
        max_cache_len: int,
        *,
        dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        num_mtp_layers: int = 0,
        memory: PagedCache | None = None,
    ) -> None:
        facts = GlmDsaConfig.from_transformers(config)
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("max_cache_len", max_cache_len, 1),
            ("num_mtp_layers", num_mtp_layers, 0),
        ):
            check_integer("PagedCache", name, value, least)
        dtype = (facts.dtype or torch.get_default_dtype()) if dtype is None else dtype
        _check_dtypes(dtype, index_dtype)
        check_device(device, "PagedCache")
        num_pages_each = -(-max_cache_len // PAGE_SIZE)
        num_pages = batch_size * num_pages_each
        head_dim = facts.index_head_dim
        is_fp8 = index_dtype == FP8

        def make_layer(is_full: bool) -> PagedLayer:
            # Zeros, not empty: an unwritten row is masked, but its NaN would survive 0 * NaN.
            latent_pages = torch.zeros(
                num_pages, PAGE_SIZE, facts.latent_dim, dtype=dtype, device=device
            )
            key_pages = None
            if is_full and is_fp8:
                key_pages = torch.zeros(
                    num_pages, key_page_bytes(head_dim), dtype=torch.uint8, device=device
                )
            elif is_full:
                key_pages = torch.zeros(num_pages, PAGE_SIZE, head_dim, dtype=dtype, device=device)
            return PagedLayer(latent_pages, key_pages, batch_size)

        kinds = [kind == FULL for kind in facts.indexer_types] + [True] * num_mtp_layers
        if memory is not None:
            _check_memory(memory, kinds, num_pages, facts, dtype, is_fp8, device)
        # Tensors made in inference mode could not be written in a later call outside of it.
        with torch.inference_mode(False):
            if memory is None:
                tokens = f"{batch_size} x {num_pages_each * PAGE_SIZE} tokens"
                layers: Any = _allocate([partial(make_layer, full) for full in kinds], tokens)
            else:
                layers = [_layer_on(layer, num_pages, batch_size) for layer in memory.layers]
            super().__init__(layers=layers)
            self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
            self.block_table = torch.arange(num_pages, dtype=torch.int32, device=device).view(
                batch_size, num_pages_each
            )
        self._memory = None if memory is None else memory.memory
        self.num_decoder_layers = facts.num_hidden_layers
        self.kv_lora_rank = facts.kv_lora_rank
        self.index_head_dim = head_dim
        self.max_cache_len = max_cache_len
        self.dtype = dtype
        self.index_dtype = index_dtype or dtype
        self.is_index_fp8 = is_fp8
        self.auto_advance = True
        note_held(self.lengths, 0)
        self._batch_size = batch_size
        # The layer whose last write ends a forward: its indexer writes after its attention.
        self._last_layer = facts.num_hidden_layers - 1
        self._ends_with_indexer = kinds[self._last_layer]
        self._is_ragged = False
        # The layer that wrote last in a forward that has not ended; None between forwards.
        self._open_layer: int | None = None
        # Whether the end of a forward has just advanced the lengths, and by how much.
        self._is_counted = False
        self._counted_tokens = 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's latents [B,1,S,L] and rotated keys [B,1,S,P]; return all [B,1,T,*]."""
        if layer_idx == 0 or layer_idx >= self.num_decoder_layers:
            self._check_step(key_states, layer_idx)
        if layer_idx < self.num_decoder_layers:
            self._open_layer, self._is_counted = layer_idx, False
        new_BSX = torch.cat((key_states, value_states), dim=-1).squeeze(1)
        paged_write(self.layers[layer_idx].latent_pages, new_BSX, self.block_table, self.lengths)
        if layer_idx == self._last_layer and not self._ends_with_indexer:
            self._end_forward(key_states.shape[2])
        return self._gather_latents(layer_idx)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write a step's index keys [B,S,D]; return all of them [B,T,D]."""
        pages = self.layers[layer_idx].key_pages
        if pages is None:
            self._take_back()
            raise ConfigError(
                f"PagedCache: layer {layer_idx} is 'shared' in indexer_types and has no index "
                "keys; the model that writes them was built with another config"
            )
        table, lengths = self.block_table, self.lengths
        if self.is_index_fp8:
            paged_write_fp8(pages, indexer_key_states, table, lengths)
            keys_BTD = paged_gather_fp8(
                pages,
                table,
                self.max_cache_len,
                head_dim=self.index_head_dim,
                dtype=indexer_key_states.dtype,
            )
        else:
            paged_write(pages, indexer_key_states, table, lengths)
            keys_BTD = paged_gather(pages, table, self.max_cache_len)
        if layer_idx == self._last_layer:
            self._end_forward(indexer_key_states.shape[1])
        return keys_BTD

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Length of every sequence, as a 0-d tensor: reading it costs no synchronisation."""
        self._check_ended()
        self._refuse_ragged("one length for the batch (pass position_ids)")
        return self.lengths.max()

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        self._refuse_ragged("transformers' own causal mask")
        return self.lengths.max()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        self._refuse_ragged("transformers' own causal mask")
        return self.max_cache_len, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_cache_len

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def memory(self) -> PagedCache:
        """The cache that owns the pages."""
        return self if self._memory is None else self._memory

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""
        return self.layers[0].latent_pages.shape[0]

    def causal_mask(
        self,
        num_query_tokens: int,
        dtype: torch.dtype = torch.bool,
        *,
        starts_B: torch.Tensor | None = None,
        key_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mask [B,1,S,T] of a step that is written at `lengths`: row s sees p <= lengths[b] + s.

        Call it inside the compiled function, before the forward, and pass it as
        `attention_mask={"indexed_attention": mask}`.

        Args:
            dtype: bool for sdpa; the model's dtype for eager attention, which adds the mask.
            starts_B: first position that counts, per sequence.
            key_mask: bool, broadcastable to [B,S,T]; False excludes a key.
        """
        if not isinstance(num_query_tokens, torch.SymInt) and not torch.compiler.is_compiling():
            check_integer("PagedCache.causal_mask", "num_query_tokens", num_query_tokens, 0)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"PagedCache.causal_mask: dtype must be a torch.dtype, got {describe(dtype)}"
            )
        for name, value in (("starts_B", starts_B), ("key_mask", key_mask)):
            if value is not None and not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"PagedCache.causal_mask: {name} must be a tensor, got {describe(value)}"
                )
        return causal_mask(
            self.lengths,
            num_query_tokens,
            self.max_cache_len,
            dtype,
            starts_B=starts_B,
            key_mask=key_mask,
        )

    def gather_rows(
        self,
        layer_idx: int,
        topk_BSK: torch.Tensor,
        lengths_B: torch.Tensor | None = None,
        row_B: torch.Tensor | None = None,
    ) -> DraftSeed:
        """Read the latents of selected positions, once for all steps that attend to them.

        Args:
            topk_BSK: positions, int32 or int64. Not counted are those outside [0, length) and those
                equal to the one before. Where none counts, a row of zeros does.
            lengths_B: tokens that count; None = `lengths`.
            row_B: the row whose selection counts, and up to which the step's tokens do as well;
                None: the first, and none of them.
        """
        if not is_integer(layer_idx) or not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"PagedCache.gather_rows: layer_idx must be in 0..{len(self.layers) - 1}, got "
                f"{layer_idx!r}"
            )
        pages = self.layers[layer_idx].latent_pages
        lengths_B = self.lengths if lengths_B is None else lengths_B
        return DraftSeed(*draft_seed(pages, topk_BSK, self.block_table, lengths_B, row_B=row_B))

    def begin_mtp_step(self) -> None:
        """Refuse an MTP layer's step whose rows would not lie beside those of the model.

        The MTP layer calls it; its rows belong to the tokens that the model has just written.
        """
        self._check_ended()
        if self._is_counted:
            raise ValueError(
                "PagedCache: auto_advance has counted the tokens of the model's forward, so the "
                "MTP layer's rows would lie behind them: set cache.auto_advance = False and call "
                "cache.advance behind the MTP layer (or go back first: crop, set_lengths)"
            )

    def check_model(self, model: Any, batch_size: int | None = None) -> None:
        """Raise for a model whose steps could not be written here, before any work.

        Args:
            model: GlmMoeDsaForCausalLM, or its decoder.
            batch_size: sequences of a step; None: as many as the cache has.

        Raises:
            ConfigError: fewer layers than the model has, or other latents.
            ValueError: another batch size, dtype or device. Nothing is said of the last two where
                the weights do not tell them (quantised, sharded, offloaded).
        """
        attentions = attentions_of(model)
        beyond = [a.layer_idx for a in attentions if a.layer_idx >= self.num_decoder_layers]
        if beyond:
            raise self._layer_error(min(beyond), is_decoder=True)
        device, dtype = self.lengths.device, self.dtype
        if attentions and (weight := _latent_weight(attentions[0])) is not None:
            if weight.shape[0] != (width := self.layers[0].latent_pages.shape[-1]):
                raise ConfigError(
                    f"PagedCache holds latents of {width} numbers but the model computes "
                    f"{weight.shape[0]} (kv_lora_rank + qk_rope_head_dim); make it from the config "
                    "of the model that runs"
                )
            device = weight.device
            if not torch.is_autocast_enabled(device.type):
                dtype = weight.dtype
        self._check_states(batch_size, device, dtype)

    def check_capacity(self) -> None:
        """Raise if a step has gone beyond `max_cache_len` unseen. Waits for the device.

        What lies beyond was never written; logits of those tokens did not see them.
        """
        held = int(self.lengths.max())
        if held > self.max_cache_len:
            raise ValueError(
                f"PagedCache was overrun: {held} tokens were counted, but max_cache_len is "
                f"{self.max_cache_len}, and what the model computed for the tokens beyond it is "
                f"wrong; make it larger, or go back with set_lengths({self.max_cache_len})"
            )

    def advance(self, num_tokens: int | torch.Tensor) -> None:
        """Count tokens as held: the same number for every sequence, or one per sequence [B].

        Counts that leave the cache are refused where the host can tell without waiting: always on
        the CPU; elsewhere a number, if the lengths are known.
        """
        self._check_ended()
        if getattr(num_tokens, "ndim", 0) > 0:
            num_tokens = torch.as_tensor(num_tokens)  # NumPy's as well
        if not isinstance(num_tokens, torch.Tensor):
            if isinstance(num_tokens, bool) or not hasattr(num_tokens, "__index__"):
                raise ValueError(f"PagedCache.advance: expected an integer, got {num_tokens!r}")
            self._check_counts(num_tokens)
            self._count(num_tokens)
        else:
            if num_tokens.dtype.is_floating_point or num_tokens.dtype == torch.bool:
                raise ValueError(f"PagedCache.advance: expected integers, got {num_tokens.dtype}")
            if num_tokens.dim() > 0 and num_tokens.shape != self.lengths.shape:
                raise ValueError(
                    f"PagedCache.advance: expected one count for each of {self._batch_size} "
                    f"sequences, got shape {tuple(num_tokens.shape)}"
                )
            self._check_counts(num_tokens)
            if num_tokens.dim() > 0:
                self._is_ragged = self._batch_size > 1
            self.lengths.add_(num_tokens.to(self.lengths.device))
        self._is_counted = False

    def note_advance(self) -> None:
        """Take note that an op has advanced the lengths, by a count of each sequence's own."""
        self._is_ragged = self._batch_size > 1
        self._is_counted = False

    def _check_counts(self, num_tokens: int | torch.Tensor) -> None:
        """Raise for counts that leave the cache, as far as the host knows without waiting."""
        if torch.compiler.is_compiling():
            return
        counts: Any = num_tokens
        if isinstance(num_tokens, torch.Tensor):
            if num_tokens.device.type != "cpu":
                return
            counts = num_tokens.tolist()
        # Python's integers: no count can wrap around on the way.
        if self.lengths.device.type == "cpu":
            held = self.lengths.tolist()
        elif isinstance(counts, list) or (longest := held_tokens(self.lengths)) is None:
            return
        else:
            held = [longest]
        each = counts if isinstance(counts, list) else [counts] * len(held)
        new = [length + count for length, count in zip(held, each)]
        if not all(0 <= length <= self.max_cache_len for length in new):
            raise ValueError(
                f"PagedCache.advance: {counts} tokens behind {held} make {new}, which is not "
                f"within 0 and {self.max_cache_len} (max_cache_len)"
            )

    def set_lengths(self, lengths: int | Sequence[int] | torch.Tensor) -> None:
        """Set the tokens held by each sequence (rollback): one number, or one per sequence.

        Tokens beyond a length are never seen again and are overwritten by the next step. MTP rows
        roll back with the rest.
        """
        if isinstance(lengths, torch.Tensor) and lengths.device.type != "cpu":
            if lengths.dim() > 0 and lengths.shape != self.lengths.shape:
                raise ValueError(
                    f"PagedCache.set_lengths: expected {self._batch_size} lengths, got "
                    f"shape {tuple(lengths.shape)}"
                )
            self._is_ragged = lengths.dim() > 0 and self._batch_size > 1
            self.lengths.copy_(lengths)
            self._forget_forward()
            return
        values = _integers("PagedCache.set_lengths", lengths)
        if values.dim() > 0 and values.shape != self.lengths.shape:
            raise ValueError(
                f"PagedCache.set_lengths: expected {self._batch_size} lengths, got "
                f"shape {tuple(values.shape)}"
            )
        values = values.expand(self._batch_size)
        longest = int(values.max())
        if int(values.min()) < 0 or longest > self.max_cache_len:
            raise ValueError(
                f"PagedCache.set_lengths: lengths must be within 0 and {self.max_cache_len} "
                f"(max_cache_len), got {values.tolist()}"
            )
        self._is_ragged = bool((values != values[0]).any())
        self.lengths.copy_(values)
        self._note(longest)
        self._forget_forward()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens of every sequence (transformers' sign)."""
        try:
            tokens_to_remove = operator.index(tokens_to_remove)
        except TypeError:
            raise ValueError(
                f"PagedCache.crop: expected an integer, got {tokens_to_remove!r}"
            ) from None
        if tokens_to_remove > 0:
            raise ValueError(
                "PagedCache.crop takes a negative number: how many tokens to drop; "
                f"got {tokens_to_remove}. set_lengths sets absolute lengths"
            )
        if tokens_to_remove == 0:
            return
        self._check_ended()
        held = self._held()
        self.lengths.add_(tokens_to_remove).clamp_(min=0)
        self._note(None if held is None else max(held + tokens_to_remove, 0))
        self._forget_forward()

    def reset(self) -> None:
        """Forget all tokens; memory and addresses stay, contents become zeros.

        A NaN that an earlier text left would survive its mask, as that of an unwritten row would.
        """
        for pages in self._pages():
            pages.zero_()
        self.lengths.zero_()
        self._is_ragged = False
        self._note(0)
        self._forget_forward()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence b a copy of sequence `beam_idx[b]` (beam search)."""
        is_indices = isinstance(beam_idx, torch.Tensor) and beam_idx.dtype in (
            torch.int32,
            torch.int64,
        )
        if not is_indices or tuple(beam_idx.shape) != (self._batch_size,):
            found = describe(beam_idx)
            if isinstance(beam_idx, torch.Tensor):
                found = f"shape {tuple(beam_idx.shape)} of {beam_idx.dtype}"
            raise ValueError(
                f"PagedCache.reorder_cache: expected {self._batch_size} indices, int64, got {found}"
            )
        last = self._batch_size - 1
        if beam_idx.device.type == "cpu" and not all(0 <= i <= last for i in beam_idx.tolist()):
            raise ValueError(
                f"PagedCache.reorder_cache: expected indices in 0..{last}, got {beam_idx.tolist()}"
            )
        beam_idx = beam_idx.to(self.lengths.device)
        target = self.block_table.flatten().long()
        source = self.block_table.index_select(0, beam_idx).flatten().long()
        has_pages = (target >= 0) & (source >= 0)
        target, source = target[has_pages], source[has_pages]
        for pages in self._pages():
            pages[target] = pages[source]
        held = None if self._is_ragged else self._held()
        self.lengths.copy_(self.lengths.index_select(0, beam_idx))
        self._note(held)

    def batch_repeat_interleave(self, repeats: int) -> None:
        check_integer("PagedCache.batch_repeat_interleave", "repeats", repeats, 1)
        raise UnsupportedError(
            "PagedCache has a fixed number of sequences and cannot repeat them; make it with "
            f"batch_size={self._batch_size * repeats}"
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise UnsupportedError(
            "PagedCache has a fixed number of sequences and cannot drop some of them; "
            "make a new cache, or reorder_cache with batch_size indices"
        )

    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes over all layers."""
        rows = PAGE_SIZE * self.block_table.numel()
        return self._page_bytes() // rows

    def num_bytes(self) -> int:
        """Bytes of all tensors of the cache."""
        return self._page_bytes() + sum(t.nbytes for t in (self.lengths, self.block_table))

    def _page_bytes(self) -> int:
        return sum(pages.nbytes for pages in self._pages())

    def _pages(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield layer.latent_pages
            if layer.key_pages is not None:
                yield layer.key_pages

    def _gather_latents(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        latents_BTX = paged_gather(
            self.layers[layer_idx].latent_pages, self.block_table, self.max_cache_len
        )
        latents_B1TX = latents_BTX.unsqueeze(1)
        return latents_B1TX[..., : self.kv_lora_rank], latents_B1TX[..., self.kv_lora_rank :]

    def _check_step(self, key_states: torch.Tensor, layer_idx: int) -> None:
        self._check_layer(layer_idx)
        if torch.compiler.is_compiling() and key_states.shape[0] != self._batch_size:
            # Dynamo may know the sizes as symbols only, which it cannot write.
            raise ValueError(
                "PagedCache was made for another batch_size than this step has sequences (beam "
                "search and num_return_sequences multiply the batch); make it with that one"
            )
        is_compiling = torch.compiler.is_compiling()
        batch_size = None if is_compiling else key_states.shape[0]
        self._check_states(batch_size, key_states.device, key_states.dtype)
        if is_compiling:
            return
        held = held_tokens(self.lengths)
        num_new = key_states.shape[2]
        if held is not None and held + num_new > self.max_cache_len:
            raise ValueError(full_message("PagedCache", held, num_new, self.max_cache_len))

    def _check_states(
        self, batch_size: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Refuse latents of another batch size, device or dtype."""
        if batch_size is not None and batch_size != self._batch_size:
            raise ValueError(
                f"PagedCache was made for batch_size={self._batch_size}, but this step has "
                f"{batch_size} sequences (beam search and num_return_sequences multiply the "
                "batch); make it with that batch_size"
            )
        if device != self.lengths.device:
            raise ValueError(
                f"PagedCache is on {self.lengths.device} but the model computes on {device}; make "
                f'it with device="{device}"'
            )
        if dtype != self.dtype:
            raise ValueError(
                f"PagedCache holds {self.dtype} but the model computes {dtype}; make it with "
                f"dtype={dtype}"
            )

    def _check_layer(self, layer_idx: int) -> None:
        """Refuse the layers of a model with fewer or more of them than the cache was made for."""
        if layer_idx == 0:
            self._check_ended()
            return
        # An MTP layer announces itself, so this is the forward that the cache took for ended.
        is_decoder = self._is_counted
        if layer_idx < len(self.layers) and not is_decoder:
            return
        self._take_back()
        raise self._layer_error(layer_idx, is_decoder=is_decoder)

    def _layer_error(self, layer_idx: int, *, is_decoder: bool) -> ConfigError:
        """What a layer that has no place here is refused with."""
        num_mtp_layers = len(self.layers) - self.num_decoder_layers
        return ConfigError(
            f"PagedCache was made for {self.num_decoder_layers} decoder layers and "
            f"{num_mtp_layers} MTP layers, but layer {layer_idx} "
            f"{'of the model ' if is_decoder else ''}writes to it; make it from the config of the "
            "model that runs (num_hidden_layers)"
            + (
                ""
                if is_decoder
                else f", with num_mtp_layers={layer_idx - self.num_decoder_layers + 1} if that is "
                "an MTP layer"
            )
        )

    def _check_ended(self) -> None:
        """Raise if the last forward never wrote the last layer, so that nothing counted it."""
        if not self.auto_advance or self._open_layer is None:
            return
        written, num_layers = self._open_layer + 1, self.num_decoder_layers
        if written == num_layers:
            what = (
                f"all {num_layers} decoder layers, but no index keys of the last one, which is "
                "'full' in the cache's config (indexer_types)"
            )
        else:
            what = f"the first {written} of {num_layers} decoder layers (num_hidden_layers)"
        raise ConfigError(
            f"PagedCache: the last forward wrote {what}, so its tokens were not counted. Make the "
            "cache from the config of the model that runs; after a forward that was interrupted, "
            "cache.set_lengths(cache.lengths) lets its step be run again"
        )

    def _end_forward(self, num_tokens: int) -> None:
        self._open_layer, self._is_counted = None, self.auto_advance
        if not torch.compiler.is_compiling():
            self._counted_tokens = num_tokens
        if self.auto_advance:
            self._count(num_tokens)

    def _take_back(self) -> None:
        """Undo the count of a forward that goes on behind the layer that seemed its last."""
        if self._is_counted and not torch.compiler.is_compiling():
            self._count(-self._counted_tokens)
        self._forget_forward()

    def _forget_forward(self) -> None:
        self._open_layer, self._is_counted = None, False

    def _count(self, num_tokens: int) -> None:
        held = self._held()
        advance(self.lengths, num_tokens)
        self._note(None if held is None else held + num_tokens)

    def _held(self) -> int | None:
        """`held_tokens` outside of traced code, which must not read it: a recompile a step."""
        return None if torch.compiler.is_compiling() else held_tokens(self.lengths)

    def _note(self, held: int | None) -> None:
        # Traced code needs none: the write itself makes the old note void.
        if not torch.compiler.is_compiling():
            note_held(self.lengths, held)

    def _refuse_ragged(self, wanted: str) -> None:
        if self._is_ragged:
            raise ValueError(
                "PagedCache: the sequences may have different lengths, so "
                f"{wanted} would be wrong; "
                'pass attention_mask={"indexed_attention": cache.causal_mask(S, dtype)} and '
                "position_ids (lengths: cache.lengths)"
            )


class DraftSeed(NamedTuple):
    """What draft steps with a shared index attend to.

    Attributes:
        latents_BKX: cached rows of the selected positions: latent, then rotated key.
        rows_BK: int32, a selection of these rows: each that counts, repeated in the places of those
            that do not.
    """

    latents_BKX: torch.Tensor
    rows_BK: torch.Tensor


class SeedCache(Cache):
    """The cache as a draft step sees it: the rows of a seed, nothing to write, no index keys.

    To the layer its rows are the positions 0 to K - 1.
    """

    def __init__(self, seed: DraftSeed, kv_lora_rank: int) -> None:
        super().__init__(layers=[])
        self.seed = seed
        self.kv_lora_rank = kv_lora_rank

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latents_B1KX = self.seed.latents_BKX.unsqueeze(1)
        return latents_B1KX[..., : self.kv_lora_rank], latents_B1KX[..., self.kv_lora_rank :]

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        raise ValueError(
            "the rows of a seed hold no index keys, but the layer ran its indexer; a draft step "
            "with a shared index takes the selection of the step before"
        )

    def mask(self, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """Mask [B,1,1,K] that excludes nothing: what counts is what is selected."""
        batch_size, num_rows = self.seed.rows_BK.shape
        last_B = torch.full(
            (batch_size,), num_rows - 1, dtype=torch.int32, device=self.seed.rows_BK.device
        )
        return causal_mask(last_B, 1, num_rows, dtype)

    def selection(self) -> torch.Tensor:
        """The rows that count, as the selection [B,1,K] of a step."""
        return self.seed.rows_BK[:, None]


def _latent_weight(attention: Any) -> torch.Tensor | None:
    """The weight that makes the latents, if it is applied as it is; else None."""
    linear, norm = attention.kv_a_proj_with_mqa, attention.kv_a_layernorm
    if type(linear) is not torch.nn.Linear or "forward" in vars(linear):
        return None
    weight = linear.weight
    is_plain = type(weight) is torch.nn.Parameter and weight.device.type != "meta"
    is_one_dtype = getattr(getattr(norm, "weight", None), "dtype", None) == weight.dtype
    return weight if is_plain and is_one_dtype else None


def _allocate(makers: Sequence[Callable[[], PagedLayer]], tokens: str) -> list[PagedLayer]:
    """The layers, or an error that says what they are for."""
    try:
        return [make() for make in makers]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        # The CPU's allocator has no error of its own, nor has a size that no integer holds.
        texts = ("memory: you tried to allocate", "size calculation overflowed")
        if not isinstance(error, torch.OutOfMemoryError) and not any(t in reason for t in texts):
            raise
        raise torch.OutOfMemoryError(
            f"PagedCache: no memory for {tokens} in {len(makers)} layers; make batch_size or "
            f"max_cache_len smaller ({reason})"
        ) from error


def _check_memory(
    memory: PagedCache,
    kinds: Sequence[bool],
    num_pages: int,
    facts: GlmDsaConfig,
    dtype: torch.dtype,
    is_fp8: bool,
    device: torch.device | str | int | None,
) -> None:
    """Raise for a memory that does not hold such layers: a larger part of it would move it."""
    if not isinstance(memory, PagedCache):
        raise ValueError(f"PagedCache: memory must be another PagedCache, got {describe(memory)}")
    index_dtype = torch.uint8 if is_fp8 else dtype
    key_width = key_page_bytes(facts.index_head_dim) if is_fp8 else facts.index_head_dim
    expected = [
        (facts.latent_dim, dtype, key_width if is_full else None, index_dtype if is_full else None)
        for is_full in kinds
    ]
    found = [
        (
            layer.latent_pages.shape[-1],
            layer.latent_pages.dtype,
            None if layer.key_pages is None else layer.key_pages.shape[-1],
            None if layer.key_pages is None else layer.key_pages.dtype,
        )
        for layer in memory.layers
    ]
    if found != expected:
        raise ValueError(
            f"PagedCache: memory must be a cache of the same layers; expected {len(expected)} of "
            f"(latent width, dtype, key width, dtype) {list(dict.fromkeys(expected))}, found "
            f"{len(found)} of {list(dict.fromkeys(found))}"
        )
    wanted = torch.empty(0, device=device).device
    if memory.lengths.device != wanted:
        raise ValueError(f"PagedCache: memory is on {memory.lengths.device}, expected {wanted}")
    if memory.num_pages < num_pages:
        raise ValueError(
            f"PagedCache: {num_pages} pages are needed, memory has {memory.num_pages}; make it "
            "first, and larger"
        )


def _layer_on(layer: PagedLayer, num_pages: int, batch_size: int) -> PagedLayer:
    """A layer on the first pages of another one. No views: they would be graph inputs of a base."""

    def part(pages: torch.Tensor) -> torch.Tensor:
        shape = (num_pages, *pages.shape[1:])
        return pages.new_empty(0).set_(pages.untyped_storage(), 0, shape, pages.stride())

    keys = None if layer.key_pages is None else part(layer.key_pages)
    return PagedLayer(part(layer.latent_pages), keys, batch_size)


def _check_dtypes(dtype: torch.dtype, index_dtype: torch.dtype | None) -> None:
    if dtype not in _DTYPES:
        is_narrow = isinstance(dtype, torch.dtype) and dtype.itemsize == 1
        raise UnsupportedError(
            "PagedCache: latents are torch.float32, torch.bfloat16 or torch.float16, got "
            f"dtype={dtype!r}"
            + ("; only index keys can be FP8: index_dtype=torch.float8_e4m3fn" if is_narrow else "")
        )
    if index_dtype not in (None, dtype, FP8):
        raise UnsupportedError(
            f"PagedCache: index keys are in dtype ({dtype}) or torch.float8_e4m3fn, "
            f"got index_dtype={index_dtype!r}"
        )


def _integers(where: str, values: Any) -> torch.Tensor:
    """Values as an int64 tensor on the CPU; ValueError where they are not integers."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{where}: expected integers, got {values!r}") from None
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        raise ValueError(f"{where}: expected integers, got {values!r}")
    return tensor.to(torch.int64)
