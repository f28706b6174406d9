"""The torch.compile backend: rewrite the graph, then hand the rest on.

On a GPU the rest is compiled by Inductor, in which a region is one operator forward and one
backward. Elsewhere the rewritten graph runs as it is, without code generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from codetta.capture.checkpoint import rewrite_bodies, run_checkpointed
from codetta.capture.pack import Packer
from codetta.capture.packed import Packed
from codetta.capture.rewrite import Rewritten, rewrite
from codetta.capture.withheld import withholding
from codetta.errors import ShardedParameters


# Dynamo compares backends to tell whose compiled code may be used: each Compiler is its own.
@dataclass(eq=False)
class Compiler:
    """A torch.compile backend of one model.

    Attributes:
        rest: what compiles the rewritten graph: 'auto', 'inductor', 'aot_eager' or 'eager'.
        options: for Inductor.
        rewritten: what was done to each graph, in the order in which they came; its length is the
            number of compilations.
        logits: 'keep', or 'none': those of which a graph computes a loss are not returned.
        packer: lays out weights that are read side by side; None leaves them where they are.
        recompute: activations are computed again in the backward.
        loss_memory_limit: bytes that a head with its loss may take; None: 1 GiB.
    """

    rest: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    rewritten: list[Rewritten] = field(default_factory=list)
    logits: str = "keep"
    packer: Packer | None = field(default=None, repr=False)
    recompute: bool = True
    loss_memory_limit: int | None = None

    def __call__(self, module: fx.GraphModule, inputs: list[Any], **ignored: Any) -> Any:
        refuse_sharded(inputs)
        parameters = parameters_of(module, inputs)
        bodies = rewrite_bodies(module, inputs, parameters)
        report = rewrite(module, inputs, parameters, keep_logits=self.logits == "keep")
        for body in bodies:
            report.calls += body.calls
            report.left += body.left
            report.attention += body.attention
            report.heads += body.heads
        for call in report.calls:
            call.recompute = self.recompute
        for head in report.heads:
            head.memory_limit = self.loss_memory_limit
        report.packs = self.packs(module, inputs)
        self.rewritten.append(report)
        made = self.finish(module, inputs)
        return withholding(made, report.dropped) if report.dropped else made

    def packs(self, module: fx.GraphModule, inputs: list[Any]) -> list[Packed]:
        """Lay out weights that the rewritten graph reads side by side; what became of them."""
        if self.packer is None:
            return []
        found, moved = self.packer.pack(module, inputs)
        if moved:
            # Dynamo has traced with other strides and offsets: it must trace this frame again. This
            # is the one restart that it lets a backend ask for.
            from torch._dynamo.exc import TensorifyScalarRestartAnalysis

            raise TensorifyScalarRestartAnalysis(restart_reason="codetta packed weights")
        return found

    def finish(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile the rest."""
        rest = self.rest
        if rest == "auto":
            rest = (
                "inductor" if any(isinstance(x, Tensor) and x.is_cuda for x in inputs) else "eager"
            )
        if rest == "eager":
            run_checkpointed(module)
            forward: Callable[..., Any] = module.forward
            return forward
        if rest == "inductor":
            from torch._inductor.compile_fx import compile_fx

            made: Any = compile_fx(module, inputs, config_patches=dict(self.options))
            return made
        from torch._dynamo.backends.debugging import aot_eager

        traced: Callable[..., Any] = aot_eager(module, inputs)
        return traced


def codetta_backend(module: fx.GraphModule, inputs: list[Any], **given: Any) -> Any:
    """``torch.compile(model, backend="codetta")``: a Compiler for this one graph.

    ``mode`` and ``options`` arrive in ``given``.
    """
    from codetta.capture.compile import inductor_options

    options = inductor_options(given.get("mode"), given.get("options"))
    return Compiler(options=options)(module, inputs)


def parameters_of(module: fx.GraphModule, inputs: list[Any]) -> set[int]:
    """Which placeholders are parameters or buffers of the model."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    found = set()
    for i, (node, x) in enumerate(zip(nodes, inputs, strict=True)):
        named = "_parameters_" in node.name or "_buffers_" in node.name
        if isinstance(x, nn.Parameter) or (named and isinstance(x, Tensor)):
            found.add(i)
    return found


def refuse_sharded(tensors: list[Any]) -> None:
    """Raise if one of them is a DTensor.

    Raises:
        ShardedParameters: it names the count and the placements of the first.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed.tensor import DTensor

    found = [x for x in tensors if isinstance(x, DTensor)]
    if found:
        raise ShardedParameters(count=len(found), placements=found[0].placements)
