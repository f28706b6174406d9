from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from codetta.demo import models
from codetta.errors import MissingPackage

CPU = torch.device("cpu")


def test_a_copy_keeps_ties_and_the_rotary_frequencies() -> None:
    source = models.small_random(0).model
    twin = models.copy_of(source, torch.bfloat16, CPU)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert twin.lm_head.weight.dtype == torch.bfloat16
    assert twin.lm_head.weight is not source.lm_head.weight
    assert twin.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(twin.model.rotary_emb.inv_freq, source.model.rotary_emb.inv_freq)


def test_the_random_model_is_a_function_of_its_seed() -> None:
    one, same, other = (models.small_random(seed).model.lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_the_yardstick_is_fp64_throughout_and_leaves_the_model_alone(tiny_llama: Any) -> None:
    """Two ways to compute attention agree to fp64 rounding, and transformers' own fp64 does not."""
    model = tiny_llama(4, 2)
    norm = type(model.model.norm)
    input_ids = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
    wanted = models.fp64_gradients(model, input_ids, CPU)
    with sdpa_kernel(SDPBackend.MATH):
        other = models.fp64_gradients(model, input_ids, CPU)
    raw = models.copy_of(model, torch.float64, CPU)
    models.hf_loss(raw)(input_ids).backward()

    def error(gradients: Any) -> float:
        return max(float((gradients[n] - g).norm() / g.norm()) for n, g in wanted.items())

    assert set(wanted) == {name for name, _ in model.named_parameters()}
    assert error(other) < 1e-13
    assert 1e-9 < error({name: p.grad for name, p in raw.named_parameters()}) < 1e-4
    assert type(model.model.norm) is norm and model.lm_head.weight.dtype == torch.float32
    assert model.lm_head.weight.grad is None


class _Fp32(TorchDispatchMode):
    """The operations that give an fp32 result."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(
            isinstance(t, torch.Tensor) and t.dtype == torch.float32 for t in tree_leaves(result)
        ):
            self.names.add(func._schema.name.removeprefix("aten::"))
        return result


def test_only_the_rotary_angles_of_the_yardstick_are_fp32(tiny_llama: Any) -> None:
    model = tiny_llama(4, 2)
    with _Fp32() as fp32:
        models.fp64_gradients(model, torch.arange(12)[None], CPU)
    assert {"cos", "sin"} <= fp32.names
    norms, loss, layers = (
        {"pow", "mean", "rsqrt"},
        {"_log_softmax", "nll_loss_forward"},
        {"mm", "silu"},
    )
    assert not fp32.names & (norms | loss | layers)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(MissingPackage, match=r"gguf.*codetta\[demo\]"):
        models.small_random(0)
