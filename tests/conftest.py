"""Fixtures of all tests. Its place puts ``tests`` on the path, for ``from helpers import ...``.

Test ids are shared by the backends:

``reference``   plain PyTorch on the CPU, everywhere
``emulated``    the fused backend without a GPU: programs are lowered, described and finished as on
                one, and their generated epilogues run on CPU tensors (helpers/emulation.py)
``cuda``        the fused backend on a Hopper GPU, skipped elsewhere; tensors are made on the GPU

``backend`` has all three and is for 16-bit operands; ids whose ``dtype`` is fp32 or fp64 have no
``emulated``, since the fused backend hands these to the reference. ``wide_backend`` has
``reference`` and ``cuda``, for tests in fp32 or fp64: there ``cuda`` is the reference on the GPU.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.fused import running

from codetta.errors import BackendUnavailable

_WIDE = (torch.float32, torch.float64)
_EXPECTED = ".*run on the reference backend"  # of fp32 and fp64, said once a process


@pytest.fixture(params=["reference", "emulated", "cuda"])
def backend(request):
    """Run the test on each backend that can run here; tensors are made on its device."""
    yield from _on_backend(request)


@pytest.fixture(params=["reference", "cuda"])
def wide_backend(request):
    """The same for tests in fp32 or fp64."""
    yield from _on_backend(request)


@pytest.fixture(params=["emulated", "cuda"])
def fused(request):
    """The fused backend alone, for what the reference does not promise."""
    yield from _on_backend(request)


@pytest.fixture(params=["cuda"])
def gpu(request):
    """The fused backend on a GPU, for what only a device has: streams, graphs, compiled kernels."""
    yield from _on_backend(request)


def _on_backend(request):
    warnings.filterwarnings("ignore", _EXPECTED, UserWarning)  # pytest restores them after a test
    try:
        with running(request.param):
            yield request.param
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Drop ids that would run the reference twice; keep on one worker what shares kernels.

    A process compiles its kernels for itself, so ``pytest -n 12 --dist loadgroup -k cuda`` gives
    all tests of a program, or of a family of decoders, to one of them.
    """
    kept, dropped = [], []
    for item in items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        on = {given.get(fixture) for fixture in ("backend", "fused", "gpu")}
        needless = "emulated" in on and given.get("dtype") in _WIDE
        (dropped if needless else kept).append(item)
        if on & {"emulated", "cuda"} and config.pluginmanager.hasplugin("xdist"):
            shared = given.get("name") or given.get("family") or item.path.stem
            item.add_marker(pytest.mark.xdist_group(str(shared)))
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept
