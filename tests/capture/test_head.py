"""A head whose logits only a loss reads is one call; others are left alone, with the reason."""

from __future__ import annotations

import re
from functools import cache

import capture_models
import pytest
import torch
import torch.nn.functional as F
import twin
from torch import nn

import codetta
from codetta.capture import moves
from codetta.capture.headcall import HeadCall
from codetta.explanation.head import HeadSizes, head_kernels
from codetta.loss.plan import Problem, choose

MODELS = {
    "llama": {},
    "gemma2": {"softcap": 30.0},
    "gpt2": {},
    "nano_gpt": {},
    "cohere": {"logit_scale": 0.0625},
}


@cache
def captured(name):
    """The graph of a function that returns the loss alone."""
    model = capture_models.make(name)
    batch = capture_models.batch(name)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 2:4] = -100
    (graph,) = twin.capture(lambda: model(**batch).loss).graphs
    return graph


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_of_models_are_equal_in_fp64(name):
    found = twin.twin(*captured(name))
    found.check(1e-12)
    (call,) = found.report.heads
    assert call.options == {"ignore_index": -100, "reduction": "mean", **MODELS[name]}
    assert len(found.report.calls) == 3


# ------------------------------------------------------------------------- forms of one loss
WIDTH, CLASSES = 8, 24


class Head(nn.Module):
    """A projection that becomes a region, and a head behind it."""

    def __init__(self, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.table = nn.Parameter(torch.randn(WIDTH, CLASSES))

    def hidden(self, x):
        return F.silu(self.inner(x))

    def forward(self, x):
        return self.head(self.hidden(x))


def inputs(rows=3, tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, tokens, WIDTH, generator=generator).to(dtype)
    y = torch.randint(0, CLASSES, (rows, tokens), generator=generator)
    y[0, 1], y[1, 2] = -100, 3
    return x, y


def shifted_logits(m, x, y):
    logits = m(x).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), y[..., 1:].contiguous().view(-1))


def shifted_labels(m, x, y):
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    return F.cross_entropy(m(x).view(-1, CLASSES).float(), y, reduction="sum") / 7


def classes_in_the_middle(m, x, y):
    return F.cross_entropy(m(x).transpose(1, 2), y)


def single_losses(m, x, y):
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="none")


def single_losses_in_rows(m, x, y):
    return F.cross_entropy(m(x).permute(0, 2, 1), y, reduction="none").mean(1)


def other_ignored(m, x, y):
    y = torch.where(y == -100, 3, y)
    return F.cross_entropy(m(x).reshape(-1, CLASSES), y.reshape(-1), ignore_index=3)


def in_two_steps(m, x, y):
    return F.nll_loss(m(x).view(-1, CLASSES).log_softmax(-1), y.view(-1))


def capped_and_scaled(m, x, y):
    z = torch.tanh(m(x) * 0.5 / 4.0) * 8.0 / 2.0
    return F.cross_entropy(z.view(-1, CLASSES).float(), y.view(-1))


def scaled(m, x, y):
    return F.cross_entropy((m(x) / 3.0 * 2.0).view(-1, CLASSES), y.view(-1))


def stored_as_k_n(m, x, y):
    return F.cross_entropy((m.hidden(x) @ m.table).view(-1, CLASSES), y.view(-1))


def tokens_first(m, x, y):
    return F.cross_entropy(m(x).transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1))


def last_tokens(m, x, y):
    return F.cross_entropy(m(x)[:, 1::2].reshape(-1, CLASSES), y[:, 1::2].reshape(-1))


def hidden_in_wide(m, x, y):
    z = F.linear(m.hidden(x).float(), m.head.weight.float())
    return F.cross_entropy(z.view(-1, CLASSES), y.view(-1))


FORMS = [
    shifted_logits, shifted_labels, classes_in_the_middle, single_losses, single_losses_in_rows,
    other_ignored, in_two_steps, capped_and_scaled, scaled, stored_as_k_n, tokens_first,
    last_tokens, hidden_in_wide,
]  # fmt: skip


