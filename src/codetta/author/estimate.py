"""What a program would cost on a GPU that is not here: a model, never a time.

A fused kernel takes the time of its products, plus the part of its epilogue that they do not hide:

    t = max(s * 2 M N K / R + h * (extra bytes / B + flops / F + special / X), all bytes / B)

R = 650 TFLOP/s is what cuBLAS reaches in bf16, the median of 72 products with 16384 tokens on one
H200. h = 0.35 is fitted to the 36 kernels of three decoder layers measured there, which the model
then gives within 19 %. s is 1.8 where the epilogue's buffers leave two stages of the A/B pipeline,
the median over 192 measured configurations, and 1 with more. Extra bytes are those that the plain
product does not move. A program that is not one kernel pays for its accumulator in fp32, out and in
again; one with reductions for finalizing the partials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codetta.author.task import Task, Workload
from codetta.backends.cuda.configs import Configuration, ab_stages, choose
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.rules import NotLowerable
from codetta.explanation.gpus import GPUS, Gpu
from codetta.language.program import Program
from codetta.language.traffic import BYTES, Traffic, traffic

GPU = GPUS["h200"]
ATTAINED = 650e12
_HIDDEN_LESS = 0.35
_TWO_STAGES = 1.8
#: Plain and special operations per second: 132 multiprocessors of 128 and 16 lanes at 1.5 GHz, the
#: clock that an H200 keeps under such load.
_PLAIN_OPS, _SPECIAL_OPS = 132 * 128 * 1.5e9, 132 * 16 * 1.5e9
_LAUNCH_S = 3e-6  # of the small kernel behind a GEMM
_ITEMSIZE = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "bool": 1, "uint8": 1, "int8": 1,
}  # fmt: skip
#: Of a and b, as the fused backend names it.
OPERAND = {
    "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip


@dataclass(frozen=True)
class Fused:
    """A program's kernel for one workload, from its text and the sizes alone.

    Attributes:
        traffic: bytes and operations.
        config: the tile configuration it gets; None where it is two kernels, and ``reason`` says
            why.
        stages: of the A/B pipeline.
        ms: by the model above.
    """

    traffic: Traffic
    config: Configuration | None
    stages: int
    reason: str
    ms: float


def fused(program: Program, w: Workload) -> Fused:
    """The kernel of ``program`` on a (m, k) and b (k, n) of the workload's dtype."""
    config, stages, reason = _configured(program, w)
    item = _ITEMSIZE[w.dtype]
    cost = traffic(
        program, w.m, w.n, w.k, operand_bytes=item, tile=config.tile if config else _TILE
    )
    moved = cost.bytes_read + cost.bytes_written
    extra = max(moved - plain_bytes(w), 0) / GPU.bandwidth
    work = cost.flops / _PLAIN_OPS + cost.special / _SPECIAL_OPS
    tensor = _tensor_s(w)
    if config is None:
        accumulator = 4 * w.m * w.n
        passes = (moved - (w.m + w.n) * w.k * item + accumulator) / GPU.bandwidth
        seconds = max(tensor, (w.m + w.n) * w.k * item / GPU.bandwidth)
        seconds += accumulator / GPU.bandwidth * _HIDDEN_LESS + max(passes, work) + _LAUNCH_S
    else:
        slowed = tensor * (_TWO_STAGES if stages <= 2 else 1.0)
        seconds = max(slowed + _HIDDEN_LESS * (extra + work), moved / GPU.bandwidth)
    if program.reductions:
        partials = sum(cost.written[n] for n in program.partial_names.values())
        seconds += partials / GPU.bandwidth + _LAUNCH_S
    return Fused(cost, config, stages, reason, seconds * 1e3)


_TILE = (128, 128)


def _configured(program: Program, w: Workload) -> tuple[Configuration | None, int, str]:
    if w.dtype not in OPERAND:
        return None, 0, f"{w.dtype} products are not fused"
    try:
        lowered = lower(program, OPERAND[w.dtype])
    except NotLowerable as reason:
        return None, 0, str(reason)
    config = choose(lowered, w.m, w.n, w.k)
    if config is None:
        return None, 0, "no tile fits its heads"
    return config, ab_stages(lowered, config), ""


def plain_ms(w: Workload) -> float:
    """a @ b alone."""
    return max(_tensor_s(w), plain_bytes(w) / GPU.bandwidth) * 1e3


def plain_bytes(w: Workload) -> int:
    """Read and written by a @ b, which stores at least 16 bits."""
    item = _ITEMSIZE[w.dtype]
    return (w.m * w.k + w.k * w.n) * item + w.m * w.n * max(item, 2)


def compiled_ms(task: Task, w: Workload) -> float:
    """The product, and one pass that reads it and everything else: the best torch.compile can do
    without an epilogue."""
    moved = sum(task_bytes(task, w).values()) + w.m * w.n * max(_ITEMSIZE[w.dtype], 2)
    return plain_ms(w) + moved / GPU.bandwidth * 1e3 + _LAUNCH_S * 1e3


# -------------------------------------------------------------------------------------- the floor
def floor_ms(task: Task, w: Workload, gpu: Gpu = GPU) -> float:
    """No kernel is faster: each input read once, each output written once, at the data sheet's
    bandwidth, or the products at the data sheet's rate, whichever takes longer.

    It depends on the task alone, so no program can lower it.
    """
    item = _ITEMSIZE[w.dtype]
    moved = (w.m * w.k + w.k * w.n) * item + sum(task_bytes(task, w).values())
    rate = gpu.matrix[max(item, 2)] * (2 if item == 1 else 1)
    return max(moved / gpu.bandwidth, 2 * w.m * w.n * w.k / rate) * 1e3


def task_bytes(task: Task, w: Workload) -> Mapping[str, int]:
    """Bytes of each operand and output as the task declares them; tables of angles count nothing,
    since few rows of them may be in use."""
    found: dict[str, int] = {}
    extents = {"tile": w.m * w.n, "row": w.n, "col": w.m, "index": w.m}
    for o in task.operands:
        usual = "int32" if o.kind == "index" else w.dtype
        size = extents.get(o.kind, 0) * _ITEMSIZE[o.dtype or usual]
        found[o.name] = int(size * o.width)
    for out in task.outputs:
        stored = max(_ITEMSIZE[w.dtype], 2) if out.kind == "tile" else 4
        item = BYTES.get(out.dtype, stored)
        found[out.name] = int(extents.get(out.kind, 1) * item * out.width)
    return found


def gpu_named(name: str) -> Gpu:
    """Figures of a GPU by the name its driver gives; of the fastest known where it is unknown, so
    that the floor stays one."""
    for key in sorted(GPUS, key=len, reverse=True):
        if all(part in name.lower() for part in key.split("-")):
            return GPUS[key]
    return max(GPUS.values(), key=lambda g: g.bandwidth)


def _tensor_s(w: Workload) -> float:
    rate = ATTAINED * {1: 2.0, 2: 1.0, 4: 0.5, 8: 0.07}[_ITEMSIZE[w.dtype]]
    return 2 * w.m * w.n * w.k / rate
