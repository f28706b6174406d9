"""Which backend runs: use_backend, the environment variable, the device; no silent fallback."""

from __future__ import annotations

import threading

import pytest
import torch

import codetta
from codetta.backends import default_backend
from codetta.backends.calls import ReferenceBackend
from codetta.backends.select import chosen_backend
from codetta.errors import BackendUnavailable, UnknownBackend

A, B = torch.ones(2, 3), torch.ones(3, 4)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("CODETTA_BACKEND", raising=False)


def test_the_choice_is_automatic_by_default():
    assert (chosen_backend(), default_backend()) == ("auto", "reference")


def test_a_block_chooses_and_restores():
    with codetta.use_backend("reference"):
        assert chosen_backend() == "reference"
        with codetta.use_backend("auto"):
            assert chosen_backend() == "auto"
        assert chosen_backend() == "reference"
        codetta.gemm(A, B)
    assert chosen_backend() == "auto"


def test_an_error_in_the_block_restores_too():
    with pytest.raises(KeyError), codetta.use_backend("reference"):
        raise KeyError
    assert chosen_backend() == "auto"


def test_a_call_chooses_for_the_rest_of_its_context():
    def task():
        codetta.use_backend("reference")
        seen.append(chosen_backend())

    seen: list[str] = []
    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
    assert seen == ["reference"]
    assert chosen_backend() == "auto"  # of another thread's choice nothing is seen here


def test_the_variable_chooses_and_a_block_goes_before_it(monkeypatch):
    monkeypatch.setenv("CODETTA_BACKEND", "reference")
    assert chosen_backend() == "reference"
    monkeypatch.setenv("CODETTA_BACKEND", "cuda")
    with pytest.raises(BackendUnavailable, match="'cuda' cannot run here"):
        codetta.gemm(A, B)
    with codetta.use_backend("reference"):
        codetta.gemm(A, B)
    monkeypatch.setenv("CODETTA_BACKEND", "tpu")
    with pytest.raises(UnknownBackend, match=r"'tpu'.*'auto', 'reference', 'cuda'"):
        codetta.gemm(A, B)


def test_what_cannot_run_is_refused_at_once():
    with pytest.raises(UnknownBackend, match="'tpu'"):
        codetta.use_backend("tpu")
    with pytest.raises(BackendUnavailable, match="'cuda' cannot run here"):
        codetta.use_backend("cuda")
    assert chosen_backend() == "auto"


def test_a_backward_runs_on_the_backend_of_its_forward(monkeypatch):
    """Autograd runs the backward of GPU tensors in a thread of its own."""
    seen = []
    original = ReferenceBackend.gemm

    def gemm(self, *arguments):
        seen.append(chosen_backend())
        return original(self, *arguments)

    monkeypatch.setattr(ReferenceBackend, "gemm", gemm)
    with codetta.use_backend("reference"):
        out = codetta.gemm(A, B.clone().requires_grad_()).sum()
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join()
    assert seen == ["reference", "reference"]
