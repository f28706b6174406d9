"""What stands for logits that were not computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from codetta.errors import LogitsNotKept


class Withheld:
    """In the place of logits under ``codetta.compile(model, logits="none")``.

    It can be handed on, compared with None, printed, copied and pickled. Everything else raises
    LogitsNotKept: attributes such as ``shape``, indexing, arithmetic, truth, PyTorch functions.
    ``hasattr(logits, "shape")`` is False.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "<logits that were not computed: codetta.compile(..., logits='none')>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (Withheld, ())

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols ask for these
            raise AttributeError(name)
        raise LogitsNotKept(use=f"their attribute {name!r}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise LogitsNotKept(use=getattr(function, "__name__", str(function)))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Withheld, *ignored: Any) -> NoReturn:
        raise LogitsNotKept(use=name)

    return refuse


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHER = ("getitem", "setitem", "len", "iter", "contains", "bool", "float", "int", "index", "neg",
          "abs", "invert", "lt", "le", "gt", "ge", "array", "setattr")  # fmt: skip
for _name in (*_BINARY, *(f"r{n}" for n in _BINARY), *_OTHER):
    setattr(Withheld, f"__{_name}__", _refusing(_name))


def withholding(
    function: Callable[..., Sequence[Any]], dropped: Sequence[int]
) -> Callable[..., tuple[Any, ...]]:
    """``function`` with Withheld objects put at the places ``dropped`` of its results."""

    def run(*args: Any) -> tuple[Any, ...]:
        found = list(function(*args))
        for i in dropped:  # in ascending order
            found.insert(i, Withheld())
        return tuple(found)

    return run
