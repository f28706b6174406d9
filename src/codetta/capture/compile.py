"""``codetta.compile``: torch.compile with a rewriter of the model's own in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from codetta.capture.backend import Compiler, refuse_sharded
from codetta.capture.pack import Packer
from codetta.errors import UnknownOption

_BACKENDS = ("auto", "inductor", "aot_eager", "eager")


def compile(
    model: Callable[..., Any] | None = None,
    *,
    backend: str = "auto",
    logits: str = "keep",
    pack: bool = False,
    recompute: bool = True,
    loss_memory_limit: int | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **torch_compile_options: Any,
) -> Any:
    """``torch.compile`` with the model's GEMMs rewritten as GEMMs with epilogues.

    What torch.compile would hand to its backend goes through the rewriter first. Stretches of the
    graph made of products with parameters, norms, activations, rotations and residuals become
    Plans, each one call forward and one backward; attention, the embedding, the loss and whatever
    is not proved equal are left as they are, with the reason. Nothing outside the returned object
    changes: the model can still be called uncompiled, and other models are not affected.

    Compilations: one per graph that torch.compile would compile: one for a whole training step's
    forward, one more for evaluation under no_grad, at most one more when a size first changes.
    The backward is made with the forward. ``pack=True`` traces a graph once more in which it has
    moved weights, and compiles it once.

    Args:
        model: a module or a function. None: returns a decorator.
        backend: what compiles the rewritten graph. 'auto' is 'inductor' for models on a GPU and
            'eager' elsewhere. 'eager' and 'aot_eager' generate no code.
        logits: 'keep' or 'none'. Where a graph computes a cross-entropy of logits and returns no
            logits, they are never stored, with either. Where it returns them, too, 'keep' stores
            them as the model does; 'none' computes the loss without them, and what is returned in
            their place raises LogitsNotKept on use. Without labels logits are returned as usual.
        pack: True lays weights that one GEMM reads side by side (gate and up; q, k and v) side by
            side in memory, once, when the graph is first compiled, so that they are not packed
            anew in each backward. It changes where parameters of ``model`` lie, and their strides
            where rows alternate; not the Parameter objects, their values or gradients. What was
            packed, and what not and why, is in ``rewritten[i].packs``.
        recompute: True computes activations (SwiGLU's output) again in the backward, where an
            epilogue loads what they are made of. False keeps those that a product of the forward
            reads, in the memory that the forward wrote them to: faster by what storing them a
            second time costs, for their size in memory per layer.
        loss_memory_limit: bytes that a loss without stored logits may take beside its inputs and
            gradients, None for 1 GiB; as ``memory_limit`` of :func:`codetta.linear_cross_entropy`.
            With more, fewer logits are computed twice: from 2 V D bytes and what a chunk takes on,
            none (docs/loss.md).
        mode: as in torch.compile; its options for Inductor are combined with ``options``.
        options: for Inductor; they win over those of ``mode``.
        torch_compile_options: ``fullgraph``, ``dynamic``, ``disable``: passed on.

    Returns:
        What torch.compile returns. The backend object is its ``codetta_compiler``, whose
        ``rewritten`` says what was done to each graph.

    Raises:
        UnknownOption: for another value of ``backend`` or ``logits``, or a limit that is no
            positive number of bytes.
        ShardedParameters: the model has DTensor parameters.
        PackNeedsModule: ``pack=True`` for what is neither a module nor a method of one.
        PackSharded: ``pack=True`` for a model with sharded parameters.
    """
    if model is None:
        return lambda later: compile(
            later, backend=backend, logits=logits, pack=pack, mode=mode, options=options,
            recompute=recompute, loss_memory_limit=loss_memory_limit, **torch_compile_options,
        )  # fmt: skip
    _check("backend", backend, _BACKENDS)
    _check("logits", logits, ("keep", "none"))
    if loss_memory_limit is not None and not (
        type(loss_memory_limit) is int and loss_memory_limit > 0
    ):
        raise UnknownOption(
            option="loss_memory_limit", given=loss_memory_limit,
            allowed="a positive number of bytes, None for 1 GiB",
        )  # fmt: skip
    packer = Packer(model) if pack else None
    if isinstance(model, nn.Module):
        refuse_sharded(list(model.parameters()))
    compiler = Compiler(
        backend, inductor_options(mode, options), logits=logits, packer=packer,
        recompute=recompute, loss_memory_limit=loss_memory_limit,
    )  # fmt: skip
    compiled: Any = torch.compile(model, backend=compiler, **torch_compile_options)
    # A plain attribute: an OptimizedModule would hand it on to the model, which must not change.
    object.__setattr__(compiled, "codetta_compiler", compiler)
    return compiled


def inductor_options(
    mode: str | None = None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Options of a mode, overridden by ``options``."""
    found: dict[str, Any] = {}
    if mode not in (None, "default"):
        from torch._inductor import list_mode_options

        modes = list_mode_options()
        _check("mode", mode, tuple(modes))
        found |= modes[mode]
    return found | dict(options or {})


def _check(option: str, given: Any, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise UnknownOption(option=option, given=given, allowed=", ".join(map(repr, allowed)))
