"""Stage for Megatron's training loop: wrapped, sharded, saved and averaged.

The sharded state covers tensor-parallel layers below plain containers, and the EMA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import Tensor, nn

from megatron_pulse.adapters.low_rank import M, adapters_disabled, is_factor
from megatron_pulse.backbone.activations import ActivationPolicies
from megatron_pulse.backbone.build_context import LayerContext
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.diffusion.ema import ExponentialMovingAverage
from megatron_pulse.integration.megatron.te_wgrad import untrained_biases
from megatron_pulse.planner.layout.routes import Routes
from megatron_pulse.runtime.parameters.fsdp import FullyShardedStage, ShardedUnits
from megatron_pulse.runtime.parameters.main_params import MainParams
from megatron_pulse.runtime.parameters.reference_weights import ReferenceWeights
from megatron_pulse.runtime.stage import Stage, Tensors

EMA, REFERENCE = "ema.", "reference."
"""Prefixes of the names of averages and of the reference's weights in a checkpoint."""


class MegatronStage(Stage, MegatronModule):
    """``Stage`` that is one of Megatron's modules.

    - ``main_params``: fp32 parameters from which the stage's parameters are rounded, if any.
    - ``ema``: average of the main parameters.
    - ``reference``: weights of a preference loss's reference, from its first pass on.
    - ``drawn``: initial weights, until the main parameters take them.
    - ``fully_sharded``: this rank's rows of the parameters of ``units``, once it is wrapped.
    - ``units``: layers under ``fully_shard``, if the parameters are sharded by FSDP.
    - ``left_out``: names of parameters that are neither saved nor loaded.
    - ``begins_adapter``: loaded weights are those beside which an adapter begins.
    """

    def __init__(
        self,
        config: TransformerConfig,
        backbone: Backbone,
        routes: Routes,
        stage: int,
        seed: int,
        pg_collection: ProcessGroupCollection | None = None,
        activations: ActivationPolicies | None = None,
        offloaded_weights: Collection[int] = (),
        token_slices: int = 1,
        frozen_dtype: torch.dtype | None = None,
        units: ShardedUnits | None = None,
    ) -> None:
        self.drawn: Tensors = {}
        self.main_params: MainParams | None = None
        self.ema: ExponentialMovingAverage | None = None
        self.reference: ReferenceWeights | None = None
        self.fully_sharded: FullyShardedStage | None = None
        self.left_out: frozenset[str] = frozenset()
        self.begins_adapter = False
        # Megatron's training loop reads these attributes of every model chunk.
        self.pg_collection = pg_collection
        self.pre_process = routes.partition.placement.before[stage] is None
        self.post_process = routes.partition.placement.after[stage] is None
        self.share_embeddings_and_output_weights = False
        context = LayerContext(config, pg_collection)
        self.units = units
        frozen = offloaded_weights, token_slices, frozen_dtype
        of = backbone, routes, stage, seed, context, activations, *frozen, units
        super().__init__(*of, config=config)
        layers = self.named_layers()
        if faults := [fault for layer in layers for fault in untrained_biases(*layer)]:
            raise BackboneError(backbone.name, faults)
        chain = backbone.layers[routes.partition.cuts[stage]].chain
        if chain in tuple(backbone.parts)[1:]:
            for parameter in self.parameters():
                setattr(parameter, GRAD_NORM_GROUP_ATTR, chain)

    def cuda(self, device: Any = None) -> Self:
        """Move the stage to a GPU, unless ``fully_shard`` has moved it unit by unit."""
        return self if self.is_sharded else super().cuda(device)

    @property
    def trained_names(self) -> list[str]:
        """Names of the parameters that are not frozen."""
        return [name for name, p in self.named_parameters() if p.requires_grad]

    @property
    def frozen_names(self) -> frozenset[str]:
        """Names of the parameters that are frozen."""
        return frozenset(name for name, p in self.named_parameters() if not p.requires_grad)

    @property
    def factor_names(self) -> frozenset[str]:
        """Names of the factors of an adapter."""
        return frozenset(name for name, _ in self.named_parameters() if is_factor(name))

    def begin_reference(self) -> ReferenceWeights:
        """Make the present weights those of the reference, unless there is one."""
        if self.reference is None:
            sharded = self.fully_sharded
            held = self.named_parameters() if sharded is None else sharded.own.items()
            self.reference = ReferenceWeights(held, in_memory=sharded is not None)
        return self.reference

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Within, the stage computes as the reference: with its weights, without adapters.

        For forward passes without gradients.
        """
        with adapters_disabled(), self.begin_reference().in_place():
            yield

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing; Megatron's wrappers need the method, the executor passes inputs to
        forward.
        """

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Parameters, EMA and reference of trained ones if any, keyed by global layer name.

        Collective over the ranks that shard main parameters, if these have an EMA.
        """
        state = sharded_module_state(self, prefix, metadata)
        for name in self.left_out:
            del state[prefix + name]
        if self.fully_sharded is not None:
            return self._rows(state, prefix, self.fully_sharded)
        if self.ema is not None:
            averages = self.ema.state
            if self.main_params is not None:
                averages = self.main_params.gather(averages, self.trained_names)
            state.update(like_parameters(state, prefix, averages, EMA))
        if self.reference is not None:
            state.update(like_parameters(state, prefix, self.reference.state, REFERENCE))
        return state

    def _rows(
        self, state: dict[str, Any], prefix: str, sharded: FullyShardedStage
    ) -> dict[str, Any]:
        """``state`` with this rank's rows of parameters, of their EMA and of the reference."""
        kinds = {
            kind: {} if of is None else of.state
            for kind, of in ((EMA, self.ema), (REFERENCE, self.reference))
        }
        found = {}
        for name, entry in state.items():
            own = sharded.own.get(name.removeprefix(prefix))
            if own is None:
                found[name] = entry
            elif own.numel():
                short = name.removeprefix(prefix)
                shape = sharded.wholes[short].shape
                place = sharded.first[short], sharded.replica, shape
                found[name] = rows = entry_of_rows(entry, own.detach(), *place)
                for kind, values in kinds.items():
                    if short in values:
                        found[f"{prefix}{kind}{short}"] = dataclasses.replace(
                            rows, key=f"{kind}{entry.key}", data=values[short].view(own.shape)
                        )
        return found

    def replace_rounded(self, state: dict[str, Any]) -> None:
        """Replace bf16 and fp16 weights in a sharded state of this stage by fp32 main parameters.

        Collective over the ranks that shard main parameters.
        """
        if self.main_params is not None and self.fully_sharded is None:
            rounded = [
                name
                for name, value in self.state_dict().items()
                if name in self.main_params.shapes
                and name not in self.left_out
                and value.dtype != torch.float32
            ]
            state.update(
                like_parameters(
                    state, "", self.main_params.gather(self.main_params.values(), rounded)
                )
            )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and main parameters, with EMA and reference if the stage has them."""
        own = {k: v for k, v in state_dict.items() if not k.startswith((EMA, REFERENCE))}
        if self.fully_sharded is not None:
            return self._load_rows(state_dict, self.fully_sharded)
        if self.reference is not None:
            self.reference.load_state(_of_kind(state_dict, REFERENCE))
        if self.ema is not None:
            averages = _of_kind(state_dict, EMA)
            self.ema.load_state(
                averages if self.main_params is None else self.main_params.parts(averages)
            )
        if self.main_params is not None:
            self.main_params.load(own)
        own |= {k: v for k, v in self.state_dict().items() if k in self.left_out}
        result = super().load_state_dict(own, strict=strict, assign=assign)
        if self.begins_adapter:
            self._begin_magnitudes()
        return result

    @torch.no_grad()
    def load_frozen(self, state: Mapping[str, Tensor]) -> None:
        """Load the frozen parameters, or this rank's rows of them."""
        if self.fully_sharded is not None:
            self.fully_sharded.load(state)
            return
        own = dict(self.named_parameters())
        for name, tensor in state.items():
            own[name].copy_(tensor)

    @torch.no_grad()
    def _load_rows(self, state: Mapping[str, Tensor], sharded: FullyShardedStage) -> None:
        sharded.load({name: rows for name, rows in state.items() if name in sharded.own})
        if self.reference is not None:
            self.reference.load_state(_of_kind(state, REFERENCE))
        if self.ema is not None:
            averages = _of_kind(state, EMA)
            self.ema.load_state({name: rows.reshape(-1) for name, rows in averages.items()})
        for name, buffer in self.named_buffers():
            if name in state:
                buffer.copy_(state[name])
        if self.begins_adapter and any(name.endswith(f".{M}") for name in self.factor_names):
            fault = (
                "DoRA's magnitudes begin with the norms of whole loaded weights, and FSDP shards "
                "them. Make the first step in another layout, or train lora"
            )
            raise BackboneError(self.backbone_name, [fault])

    def _begin_magnitudes(self) -> None:
        """Set an adapter's new magnitudes to the norms of the loaded weights."""
        for _, layer in self.named_layers():
            for module in layer.modules():
                if (begin := getattr(module, "begin_magnitudes", None)) is not None:
                    begin()
        if self.main_params is not None:
            own = dict(self.named_parameters())
            self.main_params.load({name: own[name].detach() for name in self.factor_names})


