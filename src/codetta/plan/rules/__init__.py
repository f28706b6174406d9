"""The algebra: R1 to R9 as small functions from Plan to Plan.

Each identity is exact in real arithmetic, stated in its docstring and property-tested in fp64 on
random Plans. Notation: x, h (M, K); W, V weights (N, K); z (M, N); ⊙ broadcasts; r, c, μ column
vectors (one value per row); γ, β row vectors; ⟨a, b⟩ the row sum of a ⊙ b.

Products are compared as products, not as trees, see :mod:`codetta.plan.rules.products`.
"""

from __future__ import annotations

from collections.abc import Callable

from codetta.plan.plan import Plan
from codetta.plan.rules.rotations import r9_adjacent_pairs, r9_orthogonal
from codetta.plan.rules.scales import r1_row_scale, r2_column_scale, r4_wgrad_row_scale
from codetta.plan.rules.shared import r6_shared_operand, r7_sum_of_products
from codetta.plan.rules.shifts import layernorm_commutes, r8_affine_shift
from codetta.plan.rules.sums import (
    r3_adjoint_row_sum,
    r3_frozen_weight,
    r5_partial_reductions,
    read_stored,
)
from codetta.plan.rules.widths import narrowed

RULES: dict[str, Callable[[Plan], Plan]] = {
    "R1": r1_row_scale,
    "R2": r2_column_scale,
    "R3": r3_adjoint_row_sum,
    "R4": r4_wgrad_row_scale,
    "R6": r6_shared_operand,
    "R7": r7_sum_of_products,
    "R8": r8_affine_shift,
    "R9": r9_orthogonal,
}

__all__ = [
    "RULES", "layernorm_commutes", "narrowed", "r1_row_scale", "r2_column_scale",
    "r3_adjoint_row_sum", "r3_frozen_weight", "r4_wgrad_row_scale", "r5_partial_reductions",
    "r6_shared_operand", "r7_sum_of_products", "r8_affine_shift", "r9_adjacent_pairs",
    "r9_orthogonal", "read_stored",
]  # fmt: skip
