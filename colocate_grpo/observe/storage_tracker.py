"""Bytes of the tensor storages that are alive, measured on any device (CPU and meta included).

A CPU has no allocator statistics. Every operator passes through a dispatch mode here; a storage is counted when
an operator returns it and given back when its last owner, autograd included, lets go of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageTracker(TorchDispatchMode):
    """Counts the storages born inside a `with` block; storages that were there before are not counted.

    `current_bytes` is what is alive now, `peak_bytes` the most since the last `reset_peak`. Temporary buffers
    inside one operator are not seen. Use it on the thread that runs backward (CPU: the calling thread).
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    def reset_peak(self) -> None:
        self.peak_bytes = self.current_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._watch(storage, count=False)
        result = func(*args, **kwargs)
        for storage in _storages(result):
            self._watch(storage, count=True)
            self._resized(storage)
        return result

    def _watch(self, storage: torch.UntypedStorage, count: bool) -> None:
        key = id(storage)
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key))
        if count:
            self._sizes[key] = 0

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._sizes:
            return
        self.current_bytes += storage.nbytes() - self._sizes[key]
        self._sizes[key] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _forget(self, key: int) -> None:
        del self._known[key]
        self.current_bytes -= self._sizes.pop(key, 0)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    leaves: Iterable[Any] = tree_leaves(tree)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()
