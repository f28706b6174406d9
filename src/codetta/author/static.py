"""What can be said about a program without running it, one stage each.

Layout and gradient follow from the text alone; cost from the model in :mod:`.estimate`; lowering
and compiling from the fused backend, which needs no GPU for either.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from codetta.author.estimate import OPERAND, floor_ms, fused, plain_ms
from codetta.author.report import Stage
from codetta.author.task import Task, Workload
from codetta.backends.cuda.available import missing_package
from codetta.backends.cuda.launch import explain
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.backends.cuda.vanishing import vanishes
from codetta.backends.cuda.versions import INSTALL
from codetta.errors import CodettaError
from codetta.language.program import Program
from codetta.language.vjp import vjp
from codetta.tuning.compile_only import Compiler, Job

#: Sums, and the axes they run over; what else reduces leaves out the padding by coordinate.
_SUMS = {"rowsum": "n", "rowmean": "n", "colsum": "m", "totalsum": "nm"}
_PATIENCE_S = 120.0
_STAGES = 3  # of the A/B pipeline, which fewer do not keep fed


def layout(program: Program, task: Task) -> Stage:
    """Which N it takes, and how rows and columns beyond the edge stay out of reductions."""
    granule = program.granule
    facts: dict[str, Any] = {"n_multiple_of": granule}
    if task.granule % granule:
        reason = f"N must be a multiple of {granule} here; the task has every {task.granule}"
        fix = (
            f"pairs, heads and groups must fit in {task.granule} columns: use the sizes of the "
            "task's formula in unpack, pack, group_sum, ungroup and rotate"
        )
        return Stage(name="layout", verdict="failed", reason=reason, fix=fix, facts=facts)
    if edges := dict(_edges(program)):
        facts["beyond_the_edges"] = edges
    return Stage(name="layout", verdict="passed", facts=facts)


def _edges(program: Program) -> Iterator[tuple[str, str]]:
    """For each reduction how it does not see the padding of a ragged tile."""
    for i, name in program.partial_names.items():
        node = program.nodes[i]
        axes = _SUMS.get(node.op)
        if axes is None:
            yield name, "left out by coordinate"
        elif all(vanishes(program, node.args[0], axis) for axis in axes):
            yield name, "proved zero"
        else:
            yield name, "masked"


def gradient(program: Program, task: Task) -> Stage:
    """Whether there is a derivative, and what its forward must keep."""
    if not task.gradient:
        return Stage(name="gradient", verdict="skipped", reason="the task asks for none")
    wrt = ["acc", *(o.name for o in task.operands if o.differentiable)]
    try:
        found = vjp(program, wrt)
    except CodettaError as error:
        fix = "write it with primitives that have a derivative, see docs/language.md"
        return Stage(name="gradient", verdict="failed", reason=str(error), fix=fix)
    also = {"acc": "acc, stored in the dtype of a"}
    facts: dict[str, Any] = {
        "saved": ", ".join(also.get(n, n) for n in found.saved) or "only operands",
        "passes": len(found.passes),
    }
    if found.zero:
        reason = f"the gradient of {', '.join(found.zero)} is zero everywhere"
        fix = "see that nothing cuts it off: a comparison, or an operand that only selects"
        return Stage(name="gradient", verdict="warning", reason=reason, fix=fix, facts=facts)
    return Stage(name="gradient", verdict="passed", facts=facts)


def cost(program: Program, task: Task, workload: Workload) -> Stage:
    """Registers, bytes and time beside the plain product's, by the model."""
    found = fused(program, workload)
    plain = plain_ms(workload)
    traffic = found.traffic
    extra = {n: s for n, s in (*traffic.read.items(), *traffic.written.items()) if n not in "ab"}
    facts: dict[str, Any] = {
        "workload": str(workload),
        "ms": round(found.ms, 4),
        "plain_ms": round(plain, 4),
        "over_plain": round(found.ms / plain, 3),
        "floor_ms": round(floor_ms(task, workload), 4),
        "live_values_per_element": traffic.registers,
        "MiB": {name: round(size / 2**20, 2) for name, size in extra.items()},
    }
    if found.config is not None:
        facts |= {"configuration": str(found.config), "ab_stages": found.stages}
    if found.config is not None and found.stages < _STAGES:
        reason = f"{found.stages} A/B stages: the matrices it loads and stores take the memory"
        fix = "load or store fewer tiles in this epilogue, or narrower ones"
        return Stage(name="cost", verdict="warning", reason=reason, fix=fix, facts=facts)
    return Stage(name="cost", verdict="estimate", facts=facts)


