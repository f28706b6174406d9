"""`codetta demo`: the options, and the order in which things happen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from codetta.demo import figure, judge, models, record, report, stock, text
from codetta.demo.compiled import CompiledModel
from codetta.demo.kernels import LAYERS, PROGRAMS, CostRow
from codetta.demo.train import Run, fine_tune
from codetta.errors import CodettaError

_DISTINCT_BATCHES = 4  # visited in turn, so that the loss visibly falls within 20 steps
# Sequences and tokens of a real training step, for which bytes are computed as well: with the
# demo's few tokens most of the traffic is weights, and a real step spreads these over many more.
_REAL_STEP = (8, 2048)


class Dtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"

    @property
    def torch(self) -> torch.dtype:
        return torch.float32 if self is Dtype.fp32 else torch.bfloat16


class Form(str, Enum):
    """How the model goes through CODA."""

    compile = "compile"
    decoder = "decoder"


class DemoDevice(CodettaError, ValueError):
    """The device asked for is not there."""

    template = "--device {given} cannot be used: {reason}. Use --device cpu, or leave it out."


@dataclass(frozen=True)
class Settings:
    """The options after defaults were filled in; one run of the demo is a function of these."""

    steps: int
    batch: int
    seq_len: int
    lr: float
    dtype: Dtype
    random: bool
    seed: int
    device: torch.device
    form: Form

    def as_dict(self) -> dict[str, Any]:
        named = {"dtype": self.dtype.value, "device": str(self.device), "form": self.form.value}
        return asdict(self) | named


def demo_command(
    steps: Annotated[int, typer.Option(min=1, help="Fine-tuning steps of each run.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 1,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 128,
    lr: Annotated[
        float | None,
        typer.Option(help="AdamW's learning rate.", show_default="1e-5, 1e-3 with --random"),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="bf16 also runs stock in fp32, as the yardstick.")
    ] = Dtype.fp32,
    random: Annotated[
        bool, typer.Option("--random", help="A small random Llama: no download, seconds.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the text, and of --random's weights.")] = 0,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, ...; auto takes a GPU if there is one.")
    ] = "auto",
    form: Annotated[
        Form, typer.Option(help="CODA by codetta.compile, or by the explicit codetta.nn.Decoder.")
    ] = Form.compile,
    out: Annotated[Path, typer.Option(help="Where loss.png and demo.json go.")] = Path(
        "codetta-demo"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print demo.json and nothing else.")] = False,
) -> None:
    """Fine-tune a real model as it is and through CODA, side by side, and judge.

    SmolLM2-135M-Instruct is trained on source files of Python's standard
    library, twice from the same weights: by Hugging Face transformers as it is,
    and through codetta.compile. Losses, gradients (against a run in fp64)
    and kernels must agree within stated limits; exit status 1 if one does not.
    """
    settings = Settings(
        steps=steps,
        batch=batch,
        seq_len=seq_len,
        lr=lr if lr is not None else (1e-3 if random else 1e-5),
        dtype=dtype,
        random=random,
        seed=seed,
        device=_device(device),
        form=form,
    )
    console = Console(width=report.WIDTH, highlight=False, quiet=json)
    result = run_demo(settings, _Screen(console, silent=quiet or json))
    out.mkdir(parents=True, exist_ok=True)
    record.save_json(out / "demo.json", result)
    figure.save_figure(
        out / "loss.png", result.runs, result.losses, _title(result), result.deviation
    )
    if json:
        typer.echo(record.as_json(result))
    elif quiet:
        report.print_verdict(console, result)
    else:
        report.print_result(console, result)
        console.print(f"\nSaved {out / 'loss.png'} and {out / 'demo.json'}")
    if not result.passed:
        raise typer.Exit(1)


def run_demo(settings: Settings, screen: _Screen) -> record.Result:
    """Everything but the writing: all runs, all tables, all criteria."""
    dtype = settings.dtype.torch
    source = (
        models.small_random(settings.seed) if settings.random else models.pretrained(screen.say)
    )
    source_text = text.standard_library_text()
    batches = text.batches(
        source_text,
        source.encode,
        distinct=min(settings.steps, _DISTINCT_BATCHES),
        batch=settings.batch,
        seq_len=settings.seq_len,
        seed=settings.seed,
    )
    screen.say(f"{source.name}, {source.parameters / 1e6:.1f} M parameters: one step in fp64")
    rounded = models.copy_of(source.model, dtype, torch.device("cpu"))
    reference = models.fp64_gradients(rounded, batches[0], settings.device)

    yardstick = [] if dtype == torch.float32 else [_Side("stock fp32", torch.float32)]
    sides = [*yardstick, _Side("stock", dtype), _Side("CODA", dtype, coda=True)]
    runs, kernels = [], []
    for side in sides:
        run, table_at = _run_side(side, settings, source, batches, reference, screen)
        runs.append(run)
        kernels.append(
            record.KernelSide(
                side.name,
                watched=run.kernels,
                computed=table_at(settings.batch, settings.seq_len),
                real_step=table_at(*_REAL_STEP),
                real_step_tokens=_REAL_STEP,
                region=PROGRAMS if side.coda and settings.form is Form.compile else LAYERS,
            )
        )
    return _judged(settings, source, source_text, runs, kernels[-2:], reference)


@dataclass(frozen=True)
class _Side:
    name: str
    dtype: torch.dtype
    coda: bool = False


def _run_side(
    side: _Side,
    settings: Settings,
    source: models.Source,
    batches: Sequence[torch.Tensor],
    reference: Mapping[str, torch.Tensor],
    screen: _Screen,
) -> tuple[Run, Callable[[int, int], Sequence[CostRow]]]:
    """Trains one side from the source's weights; also returns (batch, seq) -> its cost table."""
    model = models.copy_of(source.model, side.dtype, settings.device)
    compiled = side.coda and settings.form is Form.compile
    loss_of: models.Loss
    table_at: Callable[[int, int], Sequence[CostRow]]
    if compiled:
        whole = CompiledModel(model)
        loss_of, table_at = whole.loss, _compiled_table(whole, side.dtype, settings)
    elif side.coda:
        model = models.through_coda(model)
        loss_of, table_at = models.coda_loss(model), models.coda_table(model, side.dtype)
    else:
        loss_of, table_at = models.hf_loss(model), _stock_table(model.config, side.dtype, settings)
    torch.manual_seed(settings.seed)
    with screen.bar(side.name, settings.steps) as on_step:
        run = fine_tune(
            side.name,
            model,
            loss_of,
            batches,
            initial=dict(source.model.named_parameters()),
            steps=settings.steps,
            lr=settings.lr,
            reference=reference,
            compiled=compiled,
            on_step=on_step,
        )
    return run, table_at


