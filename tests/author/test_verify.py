"""What `codetta verify` promises: it finds what is wrong, says where, and can be repeated."""

from __future__ import annotations

import json
import runpy
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from test_tasks import NEAR_MISSES
from typer.testing import CliRunner

import codetta
from codetta.author import oracle
from codetta.author.calls import CHECKS
from codetta.author.cases import STAGES, cases, named_case
from codetta.author.cases import columns as multiple
from codetta.author.draws import Case, drawn, inputs
from codetta.author.judge import judge
from codetta.author.layouts import LAYOUTS
from codetta.author.power import MUTANTS, toothless
from codetta.author.report import Report
from codetta.author.special import SPECIAL
from codetta.author.task import Task, TaskOperand, TaskOutput, Workload, find, names
from codetta.author.verify import Run, verify_candidate
from codetta.backends.calls import ReferenceBackend
from codetta.cli import app
from codetta.errors import UnknownCase
from codetta.language import Col, Row, Tile, colsum, gelu, rows, rowsum, where

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's forward mode
HERE = Path(__file__).parent
CORRECT, WRONG = (HERE / "cheats" / "epilogue" / f"{x}.py" for x in ("correct", "wrong"))
CPU = torch.device("cpu")


def solution(name):
    return runpy.run_path(str(HERE / "solutions" / f"{name}.py"))[name]


def run(program, task, seed=0, quick=True, only=None):
    """The stages of a program, without a file."""
    return Run(program, task, seed, CPU, "again ", quick, only, lambda text: None).stages()


def failed(stages):
    return next((s for s in stages if s.verdict == "failed"), None)


# -------------------------------------------------------------------------- right candidates
@pytest.mark.parametrize("name", names())
def test_the_solution_of_every_task_is_verified(name):
    stages = run(solution(name), find(name), seed=11)
    assert failed(stages) is None
    assert [s.name for s in stages] == [*STAGES, *CHECKS, "power"]
    missing = {"gradients"} if not find(name).gradient else set()
    assert {s.name for s in stages if s.verdict != "passed"} == missing


@pytest.mark.usefixtures("warm_processes")
def test_a_file_is_verified_and_the_report_says_by_what():
    report = verify_candidate(CORRECT, seed=5, quick=True)
    assert report.passed and report.exit_status == 0
    assert (report.command, report.task, report.seed) == ("verify", "bias_gelu_mask", 5)
    assert report.environment["backend"] == "reference"
    assert len(report.program_sha256) == len(report.source_sha256) == 64
    assert report.stages[0].name == "harness"
    assert Report.model_validate_json(report.model_dump_json()) == report


@pytest.mark.usefixtures("warm_processes")
def test_a_failure_can_be_repeated_by_its_seed_and_case():
    report = verify_candidate(WRONG, seed=9, quick=True)
    stage = failed(report.stages)
    words = stage.replay.split()
    assert words[:3] == ["codetta", "verify", str(WRONG)]
    seed, case = words[words.index("--seed") + 1], words[words.index("--case") + 1]
    again = failed(verify_candidate(WRONG, seed=int(seed), case=case).stages)
    assert (again.name, again.where, again.worst) == (stage.name, stage.where, stage.worst)
    at = stage.where
    assert at.tensor == "y" and len(at.index) == 2 and at.expected != at.got
    assert stage.worst[0].ratio > 1


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([str(CORRECT), "--seed", "1", "--case", "workloads/1x8x8-float32"], 0, '"passed"'),
        ([str(WRONG), "--seed", "1", "--quick"], 1, '"failed"'),
        ([str(CORRECT), "--case", "fuzz/999"], 2, "no case"),
        ([str(CORRECT), "--backend", "fast"], 2, "fast"),
        ([str(HERE / "nowhere.py")], 2, "does not exist"),
    ],
)
def test_the_command_ends_with_a_status_that_means_something(words, status, said):
    result = CliRunner().invoke(app, ["verify", *words, "--json"])
    assert result.exit_code == status, result.output
    assert said in result.output + result.stderr
    if status < 2:
        assert json.loads(result.stdout)["command"] == "verify"


# -------------------------------------------------------------------------- wrong candidates
@codetta.epilogue
def constant_rows(acc, bias: Row, keep: Tile):
    return {"y": gelu(acc + bias) * keep * (rows(acc) / 129.0)}


