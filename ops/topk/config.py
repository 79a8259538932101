"""How the top-k kernels split their work: Triton's by a rule, CuTe's by a measured table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TopkConfig:
    """Shape of one launch of the Triton kernels. Bins and rounds are fixed: four digits of 8 bits.

    Attributes:
        block: keys a program ranks at a time; at most 16384, since two counts share 32 bits.
        num_warps: warps of a program.
        num_slices: programs a row is split over, a power of two; 1 = one launch, else five.
    """

    block: int
    num_warps: int
    num_slices: int

    def __post_init__(self) -> None:
        if self.block > 16384 or self.block & (self.block - 1):
            raise ValueError(f"topk: block must be a power of two up to 16384, got {self.block}")
        if self.num_slices & (self.num_slices - 1):
            raise ValueError(f"topk: num_slices must be a power of two, got {self.num_slices}")


# Five launches cost about 6 us more than one; a row this short is ranked faster by one program.
_ONE_PROGRAM_KEYS = 16384
_MAX_SLICES = 32


def default_config(num_rows: int, num_keys: int, num_multiprocessors: int) -> TopkConfig:
    """Split rows only while that fills the device and a slice still holds several blocks."""
    num_slices = 1
    if num_keys > _ONE_PROGRAM_KEYS:
        while (
            num_slices < _MAX_SLICES
            and num_rows * num_slices < num_multiprocessors
            and num_keys > num_slices * 4096
        ):
            num_slices *= 2
    return TopkConfig(block=2048, num_warps=8, num_slices=num_slices)


# Largest k of the CuTe kernel, and shared memory that a block may have on sm_90.
MAX_CUTE_K = 2048
_MAX_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class Variant:
    """What a CuTe kernel is specialised for.

    Attributes:
        source: `registers` or `filtered`; see the kernel's docstring.
        cluster: blocks a row, a power of two up to 16.
        num_threads: threads a block.
        keys_per_thread: of the slice in registers, or loaded at once when streaming.
        bin_bits: bits that a round of the histogram tells apart.
        slice_keys: keys of the longest slice.
        buffer_keys: keys that may be selected and fit in shared memory; 0: they stay in registers.
        sampled_keys: keys that a thread looks at to estimate a bound, before it streams.
        is_vector: rows start at 16 bytes and end at a multiple of 4 keys.
        has_starts, has_plan, has_table: which optional arguments are given.
        lengths_64, starts_64, table_64: int64 instead of int32.
        is_causal, repeat_last: see `topk_select`.
    """

    source: str
    cluster: int
    num_threads: int
    keys_per_thread: int
    bin_bits: int
    slice_keys: int
    buffer_keys: int = 0
    sampled_keys: int = 4
    is_vector: bool = True
    has_starts: bool = False
    has_plan: bool = False
    has_table: bool = False
    lengths_64: bool = False
    starts_64: bool = False
    table_64: bool = False
    is_causal: bool = False
    repeat_last: bool = False

    def __post_init__(self) -> None:
        if self.source == "registers":
            held = self.num_threads * self.keys_per_thread
            if self.slice_keys > held:
                raise ValueError(
                    f"topk: a block holds {held} keys, got slices of {self.slice_keys}"
                )
            if 0 < self.buffer_keys < MAX_CUTE_K + 32:
                raise ValueError(
                    f"topk: a buffer must hold the best {MAX_CUTE_K} and 32 candidates, got "
                    f"{self.buffer_keys}"
                )
        elif self.buffer_keys < MAX_CUTE_K + 32 * self.keys_per_thread:
            raise ValueError(
                f"topk: a buffer must hold the best {MAX_CUTE_K} and the "
                f"{32 * self.keys_per_thread} keys that a warp loads at once, got "
                f"{self.buffer_keys}"
            )
        if (shared := self.shared_bytes) > _MAX_SHARED_BYTES:
            raise ValueError(f"topk: {shared} bytes of shared memory do not fit in a block")

    @property
    def max_keys(self) -> int:
        """Keys of the longest row."""
        return self.cluster * self.slice_keys

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, as the kernel allocates it."""
        in_cluster = self.cluster if self.cluster > 1 else 0
        words = (2 if in_cluster else 1) * (1 << self.bin_bits) + in_cluster * (1 << self.bin_bits)
        # Scans, state, candidates; barriers, headers and the candidates of the cluster.
        words += 8 * 32 + 8 + 2 * 32 + (4 if in_cluster else 0) + in_cluster * (2 + 2 * 32)
        if self.buffer_keys:
            words += -(-self.slice_keys // 32) + 2 * self.buffer_keys
        return 4 * words

    @property
    def blocks_per_processor(self) -> int:
        """Blocks that a multiprocessor is to run at once: several where a block is a row."""
        if self.cluster > 1 or self.source == "registers":
            return 1
        by_memory = (_MAX_SHARED_BYTES + 1024) // (self.shared_bytes + 1024)
        return max(1, min(2048 // self.num_threads, by_memory))


def _registers(
    cluster: int, num_threads: int, keys_per_thread: int, bin_bits: int = 8, buffer_keys: int = 0
) -> Variant:
    slice_keys = num_threads * keys_per_thread
    return Variant(
        "registers", cluster, num_threads, keys_per_thread, bin_bits, slice_keys, buffer_keys
    )


def _filtered(cluster: int, num_threads: int, keys_per_thread: int, slice_keys: int) -> Variant:
    return Variant("filtered", cluster, num_threads, keys_per_thread, 8, slice_keys, 8192)


def _row_a_block(slice_keys: int, num_threads: int = 512) -> Variant:
    return Variant("filtered", 1, num_threads, 16, 11, slice_keys, 8192, 8)


_LONG = (
    _registers(16, 1024, 16, 8, 8192),
    _filtered(16, 1024, 8, 1 << 16),
    # A cache of 2^20 tokens has room for the drafts of its last step as well.
    _filtered(16, 1024, 8, 1 << 17),
)

# (rows up to which a part of the table holds, its variants by rising `max_keys`). Few rows take the
# largest cluster of which all are on the device at once: an H200 holds 7 clusters of 16 blocks.
# Measured on one NVIDIA H200, 2026-11-30, scores hot, by the method of
# `python -m glm_compile.ops.topk.tune`; in microseconds, where the shape itself was measured.
CUTE_TABLE: tuple[tuple[int | None, tuple[Variant, ...]], ...] = (
    (
        7,
        (
            _registers(8, 256, 4),  # 6 rows of 8K: 3.2
            _registers(8, 512, 8),  # 6 rows of 32K: 4.3
            _registers(16, 256, 20, 8, 4096),  # 6 rows of 80K: 5.2
            _registers(16, 512, 16, 8, 4096),  # 6 rows of 128K: 6.2
            *_LONG,  # 6 rows of 256K: 7.6, of 1M: 13.1; constant ones 18.8 and 22.0
        ),
    ),
    (
        16,
        (
            _registers(8, 256, 4),
            _registers(8, 512, 8),
            _registers(8, 512, 20, 8, 4096),  # 6 rows of 80K: 5.3
            _registers(8, 512, 32, 8, 4096),  # 16 rows of 128K: 14.1
            *_LONG,
        ),
    ),
    (
        66,
        (
            _registers(4, 512, 4),
            _registers(4, 512, 16),
            _registers(8, 512, 20, 8, 4096),
            _registers(8, 512, 32, 8, 4096),
            *_LONG,
        ),
    ),
    (
        None,
        (
            _registers(1, 512, 16, 11),
            _registers(1, 1024, 16, 11),
            _row_a_block(1 << 17),  # 2048 rows of 128K: 301, 3.6 TB/s
            _row_a_block(1 << 18),
            _row_a_block(1 << 19),
            _row_a_block(1 << 20, 1024),  # 2048 rows of 1M: 2379; a cluster a row 4216
            *_LONG[2:],
        ),
    ),
)
# Longest row that every part of the table has a variant for.
MAX_CUTE_KEYS = min(variants[-1].max_keys for _, variants in CUTE_TABLE)


def default_variant(num_rows: int, num_keys: int) -> Variant:
    """Shape of the CuTe launch for rows of `num_keys` keys, at most `MAX_CUTE_KEYS`."""
    for max_rows, variants in CUTE_TABLE:
        if max_rows is None or num_rows <= max_rows:
            return next(variant for variant in variants if num_keys <= variant.max_keys)
    raise AssertionError("the table's last part takes any number of rows")
