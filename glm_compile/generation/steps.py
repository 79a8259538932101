"""The model's and the MTP layer's forwards as the loop calls them, eager or compiled.

Each has few shapes: the prompt (dynamic length), a verify step (S = 1 + drafts), a decode step
(S = 1), a draft step. Masks are made inside the compiled function from the cache's lengths, so that
their meaning is known to the backend; positions are tensors, so that no step recompiles.

B batch, S query tokens, C hidden, K selected tokens, X width of a cached row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from glm_compile.backend import glm
from glm_compile.cache import DraftSeed, PagedCache
from glm_compile.early import check_options, find_wrapper
from glm_compile.errors import UnsupportedError
from glm_compile.generation.graphs import GraphedIteration, GraphStore
from glm_compile.model_facts import cache_argument, mask_dtype
from glm_compile.mtp import select_row
from glm_compile.ops.paged_cache import PAGE_SIZE

# Compiled functions of one compiled model are found again through this attribute of its compiled
# call; those of an MTP layer through the layer's, so that they go with it.
_STEPS_ATTRIBUTE = "_glm_compile_steps"
# Blocks of at most so many drafts share their steps.
LEAST_DRAFTS = 8
# Short calls share one capacity.
MIN_COMPILED_CAPACITY = 256


@dataclass(frozen=True)
class Compiler:
    """How the user's model was compiled, so that the steps are compiled alike.

    Attributes:
        owner: the user's compiled callable.
        backend: what `torch.compile` calls with a graph, options bound.
        options: the backend's options as given.
    """

    owner: Any
    backend: Callable
    options: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """Whether it is this package's backend."""
        return is_own(self.backend)

    def __call__(self, step: Callable) -> Callable:
        """Compile one step; sizes are static unless they are marked."""
        # Dynamo counts graphs per code object, and closures of one function share theirs.
        code = step.__code__.replace()
        own = types.FunctionType(
            code, step.__globals__, step.__name__, step.__defaults__, step.__closure__
        )
        return torch.compile(own, backend=self.backend, fullgraph=True, dynamic=False)


def is_own(backend: Any) -> bool:
    """Whether it is this package's backend, bare or in torch's wrapper."""
    function = getattr(backend, "compiler_fn", backend)
    return getattr(function, "__module__", None) == glm.__module__


def unwrap_compiled(model: Any) -> tuple[Any, Compiler | None]:
    """The plain model, and its compiler if it is compiled.

    Seen are `torch.compile(model)`, `model.compile()` and a compiled `model.forward`.

    Raises:
        ValueError: options or a mode that this package's backend would refuse.
    """
    if hasattr(model, "_orig_mod"):
        return model._orig_mod, _compiler_of(model.forward, getattr(model, "dynamo_ctx", None))
    call = getattr(model, "_compiled_call_impl", None)
    if call is None:
        forward = vars(model).get("forward")
        call = forward if hasattr(forward, "_torchdynamo_orig_callable") else None
    return model, None if call is None else _compiler_of(call, None)


