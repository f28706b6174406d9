"""A worker that compiles kernels for a GPU that is not here; a script.

    QUACK_ARCH=90 CUTE_DSL_ARCH=sm_90a QUACK_CACHE_DIR=empty python compile_worker.py

Reads jobs, one JSON object a line (the fields of :class:`.compile_only.Job`), and answers each with
one line: what the kernel's object file says, or {"error"}. QuACK compiles for the architecture in
its environment and asks the driver only for launch metadata, which is answered here instead. The
compiler may also end the process; :mod:`.compile_only` starts it again.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # modules of this folder would hide others of their names
    sys.path[:] = [x for x in sys.path if x != os.path.dirname(os.path.abspath(__file__))]

from codetta.tuning.statics import disassembly

if TYPE_CHECKING:
    from torch import Tensor

    from codetta.language.program import Program

#: What the mainloop of each architecture multiplies with.
TENSOR_OPS = r"\b(?:HGMMA|QGMMA|UTCHMMA|UTCQMMA)\b"
#: Text of a job that is a short sum, such as "sum24 first": its bits and kind.
SHORT_SUM = re.compile(r"sum(\d+) (\w+)")
#: Stages of the last compiled kernel.
_STAGES: list[int] = []


def pin_architecture() -> None:
    """Compile for CUTE_DSL_ARCH and ask no driver; watch how many stages each kernel gets."""
    import quack.gemm_runtime.host as host
    from quack.cache.async_compile import _install_gpu_blind_device_attrs, _pin_dsl_arch
    from quack.gemm_sm90 import GemmSm90
    from quack.gemm_sm100 import GemmSm100

    _pin_dsl_arch(os.environ["CUTE_DSL_ARCH"])
    _install_gpu_blind_device_attrs()
    host.get_max_active_clusters = lambda clusters: 132 // clusters
    _watch_stages(GemmSm90, position=0)  # returns A/B, epilogue and C stages
    _watch_stages(GemmSm100, position=1)  # and those of the accumulator first


def _watch_stages(mainloop: Any, position: int) -> None:
    inner = mainloop.__dict__["_compute_stages"].__func__

    def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(cls, *args, **kwargs)
        _STAGES[:] = [int(found[position])]
        return found

    mainloop._compute_stages = classmethod(watched)


def compiled(job: Mapping[str, Any]) -> dict[str, object]:
    """Compile one job; what its object file says."""
    from codetta.backends.cuda import short_sum
    from codetta.backends.cuda.assembly import describe
    from codetta.backends.cuda.configs import Configuration, ab_stages
    from codetta.backends.precision import fp8_accumulation
    from codetta.language.program import Program

    config = Configuration(*job["config"]) if job["config"] else None
    before = objects()
    call: Any
    if (found := SHORT_SUM.fullmatch(job["text"])) is not None:
        bits = int(found[1])
        high, low, a, b = short_sum_arrays(job, bits)
        call = short_sum.call(found[2], high, low, a, b, bits, config)
    else:
        program = Program.parse(job["text"])
        with fp8_accumulation(job["fp8"]):
            given = arrays(program, job)
            call = describe(program, *given, config=config, vectorize=job["vectorize"])
    (made,) = objects() - before
    code = disassembly(made)
    (target,) = set(re.findall(r"\.target\s+(sm_\w+)", code))
    return {
        "config": str(call.config),
        "stages": _STAGES[0],
        "predicted_stages": ab_stages(call.lowered, call.config),
        "stores": len(re.findall(r"\bSTL\b", code)),
        "loads": len(re.findall(r"\bLDL\b", code)),
        "tensor_ops": len(re.findall(TENSOR_OPS, code)),
        "target": target,
    }


def arrays(program: Program, job: Mapping[str, Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Arrays without memory: a, b and the flat operands."""
    import torch

    from codetta.language.meaning import operand_storage
    from codetta.language.types import Kind

    m, n, k, dtype = job["m"], job["n"], job["k"], getattr(torch, job["dtype"])
    dtype_b = getattr(torch, job["dtype_b"] or job["dtype"])

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    operands = []
    for o in program.operands:
        cols = int(n * o.width)
        if o.kind is Kind.TILE:
            loaded = torch.float32 if job["wide"] else operand_storage(dtype)
            operands.append(empty(m, cols, dtype=loaded))
        elif o.kind is Kind.INDEX:
            operands.append(empty(m, 1, dtype=torch.int64))
        elif o.kind is Kind.ROTARY:
            dim = next(x.attr("rotary_dim") for x in program.nodes if x.op == "rotate")
            operands += [empty(64, dim, dtype=torch.float32), empty(m, dtype=torch.int64)]
        else:
            shape = {Kind.ROW: (1, cols), Kind.COL: (m, 1), Kind.SCALAR: (1, 1)}[o.kind]
            operands.append(empty(*shape, dtype=torch.float32))
    a = empty(k, m).t() if job["layout"] == "tn" else empty(m, k)
    b = empty(n, k, dtype=dtype_b).t() if job["layout"] == "nt" else empty(k, n, dtype=dtype_b)
    return a, b, operands


def short_sum_arrays(job: Mapping[str, Any], bits: int) -> tuple[Tensor, ...]:
    """The matrices of a sum in 24 or 20 bits, then a and b, without memory."""
    import torch

    from codetta.backends.short_sums import low_columns

    m, n, k, dtype = job["m"], job["n"], job["k"], getattr(torch, job["dtype"])
    lower = m, low_columns(n, bits)
    shapes = ((m, n), torch.bfloat16), (lower, torch.uint8), ((k, m), dtype), ((k, n), dtype)
    high, low, a, b = (torch.empty(shape, dtype=d, device="meta") for shape, d in shapes)
    return high, low, a.t(), b


def objects() -> set[Path]:
    return set(Path(os.environ["QUACK_CACHE_DIR"]).rglob("*.o"))


def main() -> None:
    # What compilers print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pin_architecture()
    for line in sys.stdin:
        found: dict[str, object]
        try:
            found = compiled(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
