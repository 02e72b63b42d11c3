"""Rank order of a config in the cluster, and the speed of its links and collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from megatron_pulse.planner.cluster.cluster import Cluster, Link


@dataclass(frozen=True, eq=False)
class RankOrder:
    """Megatron's rank order: tensor first, then context, replicas, and the pipeline (tp-cp-dp-pp).

    With ``pp_before_dp`` the pipeline comes before the replicas (tp-cp-pp-dp). Context-parallel
    ranks have equal parameters, whose gradients are summed over them and over replicas.
    """

    cluster: Cluster
    pipeline: int
    data: int
    tensor: int
    pp_before_dp: bool
    context: int = 1

    @property
    def _inner(self) -> int:
        """Number of ranks that share one microbatch of a pipeline device."""
        return self.tensor * self.context

    def rank(self, device: int, replica: int, shard: int = 0) -> int:
        """Rank of a pipeline device's shard in a replica: tensor first, then context."""
        if self.pp_before_dp:
            return shard + self._inner * (device + self.pipeline * replica)
        return shard + self._inner * (replica + self.data * device)

    def of_place(self, device: int) -> list[int]:
        """Ranks of a pipeline device: all shards of all replicas."""
        shards = range(self._inner)
        return [self.rank(device, replica, k) for replica in range(self.data) for k in shards]

    @lru_cache(maxsize=4096)  # noqa: B019 (values live as long as a tuning)
    def link(self, device: int, other: int) -> Link:
        """Slowest link between two pipeline devices over all replicas.

        All replicas and shards send at the same time. Those that leave one node share its link.
        """
        pairs = [(self.rank(device, r), self.rank(other, r)) for r in range(self.data)]
        node = self.cluster.node_of
        leaving = Counter(node(a) for a, b in pairs if node(a) != node(b))
        shared = self._inner * max(leaving.values(), default=1)
        links = (self.cluster.link(*pair, concurrent=shared) for pair in pairs)
        return max(links, key=lambda link: (link.time_s(1 << 20), link.latency_s))

    @lru_cache(maxsize=4096)  # noqa: B019
    def reduce_s(self, device: int, num_bytes: float, scatter: bool) -> float:
        """Seconds to sum gradients over replicas and context; with ``scatter`` each rank keeps its
        part only."""
        if self.data * self.context == 1 or not num_bytes:
            return 0.0
        ranks, shared = self._replicas(device)
        collective = self.cluster.reduce_scatter_s if scatter else self.cluster.allreduce_s
        return collective(num_bytes, ranks, concurrent=shared)

    @lru_cache(maxsize=4096)  # noqa: B019
    def gather_s(self, device: int, num_bytes: float) -> float:
        """Seconds to gather parameters from all replicas and context-parallel ranks."""
        if self.data * self.context == 1 or not num_bytes:
            return 0.0
        ranks, shared = self._replicas(device)
        return self.cluster.all_gather_s(num_bytes, ranks, concurrent=shared)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _replicas(self, device: int) -> tuple[tuple[int, ...], int]:
        """Ranks that sum a device's gradients, and the number of such groups that leave the same
        node at once."""
        ranks = self._group(device)
        node = self.cluster.node_of
        groups = [self._group(d) for d in range(self.pipeline)]
        leaving: Counter[int] = Counter()
        for group in groups:
            nodes = set(map(node, group))
            if len(nodes) > 1:
                leaving.update(nodes)
        return ranks, self.tensor * max(leaving.values(), default=1)

    def _group(self, device: int) -> tuple[int, ...]:
        shards = range(0, self._inner, self.tensor)
        return tuple(self.rank(device, r, k) for r in range(self.data) for k in shards)
