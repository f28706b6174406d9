"""The catalog: every ready program with its formula, its meaning and where it comes from.

The order is that of the documentation, family by family, gradients last. ``codetta programs``,
docs/programs.md and the tests all walk this one table. Formulas write acc for a b, ⊙ for broadcast
products and ⟨x, y⟩ for a sum over the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from codetta.language import Program
from codetta.programs import fp8, gated, gradient, loss, norm, pointwise, rotary

_CODA = "Guo et al., arXiv 2605.19269"
_RMS = "Zhang and Sennrich, arXiv 1910.07467"
_LN = "Ba et al., arXiv 1607.06450"
_GLU = "Shazeer, arXiv 2002.05202"
_ROPE = "Su et al., arXiv 2104.09864"
_QK = "Henry et al., arXiv 2010.04245"
_GELU = "Hendrycks and Gimpel, arXiv 1606.08415"
_FP8 = "Micikevicius et al., arXiv 2209.05433"
_LSE = "Milakov and Gimelshein, arXiv 1805.02867"


@dataclass(frozen=True)
class Entry:
    """One line of the catalog.

    Attributes:
        name: as in ``codetta.programs.<name>``.
        family: the file it lives in.
        formula: what it computes, in one line.
        doc: what it is for, and what its operands are.
        make: the Program, or a factory of Programs.
        arguments: for a factory, the arguments of the example.
        source: where the method was published, or "".
    """

    name: str
    family: str
    formula: str
    doc: str
    make: Program | Callable[..., Program]
    arguments: Mapping[str, Any]
    source: str

    @property
    def is_factory(self) -> bool:
        return not isinstance(self.make, Program)

    @property
    def is_backward(self) -> bool:
        """Part of a backward pass; its own derivative would be a second derivative."""
        last = self.name.rpartition("_")[2]
        return self.family == "gradient" or last in ("backward", "coefficient")

    @property
    def has_backward(self) -> bool:
        """Whether a backward is derived: of no part of a backward, and of no fp8 kernel."""
        return not self.is_backward and self.family != "fp8"

    @property
    def program(self) -> Program:
        """The Program itself, or the factory's example."""
        return self.make if isinstance(self.make, Program) else self.make(**self.arguments)

    @property
    def call(self) -> str:
        """How it is written: ``swiglu`` or ``softcap(cap=30.0)``."""
        if not self.is_factory:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"


@cache
def catalog() -> Mapping[str, Entry]:
    """All ready programs by name, in the order of the documentation."""
    return MappingProxyType({entry.name: entry for entry in _entries()})


def _entry(
    module: Any, name: str, formula: str, doc: str, source: str = "", **arguments: Any
) -> Entry:
    family = module.__name__.rpartition(".")[2]
    make = getattr(module, name)
    return Entry(name, family, formula, doc, make, MappingProxyType(arguments), source)


def _entries() -> Iterator[Entry]:
    forward = (_pointwise, _norm, _gated, _rotary, _loss, _fp8)
    for family in (*forward, _rms_link, _gates, _layernorm_link):
        yield from family()


def _pointwise() -> Iterator[Entry]:
    p = pointwise
    yield _entry(p, "identity", "acc", "A plain product.")
    yield _entry(p, "residual", "acc + residual", "A product added to the residual stream.")
    yield _entry(p, "bias", "acc + bias", "A Linear with bias.")
    yield _entry(p, "bias_residual", "acc + bias + residual", "A Linear with bias, and residual.")
    yield _entry(
        p, "bias_gelu", "gelu(acc + bias)",
        "A Linear with bias and GELU, exact ('none') or by 'tanh'.", _GELU, approximate="tanh",
    )  # fmt: skip
    yield _entry(p, "relu_squared", "max(acc, 0)²", "Squared ReLU.", "So et al., arXiv 2109.08668")
    yield _entry(
        p, "softcap", "cap tanh(acc / cap)", "Logits bounded to (-cap, cap).",
        "Gemma 2, arXiv 2408.00118", cap=30.0,
    )  # fmt: skip


