"""Ready programs, one file per family: norm, gated, rotary, pointwise, loss, fp8, gradient.

    from codetta import programs

    codetta.gemm(x, w.t(), programs.row_scale_swiglu, r=r)       # a Program
    programs.residual_rms(eps=1e-5)                              # a factory of Programs, cached
    programs.catalog()["row_scale_rotary"].formula               # what it computes, in one line
    programs.recorded("bias_gelu_mask")                          # promoted by `codetta promote`

``codetta programs`` prints the catalog. A program is a dozen lines: read one, copy it, change it.
"""

from __future__ import annotations

from codetta.language.program import Program
from codetta.programs.catalog import Entry, catalog
from codetta.programs.fp8 import fp8_quantized, fp8_scaled, fp8_scaled_bias
from codetta.programs.gated import geglu, row_scale_geglu, row_scale_swiglu, swiglu
from codetta.programs.gradient import (
    bias_gelu_backward,
    geglu_backward,
    layernorm_apply_backward,
    layernorm_gelu_backward,
    layernorm_link_coefficients,
    layernorm_link_dgrad,
    layernorm_link_wgrad,
    rms_link_coefficient,
    rms_link_dgrad,
    rms_link_dgrad_folded,
    rms_link_dgrad_frozen,
    rms_link_dgrad_last,
    rms_link_dgrad_unscaled,
    rms_link_wgrad,
    row_scale_bias_backward,
    swiglu_backward,
    swiglu_backward_unscaled,
)
from codetta.programs.loss import (
    cross_entropy_backward,
    cross_entropy_coefficient,
    cross_entropy_loss,
    row_scale_lse_target,
)
from codetta.programs.norm import (
    layernorm_apply,
    layernorm_apply_gelu,
    layernorm_statistics,
    residual_rms,
    residual_ssq,
    rms_scale,
    row_layernorm,
    row_rms,
    row_scale,
    row_scale_bias,
)
from codetta.programs.pointwise import (
    bias,
    bias_gelu,
    bias_residual,
    identity,
    relu_squared,
    residual,
    softcap,
)
from codetta.programs.rotary import (
    qk_norm_rotary,
    qk_norm_rotary_backward,
    rotary_backward,
    row_scale_rotary,
)

__all__ = [
    "Entry", "bias", "bias_gelu", "bias_gelu_backward", "bias_residual", "catalog",
    "cross_entropy_backward", "cross_entropy_coefficient", "cross_entropy_loss", "fp8_quantized",
    "fp8_scaled", "fp8_scaled_bias", "geglu", "geglu_backward", "identity", "layernorm_apply",
    "layernorm_apply_backward", "layernorm_apply_gelu", "layernorm_gelu_backward",
    "layernorm_link_coefficients", "layernorm_link_dgrad", "layernorm_link_wgrad",
    "layernorm_statistics", "qk_norm_rotary", "qk_norm_rotary_backward", "recorded", "relu_squared",
    "residual", "residual_rms", "residual_ssq", "rms_link_coefficient", "rms_link_dgrad",
    "rms_link_dgrad_folded", "rms_link_dgrad_frozen", "rms_link_dgrad_last",
    "rms_link_dgrad_unscaled", "rms_link_wgrad", "rms_scale", "rotary_backward", "row_layernorm",
    "row_rms", "row_scale", "row_scale_bias", "row_scale_bias_backward", "row_scale_geglu",
    "row_scale_lse_target", "row_scale_rotary", "row_scale_swiglu", "softcap", "swiglu",
    "swiglu_backward", "swiglu_backward_unscaled",
]  # fmt: skip


def recorded(
    task: str,
    *,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    dtype: str | None = None,
) -> Program:
    """The best verified program that has been promoted for a task.

        codetta.gemm(a, w.t(), codetta.programs.recorded("bias_gelu_mask"), bias=b, keep=keep)

    Args:
        task: its name, see ``codetta new``, or the path of a task file.
        m, n, k: sizes of the call, all or none: the record that is best near them is taken.
        dtype: of a and b, as PyTorch names it; records without a time in it do not count.

    Raises:
        UnknownTask: there is no such task.
        NothingRecorded: nobody has promoted a program for it.
    """
    from codetta.author.registry import recorded as found

    return found(task, m=m, n=n, k=k, dtype=dtype)
