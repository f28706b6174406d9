"""Which backend runs a program: ``codetta.use_backend``, ``CODETTA_BACKEND``, or the device.

``auto`` takes the fastest backend that can run on the tensors' device: the fused one on a Hopper
GPU with QuACK installed, else the reference, which runs everywhere. Asking for one by name that
cannot run here is a named error and never a silent fallback.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from codetta.backends.layout import Tiling, default_tile
from codetta.errors import BackendUnavailable, UnknownBackend
from codetta.language.program import Program

if TYPE_CHECKING:
    from codetta.plan.plan import Plan

NAMES = ("auto", "reference", "cuda")
VARIABLE = "CODETTA_BACKEND"


class Backend(Protocol):
    """What the library operators need of a backend.

    Arrays are two-dimensional: a (M, K), b (K, N); operands in the program's order, tiles (M, w N),
    rows (1, w N), columns and indices (M, 1), scalars (1, 1), a rotary operand as two tensors, its
    table (P, rotary_dim) and its positions (M,). Results are fresh tensors, as laid out by
    :mod:`codetta.backends.layout`.

    ``into`` offers memory: by position in the list of results, a tensor, one of the operands, that
    nobody reads after this call. A backend may return it, overwritten, as that result if shape,
    strides and dtype agree and no element is written before all that depends on its old value has
    been computed. It may as well ignore the offer.
    ``binds``: it is a :class:`Binding`, too.
    """

    name: str
    binds: bool

    def gemm(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
        raw: bool,
        into: Mapping[int, Tensor] | None = None,
    ) -> list[Tensor]:
        """Run the program on the tiles of a @ b."""

    def pointwise(
        self,
        program: Program,
        operands: Sequence[Tensor],
        m: int,
        n: int,
        operand: torch.dtype,
        compute: torch.dtype,
        tile: tuple[int, int] | None,
        raw: bool,
        into: Mapping[int, Tensor] | None = None,
    ) -> list[Tensor]:
        """Run a program that has no accumulator."""

    def prepare(self, plan: Plan, weights: Sequence[Tensor]) -> Tensor:
        """The one output of a Plan over parameters; see :func:`codetta.plan.prepare.prepared`."""

    def gemm_accumulate_(self, target: Tensor, a: Tensor, b: Tensor) -> None:
        """target += a @ b, the product and the sum in target's dtype or fp32, the wider one."""

    def gemm_short_sum_(
        self,
        high: Tensor,
        low: Tensor,
        a: Tensor,
        b: Tensor,
        bits: int,
        first: bool,
        last: bool,
    ) -> None:
        """Add a @ b to a sum kept in 24 or 20 bits: in the memory of a matrix of bf16 and in
        ``low``, see :mod:`codetta.backends.short_sums`.

        Args:
            first: there is no sum yet, nothing is read.
            last: ``high`` becomes the sum rounded to nearest, ``low`` stays as it is. A product
                that is first and last needs no sum.
        """


class Bound(NamedTuple):
    """What runs a class of calls.

    Attributes:
        run: the tensors of a call -> its results.
        flat: which operands it takes with their elements in one dimension, or none for a number;
            the others are two-dimensional.
    """

    run: Callable[..., Any]
    flat: frozenset[int] = frozenset()


class Binding(Backend, Protocol):
    """A backend that looks up once what a class of calls runs.

    Each method takes the arguments of the one whose name it begins with, after that has run on
    them, and returns what it called for tensors of the same shapes, strides, dtypes, alignments and
    device. It launches nothing.
    """

    def setting(self) -> Hashable:
        """What else decides: whatever was bound under another setting is not to be called."""

    def can_bind(self) -> bool:
        """Not while a CUDA graph is captured, which nothing made in it outlives."""

    def gemm_bound(
        self,
        program: Program,
        a: Tensor,
        b: Tensor,
        operands: Sequence[Tensor],
        tile: tuple[int, int] | None,
        raw: bool,
        into: Mapping[int, Tensor] | None = None,
    ) -> Bound:
        """(a, b, operands) -> results."""

    def pointwise_bound(
        self,
        program: Program,
        operands: Sequence[Tensor],
        m: int,
        n: int,
        operand: torch.dtype,
        compute: torch.dtype,
        tile: tuple[int, int] | None,
        raw: bool,
    ) -> Bound:
        """(operands) -> results."""

    def prepare_bound(self, plan: Plan, weights: Sequence[Tensor]) -> Bound:
        """(weights) -> the output."""