@codetta.epilogue
def wrong_when_masked(acc, bias: Row, keep: Tile):
    return {"y": gelu(acc + bias) * keep + where(keep > 0.0, 0.0, 1e-3)}


@codetta.epilogue
def nan_when_large(acc, bias: Row, keep: Tile):
    z = acc + bias
    wrong = where(z * z > 1e5, z * 0.0 / (z * 0.0), 0.0)
    return {"y": gelu(z) * keep + wrong}


@codetta.epilogue
def no_derivative(acc, bias: Row, keep: Tile):
    return {"y": gelu(acc + bias) * keep}


@pytest.mark.parametrize("name", names())
def test_the_near_miss_of_every_task_is_not_verified(name):
    """A solution with one thing wrong, the mistake that the task invites."""
    right, wrong = NEAR_MISSES[name]
    source = (HERE / "solutions" / f"{name}.py").read_text(encoding="utf-8").replace(right, wrong)
    scope = dict(vars(codetta.language))
    exec(compile("".join(_without_imports(source)), f"{name} (near miss)", "exec"), scope)
    stage = failed(run(scope[name], find(name)))
    assert "its error budget" in stage.reason and stage.where is not None


def _without_imports(source):
    for line in source.splitlines(keepends=True):
        if not line.startswith("from codetta.language"):
            yield line


@pytest.mark.parametrize(
    ("program", "stage"),
    [(constant_rows, "integers"), (wrong_when_masked, "integers"), (nan_when_large, "special")],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_wrong_program_fails_at_its_stage_and_the_rest_is_skipped(program, stage):
    stages = run(program, find("bias_gelu_mask"), quick=False)
    assert failed(stages).name == stage
    after = stages[[s.name for s in stages].index(stage) + 1 :]
    assert after and {s.verdict for s in after} == {"skipped"}


def test_a_task_whose_gradient_is_not_the_program_s_fails_at_gradients():
    """Right values and another derivative: the language cannot say it, so the task does."""
    task = find("bias_gelu_mask")

    def straight_through(acc, bias, keep):
        y = task.reference(acc, bias=bias, keep=keep)["y"]
        return {"y": acc + (y - acc).detach()}

    odd = replace(task, reference=straight_through)
    stages = run(no_derivative, odd, only=cases(odd, 0)["gradients"][0].name)
    stage = failed(stages)
    assert stage.name == "gradients" and "gradient of" in stage.reason


# ------------------------------------------------------------------- what no call may do
@contextmanager
def backend_that(change):
    original = ReferenceBackend.gemm

    def gemm(self, program, a, b, operands, tile, raw, into=None):
        made = original(self, program, a, b, operands, tile, raw, into)
        return change(made, a, b, operands, tile, raw) or made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceBackend, "gemm", gemm)
        yield


def writes_an_input(made, a, b, operands, tile, raw):
    if a.numel():
        a.data.view(-1)[:1] += 1 if a.is_contiguous() else 0


class Wavering:
    """Every other call is off in its last digit."""

    calls = 0

    def __call__(self, made, a, b, operands, tile, raw):
        self.calls += 1
        return [x * (1 + 2**-7 * (self.calls % 2)) for x in made]


def drops_the_last_tile(made, a, b, operands, tile, raw):
    made[0][..., -1:] = 0


def only_small_tiles(made, a, b, operands, tile, raw):
    if tile is not None and tile[0] == 48:
        made[0][:1] *= 1.5


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (writes_an_input, "inputs unchanged"),
        (Wavering(), "determinism"),
        (drops_the_last_tile, "integers"),
        (only_small_tiles, "tiles"),
    ],
    ids=["writes an input", "wavers", "drops a tile", "depends on the tile"],
)
def test_a_backend_that_breaks_a_rule_is_found(change, stage):
    with backend_that(change):
        stages = run(solution("bias_gelu_mask"), find("bias_gelu_mask"), quick=False)
    assert failed(stages).name == stage


def test_an_output_in_an_input_s_memory_is_found():
    task = find("bias_gelu_mask")

    def aliasing(made, a, b, operands, tile, raw):
        whole = operands[1].untyped_storage()
        if made[0].numel() and len(whole) == made[0].numel() * made[0].itemsize:
            return [made[0].new_empty(0).set_(whole, 0, made[0].shape)]
        return None

    with backend_that(aliasing):
        stages = run(solution("bias_gelu_mask"), task)
    assert failed(stages).name == "aliasing"


