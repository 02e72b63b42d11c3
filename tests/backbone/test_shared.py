"""Tensors that a layer takes and a later one too: beside one that follows every tensor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.dataflow import shared_inputs

T = TensorSpec((4,))


@st.composite
def chains(draw: st.DrawFn) -> Backbone:
    """Streams of one to three tensors, some of which pass by, and skips of any of them."""
    count = draw(st.integers(2, 6))
    widths = [draw(st.integers(1, 3)) for _ in range(count + 1)]
    pushes: list[dict[str, int]] = [{} for _ in range(count)]
    pops: list[dict[str, TensorSpec]] = [{} for _ in range(count)]
    for k in range(draw(st.integers(0, 4))):
        first, last = sorted(draw(st.tuples(*[st.integers(0, count - 1)] * 2)))
        if first < last:
            pushes[first][f"s{k}"] = draw(st.integers(0, widths[first + 1] - 1))
            pops[last][f"s{k}"] = T
    layers = []
    for i in range(count):
        passing = draw(st.sets(st.integers(0, min(widths[i], widths[i + 1]) - 1)))
        layers.append(
            Layer(
                f"l{i}",
                lambda context: None,
                (T,) * widths[i],
                (T,) * widths[i + 1],
                pushes=pushes[i],
                pops=pops[i],
                beside={k: k for k in passing},
            )
        )
    return Backbone("random", tuple(layers))


@given(chains())
def test_what_is_shared(chain: Backbone) -> None:
    """Every tensor an object, which whoever takes it has; a skip is one once it is pushed."""
    stream: list[object] = [object() for _ in chain.layers[0].inputs]
    skips: dict[str, object] = {}
    takes: list[dict[int | str, object]] = []
    pushed: list[set[str]] = []
    for layer in chain.layers:
        pushed.append(set(skips))
        takes.append({**dict(enumerate(stream)), **{name: skips[name] for name in layer.pops}})
        stream = [
            stream[layer.beside[k]] if k in layer.beside else object()
            for k in range(len(layer.outputs))
        ]
        skips |= {name: stream[index] for name, index in layer.pushes.items()}
    for i, shared in enumerate(shared_inputs(chain)):
        later = {id(taken[n]) for taken in takes[i + 1 :] for n in taken.keys() & pushed[i]}
        here = {id(takes[i][n]) for n in takes[i].keys() & pushed[i]}
        for name, tensor in takes[i].items():
            expected = id(tensor) in (later | here if isinstance(name, int) else later)
            assert (name in shared) == expected
            assert not expected or id(skips[shared[name]]) == id(tensor)
