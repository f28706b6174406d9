"""`codetta env`: says what a bug report needs, fits a terminal, and leaves the GPU alone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from codetta import environment
from codetta._version import __version__
from codetta.cli import app
from codetta.environment import Gpu, as_table, collect

H200 = "NVIDIA H200, 9.0, 143771, 580.95.05"


@pytest.fixture
def fake_tools(monkeypatch):
    """Replace what the shell tools answer: a dict of program name to output, None for missing."""
    answers: dict[str, str | None] = {}
    monkeypatch.setattr(environment, "_output", lambda *command: answers.get(command[0]))
    return answers


def rendered(env: environment.Environment) -> list[str]:
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(as_table(env))
    return captured.get().splitlines()


def test_versions_are_those_of_the_running_process():
    env = collect()
    assert env.codetta == __version__
    assert env.torch == torch.__version__
    assert env.torch_cuda == torch.version.cuda
    assert env.python.startswith(".".join(map(str, sys.version_info[:3])))
    assert env.cores >= 1
    assert env.cpu


def test_packages_are_reported_whether_installed_or_not(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-distribution"))
    env = collect()
    assert env.packages == {"torch": metadata.version("torch"), "no-such-distribution": None}
    assert ["no-such-distribution", "not", "installed"] in [line.split() for line in rendered(env)]


def test_only_our_variables_and_the_gpu_choice_are_reported(monkeypatch):
    monkeypatch.setenv("CODETTA_EXAMPLE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    variables = collect().variables
    assert variables["CODETTA_EXAMPLE"] == "1"
    assert variables["CUDA_VISIBLE_DEVICES"] == "2"
    assert "SOME_TOKEN" not in variables


def test_gpus_come_from_the_driver_tool(fake_tools):
    fake_tools["nvidia-smi"] = f"{H200}\n{H200}\n"
    assert collect().gpus == (Gpu("NVIDIA H200", "9.0", 140.4, "580.95.05"),) * 2


def test_a_gpu_that_shares_the_hosts_memory_is_reported(fake_tools):
    fake_tools["nvidia-smi"] = "NVIDIA GB10, 12.1, [N/A], 580.95.05\n"
    env = collect()
    assert env.gpus == (Gpu("NVIDIA GB10", "12.1", None, "580.95.05"),)
    json.dumps(asdict(env), allow_nan=False)


def test_commit_is_that_of_a_checkout_of_this_package_only(fake_tools):
    checkout = Path(environment.__file__).parents[2]
    fake_tools["git"] = str(checkout)
    assert collect().commit is not None
    fake_tools["git"] = str(checkout.parent)  # installed below somebody else's repository
    assert collect().commit is None
    fake_tools["git"] = None
    assert collect().commit is None


def test_table_fits_80_columns_and_loses_nothing():
    env = replace(
        collect(),
        cpu="Intel(R) Xeon(R) Platinum 8480+ with a long marketing name that goes on and on",
        gpus=(Gpu("NVIDIA H200", "9.0", 140.4, "580.95.05"),) * 8,
        commit="0123456789ab-dirty",
        variables={"CODETTA_CACHE_DIR": "/" + "@" * 200},
    )
    lines = rendered(env)
    assert max(map(len, lines)) <= 80
    assert sum(line.count("@") for line in lines) == 200
    assert sum("NVIDIA H200" in line for line in lines) == 8
    assert sum("580.95.05" in line for line in lines) == 1


def test_json_is_complete():
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert set(printed) == set(environment.Environment.__dataclass_fields__)
    assert printed["backend"] in {"reference", "cuda"}


def test_no_cuda_context_is_created():
    code = (
        "import torch; from codetta.environment import collect; collect(); "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
