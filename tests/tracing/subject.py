"""A module beside the chain that is derived of it, and batches that suit both."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import megatron_pulse as pulse
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.shape_buckets import fields_of, shape_of
from megatron_pulse.tracing.input_leaves import leaves_of
from megatron_pulse.tracing.input_roles import read_inputs
from tests.runtime.equality import Case, leave_zero, mean_squared_error
from tests.tracing.own import OWN
from tests.tracing.shapes import SHAPES, resized
from tests.tracing.zoo import OUTPUT, make
from tests.tracing.zoo.declared import Roles, roles_of
from tests.tracing.zoo.draw import Given


class Subject:
    """A class of the zoo, or a module of ``own``, by its name; behind which "/shapes" says that its
    microbatches have several (see ``SHAPES``)."""

    def __init__(self, name: str, dtype: str) -> None:
        self.dtype = dtype
        name, _, several = name.partition("/")
        kind = getattr(torch, dtype)
        torch.manual_seed(3)
        sample: str | None = None
        self.module: nn.Module
        given: Given
        if name in OWN:
            module, example, sample = OWN[name]()
            self.module = module.to(kind)
            example = {k: v.to(kind) if v.is_floating_point() else v for k, v in example.items()}
            given = lambda size: {k: v[:1].expand(size, *v.shape[1:]) for k, v in example.items()}  # noqa: E731
        else:
            self.module, given = make(name, kind)
        others = [resized(given, sizes) for sizes in SHAPES[name]] if several else []
        self._output = OUTPUT.get(name, 0)
        roles = roles_of(name) or Roles(sample)
        self.chain: Backbone = pulse.from_module(
            self.module, given, **vars(roles), output=OUTPUT.get(name), other_inputs=others
        )
        read = read_inputs(name, given, **vars(roles))
        self._examples = [dict(each(read.size)) for each in (given, *others)]
        special = {read.sample: "noisy", read.timestep: "timesteps"}
        self._specs = fields_of(self.chain)
        self._field_of = {
            leaf: field
            for leaf in leaves_of(self._examples[0])
            if (field := special.get(leaf, leaf)) in self._specs
        }

    def batches(self, case: Case, step: int) -> list[dict[str, Tensor]]:
        """The microbatches of a step, in turn of all shapes: whole numbers and masks are drawn from
        the example's."""
        count = self.chain.num_shapes
        return [
            self._batch(1000 * step + m, (step + m) % count) for m in range(case.num_microbatches)
        ]

    def _batch(self, seed: int, shape_index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        batch = {}
        for leaf, value in leaves_of(self._examples[shape_index]).items():
            if (field := self._field_of.get(leaf)) is None:
                continue
            if field == "timesteps" and value.is_floating_point():
                drawn = torch.rand(value.shape, generator=generator) * value.max()
            elif value.is_floating_point():
                drawn = torch.randn(value.shape, generator=generator).to(value.dtype)
            else:
                places = torch.randint(0, value.numel(), value.shape, generator=generator)
                drawn = value.flatten()[places]
            batch[field] = drawn.reshape(self._specs[field].at(shape_index).full_shape(2))
        target = self.chain.output_spec.at(shape_index).full_shape(2)
        return {**batch, "target": torch.randn(target, generator=generator)}

    def eager_losses(self, case: Case) -> list[float]:
        """Losses of the module itself, trained like a chain: one AdamW step per global batch."""
        leave_zero(self.module)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2, foreach=False)
        losses = []
        for step in range(case.steps):
            optimizer.zero_grad()
            for batch in self.batches(case, step):
                loss = mean_squared_error(self.predict(batch), batch)
                (loss / case.num_microbatches).backward()
                losses.append(loss.item())
            optimizer.step()
        return losses

    def predict(self, batch: Mapping[str, Tensor]) -> Tensor:
        example = self._examples[shape_of(self.chain, batch)]
        leaves, form = pytree.tree_flatten(example)
        given = [
            leaf if field is None else batch[field].reshape(leaf.shape).to(leaf.dtype)
            for leaf, field in zip(leaves, map(self._field_of.get, leaves_of(example)), strict=True)
        ]
        results = pytree.tree_leaves(self.module(**pytree.tree_unflatten(given, form)))
        return [leaf for leaf in results if isinstance(leaf, Tensor)][self._output]
