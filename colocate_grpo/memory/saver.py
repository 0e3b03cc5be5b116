"""Sleep and wake for tensors: their memory really goes, and comes back bit for bit.

Two mechanisms, because each can do what the other cannot. A torch_memory_saver *region* (CUDA) keeps addresses, and
covers everything that is allocated inside it. A *registered* tensor has its storage resized to 0: it works on every
device and can be told apart inside one allocation scope (Megatron's gradient buffers, which DDP() allocates together
with the parameters). On CPU, regions do nothing and everything is registered.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from colocate_grpo.config import Config
from colocate_grpo.errors import ConfigError
from colocate_grpo.memory.ledger import Ledger, MemoryClass

SaverTag = Literal["weights", "optimizer", "gradients"]
TAGS: tuple[SaverTag, ...] = ("weights", "optimizer", "gradients")
CLASS_OF_TAG: dict[SaverTag, MemoryClass] = {
    "weights": "weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
}


@dataclass
class _Moved:
    """A storage whose memory is gone: its size in bytes and, unless it is scratch, where its bytes are."""

    storage: torch.UntypedStorage
    size: int
    backup: torch.Tensor | None

    @classmethod
    def out(cls, tensor: torch.Tensor, backup: torch.Tensor | None) -> _Moved:
        storage = tensor.untyped_storage()
        size = storage.size()
        if backup is not None:
            backup.copy_(_bytes_of(storage))
        _poison(storage)
        if storage.resizable():
            storage.resize_(0)
        return cls(storage, size, backup)

    def back(self) -> None:
        if self.storage.resizable():
            self.storage.resize_(self.size)
        if self.backup is None:
            _bytes_of(self.storage).zero_()
        else:
            _bytes_of(self.storage).copy_(self.backup)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _poison(storage: torch.UntypedStorage) -> None:
    """NaN in every floating type (all bits set): whoever kept another way to this memory must not read old values."""
    _bytes_of(storage).fill_(0xFF)


@dataclass
class _Registered:
    """What is registered under one tag."""

    tensors: Callable[[], Iterable[torch.Tensor]]
    backup: bool


@dataclass
class _TagState:
    paused: bool = False
    in_region: bool = False
    registered: list[_Registered] = field(default_factory=list)
    moved: list[_Moved] = field(default_factory=list)


class Saver:
    """`pause(tag)` frees the memory of a tag, `resume(tag)` restores it; both are idempotent.

    With a ledger, every pause and resume is booked, and a resume that the phase forbids fails before it allocates.
    """

    def __init__(self, device: torch.device, backup_dir: Path | None = None, ledger: Ledger | None = None):
        self.device = device
        self.backup_dir = backup_dir
        self.ledger = ledger
        self._tags: dict[SaverTag, _TagState] = {tag: _TagState() for tag in TAGS}
        if backup_dir is not None:
            backup_dir.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def region(self, tag: SaverTag, backup: bool = True) -> Iterator[None]:
        """CUDA: what is allocated inside belongs to `tag`. `backup=False`: its bytes are undefined after resume."""
        state = self._tags[tag]
        assert not state.paused, f"allocating in the paused region {tag}"
        self._book(tag, True)
        if self.device.type != "cuda":
            yield
            return
        state.in_region = True
        with _memory_saver(self.backup_dir).region(
            tag=tag,
            enable_cpu_backup=backup and self.backup_dir is None,
            enable_disk_backup=backup and self.backup_dir is not None,
        ):
            yield

    def register(self, tag: SaverTag, tensors: Callable[[], Iterable[torch.Tensor]], backup: bool = True) -> None:
        """`tensors()` belong to `tag`; asked at every pause, so that state created later is seen.

        `backup=False`: zeros after resume (gradients). Where a region holds the tag, this does nothing.
        """
        assert not self._tags[tag].paused, f"registering in the paused tag {tag}"
        self._book(tag, True)
        self._tags[tag].registered.append(_Registered(tensors, backup))

    def pause(self, tag: SaverTag) -> None:
        """Free the memory of `tag`. No tensor of it may be touched before `resume`."""
        state = self._tags[tag]
        if state.paused:
            return
        if state.in_region:
            _memory_saver(self.backup_dir).pause(tag)
        else:
            state.moved = list(self._move_out(tag, state.registered))
        state.paused = True
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._book(tag, False)

    def resume(self, tag: SaverTag) -> None:
        """Give `tag` its memory and its bytes back."""
        state = self._tags[tag]
        if not state.paused:
            return
        self._book(tag, True)
        if state.in_region:
            _memory_saver(self.backup_dir).resume(tag)
        for moved in state.moved:
            moved.back()
        state.moved, state.paused = [], False

    def paused(self, tag: SaverTag) -> bool:
        return self._tags[tag].paused

    def resident_bytes(self, tag: SaverTag) -> int:
        """Bytes that the registered tensors of `tag` hold now (0 while it is asleep)."""
        tensors = [t for entry in self._tags[tag].registered for t in entry.tensors()]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().size() for t in tensors}.values())

    def _book(self, tag: SaverTag, resident: bool) -> None:
        if self.ledger:
            self.ledger.note(CLASS_OF_TAG[tag], resident)

    def _move_out(self, tag: SaverTag, registered: Iterable[_Registered]) -> Iterator[_Moved]:
        seen: set[int] = set()
        for entry in registered:
            for tensor in entry.tensors():
                storage = tensor.untyped_storage()
                if storage._cdata in seen or storage.size() == 0:
                    continue
                seen.add(storage._cdata)
                file = f"{tag}_{len(seen)}"
                yield _Moved.out(tensor, self._backup(file, storage.size()) if entry.backup else None)

    def _backup(self, file: str, size: int) -> torch.Tensor:
        if self.backup_dir is None:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        path = self.backup_dir / f"{file}.bin"
        with path.open("w+b") as handle:
            handle.truncate(size)
            return torch.frombuffer(mmap.mmap(handle.fileno(), size), dtype=torch.uint8)


def make_saver(config: Config, device: torch.device, ledger: Ledger | None = None, rank: int = 0) -> Saver:
    """The saver of one rank. A disk backup directory gets one folder a rank."""
    memory = config.memory
    if device.type == "cuda" and memory.expandable_segments:
        raise ConfigError("memory.expandable_segments: true is refused by torch_memory_saver; set it to false")
    backup_dir = memory.backup_dir / f"rank_{rank}" if memory.backup_dir else None
    return Saver(device, backup_dir, ledger)


def _memory_saver(backup_dir: Path | None):
    """torch_memory_saver as a pluggable allocator: needs no LD_PRELOAD, which would reach every child process."""
    from torch_memory_saver import torch_memory_saver

    if torch_memory_saver._impl is None:
        torch_memory_saver.hook_mode = "torch"
        if backup_dir is not None:
            torch_memory_saver.set_disk_backup_dir(str(backup_dir))
    return torch_memory_saver
