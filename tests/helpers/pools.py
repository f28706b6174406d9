"""Memory pools of a thread, as CUDA-graph trees have them, told apart by who made a tensor."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import Tensor

from codetta import kept


class Stream:
    """What kept.py asks of a stream."""

    def __init__(self) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


class Outside:
    """What was made outside of the pools: the tensors, and the streams that were used there."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.stream, self.entered = Stream(), 0


@contextmanager
def like_a_gpu() -> Iterator[Outside]:
    """kept.py takes the CPU for a GPU, and has made nothing yet."""
    seen, original = Outside(), kept._plain

    def plain(make: Callable[[], Tensor]) -> Tensor:
        assert current_thread() is not main_thread()
        seen.made.append(original(make))
        return seen.made[-1]

    def entered(stream: Any) -> Any:
        assert stream is seen.stream
        seen.entered += 1
        return nullcontext()

    def stream_of(device: torch.device) -> Stream:
        assert current_thread() is main_thread(), "streams are current in a thread: the caller's"
        return seen.stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "_stream", stream_of)
        patch.setattr(kept, "_plain", plain)
        patch.setattr(kept, "_KEPT", {})
        patch.setattr(torch.cuda, "stream", entered)
        yield seen


def left_by(run: Callable[[], object], device: str = "cpu") -> list[Tensor]:
    """Tensors that ``run`` leaves alive on ``device`` and that kept.py has not made, as
    ``check_memory_pool`` of CUDA-graph trees would find them."""
    before = {x.untyped_storage()._cdata: x for x in _alive(device)}  # alive, so that ids stay
    with like_a_gpu() as outside:
        run()
        known = before.keys() | {x.untyped_storage()._cdata for x in outside.made}
        return [x for x in _alive(device) if x.untyped_storage()._cdata not in known]


def _alive(device: str) -> list[Tensor]:
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    dense = [x for x in found if x.layout is torch.strided and x.device.type == device]
    return [x for x in dense if x.numel()]
