"""CODA: GEMMs with epilogues, for everything in a Transformer that is not attention.

    import codetta
    from codetta.language import Tile, round_to, rowsum

    @codetta.epilogue
    def residual_ssq(acc, residual: Tile):
        x = round_to(acc + residual)
        return {"x": x, "ssq": rowsum(x * x)}

    out = codetta.gemm(a, weight.t(), residual_ssq, residual=r)  # out.x, out.ssq

Names are resolved on first use (PEP 562): ``import codetta`` loads neither torch nor any of the
submodules, creates no CUDA context and patches nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from codetta._version import __version__

if TYPE_CHECKING:
    from codetta import errors, language, nn, ops, plan, programs
    from codetta.backends.cuda.configs import Configuration, use_configuration
    from codetta.backends.precision import fp8_accumulation
    from codetta.backends.select import use_backend
    from codetta.backward import vjp
    from codetta.capture.compile import compile
    from codetta.explanation.record import explain
    from codetta.functional import gemm, gemm_accumulate_, rotary_table
    from codetta.language.program import Program
    from codetta.language.trace import epilogue
    from codetta.loss.call import linear_cross_entropy
    from codetta.tuning.precompile import precompile
    from codetta.tuning.tune import tune

__all__ = [
    "Configuration",
    "Program",
    "__version__",
    "compile",
    "epilogue",
    "errors",
    "explain",
    "fp8_accumulation",
    "gemm",
    "gemm_accumulate_",
    "language",
    "linear_cross_entropy",
    "nn",
    "ops",
    "plan",
    "precompile",
    "programs",
    "rotary_table",
    "tune",
    "use_backend",
    "use_configuration",
    "vjp",
]

#: Public name -> module that defines it. A name missing here is a submodule.
_HOMES = {
    "Configuration": "codetta.backends.cuda.configs",
    "Program": "codetta.language.program",
    "compile": "codetta.capture.compile",
    "epilogue": "codetta.language.trace",
    "explain": "codetta.explanation.record",
    "fp8_accumulation": "codetta.backends.precision",
    "gemm": "codetta.functional",
    "gemm_accumulate_": "codetta.functional",
    "linear_cross_entropy": "codetta.loss.call",
    "precompile": "codetta.tuning.precompile",
    "rotary_table": "codetta.functional",
    "tune": "codetta.tuning.tune",
    "use_backend": "codetta.backends.select",
    "use_configuration": "codetta.backends.cuda.configs",
    "vjp": "codetta.backward",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'codetta' has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        value = import_module(f"codetta.{name}")
    globals()[name] = value  # the next access is a plain attribute
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
