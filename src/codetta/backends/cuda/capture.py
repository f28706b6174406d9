"""CUDA graph capture: what must not happen while a stream is captured.

Compiling loads modules and constants are copied from the host; both break a capture or hang it. A
capture also records the filling of fresh memory without running it, so nothing made in one is kept.
"""

from __future__ import annotations

import torch

from codetta.errors import ColdCapture


def capturing() -> bool:
    """Whether the current stream of the current device is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse(program: str) -> None:
    """Called before a kernel is compiled.

    Raises:
        ColdCapture: a stream is being captured.
    """
    if capturing():
        raise ColdCapture(program=program)
