"""``codetta.compile(model, logits="none")``: the loss without logits, in every way people train."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import socket

import capture_models
import pytest
import torch
import twin as twins
from helpers.budget import within_budget
from torch import distributed, nn
from torch.multiprocessing import spawn
from torch.utils._python_dispatch import TorchDispatchMode

import codetta
from codetta import errors
from codetta.capture.backend import parameters_of
from codetta.capture.rewrite import rewrite
from codetta.capture.withheld import Withheld


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def pair(name="llama", prepare=lambda model: None, **changes):
    """A model and its copy, prepared alike."""
    model = capture_models.make(name, **changes)
    prepare(model)
    return model, copy.deepcopy(model)


def heads(compiled):
    return [len(r.heads) for r in compiled.codetta_compiler.rewritten]


def check(model, twin, tolerance=1e-5):
    """Equal gradients, None where there is none."""
    largest = max(p.grad.norm() for p in model.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        q = q[1]
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            error = (p.grad - q.grad).norm()
            assert error <= tolerance * max(p.grad.norm(), 1e-3 * largest), f"{name}: {error}"


def train(model, twin, compiled, name="llama", **batch):
    """One step of each; the losses are compared."""
    batch = capture_models.batch(name) | batch
    loss, output = model(**batch).loss, compiled(**batch)
    assert isinstance(output.logits, Withheld)
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=0)
    loss.backward()
    output.loss.backward()
    return output


# -------------------------------------------------------------------------- how much memory
@pytest.mark.parametrize("limit", [None, 1, 1 << 40])
def test_the_loss_is_given_the_limit_and_gradients_are_the_same(limit, monkeypatch):
    given = []
    real = codetta.linear_cross_entropy

    def observed(*args, **options):
        given.append(options.get("memory_limit"))
        return real(*args, **options)

    model, twin = pair()
    compiled = codetta.compile(twin, logits="none", loss_memory_limit=limit)
    monkeypatch.setattr(codetta, "linear_cross_entropy", observed)
    train(model, twin, compiled)
    assert set(given) == {limit}
    check(model, twin)


def test_explain_counts_the_schedule_that_the_limit_allows():
    _, twin = pair()
    ids = torch.zeros(4, 512, dtype=torch.long)  # more tokens than the smallest chunk
    found = {}
    for limit in (1, 1 << 40):
        compiled = codetta.compile(twin, logits="none", loss_memory_limit=limit)
        found[limit] = codetta.explain(compiled, input_ids=ids, labels=ids).to_dict()
        torch._dynamo.reset()
    assert found[1] != found[1 << 40]


@pytest.mark.parametrize("limit", [0, -1, 2.0, True, "1 GiB"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit):
    with pytest.raises(errors.UnknownOption, match=r"loss_memory_limit=.*positive number"):
        codetta.compile(torch.nn.Linear(4, 4), loss_memory_limit=limit)


# ------------------------------------------------------------------------ what is returned
def test_the_output_has_a_loss_and_says_why_it_has_no_logits():
    model, twin = pair()
    output = train(model, twin, codetta.compile(twin, logits="none", fullgraph=True))
    assert list(output.keys()) == ["loss", "logits"]
    assert output[0] is output.loss
    assert output.to_tuple()[1] is output.logits is output["logits"]
    with pytest.raises(errors.LogitsNotKept, match=r"(?s)argmax.*logits='keep'"):
        output.logits.argmax(-1)
    output.loss = output.loss.detach()
    again = pickle.loads(pickle.dumps(output))
    assert torch.equal(again.loss, output.loss) and isinstance(again.logits, Withheld)


USES = {
    "shape": lambda z: z.shape,
    "detach": lambda z: z.detach(),
    "index": lambda z: z[:, -1],
    "add": lambda z: z + 1,
    "from the right": lambda z: 2.0 * z,
    "tensor": lambda z: torch.ones(2) * z,
    "function": lambda z: torch.softmax(z, -1),
    "functional": lambda z: nn.functional.cross_entropy(z, torch.ones(2)),
    "truth": lambda z: bool(z),
    "number": lambda z: float(z),
    "length": lambda z: len(z),
    "iteration": lambda z: list(z),
    "array": lambda z: __import__("numpy").asarray(z),
    "set": lambda z: setattr(z, "grad", None),
    "compare": lambda z: z > 0,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_the_logits_is_refused(use):
    with pytest.raises(errors.LogitsNotKept, match="logits='none'"):
        USES[use](Withheld())


def test_handing_on_printing_copying_and_asking_are_allowed():
    z = Withheld()
    assert z is not None
    assert "logits='none'" in repr(z) == str(z)
    for other in (pickle.loads(pickle.dumps(z)), copy.copy(z), copy.deepcopy(z)):
        assert isinstance(other, Withheld)
    assert not hasattr(z, "shape")
    assert not isinstance(z, torch.Tensor)
    assert torch.utils._pytree.tree_map(lambda x: x, {"logits": z})["logits"] is z


def test_generate_gets_its_logits_and_finds_the_same_tokens():
    model, twin = pair()
    model.eval(), twin.eval()
    ids = capture_models.batch("llama")["input_ids"]
    twin.forward = codetta.compile(twin.forward, logits="none")
    one, two = (m.generate(ids, max_new_tokens=2, do_sample=False) for m in (model, twin))
    assert torch.equal(one, two)
    assert not any(heads(twin.forward))


def test_an_evaluation_with_labels_has_a_loss_only():
    model, twin = pair()
    compiled = codetta.compile(twin, logits="none")
    batch = capture_models.batch("llama")
    with torch.no_grad():
        output = compiled(**batch)
        torch.testing.assert_close(output.loss, model(**batch).loss)
    assert isinstance(output.logits, Withheld)
    train(model, twin, compiled)
    assert heads(compiled) == [1, 1]


def test_logits_used_after_a_graph_break_are_refused_there():
    model = capture_models.make("llama")

    def step(**batch):
        output = model(**batch)
        print(output.loss.item())  # breaks the graph
        return output.logits.argmax(-1)

    with pytest.raises(errors.LogitsNotKept, match="argmax"):
        codetta.compile(step, logits="none")(**capture_models.batch("llama"))


def test_logits_that_something_else_reads_are_returned_and_right():
    model, batch = capture_models.make("llama"), capture_models.batch("llama")

    def step(**batch):
        output = model(**batch)
        return output.loss, output.logits, output.logits.argmax(-1)

    compiled = codetta.compile(step, logits="none")
    for x, y in zip(compiled(**batch), step(**batch), strict=True):
        torch.testing.assert_close(x, y)
    assert heads(compiled) == [0]
    assert any("read by argmax" in x.reason for x in compiled.codetta_compiler.rewritten[0].left)


def test_keep_returns_them_and_says_what_that_costs():
    model, twin = pair()
    compiled, batch = codetta.compile(twin), capture_models.batch("llama")
    torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)
    reasons = [x.reason for x in compiled.codetta_compiler.rewritten[0].left]
    assert any("12 x 53 values stored" in r and "logits='none'" in r for r in reasons)


# ------------------------------------------------------------------------ ways to train
def test_tied_weights_stay_tied():
    model, twin = pair("llama_tied")
    compiled = codetta.compile(twin, logits="none")
    train(model, twin, compiled, "llama_tied")
    check(model, twin)
    assert heads(compiled) == [1]
    assert twin.lm_head.weight is twin.model.embed_tokens.weight


def test_unequal_micro_batches_of_any_length_make_one_batch_and_one_compilation():
    model, twin = pair()
    compiled = codetta.compile(twin, logits="none", backend="aot_eager", fullgraph=True)
    parts = [capture_models.batch("llama", tokens=tokens) for tokens in (6, 13)]
    for part in parts:  # apart from the inputs: Dynamo tells one tensor from two
        part["labels"] = part["labels"].clone()
    parts[0]["labels"][0, :4] = -100
    count = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
    for part in parts:
        model(**part, num_items_in_batch=count).loss.backward()
        torch._dynamo.mark_dynamic(part["input_ids"], 1)
        torch._dynamo.mark_dynamic(part["labels"], 1)
        compiled(**part, num_items_in_batch=count).loss.backward()
    check(model, twin)
    assert heads(compiled) == [1]


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_a_frozen_part_has_no_gradient(frozen):
    model, twin = pair()
    for m in (model, twin):
        getattr(m, frozen).requires_grad_(False)
    train(model, twin, codetta.compile(twin, logits="none"))
    check(model, twin)


def test_checkpointing():
    model, twin = pair(
        prepare=lambda m: m.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    )
    compiled = codetta.compile(twin, logits="none", fullgraph=True)
    train(model, twin, compiled)
    check(model, twin)
    assert heads(compiled) == [1]


def test_autocast():
    model, twin = pair()
    batch = capture_models.batch("llama")
    compiled = codetta.compile(twin, logits="none")
    exact = copy.deepcopy(model).double()
    exact(**batch).loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss, other = model(**batch).loss, compiled(**batch).loss
    assert other.dtype == loss.dtype
    loss.backward()
    other.backward()
    assert heads(compiled) == [1]
    for (name, p), q, e in zip(
        model.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        theirs, ours = (p.grad - e.grad).norm(), (q.grad - e.grad).norm()
        assert ours <= 2 * theirs + 1e-7, name


def test_bf16_is_within_its_budget():
    model, twin = pair(dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    compiled = codetta.compile(twin, logits="none")
    batch = capture_models.batch("llama")
    losses = [run(**batch).loss for run in (model, compiled, exact)]
    assert losses[1].dtype == losses[0].dtype == torch.float32
    assert abs(losses[1] - losses[2]) <= 2 * abs(losses[0] - losses[2]) + 2**-8
    for loss in losses:
        loss.backward()
    for (name, p), q, e in zip(
        model.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        size = torch.full_like(e.grad, float(e.grad.abs().max()))
        within_budget(name, q.grad, e.grad, p.grad, size)


# ------------------------------------------------------------------------ nothing of M x V
class _Logits(TorchDispatchMode):
    """Shapes of all results of at least ``tokens`` times the vocabulary."""

    def __init__(self, tokens):
        super().__init__()
        self.least, self.found = tokens * capture_models.VOCABULARY, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and capture_models.VOCABULARY in x.shape:
                self.found += [tuple(x.shape)] if x.numel() >= self.least else []
        return result


@pytest.mark.parametrize("logits", ["none", "keep"])
def test_no_tensor_has_all_logits_forward_or_backward(logits, monkeypatch):
    chunked = functools.partial(codetta.linear_cross_entropy, chunk=32)
    monkeypatch.setattr(codetta, "linear_cross_entropy", chunked, raising=False)
    model = capture_models.make("llama")
    (graph,) = twins.capture(model, **capture_models.batch("llama", tokens=48)).graphs
    module, inputs = graph  # under a dispatch mode nothing is compiled: the graph runs as it is
    rewrite(module, inputs, parameters_of(module, inputs), keep_logits=logits == "keep")
    with _Logits(2 * 48) as spy:
        module(*inputs)[0].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert bool(spy.found) == (logits == "keep")


# ------------------------------------------------------------------------ compilers, processes
@pytest.mark.slow
def test_inductor_on_a_cpu_agrees():
    model, twin = pair()
    train(model, twin, codetta.compile(twin, logits="none", backend="inductor", fullgraph=True))
    check(model, twin)


def _ddp(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = capture_models.make("llama")
    compiled = codetta.compile(nn.parallel.DistributedDataParallel(model), logits="none")
    whole = capture_models.batch("llama", rows=4)
    part = {k: v[2 * rank : 2 * rank + 2] if isinstance(v, torch.Tensor) else v
            for k, v in whole.items()}  # fmt: skip
    output = compiled(**part)
    assert isinstance(output.logits, Withheld)
    output.loss.backward()
    alone = capture_models.make("llama")
    alone(**whole).loss.backward()
    check(alone, model)
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="no torch.distributed")
def test_ddp_has_the_gradients_of_the_whole_batch():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    spawn(_ddp, (port,), nprocs=2)
