"""`codetta explain MODEL`: what CODA makes of a model's training step, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from codetta.explanation.configs import SHORTHANDS, explain_model

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def explain_command(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the Hugging Face Hub, a folder or config.json, or one of "
            f"{', '.join(SHORTHANDS)}. Weights are neither read nor downloaded."
        ),
    ],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each row.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(_DTYPES)}.")] = "bf16",
    gpu: Annotated[str, typer.Option(help="GPU of the roofline: h100, h200, ...")] = "h100",
    layers: Annotated[
        int,
        typer.Option(min=0, help="Trace this many and one more, count the rest alike; 0: all."),
    ] = 2,
    logits: Annotated[
        str, typer.Option(help="keep, or none: the loss is computed without storing logits.")
    ] = "keep",
    pack: Annotated[
        bool, typer.Option("--pack", help="Count weights that lie side by side as packed.")
    ] = False,
    details: Annotated[bool, typer.Option("--details", help="Every kernel, as formulas.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show each GEMM with its epilogue, what was fused, what was left and why, before and after."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"give one of {', '.join(_DTYPES)}", param_hint="--dtype")
    if logits not in ("keep", "none"):
        raise typer.BadParameter("give keep or none", param_hint="--logits")
    console = Console(stderr=True)
    with console.status(f"tracing {model}"):
        found = explain_model(
            model, tokens=tokens, batch=batch, dtype=_DTYPES[dtype], layers=layers or None,
            logits=logits, pack=pack,
        ).on(gpu)  # fmt: skip
    if html is not None:
        found.to_html(html)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    elif details:
        typer.echo(found.details())
    else:
        Console().print(found)
    if html is not None:
        console.print(f"Wrote {html}", highlight=False)
