"""The named tuple types that calls return, as attributes of this module.

A type is shared by all programs of one name with the same outputs. Living under a name in a module
makes instances picklable and lets Dynamo construct them.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable


def make(name: str, fields: Iterable[str]) -> str:
    """Make the type ``name`` with these fields unless it exists; returns the attribute's name."""
    fields = tuple(fields)
    attribute = "__".join((name, str(len(fields)), *fields))
    if attribute not in globals():
        made = namedtuple(name, fields, module=__name__)  # type: ignore[misc]
        made.__qualname__ = attribute  # what pickle looks up; repr shows __name__
        globals()[attribute] = made
    return attribute
