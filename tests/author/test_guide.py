"""docs/authoring.md: its programs compute what it says, its tables are those of the code."""

from __future__ import annotations

import re
import runpy
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import codetta
from codetta import errors, language
from codetta.author.check import check_candidate
from codetta.author.verify import verify_candidate
from codetta.backends.cuda.launch import explain
from codetta.language import Rotary, Tile, logsumexp, pack, rotate, store, unpack
from codetta.language.types import Kind

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "authoring.md").read_text(encoding="utf-8")
HEAD = 8
M, N = 13, 48


def section(heading: str) -> str:
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)[1]


def pairs(x):
    return x[:, 0::2], x[:, 1::2]


def picked(z, target):
    inside = (target >= 0) & (target < z.shape[1])
    return torch.where(inside, z.gather(1, torch.where(inside, target, 0)[:, None])[:, 0], 0.0)


def glu_backward(acc, z):
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        g, u = pairs(z)
        (dz,) = torch.autograd.grad((torch.sigmoid(g) * u * acc.detach()).sum(), z)
    return {"dz": dz, "dbias": dz.sum(0)}


def expected_value(acc, v):
    p = acc.softmax(1)
    return {"value": p @ v, "spread": p @ (v * v) - (p @ v) ** 2}


def head_direction(acc, gain):
    heads = acc.unflatten(1, (-1, HEAD))
    scaled = heads / (heads.square().sum(2, keepdim=True) + 1e-6).sqrt()
    return {"y": (scaled * gain[:, None]).flatten(1)}


def biased_rotary(acc, bias, rope):
    cos, sin = rope[0][rope[1]][:, None, :].chunk(2, 2)
    a, b = (acc + bias).unflatten(1, (-1, HEAD)).chunk(2, 2)
    return {"q": torch.cat((a * cos - b * sin, a * sin + b * cos), 2).flatten(1)}


def softmax_gradient(acc, lse, grad, target):
    hit = target[:, None] == torch.arange(acc.shape[1])
    return {"dz": grad[:, None] * ((acc - lse[:, None]).exp() - hit.double())}


def activity(acc):
    y = acc.tanh()
    return {"y": y, "mean": y.mean(0), "top": y.abs().amax(0), "penalty": y.square().mean()}


def quantized(acc, sa, sb, gain):
    z = acc * sa[:, None] * sb
    small = (z * gain).clamp(-57344, 57344).to(torch.float8_e5m2)
    return {"wide": z.float(), "small": small, "lost": (z - small.double() / gain).abs().sum(1)}


#: Function of the page -> its formula in plain PyTorch.
FORMULAS = {
    "film": lambda acc, bias, scale, shift: {"y": (scale * (acc + bias) + shift).relu()},
    "leaky": lambda acc, residual, slope: {"y": F.prelu(acc + residual, slope)},
    "residual_length": lambda acc, bias, residual: {
        "x": acc + bias + residual, "length": (acc + bias + residual).norm(dim=1),
    },
    "glu": lambda acc, r, shift: {
        "y": F.glu(torch.cat(pairs(acc * r[:, None])[::-1], 1)) + shift,
    },
    "glu_backward": glu_backward,
    "head_direction": head_direction,
    "biased_rotary": biased_rotary,
    "cross_entropy": lambda acc, scale, target: {
        "loss": (acc * scale).logsumexp(1) - picked(acc * scale, target),
    },
    "expected_value": expected_value,
    "softmax_gradient": softmax_gradient,
    "activity": activity,
    "quantized": quantized,
}  # fmt: skip
#: Those whose backward is not asked for: backward passes themselves, and rounding to fp8.
NO_GRADIENT = ("glu_backward", "softmax_gradient", "quantized")


def programs() -> dict[str, codetta.Program]:
    """The programs of the worked section, traced as they are printed."""
    scope = {name: getattr(language, name) for name in language.__all__}
    scope |= {"codetta": codetta, "Fraction": Fraction}
    blocks = re.findall(r"```python\n(.*?)```", section("Twelve worked programs"), re.DOTALL)
    found = {}
    for block in blocks:
        names = dict(scope)
        exec(compile(block, "<worked program>", "exec"), names)
        (name,) = re.findall(r"^def (\w+)", block, re.MULTILINE)
        found[name] = names[name]
    return found