def _norm() -> Iterator[Entry]:
    n = norm
    yield _entry(
        n, "residual_ssq", "x = acc + residual, ssq = Σ x²",
        "Residual stream, and the row sum of squares of x as stored.", _CODA,
    )  # fmt: skip
    yield _entry(
        n, "residual_rms", "x = acc + residual, r = rsqrt(Σ x² / D + eps)",
        "Residual stream, and the row scale of the RMSNorm that follows.", _RMS, eps=1e-6,
    )  # fmt: skip
    yield _entry(
        n, "row_rms", "r = rsqrt(mean x² + eps)",
        "Row scale of an RMSNorm of a tensor that no GEMM made.", _RMS, eps=1e-6,
    )  # fmt: skip
    yield _entry(
        n, "rms_scale", "r = rsqrt(ssq / dim + eps)",
        "From a completed sum of squares to the row scale.", _RMS, eps=1e-6,
    )  # fmt: skip
    yield _entry(
        n, "row_scale", "r ⊙ acc",
        "A Linear behind an RMSNorm: its r moves behind the product. γ is folded into the weight.",
        _CODA,
    )  # fmt: skip
    yield _entry(n, "row_scale_bias", "r ⊙ acc + bias", "row_scale of a Linear with bias.", _CODA)
    yield _entry(
        n, "layernorm_statistics", "x = acc + residual, mean, r = rsqrt(var + eps)",
        "Residual stream, mean and row scale of the LayerNorm that follows, from Chan partials.",
        _LN, eps=1e-5,
    )  # fmt: skip
    yield _entry(
        n, "row_layernorm", "mean, r = rsqrt(var + eps)",
        "Mean and row scale of a LayerNorm of a tensor that no GEMM made.", _LN, eps=1e-5,
    )  # fmt: skip
    yield _entry(
        n, "layernorm_apply", "r ⊙ (acc − mean ⊙ s) + t",
        "A Linear behind a LayerNorm. The weight is W' = W ⊙ γ; s sums the rows of W' as stored, "
        "t = W β + b.", _LN,
    )  # fmt: skip
    yield _entry(
        n, "layernorm_apply_gelu", "z = r ⊙ (acc − mean ⊙ s) + t, y = gelu(z)",
        "layernorm_apply and GELU; z is stored for the backward.", _LN, approximate="tanh",
    )  # fmt: skip


def _gated() -> Iterator[Entry]:
    g = gated
    yield _entry(
        g, "swiglu", "silu(g) u, (g, u) = pairs of acc",
        "SwiGLU of adjacent columns; half as wide as acc.", _GLU,
    )  # fmt: skip
    yield _entry(
        g, "row_scale_swiglu", "z = r ⊙ acc = (g, u), y = silu(g) u",
        "SwiGLU behind an RMSNorm; the pairs z are stored for the backward.", _GLU,
    )  # fmt: skip
    yield _entry(
        g, "geglu", "gelu(g) u, (g, u) = pairs of acc",
        "GEGLU of adjacent columns; half as wide as acc.", _GLU, approximate="tanh",
    )  # fmt: skip
    yield _entry(
        g, "row_scale_geglu", "z = r ⊙ acc = (g, u), y = gelu(g) u",
        "GEGLU behind an RMSNorm; the pairs z are stored for the backward.", _GLU,
        approximate="tanh",
    )  # fmt: skip


