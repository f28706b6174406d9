"""Compile generated Triton kernels for Hopper without a GPU and count their spills; a script.

    python tests/cuda/compile_triton.py NAME ... | all

Names are those of triton_cases.library and of PRODUCTION. Prints one JSON object: kernel's name ->
{"registers", "spills", "stores", "loads"}, the latter two as the widths of global accesses in
bytes. Operands are aligned, contiguous and bf16, vectors fp32, N is 5120 or the next that fits.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_cases import library

from codetta.backends.cuda.pointwise import accumulator_loaded
from codetta.backends.cuda.triton_kernels import build, compile_options
from codetta.backends.cuda.triton_launch import shapes
from codetta.backends.cuda.triton_source import source
from codetta.backends.cuda.triton_stages import cut, stages
from codetta.backends.cuda.triton_task import Array, Task
from codetta.language.program import Program
from codetta.programs import rotary

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HEADS = {"head_dim": 128, "heads": 40}
#: Library programs at the sizes of a model.
PRODUCTION = {
    f"{make.__name__}_{pairs}": make(**HEADS, pairs=pairs)
    for make in (rotary.rotary_backward, rotary.qk_norm_rotary_backward, rotary.row_scale_rotary)
    for pairs in ("adjacent", "halves")
}
_VECTOR = {"row": True, "positions": False, "col": False, "scalar": False}


def compiled(task: Task, n: int) -> tuple[str, dict[str, object]]:
    """Name and resources of the kernel of one task."""
    arrays = tuple(
        Array("i64" if role == "positions" or _is_index(task, name) else dtype, True, aligned)
        for name, (_, roles) in task.tensors.items()
        for role in roles
        for dtype, aligned in [("fp32" if role != "tile" or name == "accumulator" else "bf16",
                                _VECTOR.get(role, True))]
    )  # fmt: skip
    shape = cut(task, n, None)
    made = source(task, shape, arrays, frozenset(task.widths))
    outputs = [dtype for _, dtype in shapes(task, shape)]
    signature, attributes = {}, {}
    for i, p in enumerate(made.parameters):
        signature[p.name] = p.type
        if not p.is_integer:
            signature[p.name] = (
                f"*{outputs[p.position] if p.what == 'out' else arrays[p.position].dtype}"
            )
            attributes[(i,)] = [["tt.divisibility", 16]]
    kernel = triton.compile(
        ASTSource(build(made), signature, {}, attributes),
        target=GPUTarget("cuda", 90, 32), options=compile_options(shape),
    )  # fmt: skip
    return made.name, _resources(kernel)


def _is_index(task: Task, name: str) -> bool:
    return task.program.operand(name).kind.value == "Index"


def _resources(kernel) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = [str(BIN / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    return {
        "registers": int(found[1]),
        "spills": int(found[2]) + int(found[3]),
        "loads": _widths("ld", kernel.asm["ptx"]),
        "stores": _widths("st", kernel.asm["ptx"]),
    }


def _widths(what: str, ptx: str) -> list[int]:
    """Bytes of each global load or store of a thread, ascending."""
    found = re.findall(rf"{what}\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    return sorted(int(v or 1) * int(bits) // 8 for v, bits in found)


def report(programs: dict[str, Program]) -> dict[str, dict[str, object]]:
    made = {}
    for name, program in programs.items():
        loaded = accumulator_loaded(program) if program.has_acc else program
        plan = stages(loaded, "bf16", "fp32", False)
        n = -(-5120 // loaded.granule) * loaded.granule
        for task in (plan.first, plan.second):
            if task is not None:
                made[f"{name}/{task.program.name}"] = compiled(task, n)[1]
    return made


if __name__ == "__main__":
    everything = library() | PRODUCTION
    chosen = list(everything) if sys.argv[1:] == ["all"] else sys.argv[1:]
    print(json.dumps(report({name: everything[name] for name in chosen})))