def _compiled_table(
    whole: CompiledModel, dtype: torch.dtype, settings: Settings
) -> Callable[[int, int], Sequence[CostRow]]:
    return lambda batch, seq: whole.cost_table(
        tokens=batch * seq, positions=seq, dtype=dtype, device=settings.device
    )


def _stock_table(
    config: Any, dtype: torch.dtype, settings: Settings
) -> Callable[[int, int], Sequence[CostRow]]:
    here = stock.LayerShape.of(config, settings.batch, settings.seq_len)
    layout = stock.attention_layout(here, dtype, settings.device)
    return lambda batch, seq: stock.cost_table(
        stock.LayerShape.of(config, batch, seq), dtype, layout
    )


def _judged(
    settings: Settings,
    source: models.Source,
    source_text: str,
    runs: list[Run],
    kernels: list[record.KernelSide],
    reference: Mapping[str, torch.Tensor],
) -> record.Result:
    from codetta import environment

    *yardstick, plain, coda = runs
    if yardstick:
        losses = judge.losses_16bit(yardstick[0].losses, plain.losses, coda.losses)
        deviation = "|CODA − stock fp32|"
    else:
        losses = judge.losses_fp32(plain.losses, coda.losses)
        deviation = "|CODA − stock| / stock"
    norms = {name: float(gradient.norm()) for name, gradient in reference.items()}
    gradients = judge.gradients(norms, plain.gradient_errors, coda.gradient_errors, plain.dtype)
    return record.Result(
        settings=settings.as_dict(),
        model={
            "name": source.name,
            "parameters": source.parameters,
            "layers": source.model.config.num_hidden_layers,
            "text_sha256": hashlib.sha256(source_text.encode()).hexdigest(),
        },
        environment=asdict(environment.collect()),
        runs=runs,
        losses=losses,
        deviation=deviation,
        gradients=gradients,
        kernels=kernels,
        criteria=[
            judge.judge_losses(losses, deviation),
            judge.judge_gradients(gradients),
            *(judge.judge_kernels(side.name, side.inside, side.computed) for side in kernels),
        ],
    )


class _Screen:
    """What is shown while the demo works."""

    def __init__(self, console: Console, silent: bool) -> None:
        self.console, self.silent = console, silent

    def say(self, message: str) -> None:
        if not self.silent:
            self.console.print(f"[dim]{message}[/]")

    @contextmanager
    def bar(self, name: str, steps: int) -> Iterator[Callable[[float], None]]:
        """A progress bar; the function it gives takes the loss of each finished step."""
        columns = (
            TextColumn(f"{name:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Progress(*columns, console=self.console, disable=self.silent) as progress:
            task = progress.add_task(name, total=steps, loss="-")
            yield lambda loss: progress.update(task, advance=1, loss=f"{loss:.4f}")


def _device(given: str) -> torch.device:
    if given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DemoDevice(given=given, reason=reason) from error
    return device


def _title(result: record.Result) -> str:
    settings = result.settings
    return (
        f"{result.model['name']}, {settings['dtype']}, "
        f"{settings['batch']} × {settings['seq_len']} tokens per step, as it is and through CODA"
    )