def test_memory_that_is_read_before_it_is_written_is_found():
    def unwritten(made, a, b, operands, tile, raw):
        return [torch.empty_like(x) if x.numel() > 4096 else x for x in made]

    with backend_that(unwritten):
        stages = run(solution("bias_gelu_mask"), find("bias_gelu_mask"))
    assert failed(stages).name in ("integers", "determinism", "poison")


def test_partials_that_do_not_add_up_are_found():
    def one_partial_off(made, a, b, operands, tile, raw):
        if raw and tile is not None and tile[0] == 16:
            made[-1][..., :1] += 5.0

    with backend_that(one_partial_off):
        stages = run(solution("post_norm_link"), find("post_norm_link"), quick=False)
    assert failed(stages).name == "tiles" and "partials" in failed(stages).reason


# ------------------------------------------------------------------------------- the judge
def bound(exact, **options):
    return oracle.Bound([exact], classes=[exact], **options)


def test_nan_and_infinities_belong_where_the_oracle_has_them():
    exact = torch.tensor([[1.0, float("nan"), float("inf"), -1.0]], dtype=torch.float64)
    assert not judge("y", exact.float(), bound(exact, addends=1.0), (8, 8)).reason
    for j, value in ((0, float("nan")), (1, 0.0), (2, -float("inf")), (3, float("inf"))):
        wrong = exact.float()
        wrong[0, j] = value
        found = judge("y", wrong, bound(exact, addends=1.0), (8, 8))
        assert found.reason and found.where.index == (0, j)


def test_what_overflows_the_dtype_is_infinite():
    exact = torch.tensor([[1e6, 1.0]], dtype=torch.float64)
    right = torch.tensor([[float("inf"), 1.0]]).half()
    assert not judge("y", right, bound(exact, addends=1e6), (8, 8)).reason
    assert judge("y", torch.tensor([[65504.0, 1.0]]).half(), bound(exact), (8, 8)).reason
    border = torch.tensor([[65520.0, 1.0]], dtype=torch.float64)
    for value in (65504.0, float("inf")):
        got = torch.tensor([[value, 1.0]]).half()
        assert not judge("y", got, bound(border, addends=1.0), (8, 8)).reason


def test_the_first_wrong_tile_is_named():
    exact = torch.zeros(40, 70, dtype=torch.float64)
    got = exact.float()
    got[21, 33] = got[39, 69] = 1.0
    found = judge("y", got, bound(exact), (16, 32))
    assert (found.where.tile, found.where.index) == ((1, 1), (21, 33))


def test_a_budget_is_pytorch_s_error_twice_and_roundings_of_the_addends():
    exact = torch.full((1, 1), 100.0, dtype=torch.float64)
    eps = 2 * 2**-7 + 8 * 2**-23
    for error, theirs, right in ((0.9, 0.5, True), (1.1, 0.5, False)):
        got = (exact + error).float()
        assert (not judge("y", got, bound(exact, theirs=theirs), (8, 8)).reason) == right
    found = judge("y", exact.bfloat16(), bound(exact, addends=1.0), (8, 8))
    assert found.error.budget == pytest.approx(eps)


def test_an_fp8_output_is_judged_against_the_oracle_rounded_to_fp8():
    exact = torch.randn(64, 64, dtype=torch.float64)
    right = exact.to(torch.float8_e4m3fn)
    assert judge("q", right, bound(exact), (8, 8)).error.error == 0
    more = (exact * 1.1).to(torch.float8_e4m3fn)
    assert judge("q", more, bound(exact), (8, 8)).reason


def test_cancelled_terms_widen_a_budget_and_the_program_s_own_do_not():
    """y = acc + t with t = -acc: what is left is rounding, of terms that the task knows."""

    def reference(acc, t):
        return {"y": acc + t}

    task = Task(
        name="sum", title="", level="easy", formula="y = acc + t", reference=reference,
        operands=(TaskOperand("t", "tile", ""),), outputs=(TaskOutput("y", "tile", ""),),
    )  # fmt: skip
    x = inputs(task, Case("c", Workload(32, 32, 8, "float32")), 0)
    x = replace(x, operands={"t": -(x.a @ x.b)})
    found = oracle.outputs(task, x, 0)["y"]
    size = oracle.norm(x.a @ x.b)
    assert 0.7 * size < found.addends < 3 * size
    assert oracle.norm(found.exact[0]) < 1e-5 * size


