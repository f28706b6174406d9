"""Random decoders, rewritten: the same outputs and gradients in fp64, and every rule at work.

CODETTA_FUZZ=500 sets how many graphs are tried; a nightly run takes 500.
"""

from __future__ import annotations

import os
from collections import Counter

import random_decoders
import twin
from hypothesis import HealthCheck, given, settings

from codetta.capture.call import RegionCall
from codetta.nn.block import HALVES
from codetta.plan import Plan, differentiate
from codetta.plan.rules import (
    layernorm_commutes,
    r1_row_scale,
    r2_column_scale,
    r3_frozen_weight,
    r4_wgrad_row_scale,
    r6_shared_operand,
    r7_sum_of_products,
    r8_affine_shift,
    r9_adjacent_pairs,
    r9_orthogonal,
    read_stored,
)

EXAMPLES = int(os.environ.get("CODETTA_FUZZ", "50"))


def fired(call: RegionCall, wanted: set[str]) -> set[str]:
    """The rules that change a region's Plan, or its derivative, on the way to its schedules."""
    found: set[str] = set()

    def step(name: str, before: Plan, after: Plan) -> Plan:
        if after != before:
            found.add(name)
        return after

    merged = step("R6", call.naive, r6_shared_operand(call.naive, pairs=HALVES))
    rows = step("R1", merged, r1_row_scale(merged))
    step("R2", rows, r2_column_scale(rows))
    step("R8", merged, r8_affine_shift(merged))
    plan = layernorm_commutes(merged)
    step("R9", plan, r9_adjacent_pairs(plan))
    names = [i.name for i in plan.inputs if i.name in wanted]
    apart = differentiate(call.naive, names)
    step("R7", apart, r7_sum_of_products(apart))
    # The derivative of a Plan on which R1 was used has R4's form at once.
    step("R4", apart, r4_wgrad_row_scale(apart))
    joint = differentiate(plan, names)
    joint = step("R2", joint, r2_column_scale(joint))
    joint = step("R4", joint, r4_wgrad_row_scale(joint))
    joint = step("R3", joint, read_stored(joint))
    joint = step("R9", joint, r9_orthogonal(joint))
    step("R3", joint, r3_frozen_weight(joint))
    return found


def test_random_decoders_are_the_same_and_every_rule_is_used():
    count: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(random_decoders.recipes())
    def check(recipe: random_decoders.Recipe) -> None:
        module, inputs = random_decoders.traced(recipe)
        found = twin.twin(module, inputs)
        found.check(1e-10)
        assert found.report.calls or recipe.tokens * recipe.batch == 1
        rules: set[str] = set()
        for call in found.report.calls:
            wanted = {g.name for g in call.given if g.kind != "rope"}
            rules |= fired(call, wanted)
        count.update(rules)
        count["graphs"] += 1

    check()
    shares = {f"R{i}": count[f"R{i}"] / count["graphs"] for i in (1, 2, 3, 4, 6, 7, 8, 9)}
    print(f"{count['graphs']} graphs; rules fired in: {shares}")
    assert all(share >= 0.1 for share in shares.values()), shares
