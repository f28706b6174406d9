"""What a kernel writes: stores, folds of the reductions, partials, finals, combined partials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from codetta.backends.cuda.triton_arguments import convert
from codetta.backends.cuda.triton_columns import Columns, Val
from codetta.backends.cuda.triton_folds import Elements, Fold, Names
from codetta.backends.cuda.triton_loads import load_index
from codetta.backends.cuda.triton_lowering import LOWERING
from codetta.backends.cuda.triton_task import COMBINED_AT_ONCE, Sink
from codetta.language.primitives import COL_REDUCTIONS

if TYPE_CHECKING:
    from codetta.backends.cuda.triton_source import Emitter


#: Elements of a tile that a thread loads at once: 16 bytes of bf16.
_ACCESS = 8


def write(emit: Emitter) -> None:
    """Emit everything the task's sinks ask for."""
    folds = {i: _Folding(emit, i) for i in emit.task.folded}
    slot = 0
    for sink in emit.task.sinks:
        if sink.kind == "store":
            _store(emit, sink, emit.parameters.output(slot))
        slot += len(folds[sink.node].fold.start) if sink.kind == "partial" else 1
    for folding in folds.values():
        folding.run()
    slot = 0
    for sink in emit.task.sinks:
        if sink.kind == "final":
            _store(emit, sink, emit.parameters.output(slot))
        elif sink.kind == "partial":
            folding = folds[sink.node]
            folding.store(
                [emit.parameters.output(slot + c) for c in range(len(folding.fold.start))]
            )
        slot += len(folds[sink.node].fold.start) if sink.kind == "partial" else 1


# ----------------------------------------------------------------------------------- stores
def _store(emit: Emitter, sink: Sink, out: str) -> None:
    """A tile, or a vector or scalar written by the instances with which it is known."""
    type_ = emit.program.nodes[sink.node].type
    rows, cols = type_.has_rows, type_.has_cols
    for at in emit.cover(type_) if cols else (None,):
        value = emit.value(sink.node, at)
        if at is not None:
            total = emit.parameters.total(type_.cols)
            address = f"{emit.rows} * {total} + {at.index}" if rows else at.index
        else:
            address = emit.rows if rows else "tl.zeros([1, 1], tl.int32)"
        mask = [emit.rows_ok if rows else _first(emit, "pid_m")]
        mask.append(at.valid if at is not None else _first(emit, "pid_n"))
        _put(emit, out, address, value, sink.dtype, mask, rows, at)


def _first(emit: Emitter, pid: str) -> str:
    """True in the first instance along an axis only."""
    return emit.once(("first", pid), "first", f"tl.full([1, 1], 0, tl.int32) == {pid}", "outer")


def _put(
    emit: Emitter, out: str, address: str, value: Val, dtype: str, mask: list[str], rows: bool,
    at: Columns | None,
) -> None:  # fmt: skip
    section = emit.section(rows, at.block if at else 0, value.after)
    text = convert(value.name, emit.compute, dtype)
    with emit.at(section):
        emit.statement(f"tl.store({out} + {address}, {text}, mask={' & '.join(mask)})")


