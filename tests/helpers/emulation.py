"""QuACK's side of the contract in plain PyTorch, to test lowering and assembly without a GPU.

A generated epilogue is arithmetic on lanes, so it runs on whole matrices as well: this module
executes its text with stand-ins for the CuTe DSL, on an accumulator padded to whole tiles the way
TMA pads it (zeros; vectors of the other axis stay what they are), and reduces per tile as QuACK's
sinks do, out of bounds included where QuACK does not mask. It writes D, auxiliary stores and sinks
into the buffers it is given.
"""

from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from codetta.backends.cuda import accumulate, assembly, lowering, short_sum
from codetta.backends.cuda.arrays import is_matrix
from codetta.backends.cuda.forms import PACKED, PAIR, Lowered
from codetta.backends.cuda.launch import CudaBackend
from codetta.backends.short_sums import lower_bits, put_lower_bits, rounded_to_20_bits
from codetta.language.meaning import stored

_LOWERED: dict[str, Lowered] = {}


def _f32(x):
    return x.to(torch.float32) if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float32)


def _unary(function):
    return lambda x, **flags: function(_f32(x))


def _bits(x):
    return x.contiguous().view(torch.int32)


SCOPE = {
    "joined": lambda high, third: (_bits(high) | _bits(third)).view(torch.float32),
    "rounded_to_20_bits": rounded_to_20_bits,
    "upper_half": lambda x: (_bits(x) & -65536).view(torch.float32),
    "both_lanes": lambda lane, *arguments: lane(*arguments),
    "F32": _f32,
    "BFloat16": torch.bfloat16,
    "Float16": torch.float16,
    "Float8E4M3FN": torch.float8_e4m3fn,
    "Float8E5M2": torch.float8_e5m2,
    "INF": math.inf,
    "math": SimpleNamespace(
        rcp=_unary(torch.reciprocal),
        pow=lambda x, y: torch.pow(_f32(x), y),
        **{
            name: _unary(getattr(torch, name))
            for name in ("abs", "exp2", "log", "sqrt", "rsqrt", "sin", "cos", "erf")
        },
    ),
    "cutlass": SimpleNamespace(select_=torch.where),
}


def function_of(source: str):
    """The epilogue function of a generated module."""
    body = source.split('INF = float("inf")\n')[1].split("\nepilogue = EpiMod(")[0]
    body = "\n".join(x for x in body.splitlines() if not x.startswith("index"))
    body = body.replace(".to(F32)", ".to(torch.float32)")
    for name, largest in (("Float8E4M3FN", 448.0), ("Float8E5M2", 57344.0)):  # as GPUs convert
        body = body.replace(f".to({name})", f".clamp(-{largest}, {largest}).to({name})")
    scope = {**SCOPE, "torch": torch}
    before = set(scope)
    exec(body, scope)
    names = [n for n in scope if n not in before and n.startswith("epilogue_")]
    return scope[names[0]]


@contextmanager
def emulated():
    """A CudaBackend whose kernels run here."""
    quack, plans = ModuleType("quack"), ModuleType("plans")
    quack.launch = launch
    plans.kernel = lambda source, config, *arrays, **options: (source, config, options)
    package = sys.modules["codetta.backends.cuda"]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (("quack", quack), ("plans", plans)):
            patch.setitem(sys.modules, f"codetta.backends.cuda.{name}", module)
            patch.setattr(package, name, module, raising=False)
        for user in (assembly, accumulate):
            patch.setattr(user, "lower", _recording)
        patch.setattr(short_sum, "lowered_sum", _recording_sum)
        yield CudaBackend()


def _recording(*arguments, **options):
    lowered = lowering.lower(*arguments, **options)
    _LOWERED[lowered.source] = lowered
    return lowered


def _recording_sum(*arguments):
    lowered = _LOWERED_SUM(*arguments)
    _LOWERED[lowered.source] = lowered
    return lowered


_LOWERED_SUM = short_sum.lowered_sum


def launch(plan, a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, arguments) -> None:
    source, config, options = plan
    _Kernel(_LOWERED[source], config.tile, a, b, c, arguments).run(d, options)


