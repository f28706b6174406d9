"""`codetta check`: each stage finds its mistake and says what to write instead."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codetta import Program, cli, epilogue
from codetta.author import check, static
from codetta.author.candidate import Candidate
from codetta.author.check import check_candidate
from codetta.author.contract import contract, differences
from codetta.author.report import Stage
from codetta.author.task import Task, TaskOperand, TaskOutput, Workload, find
from codetta.backends.cuda.available import missing_package
from codetta.errors import CandidateRaised, NoCandidateFile, NotWritten, UnknownTask
from codetta.language import (
    Col,
    Row,
    Tile,
    colsum,
    group_mean,
    pack,
    rowmax,
    rowsum,
    square,
    store,
    ungroup,
    unpack,
    where,
)

SOLUTIONS = Path(__file__).parent / "solutions"
LARGE = Workload(16384, 4096, 4096)


Y = TaskOutput("y", "tile", "")


def task(operands=(), outputs=(Y,), **fields) -> Task:
    given = {"name": "t", "title": "t", "level": "easy", "formula": "", "reference": dict}
    return Task(**given | fields, operands=tuple(operands), outputs=tuple(outputs))


BIAS = TaskOperand("bias", "row", "")
HALF_TILE = TaskOperand("c", "tile", "", width=Fraction(1, 2))


@epilogue
def biased(acc, bias: Row):
    return {"y": acc + bias}


# -------------------------------------------------------------------------------- contract
@epilogue
def bare(acc, bias: Row):
    return acc + bias


@epilogue
def by_rows(acc, bias: Col):
    return {"y": acc + bias}


@epilogue
def renamed(acc, offset: Row):
    return {"z": acc + offset}


@epilogue
def halved(acc, c: Tile):
    g, u = unpack(acc + c)
    return {"y": g * u}


@epilogue
def stored_wide(acc, bias: Row):
    return {"y": store(acc + bias, "fp32")}


@epilogue
def summed(acc, bias: Row):
    return {"y": rowsum(acc + bias)}


@pytest.mark.parametrize(
    "program, wanted, said",
    [
        (biased, task([BIAS]), []),
        (bare, task([BIAS]), ["one value is returned without a name; the task asks for y"]),
        (by_rows, task([BIAS]), ["operand bias: Col should be Row"]),
        (
            renamed,
            task([BIAS]),
            [
                "operand bias: Row is missing",
                "operand offset is not one of the task's",
                "output y is missing",
                "output z is not one of the task's",
            ],
        ),
        (
            halved,
            task([HALF_TILE]),
            [
                "operand c: Tile should be Tile(width=0.5)",
                "output y is 1/2 N wide and should be 1 N",
            ],
        ),
        (
            stored_wide,
            task([BIAS]),
            ["output y is stored in fp32 and should be in the dtype of a"],
        ),
        (stored_wide, task([BIAS], [TaskOutput("y", "tile", "", dtype="float32")]), []),
        (
            biased,
            task([BIAS], [TaskOutput("y", "tile", "", dtype="float8_e4m3fn")]),
            ["output y is stored in the dtype of a and should be in e4m3"],
        ),
        (summed, task([BIAS]), ["output y is one value per row and should be a tile"]),
        (summed, task([BIAS], [TaskOutput("y", "col", "")]), []),
        (
            summed,
            task([BIAS], [TaskOutput("y", "row", "")]),
            ["output y is one value per row and should be one value per column"],
        ),
    ],
)
def test_the_contract_names_every_difference(program, wanted, said):
    assert list(differences(program, wanted)) == said
    stage = contract(program, wanted)
    assert stage.verdict == ("failed" if said else "passed")
    assert stage.reason == "; ".join(said)


def test_the_fix_is_the_signature_and_the_outputs_to_write():
    wanted = task([BIAS, HALF_TILE], [TaskOutput("y", "tile", ""), TaskOutput("s", "col", "")])
    assert contract(renamed, wanted).fix == (
        'write `def renamed(acc, bias: Row, c: Tile(width=0.5)):` and `return {"y": ..., "s": ...}`'
    )


def test_a_program_without_its_accumulator_is_not_what_was_asked_for():
    program = Program.parse(
        "program f(bias: Row, c: Tile) {\n  %0 = operand(name=c)\n  %1 = operand(name=bias)\n"
        "  %2 = add(%0, %1)\n  store y: operand = %2\n}"
    )
    wanted = task([BIAS, TaskOperand("c", "tile", "")])
    assert list(differences(program, wanted)) == ["no output depends on acc"]


# ---------------------------------------------------------------------------------- layout
@epilogue
def heads(acc):
    return {"y": acc * ungroup(group_mean(square(acc), 16), 16)}


def test_groups_that_cross_the_tasks_columns_are_refused():
    assert static.layout(heads, task(granule=16)).verdict == "passed"
    stage = static.layout(heads, task(granule=8))
    assert stage.verdict == "failed"
    assert stage.reason == "N must be a multiple of 16 here; the task has every 8"
    assert "fit in 8 columns" in stage.fix


@epilogue
def reduced(acc, c: Tile, bias: Row):
    return {
        "y": acc + bias,
        "of_acc": rowsum(acc),
        "of_tile": rowsum(c * c),
        "by_column": colsum(c + bias),
        "largest": rowmax(acc),
    }


def test_it_says_how_each_reduction_keeps_the_padding_out():
    edges = static.layout(reduced, task()).facts["beyond_the_edges"]
    assert edges == {
        "of_acc": "masked",  # an infinity of a times the padding's zero is NaN
        "of_tile": "proved zero",
        "by_column": "masked",  # the bias is there in rows that are not
        "largest": "left out by coordinate",
    }


# -------------------------------------------------------------------------------- gradient
@epilogue
def stepped(acc, bias: Row):
    return {"y": where(acc + bias > 0.0, 1.0, 0.0)}


def test_the_gradient_says_what_the_forward_must_keep():
    @epilogue
    def squared(acc, bias: Row):
        return {"y": square(acc + bias)}

    assert static.gradient(biased, task([BIAS])).facts["saved"] == "only operands"
    stage = static.gradient(squared, task([BIAS]))
    assert stage.facts == {"saved": "acc, stored in the dtype of a", "passes": 1}


def test_a_gradient_that_is_zero_everywhere_is_a_warning():
    stage = static.gradient(stepped, task([BIAS]))
    assert (stage.verdict, stage.reason) == (
        "warning",
        "the gradient of acc, bias is zero everywhere",
    )
    assert static.gradient(stepped, task([BIAS], gradient=False)).verdict == "skipped"


# ------------------------------------------------------------------------ cost and lowering
def test_cost_names_the_bytes_and_its_basis():
    stage = static.cost(biased, task([BIAS]), LARGE)
    assert stage.verdict == "estimate"
    assert stage.facts["MiB"] == {"bias": 0.02, "y": 128.0}
    assert 1.0 <= stage.facts["over_plain"] < 1.1
    assert stage.facts["floor_ms"] <= stage.facts["plain_ms"] <= stage.facts["ms"]


def test_matrices_that_starve_the_mainloop_are_a_warning(monkeypatch):
    starved = replace(static.fused(biased, LARGE), stages=2)
    monkeypatch.setattr(static, "fused", lambda *_: starved)
    stage = static.cost(biased, task([BIAS]), LARGE)
    assert stage.verdict == "warning" and stage.facts["ab_stages"] == 2
    assert stage.reason.startswith("2 A/B stages: ") and stage.fix


def test_what_is_not_one_kernel_is_a_warning_with_the_reason():
    stage = static.lowering(heads, LARGE)
    assert stage.verdict == "warning"
    assert stage.reason.startswith("not one kernel: group_")
    assert static.lowering(biased, LARGE).facts == {"form": "element", "kernels": 1}
    assert static.lowering(summed, LARGE).facts["kernels"] == 2
    assert static.lowering(biased, Workload(8, 8, 8, "float32")).verdict == "skipped"


MADE = {
    "config": "128x128 pp 2x1", "stages": 5, "stores": 0, "loads": 0, "tensor_ops": 16,
    "target": "sm_90a",
}  # fmt: skip


@pytest.mark.parametrize(
    "change, verdict, said",
    [
        ({}, "passed", ""),
        ({"stores": 8, "loads": 9}, "warning", "registers spill to memory: 8 stores, 9 reloads"),
        ({"stages": 2}, "warning", "2 A/B stages do not keep the tensor cores fed"),
        ({"tensor_ops": 0}, "failed", "it uses no tensor cores"),
        ({"error": "the compiler died (-11)"}, "failed", "the compiler failed: the compiler died"),
    ],
)
def test_what_the_machine_code_says_becomes_a_verdict(change, verdict, said):
    stage = static.compiled(MADE | change)
    assert stage.verdict == verdict and stage.reason.startswith(said)
    assert bool(stage.fix) == (verdict != "passed")


def test_without_a_compiler_compiling_is_skipped_and_says_why(monkeypatch):
    monkeypatch.setattr(static, "missing_package", lambda: "quack-kernels 1 is not installed")
    stage = static.compiling(biased, LARGE)
    assert (stage.verdict, stage.reason) == ("skipped", "quack-kernels 1 is not installed")
    assert "pip install" in stage.fix


@pytest.mark.slow
@pytest.mark.xdist_group("compile for sm_90a")
@pytest.mark.skipif(missing_package() is not None, reason=f"compiling: {missing_package()}")
def test_a_kernel_is_compiled_for_hopper_as_was_foreseen():
    told: list[str] = []
    stage = static.compiling(biased, LARGE, told.append)
    assert stage.verdict == "passed", stage
    assert stage.facts["target"] == "sm_90a" and stage.facts["tensor_core_instructions"] > 0
    foreseen = static.cost(biased, task([BIAS]), LARGE).facts
    for name in ("configuration", "ab_stages"):
        assert stage.facts[name] == foreseen[name]
    assert told


# --------------------------------------------------------------------------- the whole of it
@pytest.fixture
def traced(monkeypatch):
    """Candidates by path, without a process for each."""
    known: dict[str, Candidate | Exception] = {}

    def load(path):
        found = known[str(path)]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(check, "load_candidate", load)
    return known


def candidate(program: Program, name: str = "") -> Candidate:
    return Candidate(Path("x.py"), name, program, "s", program.digest, "hello\n")


def test_what_is_not_the_tasks_program_is_not_looked_at_further(traced):
    traced["x.py"] = candidate(biased)
    wrong = check_candidate("x.py", task(), compile=False)
    assert [s.name for s in wrong.stages] == ["trace", "contract"]
    assert wrong.exit_status == 1
    assert wrong.stages[0].facts["printed"] == "hello"
    right = check_candidate("x.py", task([BIAS]), compile=False)
    assert [s.name for s in right.stages] == [
        "trace", "contract", "layout", "gradient", "cost", "lowering", "compile",
    ]  # fmt: skip
    assert right.exit_status == 0
    assert right.stages[-1].reason == "left out by --no-compile"
    assert Program.parse(right.program) == biased


def test_a_program_that_is_no_kernel_is_not_compiled(traced):
    traced["x.py"] = candidate(heads)
    found = check_candidate("x.py", task(granule=16))
    assert (found.stages[-1].verdict, found.exit_status) == ("skipped", 0)


def test_an_error_of_the_language_comes_with_its_line_and_a_right_example(traced):
    traced["x.py"] = CandidateRaised(
        "x.py:7: return g + acc", path=Path("x.py"), error="WidthMismatch", message="add combines"
    )
    (stage,) = check_candidate("x.py", "mish").stages
    assert stage.reason == "line 7, `return g + acc`: WidthMismatch: add combines"
    assert "unpack(acc)" in stage.fix and "Tile(width=0.5)" in stage.fix
    assert stage.facts == {"error": "WidthMismatch", "line": 7}


@pytest.mark.parametrize(
    "error, reason, fix",
    [
        (NotWritten(path=Path("x.py")), "is not written yet", "Put the program in place of"),
        (
            CandidateRaised(path=Path("x.py"), error="Refused", message="a candidate may not"),
            "Refused: a candidate may not",
            "leave it out",
        ),
        (
            CandidateRaised(path=Path("x.py"), error="KeyError", message="'a'"),
            "KeyError: 'a'",
            "only what codetta.language has",
        ),
    ],
)
def test_other_failures_to_trace_say_what_to_do(traced, error, reason, fix):
    traced["x.py"] = error
    found = check_candidate("x.py")
    assert found.task == "" and found.exit_status == 1
    assert reason in found.stages[0].reason and fix in found.stages[0].fix


def test_wrong_use_is_no_report(traced):
    traced["x.py"] = candidate(biased)
    with pytest.raises(UnknownTask, match="bind TASK"):
        check_candidate("x.py")
    traced["x.py"] = NoCandidateFile(path="x.py", given="does not exist")
    with pytest.raises(NoCandidateFile):
        check_candidate("x.py")


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["check", *arguments])


def test_the_command_prints_the_report_or_json_and_exits_by_it(traced):
    traced["x.py"] = candidate(biased, "lora_add")
    result = run("x.py", "--no-compile")
    assert result.exit_code == 1 and "FAILED: contract" in result.output
    traced["x.py"] = candidate(bare)
    result = run("x.py", "--no-compile", "--task", "mish", "--json")
    assert json.loads(result.stdout)["task"] == "mish" and result.exit_code == 1
    traced["x.py"] = NoCandidateFile(path="x.py", given="does not exist")
    result = run("x.py")
    assert result.exit_code == 2 and "codetta new" in result.output


def test_a_file_on_disk_is_checked_end_to_end():
    result = run(str(SOLUTIONS / "mish.py"), "--no-compile", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["task"] == "mish" and find("mish").title
    assert {Stage.model_validate(s).verdict for s in found["stages"]} == {
        "passed", "estimate", "skipped",
    }  # fmt: skip


def test_pairs_and_layouts_of_the_solutions_are_accepted():
    @epilogue
    def doubled(acc, z: Tile(width=2)):
        g, u = unpack(z)
        return {"dz": pack(acc * u, acc * g)}

    wide = task(
        [TaskOperand("z", "tile", "", width=Fraction(2))],
        [TaskOutput("dz", "tile", "", width=Fraction(2))],
        granule=1,
    )
    assert list(differences(doubled, wide)) == []
    assert static.layout(doubled, wide).verdict == "passed"
