"""The vocabulary cut over the processes of a group: each holds some rows of the weight.

Process p has the rows [start_p, start_p + V_p) of the weight, in the order of the ranks; the parts
may differ in size. All have the same hidden states and targets, and all return the same loss. What
is combined, per chunk of tokens, is a few numbers per row:

    m = max_p lse_p        lse = m + log Σ_p e^(lse_p − m)
    logit = Σ_p logit_p    total = Σ_p total_p    top = max_p top_p
    mean_slope = Σ_p e^(lse_p − lse) mean_slope_p; the other slopes are sums

in two all-reduces, a maximum and a sum. logit_p is 0 wherever the target is another process's. The
backward needs no more of the others than lse: dz of the columns that are here, and dW, are local,
and dx = Σ_p dz_p W_p is one all-reduce of (M, D), in fp32. No process sees another's logits.

Collectives must be entered by all processes in the same order. So whatever decides about chunks is
the same everywhere: it is planned for the largest part, not for the one that is here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils.weak import WeakTensorKeyDictionary

from codetta.errors import BadProcessGroup, LossArguments
from codetta.loss.vocabulary import Statistics, Vocabulary


@dataclass(frozen=True, slots=True)
class Shard(Vocabulary):
    """The part of the vocabulary that this process has.

    Attributes:
        group: the processes that have the other parts.
        start: the first token here.
        total: number of tokens of all parts.
        most: number of tokens of the largest part.
    """

    group: Any
    start: int
    total: int
    most: int

    def size(self, rows: int) -> int:
        return self.total

    def largest(self, rows: int) -> int:
        return self.most

    def local(self, target: Tensor, rows: int) -> Tensor:
        return target - self.start

    def combined(self, part: Statistics) -> Statistics:
        if part.lse.numel() == 0:
            return part
        tops = [] if part.top is None else [part.top]
        highest = torch.stack([part.lse, *tops])
        distributed.all_reduce(highest, distributed.ReduceOp.MAX, self.group)
        # An infinite maximum is not subtracted: inf - inf would be NaN where log-sum-exp is inf.
        shift = torch.where(highest[0].isfinite(), highest[0], 0.0)
        share = torch.exp(part.lse - shift)
        sums = {n: x for n, x in part.named.items() if n not in ("lse", "top")}
        if part.mean_slope is not None:
            sums["mean_slope"] = share * part.mean_slope
        added = torch.stack([share, *sums.values()])
        distributed.all_reduce(added, distributed.ReduceOp.SUM, self.group)
        found = dict(zip(sums, added[1:], strict=True))
        if part.mean_slope is not None:
            found["mean_slope"] = found["mean_slope"] / added[0]
        found |= {} if part.top is None else {"top": highest[1]}
        return Statistics(shift + added[0].log(), **found)

    def summed(self, gradient: Tensor) -> Tensor:
        narrow = gradient.dtype.itemsize <= 4
        wide = gradient.to(torch.float32, copy=True) if narrow else gradient
        if wide.numel():
            distributed.all_reduce(wide, distributed.ReduceOp.SUM, self.group)
        return wide.to(gradient.dtype)


def sharded(group: Any, weight: Tensor, *, keep_logits: bool = False) -> Shard:
    """Where ``weight`` lies in the whole one; all processes of the group must call this.

    Sizes are exchanged when a weight is met for the first time, and then remembered with it: later
    calls communicate nothing here. A weight that is a new tensor in every call, a cast or a slice,
    is always met for the first time.

    Raises:
        BadProcessGroup: torch.distributed is not initialized, this process is not in the group, or
            its processes have no parts of one weight.
        LossArguments: the logits are asked for.
    """
    if keep_logits:
        raise LossArguments(
            first="return_logits",
            second="process_group",
            reason="each process has the logits of its own part of the vocabulary only",
            fix="Leave one out; return_lse and return_accuracy are of the whole vocabulary.",
        )
    _check(group)
    known = _KNOWN.setdefault(weight, {})
    if group not in known:
        known[group] = _exchanged(group, weight)
    found: Shard = known[group]
    return found


#: {weight: {group: its part}}; an entry goes with its weight. All processes ask about their parts
#: in the same order, so either all of them find an entry or none does.
_KNOWN: Any = WeakTensorKeyDictionary()


def _check(group: Any) -> None:
    if not (distributed.is_available() and distributed.is_initialized()):
        raise BadProcessGroup(
            reason="torch.distributed is not initialized in this process",
            fix="Call torch.distributed.init_process_group first",
        )
    if not isinstance(group, distributed.ProcessGroup):
        raise BadProcessGroup(
            reason=f"it is {group!r}, not a torch.distributed.ProcessGroup with this process in it",
            fix="Pass torch.distributed.group.WORLD, or what new_group or DeviceMesh.get_group "
            "returned here",
        )


def _exchanged(group: Any, weight: Tensor) -> Shard:
    mine = torch.tensor([*weight.shape, _DTYPES.index(weight.dtype)], device=weight.device)
    gathered = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, mine, group)
    parts = [part.tolist() for part in gathered]
    if any(part[1:] != parts[0][1:] for part in parts):
        raise BadProcessGroup(
            reason="its processes hold no parts of one weight: rank by rank, they have "
            + ", ".join(f"({v}, {d}) {_DTYPES[dtype]}" for v, d, dtype in parts),
            fix="Give all of them the same width and dtype",
        )
    rows, rank = [part[0] for part in parts], distributed.get_rank(group)
    return Shard(group, sum(rows[:rank]), sum(rows), max(rows))


#: Dtypes by the number that stands for them in the exchange.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
