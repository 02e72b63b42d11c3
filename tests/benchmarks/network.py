"""Nodes on one machine: network namespaces, joined by a bridge over links of a limited rate.

    with namespaces(2, rate_mbit=400) as nodes:
        nodes[0].enter()               # this process is on that node from now on
        sent, received = nodes[0].counters()

Needs root and iproute2. Everything, the bridge too, is in namespaces of its own, which are deleted
in all cases: nothing of the machine's own network is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

INTERFACE = "eth0"
MTU = 9000
_NUMBERS = count()


@dataclass(frozen=True)
class Node:
    """A namespace with one interface (``INTERFACE``) of this address on the common network."""

    name: str
    address: str

    def enter(self) -> None:
        """Move the calling thread, and what it starts from now on, to this node; for gloo too."""
        file = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            os.setns(file, os.CLONE_NEWNET)
        finally:
            os.close(file)
        os.environ |= {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}

    def counters(self) -> tuple[int, int]:
        """Bytes that this node has sent to others and received from them, with all headers."""
        shown = _ip("-n", self.name, "-s", "-json", "link", "show", INTERFACE)
        statistics = json.loads(shown)[0]["stats64"]
        return int(statistics["tx"]["bytes"]), int(statistics["rx"]["bytes"])


@cache
def unavailable() -> str:
    """Why there can be no such nodes here; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"iproute2 is not installed ({', '.join(missing)} missing)"
    try:
        with namespaces(1, rate_mbit=100):
            return ""
    except RuntimeError as error:
        return str(error)


@contextmanager
def namespaces(
    count: int,
    rate_mbit: float,
    per_node: Sequence[float] | None = None,
    short_queues: bool = False,
) -> Iterator[list[Node]]:
    """``count`` nodes, each with a link of ``rate_mbit`` (10^6 bits a second) to the others.

    The rate holds for what a node sends and, apart from that, for what it receives; ranks on one
    node share it and reach each other without. ``per_node`` gives every node a rate of its own.
    With ``short_queues`` a connection has few frames under way, so that short messages beside long
    ones do not wait behind them, and links have smaller buckets; long ones are some percent slower.
    Rates are on the wire: some 99 % of them are payload. Raises RuntimeError if the kernel refuses.
    """
    rates = list(per_node) if per_node is not None else [rate_mbit] * count
    if len(rates) != count or not 1 <= count <= 250:
        raise ValueError(f"{count} nodes (1 to 250), and {len(rates)} rates")
    prefix = f"pulse-{os.getpid()}-{next(_NUMBERS)}"
    hub = f"{prefix}-hub"
    nodes = [Node(f"{prefix}-{i}", f"10.231.0.{i + 1}") for i in range(count)]
    made: list[str] = []
    try:
        for name in (hub, *(node.name for node in nodes)):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        for i, (node, rate) in enumerate(zip(nodes, rates, strict=True)):
            port, own = f"port{i}", node.name
            _ip("link", "add", INTERFACE, "netns", own, "type", "veth", "peer", port, "netns", hub)
            _ip("-n", hub, "link", "set", port, "mtu", str(MTU), "master", "bridge", "up")
            _ip("-n", own, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            _ip("-n", own, "link", "set", INTERFACE, "mtu", str(MTU), "up")
            if short_queues:
                _bound_send_buffers(own)
            bucket_s = 2.5e-4 if short_queues else 1e-3
            _limit(own, INTERFACE, rate, bucket_s)
            _limit(hub, port, rate, bucket_s)
        yield nodes
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def _limit(namespace: str, interface: str, rate_mbit: float, bucket_s: float) -> None:
    """A token bucket of so long at the rate, and at least two frames; what queues is not dropped.

    The kernel divides larger segments. With a larger bucket short messages would pass at once.
    """
    burst = max(int(rate_mbit * 1e6 / 8 * bucket_s), 2 * (MTU + 14))
    where = ["-n", namespace, "qdisc", "add", "dev", interface]
    bucket = ["tbf", "rate", f"{round(rate_mbit * 1e6)}bit", "burst", str(burst), "limit", "64mb"]
    _run("tc", *where, "root", *bucket)


def _bound_send_buffers(namespace: str) -> None:
    sizes = f"net.ipv4.tcp_wmem={MTU} {2 * MTU} {4 * MTU}"
    _run("ip", "netns", "exec", namespace, "sysctl", "-q", "-w", sizes)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def sent_bytes() -> int:
    """What this process's node has sent over its interface, by the kernel's count."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {INTERFACE}")