def _rotary() -> Iterator[Entry]:
    o = rotary
    yield _entry(
        o, "row_scale_rotary", "rotate(r ⊙ acc), V columns pass",
        "The q, k, v projection behind an RMSNorm. `heads` counts the q and k heads; pairs are "
        "'adjacent' or 'halves'; with bias=True a bias is added before the rotation.", _ROPE,
        head_dim=4, heads=3,
    )  # fmt: skip
    yield _entry(
        o, "qk_norm_rotary", "rotate(rmsnorm of each head(r ⊙ acc) ⊙ weight)",
        "row_scale_rotary with an RMSNorm of each q and k head. `normed` is 1 for heads that are "
        "normalized and 0 for V heads, `weight` holds the norms' weights by column and 1 for V.",
        _QK, head_dim=4, eps=1e-6, heads=3, keep_z=True,
    )  # fmt: skip
    yield _entry(
        o, "rotary_backward", "dz = r ⊙ rotate⁻¹(dqkv), ⟨dqkv, qkv⟩",
        "The step between attention's backward and the projection's. Rotation preserves inner "
        "products, so z itself need not be saved.", _ROPE, head_dim=4, heads=3,
    )  # fmt: skip
    yield _entry(
        o, "qk_norm_rotary_backward", "dz = r ⊙ norm'(rotate⁻¹(dqkv)), ⟨dz / r, z⟩",
        "As rotary_backward, through the norm of each head, from the stored z.", _QK,
        head_dim=4, eps=1e-6, heads=3,
    )  # fmt: skip


def _loss() -> Iterator[Entry]:
    e = loss
    yield _entry(
        e, "row_scale_lse_target", "log Σ e^z, z[target], Σ softmax(z) z; z = r ⊙ acc",
        "The language-model head: three numbers per row, no logits stored.", _LSE,
    )  # fmt: skip
    yield _entry(
        e, "cross_entropy_loss", "loss = lse − logit",
        "Loss per row. Masks, weights and means are the caller's.",
    )  # fmt: skip
    yield _entry(
        e, "cross_entropy_backward", "dz = r grad ⊙ (exp(r ⊙ acc − lse) − onehot)",
        "From recomputed logits to their scaled gradient; grad is the upstream one, 0 for ignored "
        "rows.",
    )  # fmt: skip
    yield _entry(
        e, "cross_entropy_coefficient", "c = r² grad (expected − logit) / dim",
        "The coefficient of the final norm's backward, known before dz is.",
    )  # fmt: skip


def _fp8() -> Iterator[Entry]:
    f = fp8
    yield _entry(
        f, "fp8_scaled", "sa ⊙ acc ⊙ sb",
        "A product of fp8 matrices quantized by row and by column (by tensor: equal scales), "
        "stored in bf16.", _FP8,
    )  # fmt: skip
    yield _entry(f, "fp8_scaled_bias", "sa ⊙ acc ⊙ sb + bias", "fp8_scaled with a bias.", _FP8)
    yield _entry(
        f, "fp8_quantized", "z = sa ⊙ acc ⊙ sb, y = scale z, amax = max |z|",
        "fp8_scaled stored in fp8 ('e4m3', or 'e5m2' for gradients), with the largest magnitude "
        "of each row; with raw=True, of each row of each tile. y saturates.", _FP8, dtype="e4m3",
    )  # fmt: skip


def _rms_link() -> Iterator[Entry]:
    d = gradient
    yield _entry(
        d, "rms_link_coefficient", "c = r² zdz / dim",
        "Row coefficient of the RMSNorm backward from zdz = ⟨dz, z⟩.", _CODA,
    )  # fmt: skip
    yield _entry(
        d, "rms_link_dgrad", "dx = acc ⊙ gamma + dres − c ⊙ x",
        "acc = (r ⊙ dz) W: RMSNorm backward and the residual's gradient.", _CODA,
    )  # fmt: skip
    yield _entry(
        d, "rms_link_dgrad_last", "dx = acc ⊙ gamma − c ⊙ x",
        "rms_link_dgrad where no residual joins, as before the head.", _CODA,
    )  # fmt: skip
    yield _entry(
        d, "rms_link_dgrad_folded", "dx = acc + dres − c ⊙ x",
        "rms_link_dgrad where acc = (r ⊙ dz) (W ⊙ γ), the weight being folded already.", _CODA,
    )  # fmt: skip
    yield _entry(
        d, "rms_link_dgrad_frozen", "as rms_link_dgrad, and dgamma = Σ_m acc ⊙ x",
        "rms_link_dgrad with W frozen and γ trained, where there is no weight gradient to sum.",
    )  # fmt: skip
    yield _entry(
        d, "rms_link_dgrad_unscaled", "dx = r ⊙ acc ⊙ gamma + dres − c ⊙ x",
        "rms_link_dgrad where dz was stored without r (fp16).",
    )  # fmt: skip
    yield _entry(
        d, "rms_link_wgrad", "dw = acc ⊙ gamma, dgamma = Σ_n acc ⊙ w",
        "acc = (r ⊙ dz)ᵀ x, of the weight's shape (N, D): dW, and dγ at the price of reading W.",
    )  # fmt: skip


