"""The arithmetic of sinks that keep a state per row (operations.py), on tensors without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from codetta.backends.cuda.available import missing_package

if (missing := missing_package()) is not None:
    pytest.skip(f"arithmetic of sinks: {missing}", allow_module_level=True)

from codetta.backends.cuda import operations

INF, NAN = float("inf"), float("nan")
LANES, EACH = 4, 2  # threads that share a row, and how many of its columns each folds at once


@pytest.fixture(autouse=True)
def on_tensors(monkeypatch):
    """The DSL's functions, of tensors."""

    def f32(x):
        return torch.as_tensor(x, dtype=torch.float32)

    def select(condition, yes, no):
        return torch.where(torch.as_tensor(condition), f32(yes), f32(no))

    def rcp(x, **_):
        return 1 / x

    monkeypatch.setattr(operations, "Float32", f32)
    monkeypatch.setattr(operations, "_select", select)
    monkeypatch.setattr(operations, "cute", SimpleNamespace(math=SimpleNamespace(rcp=rcp)))


def moments_of(row: torch.Tensor, edges: bool):
    """Count, mean and M2 of a row, as the threads of a tile of 24 columns make them."""
    width = 24 if edges else len(row)
    # Beyond the matrix is whatever the row of a times zeros is: NaN where that row is infinite.
    row, end = torch.cat((row, torch.full((width - len(row),), NAN))), len(row)
    sink = operations.Moments("moments", edges)
    states = []
    for lane in range(LANES):
        state = tuple(torch.tensor(x) for x in sink.start)
        for first in range(lane * EACH, width, LANES * EACH):
            at = range(first, first + EACH)
            inside = [torch.tensor(i < end) if edges else None for i in at]
            state = sink._merge(state, sink.folded([row[i] for i in at], None, inside))
        states.append(state)
    while len(states) > 1:
        states = [sink._merge(*pair) for pair in zip(states[::2], states[1::2], strict=True)]
    return states[0]


@pytest.mark.parametrize("n", [24, 21, 8, 3], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e3, 1e18])
def test_moments_of_a_tile(n, mean):
    row = (mean + max(1.0, mean / 8) * torch.randn(n, generator=_generator())).float()
    count, mean, m2 = moments_of(row, edges=n < 24)
    assert count == n
    torch.testing.assert_close(mean.double(), row.double().mean(), rtol=1e-5, atol=1e-5)
    exact = row.double().var(correction=0) * n
    torch.testing.assert_close(m2.double(), exact, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("n", [24, 21, 8, 3], ids=str)
@pytest.mark.parametrize("size", [1e20, 1e30])
def test_squares_that_overflow_are_infinite_and_not_nan(n, size):
    """Each thread starts with no columns: 0 times the square of a difference is 0."""
    row = size * torch.randn(n, generator=_generator())
    count, mean, m2 = moments_of(row, edges=n < 24)
    assert count == n and m2 == INF
    torch.testing.assert_close(mean.double(), row.double().mean(), rtol=1e-5, atol=1e-6 * size)


def test_equal_columns_vary_by_nothing_however_large():
    assert moments_of(torch.full((21,), 2.0**100), edges=True)[2] == 0.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_stays(value):
    row = torch.randn(21, generator=_generator())
    row[13] = value
    _, mean, m2 = moments_of(row, edges=True)
    torch.testing.assert_close(mean, row.mean(), equal_nan=True)
    assert m2.isnan()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
