"""Every primitive has an entry in every table of rules, and a missing one says so."""

from __future__ import annotations

import pytest

from codetta.errors import MissingRule
from codetta.language.primitives import (
    COST,
    DERIVATIVE,
    MEANING,
    PRIMITIVES,
    REDUCTION,
    REDUCTIONS,
    SHAPE,
    Table,
)

TABLES = [SHAPE, MEANING, REDUCTION, DERIVATIVE, COST]
LEAVES = {"acc", "const", "extent", "operand"}


@pytest.mark.parametrize("table", TABLES, ids=lambda t: t.name)
def test_tables_are_complete(table):
    assert list(table.missing()) == []


@pytest.mark.parametrize("name", sorted(set(PRIMITIVES) - LEAVES))
def test_each_primitive_has_each_rule(name):
    tables = [SHAPE, DERIVATIVE, COST, REDUCTION if name in REDUCTIONS else MEANING]
    for table in tables:
        assert name in table, f"{name} in {table.name}"


def test_a_missing_rule_names_primitive_table_and_module():
    table = Table("LOWERING", "some.module", lambda p: True)
    assert set(table.missing()) == set(PRIMITIVES)
    with pytest.raises(MissingRule) as caught:
        table["mul"]
    for part in ("'mul'", "'LOWERING'", "some.module", "@LOWERING.rule('mul')"):
        assert part in str(caught.value)


def test_a_rule_is_registered_once():
    table = Table("T", "m", lambda p: True)
    table.rule("mul", "add")(len)
    assert table["add"] is len
    with pytest.raises(AssertionError, match="already has a rule"):
        table.rule("mul")(len)
    with pytest.raises(AssertionError, match="frobnicate"):
        table.rule("frobnicate")(len)


def test_formulas_say_what_a_primitive_computes():
    assert all(p.formula for p in PRIMITIVES.values())
    assert all(p.name == name for name, p in PRIMITIVES.items())
