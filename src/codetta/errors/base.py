"""The class that all errors derive from, and the classes that a module defines."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar


class CodettaError(Exception):
    """Base of all errors raised on purpose by codetta.

    Args:
        where: ``file:line: source`` of the author's code, appended to the message when known.
        fields: the values the class's ``template`` names.
    """

    template: ClassVar[str] = "{message}"
    wrong: ClassVar[str] = ""
    right: ClassVar[str] = ""

    def __init__(self, where: str | None = None, **fields: Any) -> None:
        self.where = where
        self.fields = fields
        message = self.template.format(**fields)
        super().__init__(message if where is None else f"{message}\n  at {where}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.where, self.fields))


def _rebuild(cls: type[CodettaError], where: str | None, fields: dict[str, Any]) -> CodettaError:
    return cls(where, **fields)


def defined_in(area: ModuleType) -> list[type[CodettaError]]:
    """The concrete error classes of one module, in the order in which it defines them."""
    return [
        x
        for x in vars(area).values()
        if isinstance(x, type)
        and issubclass(x, CodettaError)
        and x.__module__ == area.__name__
        and "template" in x.__dict__
    ]
