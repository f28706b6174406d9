"""QuACK's library epilogues for the paper's form, in three fixed configurations.

QuACK's own tuner takes minutes. Here the three tiles that won nearly everywhere in the records of
tune_shapes.py are timed per kernel and shape, and the fastest is kept (pick.py). Their kernels are
compiled before that, one process per configuration, each of which runs a small layer:

    python benchmarks/quack_kernels.py 0     # what such a process does; 0, 1, 2: the configuration
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from paper_form import Kernels
from pick import Picked
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.library import (
    dswiglu_rstd_preact_mod,
    rms_bwd_apply_epi,
    rms_partial_epi,
    rstd_gated_preact_mod,
)
from quack.epilogue.ops import ColVecLoad, RowVecLoad, RowVecReduce
from quack.epilogue.rotary import make_interleaved_inv_freq, rstd_rope_posfreq_epi
from quack.gemm_config import GemmConfig

#: Kept for the life of the process: QuACK keys what it compiled by their id.
CONFIGURATIONS = tuple(
    GemmConfig(tile_m=m, tile_n=n, pingpong=True, cluster_m=c, cluster_n=3 - c,
               device_capacity=9, is_dynamic_persistent=False)
    for m, n, c in ((128, 128, 1), (192, 128, 1), (128, 192, 2))
)  # fmt: skip


@gemm_epilogue(
    outputs=("a",),
    ops={"w": RowVecLoad("w"), "corr": ColVecLoad("corr")},
    reduces={"dw": RowVecReduce("dw", scaled=True)},
)
def rms_bwd_store_epi(acc, c, y, w, corr):  # type: ignore[no-untyped-def]
    """The library's rms_bwd_apply that also stores y ⊙ w again, as the paper's kernel does."""
    return {"D": acc * w + c + y * corr, "a": y * w, "dw": (acc, y)}


def paper_kernels(configurations: Sequence[GemmConfig] = CONFIGURATIONS) -> Kernels:
    def picked(name: str, mod: Any) -> Picked:
        variants = {
            f"{c.tile_m}x{c.tile_n} {c.cluster_m}x{c.cluster_n}": _in(mod, c)
            for c in configurations
        }
        return Picked(name, variants)

    return Kernels(
        rms_partial=picked("rms_partial", rms_partial_epi),
        swiglu=picked("swiglu", rstd_gated_preact_mod("swiglu")),
        rope=picked("rope", rstd_rope_posfreq_epi),
        rms_bwd=picked("rms_bwd", rms_bwd_apply_epi),
        rms_bwd_store=picked("rms_bwd_store", rms_bwd_store_epi),
        dswiglu=picked("dswiglu", dswiglu_rstd_preact_mod),
        inv_freq=make_interleaved_inv_freq,
        compile=torch.compile,
    )


def _in(mod: Any, config: GemmConfig) -> Any:
    return lambda a, b, c=None, **operands: mod(a, b, c, config=config, tuned=False, **operands)


def start_compiling() -> list[subprocess.Popen[bytes]]:
    """Processes that fill QuACK's cache with these kernels; wait for them before the first call."""
    return [
        subprocess.Popen([sys.executable, str(Path(__file__)), str(i)], env=os.environ)
        for i in range(len(CONFIGURATIONS))
    ]


def main() -> None:
    from contenders import paper
    from layer_model import Layer, Shape

    small = Layer.random(Shape("small", 512, 1024, 4, 4), 512)  # kernels are the same at any size
    kernels = paper_kernels([CONFIGURATIONS[int(sys.argv[1])]])
    for keep in (False, True):
        paper(small, keep, kernels).both()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
