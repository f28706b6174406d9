"""The text of a generated epilogue module.

It holds no name of the user's: parameters, stores and sinks are numbered, so that programs which
compute the same share one text, and with it one kernel, in memory and in QuACK's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codetta.backends.cuda.forms import Load, Sink

_IMPORTS = """\
import cutlass
from cutlass import BFloat16, Float16, Float8E4M3FN, Float8E5M2, Float32 as F32
from cutlass.cute import math
from quack.epilogue.frontend import EpiMod
from quack.epilogue.math import F2
from quack.epilogue.ops import (
    ColVecLoad, ColVecReduce, ColVecSelect, RowVecLoad, RowVecReduce, TileLoad,
)
from quack.epilogue.rotary import rotary_cos_sin_load
from codetta.backends.cuda.operations import (
    Maximum, Moments, Number, OneHot, SoftmaxMean, SoftmaxSums,
)

INF = float("inf")
"""

#: EpiOp that loads a parameter, by port; C has none, it is an operand of the mainloop.
_LOADS = {
    "tile": "TileLoad({0!r})",
    "row": "RowVecLoad({0!r})",
    "col": "ColVecLoad({0!r})",
    "scalar": "Number({0!r})",
    "extent": "Number({0!r})",
    "rotary": "rotary_cos_sin_load({0!r})",
    "turns": "RowVecLoad({0!r})",
    "onehot": "OneHot({0!r})",
    "valid_n": "RowVecLoad({0!r})",
    "valid_m": "ColVecLoad({0!r})",
}
#: EpiOp of a sink, by what it folds.
_SINKS = {
    "maximum": "Maximum({0!r}, edges={1})",
    "softmax": "SoftmaxSums({0!r}, edges={1})",
    "softmean": "SoftmaxMean({0!r}, edges={1})",
    "moments": "Moments({0!r}, edges={1})",
}
#: Parameters that hold one value for both lanes of a packed fp32 pair.
_UNIFORM = ("scalar", "extent")
_NAME = "epilogue_function"


def module_source(
    *,
    operand: str,
    mode: str,
    ragged: frozenset[str],
    loads: Sequence[Load],
    sinks: Sequence[Sink],
    aux: Sequence[str],
    lines: Sequence[str],
    returned: Mapping[str, str],
    vectorize: bool,
) -> str:
    """The module: imports, the function, and its EpiMod."""
    edges = f"; edges along {', '.join(sorted(ragged))}" if ragged else ""
    docstring = f'"""A codetta epilogue; a and b in {operand}; form {mode}{edges}."""\n'
    function = _function(_NAME, loads, lines, returned)
    if mode == "element":
        function = _both_lanes(_NAME, loads, sinks, returned, function)
    epilogue = _epilogue(_NAME, mode, ragged, loads, sinks, aux, vectorize)
    return "\n".join([docstring, _IMPORTS, function, epilogue])


def _function(
    name: str, loads: Sequence[Load], lines: Sequence[str], returned: Mapping[str, str]
) -> str:
    body = [f"    {line}" for line in lines]
    items = [f"        {key!r}: {value}," for key, value in returned.items()]
    parameters = ", ".join(["acc", *(x.name for x in loads)])
    return "\n".join([f"\ndef {name}({parameters}):", *body, "    return {", *items, "    }", ""])


def _both_lanes(
    name: str,
    loads: Sequence[Load],
    sinks: Sequence[Sink],
    returned: Mapping[str, str],
    function: str,
) -> str:
    """Where the element form comes as packed pairs (Blackwell), run the function on each lane."""
    scaled = {s.name for s in sinks if s.scaled}
    calls = []
    for i in (0, 1):
        given = [x.name if x.port in _UNIFORM else f"{x.name}[{i}]" for x in loads]
        calls.append(f"    lane{i} = lane({', '.join([f'acc[{i}]', *given])})")
    items = []
    for key in returned:
        pair = f"F2(lane0[{key!r}]{{0}}, lane1[{key!r}]{{0}})"
        value = (
            f"({pair.format('[0]')}, {pair.format('[1]')})" if key in scaled else pair.format("")
        )
        items.append(f"        {key!r}: {value},")
    parameters = ", ".join(["acc", *(x.name for x in loads)])
    return "\n".join(
        [
            function.replace(f"def {name}(", "def lane("),
            f"\ndef {name}({parameters}):",
            "    if not isinstance(acc, tuple):",
            f"        return lane({parameters})",
            *calls,
            "    return {",
            *items,
            "    }",
            "",
        ]
    )


def _epilogue(
    name: str,
    mode: str,
    ragged: frozenset[str],
    loads: Sequence[Load],
    sinks: Sequence[Sink],
    aux: Sequence[str],
    vectorize: bool,
) -> str:
    indices = dict.fromkeys(s.index for s in sinks if s.fold == "select")
    lines = [f"{i} = ColVecLoad({i!r})" for i in indices]
    lines += [
        "epilogue = EpiMod(",
        f"    {name},",
        f"    outputs={tuple(aux)!r},",
        "    ops={",
        *(f"        {x.name!r}: {_LOADS[x.port].format(x.name)}," for x in loads if x.port != "c"),
        "    },",
        "    outs={",
        *(f"        {s.name!r}: {_sink(s, ragged)}," for s in sinks),
        "    },",
        f"    extra_ops=({''.join(f'{i}, ' for i in indices)}),",
        f"    mode={mode!r},",
        f"    vectorize={None if vectorize else False},",
        ")",
        "",
    ]
    return "\n".join(["", *lines])


def _sink(sink: Sink, ragged: frozenset[str]) -> str:
    if sink.fold in _SINKS:
        return _SINKS[sink.fold].format(sink.name, "n" in ragged)
    if sink.fold == "select":
        return f"ColVecSelect({sink.name!r}, {sink.index})"
    reduce = "ColVecReduce" if sink.over == "n" else "RowVecReduce"
    if sink.fold == "max":
        return f"{reduce}({sink.name!r}, combine='max')"
    return f"{reduce}({sink.name!r}, scaled={sink.scaled})"
