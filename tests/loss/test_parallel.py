"""The vocabulary cut over two processes: loss and gradients are those of one process in fp64."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from torch import distributed
from torch.multiprocessing import spawn
from torch.nn import functional

import codetta
from codetta import errors
from codetta.loss.parallel import Shard
from codetta.loss.vocabulary import Statistics, Vocabulary

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")

M, D, V = 37, 16, 50
#: Rows of the weight on each process: equal, uneven, and one that has a single row.
CUTS = ((25, 25), (31, 19), (1, 49))
CASES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "items": {"num_items_in_batch": 11},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.01},
    "softcap and scale": {"softcap": 3.0, "logit_scale": 0.7},
    "bias": {"bias": True},
    "weights": {"token_weight": True},
    "shift": {"shift": True},
    "scales": {"row_scale": True, "column_scale": True},
    "scales, recompute": {
        "row_scale": True,
        "column_scale": True,
        "bias": True,
        "softcap": 3.0,
        "chunk": 8,
        "label_smoothing": 0.1,
        "schedule": "recompute",
    },
    "ignored token of the vocabulary": {"ignore_index": 3},
    "recompute": {"schedule": "recompute"},
    "chunks": {"chunk": 8, "label_smoothing": 0.1, "z_loss": 0.02, "bias": True},
    "chunks, recompute": {"chunk": 8, "schedule": "recompute", "reduction": "none"},
}


def inputs():
    g = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    target = torch.randint(V, (M,), generator=g)
    target[::5] = -100
    return {
        "x": normal(M, D), "weight": 0.5 * normal(V, D), "bias": normal(V), "target": target,
        "token_weight": normal(M).abs(), "upstream": normal(M),
        "row_scale": normal(M).abs(), "column_scale": normal(D),
    }  # fmt: skip


def options(case, t, rows):
    """What the call takes: of a bias the rows that are here."""
    given = dict(CASES[case])
    if given.pop("bias", False):
        given["bias"] = t["bias"][rows].clone().requires_grad_()
    if given.pop("token_weight", False):
        given["token_weight"] = t["token_weight"]
    for name in ("row_scale", "column_scale"):
        if given.pop(name, False):
            given[name] = t[name].clone().requires_grad_()
    if "ignore_index" in given:
        t["target"] = t["target"].where(t["target"] >= 0, given["ignore_index"])
    return given


def expected(case):
    """Plain PyTorch in fp64, from all logits."""
    t = inputs()
    o = options(case, t, slice(None))
    x, w = t["x"].clone().requires_grad_(), t["weight"].clone().requires_grad_()
    h = x * o.get("row_scale", torch.ones(M, dtype=x.dtype))[:, None]
    h = h * o["column_scale"] if "column_scale" in o else h
    z = functional.linear(h, w, o.get("bias")) * o.get("logit_scale", 1.0)
    cap = o.get("softcap")
    z = cap * torch.tanh(z / cap) if cap else z
    ignored = o.get("ignore_index", -100)
    target, weights = t["target"], o.get("token_weight", torch.ones(M, dtype=z.dtype))
    if o.get("shift"):
        z, target, weights = z[:-1], target[1:], weights[1:]
    losses = functional.cross_entropy(
        z, target, reduction="none", ignore_index=ignored,
        label_smoothing=o.get("label_smoothing", 0.0),
    )  # fmt: skip
    counts = (target != ignored).double()
    lse = z.logsumexp(1)
    losses = weights * (losses + counts * o.get("z_loss", 0.0) * lse.square())
    reduction = o.get("reduction", "mean")
    loss = losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        loss = loss / o.get("num_items_in_batch", (weights * counts).sum())
    loss.backward(t["upstream"][: len(loss)] if reduction == "none" else None)
    right = (z.argmax(1) == target)[counts > 0].double().mean()
    bias = o.get("bias")
    return {
        "loss": loss.detach(), "lse": lse.detach(), "dx": x.grad, "dw": w.grad, "right": right,
        "db": None if bias is None else bias.grad,
        **{n: o[n].grad for n in ("row_scale", "column_scale") if n in o},
    }  # fmt: skip


def port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def joined(rank, port_number):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_number)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    return distributed.group.WORLD


def close(found, exact, name, tolerance=1e-12):
    error = (found.double() - exact).norm() / exact.norm().clamp_min(1e-30)
    assert error < tolerance, f"{name}: {error:.1e}"


def check(case, cut, rank, group):
    t = inputs()
    rows = slice(0, cut[0]) if rank == 0 else slice(cut[0], V)
    o = options(case, t, rows)
    x, w = t["x"].clone().requires_grad_(), t["weight"][rows].clone().requires_grad_()
    found = codetta.linear_cross_entropy(
        x, w, t["target"], process_group=group, return_lse=True, return_accuracy=True, **o
    )
    reduction = o.get("reduction", "mean")
    found.loss.backward(t["upstream"] if reduction == "none" else None)
    exact, last = expected(case), M - bool(o.get("shift"))
    name = f"{case}, {cut}, process {rank}"
    close(found.loss[:last] if reduction == "none" else found.loss, exact["loss"], f"{name}: loss")
    close(found.lse[:last], exact["lse"], f"{name}: lse")
    close(x.grad, exact["dx"], f"{name}: dx")
    close(w.grad, exact["dw"][rows], f"{name}: dW")
    if exact["db"] is not None:
        close(o["bias"].grad, exact["db"][rows], f"{name}: d bias")
    for scale in {"row_scale", "column_scale"} & exact.keys():
        close(o[scale].grad, exact[scale], f"{name}: d {scale}")
    if reduction == "mean":
        close(found.accuracy, exact["right"], f"{name}: accuracy", 1e-6)


def values(rank, port_number):
    group = joined(rank, port_number)
    for case in CASES:
        for cut in CUTS:
            check(case, cut, rank, group)
    nothing_of_all_logits_is_made_or_sent(rank, group)
    frozen_tensors_and_several_backwards(rank, group)
    half_precision_sums_are_rounded_once(rank, group)
    lse_has_a_gradient(rank, group)
    refusals(rank, group)
    what_is_not_combined_is_seen(rank, group)
    distributed.destroy_process_group()


def nothing_of_all_logits_is_made_or_sent(rank, group):
    sizes, sent = [], []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in made if isinstance(t, torch.Tensor)) if isinstance(
                made, tuple | list
            ) else sizes.append(made.numel() if isinstance(made, torch.Tensor) else 0)
            return made

    reduce = distributed.all_reduce

    def spied(x, *args, **kwargs):
        sent.append(x.numel())
        return reduce(x, *args, **kwargs)

    t = inputs()
    rows = slice(0, 25) if rank == 0 else slice(25, V)
    w = t["weight"][rows].clone().requires_grad_()
    x = t["x"].clone().requires_grad_()
    codetta.linear_cross_entropy(x, w, t["target"], process_group=group)  # sizes are exchanged
    gathered, distributed.all_gather = distributed.all_gather, None  # and not again
    distributed.all_reduce = spied
    try:
        with Spy():
            loss = codetta.linear_cross_entropy(
                x, w, t["target"], process_group=group, schedule="recompute", chunk=8
            )
            loss.backward()
    finally:
        distributed.all_reduce, distributed.all_gather = reduce, gathered
    assert max(sizes) < M * 25  # not even the logits that are here at once
    chunks = -(-M // 8)
    assert sum(sent) == M + 2 * M + M * D  # lse; e^lse and logit; dx
    assert len(sent) == 2 * chunks + 1


def frozen_tensors_and_several_backwards(rank, group):
    t, exact = inputs(), expected("plain")
    rows = slice(0, 31) if rank == 0 else slice(31, V)
    for schedule in ("forward", "recompute"):
        for frozen in ("x", "w"):
            x = t["x"].clone().requires_grad_(frozen != "x")
            w = t["weight"][rows].clone().requires_grad_(frozen != "w")
            loss = codetta.linear_cross_entropy(
                x, w, t["target"], process_group=group, schedule=schedule
            )
            loss.backward(retain_graph=True)
            (3.0 * loss).backward()
            if frozen == "x":
                close(w.grad, 4.0 * exact["dw"][rows], f"frozen x, {schedule}")
            else:
                close(x.grad, 4.0 * exact["dx"], f"frozen W, {schedule}")


def half_precision_sums_are_rounded_once(rank, group):
    t, exact = inputs(), expected("plain")
    rows = slice(0, 31) if rank == 0 else slice(31, V)
    x = t["x"].bfloat16().requires_grad_()
    w = t["weight"][rows].bfloat16().requires_grad_()
    loss = codetta.linear_cross_entropy(x, w, t["target"], process_group=group)
    loss.backward()
    assert loss.dtype is torch.float32 and x.grad.dtype is torch.bfloat16
    close(loss, exact["loss"], "bf16 loss", 0.01)
    close(x.grad, exact["dx"], "bf16 dx", 0.02)
    both = [torch.empty_like(x.grad) for _ in range(2)]
    distributed.all_gather(both, x.grad, group)
    assert torch.equal(*both)  # processes that drift apart would train different models


def lse_has_a_gradient(rank, group):
    t = inputs()
    rows = slice(0, 31) if rank == 0 else slice(31, V)
    x, w = t["x"].clone().requires_grad_(), t["weight"][rows].clone().requires_grad_()
    found = codetta.linear_cross_entropy(
        x, w, t["target"], process_group=group, return_lse=True, reduction="sum"
    )
    (found.loss + (found.lse * t["upstream"]).sum()).backward()
    xs, ws = t["x"].clone().requires_grad_(), t["weight"].clone().requires_grad_()
    z = xs @ ws.t()
    loss = functional.cross_entropy(z, t["target"], reduction="sum")
    (loss + (z.logsumexp(1) * t["upstream"]).sum()).backward()
    close(x.grad, xs.grad, "dx through lse")
    close(w.grad, ws.grad[rows], "dW through lse")


def refusals(rank, group):
    t = inputs()
    call = codetta.linear_cross_entropy
    with pytest.raises(errors.LossArguments, match="return_logits and process_group"):
        call(t["x"], t["weight"], t["target"], process_group=group, return_logits=True)
    with pytest.raises(errors.BadProcessGroup, match="'tp', not a torch"):
        call(t["x"], t["weight"], t["target"], process_group="tp")
    alone = distributed.new_group([0])
    if rank == 1:
        with pytest.raises(errors.BadProcessGroup, match="with this process in it"):
            call(t["x"], t["weight"], t["target"], process_group=alone)
    else:
        loss = call(t["x"], t["weight"], t["target"], process_group=alone)
        close(loss, expected("plain")["loss"], "a group of one")
    dtype = torch.float64 if rank == 0 else torch.float32
    with pytest.raises(errors.BadProcessGroup, match=r"\(50, 16\) torch.float64, \(50, 16\) torch"):
        call(t["x"].to(dtype), t["weight"].to(dtype), t["target"], process_group=group)
    w = t["weight"][:25].clone()
    outside = t["target"].clone()
    outside[1] = V  # of the whole vocabulary, not of the part that is here
    with pytest.raises(errors.TargetOutOfRange, match="50"):
        call(t["x"], w, outside, process_group=group)


#: Method of Shard that is replaced by that of one process -> a case that must then fail.
MUTANTS = {
    "size": "smoothing",
    "local": "plain",
    "combined": "plain",
    "summed": "plain",
}


def what_is_not_combined_is_seen(rank, group):
    for method, case in MUTANTS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Shard, method, getattr(Vocabulary, method))
            # Targets are then local ones, as out of range as they like.
            patch.setattr("codetta.loss.call.check_targets", lambda *args: None)
            with pytest.raises(AssertionError, match=f"process {rank}"):
                for cut in CUTS:
                    check(case, cut, rank, group)


def test_two_processes_have_the_loss_and_gradients_of_one():
    spawn(values, (port(),), nprocs=2)


def test_without_torch_distributed_a_group_is_refused():
    t = inputs()
    with pytest.raises(errors.BadProcessGroup, match="not initialized"):
        codetta.linear_cross_entropy(t["x"], t["weight"], t["target"], process_group=object())


@pytest.fixture
def alone():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_infinite_logits_combine_as_in_torch_logsumexp(alone):
    shard = Shard(alone, 0, 4, 4)
    rows = torch.tensor([[1.0, 2.0], [float("inf"), 0.0], [-float("inf"), -float("inf")]])
    lse = rows.logsumexp(1)
    found = shard.combined(Statistics(lse, torch.zeros(3)))
    assert torch.equal(found.lse, lse)
