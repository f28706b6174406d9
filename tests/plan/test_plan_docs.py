"""docs/plans.md shows what its code prints."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "plans.md"


def test_the_listings_on_the_page_are_what_the_code_prints() -> None:
    scope: dict[str, Any] = {}
    printed = ""
    compared = 0
    for kind, block in re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if kind == "text":
            assert block == printed
            compared += 1
            continue
        stream = io.StringIO()
        with redirect_stdout(stream):
            exec(block, scope)
        printed = stream.getvalue()
    assert compared == 5
