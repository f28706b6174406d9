"""QuACK for the benchmarks: its library epilogues, plain GEMMs, and a short list of tiles to tune.

QuACK tunes by itself the first time it sees a shape; it is given the short list here, which holds
the tiles that ever won on Hopper, and that happens before anything is timed.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

os.environ.setdefault("QUACK_COMPILE_WORKERS", str(len(os.sched_getaffinity(0))))

import quack.gemm_runtime.autotune as autotune
import torch
from paper_form import Epilogue, Kernels
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.library import (
    dswiglu_rstd_preact_mod,
    identity_epi,
    rms_bwd_apply_epi,
    rms_partial_epi,
    rstd_gated_preact_mod,
)
from quack.epilogue.ops import ColVecLoad, RowVecLoad, RowVecReduce
from quack.epilogue.rotary import make_interleaved_inv_freq, rstd_rope_posfreq_epi
from quack.gemm_config import GemmConfig
from torch import Tensor

#: (tile_m, tile_n, ping-pong); each with clusters 2x1 and 1x2.
TILES = (
    (256, 128, False), (256, 160, False), (256, 192, False), (256, 208, False), (128, 256, False),
    (128, 128, True), (128, 160, True), (128, 192, True), (192, 128, True),
)  # fmt: skip


@lru_cache(maxsize=1)
def configurations() -> tuple[GemmConfig, ...]:
    return tuple(
        GemmConfig(tile_m=m, tile_n=n, pingpong=pingpong, cluster_m=c, cluster_n=3 - c,
                   device_capacity=9, is_dynamic_persistent=False)
        for m, n, pingpong in TILES
        for c in (2, 1)
    )  # fmt: skip


def shorten_tuning() -> None:
    """Let QuACK tune over the short list only."""
    autotune.get_all_configs = lambda epilogue=None: [
        c for c in configurations() if epilogue != "gated" or c.tile_n % 32 == 0
    ]


@gemm_epilogue(
    outputs=("a",),
    ops={"w": RowVecLoad("w"), "corr": ColVecLoad("corr")},
    reduces={"dw": RowVecReduce("dw", scaled=True)},
)
def rms_bwd_store_epi(acc, c, y, w, corr):  # type: ignore[no-untyped-def]
    """The library's rms_bwd_apply that also stores y ⊙ w again, as the paper's kernel does."""
    return {"D": acc * w + c + y * corr, "a": y * w, "dw": (acc, y)}


def paper_kernels() -> Kernels:
    shorten_tuning()
    return Kernels(
        rms_partial=_tuned(rms_partial_epi),
        swiglu=_tuned(rstd_gated_preact_mod("swiglu")),
        rope=_tuned(rstd_rope_posfreq_epi),
        rms_bwd=_tuned(rms_bwd_apply_epi),
        rms_bwd_store=_tuned(rms_bwd_store_epi),
        dswiglu=_tuned(dswiglu_rstd_preact_mod),
        inv_freq=make_interleaved_inv_freq,
        compile=torch.compile,
    )


def _tuned(mod: Any) -> Epilogue:
    return lambda a, b, c=None, **operands: mod(a, b, c, tuned=True, **operands)


def plain(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by QuACK's mainloop in its best tile of the list."""
    shorten_tuning()
    found: Tensor = identity_epi(a, b, tuned=True)["D"]
    return found


def plain_in(config: GemmConfig, a: Tensor, b: Tensor) -> Tensor:
    """a @ b by QuACK's mainloop in one tile."""
    found: Tensor = identity_epi(a, b, config=config, tuned=False)["D"]
    return found
