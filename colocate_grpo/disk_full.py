"""A full disk: what need not be written waits for room, and the rest is told in one line."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from colocate_grpo.errors import UserError

log = logging.getLogger(__name__)


class DiskFull(UserError):
    """There is no room for something that a command cannot do without."""

    exit_code = 1


def is_full(error: OSError) -> bool:
    """Whether an operation failed for want of room (or quota)."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Go on without `what` where the disk is full: it is for whoever looks, and the run is worth more."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        log.warning("%s was not written: %s", what, error)


@contextmanager
def told_in_one_line(where: object) -> Iterator[None]:
    """Raise DiskFull, which names `where`, for a full disk."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(f"{error.filename or where}: No space left on device") from error
