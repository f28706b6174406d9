"""Every way people train: loss and all gradients equal those of the uncompiled model."""

from __future__ import annotations

import copy

import capture_models
import pytest
import torch
from helpers.budget import within_budget
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import codetta


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def pair(name="llama", prepare=lambda model: None, **changes):
    """A model and its copy, prepared alike."""
    model = capture_models.make(name, **changes)
    prepare(model)
    return model, copy.deepcopy(model)


def regions(compiled):
    return [len(r.calls) for r in compiled.codetta_compiler.rewritten]


def check(model, twin, tolerance=1e-5):
    """Equal gradients, None where there is none."""
    largest = max(p.grad.norm() for p in model.parameters() if p.grad is not None)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            error = (p.grad - q.grad).norm()
            assert error <= tolerance * max(p.grad.norm(), 1e-3 * largest), f"{name}: {error}"


def train(model, twin, compiled, **batch):
    """One step of each; the losses are compared."""
    batch = capture_models.batch("llama") | batch
    loss, other = model(**batch).loss, compiled(**batch).loss
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
    loss.backward()
    other.backward()


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_autocast(name, inside):
    """fp32 parameters, products in bf16, the residual stream in fp32: fused, and no less exact."""
    model, twin = pair(name)
    batch = capture_models.batch(name)

    def step(m):
        with torch.autocast("cpu", torch.bfloat16):
            return m(**batch).loss

    def bare(m):
        return m(**batch).loss

    compiled = codetta.compile(step if inside else bare)
    loss = step(model)
    if inside:
        other = compiled(twin)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            other = compiled(twin)
    assert regions(compiled) == [3]
    assert loss.dtype == other.dtype
    loss.backward()
    other.backward()
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    best = exact(**batch).loss
    best.backward()
    allowed = 2 * abs(loss - best) + 2 * torch.finfo(torch.bfloat16).eps * best
    assert abs(other - best) <= allowed
    for (name, p), q, e in zip(
        model.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        assert q.grad.dtype == p.dtype == torch.float32, name
        theirs, ours = (p.grad - e.grad).norm(), (q.grad - e.grad).norm()
        assert ours <= 2 * theirs + 2 * torch.finfo(torch.bfloat16).eps * e.grad.norm(), name


def test_autocast_keeps_the_residual_stream_in_fp32():
    """Small updates of a large stream: bf16 would lose them."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
            self.norm = torch.nn.RMSNorm(64)

        def forward(self, x):
            for _ in range(2):
                x = x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))
            return x

    block = Block()
    x = 1000 + torch.rand(48, 64)
    compiled = codetta.compile(block)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = compiled(x) - x, block(x) - x
    assert regions(compiled) == [1]
    assert ours.dtype is torch.float32
    exact = copy.deepcopy(block).double()(x.double()) - x
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm() + 1e-3 * exact.norm()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context):
    model = capture_models.make("llama").eval()
    compiled, batch = codetta.compile(model), capture_models.batch("llama")
    with context():
        torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits)
    assert regions(compiled) == [3]


def test_evaluation_between_steps():
    model, twin = pair()
    compiled = codetta.compile(twin, fullgraph=True)
    train(model, twin, compiled)
    with torch.no_grad():
        batch = capture_models.batch("llama")
        torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)
    train(model, twin, compiled)
    check(model, twin)
    assert regions(compiled) == [3, 3]


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of all memory that autograd keeps for the backward."""

    def __init__(self):
        self.sizes = {}
        super().__init__(self._pack, lambda x: x)

    def __enter__(self):
        super().__enter__()
        return self

    def _pack(self, x):
        storage = x.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return x

    @property
    def total(self):
        return sum(self.sizes.values())


def checkpointing(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpointing_saves_memory_and_is_rewritten(backend):
    plain = capture_models.make("llama")
    model, twin = pair(prepare=checkpointing)
    batch = capture_models.batch("llama", tokens=16)
    compiled = codetta.compile(twin, backend=backend, fullgraph=True)
    with SavedBytes() as saved:
        compiled(**batch)
    with SavedBytes() as without:
        codetta.compile(plain, backend=backend, fullgraph=True)(**batch)
    weights = sum(p.numel() * 4 for p in plain.parameters())
    assert saved.total - weights < 0.7 * (without.total - weights)
    train(model, twin, compiled, **batch)
    check(model, twin)
    assert regions(compiled)[0] == 5  # each layer has two, the head's norm has one


def test_checkpointing_repeats_its_dropout():
    model, twin = pair(prepare=checkpointing, attention_dropout=0.3)
    compiled = codetta.compile(twin)
    batch = capture_models.batch("llama")
    torch.manual_seed(3)
    loss = model(**batch).loss
    loss.backward()
    torch.manual_seed(3)
    other = compiled(**batch).loss
    other.backward()
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
    check(model, twin)


def test_unequal_micro_batches_make_one_batch():
    model, twin = pair()
    compiled = codetta.compile(twin)
    whole = capture_models.batch("llama", tokens=8, rows=5)
    labels = whole["labels"].clone()
    labels[0, :5] = -100
    count = (labels[:, 1:] != -100).sum()
    model(**whole | {"labels": labels}, num_items_in_batch=count).loss.backward()
    for rows in (slice(0, 2), slice(2, 5)):
        part = {"input_ids": whole["input_ids"][rows], "labels": labels[rows], "use_cache": False}
        compiled(**part, num_items_in_batch=count).loss.backward()
    check(model, twin)
    assert all(n == 3 for n in regions(compiled))


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.codetta.gemm.default)
        return func(*args, **(kwargs or {}))


def products(compiled, batch):
    loss = compiled(**batch).loss
    with _Products() as seen:
        loss.backward()
    return seen.count


def test_frozen_weights_have_no_gradient_product():
    batch = capture_models.batch("llama")
    model, twin = pair()
    for m in (model, twin):
        m.requires_grad_(False)
        m.model.embed_tokens.requires_grad_(True)
        m.model.layers[1].mlp.down_proj.requires_grad_(True)
    frozen = codetta.compile(twin)
    train(model, twin, frozen)
    check(model, twin)
    trained = codetta.compile(capture_models.make("llama"))
    trained(**batch).loss.backward()
    # A layer has four products, and so four for gradients of weights; one of two layers' is left.
    assert products(frozen, batch) == products(trained, batch) - 8
    assert regions(frozen) == [3]


class Lora(nn.Module):
    """A frozen linear and a trained product of two narrow ones."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(self.dropout(x)))


def lora(model):
    model.requires_grad_(False)
    for layer in model.model.layers:
        for parent, names in ((layer.self_attn, ("q_proj", "v_proj")), (layer.mlp, ("up_proj",))):
            for name in names:
                setattr(parent, name, Lora(getattr(parent, name)))


def test_lora():
    model, twin = pair(prepare=lora)
    compiled = codetta.compile(twin)
    train(model, twin, compiled)
    check(model, twin)
    trained = [n for n, p in twin.named_parameters() if p.grad is not None]
    assert len(trained) == 12
    assert all(".a." in n or ".b." in n for n in trained)
    assert regions(compiled)[0] >= 3


def test_tied_weights_stay_tied():
    model, twin = pair("llama_tied")
    compiled = codetta.compile(twin)
    train(model, twin, compiled)
    check(model, twin)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert regions(compiled) == [3]


def test_parameter_hooks_run():
    model, twin = pair()
    seen = {}

    def prepare(m, key):
        weight = m.model.layers[0].self_attn.q_proj.weight
        weight.register_hook(lambda g: g * 2)

        def keep(p):
            seen[key] = p.grad.clone()

        m.model.norm.weight.register_post_accumulate_grad_hook(keep)

    prepare(model, "eager")
    compiled = codetta.compile(twin)
    prepare(twin, "compiled")
    train(model, twin, compiled)
    check(model, twin)
    torch.testing.assert_close(seen["compiled"], seen["eager"], rtol=1e-4, atol=1e-6)


def test_tensor_hooks_run():
    model, twin = pair()
    batch = capture_models.batch("llama")
    found = []
    for run, m in ((model, model), (codetta.compile(twin), twin)):
        x = m.model.embed_tokens(batch["input_ids"]).detach().requires_grad_()
        x.register_hook(lambda g: g * 3)
        loss = run(inputs_embeds=x, labels=batch["labels"], use_cache=False).loss
        loss.register_hook(lambda g: g * 2)
        loss.backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    check(model, twin)


def test_dropout_is_left_alone_with_the_same_numbers():
    off = {"resid_pdrop": 0.3, "embd_pdrop": 0.3}
    model, twin = pair("phi3")
    for m in (model, twin):
        for layer in m.model.layers:
            layer.resid_attn_dropout.p = layer.resid_mlp_dropout.p = off["resid_pdrop"]
    compiled = codetta.compile(twin)
    batch = capture_models.batch("phi3")
    torch.manual_seed(5)
    loss = model(**batch).loss
    torch.manual_seed(5)
    other = compiled(**batch).loss
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
    loss.backward()
    other.backward()
    check(model, twin)
    left = compiled.codetta_compiler.rewritten[0].left
    assert any(x.what == "dropout" and x.reason for x in left)


def test_the_default_cache_holds_the_same_keys():
    model, twin = pair()
    compiled = codetta.compile(twin)
    batch = capture_models.batch("llama") | {"use_cache": None}
    one, two = model(**batch), compiled(**batch)
    for a, b in zip(one.past_key_values.layers, two.past_key_values.layers, strict=True):
        torch.testing.assert_close(b.keys, a.keys)
        torch.testing.assert_close(b.values, a.values)
    one.loss.backward()
    two.loss.backward()
    check(model, twin)
    assert regions(compiled) == [3]


def test_generate_finds_the_same_tokens():
    model, twin = pair()
    model.eval(), twin.eval()
    ids = capture_models.batch("llama")["input_ids"]
    twin.forward = codetta.compile(twin.forward)
    one, two = (m.generate(ids, max_new_tokens=6, do_sample=False) for m in (model, twin))
    assert torch.equal(one, two)
    assert all(regions(twin.forward))


def test_padding():
    model, twin = pair()
    compiled = codetta.compile(twin)
    ids = capture_models.batch("llama")["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    train(model, twin, compiled, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    check(model, twin)
    assert regions(compiled) == [3]


def test_bf16_is_within_its_budget():
    model, twin = pair(dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()
    compiled = codetta.compile(twin)
    batch = capture_models.batch("llama")
    for run in (model, compiled, exact):
        run(**batch).loss.backward()
    for (name, p), q, e in zip(
        model.named_parameters(), twin.parameters(), exact.parameters(), strict=True
    ):
        size = torch.full_like(e.grad, float(e.grad.abs().max()))
        within_budget(name, q.grad, e.grad, p.grad, size)
