"""A chain beside the module of the library that published it: outputs and all gradients."""

import torch

from megatron_pulse.backbone.published_weights import adopted, require_fit, to_published
from model_specs import load_published
from tests.model_specs.chains import perturb, relative_error
from tests.model_specs.twins import Twin


def assert_same_numbers(chain, tolerance, batch_size=2, run_chooses=(), gradient_tolerance=None):
    """Gives the published module the chain's weights and compares prediction and gradients of every
    shape.

    Weights go out and come back bit for bit, and ``config.json`` describes the same backbone, but
    for the options that ``run_chooses``. Gradients are compared to ``gradient_tolerance``, or to
    ``tolerance`` too.
    """
    twin = Twin(chain.backbone, chain.dtype)
    published, reference = twin.published, twin.module
    perturb(chain.parameters().values())
    weights = to_published(published, chain.state())
    reference.load_state_dict(weights)
    back = from_published(published, chain.state(), reference.state_dict(), "reference")
    for name, tensor in chain.state().items():
        assert torch.equal(back[name], tensor), name
    adopted = load_published({**dict(reference.config), "_class_name": published.class_name})
    left = dict.fromkeys((*run_chooses, "buckets"))
    assert adopted.record["options"] | left == chain.backbone.record["options"] | left
    assert type(reference).__name__ == published.class_name
    for key, value in published.config.items():
        assert comparable(reference.config[key]) == comparable(value), key

    for shape in range(chain.backbone.num_shapes):
        image, fields = chain.batch(batch_size, shape=shape)
        image.requires_grad_()
        ours = chain(image, fields)
        theirs = twin(image, fields)
        assert relative_error(ours, theirs) < tolerance
        factors = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2)).to(ours.dtype)
        inputs = {"": image, **chain.parameters()}
        found = gradients_of((ours * factors).sum(), inputs)
        expected = gradients_of(
            (theirs * factors).sum(), {"": image, **dict(reference.named_parameters())}
        )
        assert_same_gradients(published, found, expected, gradient_tolerance or tolerance)


def gradients_of(loss, tensors):
    """Gradients by name; zeros of what the loss does not depend on."""
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    pairs = zip(tensors.items(), found, strict=True)
    return {name: torch.zeros_like(of) if grad is None else grad for (name, of), grad in pairs}


def assert_same_gradients(published, found, parameters, tolerance):
    assert relative_error(found.pop(""), parameters.pop("")) < tolerance
    converted = to_published(published, found)
    assert converted.keys() == parameters.keys()
    # Softmax does not see a bias of keys: its gradient is 0 but for rounding.
    negligible = 1e-3 * max(gradient.abs().max().item() for gradient in parameters.values())
    for name, gradient in converted.items():
        expected = parameters[name]
        scale = max(expected.abs().max().item(), negligible)
        assert (gradient - expected).abs().max().item() < tolerance * scale, name


def from_published(published, like, tensors, what):
    """Published ``tensors`` under our names, once they fit."""
    require_fit(published, like, tensors, what)
    return dict(adopted(published, like, tensors, what))


def gradient_of(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def comparable(value):
    return list(value) if isinstance(value, list | tuple) else value
