"""Census of the torch.distributed calls of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch


class Call(NamedTuple):
    """A call of ``kind`` on a group of Megatron's (its description, in short) of several ranks.

    ``num_bytes`` are of the whole: what a reduce-scatter is given, what an all-gather makes.
    """

    kind: str
    group: str
    num_bytes: int


_KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
    "alltoall_base_": "all-to-all",
}
_GROUPS = {"TENSOR": "tensor", "DATA": "data", "PIPELINE": "pipeline", "MODEL": "model"}


def census(argv: list[str], step: int = 2) -> Counter[Call]:
    """Calls of this rank in training step ``step`` of a run with these flags."""
    import megatron.training.training as training
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from megatron_pulse.runtime.p2p.channels import GlooChannel
    from tests.integration.runs import train

    calls: Counter[Call] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                (group,) = (
                    dist.ProcessGroup.unbox(a)
                    for a in args
                    if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
                )
                if group.size() > 1:
                    tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
                    size = max(t.nbytes for t in tensors)
                    name = group.group_desc.split("_")[0]
                    kind = func._schema.name.removeprefix("c10d::")
                    calls[Call(_KINDS[kind], _GROUPS.get(name, name.lower()), size)] += 1
            return func(*args, **(kwargs or {}))

    def watching(kind: str, start: Callable[..., Any]) -> Callable[..., Any]:
        # Channels ask their own groups, not torch's dispatcher.
        def started(channel: GlooChannel, tensor: torch.Tensor) -> Any:
            calls[Call(kind, "pipeline", tensor.nbytes)] += 1
            return start(channel, tensor)

        return started

    original, done = training.train_step, 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        done += 1
        if done != step:
            return original(*args, **kwargs)
        send, receive = GlooChannel.send, GlooChannel.receive
        with (
            Watch(),
            patch.object(GlooChannel, "send", watching("send", send)),
            patch.object(GlooChannel, "receive", watching("receive", receive)),
        ):
            return original(*args, **kwargs)

    training.train_step = watched
    train([*argv, "--train-iters", str(step), "--eval-iters", "0"])
    return calls
