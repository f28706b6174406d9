"""benchmarks/layer.py: every contender computes the layer, and a run leaves a resumable record."""

import json
from functools import partial

import contenders
import layer
import pytest
import torch
from layer_model import TINY, Layer
from measure import Budget, interleaved, ratio, relative
from paper_emulation import KERNELS


@pytest.fixture(scope="module")
def tiny():
    return Layer.random(TINY, 40, torch.float32)


MADE = {
    "coda": contenders.coda,
    "coda, packed": contenders.coda_packed,
    "coda, packed, y kept": contenders.coda_kept,
    "paper form": partial(contenders.paper, kernels=KERNELS),
    "paper form, x·γ kept": partial(contenders.paper, kernels=KERNELS, keep=True),
}


@pytest.mark.parametrize("name", MADE)
def test_contender_has_the_outputs_and_gradients_of_eager(tiny, name):
    expected = layer.gradients(contenders.eager(tiny))
    found = layer.gradients(MADE[name](tiny))
    assert {n for n in expected if relative(found[n], expected[n]) > 2e-5} == set()
    assert {n for n in expected if not expected[n].abs().max() > 0} == set()


def test_packed_weights_are_read_in_place(tiny, monkeypatch):
    from codetta.plan.sides import Sides

    views = []
    real = Sides.whole

    def whole(self, weights):
        views.append(real(self, weights))
        return views[-1]

    monkeypatch.setattr(Sides, "whole", whole)
    for contender, in_place in (
        (contenders.coda(tiny), False),
        (contenders.coda_packed(tiny), True),
    ):
        views.clear()
        contender.clear()
        contender.both()
        assert any(v is not None for v in views) == in_place
        assert (contender.leaves["wg"].stride(0) == 2 * TINY.d) == in_place


def test_wrong_kernel_is_seen_in_the_difference_to_eager(tiny):
    from dataclasses import replace

    def without_correction(a, b, c, *, y, w, corr):
        return KERNELS.rms_bwd_store(a, b, c, y=y, w=w, corr=0 * corr)

    broken = replace(KERNELS, rms_bwd_store=without_correction)
    expected = layer.gradients(contenders.eager(tiny))
    found = layer.gradients(contenders.paper(tiny, kernels=broken))
    assert relative(found["d_x"], expected["d_x"]) > 1e-3


def test_floor_is_the_twelve_products_of_a_step(tiny):
    called = []

    def product(a, b):
        called.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return a @ b

    forward, both = contenders.floor(tiny, product)
    forward()
    assert len(called) == 4
    s, once = TINY, sum(called)
    assert once == 2 * 40 * s.d * (s.d + 3 * s.f + s.qkv)
    both()
    assert len(called) == 4 + 12 and sum(called) == 4 * once


def test_run_writes_one_file_per_shape_and_resumes(tmp_path, capsys):
    names = ("eager", "liger", "coda", "paper form")
    flags = ["--out", str(tmp_path), "--shape", "tiny", "--tokens", "24", "--rounds", "6"]
    layer.main([*flags, *(x for n in names for x in ("--contender", n))])
    file = tmp_path / "layer_tiny_24.json"
    record = json.loads(file.read_text())
    assert len(record["times_ms"]["coda"]["both"]) == record["rounds"] == 6
    if not torch.cuda.is_available():  # a missing package costs its contender only
        assert "failed" in record["notes"]["paper form"]
    assert max(record["relative_difference_to_eager"]["coda"].values()) < 0.05
    before = file.stat().st_mtime_ns
    layer.main(flags)
    assert file.stat().st_mtime_ns == before
    assert "coda" in capsys.readouterr().out


def test_budget_ends_the_rounds_early_but_leaves_enough_for_a_median():
    times = interleaved({"a": (lambda: None, 1)}, rounds=50, budget=Budget(-1.0))
    assert len(times["a"]) == 5


def test_ratio_is_the_median_of_per_round_ratios_inside_its_interval():
    mid, low, high = ratio([2.0, 3.0, 8.0, 4.0, 1.0], [1.0, 1.0, 2.0, 1.0, 1.0])
    assert mid == 3.0 and 1.0 <= low <= mid <= high <= 4.0
