"""A Decoder computes what the Hugging Face model computes: logits, loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from decoder_models import FAMILIES, Step, exact, make, step, tokens
from helpers.budget import norm, within_budget
from helpers.fused import broken, running
from helpers.mutation import fails_when_broken, one_tile_dropped

from codetta.nn import Decoder


def agree_to(tolerance: float, out: Step, ref: Step) -> None:
    """Relative to each tensor, or to a thousandth of the largest gradient where one cancels."""
    assert out.gradients.keys() == ref.gradients.keys()
    floor = 1e-3 * max(norm(g) for g in ref.gradients.values())
    pairs = {n: (out.gradients[n], g) for n, g in ref.gradients.items()}
    pairs |= {"loss": (out.loss, ref.loss), "logits": (out.logits, ref.logits)}
    for name, (x, y) in pairs.items():
        assert norm(x - y) <= tolerance * max(norm(y), floor), name


def in_budget(dtype: torch.dtype, out: Step, ref: Step, eager: Step) -> None:
    within_budget("loss", out.loss.to(dtype), ref.loss, eager.loss)
    within_budget("logits", out.logits, ref.logits, eager.logits)
    assert out.gradients.keys() == ref.gradients.keys()
    for name, g in ref.gradients.items():
        addends = ref.addends.get(name)
        within_budget(name, out.gradients[name], g, eager.gradients[name], addends)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_hugging_face_in_fp64(wide_backend, family):
    model, ids = make(family, torch.float64), tokens()
    agree_to(1e-10, step(Decoder.from_hf(model), ids), exact(model, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_is_within_the_error_budget(backend, family, dtype):
    model, ids = make(family, dtype), tokens(2, 40)
    in_budget(dtype, step(Decoder.from_hf(model), ids), exact(model, ids), step(model, ids))


@pytest.mark.parametrize("family", ["llama_tied", "qwen3"])
def test_fp16_is_finite(backend, family):
    model, ids = make(family, torch.float16), tokens(2, 40)
    out, ref = step(Decoder.from_hf(model), ids), exact(model, ids)
    within_budget("logits", out.logits, ref.logits, step(model, ids).logits)
    assert all(g.isfinite().all() for g in out.gradients.values())


@pytest.mark.parametrize("layers", [1, 3])
def test_any_number_of_layers(layers):
    model, ids = make(dtype=torch.float64, num_hidden_layers=layers), tokens()
    agree_to(1e-10, step(Decoder.from_hf(model), ids), exact(model, ids))


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (1, 63)])
def test_any_number_of_tokens(shape):
    model, ids = make(dtype=torch.float64), tokens(*shape)
    ours, theirs = Decoder.from_hf(model)(ids).logits.detach(), exact(model, ids).logits
    assert norm(ours - theirs) <= 1e-10 * norm(theirs)


def test_parity_fails_on_broken_kernels():
    model, ids = make("llama_biases", torch.bfloat16), tokens()
    ref, eager, decoder = exact(model, ids), step(model, ids), Decoder.from_hf(model)

    def check() -> None:
        in_budget(torch.bfloat16, step(decoder, ids), ref, eager)

    check()
    fails_when_broken(check)
    fails_when_broken(check, ops=("pointwise",))


def test_parity_fails_on_broken_fused_kernels():
    model, ids = make("llama_biases", torch.bfloat16), tokens()
    ref, eager, decoder = exact(model, ids), step(model, ids), Decoder.from_hf(model)

    def check() -> None:
        with running("emulated"):
            in_budget(torch.bfloat16, step(decoder, ids), ref, eager)

    with broken(None, None) as results:
        check()
    assert len(results) > 2  # stores and sums
    for result in sorted(results):
        with broken(result, one_tile_dropped), pytest.raises(AssertionError):
            check()
