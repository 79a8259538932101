"""An iteration as one CUDA graph: captured once, replayed for every block.

The first iteration of a call that finds no graph runs eagerly on a side stream. That is a real
iteration of the text, and the warm-up that a capture needs: kernels are compiled, tables are made.
The second one is captured (which runs nothing) and replayed. A later call finds the graph again if
it needs the same shapes and processors, on the same cache, with all weights where they were.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from glm_compile.cache import PagedCache
from glm_compile.capacity import note_held
from glm_compile.errors import UnsupportedError
from glm_compile.generation.device_processors import DeviceProcessors
from glm_compile.generation.iteration import Block, Iteration
from glm_compile.generation.request import Request
from glm_compile.generation.state import needed_width, padded_eos

if TYPE_CHECKING:
    from glm_compile.generation.steps import MtpSteps, TargetSteps

# Graphs of one model that are kept: of the last kinds of calls, while their states are not large
# (drafts that are sampled keep their distributions; what else a graph holds is not counted).
MAX_GRAPHS = 32
MAX_STATE_BYTES = 1 << 30


class GraphedIteration:
    """An iteration that is captured when it has run once; one graph for each pair of draft lengths.

    Args:
        keeps_block: whether scores and logits are asked for; they are copied out of the graph.
    """

    def __init__(self, iteration: Iteration, keeps_block: bool, pool: Any = None) -> None:
        self.iteration = iteration
        self.keeps_block = keeps_block
        self.num_captures = 0
        self.pool = pool
        self._device = iteration.cache.lengths.device
        self._stream = torch.cuda.Stream(device=self._device)
        # By (drafts to verify, drafts to propose); None for what has run once.
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Block | None] | None] = {}
        self._addresses: tuple[int, ...] | None = None
        #: the steps that keep it alive
        self.owner: weakref.ref[TargetSteps | MtpSteps] | None = None

    def join(self, target: TargetSteps, mtp: MtpSteps | None) -> None:
        """Take the steps for a call."""
        self.iteration.target, self.iteration.mtp = target, mtp

    def leave(self) -> None:
        """Let the steps go until the next call.

        The MTP layer's have this object, and would keep a model that its user has dropped.
        """
        self.iteration.target = self.iteration.mtp = None

    def check_addresses(self) -> None:
        """Forget the graph if a weight or a page of the cache is not where it was."""
        addresses = addresses_of(self.iteration)
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = None

    def run(self, num_verified: int | None = None, num_proposed: int | None = None) -> Block | None:
        """Launch one iteration on the current stream; scores and logits if they are kept."""
        lengths = num_verified, num_proposed
        with torch.cuda.device(self._device):
            if lengths not in self._graphs:
                return self._warm_up(lengths)
            captured = self._graphs[lengths]
            if captured is None:
                captured = self._graphs[lengths] = self._capture(lengths)
            graph, block = captured
            graph.replay()
            # The replay advances the lengths unseen.
            note_held(self.iteration.cache.lengths, None)
            if block is None:
                return None
            return Block(block.scores_BSV.clone(), block.logits_BSV.clone())

    def _warm_up(self, lengths: tuple[int | None, int | None]) -> Block:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            block = self.iteration.run(None, *lengths)
        current.wait_stream(self._stream)
        for tensor in (block.scores_BSV, block.logits_BSV):
            tensor.record_stream(current)
        # Its first run may have moved weights, under the graphs of other lengths.
        addresses = addresses_of(self.iteration)
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses
        self._graphs[lengths] = None
        return block

    def _capture(
        self, lengths: tuple[int | None, int | None]
    ) -> tuple[torch.cuda.CUDAGraph, Block | None]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_numbers = generator.clone_state()
        try:
            # Other threads (a streamer's reader) may go on using the device.
            with torch.cuda.graph(
                graph,
                pool=self.pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                block = self.iteration.run(None, *lengths)
        except BaseException as error:
            # A capture that breaks off leaves its stream, a generator that takes itself for
            # captured and refuses to draw, and an allocator that still serves the pool.
            torch.cuda.set_stream(current)
            generator.graphsafe_set_state(random_numbers)
            self._leave_pool()
            if not isinstance(error, Exception):
                raise
            raise UnsupportedError(_explain(error)) from error
        self.num_captures += 1
        return graph, block if self.keeps_block else None

    def _leave_pool(self) -> None:
        end = getattr(torch._C, "_cuda_endAllocateToPool", None)
        # It raises where the capture's own end has done it.
        with contextlib.suppress(RuntimeError):
            if end is not None and self.pool is not None:
                end(torch.cuda.current_device(), self.pool)


class GraphStore:
    """Graphs of one model's iterations, found again by what they depend on.

    They belong to the steps that they replay, and those of an MTP layer go with it.
    """

    def __init__(self) -> None:
        self._graphs: weakref.WeakValueDictionary[Any, GraphedIteration] = (
            weakref.WeakValueDictionary()
        )

    def keep(self, memories: Iterable[PagedCache]) -> None:
        """Give the graphs on other caches' memory up: they would keep it alive."""
        kept = {id(memory) for memory in memories}
        for key, graph in list(self._graphs.items()):
            if id(graph.iteration.cache.memory) not in kept:
                self._drop(key)

    def _put(self, key: Any, graph: GraphedIteration, owner: TargetSteps | MtpSteps) -> None:
        """Keep a graph as the last one; of two for the same work, that of a call inside goes."""
        self._drop(key)
        self._graphs[key] = graph
        graph.owner = weakref.ref(owner)
        owner.graphs.add(graph)

    def _drop(self, key: Any) -> GraphedIteration | None:
        """Give up a graph, and return it."""
        graph = self._graphs.pop(key, None)
        owner = None if graph is None or graph.owner is None else graph.owner()
        if owner is not None:
            owner.graphs.discard(graph)
        return graph

    def _pool_of(self, cache: PagedCache) -> Any:
        """The graphs' memory: one for each cache's, because calls on two may run side by side."""
        for graph in self._graphs.values():
            if graph.iteration.cache.memory is cache.memory:
                return graph.pool
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def borrow(
        self, request: Request, target: TargetSteps, mtp: MtpSteps | None, cache: PagedCache
    ) -> Iterator[GraphedIteration]:
        """An iteration for this call; a call inside another one gets one of its own."""
        width = max(needed_width(request), cache.max_cache_len)
        width = 1 << (width - 1).bit_length()
        assert isinstance(request.processor, DeviceProcessors)
        keeps_block = request.keeps_scores or request.keeps_logits
        key = (
            id(cache.memory),
            id(mtp),
            request.batch_size,
            cache.max_cache_len,
            request.num_drafts,
            request.do_sample,
            request.is_index_shared,
            keeps_block,
            width,
            padded_eos(request),
            request.processor.signature,
        )
        # Nobody else finds it meanwhile.
        graphed = self._drop(key)
        owner = target if mtp is None else mtp
        is_ours = graphed is not None and graphed.owner is not None and graphed.owner() is owner
        if graphed is None or not is_ours or graphed.iteration.cache is not cache:
            iteration = Iteration(request, target, mtp, cache, min_text_width=width)
            graphed = GraphedIteration(iteration, keeps_block, self._pool_of(cache))
        graphed.join(target, mtp)
        graphed.check_addresses()
        try:
            yield graphed
        finally:
            graphed.leave()
            self._put(key, graphed, owner)
            while len(self._graphs) > 1 and self._holds_too_much():
                self._drop(next(iter(self._graphs)))

    def _holds_too_much(self) -> bool:
        num_bytes = sum(graph.iteration.state.num_bytes() for graph in self._graphs.values())
        return len(self._graphs) > MAX_GRAPHS or num_bytes > MAX_STATE_BYTES


