"""a @ b on QuACK's mainloop with nothing in the epilogue, in the best configuration on record.

Nothing is tuned here: ``tune_shapes.py`` has measured the plain product of every GEMM of the layer,
and its JSON files say which configuration was fastest. A shape that is not among them gets what the
package chooses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import codetta
from codetta.backends.cuda.configs import Configuration, layout_of
from codetta.ops import IDENTITY, run_gemm
from codetta.tuning.calls import CallJob, GemmCall, jobs

RESULTS = Path(__file__).with_name("results")


@lru_cache(maxsize=1)
def measured() -> dict[tuple[int, int, int, str], Configuration]:
    """The fastest configuration of the plain product by (M, N, K, layout), from the newest file."""
    found: dict[tuple[int, int, int, str], Configuration] = {}
    for file in sorted(RESULTS.glob("*/tune_*.json")):
        for kernel in json.loads(file.read_text()).get("kernels", {}).values():
            given = kernel.get("quack_plain_config")
            config = Configuration.of(given, f"{file.parent.name}/{file.name}")
            if config is not None:
                found[kernel["m"], kernel["n"], kernel["k"], kernel["layout"]] = config
    return found


def configuration(a: Tensor, b: Tensor) -> Configuration | None:
    """What is on record for this product, or None."""
    return measured().get((a.shape[0], b.shape[1], a.shape[1], layout_of(a, b)))


def plain(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in that configuration."""
    with _in_force(a, b):
        return run_gemm(IDENTITY, a, b)[0]


def plain_jobs(products: Iterable[tuple[Tensor, Tensor]]) -> list[CallJob]:
    """Their kernels, to be compiled beforehand; only the metadata of a and b counts."""
    found: dict[str, CallJob] = {}
    for a, b in products:
        with _in_force(a, b):
            a, b = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                    for x in (a, b))  # fmt: skip
            (job,) = jobs([GemmCall(IDENTITY, a, b, ())], None)
            found[job.key] = job
    return list(found.values())


def _in_force(a: Tensor, b: Tensor) -> Any:
    config = configuration(a, b)
    return nullcontext() if config is None else codetta.use_configuration(config)