# Set by use_backend; unset means the environment variable, read at each call so that tests and
# notebooks may change it, and then "auto".
_CHOSEN: ContextVar[str] = ContextVar("codetta_backend")


class use_backend:
    """Choose the backend, for good or for the duration of a ``with`` block.

        codetta.use_backend("reference")            # from here on, in this context
        with codetta.use_backend("reference"): ...  # in the block

    Names: 'auto' (by device, the default), 'reference' (plain PyTorch, any device), 'cuda' (fused).
    The environment variable ``CODETTA_BACKEND`` sets the default. Follows the rules of
    ``contextvars``: other threads and tasks are not affected.

    Raises:
        UnknownBackend: not one of the names.
        BackendUnavailable: the backend cannot run here.
    """

    def __init__(self, name: str) -> None:
        _check(name)
        self._token = _CHOSEN.set(name)

    def __enter__(self) -> use_backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CHOSEN.reset(self._token)


def chosen_backend() -> str:
    """The name in force: what use_backend set, else ``CODETTA_BACKEND``, else 'auto'."""
    return _CHOSEN.get(None) or _from_environment() or "auto"


# os.environ encodes the name at every look-up, which takes longer than all else that a call asks
# here; CPython keeps the encoded table in ``_data``.
_ENVIRONMENT: Any = getattr(os.environ, "_data", None)
_KEY: Any = os.environ.encodekey(VARIABLE)


def _from_environment() -> str | None:
    if _ENVIRONMENT is None or _KEY in _ENVIRONMENT:
        return os.environ.get(VARIABLE)
    return None


def default_backend() -> str:
    """Name of the backend that a call on this machine's fastest device runs on."""
    name = chosen_backend()
    _check(name)
    if name == "auto":
        return "reference" if _available().unavailable() else "cuda"
    return name


def backend_for(x: Tensor) -> Backend:
    """The backend that runs a call whose tensors lie where ``x`` does.

    Raises:
        BackendUnavailable: 'cuda' was chosen and the tensors lie elsewhere.
    """
    name = chosen_backend()
    _check(name)
    if name == "cuda" and not x.is_cuda:
        raise BackendUnavailable(
            given=name,
            reason=f"the tensors are on {x.device.type!r}",
            fix="Move them to a CUDA device, or use 'auto', which goes by the tensors' device.",
        )
    if name == "cuda" or (name == "auto" and x.is_cuda and _runs_on(x.device)):
        from codetta.backends.cuda.launch import CUDA

        return CUDA
    from codetta.backends.calls import REFERENCE

    return REFERENCE


def tiling_for(x: Tensor) -> Tiling:
    """How GEMMs are cut into tiles by the backend that runs a call where ``x`` lies.

    It decides the size of raw partials. The fused backend takes a tile by what was measured on the
    device, the reference the same one for all.
    """
    if backend_for(x).name == "cuda":
        from codetta.backends.cuda.launch import tile_of

        return partial(tile_of, device=x.device)
    return lambda program, a, b, operands: default_tile(program)


def _check(name: str) -> None:
    if name not in NAMES:
        raise UnknownBackend(given=name, allowed=", ".join(map(repr, NAMES)))
    if name == "cuda" and (problem := _available().unavailable()) is not None:
        raise BackendUnavailable(given=name, reason=problem[0], fix=problem[1])


def _available() -> ModuleType:
    from codetta.backends.cuda import available

    return available


@lru_cache(maxsize=64)
def _runs_on(device: torch.device) -> bool:
    """Whether 'auto' takes the fused backend on this device; says once why it does not."""
    problem = _available().unavailable(device)
    if problem is not None:
        reason, fix = problem
        warnings.warn(
            f"{device} runs on the reference backend: {reason}. {fix}", RuntimeWarning, stacklevel=6
        )
    return problem is None
