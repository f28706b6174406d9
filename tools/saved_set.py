"""What one decoder layer saves for its backward, in bytes per token: `python tools/saved_set.py`.

Three numbers for a bf16 layer:

- computed: from the Plan's split into forward and backward, plus attention's own (its output is an
  input of the Plan and counted there, so its log-sum-exp remains);
- measured: distinct storages that autograd saves in a running Decoder;
- torch.compile: the same, for transformers' own layer through the default partitioner
  (min_cut_rematerialization_partition) with Inductor's decompositions.

Measurements are differences between two lengths (and, for the Decoder, two numbers of layers), so
whatever does not grow with them drops out. Weights and rotary tables, which all layers share, are
not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from codetta.language.types import Kind
from codetta.nn import Decoder, Spec, segment
from codetta.nn.block import MIDDLE, compiled
from codetta.nn.decoder import trained

DTYPE, SHORT, LONG = torch.bfloat16, 64, 128


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes per token that a decoder layer saves")
    for name, default in (("hidden", 2048), ("mlp", 8192), ("heads", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    model = build(options.hidden, options.mlp, options.heads)
    parts = computed(Decoder.from_hf(model).spec)
    print(f"d {options.hidden}, f {options.mlp}, {options.heads} heads, bf16: bytes per token")
    for name, size in parts.items():
        print(f"  {name:<32}{size:>8,}")
    print(f"computed from the Plan            {sum(parts.values()):>8,}")
    print(f"measured in a running Decoder     {measured(model):>8,.0f}")
    print(f"torch.compile's partitioner       {partitioner(model):>8,.0f}")


def build(hidden: int, mlp: int, heads: int) -> Any:
    """A random Llama of two layers."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=8,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for p in model.parameters():
        p.data = p.data.to(DTYPE)
    return model.train()


def computed(spec: Spec) -> dict[str, int]:
    """Bytes per token of each value that the middle segment's backward reads, by name."""
    plan = segment(replace(spec, part=MIDDLE))
    parts = compiled(plan, trained(plan), tuple(o.name for o in plan.outputs))
    assert parts.backward is not None
    found = {}
    for i in parts.backward.plan.inputs:
        if i.name.startswith("d_") or i.type.kind not in (Kind.TILE, Kind.COL):
            continue
        if i.type.kind is Kind.COL:
            found[f"{i.name}, fp32"] = torch.float32.itemsize
        elif i.type.rows == "M":
            found[i.name] = int(i.type.cols) * DTYPE.itemsize
    return found | {"attention's log-sum-exp, fp32": spec.heads * torch.float32.itemsize}


def measured(model: Any) -> float:
    """Of one layer of a Decoder: what two layers save beyond one."""
    decoder = Decoder.from_hf(model)

    def saved(layers: int, tokens: int) -> int:
        model.config.num_hidden_layers = layers
        ids = torch.zeros(1, tokens, dtype=torch.long)
        return bytes_saved(lambda: decoder(ids), decoder.parameters())

    two, one = ((saved(n, LONG) - saved(n, SHORT)) / (LONG - SHORT) for n in (2, 1))
    return two - one


def partitioner(model: Any) -> float:
    """Of transformers' layer through torch.compile's partitioner, without code generation."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    layer = model.model.layers[0]
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )

    def saved(tokens: int) -> int:
        x = torch.randn(1, tokens, model.config.hidden_size, dtype=DTYPE, requires_grad=True)
        rope = model.model.rotary_emb(x, torch.arange(tokens)[None])
        run = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
        shared = (*layer.parameters(), *rope)
        return bytes_saved(lambda: run(x, position_embeddings=rope, attention_mask=None), shared)

    return (saved(LONG) - saved(SHORT)) / (LONG - SHORT)


def bytes_saved(call: Callable[[], Any], shared: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that autograd saves in ``call``, those of ``shared`` aside."""
    storages: dict[int, Any] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        call()
    for x in shared:
        storages.pop(x.untyped_storage().data_ptr(), None)
    return sum(s.nbytes() for s in storages.values())


if __name__ == "__main__":
    main()
