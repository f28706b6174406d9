"""Whether PyTorch's dispatcher must see a call.

The library operators show every kernel to whatever watches the dispatcher: traces, fake tensors,
compilers, profilers. A call through them costs some ten microseconds, so where nobody is watching a
backend is called directly.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: A tensor of another class may watch what is done with it.
PLAIN: frozenset[type] = frozenset((Tensor, torch.nn.Parameter))


def is_watched(a: Tensor, b: Tensor) -> bool:
    """Whether a call on these tensors must go through the dispatcher."""
    return a.__class__ not in PLAIN or b.__class__ not in PLAIN or somebody_watches()


def somebody_watches() -> bool:
    """Whether a mode, a transform, a trace, a profiler or autocast is at work."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    )
