"""Plans: graphs of matrices, the algebra on them, differentiation, scheduling and costs.

    build or capture a Plan      plan.py, operations.py, layouts.py, text.py
    its meaning                  evaluate.py
    the algebra, R1 to R9        rules/, on rebuild.py
    forward and backward         differentiate.py
    into kernels                 schedule.py: placement.py, grouping.py, kernels.py, order.py
    for people to read           listing.py, formulas.py
    run                          runtime.py: executable.py, slots.py, steps.py, bound.py, launch.py
    weights                      prepare.py
    count                        cost.py, memory.py, on sizes.py

docs/plans.md shows all of it at work.
"""

from __future__ import annotations

from codetta.plan.cost import Cost, cost_table, totals
from codetta.plan.differentiate import Split, differentiate, split
from codetta.plan.evaluate import evaluate
from codetta.plan.kernels import Kernel
from codetta.plan.memory import peak_bytes
from codetta.plan.operations import OPAQUE, Opaque
from codetta.plan.plan import Plan, PlanBuilder
from codetta.plan.rules import RULES
from codetta.plan.runtime import run
from codetta.plan.schedule import Schedule, schedule

__all__ = [
    "OPAQUE", "RULES", "Cost", "Kernel", "Opaque", "Plan", "PlanBuilder", "Schedule", "Split",
    "cost_table", "differentiate", "evaluate", "peak_bytes", "run", "schedule", "split", "totals",
]  # fmt: skip
