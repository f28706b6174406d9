"""Launches with all numbers written out pass what launches that compute them pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_cases import library
from triton_runner import fitting, inputs

from codetta.backends.cuda import triton_kernels
from codetta.backends.cuda.triton_kernels import Kernel
from codetta.backends.cuda.triton_launch import Direct
from codetta.backends.cuda.triton_source import source

LIBRARY = library()


class Compiled:
    """A compiled kernel that notes its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.seen.append(tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in given))


@pytest.fixture(autouse=True)
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are shared: those of these tests have been compiled to nothing."""
    monkeypatch.setattr(triton_kernels, "_KERNELS", {})

    def current(device: int) -> str:
        return f"stream of {device}"

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current, raising=False)


def compiled(kernel: Kernel, tensors: list[Tensor], n: int) -> Compiled:
    """Do as if it had been compiled for these tensors."""
    key, made = kernel.host.key(tensors, n), Compiled()
    parameters = source(kernel.task, kernel.cut, *kernel.host.arrays(key)).parameters
    kernel.direct[key] = Direct(parameters, made, 3)
    return made


def shifted(x: Tensor) -> Tensor:
    """The same in other memory, with gaps between its rows."""
    wide = torch.cat((x, x), 1) if x.ndim == 2 else x.clone()
    return wide[:, : x.shape[1]] if x.ndim == 2 else wide


@pytest.mark.parametrize("lie", [lambda x: x, shifted], ids=["dense", "pitched"])
@pytest.mark.parametrize("name", LIBRARY)
def test_a_fixed_launch_passes_the_same(name: str, lie: Any) -> None:
    program, dtype = LIBRARY[name], torch.bfloat16
    m, n = 37, fitting(program, 96)
    tensors = [lie(x) for x in inputs(program, m, n, dtype)]
    recipe = triton_kernels.Recipe(program, n, dtype, torch.float32, None, True)
    kernel = recipe.first
    made = compiled(kernel, tensors, n)
    host, found = kernel.host, kernel.direct[kernel.host.key(tensors, n)]
    outs = [x.fill_(0) for x in host.outputs(triton_kernels.allocator(tensors[0].device), m, n)]
    host.direct(found)(outs, tensors, m, n)
    fixed = host.fixed(found, tensors, m, n)
    flat = [x.flatten() if x.numel() in x.shape and x.is_contiguous() else x for x in tensors]
    fresh = fixed(flat)
    assert all(
        (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        for x, y in zip(fresh, outs, strict=True)
    )
    first, second = made.seen
    places = dict(zip((x.data_ptr() for x in outs), (x.data_ptr() for x in fresh), strict=True))
    assert second == tuple(places.get(x, x) for x in first)
    assert {x.data_ptr() for x in fresh}.isdisjoint(x.data_ptr() for x in outs)
    assert "stream of 3" in second


def test_only_what_is_launched_on_the_operands_alone_is_fixed() -> None:
    dtype = torch.bfloat16
    for name, program in LIBRARY.items():
        n = fitting(program, 96)
        tensors = inputs(program, 5, n, dtype)
        triton_kernels._KERNELS.clear()
        recipe = triton_kernels.Recipe(program, n, dtype, torch.float32, None, False)
        alone = recipe.direct and not recipe.first.total
        assert recipe.fixed(tensors, 5, n) is None, f"{name} has not been compiled"
        compiled(recipe.first, tensors, n)
        assert (recipe.fixed(tensors, 5, n) is not None) == alone, name