class _Kernel:
    def __init__(self, lowered, tile, a, b, c, arguments) -> None:
        self.lowered, self.tile, self.arguments = lowered, tile, arguments
        if a.element_size() == 1:  # fp8 tensor cores read along K alone
            assert is_matrix(a, either=False) and is_matrix(b.t(), either=False)
        acc = a.float() @ b.float()
        self.m, self.n = acc.shape
        self.padded = tuple(-(-x // t) * t for x, t in zip(acc.shape, tile, strict=True))
        self.acc = self.pad(acc)
        self.bits = 20 if lowered.source.startswith('"""A sum in 20') else 24
        self.given = {x.name: self.load(x, c) for x in lowered.loads}

    # ---- loads
    def pad(self, x: Tensor) -> Tensor:
        """A matrix of the accumulator's or twice its width, zero-filled to whole tiles."""
        cols = self.padded[1] * x.shape[1] // self.n
        full = x.new_zeros(self.padded[0], cols)
        full[: x.shape[0], : x.shape[1]] = x
        return full

    def load(self, load, c):
        x = c if load.port == "c" else self.arguments[load.name]
        pair = self.lowered.mode == PAIR
        if load.port == "extent":
            return torch.tensor(x, dtype=torch.float32)
        if load.port == "scalar":
            assert x.dtype is torch.float32 and x.shape == (1,)
            return x
        if load.port in ("col", "valid_m"):
            assert x.shape == (self.m,)
            return torch.cat((x.float(), x.new_zeros(self.padded[0] - self.m).float()))[:, None]
        if load.port in ("c", "tile"):
            if x.dtype is torch.uint8:  # ThirdByteLoad or NibbleLoad
                x = lower_bits(x, self.n, self.bits).view(torch.float32)
            x = self.pad(x).float()
            return lanes(x, pair or (load.port == "c" and self.lowered.mode == PACKED))
        if load.port == "rotary":
            assert x.shape[0] == self.m
            columns = torch.arange(self.padded[1]) % x.shape[1]
            rows = torch.cat((x, x.new_zeros(self.padded[0] - self.m, x.shape[1])))
            return lanes(rows[:, columns].float(), pair)
        if load.port == "onehot":
            index = torch.cat((x, x.new_full((self.padded[0] - self.m,), 7)))
            return lanes((index[:, None] == torch.arange(self.padded[1])).float(), pair)
        assert x.shape == (self.n,), (load, x.shape)
        return lanes(
            torch.cat((x.float(), x.new_zeros(self.padded[1] - self.n).float()))[None], pair
        )

    # ---- the kernel
    def run(self, d: Tensor | None, options) -> None:
        pair = self.lowered.mode == PAIR
        result = function_of(self.lowered.source)(lanes(self.acc, pair), **self.given)
        m, n = self.m, self.n
        if d is not None:
            value = self.full(result["D"], pair or self.lowered.mode == PACKED)[:m, : d.shape[1]]
            d.copy_(stored(d + value if options.get("add_to_output") else value, d.dtype))
        for name, _ in self.lowered.aux:
            out = self.arguments[name]
            if out.dtype is torch.uint8:  # ThirdByteStore or NibbleStore
                word = _bits(self.full(result[name], False, self.padded[1])[:m, :n])
                put_lower_bits(word, out, self.bits)
                continue
            width = n // 2 if pair else n
            assert out.shape == (m, -(-width // 8) * 8 if pair else width)
            out = out[:, :width]
            value = self.full(result[name], False, out.shape[1] * self.padded[1] // n)
            value = value[:m, : out.shape[1]]
            out.copy_(stored(value, out.dtype))
        for sink in self.lowered.sinks:
            self.sink(sink, result[sink.name])

    def full(self, value, paired: bool, cols: int | None = None) -> Tensor:
        if paired:
            return torch.stack([self.full(x, False, None) for x in value], 2).flatten(1)
        shape = torch.broadcast_shapes(value.shape, (self.padded[0], cols or 1))
        if shape[1] == 1:
            shape = (self.padded[0], self.acc.shape[1] // (2 if self.lowered.mode == PAIR else 1))
        return value.expand(shape)

    # ---- sinks
    def sink(self, sink, value) -> None:
        pair, buffer = self.lowered.mode == PAIR, self.arguments[sink.name]
        payload = None
        if sink.scaled:
            value, payload = (self.full(x, False, self.padded[1]) for x in value)
        else:
            value = self.full(value, pair, self.padded[1])
        inside = torch.arange(self.padded[1]) < self.n
        if sink.over == "m":
            inside = (torch.arange(self.padded[0]) < self.m)[:, None]
        if sink.fold == "select":
            self.select(sink, value, buffer)
            return
        if sink.fold == "add":
            value = value if payload is None else value * payload
            tiles, axis = self.tiled(value, sink.over)
            made = tiles.sum(axis)
        elif sink.fold == "max":
            tiles, axis = self.tiled(torch.where(inside, value, -math.inf), sink.over)
            made = tiles.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf).amax(axis)
        else:
            if "n" not in self.lowered.ragged:  # nothing is masked then
                assert self.padded[1] == self.n
            made = _STATES[sink.fold](
                *(self.tiled(x, "n")[0] for x in (value, inside.expand_as(value))),
                None if payload is None else self.tiled(payload, "n")[0],
            )
            made = torch.stack(made)
        keep = made[..., : self.m, :] if sink.over == "n" else made[:, : self.n]
        assert buffer.shape == keep.shape, (sink, buffer.shape, keep.shape)
        buffer.copy_(keep)

    def tiled(self, x: Tensor, over: str) -> tuple[Tensor, int]:
        if over == "n":
            return x.reshape(x.shape[0], -1, self.tile[1]), 2
        return x.reshape(-1, self.tile[0], x.shape[1]), 1

    def select(self, sink, value: Tensor, buffer: Tensor) -> None:
        index = self.arguments[sink.index]
        for row in range(self.m):
            j = int(index[row])
            if 0 <= j < self.padded[1] and value[row, j] != -math.inf:
                buffer[row] = value[row, j]


def lanes(x: Tensor, paired: bool):
    return (x[:, 0::2], x[:, 1::2]) if paired else x


def _softmax(x, inside, payload):
    x = torch.where(inside, x, -math.inf)
    top = x.amax(2)
    weight = torch.exp(x - torch.where(top.isfinite(), top, 0.0)[..., None])
    sums = [weight.sum(2)]
    if payload is not None:
        sums.append(torch.where(weight == 0, 0.0, weight * payload).sum(2))
    return [top, *sums]


def _moments(x, inside, payload):
    count = inside.sum(2).float()
    mean = torch.where(inside, x, 0.0).sum(2) / count
    deviation = torch.where(inside, x - mean[..., None], 0.0)
    return [count, mean, deviation.square().sum(2)]


def _maximum(x, inside, payload):
    return [torch.where(inside, x, -math.inf).amax(2)]


_STATES = {"maximum": _maximum, "softmax": _softmax, "softmean": _softmax, "moments": _moments}