PROGRAMS = programs()


def test_there_are_twelve_worked_programs():
    assert list(PROGRAMS) == list(FORMULAS)
    assert len(PROGRAMS) == 12


@pytest.mark.parametrize("name", FORMULAS)
def test_worked_program_computes_its_formula(name):
    program = PROGRAMS[name]
    g = torch.Generator().manual_seed(sum(map(ord, name)))

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def operand(o):
        if o.kind is Kind.INDEX:
            return torch.randint(-2, N + 2, (M,), generator=g)
        if o.kind is Kind.ROTARY:
            return normal(7, HEAD), torch.randint(0, 7, (M,), generator=g)
        columns = int(N * o.width)
        shapes = {Kind.TILE: (M, columns), Kind.ROW: (columns,), Kind.COL: (M,), Kind.SCALAR: ()}
        return normal(*shapes[o.kind])

    a, b = normal(M, 5), normal(5, N)
    operands = {o.name: operand(o) for o in program.operands}
    leaves = [a, b, *(x for x in operands.values() if torch.is_tensor(x) and x.dtype == a.dtype)]
    if name not in NO_GRADIENT:
        leaves = [x.requires_grad_() for x in leaves]
    ours = codetta.gemm(a, b, program, tile=(4, 16), **operands)._asdict()
    wanted = FORMULAS[name](a @ b, **operands)
    assert list(ours) == list(wanted)
    for key, value in ours.items():
        assert value.dtype == wanted[key].dtype
        torch.testing.assert_close(value.double(), wanted[key].double(), rtol=1e-9, atol=1e-9)
    if name in NO_GRADIENT:
        return
    upstream = [normal(*x.shape) for x in wanted.values()]
    mine = torch.autograd.grad(list(ours.values()), leaves, upstream)
    right = torch.autograd.grad(list(wanted.values()), leaves, upstream)
    for x, y in zip(mine, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)


# --------------------------------------------------------------------------- one kernel or two
def halves(acc):
    g, u = unpack(acc, "halves")
    return g * u


def turned_halves(acc, rope: Rotary):
    return rotate(acc, rope, head_dim=HEAD)


def narrow_tile(acc, x: Tile(width=0.5)):
    g, u = unpack(acc)
    return g * u + x


def two_full_stores(acc):
    g, u = unpack(acc)
    return {"x": acc, "y": acc * 2.0, "z": g * u}


def half_store_in_fp32(acc):
    g, u = unpack(acc)
    return {"y": store(g * u, "fp32")}


def payload_beside_pairs(acc):
    g, u = unpack(acc)
    return {"y": g * u, "e": logsumexp(acc, acc)[1]}


def two_wide_loads(acc, x: Tile(width=2), y: Tile(width=2)):
    return {"z": pack(acc, acc) + x + y}


def two_wide_stores(acc, x: Tile(width=2)):
    return {"y": pack(acc, acc) + x, "z": pack(acc, acc) * x}


def no_wide_store(acc, x: Tile(width=2)):
    g, u = unpack(x)
    return {"y": acc * g * u}


TWO_KERNELS = (
    halves, turned_halves, narrow_tile, two_full_stores, half_store_in_fp32, payload_beside_pairs,
    two_wide_loads, two_wide_stores, no_wide_store,
)  # fmt: skip


@pytest.mark.parametrize("function", TWO_KERNELS, ids=lambda f: f.__name__)
def test_what_is_said_to_need_a_second_kernel_does(function):
    assert explain(codetta.epilogue(function), "bf16") is not None


@pytest.mark.parametrize("name", FORMULAS)
def test_worked_program_is_one_kernel_but_for_heads_and_halves(name):
    reason = explain(PROGRAMS[name], "bf16")
    assert (reason is None) == (name not in ("head_direction", "biased_rotary")), reason


# ------------------------------------------------------------------------- the way through
def walk(tmp_path):
    """The task file and the candidate of the guide, as files."""
    task, wrong = re.findall(r"```python\n(.*?)```", section("The path"), re.DOTALL)
    (tmp_path / "film_task.py").write_text(task, encoding="utf-8")
    (tmp_path / "film.py").write_text(wrong, encoding="utf-8")
    return tmp_path / "film.py", wrong


def test_the_walk_through_ends_as_it_is_shown(tmp_path):
    path, wrong = walk(tmp_path)
    checked = check_candidate(path, compile=False)
    assert checked.passed, checked.stages
    assert f"passed    trace     {_said(checked, 'trace')}" in GUIDE
    failed = verify_candidate(path, seed=7)
    (stage,) = [s for s in failed.stages if s.verdict == "failed"]
    assert stage.name == "integers" and stage.reason in GUIDE
    assert stage.replay.replace(str(path), "film.py") in GUIDE
    right = re.search(r"With `(relu.*?)` it passes", GUIDE)[1]
    path.write_text(wrong.replace("relu(scale * acc + bias + shift)", right), encoding="utf-8")
    passed = verify_candidate(path, seed=7, quick=True)
    assert passed.passed, [s for s in passed.stages if s.verdict == "failed"]
    for name in (s.name for s in passed.stages):
        assert f"passed  {name}" in GUIDE


def _said(report, stage):
    facts = next(s.facts for s in report.stages if s.name == stage)
    return "; ".join(f"{k} {v}" for k, v in facts.items())


def test_every_stage_and_command_is_explained():
    for command in ("check", "verify", "bench", "profile", "promote"):
        assert f"### `codetta {command}`" in section("Reading the reports")


def test_errors_named_exist_and_link_to_their_section():
    named = re.findall(r"\[`(\w+)`\]\(errors\.md#(\w+)\)", GUIDE)
    assert len(named) >= 10
    known = {cls.__name__ for cls in errors.catalogue()}
    for name, anchor in named:
        assert name in known and anchor == name.lower()


def test_skill_has_the_front_matter_of_the_format():
    text = (ROOT / "skills" / "codetta-epilogue" / "SKILL.md").read_text(encoding="utf-8")
    front = re.match(r"---\nname: (.+)\ndescription: (.+)\n---\n", text)
    assert front[1] == "codetta-epilogue" and 20 < len(front[2]) <= 1024


# ----------------------------------------------------------------------------------- tables
def test_table_of_functions_is_that_of_the_language():
    made = runpy.run_path(str(ROOT / "tools" / "function_table.py"))
    assert {n for names in made["GROUPS"].values() for n in names} == made["listed"]()
    assert made["page"](GUIDE) == GUIDE, "run `python tools/function_table.py`"


def test_every_operand_kind_is_explained():
    text = section("The language on one page")
    for kind in ("Tile", "Row", "Col", "Scalar", "Index", "Rotary"):
        assert f"| `{kind}` |" in text


def test_table_of_combinations_is_that_of_the_language():
    from codetta.language.trace import ProgramTracer
    from codetta.language.types import Type

    types = {
        "tile": Type(Kind.TILE), "Row": Type(Kind.ROW), "Col": Type(Kind.COL),
        "Scalar": Type(Kind.SCALAR), "final (M,)": Type(Kind.COL, reduced=True),
        "final (N,)": Type(Kind.ROW, reduced=True), "final ()": Type(Kind.SCALAR, reduced=True),
    }  # fmt: skip
    tracer = ProgramTracer("table")
    values = {k: tracer.leaf("operand", t, name=k) for k, t in types.items()}
    values["a final"] = values["final (M,)"]
    values["a tile"] = values["tile"]
    rows = re.findall(r"^\| ((?:tile|Row|Col|final|a final)[^|]* and [^|]*) \| ([^|]*) \|$",
                      section("The language on one page"), re.MULTILINE)  # fmt: skip
    assert len(rows) >= 7
    for pair, gives in rows:
        first, others = pair.split(" and ", 1)
        for other in re.split(r", (?![)])| or ", others):
            second = 2.0 if other == "number" else values[other]
            if gives.startswith("error"):
                with pytest.raises(errors.EpilogueError):
                    values[first] * second
            else:
                assert (values[first] * second).type == types[gives], (first, other)
