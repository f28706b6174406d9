"""Which configuration a kernel gets: always a legal one, and from the right place."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from helpers.cases import CASES

import codetta
from codetta import programs
from codetta.backends.cuda import config_cache, configs, shipped
from codetta.backends.cuda.configs import (
    Configuration,
    ab_stages,
    candidates,
    choose,
    family,
    illegal,
    layout_of,
    safe_default,
)
from codetta.backends.cuda.launch import explain
from codetta.backends.cuda.lowering import lower
from codetta.backends.cuda.short_sum import FIRST, FURTHER, lowered_sum
from codetta.language import Program
from codetta.loss.epilogues import derivative, scaled_rows, shifted
from codetta.loss.options import Logits
from codetta.tuning.space import configurations

CATALOG = {n: e.program for n, e in programs.catalog().items() if e.program.has_acc}
PROGRAMS = CATALOG | {f"case_{name}": program for name, program in CASES.items()}
FUSED = [n for n, p in PROGRAMS.items() if p.has_acc and explain(p) is None]
SHAPES = [
    (1, 64, 64), (129, 4096, 512), (16384, 2048, 8192), (16384, 57344, 8192), (57344, 8192, 16384),
    (2**20, 128256, 4096),
]  # fmt: skip
SCALED = scaled_rows
RESIDUAL = CATALOG["residual_ssq"]


def lowered(name: str):
    return lower(PROGRAMS[name], "bf16")


@pytest.mark.parametrize("name", FUSED)
def test_every_program_has_a_legal_configuration_at_every_shape(name):
    low = lowered(name)
    for shape, layout in itertools.product(SHAPES, ("nt", "nn", "tn", "tt")):
        config = choose(low, *shape, layout)
        assert config is not None and illegal(low, config) is None, (shape, layout)


@pytest.mark.parametrize("name", FUSED)
def test_a_tile_that_is_asked_for_is_the_tile_that_is_used(name):
    low = lowered(name)
    for tile in {c.tile for c in configurations(low)}:
        config = choose(low, 16384, 4096, 4096, tile=tile)
        assert config is not None and config.tile == tile
    assert choose(low, 16384, 4096, 4096, tile=(3, 5)) is None
    assert safe_default(low, (1000, 128)) is None


@pytest.mark.parametrize("name", FUSED)
def test_what_is_searched_is_legal_and_can_overlap_loads(name):
    low = lowered(name)
    found = configurations(low)
    assert len(found) == len(set(found)) >= 8
    for config in found:
        assert illegal(low, config) is None
        assert ab_stages(low, config) >= 2


def test_matrices_that_the_epilogue_loads_cost_stages():
    plain, one, two = (lowered(n) for n in ("identity", "residual", "rms_link_dgrad"))
    wide, small = Configuration(256, 128, False), Configuration(128, 128, True)
    assert [ab_stages(x, wide) for x in (plain, one, two)] == [4, 3, 2]
    assert ab_stages(two, small) == 5
    assert ab_stages(two, replace(wide, epi_n=16)) == 3
    assert safe_default(two) == small  # three stages at least


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Configuration(128, 224, True), "ping-pong"),
        (Configuration(100, 128, False), "cooperative"),
        (Configuration(192, 144, False), "192 or 320"),
        (Configuration(128, 200, True), "multiple of 16"),
        (Configuration(256, 256, False), "accumulator"),
        (Configuration(128, 128, True, 2, 2), "two CTAs"),
        (Configuration(0, 128, True), "positive"),
        (Configuration(128, 128, True, epi_n=8), "16"),
    ],
)
def test_a_configuration_the_mainloop_does_not_have_is_refused(config, reason):
    assert reason in str(illegal(lowered("identity"), config))


def test_pairs_and_heads_restrict_tiles():
    assert illegal(lowered("swiglu"), Configuration(128, 208, True)) is not None
    text = CATALOG["row_scale_rotary"].text.replace("head_dim=4", "head_dim=128")
    heads = lower(Program.parse(text), "bf16")
    assert "128 rotary columns" in str(illegal(heads, Configuration(128, 160, True)))
    assert illegal(heads, Configuration(128, 128, True)) is None
    assert illegal(lowered("swiglu"), Configuration(128, 128, True, epi_n=16)) is not None
    assert illegal(lowered("residual"), Configuration(128, 128, True, epi_n=16)) is None


def test_families_tell_what_costs_registers_and_memory_apart():
    names = ("identity", "residual", "residual_ssq", "rms_link_dgrad", "rms_link_wgrad", "swiglu",
             "row_scale_swiglu", "swiglu_backward", "row_scale_rotary")  # fmt: skip
    assert len({family(lowered(n)) for n in names}) == len(names)
    assert family(lowered("rms_link_dgrad")) == "element load2 store1"
    assert family(lowered("swiglu_backward")) == "packed load1 store2 sum_n1"


def test_layouts_are_named_by_the_contiguous_axes():
    a, b = torch.empty(4, 8), torch.empty(8, 6)
    at, bt = torch.empty(8, 4).t(), torch.empty(6, 8).t()
    assert [layout_of(*x) for x in ((a, bt), (a, b), (at, b), (at, bt))] == ["nt", "nn", "tn", "tt"]


# -------------------------------------------------------------------------------------- order
def test_the_block_comes_before_measurements_and_those_before_the_shipped(monkeypatch):
    low, shape = lower(RESIDUAL, "bf16"), (16384, 2048, 2048)
    ship, mine, forced = (Configuration(128, n, True, 1, 2) for n in (128, 160, 192))
    monkeypatch.setattr(shipped, "lookup", lambda *a: ship)
    assert choose(low, *shape) == ship
    monkeypatch.setattr(config_cache, "lookup", lambda *a: mine)
    assert choose(low, *shape) == mine
    with codetta.use_configuration(forced):
        assert choose(low, *shape) == forced
        with codetta.use_configuration(ship):
            assert choose(low, *shape) == ship
        assert choose(low, *shape, tile=(128, 160)) == mine  # the tile that was asked for
    assert choose(low, *shape) == mine


def test_an_illegal_find_is_passed_over(monkeypatch):
    low = lower(RESIDUAL, "bf16")
    monkeypatch.setattr(shipped, "lookup", lambda *a: Configuration(256, 256, False))
    monkeypatch.setattr(config_cache, "lookup", lambda *a: Configuration(128, 232, True))
    with codetta.use_configuration(Configuration(17, 16, True)):
        assert choose(low, 16384, 2048, 2048) == safe_default(low)


def test_choices_can_be_recorded():
    low, seen = lower(RESIDUAL, "bf16"), []
    with configs.recording(lambda *what: seen.append(what)):
        choose(low, 10, 20, 30, "nn")
    choose(low, 11, 20, 30, "nn")
    assert seen == [(low, 10, 20, 30, "nn", ())]


def test_candidates_start_with_the_safe_default():
    for name in FUSED:
        found = list(candidates(lowered(name)))
        assert found[0] == safe_default(lowered(name)) and len(found) == len(set(found))


def test_the_code_of_a_configuration_makes_it():
    for config in configurations(lowered("rms_link_dgrad")):
        varied = replace(config, max_swizzle=4)
        assert eval(varied.code, {"Configuration": Configuration}) == varied
        assert Configuration.of(json.loads(json.dumps(varied.data())), "default") == varied


# ------------------------------------------------------------------------------- shipped data
def test_the_shipped_file_is_what_the_program_expects():
    data = json.loads(shipped.FILE.read_text())
    assert data["format"] == 1 and data["provenance"]["gpu"]
    known = {family(lowered(n)) for n in FUSED} | {"pair rotary1 store1"}
    # The last layer's dgrad of gate and up, which sums the gradient of the norm behind it.
    known |= {"element load3 store1 sum_m1"}
    of_loss = (shifted(Logits()), derivative(Logits(), flat=False, bias_gradient=False))
    known |= {family(lower(p, "bf16")) for p in of_loss}
    known |= {
        family(lowered_sum(kind, "bf16", bits)) for kind in (FIRST, FURTHER) for bits in (24, 20)
    }
    known |= {f"fp8 {name}" for name in known}
    for entry in data["entries"]:
        assert Configuration.of(entry["config"], "") is not None
        assert entry["layout"] in ("nt", "nn", "tn", "tt") and entry["family"] in known
        assert min(entry["m"], entry["n"], entry["k"]) > 0 and entry["ms"] > 0 and entry["date"]
        assert entry["stages"] >= 2 and entry["spills"] < 64
        config = Configuration.of(entry["config"], "")
        found = shipped.lookup(entry["family"], entry["m"], entry["n"], entry["k"], entry["layout"])
        assert found is not None and config is not None and found.data() == config.data()
        for name in FUSED:
            if family(lowered(name)) == entry["family"]:
                chosen = choose(lowered(name), entry["m"], entry["n"], entry["k"], entry["layout"])
                legal = illegal(lowered(name), config) is None
                assert chosen is not None and (not legal or chosen.data() == config.data())


def test_the_nearest_shape_is_taken_and_a_far_one_is_not(monkeypatch, tmp_path):
    records = [
        ({"gpu": "G", "date": "2026-01-01"}, record(m, n, k, ms))
        for m, n, k, ms in ((16384, 2048, 2048, 1.0), (16384, 8192, 2048, 2.0))
    ]
    file = tmp_path / "shipped.json"
    file.write_text(shipped.dumps(records))
    monkeypatch.setattr(shipped, "FILE", file)
    shipped._entries.cache_clear()
    try:
        near = shipped.lookup("f", 12000, 3000, 2048, "nt")
        assert near is not None and near.tile_n == 128 and "G" in near.provenance
        wide = shipped.lookup("f", 12000, 7000, 2048, "nt")
        assert wide is not None and wide.tile_n == 192
        assert shipped.lookup("f", 64, 2048, 2048, "nt") is None
        assert shipped.lookup("f", 16384, 2048, 2048, "nn") is None
        assert shipped.lookup("g", 16384, 2048, 2048, "nt") is None
    finally:
        shipped._entries.cache_clear()


def test_of_two_measurements_of_a_shape_the_faster_is_shipped():
    one, two = record(16384, 2048, 2048, 1.0), record(16384, 2048, 2048, 0.5)
    two["best"]["config"] = Configuration(64, 256, True).data()
    made = json.loads(shipped.dumps([({"gpu": "G", "date": "d"}, x) for x in (one, two)]))
    (entry,) = made["entries"]
    assert entry["ms"] == 0.5 and entry["config"]["tile_m"] == 64


def record(m: int, n: int, k: int, ms: float) -> dict:
    config = Configuration(128, 128 if n < 8000 else 192, True)
    best = {"config": config.data(), "median_ms": ms, "stages": 4, "spills": 0}
    return {"family": "f", "layout": "nt", "m": m, "n": n, "k": k, "best": best,
            "cublas_ms": ms, "ratio_to_plain": 1.0}  # fmt: skip


# -------------------------------------------------------------------------------------- waves
def test_the_last_wave_of_a_few_tiles_decides():
    """176 tiles of 128x192 take two waves of 132 processors, 128 of 256x128 one."""
    low = lower(SCALED, "bf16")
    assert safe_default(low).tile == (128, 192)
    assert safe_default(low, size=(2048, 2048)).tile == (256, 128)
    assert safe_default(low, size=(16384, 3072)).tile == (128, 192)


def test_a_few_tokens_more_are_no_other_kernel():
    low = lower(SCALED, "bf16")
    for m in (2048, 4096, 16384):
        around = {safe_default(low, size=(x, 2048)) for x in range(m - m // 8, m + m // 8, 37)}
        assert len(around) == 1


def test_a_tile_that_was_asked_for_stays():
    low = lower(SCALED, "bf16")
    assert choose(low, 2048, 2048, 1 << 17, "nn", tile=(128, 192)).tile == (128, 192)
