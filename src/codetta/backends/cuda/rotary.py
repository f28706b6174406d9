"""The rotary table as the mainloop reads it, kept between calls.

The kernel loads cos and sin by turns from a matrix with one row per row of the GEMM. Making it is a
gather and a copy, and every layer of a model asks for the same one: same table, same positions. So
the last few are kept, for as long as table and positions live and stay unchanged.

An entry is known by the storages of both, how the tensors lie in them, and their version counters,
which every in-place change through PyTorch advances. (A change that PyTorch does not see, through
``x.data``, by a kernel of one's own or by the replay of a CUDA graph, is not seen here either: such
a caller increments the version with ``torch.autograd.graph.increment_version``.) While an entry
holds a weak reference to a storage no other storage gets its identity, so memory that is freed and
reused is never taken for the old one. Entries belong to a stream, and none is used or made while a
stream is captured: the graph must gather from whatever its inputs hold when it is replayed.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from codetta.backends.cuda.capture import capturing
from codetta.kept import outside_pools

_KEPT = 8
_Key = tuple[Any, ...]
_LOCK = Lock()  # backward passes run in threads of their own
_TURNS: OrderedDict[_Key, tuple[StorageWeakRef, StorageWeakRef, Tensor]] = OrderedDict()


def rotary(table: Tensor, positions: Tensor, head_dim: int, columns: int) -> Tensor:
    """cos and sin by turns, (M, columns), from the table [cos | sin] (P, rotary_dim).

    Heads follow each other; the columns behind rotary_dim in a head are zero and not used. The
    result is shared: it must not be changed.
    """
    if table.is_inference() or positions.is_inference() or capturing():  # no version; see above
        return gathered(table, positions, head_dim, columns)
    stream = torch._C._cuda_getCurrentRawStream(table.get_device()) if table.is_cuda else 0
    key = (*_identity(table), *_identity(positions), head_dim, columns, stream)
    with _LOCK:
        found = _TURNS.get(key)
        if found is not None:
            _TURNS.move_to_end(key)
            return found[2]
    made = outside_pools(table.device, lambda: gathered(table, positions, head_dim, columns))
    with _LOCK:
        _forget()
        _TURNS[key] = _weak(table), _weak(positions), made
    return made


def gathered(table: Tensor, positions: Tensor, head_dim: int, columns: int) -> Tensor:
    """The same, made anew."""
    m, dim = positions.shape[0], table.shape[1]
    rows = table.index_select(0, positions.reshape(-1)).reshape(m, 1, 2, dim // 2)
    turns = rows.transpose(2, 3).expand(-1, columns // head_dim, -1, -1)
    if dim == head_dim:
        return turns.reshape(m, columns)
    made = table.new_zeros(m, columns // head_dim, head_dim)
    made[:, :, :dim].unflatten(2, (dim // 2, 2)).copy_(turns)
    return made.reshape(m, columns)


def _identity(x: Tensor) -> _Key:
    storage = x.untyped_storage()
    where = storage._cdata, storage.data_ptr(), x.storage_offset()
    return *where, x.shape, x.stride(), x.dtype, x._version


def _weak(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())


def _forget() -> None:
    """Drop what nobody can ask for any more, and the oldest beyond the limit."""
    for key in [k for k, (a, b, _) in _TURNS.items() if a.expired() or b.expired()]:
        del _TURNS[key]
    while len(_TURNS) >= _KEPT:
        _TURNS.popitem(last=False)
