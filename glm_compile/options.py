"""Options of the backend: one frozen record, also taken as a dict (`torch.compile(options=)`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from glm_compile.arguments import closest, describe
from glm_compile.errors import UnsupportedError
from glm_compile.fx_passes.base import INDEXER_DTYPES

INNER_COMPILERS = ("inductor", "eager", "tensorrt")
# Report keys, in the order in which the report lists them; each can be disabled. Without `mask`
# nothing tells which keys an indexer or an attention call may see, so their rewrites go with it.
PASS_NAMES = (
    "mask",
    "indexer_prologue",
    "indexer_topk",
    "sparse_mla",
    "merge_linears",
    "bf16_linear",
    "rms_norm_linear",
    "moe_router",
    "moe_experts",
)
NEEDS_MASK = ("indexer_prologue", "indexer_topk", "sparse_mla")


T = TypeVar("T")


class _Default(str):
    """A choice that nobody made: equal to its text, and told apart by its type."""

    __slots__ = ()


def _naming_unknown_fields(cls: type[T]) -> type[T]:
    """The dataclass, whose constructor names the known fields for one that it does not know."""
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        _check_names(kwargs, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        init(self, *args, **kwargs)

    cls.__init__ = checked_init  # type: ignore[method-assign,assignment]
    return cls


@_naming_unknown_fields
@dataclass(frozen=True)
class CompileOptions:
    """What a user can choose about one compilation.

    Args:
        indexer_dtype: dtype of the index keys and of the tier that scores them. `auto` is the exact
            tier in the model's dtype. `fp8` changes numbers and needs a `PagedCache` whose index
            keys are FP8; `bf16` and `fp32` are the exact tier and demand a model of that dtype.
        inner: who compiles the graph after the passes. `inductor` generates code, `eager` runs the
            graph node by node (no C++ compiler needed, starts fast). Left alone, a CPU machine
            without a C++ compiler uses `eager` and says so.
        strict: raise `MatchError` when a pass matched fewer or more regions than the model has.
            With False one warning says it.
        disable: names of passes to leave out, with their expectation.
        deterministic: bf16 linears whose result for a row depends neither on the number of rows
            nor on the others. Repeated runs are equal either way.

    Raises:
        ValueError: an unknown field, or a value that is not among the known ones; the message names
            them.
        UnsupportedError: `inner="tensorrt"`, which this version cannot serve.
    """

    indexer_dtype: str = "auto"
    inner: str = _Default("inductor")
    strict: bool = True
    disable: tuple[str, ...] = ()
    deterministic: bool = False

    def __post_init__(self) -> None:
        _check_choice("indexer_dtype", self.indexer_dtype, INDEXER_DTYPES)
        _check_choice("inner", self.inner, INNER_COMPILERS)
        for name in ("strict", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"option {name!r}: expected True or False, got {getattr(self, name)!r}"
                )
        is_names = isinstance(self.disable, Collection) and not isinstance(self.disable, str)
        if not is_names or not all(isinstance(name, str) for name in self.disable):
            raise ValueError(
                f"option 'disable': expected a tuple of pass names, got {self.disable!r}"
            )
        object.__setattr__(self, "disable", tuple(self.disable))
        for name in self.disable:
            _check_choice("disable", name, PASS_NAMES)
        if self.inner == "tensorrt":
            raise UnsupportedError(
                "option 'inner': 'tensorrt' is not supported by this version; "
                "use 'inductor' or 'eager'"
            )

    @property
    def disabled(self) -> frozenset[str]:
        """Names in `disable`, with those that cannot work without them."""
        return frozenset(self.disable) | frozenset(NEEDS_MASK if "mask" in self.disable else ())

    @property
    def is_inner_explicit(self) -> bool:
        """Whether somebody asked for this inner compiler, so that no other may replace it."""
        return not isinstance(self.inner, _Default)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | CompileOptions | None) -> CompileOptions:
        """Build from the dict form; an instance and None (all defaults) pass through.

        Raises:
            ValueError: an unknown option; the message names the known ones and the closest.
        """
        if options is None:
            return cls()
        if isinstance(options, CompileOptions):
            return options
        if not isinstance(options, Mapping):
            raise ValueError(f"options: expected a dict or CompileOptions, got {describe(options)}")
        _check_names(options, [field.name for field in fields(cls)])
        return cls(**options)


def check_mode(mode: str | None) -> None:
    """Accept `torch.compile(mode=...)` None and "default", refuse the others with the reason.

    Inductor's modes choose its CUDA graphs and its tuning for one graph; here a model is several
    compiled kinds that write into caches.

    Raises:
        ValueError: any other mode.
    """
    if mode not in (None, "default"):
        raise ValueError(
            f"mode={mode!r}: the glm backend takes no mode but 'default'; its kernels need no "
            "tuning, and it captures no CUDA graphs of its own: the model runs as several compiled "
            "kinds that write into caches"
        )


def fp8_cache_error() -> UnsupportedError:
    """What the FP8 tier over a cache without FP8 index keys is refused with."""
    return UnsupportedError(
        "indexer_dtype='fp8' needs a PagedCache whose index keys are FP8 "
        "(PagedCache(..., index_dtype=torch.float8_e4m3fn)); this step's cache stores them in the "
        "model's dtype. Use such a cache, or indexer_dtype='auto'"
    )


def _check_names(names: Iterable[Any], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"unknown option {name!r}{closest(name, known)}; known options: {', '.join(known)}"
            )


def _check_choice(option: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        names = ", ".join(repr(k) for k in known)
        raise ValueError(
            f"option {option!r}: expected one of {names}, got {value!r}{closest(value, known)}"
        )
