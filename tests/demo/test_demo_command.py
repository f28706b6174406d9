from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from codetta.capture.backend import Compiler
from codetta.capture.call import RegionCall
from codetta.demo.command import DemoDevice, demo_command

app = typer.Typer()
app.command()(demo_command)
KEYS = {
    "schema",
    "passed",
    "criteria",
    "settings",
    "model",
    "environment",
    "runs",
    "losses",
    "gradients",
    "kernels",
}


def demo(out: Path, *options: str, form: str = "decoder") -> Any:
    common = ["--random", "--steps", "3", "--seq-len", "32", "--device", "cpu", "--out", str(out)]
    return CliRunner().invoke(app, [*common, "--form", form, *options])


def saved(out: Path) -> Any:
    return json.loads((out / "demo.json").read_text(encoding="utf-8"))


def test_equal_sides_pass_and_everything_is_saved(
    stand_in: Callable[..., None], tmp_path: Path
) -> None:
    stand_in()
    result = demo(tmp_path / "new" / "out")
    assert result.exit_code == 0, result.output
    assert result.output.count("PASS") == 4 and "FAIL" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    record = saved(tmp_path / "new" / "out")
    assert set(record) == KEYS and record["schema"] == 1 and record["passed"] is True
    assert [run["name"] for run in record["runs"]] == ["stock", "CODA"]
    assert record["runs"][0]["losses"] == record["runs"][1]["losses"]
    assert len(record["losses"]["steps"]) == 3 and len(record["gradients"]) == 20
    stock, coda = record["kernels"]
    assert (
        stock["watched"]["gemm"]
        == stock["computed"]["gemm"]
        == {"kernels": 42} | {"bytes": coda["watched"]["gemm"]["bytes"]}
    )
    assert set(record["settings"]) >= {"steps", "batch", "seq_len", "lr", "dtype", "seed", "device"}


def test_the_figure_is_a_picture(stand_in: Callable[..., None], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    stand_in()
    demo(tmp_path)
    pixels = image.imread(tmp_path / "loss.png")
    assert pixels.shape[:2] == (900, 1200)
    assert pixels.std() > 0.01


def test_bf16_is_measured_against_a_third_run(
    stand_in: Callable[..., None], tmp_path: Path
) -> None:
    stand_in()
    result = demo(tmp_path, "--dtype", "bf16")
    assert result.exit_code == 0, result.output
    record = saved(tmp_path)
    assert [run["name"] for run in record["runs"]] == ["stock fp32", "stock", "CODA"]
    assert [run["dtype"] for run in record["runs"]] == ["float32", "bfloat16", "bfloat16"]
    assert record["losses"]["deviation"] == "|CODA − stock fp32|"


def test_a_wrong_gradient_fails(stand_in: Callable[..., None], tmp_path: Path) -> None:
    """One part in a thousand of one weight's gradient: too little to see in three losses."""

    def spoil(decoder: Any) -> None:
        weight = decoder.model.layers[1].mlp.up_proj.weight
        weight.register_hook(lambda grad: grad * 1.001)

    stand_in(spoil)
    result = demo(tmp_path)
    assert result.exit_code == 1
    assert "FAIL  gradients" in result.output and "PASS  loss" in result.output
    wrong = [g["name"] for g in saved(tmp_path)["gradients"] if not g["passed"]]
    assert wrong == ["model.layers.1.mlp.up_proj.weight"]
    assert (tmp_path / "loss.png").exists()


def test_a_wrong_forward_fails(stand_in: Callable[..., None], tmp_path: Path) -> None:
    def spoil(decoder: Any) -> None:
        decoder.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * 1.01)

    stand_in(spoil)
    result = demo(tmp_path)
    assert result.exit_code == 1 and "FAIL  loss" in result.output


def test_a_loss_that_is_no_number_fails_and_is_saved(
    stand_in: Callable[..., None], tmp_path: Path
) -> None:
    stand_in(lambda decoder: decoder.register_forward_hook(_nan_loss))
    result = demo(tmp_path)
    assert result.exit_code == 1 and "FAIL  loss" in result.output
    assert saved(tmp_path)["runs"][1]["losses"][0] is None


