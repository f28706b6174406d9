"""Rotation against the conventions of Hugging Face models, and what must pass bit for bit."""

from __future__ import annotations

import pytest
import torch
from program_oracle import run

from codetta import programs

llama = pytest.importorskip("transformers.models.llama.modeling_llama")
gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")

torch.manual_seed(0)
M, HEAD_DIM, QUERIES, KEYS = 9, 8, 4, 2
HEADS = QUERIES + KEYS
N = (HEADS + KEYS) * HEAD_DIM


def table(rotary_dim):
    frequency = 1e4 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(M, dtype=torch.float64)[:, None] * frequency
    return angle.cos(), angle.sin()


def projected(**form):
    acc = torch.randn(M, N, dtype=torch.float64)
    rope = table(form.get("rotary_dim", HEAD_DIM))
    program = programs.row_scale_rotary(HEAD_DIM, heads=HEADS, **form)
    return acc, rope, run(program, acc, r=torch.ones(M).double(), rope=rope).result


def heads_of(x):  # (1, heads, M, head_dim), as Hugging Face has it
    return x.reshape(M, -1, HEAD_DIM).transpose(0, 1)[None]


def test_halves_are_rotate_half():
    acc, (cos, sin), ours = projected(pairs="halves")
    q, k = heads_of(acc)[:, :QUERIES], heads_of(acc)[:, QUERIES:HEADS]
    doubled = [torch.cat((t, t), dim=1)[None] for t in (cos, sin)]
    q, k = llama.apply_rotary_pos_emb(q, k, *doubled)
    torch.testing.assert_close(heads_of(ours)[:, :QUERIES], q, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(heads_of(ours)[:, QUERIES:HEADS], k, rtol=1e-14, atol=1e-14)


def test_adjacent_pairs_are_rotate_every_two():
    acc, (cos, sin), ours = projected(pairs="adjacent")
    q = heads_of(acc)[:, :HEADS].transpose(1, 2)
    expected = gptj.apply_rotary_pos_emb(q, sin[None], cos[None]).transpose(1, 2)
    torch.testing.assert_close(heads_of(ours)[:, :HEADS], expected, rtol=1e-14, atol=1e-14)


def test_halves_become_adjacent_by_permuting_within_heads():
    acc = torch.randn(M, N, dtype=torch.float64)
    rope, r = table(HEAD_DIM), torch.ones(M).double()
    order = torch.arange(HEAD_DIM).reshape(2, -1).T.reshape(-1)
    columns = (torch.arange(N).reshape(-1, HEAD_DIM)[:, order]).reshape(-1)
    halves = run(programs.row_scale_rotary(HEAD_DIM, pairs="halves"), acc, r=r, rope=rope)
    adjacent = run(programs.row_scale_rotary(HEAD_DIM), acc[:, columns], r=r, rope=rope)
    assert torch.equal(halves.result[:, columns], adjacent.result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
def test_partial_rotary_tail_and_v_pass_bit_for_bit(pairs, dtype):
    acc, r = torch.randn(M, N), torch.rand(M) + 0.5
    rope = tuple(t.float() for t in table(4))
    program = programs.row_scale_rotary(HEAD_DIM, rotary_dim=4, heads=HEADS, pairs=pairs)
    turned = heads_of(run(program, acc, dtype=dtype, r=r, rope=rope).result)
    plain = heads_of(run(programs.row_scale, acc, dtype=dtype, r=r).result)
    assert torch.equal(turned[..., 4:], plain[..., 4:])
    assert torch.equal(turned[:, HEADS:], plain[:, HEADS:])
    assert not torch.equal(turned[:, :HEADS, 1:, :4], plain[:, :HEADS, 1:, :4])


def test_per_head_norm_leaves_v_bit_for_bit():
    acc, r = torch.randn(M, N), torch.rand(M) + 0.5
    normed = (torch.arange(N // HEAD_DIM) < HEADS).float()
    weight = torch.where(normed.repeat_interleave(HEAD_DIM) > 0, torch.randn(N), 1.0)
    operands = {"r": r, "weight": weight, "normed": normed}
    operands["rope"] = tuple(t.float() for t in table(HEAD_DIM))
    program = programs.qk_norm_rotary(HEAD_DIM, heads=HEADS)
    ours = run(program, acc, dtype=torch.bfloat16, **operands).qkv
    plain = run(programs.row_scale, acc, dtype=torch.bfloat16, r=r).result
    v = HEADS * HEAD_DIM
    assert torch.equal(ours[:, v:], plain[:, v:])
    assert not torch.equal(ours[:, :v], plain[:, :v])
