"""COST: arithmetic per element of each primitive, the base of the cost model.

``flops`` counts plain floating-point operations, ``special`` the transcendental ones (exp, log,
rsqrt, tanh, ...), which Hopper's special-function units do at a quarter of the rate or less.
Counts follow the usual expansions (a sigmoid is an exp, an add and a reciprocal).
"""

from __future__ import annotations

from dataclasses import dataclass

from codetta.language.primitives import COMPARISONS, COST


@dataclass(frozen=True, slots=True)
class Work:
    """Operations per element of the larger of result and argument."""

    flops: int
    special: int = 0


FREE = Work(0)
COST.rule("broadcast", "unpack", "pack", "ungroup")(FREE)
COST.rule("neg", "abs", "relu", "round_to", "add", "sub", "mul", "maximum", "minimum", "where")(
    Work(1)
)
COST.rule(*COMPARISONS)(Work(1))
COST.rule("exp", "log", "sqrt", "rsqrt", "sin", "cos")(Work(1, 1))
COST.rule("tanh")(Work(0, 1))
COST.rule("div")(Work(1, 1))
COST.rule("sigmoid")(Work(2, 2))
COST.rule("erf")(Work(12, 1))
COST.rule("pow")(Work(2, 2))
COST.rule("rotate")(Work(3))
COST.rule("group_sum", "rowsum", "rowmean", "rowmax", "colsum", "colmax", "totalsum")(Work(1))
COST.rule("combine")(Work(1))
COST.rule("rowvar")(Work(3))
COST.rule("rowlse")(Work(3, 1))
COST.rule("rowsoftmean")(Work(5, 1))
COST.rule("select", "onehot")(Work(1))
