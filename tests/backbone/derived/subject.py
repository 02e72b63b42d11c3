"""A module beside the chain that is derived of it, and batches that suit both."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megatron_pulse as pulse
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.derived.inputs import leaves_of, read_inputs
from tests.backbone.derived.own import OWN
from tests.backbone.derived.zoo import OUTPUT, make
from tests.runtime.equality import Case, leave_zero, mean_squared_error


class Subject:
    """A class of the zoo, or a module of ``own``, by its name."""

    def __init__(self, name: str, dtype: str) -> None:
        self.dtype = dtype
        kind = getattr(torch, dtype)
        torch.manual_seed(3)
        sample: str | None = None
        self.module: nn.Module
        if name in OWN:
            module, given, sample = OWN[name]()
            self.module = module.to(kind)
        else:
            self.module, given = make(name, kind)
        self._output = OUTPUT.get(name, 0)
        self.chain: Backbone = pulse.from_module(
            self.module, given, sample=sample, output=OUTPUT.get(name)
        )
        read = read_inputs(name, given, sample, None, ())
        self._example = dict(given(read.size) if callable(given) else given)
        special = {read.sample: "noisy", read.timestep: "timesteps"}
        self._specs = {"noisy": self.chain.input_spec, **self.chain.batch_fields}
        self._field_of = {
            leaf: field
            for leaf in leaves_of(self._example)
            if (field := special.get(leaf, leaf)) in self._specs
        }

    def batches(self, case: Case, step: int) -> list[dict[str, Tensor]]:
        """The microbatches of a step: whole numbers and masks are drawn from the example's."""
        return [self._batch(1000 * step + m) for m in range(case.num_microbatches)]

    def _batch(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        batch = {}
        for leaf, value in leaves_of(self._example).items():
            if (field := self._field_of.get(leaf)) is None:
                continue
            if field == "timesteps" and value.is_floating_point():
                drawn = torch.rand(value.shape, generator=generator) * value.max()
            elif value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator).to(value.dtype)
            else:
                places = torch.randint(0, value.numel(), value.shape, generator=generator)
                drawn = value.flatten()[places]
            batch[field] = drawn.reshape(self._specs[field].full_shape(2))
        target = self.chain.output_spec.full_shape(2)
        return {**batch, "target": torch.randn(target, generator=generator)}

    def eager_losses(self, case: Case) -> list[float]:
        """Of the module itself, trained as a chain is: a step of AdamW after all microbatches."""
        leave_zero(self.module)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2, foreach=False)
        losses = []
        for step in range(case.steps):
            optimizer.zero_grad()
            for batch in self.batches(case, step):
                loss = mean_squared_error(self._predict(batch), batch)
                (loss / case.num_microbatches).backward()
                losses.append(loss.item())
            optimizer.step()
        return losses

    def _predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        leaves, form = pytree.tree_flatten(self._example)
        given = [
            leaf if field is None else batch[field].reshape(leaf.shape).to(leaf.dtype)
            for leaf, field in zip(
                leaves, map(self._field_of.get, leaves_of(self._example)), strict=True
            )
        ]
        results = pytree.tree_leaves(self.module(**pytree.tree_unflatten(given, form)))
        return [leaf for leaf in results if isinstance(leaf, Tensor)][self._output]
