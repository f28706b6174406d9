"""benchmarks/kernels.py and codetta.precompile: their kernels are those that a step launches."""

import json

import contenders
import kernels
import torch
from layer_model import TINY, Layer
from recorder import record

from codetta.nn.block import ADJACENT, MIDDLE, Spec, segment
from codetta.tuning.precompile import plan_calls

ROLES = {
    f"{name} {kind}"
    for name in ("output", "gate and up", "down", "q k v")
    for kind in ("projection", "dgrad", "wgrad")
}


def test_run_records_the_twelve_products_and_their_helpers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_CALLS", 2)
    flags = ["--out", str(tmp_path), "--shape", "tiny", "--tokens", "40", "--rounds", "5"]
    kernels.main(flags)
    found = json.loads((tmp_path / "kernels_tiny_40.json").read_text())
    assert {g["role"] for g in found["gemms"]} == ROLES and len(found["gemms"]) == 12
    products = sum(g["mnk"][0] * g["mnk"][1] * g["mnk"][2] for g in found["gemms"])
    assert products == 3 * 40 * TINY.d * (TINY.d + 3 * TINY.f + TINY.qkv)
    kinds = {m["kind"] for m in found["memory"]}
    assert {"codetta::prepare", "codetta::pointwise"} <= kinds
    assert all(len(g["times_ms"]["coda"]) == 5 for g in found["gemms"])
    before = (tmp_path / "kernels_tiny_40.json").stat().st_mtime_ns
    kernels.main(flags)
    assert (tmp_path / "kernels_tiny_40.json").stat().st_mtime_ns == before
    assert "gate and up wgrad" in capsys.readouterr().out


def test_recorded_call_computes_the_same_again():
    layer = Layer.random(TINY, 24)
    calls, (x, qkv) = record(contenders.coda(layer).forward)
    gemms = [c for c in calls if c.op == "codetta::gemm"]
    again = [g.again(*(kernels.copied(t) for t in g.tensors)) for g in gemms]
    stored = [y for results in again for y in results if y.dtype == torch.bfloat16]
    assert any(torch.equal(y, x) for y in stored) and any(torch.equal(y, qkv) for y in stored)


def test_copy_has_the_values_and_strides_in_other_memory():
    x = torch.randn(6, 10)[:, 1:7].t()
    y = kernels.copied(x)
    assert torch.equal(x, y) and x.stride() == y.stride() and x.data_ptr() != y.data_ptr()


def test_calls_recorded_without_memory_are_those_of_a_real_step():
    s, tokens = TINY, 24
    spec = Spec(MIDDLE, s.d, s.f, s.heads, s.kv_heads, s.head_dim, s.head_dim, 1e-5, 1e-5)
    planned = plan_calls(segment(spec, ADJACENT), spec, tokens, torch.bfloat16)
    contender = contenders.coda(Layer.random(s, tokens))
    real, _ = record(contender.both)

    def described(calls):
        return sorted([(tuple(x.shape), strides(x), str(x.dtype)) for x in t] for t in calls)

    def strides(x):  # that of an axis of one element says nothing
        return tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)

    gemms = [c.tensors for c in real if c.op == "codetta::gemm"]
    assert len(gemms) == 12 and described(c.tensors for c in planned) == described(gemms)