def graph_of(form, model, *args, **options):
    (graph,) = twin.capture(lambda x, y: form(model, x, y), *args, **options).graphs
    return graph


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_each_form_of_the_loss_is_one_call(form):
    found = twin.twin(*graph_of(form, Head(), *inputs()))
    assert [call.name for call in found.report.heads], found.report.left
    found.check(1e-12)


@pytest.mark.parametrize("form", [shifted_logits, shifted_labels, single_losses])
def test_a_bias_is_part_of_it(form):
    found = twin.twin(*graph_of(form, Head(bias=True), *inputs()))
    assert len(found.report.heads[0].arguments) == 4
    found.check(1e-12)


def test_no_node_that_holds_logits_is_left():
    module, given = graph_of(shifted_logits, Head(), *inputs())
    made, report = twin.rewritten(module, given)
    assert len(report.heads) == 1
    names = {getattr(n.target, "__name__", n.target) for n in made.graph.nodes}
    assert not names & {"linear", "cross_entropy", "float"}


def test_two_heads_are_two_calls():
    model = Head()

    def both(m, x, y):
        second = F.cross_entropy(F.linear(m.hidden(x), m.table.t()).flatten(0, 1), y.flatten())
        return shifted_labels(m, x, y) + 0.3 * second

    found = twin.twin(*graph_of(both, model, *inputs()))
    assert len(found.report.heads) == 2
    found.check(1e-12)


# ----------------------------------------------------------------------------------- explain
def test_explain_shows_head_and_loss_as_one_region():
    model = codetta.compile(capture_models.make("llama"), logits="none")
    found = codetta.explain(model, **capture_models.batch("llama"))
    (head,) = (r for r in found.regions if r.note)
    text = " ".join(str(found).split())
    assert "lm_head and its loss, fused: logits never stored" in text
    assert {"linear", "cross_entropy"} <= {name for name, _ in head.operations}
    assert not {"linear", "cross_entropy"} & {x.what for x in found.left}
    one = 2 * 12 * 53 * 32
    assert sum(k.flops for k in head.before if k.kind == "gemm") == 3 * one
    assert sum(k.flops for k in head.after if k.kind == "gemm") in (3 * one, 4 * one)


@pytest.mark.parametrize(("schedule", "products"), [("forward", 3), ("recompute", 4)])
@pytest.mark.parametrize("chunk", [5, 8, 12])
def test_chunks_of_a_head_add_up_to_whole_products(schedule, products, chunk):
    problem = Problem(12, 32, 53, torch.bfloat16, True, True, True)
    plan = choose(problem, schedule=schedule, chunk=chunk)
    kernels = [k for k in head_kernels(HeadSizes(problem, plan)) if k.kind == "gemm"]
    assert sum(k.flops for k in kernels) == products * 2 * 12 * 53 * 32
    assert len(kernels) == products * -(-12 // chunk)
    rounded = [k for k in head_kernels(HeadSizes(problem, plan)) if "round(" in str(k.formulas)]
    assert len(rounded) == (schedule == "recompute" and chunk < 12)  # dx or dW is summed in fp32
    assert (plan.sum_bits == 24) == (schedule == "forward" and chunk < 12)


# --------------------------------------------------------------------------------- left alone
def smoothed(m, x, y):
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)


def weighted(m, x, y):
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), torch.ones(CLASSES))


def accuracy(m, x, y):
    z = m(x).flatten(0, 1)
    return F.cross_entropy(z, y.flatten()), (z.argmax(-1) == y.flatten()).sum()


def z_loss(m, x, y):
    z = m(x).flatten(0, 1)
    return F.cross_entropy(z, y.flatten()) + 1e-3 * z.logsumexp(-1).square().mean()


def twice(m, x, y):
    z = m(x).flatten(0, 1)
    return F.cross_entropy(z, y.flatten()) + F.cross_entropy(z, y.flatten().roll(1))


def custom(m, x, y):
    z = m(x).flatten(0, 1)
    return -z.log_softmax(-1).gather(1, y.flatten().clamp(0)[:, None]).mean()


