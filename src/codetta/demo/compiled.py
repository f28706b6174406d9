"""The model through `codetta.compile`, and the kernels of its regions by formula.

A region is a stretch of the model's graph that CODA took over: its Plan says which kernels forward
and backward launch, and what each moves. What lies between the regions (attention, the embedding,
the head where it is left as it is, the loss) runs as PyTorch runs it and is only watched.
"""

from __future__ import annotations

from typing import Any

import torch

from codetta.backends.select import backend_for, tiling_for
from codetta.capture.backend import Compiler
from codetta.capture.compile import compile
from codetta.demo.kernels import CostRow
from codetta.nn.block import ADJACENT, HALVES
from codetta.nn.cost import plan_cost
from codetta.nn.decoder import trained


class CompiledModel:
    """`codetta.compile` of a Hugging Face model, whose parameters it shares."""

    def __init__(self, model: Any) -> None:
        self._call = compile(model)
        self.compiler: Compiler = self._call.codetta_compiler

    def loss(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The mean loss of (batch, seq) token numbers, as `models.hf_loss` computes it."""
        loss: torch.Tensor = self._call(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        return loss

    def cost_table(
        self, *, tokens: int, positions: int, dtype: torch.dtype, device: torch.device
    ) -> list[CostRow]:
        """Kernels of all regions, forward and backward, every weight trained.

        To be asked after the first step, which compiles the model.
        """
        here = torch.empty(0, dtype=dtype, device=device)
        fused, tiling = backend_for(here).name == "cuda", tiling_for(here)
        rows: list[CostRow] = []
        for call in (c for graph in self.compiler.rewritten for c in graph.calls):
            plan = call.plan(ADJACENT if fused else HALVES)
            rows += plan_cost(
                plan,
                trained(plan),
                tokens=tokens,
                dtype=dtype,
                positions=positions,
                tiling=tiling,
            )
        return rows