def _nan_loss(module: Any, args: Any, output: Any) -> Any:
    output.loss = output.loss * float("nan")
    return output


def test_a_cost_table_that_is_wrong_fails(stand_in: Callable[..., None], tmp_path: Path) -> None:
    stand_in(lambda decoder: setattr(decoder, "cost_table", lambda **sizes: []))
    result = demo(tmp_path)
    assert result.exit_code == 1 and "FAIL  kernels, CODA" in result.output
    assert "PASS  kernels, stock" in result.output


def test_json_prints_the_record_and_nothing_else(
    stand_in: Callable[..., None], tmp_path: Path
) -> None:
    stand_in()
    assert json.loads(demo(tmp_path, "--json").output) == saved(tmp_path)


def test_quiet_prints_the_verdict_only(stand_in: Callable[..., None], tmp_path: Path) -> None:
    stand_in()
    lines = demo(tmp_path, "--quiet").output.splitlines()
    assert lines[0].startswith("PASS  loss") and "Loss per step" not in "".join(lines)


def test_one_seed_one_result(stand_in: Callable[..., None], tmp_path: Path) -> None:
    stand_in()
    runs = []
    for index, seed in enumerate(("0", "0", "1")):
        demo(tmp_path / str(index), "--seed", seed)
        runs.append(saved(tmp_path / str(index))["runs"][0]["losses"])
    assert runs[0] == runs[1] != runs[2]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device that the test needs to be absent")
    result = demo(tmp_path, "--device", "cuda")
    assert isinstance(result.exception, DemoDevice)
    assert "Use --device cpu" in str(result.exception)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("form", ["compile", "decoder"])
def test_the_real_forms_pass(tmp_path: Path, form: str, dtype: str) -> None:
    result = demo(tmp_path, "--batch", "2", "--dtype", dtype, form=form)
    assert result.exit_code == 0, result.output


def test_both_forms_print_the_same_losses(tmp_path: Path) -> None:
    tables = {}
    for form in ("compile", "decoder"):
        result = demo(tmp_path / form, form=form)
        assert saved(tmp_path / form)["settings"]["form"] == form
        tables[form] = [line.split("│")[3] for line in result.output.splitlines() if "e-04" in line]
    losses = {form: [float(cell) for cell in table] for form, table in tables.items()}
    assert len(losses["compile"]) == 3
    assert losses["compile"] == pytest.approx(losses["decoder"], rel=1e-6)


def test_compile_is_the_default_and_says_what_is_in_its_programs_and_what_is_not(
    tmp_path: Path,
) -> None:
    options = ["--random", "--steps", "1", "--seq-len", "16", "--device", "cpu"]
    result = CliRunner().invoke(app, [*options, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    record = saved(tmp_path)
    stock, coda = record["kernels"]
    assert (stock["region"], coda["region"]) == ("layers", "programs")
    # 4 GEMMs forward and 8 backward in each of 2 layers; the head's 3 are plain products.
    assert coda["computed"]["gemm"]["kernels"] == coda["watched"]["gemm"]["kernels"] == 24
    assert coda["other_regions"]["other"]["gemm"]["kernels"] == 3
    assert coda["watched"]["attention"]["kernels"] == 4
    assert "codetta's programs" in result.output


def test_a_model_that_was_not_rewritten_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiler, "__call__", lambda self, module, inputs, **options: module)
    result = demo(tmp_path, form="compile")
    assert result.exit_code == 1 and "PASS  loss" in result.output
    assert "FAIL  kernels, CODA" in result.output and "no kernel was seen" in result.output


def test_a_wrong_region_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = RegionCall.__call__

    def spoiled(self: RegionCall, *arguments: Any) -> Any:
        return tuple(x * 1.0001 for x in call(self, *arguments))

    monkeypatch.setattr(RegionCall, "__call__", spoiled)
    result = demo(tmp_path, form="compile")
    assert result.exit_code == 1 and "FAIL  gradients" in result.output
