"""`codetta explain MODEL` on configurations without weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import capture_models
import pytest
import torch
from typer.testing import CliRunner

from codetta import cli
from codetta.errors import UnknownGpu, UnknownModel
from codetta.explanation.configs import SHORTHANDS, _explained, configuration, explain_model

SIZES = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "num_hidden_layers": 6,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SIZES))
    return path


def run(*args):
    return CliRunner().invoke(cli.app, ["explain", *map(str, args)])


def test_it_prints_totals_regions_and_reasons(config, tmp_path):
    page = tmp_path / "page.html"
    done = run(config, "--tokens", 32, "--html", page)
    assert done.exit_code == 0, done.output
    assert "6 layers (traced with 3, the rest alike)" in " ".join(done.output.split())
    assert "layers 0 to 4 and the next" in " ".join(done.output.split())
    assert "layer 5" in done.output
    assert "the language has no embedding" in " ".join(done.output.split())
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_json_is_all_it_prints(config):
    done = run(config.parent, "--tokens", 32, "--dtype", "fp32", "--gpu", "h200", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["tokens"], found["dtype"], found["layers"]) == (32, "float32", 6)
    assert found["gpu"]["name"] == "H200 SXM"
    assert [r["count"] for r in found["regions"]] == [1, 5, 1]


def test_counting_further_layers_alike_is_tracing_them_all(config):
    options = {"tokens": 32, "batch": 2, "dtype": torch.bfloat16}
    short = explain_model(str(config), layers=2, **options)
    full = explain_model(str(config), layers=None, **options)
    assert short.traced_layers == 3 and full.traced_layers is None
    assert [(r.label, r.count) for r in short.regions] == [(r.label, r.count) for r in full.regions]
    for when in ("before", "after"):
        a, b = short.total(when), full.total(when)
        assert (a.kernels, a.bytes, a.flops) == (b.kernels, b.bytes, b.flops)


def test_details_have_every_formula(config):
    done = run(config, "--tokens", 32, "--details")
    text = re.sub(r"\s+", " ", done.stdout)
    assert done.exit_code == 0, done.output
    for formula in (
        "rotate(acc *",
        "round(inputs_embeds + acc)",
        "sigmoid(",
        "d_down_proj.weight = acc",
        "rsqrt(",
    ):
        assert formula in text


def test_shapes_on_the_meta_device_give_what_real_weights_give():
    real = capture_models.make("llama")
    batch = capture_models.batch("llama")
    from codetta.explanation.record import explain

    ids = tuple(batch["input_ids"].shape)
    meta = _explained(real.config, 2, ids, torch.float32)
    assert replace(meta, layers=None).total("after") == explain(real, **batch).total("after")


@pytest.mark.parametrize("name", SHORTHANDS)
def test_shorthands_are_configurations(name):
    config = configuration(name)
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.vocab_size == SHORTHANDS[name]["vocab_size"]


def test_what_cannot_be_loaded_is_a_named_error(tmp_path, config):
    with pytest.raises(UnknownModel, match="no such file"):
        configuration(str(tmp_path / "missing.json"))
    broken = tmp_path / "broken"
    broken.mkdir()
    with pytest.raises(UnknownModel):
        configuration(str(broken))
    with pytest.raises(UnknownGpu, match="h200"):
        explain_model(str(config), tokens=8, batch=1, dtype=torch.float32, layers=2).on("z80")
    assert run(config, "--dtype", "int4").exit_code == 2


def test_packed_weights_are_counted_as_packed(config):
    plain, packed = (run(config, "--tokens", 32, *more, "--json") for more in ((), ("--pack",)))
    plain, packed = (json.loads(done.stdout) for done in (plain, packed))
    assert any("packed: gate_proj.weight" in n for n in packed["notes"])
    moved = [x["totals"]["after"]["backward"]["memory"]["bytes"] for x in (plain, packed)]
    assert moved[0] - moved[1] == 6 * 2 * (2 * 96 * 64 * 2)  # six layers, read and written, bf16