# ------------------------------------------------------------------------------------ folds
class _Folding:
    """The fold of one reduction node in this kernel."""

    def __init__(self, emit: Emitter, i: int) -> None:
        self.emit, self.i = emit, i
        self.node = emit.program.nodes[i]
        self.fold: Fold = LOWERING[self.node.op]
        self.source = emit.program.nodes[self.node.args[0]].type
        op = self.node.op
        self.axes = (0,) if op in COL_REDUCTIONS else (1, 0) if op == "totalsum" else (1,)
        # The loop runs over an axis that is reduced: the state outlives a block.
        looped = 1 if emit.cut.by_columns else 0
        self.carried = emit.cut.steps != 1 and looped in self.axes
        self.rows = self.source.has_rows and 0 not in self.axes
        #: State per block of columns; a reduction over columns has one.
        self.states: dict[Columns | None, Names] = {}

    def run(self) -> None:
        """Emit the folds of all blocks of columns that cover the tile."""
        cover = self.emit.cover(self.source)
        joint = self.node.op == "rowsum" and len({(at.valid, at.block) for at in cover if at}) == 1
        for at in cover[:1] if joint else cover:
            elements = self._elements(at, cover if joint else (at,))
            with self.emit.at("inner"):
                where = None if 1 in self.axes else at
                new = self._block(elements, where)
                if self.carried:
                    new = self.fold.merge(self.emit, self._state(where), new)
                    for name, value in zip(self._state(where), new, strict=True):
                        self.emit.statement(f"{name} = {value}")
                elif where in self.states:
                    self.states[where] = self.fold.merge(self.emit, self.states[where], new)
                else:
                    self.states[where] = new
        if self.rows or 1 in self.axes:
            self._complete()

    def _complete(self) -> None:
        after = self.carried
        section = "after" if after else "inner"
        with self.emit.at(section):
            text = self.fold.result(self.emit, self.states[None])
            name = self.emit.line("total", text)
        self.emit.completed(self.i, Val(name, self.rows, 0, after=True))

    def _state(self, where: Columns | None) -> Names:
        """Carried state, set to the identity before the loop."""
        if where not in self.states:
            height = self.tall(where) or self.emit.height(self.rows)
            block = where.block if where else 1
            shape = f"[{height}, {block}]"
            self.states[where] = tuple(
                self.emit.line(f"s{c}", f"tl.full({shape}, {x}, {self.emit.dtype})", "outer")
                for c, x in enumerate(self.fold.start)
            )
        return self.states[where]

    def _elements(self, at: Columns | None, blocks: Sequence[Columns | None]) -> Elements:
        """Of the values at ``blocks``, which are as wide and as valid as ``at``, added."""
        emit, node = self.emit, self.node
        values = [emit.value(node.args[0], b) for b in blocks]
        x = values[0].name if len(values) == 1 else emit.apply("{0} + {1}", *values).name
        ok = []
        if 0 in self.axes and self.source.has_rows:
            ok.append(emit.rows_ok)
        if at is not None:
            ok.append(at.valid)
        extra = index = ""
        if node.op == "select":
            assert at is not None
            extra, index = at.index, load_index(emit, node.args[1]).name
        elif node.op == "rowsoftmean":
            extra = emit.value(node.args[1], at).name
        with emit.at("inner"):
            mask = emit.line("ok", " & ".join(ok)) if len(ok) > 1 else ok[0]
        return Elements(x, mask, self.axes, extra, index)

    def tall(self, where: Columns | None) -> int:
        """Rows of a carried sum of columns: those that the instance's threads hold at one time.

        The rows of a block that one thread holds are added in its registers, and only after the
        loop is there an exchange between threads. 0 where the state is not such a sum.
        """
        sums = self.node.op == "colsum" and self.source.has_rows
        if not sums or not self.carried or where is None:
            return 0
        return min(self.emit.cut.rows, max(1, 32 * self.emit.cut.warps * _ACCESS // where.block))

    def _block(self, e: Elements, where: Columns | None) -> Names:
        """State of one block of elements."""
        rows = self.tall(where)
        if where is None or rows < 2:
            return self.fold.block(self.emit, e)
        shape = f"[{self.emit.cut.rows // rows}, {rows}, {where.block}]"
        text = f"tl.reshape(tl.where({e.ok}, {e.x}, 0.0), {shape})"
        return (self.emit.line("sum", f"tl.sum({text}, axis=0)"),)

    def store(self, outs: list[str]) -> None:
        """Write the raw partial of this tile."""
        emit, zero = self.emit, "tl.zeros([1, 1], tl.int64)"
        for where, state in self.states.items():
            if where is not None:
                total = emit.parameters.total(self.source.cols)
                address = f"pid_m.to(tl.int64) * {total} + {where.index}"
                mask = where.valid
            elif self.rows:
                # As a vector over rows it is stored by the threads that have it.
                address, mask = f"{emit.rows_flat} * {_chunks(emit)} + pid_n", emit.rows_ok_flat
                rows = emit.cut.rows
                state = tuple(
                    f"tl.reshape(tl.broadcast_to({s}, [{rows}, 1]), [{rows}])" for s in state
                )
            elif self.axes == (0,):  # of a Col: one number per chunk of rows
                address, mask = f"{zero} + pid_m", _first(emit, "pid_n")
            elif 0 in self.axes:
                address, mask = f"{zero} + pid_m.to(tl.int64) * {_chunks(emit)} + pid_n", ""
            else:
                address, mask = f"{zero} + pid_n", _first(emit, "pid_m")
            mask = f", mask={mask}" if mask else ""
            with emit.at("after" if self.carried else "inner"):
                if self.tall(where) > 1:
                    state = tuple(f"tl.sum({s}, axis=0, keep_dims=True)" for s in state)
                for out, name in zip(outs, state, strict=True):
                    emit.statement(f"tl.store({out} + {address}, {name}{mask})")


def _chunks(emit: Emitter) -> str:
    """Number of chunks of columns."""
    whole = emit.cut.by_columns and not emit.cut.chunk_cols
    return "1" if whole or not emit.task.has_cols else emit.parameters.need("chunks")


# --------------------------------------------------------------------------- finalizers
def combine(emit: Emitter, names: list[str], reduction: str, at: Columns | None) -> Val:
    """A completed reduction from its stored partials, in a loop of its own."""
    fold: Fold = LOWERING[reduction]
    parts = [emit.parameters.tensor(n) for n in names]
    block = COMBINED_AT_ONCE
    by_column = reduction in COL_REDUCTIONS
    rows = not by_column and reduction != "totalsum"
    cols = at.block if by_column and at else 0
    shape = f"[{emit.height(rows)}, {max(cols, 1)}]"
    lane = f"tl.arange(0, {block})" + ("[:, None]" if by_column else "[None, :]")
    masks, row = [], emit.rows if rows else ""
    if rows:
        masks.append(emit.rows_ok)
    elif by_column:
        assert at is not None
        masks.append(at.valid)
    with emit.at(emit.section(rows, cols)):
        state = tuple(
            emit.line(f"s{c}", f"tl.full({shape}, {x}, {emit.dtype})")
            for c, x in enumerate(fold.start)
        )
        with emit.block(f"for tile in range(0, {parts[0].size}, {block}):"):
            t = emit.line("t", f"tile + {lane}")
            ok = emit.line("ok", f"{t} < {parts[0].size}")
            mask = " & ".join([*masks, ok])
            loaded = []
            for part in parts:
                if by_column:
                    assert at is not None
                    address = f"{t}.to(tl.int64) * {part.row_stride} + {part.along(at.index)}"
                else:
                    address = part.along(t)
                    address = f"{row} * {part.row_stride} + {address}" if rows else address
                text = f"tl.load({part.pointer} + {address}, mask={mask}, other=0)"
                loaded.append(emit.line("part", convert(text, part.array.dtype, emit.compute)))
            new = fold.stored(emit, tuple(loaded), ok, (0,) if by_column else (1,))
            for name, value in zip(state, fold.merge(emit, state, new), strict=True):
                emit.statement(f"{name} = {value}")
        name = emit.line("total", fold.result(emit, state))
    return Val(name, rows, cols)
