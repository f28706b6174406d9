"""Tensors that outlive the call that made them: constants, tables, numbers.

Some of what a call makes is kept for the next one. Where a caller gives its calls a memory pool of
their own, such a tensor would lie in it and stay. ``torch.compile(mode="reduce-overhead")`` does so
with the first run of each graph, and raises when something in the pool is alive that the graph has
not returned. These pools take the allocations of one thread (see the note in
``torch.cuda.use_mem_pool``), so what is kept is made on another. The thread stays: to start one
takes 0.2 ms, to ask it 0.01.

A CUDA graph records the filling of what is allocated during its capture without running it, so
nothing is kept from one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread

import torch
from torch import Tensor

from codetta.backends.cuda.capture import capturing

_NAME = "codetta-outside-pools"
_THREAD = ThreadPoolExecutor(1, thread_name_prefix=_NAME)  # starts when it is first asked
_KEPT: dict[tuple[object, ...], Tensor] = {}


def kept(device: torch.device, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` makes on ``device``, once per key. It must not be changed.

    Nothing is dropped: CUDA graphs that were captured later read it where it lies.
    """
    key = device, *key
    if key in _KEPT:
        return _KEPT[key]
    if capturing():
        return make()
    made = outside_pools(device, make)
    if (stream := _stream(device)) is not None:  # once; the next to read it may be another stream
        stream.synchronize()
    return _KEPT.setdefault(key, made)  # threads that made it at once take the same


def outside_pools(device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """What ``make`` makes on ``device``, in memory of no private pool, on the current stream.

    It is no inference tensor and has no gradient. ``make`` must not come here again, nor the caller
    be capturing the stream.
    """
    stream = _stream(device)
    if stream is None:
        return _plain(make)
    assert not current_thread().name.startswith(_NAME), "the thread would wait for itself"
    return _THREAD.submit(_on_stream, stream, make).result()


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of this thread on a GPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def _on_stream(stream: torch.cuda.Stream, make: Callable[[], Tensor]) -> Tensor:
    with torch.cuda.stream(stream):  # and its device
        return _plain(make)


def _plain(make: Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return make()