def _gates() -> Iterator[Entry]:
    d = gradient
    yield _entry(
        d, "swiglu_backward", "dz = r ⊙ (dg, du), y = silu(g) u, ⟨(dg, du), z⟩",
        "On the down projection's dgrad, acc = dy: the derivative, y again for its weight "
        "gradient, and the row sum for rms_link_coefficient.", _CODA,
    )  # fmt: skip
    yield _entry(
        d, "swiglu_backward_unscaled", "dz = (dg, du), y = silu(g) u, ⟨dz, z⟩",
        "swiglu_backward with r kept out of the store: for fp16, where r ⊙ dz can flush to zero, "
        "and for SwiGLU behind no norm.",
    )  # fmt: skip
    yield _entry(
        d, "geglu_backward", "dz = r ⊙ (dg, du), y = gelu(g) u, ⟨(dg, du), z⟩",
        "As swiglu_backward, for GEGLU.", _GLU, approximate="tanh",
    )  # fmt: skip
    yield _entry(
        d, "row_scale_bias_backward", "dz = r ⊙ dh, dbias = Σ_m dh, ⟨h − bias, dh⟩",
        "From the gradient dh of h = r ⊙ acc + bias. No accumulator: a pointwise kernel, or fused "
        "where dh is made.",
    )  # fmt: skip
    yield _entry(
        d, "bias_gelu_backward", "dh = acc ⊙ gelu'(h), y = gelu(h), dbias = Σ_m dh",
        "On the next dgrad, acc = dy, from the preactivation h.", _GELU, approximate="tanh",
    )  # fmt: skip


def _layernorm_link() -> Iterator[Entry]:
    d = gradient
    yield _entry(
        d, "layernorm_apply_backward", "r ⊙ dz, ⟨dz, s⟩, ⟨dz, z − t⟩, db = Σ_m dz, v",
        "From the gradient dz of layernorm_apply, all sums that the link's dgrad and wgrad need; "
        "v = Σ_m mean r dz. No accumulator.",
    )  # fmt: skip
    yield _entry(
        d, "layernorm_gelu_backward", "dz = acc ⊙ gelu'(z), y = gelu(z), sums over dz",
        "On the next dgrad, acc = dy, for layernorm_apply_gelu.", approximate="tanh",
    )  # fmt: skip
    yield _entry(
        d, "layernorm_link_coefficients", "c0 = r sdz / dim, c1 = r² zdz / dim",
        "Row coefficients of the LayerNorm backward.",
    )  # fmt: skip
    yield _entry(
        d, "layernorm_link_dgrad", "dx = acc ⊙ gamma + dres − c0 − c1 ⊙ (x − mean)",
        "acc = (r ⊙ dz) W: LayerNorm backward and the residual's gradient.",
    )  # fmt: skip
    yield _entry(
        d, "layernorm_link_wgrad", "dw = (acc − v) ⊙ gamma + db ⊙ beta, dgamma, dbeta",
        "acc = (r ⊙ dz)ᵀ x: dW, dgamma = Σ_n (acc − v) ⊙ w and dbeta = Σ_n db ⊙ w. v and db are "
        "sums of layernorm_apply_backward.",
    )  # fmt: skip
