"""The torch.compile backend: rewrite the graph, then hand the rest on.

On a GPU the rest is compiled by Inductor, in which a region is one operator forward and one
backward. Elsewhere the rewritten graph runs as it is, without code generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from codetta.capture.rewrite import Rewritten, rewrite


@dataclass
class Compiler:
    """A torch.compile backend of one model.

    Attributes:
        rest: what compiles the rewritten graph: 'auto', 'inductor', 'aot_eager' or 'eager'.
        options: for Inductor.
        rewritten: what was done to each graph, in the order in which they came.
    """

    rest: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    rewritten: list[Rewritten] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: list[Any], **ignored: Any) -> Any:
        self.rewritten.append(rewrite(module, inputs, parameters_of(module, inputs)))
        return self.finish(module, inputs)

    def finish(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile the rest."""
        rest = self.rest
        if rest == "auto":
            rest = (
                "inductor" if any(isinstance(x, Tensor) and x.is_cuda for x in inputs) else "eager"
            )
        if rest == "eager":
            forward: Callable[..., Any] = module.forward
            return forward
        if rest == "inductor":
            from torch._inductor.compile_fx import compile_fx

            made: Any = compile_fx(module, inputs, config_patches=dict(self.options))
            return made
        from torch._dynamo.backends.debugging import aot_eager

        traced: Callable[..., Any] = aot_eager(module, inputs)
        return traced


def parameters_of(module: fx.GraphModule, inputs: list[Any]) -> set[int]:
    """Which placeholders are parameters or buffers of the model."""
    nodes = [n for n in module.graph.nodes if n.op == "placeholder"]
    found = set()
    for i, (node, x) in enumerate(zip(nodes, inputs, strict=True)):
        named = "_parameters_" in node.name or "_buffers_" in node.name
        if isinstance(x, nn.Parameter) or (named and isinstance(x, Tensor)):
            found.add(i)
    return found
