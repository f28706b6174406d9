"""benchmarks/llama.py: every contender trains the model, and a run leaves a resumable record."""

import json
import sys
from types import SimpleNamespace

import llama
import llama_models
import pytest
import torch
from llama_models import CASES, CONTENDERS, build, sharing
from measure import Budget, relative

pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

TINY = CASES["tiny"]
ON_ANY_MACHINE = [n for n in CONTENDERS if "Liger" not in n and n != "eager"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("part", llama.PARTS)
@pytest.mark.parametrize("case", llama.TESTS)
def test_contenders_have_the_output_and_gradients_of_eager(case, part):
    found = llama.measure(CASES[case], part, ON_ANY_MACHINE, 1, 1, Budget(600))
    assert found["failed"] == {}
    differences = found["relative_difference_to_eager"]
    assert set(differences) == set(ON_ANY_MACHINE)
    assert max(max(d.values()) for d in differences.values()) < 2e-5
    assert found["rewriter_s"]["CODA"] > 0


def test_wrong_contender_is_seen_in_the_difference_to_eager():
    def spoiled(model):
        made = CONTENDERS["eager"](model)
        return llama.Contender(lambda ids: 1.001 * made.loss(ids), made.hidden)

    contenders = {**CONTENDERS, "spoiled": spoiled}
    found = llama.measure(TINY, "step", ["spoiled"], 1, 1, Budget(60), contenders)
    assert min(found["relative_difference_to_eager"]["spoiled"].values()) > 5e-4


def test_contender_without_gradients_is_not_timed():
    def idle(model):
        made = CONTENDERS["eager"](model)
        return llama.Contender(lambda ids: made.loss(ids) + 0 * made.loss(ids), made.hidden)

    def without(model):
        made = CONTENDERS["eager"](model)
        loss = lambda ids: made.loss(ids).detach() + 0 * made.loss(ids)  # noqa: E731
        return llama.Contender(loss, made.hidden)

    def undefined(model):
        made = CONTENDERS["eager"](model)
        return llama.Contender(lambda ids: made.loss(ids) * float("nan"), made.hidden)

    contenders = {**CONTENDERS, "idle": idle, "without": without, "undefined": undefined}
    names = ["without", "undefined", "idle"]
    found = llama.measure(TINY, "step", names, 1, 1, Budget(60), contenders)
    assert "wrong: relative difference to eager" in found["failed"]["without"]
    assert "first norm 1.00" in found["failed"]["without"]
    assert "embedding nan" in found["failed"]["undefined"]
    assert set(found["times_ms"]) == {"idle"}


def test_contender_without_logits_has_the_loss_and_gradients_of_eager():
    found = llama.measure(TINY, "step", ["CODA, no logits"], 1, 1, Budget(60))
    assert found["failed"] == {}
    assert max(found["relative_difference_to_eager"]["CODA, no logits"].values()) < 2e-5


def test_contender_that_fails_costs_itself_only():
    def broken(model):
        raise RuntimeError("no such kernel")

    contenders = {**CONTENDERS, "broken": broken}
    found = llama.measure(TINY, "decoder", ["broken", "eager"], 2, 1, Budget(60), contenders)
    assert found["failed"] == {"broken": "RuntimeError: no such kernel"}
    assert list(found["times_ms"]) == ["eager"]
    assert "broken: failed" in llama.table(found)


class Overwriting(torch.autograd.Function):
    """The identity, whose backward leaves zeros in the gradient that it was given."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        found = gradient.clone()
        gradient.zero_()
        return found


def test_contender_that_overwrites_its_gradient_changes_no_step_after_it():
    def overwriting(model):
        made = CONTENDERS["eager"](model)
        return llama.Contender(made.loss, lambda ids: Overwriting.apply(made.hidden(ids)))

    contenders = {**CONTENDERS, "overwriting": overwriting}
    found = llama.measure(TINY, "decoder", ["overwriting", "eager"], 1, 1, Budget(60), contenders)
    assert found["failed"] == {}
    for name in ("overwriting", "eager"):
        assert max(found["relative_difference_to_eager"][name].values()) < 1e-6, name


def test_contender_that_writes_into_the_parameters_is_not_timed_and_undone():
    def writing(model):
        made = CONTENDERS["eager"](model)

        def loss(ids):
            found = made.loss(ids)
            next(model.parameters()).data[0, 0] += 1.0
            return found

        return llama.Contender(loss, made.hidden)

    contenders = {**CONTENDERS, "writing": writing}
    found = llama.measure(TINY, "step", ["writing", "eager"], 1, 1, Budget(60), contenders)
    assert "wrote into the parameters" in found["failed"]["writing"]
    assert set(found["times_ms"]) == {"eager"}
    assert max(found["relative_difference_to_eager"]["eager"].values()) < 1e-6


def test_contenders_share_parameters_but_no_modules():
    model = build(TINY, torch.float32, "cpu")
    twin = llama_models._with_causal_attention(sharing(model))
    assert all(p is q for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert model.config._attn_implementation == "sdpa"
    assert twin.model.layers[0].self_attn.config._attn_implementation == llama_models.CAUSAL
    assert twin.model.layers[0].mlp is not model.model.layers[0].mlp


@pytest.fixture
def rotations(monkeypatch):
    """Stands in for liger-kernel, which needs a GPU; one entry per call of its rotation.

    The rotation is the model's own arithmetic; nothing else of the model is patched. Like Liger's,
    the patch leaves other classes under names of the module that defines the model.
    """
    plain, calls = modeling_llama.apply_rotary_pos_emb, []

    def rotary(*given):
        calls.append(given)
        return plain(*given)

    def exchange(home, prefix):
        def patch(rope=True, model=None):
            setattr(home, f"{prefix}RMSNorm", None)
            if rope:
                home.apply_rotary_pos_emb = rotary

        return patch

    kernels = SimpleNamespace(
        apply_liger_kernel_to_llama=exchange(modeling_llama, "Llama"),
        apply_liger_kernel_to_qwen3=exchange(modeling_qwen3, "Qwen3"),
    )
    for name, module in {
        "liger_kernel": SimpleNamespace(transformers=kernels),
        "liger_kernel.transformers": kernels,
        "liger_kernel.transformers.rope": SimpleNamespace(liger_rotary_pos_emb=rotary),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize(
    "name, turned",
    [("Liger", 2), ("Liger + torch.compile, causal", 0)],
    ids=["eager", "compiled"],
)
@pytest.mark.parametrize("case", llama.TESTS)
def test_liger_rotates_in_its_own_forward_only(case, name, turned, rotations):
    before = {m: dict(vars(m)) for m in (modeling_llama, modeling_qwen3)}
    step = llama.Step(CASES[case], "step")
    eager = step.of(CONTENDERS["eager"](step.model))
    liger = step.of(CONTENDERS[name](step.model))
    loss = eager()
    expected = step.gradients()
    assert not rotations
    assert relative(liger(), loss) < 2e-5
    assert max(relative(g, expected[n]) for n, g in step.gradients().items()) < 2e-5
    assert len(rotations) == turned
    assert {m: dict(vars(m)) for m in before} == before


def test_step_leaves_gradients_of_one_step():
    step = llama.Step(TINY, "decoder")
    run = step.of(CONTENDERS["eager"](step.model))
    run()
    once = step.gradients()
    run()
    assert max(relative(g, once[n]) for n, g in step.gradients().items()) < 1e-6
    assert all(g.abs().max() > 0 for g in once.values())


def test_run_writes_one_file_per_part_and_resumes(tmp_path, capsys):
    flags = ["--out", str(tmp_path), "--case", "tiny", "--part", "step", "--rounds", "6"]
    llama.main([*flags, "--contender", "eager", "--contender", "CODA"])
    file = tmp_path / "llama_tiny_step.json"
    record = json.loads(file.read_text())
    assert len(record["times_ms"]["CODA"]) == record["rounds"] == 6
    assert record["first_step_s"]["CODA"] > record["rewriter_s"]["CODA"] > 0
    middle, low, high = llama.summary(record)["eager"]["speedup"]
    assert low <= middle <= high
    before = file.stat().st_mtime_ns
    llama.main(flags)
    assert file.stat().st_mtime_ns == before
    assert "ms / CODA's" in capsys.readouterr().out


def test_ratios_are_to_coda_or_to_its_first_option_that_ran():
    times = {"eager": [2.0], "CODA, no logits": [1.0], "CODA": [4.0]}
    assert llama.base({"times_ms": times}) == "CODA"
    del times["CODA"]
    assert llama.base({"times_ms": times}) == "CODA, no logits"
    assert llama.base({"times_ms": {"eager": [2.0]}}) is None


def test_a_part_is_not_begun_without_time(tmp_path, capsys):
    llama.main(["--out", str(tmp_path), "--tiny", "--budget", "-1"])
    assert "not begun" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_the_first_step_is_timed_with_the_rewriter_in_it():
    found = llama.first_step(TINY, "CODA")
    assert found["first_step_s"] > found["rewriter_s"] > 0
    assert found["first_step_s"] > found["second_step_s"]
