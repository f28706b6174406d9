"""Who is measured in loss.py, each made from the same Head, and the floor.

A contender is a function from a Head to what gives its mean loss with a graph for autograd. What
only one of them imports is imported in its function, so that a missing package costs only that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measure import device
from torch import Tensor
from torch.nn import functional

TOKENS = 16384
#: Rows of logits that the floor makes at a time.
FLOOR_ROWS = 4096
GIB = 2**30

Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """A head: width of the hidden states, size of the vocabulary."""

    name: str
    d: int
    v: int


SHAPES = [Shape(f"d{d}_v{v}", d, v) for d in (2048, 4096) for v in (32000, 128256, 151936)]
TINY = Shape("tiny", 64, 331)


@dataclass(frozen=True)
class Head:
    """Hidden states x (M, D), the head's weight (V, D), targets (M,); one target in 16 is ignored.

    Logits have a standard deviation of 1, so that no row's softmax is all on one column.
    """

    shape: Shape
    x: Tensor
    weight: Tensor
    target: Tensor

    @classmethod
    def random(cls, shape: Shape, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Head:
        torch.manual_seed(0)
        where: dict[str, Any] = {"device": device()}
        x = torch.randn(tokens, shape.d, **where)
        weight = torch.randn(shape.v, shape.d, **where) * shape.d**-0.5
        target = torch.randint(shape.v, (tokens,), **where)
        target[::16] = -100
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        return cls(shape, leaves[0], leaves[1], target)

    def clear(self) -> None:
        self.x.grad = self.weight.grad = None

    def gradient_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.x, self.weight))


# --------------------------------------------------------------------------------- contenders
def eager(head: Head) -> Loss:
    """As Hugging Face models do: logits in the weights' dtype, then in fp32."""

    def loss() -> Tensor:
        logits = functional.linear(head.x, head.weight).float()
        return functional.cross_entropy(logits, head.target)

    return loss


def compiled(head: Head) -> Loss:
    return torch.compile(eager(head), fullgraph=True, dynamic=False)


def liger(head: Head, **options: Any) -> Loss:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(**options)
    return lambda: fused(head.weight, head.x, head.target)


def liger_fp32(head: Head) -> Loss:
    """Liger with the weight's gradient accumulated in fp32 instead of bf16."""
    return liger(head, accum_dtype=torch.float32)


def quack(head: Head, rows: int = 4096) -> Loss:
    """QuACK's, by its own choice of path; its tuner would need minutes."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    _needs_gpu()
    return lambda: chunked_linear_cross_entropy(
        head.x, head.weight, head.target, chunk_size=rows, tuned=False
    )


def quack_larger(head: Head) -> Loss:
    """Chunks that are not as long as d 4096 is wide, which QuACK 0.6.5 confuses."""
    return quack(head, 8192)


def cut_cross_entropy(head: Head) -> Loss:
    """Apple's, with no gradient left out: ``filter_eps=None`` switches its filter off."""
    from cut_cross_entropy import linear_cross_entropy

    _needs_gpu()
    return lambda: linear_cross_entropy(head.x, head.weight, head.target, filter_eps=None)


def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU")


def coda(head: Head, **options: Any) -> Loss:
    """By its own choice of schedule, within 1 GiB beside inputs and gradients."""
    import codetta

    return lambda: codetta.linear_cross_entropy(head.x, head.weight, head.target, **options)


def coda_fp32_sums(head: Head) -> Loss:
    """dW summed in fp32 also where that does not fit into 1 GiB with three products."""
    return coda(head, accum_dtype=torch.float32)


def coda_forward(head: Head) -> Loss:
    """Gradients formed in the forward pass, in up to 4 GiB."""
    return coda(head, schedule="forward", memory_limit=4 * GIB)


def coda_recompute(head: Head) -> Loss:
    """Logits computed again in the backward."""
    return coda(head, schedule="recompute")


CONTENDERS: dict[str, Callable[[Head], Loss]] = {
    "eager": eager,
    "torch.compile": compiled,
    "Liger": liger,
    "Liger, fp32 dW": liger_fp32,
    "QuACK": quack,
    "QuACK, chunks of 8192": quack_larger,
    "cut-cross-entropy, exact": cut_cross_entropy,
    "CODA": coda,
    "CODA, fp32 sums": coda_fp32_sums,
    "CODA, forward, 4 GiB": coda_forward,
    "CODA, recompute": coda_recompute,
}


# -------------------------------------------------------------------------------------- floor
def floor(head: Head, rows: int = FLOOR_ROWS) -> tuple[Callable[[], None], Callable[[], None]]:
    """The plain GEMMs of the head by chunks of rows: forward (1), and forward + backward (3).

    They compute no loss. The third adds every chunk's part to the gradient of the weight.
    """
    x, w = head.x.detach(), head.weight.detach()
    m = len(x)
    z = torch.empty(min(rows, m), len(w), dtype=x.dtype, device=x.device)
    dx, dw = torch.empty_like(x), torch.empty_like(w)

    def run(backward: bool) -> None:
        for start in range(0, m, rows):
            part = x[start : start + rows]
            chunk = z[: len(part)]
            torch.mm(part, w.t(), out=chunk)
            if not backward:
                continue
            torch.mm(chunk, w, out=dx[start : start + rows])
            if start == 0:
                torch.mm(chunk.t(), part, out=dw)
            else:
                torch.addmm(dw, chunk.t(), part, out=dw)

    return lambda: run(False), lambda: run(True)


# ------------------------------------------------------------------------------------- oracle
def oracle(head: Head, rows: int = 1024) -> dict[str, Tensor]:
    """The loss and both gradients in fp64, by chunks of rows."""
    x, w = head.x.detach(), head.weight.detach().double()
    counted = head.target >= 0
    share = 1.0 / counted.sum().double()
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    dx, dw = torch.empty(x.shape, dtype=w.dtype, device=w.device), torch.zeros_like(w)
    for start in range(0, len(x), rows):
        here = slice(start, start + rows)
        part, target, mask = x[here].double(), head.target[here], counted[here]
        z = part @ w.t()
        lse = z.logsumexp(1, keepdim=True)
        column = target.clamp_min(0)[:, None]
        loss += ((lse - z.gather(1, column))[:, 0] * mask).sum() * share
        p = z.sub_(lse).exp_()
        p.scatter_add_(1, column, -torch.ones_like(lse))
        p.mul_((mask * share)[:, None])
        dx[here] = p @ w
        dw.addmm_(p.t(), part)
    return {"loss": loss, "d_x": dx, "d_weight": dw}
