"""Fixtures of all tests. Its place puts ``tests`` on the path, for ``from helpers import ...``."""

from __future__ import annotations

import pytest
import torch

import codetta
from codetta.errors import BackendUnavailable


@pytest.fixture(params=["reference", "cuda"])
def backend(request):
    """Run the test on each backend that can run here; tensors are made on its device."""
    try:
        chosen = codetta.use_backend(request.param)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    with chosen, torch.device("cuda" if request.param == "cuda" else "cpu"):
        yield request.param
