"""What `codetta.explain` says: each operation fused or left with its reason, and the counts."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser

import capture_models
import pytest
import torch

import codetta
from codetta.explanation.facts import BACKWARD, FORWARD, GEMM, KINDS, MEMORY, PHASES, SCHEMA

NAMES = ["llama", "gemma2", "gpt2"]
_FOUND: dict[str, codetta.explanation.facts.Explanation] = {}


def explained(name):
    if name not in _FOUND:
        model = capture_models.make(name)
        _FOUND[name] = codetta.explain(model, **capture_models.batch(name))
    return _FOUND[name]


def fused_memory_bound(found, phase):
    """Memory-bound kernels of the middle region, without work on weights and finalizers."""
    quiet = ("prepare", "finalize")
    return [k for k in found.regions[1].after if k.phase == phase and k.kind == MEMORY
            and k.role not in quiet]  # fmt: skip


def test_norms_gates_rotation_and_residuals_of_a_llama_are_in_epilogues():
    found = explained("llama")
    assert [r.count for r in found.regions] == [1, 1, 1]
    assert not fused_memory_bound(found, FORWARD)
    # Left in the backward: dq, dk and dv side by side, rotation's derivative, its rows put back.
    assert {k.role for k in fused_memory_bound(found, BACKWARD)} == {"join", "pointwise", "move"}
    formulas = {
        phase: " ".join(
            f for k in found.regions[1].after if k.kind == GEMM and k.phase == phase
            for _, f in k.formulas
        )
        for phase in PHASES
    }  # fmt: skip
    for op in ("rotate(", "sigmoid(", "rowsum(", "inputs_embeds + acc"):
        assert op in formulas[FORWARD]
    for op in ("sigmoid(", "colsum(", "rowsum("):
        assert op in formulas[BACKWARD]


#: GEMMs before and after; memory-bound kernels before; those after that are neither finalizers nor
#: work on weights, forward and backward: for Gemma 2 the norms after projections.
MIDDLE = {
    "llama": (21, 12, 79, 0, 3),
    "gemma2": (21, 12, 123, 2, 4),
    "gpt2": (12, 12, 32, 0, 2),
}


@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_a_layer_before_and_after(name):
    found = explained(name)
    middle = found.regions[1]
    gemms = [sum(k.kind == GEMM for k in side) for side in (middle.before, middle.after)]
    memory = sum(k.kind == MEMORY for k in middle.before)
    left = [len(fused_memory_bound(found, phase)) for phase in PHASES]
    assert (*gemms, memory, *left) == MIDDLE[name]


def test_gemms_of_a_llama_layer_have_the_sizes_of_its_weights():
    found = explained("llama")
    rows = found.tokens
    forward = [k.size for k in found.regions[1].after if k.kind == GEMM and k.phase == FORWARD]
    assert rows == 12
    assert forward == [(rows, 32, 32), (rows, 80, 32), (rows, 32, 40), (rows, 64, 32)]


def test_every_operation_is_in_a_region_or_has_a_reason():
    found = explained("llama")
    fused = {name for r in found.regions for name, _ in r.operations}
    assert {"linear", "silu", "rsqrt", "neg", "cat"} <= fused
    left = {x.what: x.reason for x in found.left}
    assert "attention" in left["scaled_dot_product_attention"]
    assert left["embedding"] == "the language has no embedding"
    assert all(x.reason for x in found.left)
    text = " ".join(str(found).split())
    for reason in (left["embedding"], left["cross_entropy"]):
        assert reason in text


@pytest.mark.parametrize("name", NAMES)
def test_before_is_what_eager_execution_runs(name):
    """GEMMs of a real training step, counted as they run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        gemms = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.gemms += func._overloadpacket.__name__ in ("mm", "addmm", "bmm")
            return func(*args, **(kwargs or {}))

    model = capture_models.make(name)
    with Count() as count:
        model(**capture_models.batch(name)).loss.backward()
    own_attention = 12 if name == "gemma2" else 0  # with a softcap it is written out as products
    found = explained(name).total("before", kind=GEMM).kernels
    assert count.gemms - found in (0, own_attention)


def test_totals_add_up():
    found = explained("llama")
    for when in ("before", "after"):
        parts = [found.total(when, p, k) for p in PHASES for k in KINDS]
        assert sum(t.kernels for t in parts) == found.total(when).kernels
        assert sum(t.bytes for t in parts) == found.total(when).bytes
    assert found.total("after", FORWARD, "attention").kernels == 2


def test_a_faster_gpu_takes_less_time_for_the_same_kernels():
    found = explained("llama")
    h100, h200 = (found.on(name).total("after") for name in ("h100", "h200"))
    assert h200.seconds < h100.seconds
    assert (h200.kernels, h200.bytes) == (h100.kernels, h100.bytes)