def entropy(m, x, y):
    logp = m(x).flatten(0, 1).log_softmax(-1)
    return F.nll_loss(logp, y.flatten()) + (logp.exp() * logp).sum()


def adapted(m, x, y):
    z = m(x) + m.hidden(x) @ m.table
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


def soft_targets(m, x, y):
    return F.cross_entropy(m(x).flatten(0, 1), m(x).flatten(0, 1).detach().softmax(-1))


def learned_scale(m, x, y):
    return F.cross_entropy((m(x) * m.inner.bias[0]).flatten(0, 1), y.flatten())


def rounded(m, x, y):
    return F.cross_entropy(m(x).bfloat16().float().flatten(0, 1), y.flatten())


def some_classes(m, x, y):
    return F.cross_entropy(m(x)[..., :20].flatten(0, 1), y.flatten().clamp(max=19))


def written_into(m, x, y):
    z = m(x).flatten(0, 1)
    z[:, 0] = -9.0
    return F.cross_entropy(z, y.flatten())


def returned(m, x, y):
    z = m(x)
    return F.cross_entropy(z.flatten(0, 1), y.flatten()), z


def few_classes(m, x, y):
    return F.cross_entropy(F.linear(m(x), m.table).flatten(0, 1), y.flatten() % WIDTH)


LEFT = {
    smoothed: "no plain cross-entropy",
    weighted: "its classes have weights",
    accuracy: "also read by argmax",
    z_loss: "also read by logsumexp",
    twice: "also read by cross_entropy|several losses",
    custom: r"no plain cross-entropy: aten.gather.default reads it",
    entropy: "no plain cross-entropy: aten.exp.default reads it",
    adapted: "aten.add.Tensor reads it",
    soft_targets: "no plain cross-entropy: aten.mul.Tensor reads it",
    learned_scale: "aten.mul.Tensor reads it|not a number",
    rounded: "its logits are rounded to torch.bfloat16",
    some_classes: "a slice of the vocabulary",
    written_into: "also read by setitem",
    returned: "the logits are returned: 15 x 24 values",
    few_classes: "its 8 logits are no more than its 24 hidden values",
}


@pytest.mark.parametrize("form", LEFT, ids=lambda f: f.__name__)
def test_other_losses_are_left_alone_with_the_reason(form):
    module, given = graph_of(form, Head(), *inputs())
    made, report = twin.rewritten(module, given)
    assert not report.heads and not report.dropped
    assert any(re.search(LEFT[form], x.reason) for x in report.left), report.left
    for x, y in zip(made(*given), module(*given), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- can it fail?
def _without_ignored(monkeypatch):
    whole = HeadCall.options.fget
    monkeypatch.setattr(HeadCall, "options", property(
        lambda call: {k: v for k, v in whole(call).items() if k != "ignore_index"}))  # fmt: skip


def _without_scale(monkeypatch):
    whole = HeadCall.options.fget
    monkeypatch.setattr(HeadCall, "options", property(
        lambda call: {k: v for k, v in whole(call).items() if k != "logit_scale"}))  # fmt: skip


def _without_slices(monkeypatch):
    """Tokens stay where they are, but as many as there are targets."""
    monkeypatch.setattr(moves.Slice, "__call__", lambda move, x: x.narrow(move.axis, 1, 4))


def _mean_over_all(monkeypatch):
    whole = HeadCall.options.fget
    monkeypatch.setattr(HeadCall, "options", property(
        lambda call: whole(call) | {"reduction": "sum"}))  # fmt: skip


@pytest.mark.parametrize(
    ("form", "spoil"),
    [
        (other_ignored, _without_ignored),
        (scaled, _without_scale),
        (shifted_logits, _without_slices),
        (shifted_logits, _mean_over_all),
    ],
)
def test_a_wrong_call_is_found_out(form, spoil, monkeypatch):
    module, given = graph_of(form, Head(), *inputs())
    twin.twin(module, given).check(1e-12)
    spoil(monkeypatch)
    with pytest.raises(AssertionError, match="error"):
        twin.twin(module, given).check(1e-2)
