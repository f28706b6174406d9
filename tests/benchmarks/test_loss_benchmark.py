"""benchmarks/loss.py, loss_training.py: every contender has the loss, and runs go on where they
stopped."""

import json

import loss
import loss_contenders
import loss_training
import pytest
import report
import torch
from loss_contenders import CONTENDERS, TINY, Head
from measure import Budget

OURS = [n for n in CONTENDERS if n.startswith("CODA")]


def tiny(names, contenders=CONTENDERS, tokens=48):
    return loss.measure(TINY, tokens, 5, 1, names, Budget(60), contenders, torch.float32)


def test_every_schedule_has_the_loss_and_gradients_of_fp64():
    found = tiny([*OURS, "eager"])
    assert found["failed"] == found["missing"] == {} and len(OURS) >= 3
    for name in OURS:
        assert max(found["errors"][name].values()) < 1e-6, name
        assert set(found["times_ms"][name]) == set(loss.PARTS)


def test_wrong_contender_is_seen_in_its_errors():
    def without_ignored(head):
        def run():
            logits = torch.nn.functional.linear(head.x, head.weight)
            return torch.nn.functional.cross_entropy(logits, head.target.clamp_min(0))

        return run

    errors = tiny(["wrong"], {"wrong": without_ignored})["errors"]["wrong"]
    assert min(errors.values()) > 1e-3


def test_contender_that_is_not_installed_or_fails_costs_itself_only():
    def missing(head):
        raise ModuleNotFoundError("No module named 'nowhere'")

    def broken(head):
        raise ValueError("no such kernel")

    contenders = {**CONTENDERS, "missing": missing, "broken": broken}
    found = tiny(["missing", "broken", "CODA"], contenders)
    assert found["missing"] == {"missing": "No module named 'nowhere'"}
    assert found["failed"] == {"broken": "ValueError: no such kernel"}
    assert set(found["times_ms"]) == {"CODA", "floor", "floor, one piece"}
    assert "missing: not installed" in loss.table(found)


def test_floor_is_the_three_products_in_chunks():
    head = Head.random(TINY, 50, torch.float64)
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = str(function)
            if "mm" in name:
                a, b = args[-2:]
                seen.append(a.shape[0] * a.shape[1] * b.shape[1])
            return function(*args, **(kwargs or {}))

    forward, both = loss_contenders.floor(head, rows=16)
    with Spy():
        forward()
        once = sum(seen)
        both()
    assert once == 50 * TINY.d * TINY.v and sum(seen) == 4 * once


def test_oracle_is_autograd_in_fp64():
    head = Head.random(TINY, 50, torch.float64)
    exact = loss_contenders.oracle(head, rows=16)
    found = loss.gradients(head, lambda: torch.nn.functional.cross_entropy(
        head.x @ head.weight.t(), head.target))  # fmt: skip
    assert all(loss.distance(found[k], exact[k], rows=7) < 1e-13 for k in exact)


def test_run_writes_one_file_per_shape_resumes_and_is_reported(tmp_path, capsys):
    flags = ["--out", str(tmp_path / "results" / "day"), "--tiny", "--rounds", "5"]
    loss.main([*flags, "--contender", "eager", "--contender", "CODA"])
    file = tmp_path / "results" / "day" / "loss_tiny_48.json"
    record = json.loads(file.read_text())
    assert len(record["times_ms"]["CODA"]["both"]) == record["rounds"] == 5
    assert max(record["errors"]["CODA"].values()) < 0.02
    before = file.stat().st_mtime_ns
    loss.main(flags)
    assert file.stat().st_mtime_ns == before
    assert "both / floor" in capsys.readouterr().out
    page = report.page(tmp_path / "results")
    assert "### tiny: D 64, V 331" in page and "| CODA |" in page


def test_a_shape_is_not_begun_without_time(tmp_path, capsys):
    loss.main(["--out", str(tmp_path), "--tiny", "--budget", "-1"])
    assert "not begun" in capsys.readouterr().out and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------ loss_training
@pytest.fixture
def training(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    return ["--random", "--seq-len", "32", "--work", str(tmp_path / "work")]


def test_training_with_the_fused_loss_stays_as_close_to_fp32_as_stock_bf16(training, tmp_path):
    assert loss_training.main([*training, "--steps", "3", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "loss_training.json").read_text())
    assert record["judged"]["codetta loss"]["passed"]
    losses = {n: r["losses"] for n, r in record["runs"].items()}
    assert losses["codetta loss"] != losses["stock bf16"]  # not the same computation twice
    assert losses["stock fp32"][-1] < losses["stock fp32"][0]


def test_training_that_was_cut_off_goes_on_to_the_same_losses(training, tmp_path):
    flags = [*training, "--steps", "3", "--run", "stock bf16", "--out", str(tmp_path)]
    source = loss_training.models.small_random(0)
    settings = loss_training.Settings(3, 1, 32, 1e-3, 0, True)
    ids = [torch.randint(256, (1, 32)) for _ in range(3)]
    whole = loss_training.train("stock bf16", source, ids, settings, tmp_path / "a.pt")
    for _ in range(3):  # one step each
        cut = loss_training.train(
            "stock bf16", source, ids, settings, tmp_path / "b.pt", stop_after=0.0
        )
    assert cut["losses"] == whole["losses"] and len(whole["losses"]) == 3
    assert loss_training.main([*flags, "--budget", "0"]) == 2


def test_a_loss_outside_the_limit_fails():
    exact = [3.0, 2.0, 1.0]
    found = {"stock fp32": exact, "stock bf16": [3.1, 2.0, 1.0], "codetta loss": [3.2, 2.0, 1.02]}
    verdict = loss_training.judge(found)["codetta loss"]
    assert verdict["steps_over"] == [3] and not verdict["passed"]
    nan = found | {"codetta loss": [float("nan"), 2.0, 1.0]}
    assert loss_training.judge(nan)["codetta loss"]["steps_over"] == [1]