def test_the_json_has_the_documented_keys():
    data = json.loads(json.dumps(explained("gpt2").to_dict()))
    assert data["schema"] == SCHEMA
    assert set(data) == {
        "schema", "model", "tokens", "dtype", "layers", "traced_layers", "gpu", "training",
        "graphs", "notes", "totals", "regions", "left",
    }  # fmt: skip
    assert set(data["regions"][0]) == {
        "label", "count", "modules", "operations", "before", "after"
    }  # fmt: skip
    assert set(data["regions"][0]["after"][0]) == {
        "name", "phase", "kind", "role", "bytes_read", "bytes_written", "flops", "seconds", "size",
        "heading", "writes", "formulas", "preparation",
    }  # fmt: skip
    assert set(data["left"][0]) == {"what", "reason", "where", "count", "kernels"}
    assert set(data["totals"]["after"]["backward"]["memory"]) == {
        "kernels", "bytes", "flops", "seconds"
    }  # fmt: skip


def test_nothing_is_left_behind():
    model = capture_models.make("llama")
    before = {n: p.clone() for n, p in model.named_parameters()}
    batch = capture_models.batch("llama")
    expected = model(**batch).loss
    for _ in range(10):  # more often than torch.compile compiles one function
        found = codetta.explain(model, **batch)
    assert len(found.regions) == 3
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(model(**batch).loss, expected)


def test_without_gradients_there_is_a_forward_only():
    model = capture_models.make("llama")
    with torch.no_grad():
        found = codetta.explain(model, **capture_models.batch("llama"))
    assert not found.training
    assert found.regions
    assert not found.total("after", BACKWARD).kernels
    assert not found.total("before", BACKWARD).kernels


def test_a_frozen_weight_has_no_gradient_gemm():
    model = capture_models.make("llama")
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    found = codetta.explain(model, **capture_models.batch("llama"))
    counts = [sum(k.kind == GEMM for k in side)
              for side in (found.regions[1].before, found.regions[1].after)]  # fmt: skip
    assert counts == [20, 11]


def test_a_model_that_gains_nothing_is_told_why():
    found = codetta.explain(torch.nn.Sequential(torch.nn.Conv1d(2, 3, 1)), torch.ones(1, 2, 5))
    assert not found.regions
    assert "No region" in str(found)
    assert found.left


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.text, self.open, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "rect", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_complete_and_loads_nothing(tmp_path):
    found = explained("llama")
    source = found.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(source)
    assert not reader.open
    assert not reader.links
    assert not any(mark in source for mark in ("http:", "https:", "url(", "@import", "<script"))
    text = "".join(reader.text)
    for region in found.regions:
        assert region.label in text
        for k in region.after:
            assert all(formula in text for _, formula in k.formulas)
            assert k.heading in text
    for x in found.left:
        assert x.reason in text


@pytest.mark.slow
def test_a_browser_shows_it_in_both_colour_schemes(tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium")
    plt = pytest.importorskip("matplotlib.pyplot")
    page = explained("llama").to_html(tmp_path / "page.html")
    pictures = []
    for scheme in (0, 1):  # dark, light
        target = tmp_path / f"{scheme}.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,900",
                   f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={target}",
                   f"--blink-settings=preferredColorScheme={scheme}", page.as_uri()]  # fmt: skip
        done = subprocess.run(command, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        pictures.append(plt.imread(target)[..., :3])
    dark, light = (p[2, 2].mean() for p in pictures)  # the corner is background
    assert dark < 0.2 < 0.8 < light
    assert all(p.std() > 0.05 for p in pictures)  # and there is something on it


# ------------------------------------------------------------------------------------ pack=True
ROTATED = (
    "not packed: q_proj.weight, k_proj.weight, v_proj.weight: its rows are permuted within heads "
    "for the rotation, which no view of weights can be"
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_packed_weights_are_named_counted_and_left_where_they_are(device):
    model = capture_models.make("llama").to(device)
    batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v
             for k, v in capture_models.batch("llama").items()}  # fmt: skip
    before = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    found = codetta.explain(codetta.compile(model, pack=True), **batch)
    assert [(p.data_ptr(), p.stride()) for p in model.parameters()] == before
    plain = codetta.explain(codetta.compile(model), **batch)
    notes = [n for n in found.notes if n not in plain.notes]
    gated = "packed: gate_proj.weight, up_proj.weight (rows in turn)"
    assert notes == [f"2 times {ROTATED}", f"2 times {gated}"]
    assert all(n.replace("\n", " ") in " ".join(str(found).split()) for n in notes)
    # One copy of gate and up a layer, in the backward: read, and written.
    saved = plain.total("after").bytes - found.total("after").bytes
    assert saved == 2 * 2 * (2 * 40 * 32 * 4)
    assert plain.total("after").kernels - found.total("after").kernels == 2
    assert plain.total("after", FORWARD) == found.total("after", FORWARD)


def test_a_model_that_was_packed_here_is_explained_as_on_a_gpu():
    model, batch = capture_models.make("llama"), capture_models.batch("llama")
    compiled = codetta.compile(model, pack=True)
    first = codetta.explain(compiled, **batch)
    compiled(**batch)
    assert codetta.explain(compiled, **batch).to_dict() == first.to_dict()


def test_where_there_is_nothing_to_pack_it_says_so():
    for name in ("gpt2", "phi3"):
        compiled = codetta.compile(capture_models.make(name), pack=True)
        found = codetta.explain(compiled, **capture_models.batch(name))
        assert "nothing to do, no two weights are read side by side" in found.notes[-1]
