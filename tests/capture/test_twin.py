"""Every model's rewritten graph is the same mathematics: equal in fp64 to 1e-12."""

from __future__ import annotations

import capture_models
import pytest
import twin


@pytest.mark.parametrize("name", capture_models.names())
def test_the_fp64_twin_is_equal(name):
    regions = 0
    for module, inputs in twin.captured(name).graphs:
        found = twin.twin(module, inputs)
        found.check(1e-12)
        regions += len(found.report.calls)
    assert regions >= 3 or name in capture_models.BREAKS
    assert regions
