"""A stage as Megatron's training loop takes it: wrapped, sharded, saved and averaged."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError
from megatron_pulse.backbone.context import LayerContext
from megatron_pulse.diffusion.ema import ExponentialMovingAverage
from megatron_pulse.integration.megatron.engine import untrained_biases
from megatron_pulse.integration.megatron.sharded_state import like_parameters, sharded_module_state
from megatron_pulse.planner.layout.routes import Routes
from megatron_pulse.runtime.parameters.masters import Masters
from megatron_pulse.runtime.stage import Stage, Tensors


class MegatronStage(Stage, MegatronModule):
    """A ``Stage`` that is one of Megatron's modules.

    ``masters``, where set, are what the parameters are rounded from, and ``ema`` averages them;
    ``drawn`` holds the initial weights until there are masters to take them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        backbone: Backbone,
        routes: Routes,
        stage: int,
        seed: int,
        pg_collection: ProcessGroupCollection | None = None,
        recompute: Collection[int] = (),
        offload: Collection[int] = (),
        selective: Collection[int] = (),
    ) -> None:
        self.drawn: Tensors = {}
        self.masters: Masters | None = None
        self.ema: ExponentialMovingAverage | None = None
        # What Megatron's training loop reads from every model chunk.
        self.pg_collection = pg_collection
        self.pre_process = routes.partition.placement.before[stage] is None
        self.post_process = routes.partition.placement.after[stage] is None
        self.share_embeddings_and_output_weights = False
        context = LayerContext(config, pg_collection)
        how = context, recompute, offload, selective
        super().__init__(backbone, routes, stage, seed, *how, config=config)
        layers = self.named_layers()
        if faults := [fault for layer in layers for fault in untrained_biases(*layer)]:
            raise BackboneError(backbone.name, faults)
        chain = backbone.layers[routes.partition.cuts[stage]].chain
        if chain in tuple(backbone.parts)[1:]:
            for parameter in self.parameters():
                setattr(parameter, GRAD_NORM_GROUP_ATTR, chain)

    @property
    def trained_names(self) -> list[str]:
        """The names of the parameters that are not frozen."""
        return [name for name, p in self.named_parameters() if p.requires_grad]

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Required by Megatron's wrappers; the executor passes inputs to forward."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Parameters (and the EMA of those that are trained, if any) keyed by global layer name.

        Collective over the ranks that share out masters, if there is an EMA of these.
        """
        state = sharded_module_state(self, prefix, metadata)
        if self.ema is not None:
            averages = self.ema.state
            if self.masters is not None:
                averages = self.masters.gather(averages, self.trained_names)
            state.update(like_parameters(state, prefix, averages, "ema."))
        return state

    def replace_rounded(self, state: dict[str, Any]) -> None:
        """Put the fp32 masters in the place of bf16 and fp16 weights in a sharded state of this.

        Collective over the ranks that share out masters.
        """
        if self.masters is not None:
            rounded = [
                name
                for name, value in self.state_dict().items()
                if name in self.masters.shapes and value.dtype != torch.float32
            ]
            state.update(
                like_parameters(state, "", self.masters.gather(self.masters.values(), rounded))
            )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load parameters and their masters, and the EMA where the state has one."""
        own = {k: v for k, v in state_dict.items() if not k.startswith("ema.")}
        if self.ema is not None:
            averages = {
                k.removeprefix("ema."): v for k, v in state_dict.items() if k.startswith("ema.")
            }
            self.ema.load_state(averages if self.masters is None else self.masters.parts(averages))
        if self.masters is not None:
            self.masters.load(own)
        return super().load_state_dict(own, strict=strict, assign=assign)
