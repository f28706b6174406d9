"""Loads of operands: addresses from row and column numbers, masks, and conversion to compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from codetta.backends.cuda.triton_arguments import TensorArgument, convert
from codetta.backends.cuda.triton_columns import Columns, Val
from codetta.language.types import Kind
from codetta.language.values import Node

if TYPE_CHECKING:
    from codetta.backends.cuda.triton_source import Emitter


def load(emit: Emitter, node: Node, at: Columns | None) -> Val:
    """An operand at these columns, converted to the compute dtype; 0 outside the matrix."""
    t = emit.parameters.tensor(node.attr("name"))
    kind = node.type.kind
    if kind is Kind.SCALAR:
        return _loaded(emit, t, f"{t.pointer} + tl.zeros([1, 1], tl.int32)", "", False, 0)
    if kind is Kind.COL:
        return Val(_by_row(emit, t, ("col", t.position), "0", emit.compute), True, 0)
    assert at is not None and kind in (Kind.TILE, Kind.ROW), kind
    if kind is Kind.ROW:
        address = f"{t.pointer} + {t.along(at.index)}"
        return _loaded(emit, t, address, at.valid, False, at.block)
    if node.attr("name") in dict(emit.task.gathered):
        return _gathered(emit, node.attr("name"), at)
    address = f"{t.pointer} + {emit.rows} * {t.row_stride} + {t.along(at.index)}"
    return _loaded(emit, t, address, f"{emit.rows_ok} & {at.valid}", True, at.block)


def _by_row(
    emit: Emitter, t: TensorArgument, key: object, other: str, dtype: str, shift: str = ""
) -> str:
    """One number per row, as (rows, 1); int64 if ``dtype`` is ''."""
    address = f"{t.pointer} + {shift}{t.along(emit.rows_flat)}"
    text = f"tl.load({address}, mask={emit.rows_ok_flat}, other={other})"
    text = convert(text, t.array.dtype, dtype) if dtype else f"{text}.to(tl.int64)"
    return emit.once(key, "x", f"{text}[:, None]", emit.row_section)


def _gathered(emit: Emitter, name: str, at: Columns) -> Val:
    """Rows of several matrices: the map says which, (M,), and behind that which row of it."""
    *matrices, rows = emit.parameters.tensors(name)
    which = _by_row(emit, rows, ("which", name), "-1", "")
    row = _by_row(emit, rows, ("from", name), "-1", "", "M + ")
    found: Val | None = None
    for k, t in enumerate(matrices):
        mine = emit.once(("mine", name, k), "mine", f"{which} == {k}", emit.row_section)
        address = f"{t.pointer} + {row} * {t.row_stride} + {t.along(at.index)}"
        x = _loaded(emit, t, address, f"{mine} & {at.valid}", True, at.block)
        found = emit.apply(f"tl.where({mine}, {{0}}, {{1}})", x, found) if found else x
    assert found is not None
    return found


def _loaded(emit: Emitter, t: TensorArgument, address: str, ok: str, rows: bool, cols: int) -> Val:
    mask = f", mask={ok}, other=0" if ok else ""
    text = convert(f"tl.load({address}{mask})", t.array.dtype, emit.compute)
    return Val(emit.line("x", text, emit.section(rows, cols)), rows, cols)


def load_index(emit: Emitter, i: int) -> Val:
    """The Index operand of node i, (rows, 1) in int64; -1 outside."""
    t = emit.parameters.tensor(emit.program.nodes[i].attr("name"))
    return Val(_by_row(emit, t, ("index", i), "-1", ""), True, 0)


def rope(emit: Emitter, i: int, node: Node, j: str, turned: Val, at: Columns) -> tuple[Val, Val]:
    """cos and sin of pair j of each row's position; NaN where the table has no such row."""
    table, positions = emit.parameters.tensors(emit.program.nodes[i].attr("name"))
    p = _by_row(emit, positions, ("position", i), "0", "")
    known = emit.once(("known", i), "known", f"({p} >= 0) & ({p} < {table.size})", emit.row_section)
    base = emit.once(
        ("table", i), "base", f"{table.pointer} + tl.where({known}, {p}, 0) * {table.row_stride}",
        emit.row_section,
    )  # fmt: skip
    # What is not loaded is NaN. Outside the matrix and where nothing is turned, nobody sees it.
    ok = f"{emit.rows_ok} & {turned.name} & {known}"
    found = []
    for shift in (0, node.attr("rotary_dim") // 2):
        entry = table.along(f"{j} + {shift}" if shift else j)
        load = f"tl.load({base} + {entry}, mask={ok}, other=float('nan'))"
        text = convert(load, table.array.dtype, emit.compute)
        name = emit.once(("rope", text), "rope", text, emit.section(True, at.block))
        found.append(Val(name, True, at.block))
    cos, sin = found
    return cos, emit.apply("-{0}", sin) if node.attr("inverse") else sin