def lowering(program: Program, workload: Workload) -> Stage:
    """Whether the fused backend makes one kernel of it."""
    operand = OPERAND.get(workload.dtype)
    if operand is None:
        reason = f"{workload.dtype} products are not fused: the reference backend runs them"
        return Stage(name="lowering", verdict="skipped", reason=reason)
    why = explain(program, operand) or _ragged(program, operand)
    if why is not None:
        reason = f"not one kernel: {why}. A plain GEMM into fp32 and a second kernel run instead"
        fix = "say it without that primitive if the task allows; the result is right either way"
        return Stage(name="lowering", verdict="warning", reason=reason, fix=fix)
    lowered = lower(program, operand)
    facts = {"form": lowered.mode, "kernels": 2 if program.reductions else 1}
    return Stage(name="lowering", verdict="passed", facts=facts)


def _ragged(program: Program, operand: str) -> str | None:
    """Why it cannot be lowered where no extent is a multiple of the tile."""
    try:
        lower(program, operand, frozenset("nm"))
    except NotLowerable as reason:
        return f"at edges that the tile does not divide, {reason}"
    return None


def compiling(
    program: Program, workload: Workload, progress: Callable[[str], None] | None = None
) -> Stage:
    """What the machine code for sm_90a says: tensor cores, spilled registers, pipeline stages."""
    missing = missing_package()
    if missing is not None:
        return Stage(name="compile", verdict="skipped", reason=missing, fix=INSTALL)
    if progress is not None:
        progress("compiling for sm_90a, some ten seconds")
    job = Job(program.text, workload.m, workload.n, workload.k, "nt", workload.dtype)
    with tempfile.TemporaryDirectory(prefix="codetta-") as folder:
        compiler = Compiler("90", Path(folder), patience_s=_PATIENCE_S)
        try:
            made = compiler.compile(job)
        finally:
            compiler.close()
    return compiled(made)


def compiled(made: dict[str, Any]) -> Stage:
    """The stage of what a compiler answered."""
    if "error" in made:
        fix = "try a smaller program, and report this: it should not happen"
        reason = f"the compiler failed: {made['error'][-300:]}"
        return Stage(name="compile", verdict="failed", reason=reason, fix=fix)
    facts = {
        "target": made["target"],
        "configuration": made["config"],
        "ab_stages": made["stages"],
        "tensor_core_instructions": made["tensor_ops"],
        "spills": made["stores"],
    }
    if not made["tensor_ops"]:
        reason, fix = "it uses no tensor cores", "report this: it should not happen"
        return Stage(name="compile", verdict="failed", reason=reason, fix=fix, facts=facts)
    if made["stores"]:
        reason = f"registers spill to memory: {made['stores']} stores, {made['loads']} reloads"
        fix = "keep fewer values alive at once, or reduce and store in fewer outputs"
        return Stage(name="compile", verdict="warning", reason=reason, fix=fix, facts=facts)
    if made["stages"] < _STAGES:
        reason = f"{made['stages']} A/B stages do not keep the tensor cores fed"
        fix = "load or store fewer tiles in this epilogue, or narrower ones"
        return Stage(name="compile", verdict="warning", reason=reason, fix=fix, facts=facts)
    return Stage(name="compile", verdict="passed", facts=facts)
