"""Our names and layouts to published ones, and back bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.backbone.published_weights import (
    Concatenated,
    PerHead,
    Published,
    PublishedError,
    Rule,
    SwappedHalves,
    to_published,
)
from tests.model_specs.parity import from_published

FORM = Published(
    "library",
    "Class",
    {},
    (
        Rule("*.linear_qkv.*", ("*.to_q.*", "*.to_k.*", "*.to_v.*"), PerHead(3)),
        Rule("*.fc1.*", "*.net.0.proj.*", SwappedHalves()),
        Rule(("*.a.table", "*.b.table"), "*.table", Concatenated((2, 5))),
        Rule("conv_in.conv.*", "conv_in.*"),
    ),
    ignored=("*.positions",),
)


@st.composite
def states(draw):
    """Random tensors under names that every rule meets, some more than once."""
    heads, features, inputs = 3, draw(st.integers(1, 4)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    state = {}
    for block in draw(st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True)):
        name = f"blocks.{block}"
        state[f"{name}.attn.linear_qkv.weight"] = torch.randn(3 * heads * features, inputs)
        state[f"{name}.attn.linear_qkv.bias"] = torch.randn(3 * heads * features)
        state[f"{name}.fc1.weight"] = torch.randn(2 * inputs, 4)
        state[f"{name}.a.table"] = torch.randn(2, inputs)
        state[f"{name}.b.table"] = torch.randn(5, inputs)
        state[f"{name}.norm.weight"] = torch.randn(inputs)
    state["conv_in.conv.weight"] = torch.randn(4, 2, 3, 3)
    return {name: torch.randn(t.shape, generator=generator) for name, t in state.items()}


@given(states())
def test_there_and_back(state):
    theirs = to_published(FORM, state)
    assert sum(t.numel() for t in theirs.values()) == sum(t.numel() for t in state.values())
    back = from_published(FORM, state, theirs, "test")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


@given(states())
def test_names_and_rows(state):
    theirs = to_published(FORM, state)
    block = next(iter(state)).split(".")[1]
    ours = state[f"blocks.{block}.attn.linear_qkv.weight"]
    features = ours.shape[0] // 9
    for part, letter in enumerate("qkv"):
        found = theirs[f"blocks.{block}.attn.to_{letter}.weight"]
        for head in range(3):
            first = (head * 3 + part) * features
            rows = found[head * features : (head + 1) * features]
            assert torch.equal(rows, ours[first : first + features])
    gate, value = state[f"blocks.{block}.fc1.weight"].chunk(2)
    assert torch.equal(theirs[f"blocks.{block}.net.0.proj.weight"], torch.cat([value, gate]))
    assert theirs[f"blocks.{block}.table"].shape[0] == 7
    assert "conv_in.weight" in theirs and f"blocks.{block}.norm.weight" in theirs


def test_every_fault_is_listed():
    state = {"blocks.0.fc1.weight": torch.randn(4, 2), "conv_in.conv.bias": torch.randn(3)}
    theirs = to_published(FORM, state)
    theirs["conv_in.bias"] = torch.randn(2)
    theirs["more"] = torch.randn(2)
    theirs["embed.positions"] = torch.randn(2)
    del theirs["blocks.0.net.0.proj.weight"]
    with pytest.raises(PublishedError) as caught:
        from_published(FORM, state, theirs, "folder")
    assert caught.value.faults == [
        "blocks.0.net.0.proj.weight is missing",
        "more is unexpected",
        "conv_in.bias has the shape [2], expected [3]",
    ]
