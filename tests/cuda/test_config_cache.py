"""The cache of a user's own measurements: right, or a miss."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from codetta import programs
from codetta.backends.cuda import config_cache
from codetta.backends.cuda.config_cache import canonical, key_of, load, lookup, save
from codetta.backends.cuda.configs import Configuration
from codetta.backends.cuda.lowering import lower
from codetta.language import Program

RESIDUAL = programs.catalog()["residual_ssq"].program
MACHINE = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "quack-kernels": "0.6.5",
           "nvidia-cutlass-dsl": "4.7.0"}  # fmt: skip
CONFIG = Configuration(128, 160, True, 1, 2, max_swizzle=4)


def key(machine=MACHINE, operand="bf16", layout="nt", shape=(16384, 2048, 4096), program=RESIDUAL,
        tile=torch.bfloat16, transposed=False) -> dict:  # fmt: skip
    x = torch.empty(8, 4, dtype=tile)
    operands = [x.t() if transposed else x]
    return key_of(lower(program, operand), *shape, layout, operands, machine)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(config_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(config_cache, "_MEMORY", {})
    config_cache._warn_memory.cache_clear()
    return tmp_path / "cache" / "configurations"


def test_what_was_stored_is_found_again(folder):
    assert load(key()) is None
    file = save(key(), CONFIG, 0.25, "2026-01-02")
    assert file is not None and file.parent == folder
    found = load(key())
    assert found is not None and found.data() == CONFIG.data()
    assert "2026-01-02" in found.provenance
    save(key(), replace(CONFIG, tile_n=128), 0.2, "2026-01-03")
    again = load(key())
    assert again is not None and again.tile_n == 128
    assert [f.name for f in folder.iterdir()] == [file.name]  # replaced, nothing left over


@pytest.mark.parametrize("part", [*MACHINE])
def test_another_machine_or_version_is_a_miss(part):
    save(key(), CONFIG, 0.25, "2026-01-02")
    assert load(key(machine=MACHINE | {part: "another"})) is None


def test_another_kernel_is_a_miss():
    save(key(), CONFIG, 0.25, "2026-01-02")
    others = [
        key(operand="fp16"), key(layout="tn"), key(shape=(4096, 2048, 4096)),
        key(shape=(16384, 4096, 4096)), key(shape=(16384, 2048, 16384)), key(tile=torch.float32),
        key(transposed=True), key(program=programs.catalog()["residual"].program),
    ]  # fmt: skip
    assert [load(k) for k in others] == [None] * len(others)


def test_names_do_not_tell_kernels_apart_and_near_shapes_share_a_bucket():
    save(key(), CONFIG, 0.25, "2026-01-02")
    named = RESIDUAL.text.replace("residual_ssq", "mine").replace("residual", "r")
    assert canonical(Program.parse(named)) == canonical(RESIDUAL)
    assert load(key(program=Program.parse(named))) is not None
    assert load(key(shape=(16384 + 512, 2048, 4096))) is not None


def damage(change):
    def apply(file: Path) -> None:
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    return apply


DAMAGE = {
    "empty": lambda f: f.write_text(""),
    "half": lambda f: f.write_text(f.read_text()[:40]),
    "binary": lambda f: f.write_bytes(bytes(range(256))),
    "a list": lambda f: f.write_text("[]"),
    "a folder": lambda f: (f.unlink(), f.mkdir()),
    "format": damage(lambda d: d.update(format=0)),
    "key": damage(lambda d: d["key"].update(gpu="NVIDIA H100")),
    "no time": damage(lambda d: d.pop("ms")),
    "a time of zero": damage(lambda d: d.update(ms=0.0)),
    "no configuration": damage(lambda d: d.pop("config")),
    "a missing field": damage(lambda d: d["config"].pop("tile_n")),
    "an extra field": damage(lambda d: d["config"].update(more=1)),
    "a wrong type": damage(lambda d: d["config"].update(tile_n="128")),
    "a number for a truth": damage(lambda d: d["config"].update(pingpong=1)),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_a_miss(how):
    file = save(key(), CONFIG, 0.25, "2026-01-02")
    assert file is not None
    DAMAGE[how](file)
    assert load(key()) is None


def test_a_folder_that_cannot_be_written_is_replaced_by_memory_with_one_warning(
    tmp_path, monkeypatch
):
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file where a folder should be; root may write anywhere else
    monkeypatch.setenv(config_cache.VARIABLE, str(blocked))
    with pytest.warns(UserWarning, match="CODETTA_CACHE_DIR"):
        assert save(key(), CONFIG, 0.25, "2026-01-02") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert save(key(layout="nn"), CONFIG, 0.25, "2026-01-02") is None
    found = load(key())
    assert found is not None and found.data() == CONFIG.data()
    assert load(key(layout="tn")) is None


def test_no_home_is_no_folder(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv(config_cache.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert config_cache.folder() is None
    with pytest.warns(UserWarning, match="no home directory"):
        assert save(key(), CONFIG, 0.25, "2026-01-02") is None
    assert load(key()) is not None


def test_without_a_gpu_nothing_is_looked_up():
    assert lookup(lower(RESIDUAL, "bf16"), 1, 2, 3, "nt", (), None) is None


def write_many(folder: str, tile_n: int) -> None:
    os.environ[config_cache.VARIABLE] = folder
    for _ in range(40):
        save(key(), Configuration(128, tile_n, True), float(tile_n), "2026-01-02")
        found = load(key())
        assert found is not None and found.tile_n % 16 == 0  # somebody's, and whole


@pytest.mark.slow
def test_eight_processes_may_write_at_once(folder):
    context = multiprocessing.get_context("spawn")
    tiles = [64 + 16 * i for i in range(8)]
    workers = [
        context.Process(target=write_many, args=(str(folder.parent), tile)) for tile in tiles
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [w.exitcode for w in workers] == [0] * 8
    found = load(key())
    assert found is not None and found.tile_n in tiles
    assert len(list(folder.iterdir())) == 1
