"""Every argument, alone and with every other, against PyTorch in fp64: loss and gradients."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from helpers.spy import Spy
from loss_oracle import close, head, reference

import codetta

LEAD = (3, 5)


def settings(name):
    """Keyword arguments of one setting."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.rand(LEAD, generator=generator, dtype=torch.float64)
    columns = torch.randn(8, generator=generator, dtype=torch.float64)
    return {
        "bias": {"bias": True},
        "ignore_index": {"ignore_index": 3},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "num_items": {"num_items_in_batch": 7},
        "num_items_tensor": {"num_items_in_batch": torch.tensor(7)},
        "smoothing": {"label_smoothing": 0.3},
        "token_weight": {"token_weight": weights.requires_grad_()},
        "softcap": {"softcap": 2.0},
        "logit_scale": {"logit_scale": 0.4},
        "z_loss": {"z_loss": 0.1},
        "shift": {"shift": True},
        "row_scale": {"row_scale": (weights.detach() + 0.5).requires_grad_()},
        "column_scale": {"column_scale": columns.requires_grad_()},
    }[name]


NAMES = (
    "bias", "ignore_index", "sum", "none", "num_items", "num_items_tensor", "smoothing",
    "token_weight", "softcap", "logit_scale", "z_loss", "shift", "row_scale",
    "column_scale",
)  # fmt: skip
SAME = ({"sum", "none"}, {"num_items", "num_items_tensor"})
REFUSED = [{r, n} for r in ("sum", "none") for n in ("num_items", "num_items_tensor")]


def merged(names):
    found = {}
    for name in names:
        found |= settings(name)
    return found


def call(function, options, schedule=None, chunk=None, seed=0):
    """Results and gradients of all leaves for a random upstream gradient."""
    x, weight, target, bias = head(*LEAD, seed=seed)
    options = dict(options)
    leaves = [x, weight]
    if options.pop("bias", False):
        options["bias"] = bias
        leaves.append(bias)
    if "ignore_index" in options:
        target = torch.where(target == -100, options["ignore_index"], target)
    leaves += [options[n] for n in ("token_weight", "row_scale", "column_scale") if n in options]
    if function is not reference:
        options |= {"schedule": schedule, "chunk": chunk}
    made = function(x, weight, target, **options)
    loss = made[0] if isinstance(made, tuple) else made
    upstream = torch.randn(
        loss.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    return loss.detach(), torch.autograd.grad(loss, leaves, upstream)


def schedules(options):
    return ["recompute"] if options.get("reduction") == "none" else ["forward", "recompute"]


def agrees(names):
    options = merged(names)
    loss, gradients = call(reference, options)
    for schedule in schedules(options):
        for chunk in (4, None):
            got, found = call(codetta.linear_cross_entropy, options, schedule, chunk)
            close(got, loss)
            close(found, gradients)


@pytest.mark.parametrize("name", ("nothing", *NAMES))
def test_each_argument_means_what_it_means_in_pytorch(name):
    agrees(() if name == "nothing" else (name,))


@pytest.mark.parametrize("first", NAMES[:-1])
def test_every_pair_of_arguments_combines(first):
    for pair in combinations(NAMES[NAMES.index(first) :], 2):
        if pair[0] != first or set(pair) in SAME:
            continue
        if set(pair) in REFUSED:
            with pytest.raises(codetta.errors.LossArguments):
                call(codetta.linear_cross_entropy, merged(pair))
        else:
            agrees(pair)


def test_all_arguments_combine():
    agrees([n for n in NAMES if n not in ("sum", "none", "num_items_tensor")])
    agrees([n for n in NAMES if n not in ("sum", "num_items", "num_items_tensor")])


@pytest.mark.parametrize("name", [n for n in NAMES if n != "num_items_tensor"])
def test_each_argument_has_an_effect(name):
    plain, _ = call(codetta.linear_cross_entropy, {})
    other, _ = call(codetta.linear_cross_entropy, settings(name))
    assert plain.shape != other.shape or not torch.allclose(plain, other)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0, "logit_scale": 0.4}, {"shift": True}])
def test_what_is_asked_for_comes_beside_the_loss(reduction, extra):
    x, weight, target, bias = head(*LEAD)
    options = {"reduction": reduction, "bias": bias, **extra}
    made = codetta.linear_cross_entropy(
        x, weight, target, return_lse=True, return_accuracy=True, return_logits=True, chunk=4,
        **options,
    )  # fmt: skip
    loss, lse, logits = reference(x, weight, target, **options)
    close(made.loss, loss)
    close(made.lse, lse)
    close(made.logits, logits.detach())
    assert not made.logits.requires_grad and not made.accuracy.requires_grad
    if extra.get("shift"):
        target = torch.nn.functional.pad(target[:, 1:], (0, 1), value=-100)
    valid = target != -100
    right = (logits.argmax(-1) == target) & valid
    expected = {"none": right.float(), "sum": right.sum().float()}
    close(made.accuracy, expected.get(reduction, right.sum() / valid.sum()))
    assert right.any() and not right[valid].all()


def test_what_is_not_asked_for_is_none():
    x, weight, target, _ = head(*LEAD)
    made = codetta.linear_cross_entropy(x, weight, target, return_accuracy=True)
    assert made.lse is None and made.logits is None and made.accuracy.shape == ()
    assert isinstance(codetta.linear_cross_entropy(x, weight, target), torch.Tensor)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("with_loss", [True, False])
