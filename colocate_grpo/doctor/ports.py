"""Loopback ports for engines and ranks."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from colocate_grpo.doctor.finding import Context, Finding, fail, ok

SPARE = 8


def check(context: Context) -> Finding:
    engines = context.config.rollout.engines if context.config else 1
    wanted = SPARE + 4 * engines
    try:
        with ExitStack() as stack:
            for _ in range(wanted):
                listener = stack.enter_context(socket.socket())
                listener.bind(("127.0.0.1", 0))
                listener.listen()
    except OSError as error:
        return fail(f"cannot listen on {wanted} loopback ports: {error}",
                    "check `ip addr show lo` and net.ipv4.ip_local_port_range")  # fmt: skip
    return ok(f"{wanted} loopback ports can be opened")
