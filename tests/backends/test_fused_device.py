"""The fused backend as a citizen of PyTorch on a GPU: streams, graphs, threads, number of rows."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.cases import CASES, inputs
from helpers.values import call_of, flat

import codetta
from codetta import programs
from codetta.language.types import Kind

CATALOG = {e.name: e.program for e in programs.catalog().values()}
#: One of each form of kernel: plain, sums, pairs, packed pairs, softmax, rotation, both axes, two
#: kernels, moments.
FORMS = (
    "identity", "residual_ssq", "row_scale_swiglu", "swiglu_backward", "row_scale_lse_target",
    "row_scale_rotary", "rms_link_dgrad_frozen", "qk_norm_rotary", "layernorm_statistics",
)  # fmt: skip
SHAPE = (301, 440, 136)
each_form = pytest.mark.parametrize("name", FORMS)


def run(name, call):
    a, b, operands = call
    return flat(codetta.gemm(a, b, CATALOG[name], **operands))


def tensors_of(call):
    a, b, operands = call
    given = [x for v in operands.values() for x in (v if isinstance(v, tuple) else (v,))]
    return [a, b, *given]


def equal(ours, theirs) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


# ------------------------------------------------------------------------------------- graphs
@each_form
def test_a_captured_call_replays_on_new_inputs(gpu, name):
    call, other = (call_of(CATALOG[name], SHAPE, torch.bfloat16, seed=s) for s in (0, 1))
    run(name, call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(name, call)
    for x, new in zip(tensors_of(call), tensors_of(other), strict=True):
        x.copy_(new)
    graph.replay()
    replayed = [x.clone() for x in captured]
    assert equal(replayed, run(name, other))
    graph.replay()
    assert equal(captured, replayed)


def test_a_captured_backward_replays_on_new_inputs(gpu):
    program = CATALOG["row_scale_swiglu"]

    def gradients(call):
        a, b, operands = call
        leaves = [a, b, operands["r"]]
        out = codetta.gemm(a, b, program, **operands)
        return torch.autograd.grad(out.y, leaves, torch.ones_like(out.y))

    def made(seed):
        call = call_of(program, SHAPE, torch.bfloat16, seed=seed)
        for x in tensors_of(call):
            x.requires_grad_()
        return call

    call, other = made(0), made(1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(call)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(call)
    with torch.no_grad():
        for x, new in zip(tensors_of(call), tensors_of(other), strict=True):
            x.copy_(new)
    graph.replay()
    assert equal(captured, gradients(other))


# ------------------------------------------------------------------------------------ streams
@each_form
def test_a_call_runs_on_the_current_stream(gpu, name):
    """On any other it would read what the current one has not written yet."""
    call = call_of(CATALOG[name], SHAPE, torch.bfloat16)
    expected = run(name, call)
    late = call_of(CATALOG[name], SHAPE, torch.bfloat16, seed=1)
    run(name, late)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles
        for x, y in zip(tensors_of(late), tensors_of(call), strict=True):
            x.copy_(y)
        made = run(name, late)
    side.synchronize()
    assert equal(made, expected)


@each_form
def test_a_call_does_not_wait_for_the_device(gpu, name):
    call = call_of(CATALOG[name], SHAPE, torch.bfloat16)
    run(name, call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100_000_000)
        done = torch.cuda.Event()
        run(name, call)
        done.record()
        assert not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ------------------------------------------------------------------------------------ threads
def test_threads_compile_and_run_at_once(fused):
    """Each thread runs every program, in another order; nothing was compiled before."""
    names = [n for n in CASES if n in ("rms", "gated_adjacent", "silu", "total", "column_sums")]
    calls = {n: inputs(CASES[n], (33,), 24, 40, torch.bfloat16) for n in names}
    device, found = torch.get_default_device(), {}

    def work(i):
        with codetta.use_backend("cuda"), torch.device(device):
            for name in names[i:] + names[:i]:
                a, b, operands = calls[name]
                for _ in range(3):
                    found[i, name] = flat(codetta.gemm(a, b, CASES[name], **operands))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for name, (a, b, operands) in calls.items():
        expected = flat(codetta.gemm(a, b, CASES[name], **operands))
        assert all(equal(found[i, name], expected) for i in range(3)), name


# ------------------------------------------------------------------------------- number of rows
@each_form
def test_another_number_of_rows_compiles_nothing(gpu, name, monkeypatch):
    from codetta.backends.cuda import quack, triton_kernels

    built = []
    for module in (quack, triton_kernels):
        original = module.build

        def build(*arguments, _original=original, **options):
            built.append(arguments)
            return _original(*arguments, **options)

        monkeypatch.setattr(module, "build", build)
    m, n, k = SHAPE
    run(name, call_of(CATALOG[name], SHAPE, torch.bfloat16))
    before = len(built)
    for more in (m + 1, 2 * m, 5 * m):  # none a multiple of a tile
        run(name, call_of(CATALOG[name], (more, n, k), torch.bfloat16))
    assert len(built) == before


def test_rotary_positions_changed_in_place_are_seen(fused):
    """Tables prepared for a kernel must not outlive what they were made of."""
    program = CATALOG["row_scale_rotary"]
    a, b, operands = call_of(program, (65, 24, 40), torch.bfloat16)
    (rope,) = (o.name for o in program.operands if o.kind is Kind.ROTARY)
    table, positions = operands[rope]
    for change in (lambda: positions.copy_(positions.flip(0)), lambda: table.mul_(-1.0)):
        before = flat(codetta.gemm(a, b, program, **operands))
        change()
        made = flat(codetta.gemm(a, b, program, **operands))
        fresh = operands | {rope: (table.clone(), positions.clone())}
        assert equal(made, flat(codetta.gemm(a, b, program, **fresh)))
        assert not equal(made, before)
