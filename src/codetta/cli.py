"""The `codetta` command.

`_COMMANDS` is the table of subcommands. The function behind a name is imported only when that
command runs or prints its own help, so `codetta --help` and `codetta --version` import no torch and
answer at once; its typer annotations define the options, and nothing here repeats them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from codetta._version import __version__
from codetta.errors import CodettaError, MissingPackage


class _Command(NamedTuple):
    target: str  # "module:function", a function with typer annotations
    summary: str  # its line in `codetta --help`
    install: str = "codetta"  # what to install when an import of the target fails


_COMMANDS = {
    "demo": _Command(
        "codetta.demo.command:demo_command",
        "Fine-tune a decoder as it is and through CODA, side by side, and judge.",
        "codetta[demo]",
    ),
    "explain": _Command(
        "codetta.commands.explain:explain_command",
        "Show what CODA makes of a model: kernels, bytes and formulas, before and after.",
        "codetta[hf]",
    ),
    "programs": _Command(
        "codetta.commands.programs:programs_command",
        "List the ready programs, or print one.",
    ),
    "tune": _Command(
        "codetta.commands.tune:tune_command",
        "Search tile configurations on this GPU, and keep the winners.",
    ),
    "new": _Command(
        "codetta.commands.new:new_command",
        "Write a file to start from for a task, or list the tasks.",
        "codetta[author]",
    ),
    "check": _Command(
        "codetta.commands.check:check_command",
        "Check an epilogue without running it: trace, contract, cost, lowering.",
        "codetta[author]",
    ),
    "verify": _Command(
        "codetta.commands.verify:verify_command",
        "Run an epilogue against its task's oracle, and try to break it.",
        "codetta[author]",
    ),
    "bench": _Command(
        "codetta.commands.bench:bench_command",
        "Time an epilogue against the plain product, eager and torch.compile.",
        "codetta[author]",
    ),
    "profile": _Command(
        "codetta.commands.profile:profile_command",
        "Say in words what limits an epilogue's kernel, and what to change.",
        "codetta[author]",
    ),
    "promote": _Command(
        "codetta.commands.promote:promote_command",
        "Record a verified epilogue, so that others find and use it.",
        "codetta[author]",
    ),
    "author": _Command(
        "codetta.commands.author:author_command",
        "Have a language model write an epilogue, with these reports as its feedback.",
        "codetta[author]",
    ),
    "mcp": _Command(
        "codetta.commands.mcp:mcp_command",
        "Serve these tools to coding agents over the Model Context Protocol.",
        "codetta[author]",
    ),
    "env": _Command(
        "codetta.environment:env_command",
        "Print what a bug report needs.",
    ),
}

app = typer.Typer(
    name="codetta",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; an error raised on purpose is a message, not a traceback."""
    try:
        app()
    except CodettaError as error:
        typer.echo(f"codetta: {error}", err=True)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"codetta {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """CODA: Transformer blocks as GEMM-epilogue programs."""


def _load(name: str) -> Any:
    """The command `name`, built from the function that implements it."""
    command = _COMMANDS[name]
    module, _, function = command.target.partition(":")
    try:
        implementation = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "codetta":
            raise
        raise MissingPackage(
            what=f"codetta {name}",
            package=error.name,
            given="not installed",
            fix=f"pip install '{command.install}'",
        ) from error
    single = typer.Typer(add_completion=False)
    single.command(name, context_settings=app.info.context_settings)(implementation)
    return typer.main.get_command(single)


def _stand_in(name: str) -> type[TyperCommand]:
    """A command class that knows its name and summary, and becomes the real command to parse."""

    class StandIn(TyperCommand):
        def make_context(self, *args: Any, **kwargs: Any) -> Any:
            return _load(name).make_context(*args, **kwargs)

    return StandIn


for _name, _command in _COMMANDS.items():
    app.command(_name, cls=_stand_in(_name), help=_command.summary)(lambda: None)
