"""Ranks ask each other, from threads of their own, over connections of their own.

Neither the job's store nor its process groups are used: what is asked is why those do not answer.
Who asks knows the job's secret, which ranks share through the store when they meet.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

_MOST_BYTES = 1 << 16
_ASKED_AT_ONCE = 64


class NoAnswer(Enum):
    """Why a rank said nothing."""

    GONE = "its process has ended"
    SILENT = "it does not answer"


Answer = Mapping[str, Any]
Address = tuple[str, int]


class Listener:
    """Answers what other ranks ask, at ``port``, as ``answer(question)`` says; nobody before it has
    the ``secret``."""

    def __init__(self, answer: Callable[[Answer], Answer], secret: str = "") -> None:
        self.secret = secret
        self._answer = answer
        self._socket = _listen()
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="watch answers", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(5.0)
                question = _read(connection)
                given = str(question.pop("secret", ""))
                if self.secret and hmac.compare_digest(given.encode(), self.secret.encode()):
                    connection.sendall(_line(self._answer(question)))
        except (OSError, ValueError, AttributeError):
            pass  # who asked has gone, or is none of ours


def ask(
    addresses: Mapping[int, Address], secret: str, question: Answer, limit_s: float
) -> dict[int, Answer | NoAnswer]:
    """What each rank at ``addresses`` answers, all asked side by side, within ``limit_s`` each."""
    content = _line({**question, "secret": secret})

    def one(address: Address) -> Answer | NoAnswer:
        try:
            with socket.create_connection(address, limit_s) as connection:
                connection.settimeout(limit_s)
                connection.sendall(content)
                return _read(connection)
        except (ConnectionRefusedError, ConnectionResetError):
            return NoAnswer.GONE
        except (OSError, ValueError):
            return NoAnswer.SILENT

    if not addresses:
        return {}
    pool = ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(addresses)), "watch asks")
    try:
        return dict(zip(addresses, pool.map(one, addresses.values()), strict=True))
    finally:
        pool.shutdown(wait=False)


def own_host(master: str, port: int) -> str:
    """The address of this node as others reach it, "" where only a loop leads to ``master``: then
    it is the master's own node."""
    try:
        family, kind, *_, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            host = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if host.startswith("127.") or host == "::1" else host


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256
            )
        except OSError:
            pass  # switched off here
    return socket.create_server(("", 0), backlog=256)


def _line(content: Answer) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _read(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON; ValueError if it is none, or too long."""
    received = b""
    while not received.endswith(b"\n"):
        if len(received) > _MOST_BYTES or not (part := connection.recv(4096)):
            raise ValueError("not a line")
        received += part
    content = json.loads(received)
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content