def _compiler_of(call: Any, context: Any) -> Compiler:
    """Follow torch's chain of wrappers to the object that holds backend and options."""
    candidates = [getattr(context, "callback", None)]
    candidates += [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    for candidate in candidates:
        if (wrapper := find_wrapper(candidate)) is None:
            continue
        keywords = getattr(wrapper, "kwargs", {})
        options = keywords.get("options") or {}
        if is_own(wrapper):
            checked = check_options(keywords)
            options = options if isinstance(options, Mapping) else dataclasses.asdict(checked)
        return Compiler(call, wrapper, dict(options))
    raise UnsupportedError(
        "generate: cannot find the backend of the compiled model with torch "
        f"{torch.__version__}; "
        'pass the plain model, or torch.compile(model, backend="glm")'
    )


class TargetSteps:
    """Forwards of the model: prompt, and verify or decode.

    Calls write into the cache at its lengths and do not advance them.

    Attributes:
        graphs: captured iterations without an MTP layer.
    """

    def __init__(self, model: Any, compiler: Compiler | None) -> None:
        self.model = model
        self.graphs: set[GraphedIteration] = set()
        decoder, head = model.model, model.lm_head
        cache_name = cache_argument()

        def forward(ids_BS: torch.Tensor, cache: PagedCache) -> torch.Tensor:
            mask = cache.causal_mask(ids_BS.shape[1], mask_dtype(model.config, head.weight.dtype))
            outputs = decoder(
                input_ids=ids_BS,
                attention_mask={"indexed_attention": mask},
                position_ids=_positions(ids_BS, cache),
                use_cache=True,
                **{cache_name: cache},
            )
            return outputs.last_hidden_state

        def prompt(
            ids_BS: torch.Tensor, row_B: torch.Tensor, cache: PagedCache
        ) -> tuple[torch.Tensor, torch.Tensor]:
            hidden_BSC = forward(ids_BS, cache)
            return hidden_BSC, head(select_row(hidden_BSC, row_B)).squeeze(1)

        def verify(ids_BS: torch.Tensor, cache: PagedCache) -> tuple[torch.Tensor, torch.Tensor]:
            hidden_BSC = forward(ids_BS, cache)
            return hidden_BSC, head(hidden_BSC)

        #: (ids [B,S], row [B], cache) -> hidden [B,S,C] after the final norm, logits of the row
        #: [B,V]
        self.prompt = _dynamic(compiler, prompt)
        #: (ids [B,S], cache) -> hidden [B,S,C], logits [B,S,V]
        self.verify = _static(compiler, verify)


class MtpSteps:
    """Forwards of the MTP layer: extend (prompt and block) and draft.

    `extend` writes the layer's rows at the cache's lengths; nothing advances them.

    Args:
        is_index_shared: whether draft steps share the selection of a row, whose latents `extend`
            then reads for all of them, and makes the rotary embeddings of all of them.
        num_drafts: most drafts of a block.

    Attributes:
        graphs: captured iterations with this layer.
    """

    def __init__(
        self,
        mtp: Any,
        compiler: Compiler | None,
        is_index_shared: bool,
        num_drafts: int = LEAST_DRAFTS,
    ) -> None:
        self.mtp = mtp
        self.graphs: set[GraphedIteration] = set()
        self.is_index_shared = is_index_shared

        def run_extend(
            ids_BS: torch.Tensor, hidden_BSC: torch.Tensor, row_B: torch.Tensor, cache: PagedCache
        ) -> tuple[torch.Tensor, ...]:
            num_tokens = ids_BS.shape[1]
            positions_BS = _positions(ids_BS, cache)
            embeddings: Any = None
            draft_embeddings: tuple[torch.Tensor, ...] = ()
            if is_index_shared:
                # Those of the draft steps with them: one launch, and none in each of the steps.
                last_B1 = (cache.lengths + row_B)[:, None]
                steps_X = torch.arange(1, num_drafts, device=ids_BS.device)
                positions_BY = torch.cat([positions_BS, last_B1 + steps_X], dim=1)
                tables = mtp.embed_positions(positions_BY, hidden_BSC)
                embeddings = tuple(table_BYP[:, :num_tokens] for table_BYP in tables)
                draft_embeddings = tuple(table_BYP[:, num_tokens:] for table_BYP in tables)
            # Of other rows the cache takes what it needs; nobody reads what they predict.
            hidden_B1C, topk_BSK = mtp.extend(
                ids_BS,
                hidden_BSC,
                positions_BS,
                None,
                cache,
                row_B=row_B,
                position_embeddings=embeddings,
            )
            seed: tuple[torch.Tensor, ...] = ()
            if is_index_shared:
                # Ahead of the head, whose weights stream in meanwhile.
                seed = mtp.gather_seed(topk_BSK, cache, cache.lengths, row_B)
            return hidden_B1C, mtp.compute_logits(hidden_B1C), *seed, *draft_embeddings

        # Two functions, so that neither counts as a recompilation of the other.
        def extend(
            ids_BS: torch.Tensor, hidden_BSC: torch.Tensor, row_B: torch.Tensor, cache: PagedCache
        ) -> tuple[torch.Tensor, ...]:
            return run_extend(ids_BS, hidden_BSC, row_B, cache)

        def extend_prompt(
            ids_BS: torch.Tensor, hidden_BSC: torch.Tensor, row_B: torch.Tensor, cache: PagedCache
        ) -> tuple[torch.Tensor, ...]:
            return run_extend(ids_BS, hidden_BSC, row_B, cache)

        def draft(
            ids_B1: torch.Tensor,
            hidden_B1C: torch.Tensor,
            latents_BKX: torch.Tensor,
            rows_BK: torch.Tensor,
            cos_B1P: torch.Tensor,
            sin_B1P: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            seed = DraftSeed(latents_BKX, rows_BK)
            hidden_B1C = mtp.draft(
                ids_B1, hidden_B1C, None, seed, position_embeddings=(cos_B1P, sin_B1P)
            )
            return hidden_B1C.contiguous(), mtp.compute_logits(hidden_B1C)

        #: (ids [B,S] one token ahead, hidden [B,S,C], row [B], cache)
        #: -> hidden of the row [B,1,C], its logits [B,1,V], and with a shared index its seed and
        #: the cosines and sines [B,X,P] of the draft steps behind it
        self.extend = _static(compiler, extend)
        self.extend_prompt = _dynamic(compiler, extend_prompt)
        #: (draft [B,1], hidden [B,1,C], seed [B,K,X] and [B,K], cosines and sines [B,1,P])
        #: -> hidden [B,1,C], logits [B,1,V]
        self.draft = _static(compiler, draft)


class _MtpStepsOfModels(weakref.WeakKeyDictionary):
    """What an MTP layer keeps: for the `Steps` of each model that it drafts for, its own by kind.

    The layer has it, and nobody else: compiled functions and graphs hold the layer, and whoever had
    them would keep a layer that its user has dropped. Nor does anything in it hold the model's
    `Steps`, which go with the model: a value that led back to its key would never leave. A copy of
    the layer starts without.
    """

    def __init__(self, layer: Any = None) -> None:
        super().__init__()
        self._layer = None if layer is None else weakref.ref(layer)

    @classmethod
    def of(cls, layer: Any) -> _MtpStepsOfModels:
        """That of this layer; one that a shallow copy took along is the other layer's."""
        found = vars(layer).get(_STEPS_ATTRIBUTE)
        if found is None or found._layer is None or found._layer() is not layer:
            found = vars(layer)[_STEPS_ATTRIBUTE] = cls(layer)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> _MtpStepsOfModels:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Steps:
    """Everything that one model, compiled or not, keeps between calls.

    Compiled steps exist once per batch size and cache capacity, which are shapes in their graphs:
    Dynamo allows a function only so many graphs.

    Attributes:
        compiler: None for an eager model, which keeps nothing.
    """

    def __init__(self, model: Any, compiler: Compiler | None) -> None:
        self.model = model
        self.compiler = compiler
        self._target: dict[Any, TargetSteps] = {}
        # Caches of calls so far, all on the memory of one; and those of calls that are open.
        self._caches: list[PagedCache] = []
        self._open: list[list[PagedCache]] = []
        #: captured iterations
        self.graphs = GraphStore()

    @classmethod
    def of(cls, model: Any, compiler: Compiler | None) -> Steps:
        """Steps of this model; a compiled model gets the same ones each time."""
        if compiler is None:
            return cls(model, None)
        steps = getattr(compiler.owner, _STEPS_ATTRIBUTE, None)
        if steps is None or steps.model is not model:
            steps = cls(model, compiler)
            setattr(compiler.owner, _STEPS_ATTRIBUTE, steps)
        return steps

    def for_target(self, cache: PagedCache) -> TargetSteps:
        """Forwards of the model on such a cache."""
        key = (cache.batch_size, cache.max_cache_len)
        if key not in self._target:
            self._target[key] = TargetSteps(self.model, self.compiler)
        return self._target[key]

    def for_mtp(
        self, mtp: Any, cache: PagedCache, is_index_shared: bool, num_drafts: int
    ) -> MtpSteps:
        """Forwards of an MTP layer on such a cache, for blocks of that many drafts."""
        num_drafts = max(LEAST_DRAFTS, 1 << (num_drafts - 1).bit_length())
        kept: dict[Any, MtpSteps] = _MtpStepsOfModels.of(mtp).setdefault(self, {})
        key = (cache.batch_size, cache.max_cache_len, is_index_shared, num_drafts)
        if key not in kept:
            kept[key] = MtpSteps(mtp, self.compiler, is_index_shared, num_drafts)
        return kept[key]

    @property
    def min_prompt_width(self) -> int:
        """A dynamic size of one is another graph: compiled prompts have two columns or more."""
        return 1 if self.compiler is None else 2

    @contextmanager
    def borrow_cache(
        self, batch_size: int, num_tokens: int, num_mtp_layers: int
    ) -> Iterator[PagedCache]:
        """An empty cache of at least this capacity, for one call.

        Compiled steps get powers of two, and the cache of an earlier call where it is large enough;
        all of them share one memory. The number of layers is a shape as well: the MTP layer has its
        place in each of their caches. A call inside another one gets a cache of its own.
        """
        if self.compiler is None:
            yield self._make_cache(batch_size, num_tokens, num_mtp_layers)
            return
        # Nobody else finds them meanwhile.
        caches, self._caches = self._caches, []
        self._open.append(caches)
        try:
            cache = self._find_cache(caches, batch_size, num_tokens)
            cache.reset()
            yield cache
        finally:
            self._open = [others for others in self._open if others is not caches]
            self._caches = caches
            self._drop_graphs()

    def _find_cache(self, caches: list[PagedCache], batch_size: int, num_tokens: int) -> PagedCache:
        """One of the caches, or a new one among them."""
        fitting = [
            cache
            for cache in caches
            if cache.batch_size == batch_size and cache.max_cache_len >= num_tokens
        ]
        if fitting:
            return min(fitting, key=lambda cache: cache.max_cache_len)
        capacity = compiled_capacity(num_tokens)
        memory = caches[0].memory if caches else None
        if memory is not None and memory.num_pages < batch_size * -(-capacity // PAGE_SIZE):
            # The old memory goes first, and what holds it: both need not fit.
            caches.clear()
            memory = None
            self._drop_graphs()
        caches.append(self._make_cache(batch_size, capacity, 1, memory))
        return caches[-1]

    def _drop_graphs(self) -> None:
        """Give up the graphs on memory that nobody has any more."""
        self.graphs.keep(cache.memory for caches in (*self._open, self._caches) for cache in caches)

    def _make_cache(
        self,
        batch_size: int,
        num_tokens: int,
        num_mtp_layers: int,
        memory: PagedCache | None = None,
    ) -> PagedCache:
        model = self.model
        is_fp8 = (self.compiler.options if self.compiler else {}).get("indexer_dtype") == "fp8"
        cache = PagedCache(
            model.config,
            batch_size,
            num_tokens,
            dtype=model.lm_head.weight.dtype,
            index_dtype=torch.float8_e4m3fn if is_fp8 else None,
            device=model.model.embed_tokens.weight.device,
            num_mtp_layers=num_mtp_layers,
            memory=memory,
        )
        cache.auto_advance = False
        return cache


def compiled_capacity(num_tokens: int) -> int:
    """Tokens of a sequence that a new cache of compiled steps has room for."""
    return max(MIN_COMPILED_CAPACITY, 1 << (num_tokens - 1).bit_length())


def _positions(ids_BS: torch.Tensor, cache: PagedCache) -> torch.Tensor:
    """Position of each token of a step that is written at the cache's lengths, int64 [B,S]."""
    offsets_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    return cache.lengths[:, None].to(torch.long) + offsets_S


def _static(compiler: Compiler | None, step: Callable) -> Callable:
    """Compile with every size static."""
    return step if compiler is None else compiler(step)


def _dynamic(compiler: Compiler | None, step: Callable) -> Callable:
    """Compile with a dynamic number of query tokens: axis 1 of ids [B,S] and hidden [B,S,C]."""
    if compiler is None:
        return step
    compiled = compiler(step)

    def call(ids_BS: torch.Tensor, *rest: Any) -> Any:
        for tensor in (ids_BS, *rest):
            # Not the row index [B], whose only axis is the batch.
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                torch._dynamo.mark_dynamic(tensor, 1)
        return compiled(ids_BS, *rest)

    return call
