"""The versions of QuACK and the CuTe DSL that the fused backend is written for."""

from __future__ import annotations

#: Distribution and exact version: internals move between versions without notice.
VERSIONS = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.7.0"}
INSTALL = (
    "Install "
    + " ".join(f"{name}=={version}" for name, version in VERSIONS.items())
    + ", or `pip install 'codetta[cuda]'`."
)
