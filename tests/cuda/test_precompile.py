"""Kernels compiled beforehand: which ones a decoder needs, and that the caller then finds them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cases import CASES

import codetta
from codetta.backends.cuda.launch import accumulator, explain
from codetta.backends.cuda.lowering import lower
from codetta.errors import BackendUnavailable
from codetta.language import Tile, epilogue
from codetta.nn.block import ADJACENT, ENTRY, EXIT, MIDDLE, Spec, head, segment
from codetta.tuning.calls import CallJob, GemmCall, jobs, recorded, work
from codetta.tuning.compile_only import environment
from codetta.tuning.precompile import Precompiled, compile_calls, decoder_calls, plan_calls

SPEC = Spec(MIDDLE, 2048, 8192, 16, 16, 128, 128)
TOKENS = 16384


def calls(part: str, **options) -> list[GemmCall]:
    plan = segment(replace(SPEC, part=part), ADJACENT)
    return plan_calls(plan, SPEC, TOKENS, torch.bfloat16, **options)


def keys(part: str) -> set[str]:
    return {job.key for job in jobs(calls(part), None)}


# ------------------------------------------------------------------------------------ sharing
def test_segments_of_a_decoder_share_their_kernels():
    entry, middle, exit_ = (keys(part) for part in (ENTRY, MIDDLE, EXIT))
    assert entry < middle
    last = exit_ - middle
    assert len(last) <= 1  # without the next layer's dgrad, its residual is the head's gradient
    assert len(middle) <= len(calls(MIDDLE)) == 12


def test_a_decoder_of_any_depth_needs_fifteen_kernels():
    every = [call for part in (ENTRY, MIDDLE, EXIT) for call in calls(part)]
    every += plan_calls(head(2048, 32000), SPEC, TOKENS, torch.bfloat16, rules=())
    assert len({call.program.text for call in every}) == 27
    assert len(jobs(every, None)) == 15


def test_names_are_not_in_the_source_and_stay_in_messages():
    def made(name: str):
        text = (
            f"program {name}(acc, {name}_t: Tile, {name}_r: Row) {{\n  %0 = acc\n"
            f"  %1 = operand(name={name}_t)\n  %2 = operand(name={name}_r)\n  %3 = add(%0, %1)\n"
            f"  %4 = mul(%3, %2)\n  %5 = rowsum(%4)\n  store {name}_o: operand = %4\n"
            f"  final {name}_s: accumulator = %5\n}}"
        )
        return codetta.Program.parse(text)

    first, second = (lower(made(name), "bf16") for name in ("alpha", "beta"))
    assert first.source == second.source and "alpha" not in first.source
    assert [x.operand for x in first.loads] == ["alpha_t", "alpha_r"]


# ----------------------------------------------------------------------------------- recording
def test_frozen_weights_need_fewer_kernels():
    frozen = calls(MIDDLE, wanted=("x", "o"))
    assert len(frozen) == 8 and len(calls(MIDDLE, wanted=())) == 4


def test_a_program_of_two_kernels_needs_its_product():
    program = CASES["gated_halves"]
    assert explain(program) is not None
    a, b = (torch.empty(256, 256, dtype=torch.bfloat16, device="meta") for _ in range(2))
    r = torch.empty(256, device="meta")
    (job,) = jobs(recorded(lambda: codetta.gemm(a, b, program, r=r)), None)
    assert job.given.program is accumulator and job.given.a.shape == (256, 256)


def test_a_job_survives_the_way_to_a_worker():
    for job in jobs(calls(ENTRY), None):
        there = work(json.loads(json.dumps(job.data())))
        assert isinstance(there, CallJob)
        assert there.key == job.key == jobs([there.given], None)[0].key
        assert [x.stride() for x in there.given.tensors] == [x.stride() for x in job.given.tensors]


def test_every_segment_of_a_model_is_recorded():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).bfloat16()
    decoder = codetta.nn.Decoder.from_hf(model)
    whole = decoder_calls(decoder, 64)
    assert len(whole) == 27
    for name, p in model.named_parameters():
        p.requires_grad_("layers.2" in name)
    partly = decoder_calls(decoder, 64)
    parts = [c.program.name.split("_")[0] for c in partly]
    assert "entry" in parts and len(partly) < len(whole)


def test_without_a_gpu_the_error_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    decoder = codetta.nn.Decoder.from_hf(transformers.LlamaForCausalLM(config))
    with pytest.raises(BackendUnavailable, match="there is no CUDA device"):
        codetta.precompile(decoder, tokens=64)


# ----------------------------------------------------------------------------------- compiling
def some_calls() -> list[GemmCall]:
    """Two calls that one kernel serves, and a third one."""
    like = {"dtype": torch.bfloat16, "device": "meta"}
    a, b, x = torch.empty(256, 64, **like), torch.empty(128, 64, **like).t(), (256, 128)

    @epilogue
    def first(acc, residual: Tile):
        return acc + residual

    @epilogue
    def second(acc, other: Tile):
        return acc + other

    @epilogue
    def third(acc):
        return acc

    def run() -> None:
        codetta.gemm(a, b, first, residual=torch.empty(x, **like))
        codetta.gemm(a, b, second, other=torch.empty(x, **like))
        codetta.gemm(a, b, third)

    return recorded(run)


def test_a_result_prints_with_and_without_failures():
    assert str(Precompiled(13, 20.04, {})) == "13 kernels in 20.0 s"
    failed = {"first": "no registers are left", "second": "no time is left"}
    said = "13 kernels in 20.0 s, 2 failed: no registers are left"
    assert str(Precompiled(13, 20.04, failed)) == said


#: Makes the same calls as if it were about to launch; prints how many kernels it had to compile.
CALLER = """
import os, sys
sys.path[:0] = sys.argv[1:]
from test_precompile import some_calls
from codetta.backends.cuda import quack
from codetta.backends.cuda.assembly import describe
compiled = quack.compile_without_gpu(os.environ["QUACK_CACHE_DIR"])
for call in some_calls():
    describe(call.program, call.a, call.b, call.operands)
print(len(compiled))
"""


@pytest.mark.skipif(importlib.util.find_spec("quack") is None, reason="QuACK is not installed")
def test_the_caller_finds_what_the_workers_compiled(tmp_path, monkeypatch):
    for name, value in environment("90", str(tmp_path)).items():
        monkeypatch.setenv(name, value)

    def compiled_by_the_caller() -> int:
        here = Path(__file__).parent
        command = [sys.executable, "-c", CALLER, str(here), str(here.parent)]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    said: list[str] = []
    made = compile_calls(
        some_calls(),
        None,
        cache=tmp_path,
        workers=1,
        progress=lambda text, share: said.append(text),
    )
    assert made.kernels == 2 and not made.failed, made
    assert said == ["compiled 1 of 2 kernels", "compiled 2 of 2 kernels"]
    assert len(list(tmp_path.rglob("*.o"))) == 2
    assert compiled_by_the_caller() == 0
    for file in tmp_path.rglob("*.o"):  # and so the count is one that can be wrong
        file.unlink()
    assert compiled_by_the_caller() == 2
