"""Peer status: ranks query each other from separate threads over separate TCP connections.

The job's store and process groups are not used, since the watchdog asks why these do not answer. A
query carries the job's secret, which ranks share through the store at startup.
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
    """Reason why a rank did not answer."""

    GONE = "process has exited"
    SILENT = "no response"


Answer = Mapping[str, Any]
Address = tuple[str, int]


class Listener:
    """Server at ``port`` that replies to another rank's question with ``answer(question)``.

    Questions without the ``secret`` get no reply. No question is answered while ``secret`` is
    empty.
    """

    def __init__(self, answer: Callable[[Answer], Answer], secret: str = "") -> None:
        self.secret = secret
        self._answer = answer
        self._socket = _listen()
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="watch answers", daemon=True).start()

    def close(self) -> None:
        """Close the socket."""
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
            pass  # the peer is gone, or is not part of this job


def ask(
    addresses: Mapping[int, Address], secret: str, question: Answer, limit_s: float
) -> dict[int, Answer | NoAnswer]:
    """Answers of the ranks at ``addresses``, queried in parallel, within ``limit_s``
    seconds each.
    """
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
    """Address under which other nodes reach this node.

    Empty if only a loopback address leads to ``master``: this node is then the master's node.
    """
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
    """Read one JSON object from a line; ValueError if malformed or too long."""
    received = b""
    while not received.endswith(b"\n"):
        if len(received) > _MOST_BYTES or not (part := connection.recv(4096)):
            raise ValueError("not a line")
        received += part
    content = json.loads(received)
    if not isinstance(content, dict):
        raise ValueError("not a mapping")
    return content
