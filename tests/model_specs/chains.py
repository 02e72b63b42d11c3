"""Chains run layer by layer in this process, every tensor checked against its spec."""

import dataclasses

import torch

from megatron_pulse.backbone.shape_buckets import at_shape, set_shape_index, shape_of


def make_context(dtype=torch.float32, **overrides):
    """A LayerContext whose base config has sizes that no layer may use."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_pulse.backbone.build_context import LayerContext

    sizes = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 2}
    config = TransformerConfig(
        **{**sizes, "params_dtype": dtype, "transformer_impl": "local", **overrides}
    )
    return LayerContext(config, ProcessGroupCollection.use_mpu_process_groups())


@dataclasses.dataclass
class Chain:
    """A built backbone; calling it checks every tensor against its declared spec."""

    backbone: object
    modules: list
    dtype: torch.dtype

    def check(self, tensor, spec, batch, where):
        dtype = self.dtype if spec.dtype == "compute" else getattr(torch, spec.dtype)
        assert tuple(tensor.shape) == spec.full_shape(batch), where
        assert tensor.dtype == dtype, where

    def batch(self, size, seed=0, shape=0):
        """A random image and batch fields of ``size`` samples; masks are of 0 and 1."""
        generator = torch.Generator().manual_seed(seed)

        def draw(spec, name=""):
            spec = spec.at(shape)
            if spec.dtype == "int64":
                end = 2 if name.endswith("_mask") else 11
                return torch.randint(0, end, spec.full_shape(size), generator=generator)
            values = torch.randn(spec.full_shape(size), generator=generator)
            return values.to(self.dtype) if spec.dtype == "compute" else 1000 * values.abs()

        fields = {name: draw(spec, name) for name, spec in self.backbone.batch_fields.items()}
        return draw(self.backbone.input_spec), fields

    def __call__(self, image, fields):
        size = image.shape[0]
        shape = shape_of(self.backbone, {"noisy": image, **fields})
        backbone = at_shape(self.backbone, shape)
        tensors, skips, conditioning = (image,), {}, dict(fields)
        for layer, module in zip(backbone.layers, self.modules, strict=True):
            set_shape_index(module, shape)
            for tensor, spec in zip(tensors, layer.inputs, strict=True):
                self.check(tensor, spec, size, layer.name)
            popped = {name: skips.pop(name) for name in layer.pops}
            for name, spec in layer.pops.items():
                self.check(popped[name], spec, size, name)
            results = module(tensors, popped, {name: conditioning[name] for name in layer.uses})
            assert len(results) == len(layer.outputs) + len(layer.provides)
            tensors, provided = results[: len(layer.outputs)], results[len(layer.outputs) :]
            for tensor, (name, spec) in zip(provided, layer.provides.items(), strict=True):
                self.check(tensor, spec, size, name)
                conditioning[name] = tensor
            skips.update((name, tensors[index]) for name, index in layer.pushes.items())
        assert not skips
        self.check(tensors[0], backbone.output_spec, size, "prediction")
        return tensors[0]

    def parameters(self):
        """Parameters by their names in a checkpoint."""
        return {
            f"{layer.prefix}{name}": parameter
            for layer, module in zip(self.backbone.layers, self.modules, strict=True)
            for name, parameter in module.named_parameters()
        }

    def state(self):
        """Parameters and persistent buffers by their names in a checkpoint."""
        return {
            f"{layer.prefix}{name}": tensor
            for layer, module in zip(self.backbone.layers, self.modules, strict=True)
            for name, tensor in module.state_dict().items()
            if not name.endswith("_extra_state")
        }


def build_chain(backbone, dtype=torch.float32, **overrides):
    """Builds every layer of a backbone, each from its own seed."""
    context = make_context(dtype, **overrides)
    modules = []
    for i, layer in enumerate(backbone.layers):
        torch.manual_seed(1000 + i)
        modules.append(layer.build(context))
    return Chain(backbone, modules, dtype)


def perturb(parameters, seed=5):
    """Random additions to every parameter, so that zero biases and unit gains hide nothing."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_((0.05 * noise).to(parameter.dtype))


def relative_error(a, b):
    """max|a - b| / max|b|."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
