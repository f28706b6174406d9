"""The package as a good citizen: cheap to import, patches nothing, one version, ships its types."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from importlib.resources import files

import pytest
from typer.testing import CliRunner

import codetta
from codetta import cli
from codetta._version import __version__


def run_python(code: str, **environment: str) -> str:
    """Run `code` in a fresh interpreter; its output. Fails with the traceback if it raises."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_version_everywhere():
    assert codetta.__version__ == __version__ == metadata.version("codetta")


def test_types_are_shipped():
    assert files("codetta").joinpath("py.typed").is_file()


def test_public_names_exist():
    assert codetta.__all__
    for name in codetta.__all__:
        assert getattr(codetta, name) is not None


def test_import_touches_no_cuda_context():
    run_python("import torch, codetta; assert not torch.cuda.is_initialized()")


def test_import_needs_no_gpu():
    run_python("import codetta; codetta.gemm", CUDA_VISIBLE_DEVICES="")


WATCH = """
import torch

def snapshot():
    owners = [torch, torch.nn.functional, torch.Tensor, torch.autograd.Function, torch.nn.Module]
    owners += [kind for kind in vars(torch.nn).values() if isinstance(kind, type)]
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()
            if callable(value) or isinstance(value, property)}

def changed(before):
    after = snapshot()
    return [key for key, value in before.items() if after.get(key) is not value]

before = snapshot()
"""


def test_import_and_use_patch_nothing():
    # A call is made as well, so that what is imported late counts.
    run_python(
        WATCH
        + "import codetta; codetta.gemm(torch.ones(2, 3), torch.ones(3, 2))\n"
        + "assert not changed(before), changed(before)"
    )


def test_the_watch_sees_a_patch():
    run_python(
        WATCH
        + "torch.nn.RMSNorm.forward = lambda self, x: x\n"
        + "torch.nn.functional.silu = lambda x: x\n"
        + "assert {('RMSNorm', 'forward'), ('torch.nn.functional', 'silu')} <= set(changed(before))"
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_import_no_torch(arguments):
    loaded = run_python(
        f"import sys; sys.argv = ['codetta', *{arguments!r}]\n"
        "from codetta.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('torch' in sys.modules)"
    )
    assert loaded.splitlines()[-1] == "False"


def test_help_lists_every_command():
    output = CliRunner().invoke(cli.app, ["--help"]).output
    for name in cli._COMMANDS:
        assert name in output


def test_version_option():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"codetta {__version__}\n")


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_every_command_shows_its_own_help(name):
    result = CliRunner().invoke(cli.app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"codetta {name}" in result.output


def test_a_missing_extra_is_a_message_with_the_fix(monkeypatch, capsys):
    command = cli._Command("absent_package.command:run", "", "codetta[demo]")
    monkeypatch.setitem(cli._COMMANDS, "demo", command)
    monkeypatch.setattr(sys, "argv", ["codetta", "demo"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    message = capsys.readouterr().err
    assert "absent_package" in message
    assert "pip install 'codetta[demo]'" in message
    assert "Traceback" not in message
