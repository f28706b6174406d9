"""Configurations of the benchmarks' rivals: read from records, or the fastest of three."""

import contenders
import pick
import plain
import pytest
import torch
from layer_model import SHAPES, TOKENS

from codetta.backends.cuda.configs import layout_of


def products(shape):
    """The twelve plain products of a layer, without memory."""
    s, found = shape, []

    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16, device="meta")

    widths = [(s.d, s.d), (2 * s.f, s.d), (s.d, s.f), (s.qkv, s.d)]
    for n, k in widths:
        a, b, g = empty(TOKENS, k), empty(n, k), empty(TOKENS, n)
        found += [(a, b.t()), (g, b), (g.t(), a)]
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_every_plain_product_of_the_layer_is_on_record(shape):
    found = products(shape)
    assert {layout_of(a, b) for a, b in found} == {"nt", "nn", "tn"}
    known = [plain.configuration(a, b) for a, b in found]
    assert None not in known


def test_plain_kernels_are_compiled_in_the_configuration_on_record():
    found = products(SHAPES[0])
    made = plain.plain_jobs(found)
    assert 3 <= len(made) <= 12
    recorded = {plain.configuration(a, b).tile for a, b in found}
    assert {j.config.tile for j in made} == recorded


def test_a_shape_that_is_not_on_record_gets_what_the_package_chooses():
    a, b = (torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in range(2))
    assert plain.configuration(a, b.t()) is None
    (job,) = plain.plain_jobs([(a, b.t())])
    assert job.config.tile_m >= 64


def test_the_plain_product_is_the_product():
    a, b = torch.randn(9, 8), torch.randn(8, 5)
    torch.testing.assert_close(plain.plain(a, b), a @ b)


def test_the_fastest_variant_is_kept_for_its_shape_and_a_failing_one_is_noted(monkeypatch):
    def fails(a, b, c=None, **named):
        raise ValueError("no room")

    def variant(name):
        return lambda a, b, c=None, **named: (name, named)

    ms = {"slow": 3.0, "fast": 1.0}
    monkeypatch.setattr(pick, "timed", lambda run, calls: ms[run()[0]])
    picked = pick.Picked("gemm", {"slow": variant("slow"), "no": fails, "fast": variant("fast")})
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    assert picked(a, b, w=1) == ("fast", {"w": 1})
    assert any("no room" in note for note in picked.notes)
    ms["fast"] = 9.0
    assert picked(a, b)[0] == "fast"  # chosen once
    assert picked(torch.ones(5, 3), b)[0] == "slow"  # and per shape
    with pytest.raises(RuntimeError, match="no variant of gemm"):
        pick.Picked("gemm", {"no": fails})(a, b)


def test_what_takes_minutes_runs_only_where_it_is_named():
    assert set(contenders.CONTENDERS) >= contenders.ASKED_FOR