# -------------------------------------------------------------------- the tests' own strength
def test_a_task_that_nothing_can_fail_is_called_too_loose():
    def reference(acc, t):
        return {"y": t, "s": (acc * 0).sum(1)}

    @codetta.epilogue
    def dull(acc, t: Tile):
        return {"y": t, "s": rowsum(acc * 0.0)}

    task = Task(
        name="dull", title="", level="easy", formula="", reference=reference, gradient=False,
        operands=(TaskOperand("t", "tile", "", values="zeros"),),
        outputs=(TaskOutput("y", "tile", ""), TaskOutput("s", "col", "")),
    )  # fmt: skip
    stage = failed(run(dull, task))
    assert stage.name == "power" and "too loose" in stage.reason
    assert "y passes as zeros" in stage.reason


def test_every_wrong_result_is_rejected_where_the_data_say_something():
    exact = torch.randn(64, 48, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        bounds = {"y": bound(exact, theirs=eps, addends=oracle.norm(exact))}
        assert toothless([({"y": exact.to(dtype)}, bounds)]) == []
    wide = {"y": bound(exact, theirs=oracle.norm(exact))}
    assert len(toothless([({"y": exact.float()}, wide)])) >= len(MUTANTS) - 2


# -------------------------------------------------------------------------------- the cases
def test_cases_follow_from_the_seed_and_cover_the_sizes():
    task = find("bias_gelu_mask")
    assert cases(task, 3) == cases(task, 3) != cases(task, 4)
    for seed in range(3):
        fuzz = cases(task, seed)["fuzz"]
        assert {c.layout for c in fuzz} == set(LAYOUTS)
        assert {c.workload.dtype for c in fuzz} == {"bfloat16", "float16", "float32"}
        assert {0, 1} <= {c.workload.m for c in fuzz} and any(c.lead for c in fuzz)
    every = [c.name for listed in cases(task, 0).values() for c in listed]
    assert len(every) == len(set(every))
    assert {c.values for c in cases(task, 0)["special"]} == set(SPECIAL)
    with pytest.raises(UnknownCase):
        named_case(task, 0, "fuzz/77")


@pytest.mark.parametrize("name", names())
def test_columns_are_multiples_of_the_granule(name):
    task = find(name)
    assert multiple(task, 1) == task.granule
    for listed in cases(task, 1).values():
        assert all(c.workload.n % task.granule == 0 for c in listed)


def test_inputs_are_the_same_in_every_layout_but_for_expanded_ones():
    task = find("dequantize_channel")
    case = Case("c", Workload(9, 16, 5))
    first = inputs(task, case, 1).tensors()
    for layout in set(LAYOUTS) - {"expanded"}:
        other = inputs(task, replace(case, layout=layout), 1).tensors()
        assert all(torch.equal(first[n], t) for n, t in other.items())
    spread = inputs(task, replace(case, layout="spread"), 1)
    assert not spread.a.is_contiguous()


def test_drawn_values_follow_the_task():
    task = find("z_loss")
    a, b, operands = drawn(task, Workload(400, 64, 8), 2)
    assert (a.shape, b.shape) == ((400, 8), (8, 64))
    target = operands["target"]
    outside = (target < 0) | (target >= 64)
    assert 20 < int(outside.sum()) < 90
    assert operands["weight"].dtype is torch.float32 and float(operands["weight"].min()) >= 0.1


def test_reductions_over_no_rows_and_half_wide_outputs_have_their_shapes():
    @codetta.epilogue
    def sums(acc, r: Col):
        return {"y": acc * r, "s": colsum(acc * r)}

    task = Task(
        name="sums", title="", level="easy", formula="",
        reference=lambda acc, r: {"y": acc * r[:, None], "s": (acc * r[:, None]).sum(0)},
        operands=(TaskOperand("r", "col", ""),),
        outputs=(TaskOutput("y", "tile", "", width=Fraction(1)), TaskOutput("s", "row", "")),
    )  # fmt: skip
    assert failed(run(sums, task, quick=False)) is None