def _of_kind(state: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {k.removeprefix(kind): v for k, v in state.items() if k.startswith(kind)}


def sharded_module_state(
    module: nn.Module, prefix: str, metadata: dict[str, Any] | None
) -> dict[str, Any]:
    """Sharded state of everything below ``module``.

    Modules with a ``sharded_state_dict`` (Megatron's layers) return their own. Plain torch modules
    are walked, because Megatron's default treats everything below them as replicated.
    """
    state: dict[str, Any] = {}
    for name, child in module.named_children():
        child_prefix = f"{prefix}{name}."
        if hasattr(child, "sharded_state_dict"):
            state.update(child.sharded_state_dict(child_prefix, (), metadata))
        else:
            state.update(sharded_module_state(child, child_prefix, metadata))
    own = {
        name: tensor
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }
    if own:
        state.update(
            make_sharded_tensors_for_checkpoint(
                own,
                prefix,
                tp_group=get_tensor_model_parallel_group_if_none(None),
                dp_cp_group=(metadata or {}).get("dp_cp_group"),
            )
        )
    return state


def entry_of_rows(
    entry: ShardedTensor | ShardedTensorFactory,
    rows: torch.Tensor,
    first: int,
    replica: int,
    shape: torch.Size,
) -> ShardedTensor | ShardedTensorFactory:
    """Entry of ``rows`` from row ``first`` on of the parameter of ``entry``, of that ``shape``.

    The parameter is whole or a tensor-parallel part. ``replica`` numbers the copies of the rows.
    """
    copies = (*entry.replica_id[:-1], replica)
    if isinstance(entry, ShardedTensorFactory):
        return _factory_of_rows(entry, rows, first, copies, shape)
    offset = list(entry.global_offset)
    offset[entry.prepend_axis_num] += first
    return dataclasses.replace(
        entry,
        data=rows,
        dtype=rows.dtype,
        local_shape=tuple(rows.shape),
        global_offset=tuple(offset),
        axis_fragmentations=None,
        replica_id=copies,
    )


def _factory_of_rows(
    entry: ShardedTensorFactory, rows: Tensor, first: int, copies: Any, shape: torch.Size
) -> ShardedTensorFactory:
    """Entry of rows of a parameter whose segments along a dimension are entries of their own."""

    def pieces_of(key: str, dtype: torch.dtype, replica_id: Any) -> Any:
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return entry.build_fn(key, whole, replica_id, None)

    some = pieces_of(entry.key, rows.dtype, copies)[0].local_shape
    dim = next((d for d, size in enumerate(some) if size != shape[d]), 0)

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> Any:
        found, start = [], 0
        for piece in pieces_of(key, tensor.dtype, replica_id):
            size = piece.local_shape[dim]
            low, high = start, start + size
            if dim == 0:
                low, high = max(low, first), min(high, first + len(tensor))
                part, offset = tensor[low - first : high - first], low - start
            else:
                part, offset = tensor.narrow(dim, start, size), first
            if low < high:
                place = piece.global_offset[0] + offset, *piece.global_offset[1:]
                found.append(
                    dataclasses.replace(
                        piece,
                        data=part.contiguous(),
                        local_shape=tuple(part.shape),
                        global_offset=place,
                        axis_fragmentations=None,
                    )
                )
            start += size
        return found

    @torch.no_grad()
    def merge(pieces: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(pieces), dim)

    return ShardedTensorFactory(entry.key, rows, build, merge, replica_id=copies)


def like_parameters(
    state: dict[str, Any], prefix: str, tensors: Mapping[str, torch.Tensor], kind: str = ""
) -> dict[str, Any]:
    """Entries ``kind + name`` of whole ``tensors``, sharded like the parameters of ``state``."""
    entries = {}
    for name, tensor in tensors.items():
        sharded = state[prefix + name]
        changes: dict[str, Any] = {"key": f"{kind}{sharded.key}", "data": tensor}
        if isinstance(sharded, ShardedTensor):
            changes["dtype"] = tensor.dtype
        elif not isinstance(sharded, ShardedTensorFactory):
            continue
        entries[f"{prefix}{kind}{name}"] = dataclasses.replace(sharded, **changes)
    return entries
