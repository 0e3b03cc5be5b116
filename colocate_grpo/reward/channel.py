"""Messages between the pool and its workers: JSON behind a 4-byte length. Nothing is ever unpickled."""

from __future__ import annotations

import json
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_REPLY = 1 << 20


def encode(message: Any) -> bytes:
    data = json.dumps(message, default=str, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


class Reader:
    """Cuts a byte stream into messages."""

    def __init__(self, limit: int | None = None) -> None:
        self.buffer = bytearray()
        self.limit = limit

    def feed(self, data: bytes) -> list[Any]:
        """Messages that are complete with these bytes; ValueError on one that is over the limit or no JSON."""
        self.buffer += data
        messages = []
        while len(self.buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self.buffer)
            if self.limit is not None and size > self.limit:
                raise ValueError(f"message of {size} bytes")
            if len(self.buffer) < _LENGTH.size + size:
                break
            messages.append(json.loads(self.buffer[_LENGTH.size : _LENGTH.size + size]))
            del self.buffer[: _LENGTH.size + size]
        return messages
