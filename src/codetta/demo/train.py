"""One fine-tuning run: AdamW on a fixed list of batches, everything of interest noted on the way.

Step 1 runs under the kernel trace, and its gradients are measured before the optimizer uses them;
it is left out of the time per step. In a 16-bit dtype the optimizer keeps the fp32 weights, as
training in practice does, and the model has them rounded: otherwise most updates of a small
learning rate would round to nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from codetta.demo.kernels import KernelRow
from codetta.demo.models import Loss
from codetta.demo.trace import KernelTrace


@dataclass
class Run:
    """What one run left behind."""

    name: str
    dtype: torch.dtype
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None  # of GPU memory; None on a CPU
    gradient_errors: dict[str, float] = field(default_factory=dict)  # ‖g − g64‖ at step 1
    kernels: dict[str, list[KernelRow]] = field(default_factory=dict)  # of step 1, by region

    @property
    def seconds_per_step(self) -> float:
        """The median, without the first step where there are others."""
        return statistics.median(self.seconds[1:] or self.seconds)


def fine_tune(
    name: str,
    model: nn.Module,
    loss_of: Loss,
    batches: Sequence[torch.Tensor],
    *,
    initial: Mapping[str, torch.Tensor],
    steps: int,
    lr: float,
    reference: Mapping[str, torch.Tensor],
    compiled: bool = False,
    on_step: Callable[[float], None] = lambda loss: None,
) -> Run:
    """Trains `model` in place, visiting `batches` in turn; `on_step` is told each loss.

    Args:
        loss_of: input_ids (batch, seq) to the scalar loss of `model`.
        compiled: `loss_of` runs the model through a compiler.
        initial: {parameter name: fp32 weight}, of which the model's are roundings.
        reference: {parameter name: fp64 gradient at step 1}.
    """
    device = next(model.parameters()).device
    run = Run(name, next(model.parameters()).dtype)
    optimizer = _AdamW(model, lr, initial)
    _reset_peak(device)
    for step in range(steps):
        input_ids = batches[step % len(batches)].to(device)
        _wait(device)
        start = time.perf_counter()
        if step == 0:
            with KernelTrace(model, compiled=compiled) as trace:
                loss = loss_of(input_ids)
                loss.backward()
            run.kernels = trace.regions()
            run.gradient_errors = gradient_errors(model, reference)
        else:
            loss = loss_of(input_ids)
            loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        del loss  # it would keep the step's graph alive into the next forward
        _wait(device)
        run.seconds.append(time.perf_counter() - start)
        on_step(run.losses[-1])
    run.peak_bytes = _peak(device)
    return run


def gradient_errors(model: nn.Module, reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """{parameter name: ‖g − g64‖} in fp64; NaN, which no budget admits, for a missing gradient."""
    errors = {}
    for name, parameter in model.named_parameters():
        if name not in reference or parameter.grad is None:
            errors[name] = float("nan")
            continue
        wanted = reference[name].to("cpu")
        errors[name] = float((parameter.grad.detach().cpu().double() - wanted).norm())
    return errors


class _AdamW:
    """torch.optim.AdamW over the parameters, or over fp32 weights behind them if these are 16-bit.

    The fp32 weights start unrounded. Started from rounded ones, all of them would sit in the middle
    of their rounding intervals, and for many steps no update would show.
    """

    def __init__(self, model: nn.Module, lr: float, initial: Mapping[str, torch.Tensor]) -> None:
        self.parameters = list(model.parameters())
        self.weights = [
            p if p.dtype == torch.float32 else initial[name].detach().to(p.device, copy=True)
            for name, p in model.named_parameters()
        ]
        self.optimizer = torch.optim.AdamW(self.weights, lr=lr)

    @torch.no_grad()
    def step(self) -> None:
        for weight, parameter in zip(self.weights, self.parameters, strict=True):
            if weight is not parameter and parameter.grad is not None:
                weight.grad = parameter.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for weight, parameter in zip(self.weights, self.parameters, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)
                parameter.grad = None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
