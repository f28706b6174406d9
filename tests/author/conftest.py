"""``warm_processes``: candidates and foreign kernels run in forks of one warm process."""

from __future__ import annotations

import pytest
from warm import Warm, patched


@pytest.fixture(scope="session")
def warm_process():
    started = Warm()
    yield started
    started.close()


@pytest.fixture
def warm_processes(warm_process):
    with patched(warm_process):
        yield
