"""Hidden states that a norm scales: r ⊙ ((x ⊙ γ) Wᵀ), and the gradients of r and γ."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from helpers.budget import within_budget
from helpers.spy import Spy
from loss_oracle import close, head, reference
from test_loss_plan import Alive

import codetta
from codetta.loss import Problem, choose, engine, operator
from codetta.loss.head import Head
from codetta.loss.plan import candidates
from codetta.loss.sums import Sums
from codetta.loss.vocabulary import Statistics

M, D, V = 11, 8, 13
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCHEDULES = ("forward", "tokens", "vocabulary")
EVERYTHING = {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 4.0, "logit_scale": 0.7}


@pytest.fixture
def scheduled(monkeypatch):
    """Makes every plan that of a schedule, of 'recompute' by what it is cut along."""

    def fix(schedule, chunk):
        made = operator.choose

        def chosen(problem, **options):
            if schedule == "forward" and options["schedule"] != "recompute":
                return made(problem, **{**options, "chunk": chunk, "schedule": "forward"})
            plan = made(problem, **{**options, "chunk": chunk, "schedule": "recompute"})
            if schedule == "vocabulary":
                return replace(plan, over="vocabulary", chunk=chunk)
            return replace(plan, over="tokens")

        monkeypatch.setattr(operator, "choose", chosen)

    return fix


def leaves(m=M, d=D, v=V, dtype=torch.float64, spread=1.0):
    """Names to tensors, and the targets; scales are fp32 or fp64, as a norm has them."""
    x, weight, target, bias = head(m, d=d, v=v, dtype=dtype, spread=spread)
    g = torch.Generator().manual_seed(5)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    row = (torch.rand(m, generator=g, dtype=torch.float64) + 0.5).to(wide).requires_grad_()
    column = torch.randn(d, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    names = {"x": x, "weight": weight, "bias": bias, "row_scale": row, "column_scale": column}
    return names, target


def results(function, tensors, target, upstream=1.0, **options):
    made = function(target=target, **tensors, **options)
    loss = made[0] if isinstance(made, tuple) else made
    wanted = [t for t in tensors.values() if t is not None and t.requires_grad]
    return [loss.detach(), *torch.autograd.grad((loss * upstream).sum(), wanted)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_every_schedule_has_the_gradients_of_pytorch(schedule, chunk, options, scheduled):
    scheduled(schedule, chunk)
    tensors, target = leaves()
    got = results(codetta.linear_cross_entropy, tensors, target, **options)
    close(got, results(reference, tensors, target, **options))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_the_head_after_an_rms_norm(schedule, scheduled):
    """r depends on x outside; both paths of dx meet in autograd."""
    scheduled(schedule, 4)
    tensors, target = leaves()
    x, weight, gamma = (tensors[n] for n in ("x", "weight", "column_scale"))
    r = torch.rsqrt(x.square().mean(-1) + 1e-6)
    loss = codetta.linear_cross_entropy(x, weight, target, row_scale=r, column_scale=gamma)
    normed = torch.nn.functional.rms_norm(x, (D,), gamma, 1e-6)
    expected = reference(normed, weight, target)[0]
    close(loss, expected)
    found, exact = (torch.autograd.grad(t, (x, weight, gamma)) for t in (loss, expected))
    close(found, exact)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("wanted", ["row_scale", "column_scale", "x", "weight", "bias row_scale"])
def test_only_what_is_wanted_is_formed(schedule, wanted, scheduled):
    scheduled(schedule, 64)
    tensors, target = leaves()
    tensors = {n: t if n in wanted.split() else t.detach() for n, t in tensors.items()}
    with Spy() as spy:
        got = results(codetta.linear_cross_entropy, tensors, target)
    close(got, results(reference, tensors, target))
    again = schedule != "forward" and wanted != "row_scale"
    product = wanted in ("column_scale", "x", "weight")
    # The row scale's gradient comes from numbers of the forward pass: no product, no second look.
    assert spy.names.count("gemm") == 1 + again + product


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_log_sum_exp_has_a_gradient_in_both_scales(options):
    tensors, target = leaves()
    weights = torch.arange(M, dtype=torch.float64)
    found = []
    for function, more in (
        (codetta.linear_cross_entropy, {"return_lse": True, "chunk": 4}), (reference, {}),
    ):  # fmt: skip
        loss, lse = function(target=target, **tensors, **options, **more)[:2]
        found.append(torch.autograd.grad(loss + (lse * weights).sum(), tuple(tensors.values())))
    close(*found)
    lse = codetta.linear_cross_entropy(target=target, **tensors, return_lse=True).lse
    (alone,) = torch.autograd.grad(lse.sum(), tensors["row_scale"])
    lse = reference(target=target, **tensors)[1]
    close(alone, torch.autograd.grad(lse.sum(), tensors["row_scale"])[0])


@pytest.mark.parametrize("schedule", ["forward", "recompute"])
def test_backward_may_run_several_times(schedule):
    tensors, target = leaves()
    loss = codetta.linear_cross_entropy(target=target, **tensors, schedule=schedule, chunk=4)
    every = tuple(tensors.values())
    expected = torch.autograd.grad(reference(target=target, **tensors)[0], every)
    close(torch.autograd.grad(loss, every, retain_graph=True), expected)
    close(torch.autograd.grad(loss * 3, every), tuple(3 * g for g in expected))


def test_a_row_scale_of_zero_has_its_gradient():
    tensors, target = leaves()
    with torch.no_grad():
        tensors["row_scale"][::2] = 0
    got = results(codetta.linear_cross_entropy, tensors, target)
    close(got, results(reference, tensors, target))
    assert got[4][::2].any()


def test_an_ignored_row_scale_has_no_gradient_whatever_the_hidden_state_holds():
    tensors, target = leaves()
    target[2] = -100
    with torch.no_grad():
        tensors["x"][2] = float("nan")
    loss = codetta.linear_cross_entropy(target=target, **tensors)
    (gradient,) = torch.autograd.grad(loss, tensors["row_scale"])
    assert gradient[2] == 0 and gradient.isfinite().all()


def test_shift_leaves_the_row_scale_with_its_hidden_state():
    tensors, target = leaves()
    tensors = {n: t.detach() for n, t in tensors.items()}
    rolled = tensors | {"row_scale": tensors["row_scale"].roll(-1)}
    loss = codetta.linear_cross_entropy(target=target, **tensors, shift=True)
    assert not torch.allclose(
        loss, codetta.linear_cross_entropy(target=target, **rolled, shift=True)
    )
    close(loss, reference(target=target, **tensors, shift=True)[0])


def test_no_tokens_give_zero_gradients():
    tensors, target = leaves(0)
    got = results(codetta.linear_cross_entropy, tensors, target, reduction="sum")
    assert [g.shape for g in got[1:]] == [t.shape for t in tensors.values()]
    assert not any(g.any() for g in got)


@pytest.mark.parametrize("schedule", ["forward", "recompute"])
def test_a_compiled_function_holds_it_in_one_graph(schedule):
    tensors, target = leaves()

    def loss(**given):
        return codetta.linear_cross_entropy(target=target, **given, schedule=schedule, chunk=4)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    every = tuple(tensors.values())
    found = [(made := f(**tensors), *torch.autograd.grad(made, every)) for f in (loss, compiled)]
    close(*([t.detach() for t in each] for each in found), 0.0)


def test_second_derivatives_of_the_scales_are_refused():
    tensors, target = leaves()
    loss = codetta.linear_cross_entropy(target=target, **tensors)
    for name in ("row_scale", "column_scale"):
        (g,) = torch.autograd.grad(loss, tensors[name], create_graph=True, retain_graph=True)
        with pytest.raises(codetta.errors.DoubleBackward):
            g.sum().backward()


# -------------------------------------------------------------------------------- precision
def judge(dtype, options=None, spread=0.2, upstream=1.0):
    tensors, target = leaves(37, 32, 150, dtype, spread)
    wide = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    three = [
        results(f, t, target, upstream, **(options or {}))
        for f, t in (
            (codetta.linear_cross_entropy, tensors), (reference, wide), (reference, tensors),
        )
    ]  # fmt: skip
    for name, got, exact, eager in zip(("loss", *tensors), *three, strict=True):
        if name != "loss":  # the sum of all may be right by chance, in PyTorch too
            within_budget(name, got, exact, eager)
    each = [
        f(target=target, **t, **(options or {}), reduction="none")
        for f, t in (
            (codetta.linear_cross_entropy, tensors),
            (reference, wide),
            (reference, tensors),
        )
    ]
    within_budget("losses", *(r[0].detach() if isinstance(r, tuple) else r.detach() for r in each))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_errors_stay_within_the_budget(dtype, schedule, options, scheduled):
    scheduled(schedule, 16)
    judge(dtype, options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_confident_predictions_keep_their_gradients(dtype, schedule, scheduled):
    scheduled(schedule, 16)
    judge(dtype, spread=2.0, upstream=64.0)


def _no_target_slope(monkeypatch):
    made = engine._loss_slopes
    monkeypatch.setattr(
        engine, "_loss_slopes",
        lambda head, found: made(head, found | {"target_slope": 0 * found["target_slope"]}),
    )  # fmt: skip


def _mean_slope_of_the_neighbour(monkeypatch):
    made = engine._loss_slopes
    monkeypatch.setattr(
        engine, "_loss_slopes",
        lambda head, found: made(head, found | {"mean_slope": found["mean_slope"].roll(1)}),
    )  # fmt: skip


def _last_chunk_of_the_columns_only(monkeypatch):
    made = Sums._unfold

    def forgetful(self, *rest):
        self.column = None
        made(self, *rest)

    monkeypatch.setattr(Sums, "_unfold", forgetful)


def _column_scale_of_dx_forgotten(monkeypatch):
    made = Sums._scaling

    def ones(self, part):
        column, *rest = made(self, part)
        return [torch.ones_like(column), *rest]

    monkeypatch.setattr(Sums, "_scaling", ones)


def _row_scale_of_the_first_chunk(monkeypatch):
    made = Head.rows

    def wrong(self, start, stop):
        part, scale = made(self, start, stop), self.leaves.row_scale
        return replace(part, leaves=part.leaves._replace(row_scale=scale[: stop - start][:16]))

    monkeypatch.setattr(Head, "rows", lambda self, a, b: wrong(self, a, min(b, len(self.target))))


@pytest.mark.parametrize(
    "mutate",
    [
        _no_target_slope, _mean_slope_of_the_neighbour, _last_chunk_of_the_columns_only,
        _column_scale_of_dx_forgotten, _row_scale_of_the_first_chunk,
    ],
)  # fmt: skip
def test_the_budget_finds_wrong_formulas(mutate, monkeypatch, scheduled):
    scheduled("forward", 16)
    judge(torch.bfloat16)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        judge(torch.bfloat16)


# ----------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("over", ["forward", "tokens", "vocabulary"])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_the_memory_of_a_run_is_that_of_its_plan(over, dtype, monkeypatch):
    """Beside gradients and vectors: normalized hidden states are never stored between passes."""
    m, d, v = 512, 64, 320
    problem = Problem(m, d, v, dtype, True, True, True, fold=True)
    schedule = "forward" if over == "forward" else "recompute"
    cut = "vocabulary" if over == "vocabulary" else "tokens"
    found = [p for p in candidates(problem) if (p.schedule, p.over) == (schedule, cut)]
    plan = next(p for p in found if p.chunk == 128)
    # What a forward pass that stores no logits keeps of them is a matter of the backend.
    plan = replace(plan, rows=128)
    monkeypatch.setattr("codetta.loss.operator.choose", lambda *a, **k: plan)
    tensors, target = leaves(m, d, v, dtype)
    tensors["bias"] = None
    gc.collect()
    with codetta.use_backend("reference"), Alive() as alive:
        results(codetta.linear_cross_entropy, tensors, target)
    gradients, vectors = (m + v) * d * dtype.itemsize, 24 * m * 4
    assert plan.bytes_extra <= alive.peak <= plan.bytes_extra + gradients + vectors


def test_folding_costs_time_and_memory_in_every_plan():
    plain = Problem(16384, 2048, 32000, torch.bfloat16, True, True, True)
    for a, b in zip(candidates(plain), candidates(replace(plain, fold=True)), strict=True):
        assert b.seconds > a.seconds and b.bytes_extra >= a.bytes_extra
    assert choose(replace(plain, fold=True)).bytes_extra <= 1 << 30


def test_statistics_keep_what_there_is():
    lse, logit = torch.zeros(2), torch.ones(2)
    made = Statistics.of({"lse": lse, "logit": logit, "logits": logit, "mean_slope": lse})
    assert made.named == {"lse": lse, "logit": logit, "mean_slope": lse}
