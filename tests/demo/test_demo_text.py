from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from codetta.demo.text import TextUnavailable, batches, standard_library_text


def encode(text: str) -> list[int]:
    return list(text.encode())


def cut(text: str, **options: Any) -> list[torch.Tensor]:
    return batches(
        text, encode, **({"distinct": 3, "batch": 2, "seq_len": 16, "seed": 0} | options)
    )


def test_the_same_text_and_batches_every_time() -> None:
    text = standard_library_text()
    assert text == standard_library_text()
    assert "def " in text and len(text) > 100_000
    for one, other in zip(cut(text), cut(text), strict=True):
        assert one.shape == (2, 16) and one.dtype == torch.int64
        assert torch.equal(one, other)


def test_the_seed_chooses_other_stretches() -> None:
    text = standard_library_text()
    assert not torch.equal(cut(text)[0], cut(text, seed=1)[0])


def test_stretches_do_not_overlap() -> None:
    text = "".join(chr(97 + i % 26) + f"{i:07}" for i in range(100))
    rows = torch.cat(cut(text, distinct=10, batch=5, seq_len=16)).tolist()
    assert len({tuple(row) for row in rows}) == 50
    assert all(bytes(row).decode() in text for row in rows)


def test_a_short_text_is_repeated() -> None:
    assert len(cut("short", distinct=4, batch=3, seq_len=8)) == 4


def test_a_python_without_sources_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(TextUnavailable, match=r"heapq\.py cannot be read.*ships its sources"):
        standard_library_text(tmp_path)