def test_the_log_sum_exp_is_differentiable(reduction, with_loss):
    def total(function):
        x, weight, target, bias = head(*LEAD)
        options = {"bias": bias, "reduction": reduction, "softcap": 3.0}
        if function is not reference:
            options |= {"return_lse": True, "chunk": 4}
        loss, lse = function(x, weight, target, **options)[:2]
        upstream = torch.arange(lse.numel(), dtype=torch.float64).reshape(lse.shape)
        value = (lse * upstream).sum() + (loss.sum() if with_loss else 0)
        return torch.autograd.grad(value, (x, weight, bias))

    close(total(codetta.linear_cross_entropy), total(reference))


def test_two_unequal_micro_batches_equal_one_batch():
    """Gradient accumulation as in transformers: every part is divided by the number of all."""
    x, weight, target, _ = head(12)
    count = int((target != -100).sum())
    whole = codetta.linear_cross_entropy(x, weight, target)
    parts = [
        codetta.linear_cross_entropy(x[rows], weight, target[rows], num_items_in_batch=count)
        for rows in (slice(0, 3), slice(3, 12))
    ]
    close(parts[0] + parts[1], whole)
    expected = torch.autograd.grad(whole, (x, weight))
    close(torch.autograd.grad(parts[0] + parts[1], (x, weight)), expected)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reduction": "average"}, codetta.errors.BadAttribute),
        ({"label_smoothing": 1.5}, codetta.errors.BadAttribute),
        ({"softcap": 0.0}, codetta.errors.BadAttribute),
        ({"softcap": float("inf")}, codetta.errors.BadAttribute),
        ({"logit_scale": float("nan")}, codetta.errors.BadAttribute),
        ({"z_loss": float("inf")}, codetta.errors.BadAttribute),
        ({"logit_scale": torch.ones((), requires_grad=True)}, codetta.errors.BadAttribute),
        ({"z_loss": torch.ones((), requires_grad=True)}, codetta.errors.BadAttribute),
        ({"num_items_in_batch": torch.tensor([3, 4])}, codetta.errors.BadRank),
        ({"chunk": 0}, codetta.errors.BadAttribute),
        ({"memory_limit": 0}, codetta.errors.BadAttribute),
        ({"memory_limit": True}, codetta.errors.BadAttribute),
        ({"memory_limit": 1e9}, codetta.errors.BadAttribute),
        ({"accum_dtype": torch.bfloat16}, codetta.errors.BadAttribute),
        ({"accum_dtype": torch.int32}, codetta.errors.BadAttribute),
        ({"accum_dtype": "bf16"}, codetta.errors.BadAttribute),
        ({"schedule": "fast"}, codetta.errors.BadAttribute),
        ({"schedule": "forward", "reduction": "none"}, codetta.errors.LossArguments),
        ({"bias": torch.zeros(5, dtype=torch.float64)}, codetta.errors.BadRank),
        ({"bias": torch.zeros(13)}, codetta.errors.LossDtypes),
        ({"token_weight": torch.zeros(4)}, codetta.errors.BadRank),
        ({"row_scale": torch.zeros(3)}, codetta.errors.BadRank),
        ({"column_scale": torch.zeros(3, 5)}, codetta.errors.BadRank),
        ({"column_scale": torch.zeros(8, dtype=torch.int64)}, codetta.errors.UnsupportedDtype),
        ({"row_scale": torch.zeros(3, 5, device="meta")}, codetta.errors.DeviceMismatch),
        ({"token_weight": torch.zeros(LEAD, dtype=torch.int64)}, codetta.errors.UnsupportedDtype),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "-".join(x),
)
def test_bad_arguments_are_named(options, error):
    x, weight, target, _ = head(*LEAD)
    with pytest.raises(error):
        codetta.linear_cross_entropy(x, weight, target, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_dw_is_summed_in_is_left_open_or_fp32(dtype):
    x, weight, target, _ = head(*LEAD, dtype=dtype)
    results = [
        codetta.linear_cross_entropy(x, weight, target, accum_dtype=good)
        for good in (None, torch.float32)
    ]
    assert torch.equal(*results)
    for given in (torch.float16, torch.bfloat16, torch.float64):
        with Spy() as spy, pytest.raises(codetta.errors.BadAttribute, match="use None") as raised:
            codetta.linear_cross_entropy(x, weight, target, accum_dtype=given)
        assert f"linear_cross_entropy was given accum_dtype={given}" in str(raised.value)
        assert spy.names == []


def test_a_number_of_items_in_a_vector_of_one_changes_no_dtype():
    x, weight, target, _ = head(*LEAD, dtype=torch.float32)
    items = torch.tensor([7.0], dtype=torch.float64)
    loss = codetta.linear_cross_entropy(x, weight, target, num_items_in_batch=items)
    assert loss.dtype == torch.float32
    same = codetta.linear_cross_entropy(x, weight, target, num_items_in_batch=7)
    assert torch.equal(loss, same)


def test_tensors_that_do_not_fit_are_named():
    x, weight, target, _ = head(*LEAD)
    for bad, error in (
        ((x, weight[:, :4], target), codetta.errors.BadRank),
        ((x, weight, target[0]), codetta.errors.BadRank),
        ((x, weight.float(), target), codetta.errors.LossDtypes),
        ((x, weight, target.double()), codetta.errors.UnsupportedDtype),
        ((x.long(), weight, target), codetta.errors.UnsupportedDtype),
        ((x, weight.to("meta"), target), codetta.errors.DeviceMismatch),
        ((x, weight, target.tolist()), codetta.errors.NotATensor),
    ):
        with pytest.raises(error):
            codetta.linear_cross_entropy(*bad)
    with pytest.raises(codetta.errors.BadRank):
        codetta.linear_cross_entropy(x[0, 0], weight, target[0, 0], shift=True)