def addresses_of(iteration: Iteration) -> tuple[int, ...]:
    """Where the weights and the cache lie that a graph of this iteration reads and writes."""
    assert iteration.target is not None
    modules = [iteration.target.model]
    if iteration.mtp is not None:
        mtp = iteration.mtp.mtp
        owner = getattr(mtp, "_model", None)
        modules += [mtp] if owner is None or owner is iteration.target.model else [mtp, owner]
    cache = iteration.cache
    tensors = [cache.lengths, cache.block_table]
    for layer in cache.layers:
        tensors += (
            [layer.latent_pages]
            if layer.key_pages is None
            else [layer.latent_pages, layer.key_pages]
        )
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    return tuple(tensor.data_ptr() for tensor in tensors)


def _explain(error: BaseException) -> str:
    """What could not be captured: the innermost line outside torch, of the first error."""
    # The end of a broken capture raises an error of its own, with the cause behind it.
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    frames = traceback.extract_tb(first.__traceback__)
    own = [frame for frame in frames if "/torch/" not in frame.filename.replace("\\", "/")]
    place = own[-1] if own else frames[-1]
    where = f"{place.filename}:{place.lineno} in {place.name}: {place.line}"
    reason = str(first).strip().splitlines()[0] if str(first).strip() else type(first).__name__
    hint = "pass cuda_graph=False"
    if any("experts" in frame.name or "grouped_mm" in frame.name for frame in frames):
        hint = (
            "transformers' experts wait for the host here (in float32, for instance); load the "
            "model in bfloat16, compile it so that the pass moe_experts replaces them, or " + hint
        )
    return (
        f"generate: the iteration cannot be captured in a CUDA graph. {where} does what a capture "
        f"forbids, such as waiting for the device ({type(first).__name__}: {reason}); {hint}"
    )
