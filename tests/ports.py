"""Ports for servers that cannot take any free one."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, NUM = 20_000, 10_000  # below those that the system gives to sockets that ask for any
_numbers = itertools.count(os.getpid() * 97)  # so that processes of tests begin at different ports


def free_port() -> int:
    """Return a port that nothing listens on, each time another one."""
    while True:
        port = FIRST + next(_numbers) % NUM
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
