"""What a backbone *is*: an ordered chain of layers with named skips and conditioning.

This module imports neither torch nor Megatron: a backbone can be described, checked and
partitioned without building a single tensor. Modules are built later, layer by layer, through
``Layer.build``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

COMPUTE = "compute"
"""The dtype name that stands for the run's parameter dtype (fp32, or bf16 under ``--bf16``)."""
DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4,
               "bool": 1}  # fmt: skip
"""The other dtypes of boundaries, skips and conditioning, and the bytes of their elements."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape of one tensor of a microbatch, without its batch dimension.

    ``batch_dim`` says where the batch dimension is inserted: 0 for images ``[b, c, h, w]``,
    1 for token streams in Megatron's order ``[s, b, h]``; None: there is none, the tensor is one
    for all samples (T5's bias of positions), and counts like that of one sample. ``dtype`` is
    ``"compute"`` or the name of a torch dtype (``"float32"``, ``"int64"``). The first dimension of
    a ``sequence`` is divided among tensor-parallel ranks under sequence parallelism. ``others`` are
    its shapes in microbatches of the chain's other shapes (see ``shapes``); sizes in values and
    bytes are those of the largest.
    """

    shape: tuple[int, ...]
    batch_dim: int | None = 0
    dtype: str = COMPUTE
    sequence: bool = False
    others: tuple[tuple[int, ...], ...] = ()

    def at(self, which: int) -> TensorSpec:
        """The tensor in microbatches of the chain's shape ``which`` alone; 0 is the first."""
        if not which and not self.others:
            return self
        return replace(self, shape=(self.shape, *self.others)[which], others=())

    def full_shape(self, micro_batch_size: int) -> tuple[int, ...]:
        """The shape with the batch dimension inserted."""
        if self.batch_dim is None:
            return self.shape
        return (*self.shape[: self.batch_dim], micro_batch_size, *self.shape[self.batch_dim :])

    @property
    def numel_per_sample(self) -> int:
        """Number of elements per sample."""
        return max(map(math.prod, (self.shape, *self.others)))

    @property
    def differentiable(self) -> bool:
        """Whether such a tensor can have a gradient: it holds neither whole numbers nor a mask."""
        return self.dtype not in ("int64", "int32", "bool")

    def bytes_per_sample(self, compute_bytes: int) -> int:
        """Bytes of a sample, where an element of ``"compute"`` has ``compute_bytes``."""
        return self.numel_per_sample * DTYPE_BYTES.get(self.dtype, compute_bytes)


@dataclass(frozen=True)
class Layer:
    """One link of the chain: the smallest piece that a stage can begin or end at.

    The module that ``build`` returns is called as
    ``module(inputs, skips, conditioning) -> tuple`` where ``inputs`` is the tuple of boundary
    tensors (as in ``inputs``), ``skips`` maps each name in ``pops`` to its tensor, and
    ``conditioning`` maps each name in ``uses`` to its tensor. It returns the boundary tensors of
    ``outputs`` followed by the tensors of ``provides``, in order.

    ``pushes`` maps a skip's name to the index of the *boundary output* that it is (in every known
    backbone a skip is the output of a layer; see torchgpipe's stash/pop). ``provides`` are
    conditioning tensors that this layer computes for any later layer (a timestep embedding).
    ``name`` is the prefix of the layer's parameters in checkpoints; those of a ``qualified`` layer
    have names of the whole model, and nothing is put before them. Torch's generator has a seed of
    the layer's own when it is built, for a ``qualified`` one that of the run.

    An ``embedder`` only provides: it reads nothing but the batch, its module returns its inputs
    as they are before what it provides, and called without inputs returns only that. So it can
    run anywhere, and on several devices.

    ``trained`` says whether a parameter of its module may ask for a gradient (``requires_grad``).
    Where none does, no gradient is computed for this layer's sake (see ``gradients``).

    ``beside`` maps outputs to the inputs that they are, by index: tensors that pass by. The layer
    returns such an input as it is, and gives it no gradient but its output's.

    A module's attribute ``undivided``, if it has one, lists parameters whose gradients are not to
    wait where backward passes are split: those that an operation uses too whose do not.

    In a cascade the names of a layer and of all that it reads and gives begin with ``chain``, its
    chain's; its module knows nothing of that.

    In a chain of several shapes a module that has an attribute ``chain_shape`` is told there which
    one it is called with (0 is the first).
    """

    name: str
    build: Callable[[Any], Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    pushes: Mapping[str, int] = field(default_factory=dict)
    pops: Mapping[str, TensorSpec] = field(default_factory=dict)
    provides: Mapping[str, TensorSpec] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    embedder: bool = False
    qualified: bool = False
    trained: bool = True
    beside: Mapping[int, int] = field(default_factory=dict)
    chain: str = ""

    def own(self, name: str) -> str:
        """What its chain calls ``name`` where it is alone."""
        return name.removeprefix(f"{self.chain}.") if self.chain else name

    @property
    def prefix(self) -> str:
        """What comes before the names of its module's parameters in those of the whole model."""
        return "" if self.qualified else f"{self.name}."


@dataclass(frozen=True)
class Skip:
    """A named edge from the layer at index ``source`` to the layer at index ``destination``."""

    name: str
    source: int
    destination: int
    output_index: int
    spec: TensorSpec


@dataclass(frozen=True)
class Conditioning:
    """A tensor that layer ``source`` computes and the layers ``consumers`` use."""

    name: str
    source: int
    consumers: tuple[int, ...]
    spec: TensorSpec


@dataclass(frozen=True)
class Backbone:
    """An ordered chain of layers, or several, one after another (see ``cascade``).

    ``batch_fields`` are conditioning tensors that come with the batch (timesteps, labels, text
    states); every device reads them from its own data loader, so they are never sent.
    ``record`` is what rebuilds this backbone (``{"name": ..., "options": {...}}``); it is stored
    in checkpoints and compared on load. ``kept`` are settings of the ``config.json`` that it was
    read from which make no difference here, for writing them again.

    What others must know of the model and cannot see in its layers, it says:
    ``num_classes``, how many classes the batch field ``labels`` tells apart (0 to
    ``num_classes`` - 1), and ``null_label``, the label of samples that lose theirs (None: there is
    none), as classifier-free guidance needs; ``num_heads``, the numbers of heads of its attentions,
    which tensor-parallel ranks share (a number of ranks must divide each); ``patch_size``, the side
    of the squares of the sample that its tokens are, which tells a shift of the diffusion process
    how large the picture is. ``shares`` says which part of the microbatches is of which shape
    (empty: as many of each), for planning. ``parts`` are a cascade's backbones by the names of
    their chains; what each says of itself, only it knows.
    """

    name: str
    layers: tuple[Layer, ...]
    batch_fields: Mapping[str, TensorSpec] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    num_classes: int | None = None
    null_label: int | None = None
    num_heads: tuple[int, ...] = ()
    patch_size: int = 1
    shares: tuple[float, ...] = ()
    parts: Mapping[str, Backbone] = field(default_factory=dict)

    @property
    def starts(self) -> tuple[int, ...]:
        """The layers where a chain begins."""
        chains = [layer.chain for layer in self.layers]
        return tuple(i for i, chain in enumerate(chains) if not i or chain != chains[i - 1])

    @property
    def ends(self) -> tuple[int, ...]:
        """The layers where a chain ends."""
        return tuple(start - 1 for start in (*self.starts[1:], len(self.layers)))

    @property
    def num_shapes(self) -> int:
        """How many shapes a microbatch may have."""
        return 1 + len(self.input_spec.others)

    @property
    def saved_record(self) -> dict[str, Any]:
        """``record`` and ``kept``, as a checkpoint holds them."""
        return {**self.record, "kept": dict(self.kept)}

    @property
    def input_spec(self) -> TensorSpec:
        """The noisy sample that the first layer takes."""
        return self.layers[0].inputs[0]

    @property
    def output_spec(self) -> TensorSpec:
        """The prediction that the last layer returns."""
        return self.layers[-1].outputs[0]

    @property
    def takes_prediction(self) -> bool:
        """Whether the first layer takes twice the channels of a prediction: a noisy sample, and
        behind it what was predicted of it (self-conditioning)."""
        channels, *sides = self.output_spec.shape or (0,)
        return self.input_spec.shape == (2 * channels, *sides)

    @property
    def sample_spec(self) -> TensorSpec:
        """The noisy sample: what the first layer takes, but for a prediction behind it."""
        return self.output_spec if self.takes_prediction else self.input_spec

    @property
    def image_tokens(self) -> int:
        """How many tokens the sample has: its patches, or its places where there are none.

        As diffusers' pipelines count them for a shift that depends on the picture. A sample
        ``(n, c)`` is packed tokens; of a video those of one frame count.
        """
        shape = self.input_spec.shape
        if len(shape) < 3:
            return math.prod(shape[:-1])
        height, width = shape[-2:]
        return (height // self.patch_size) * (width // self.patch_size)

    @property
    def divides_sequences(self) -> bool:
        """Whether there are sequences between layers that two ranks can share."""
        lengths = [length for _, length in self._sequences]
        return bool(lengths) and not any(length % 2 for length in lengths)

    @property
    def _sequences(self) -> list[tuple[str, int]]:
        """The layer and the length of every sequence that one takes or returns."""
        return [
            (layer.name, shape[0])
            for layer in self.layers
            for spec in (*layer.inputs, *layer.outputs)
            for shape in (spec.shape, *spec.others)
            if spec.sequence
        ]

    def divide_sequences(self, parts: int) -> Backbone:
        """The same chain where each rank holds one of ``parts`` equal parts of every sequence.

        Raises ValueError that lists the sequences which do not divide.
        """
        lengths = {(name, length) for name, length in self._sequences if length % parts}
        if lengths:
            first = {length: name for name, length in sorted(lengths, reverse=True)}
            raise ValueError(
                f"sequence parallelism over {parts} ranks: "
                + "; ".join(f"{n} tokens of {first[n]} do not divide" for n in sorted(first))
            )

        def divide(spec: TensorSpec) -> TensorSpec:
            if not spec.sequence:
                return spec
            first, *others = (
                (shape[0] // parts, *shape[1:]) for shape in (spec.shape, *spec.others)
            )
            return replace(spec, shape=first, others=tuple(others))

        layers = tuple(
            replace(
                layer,
                inputs=tuple(map(divide, layer.inputs)),
                outputs=tuple(map(divide, layer.outputs)),
                pops={name: divide(spec) for name, spec in layer.pops.items()},
                provides={name: divide(spec) for name, spec in layer.provides.items()},
            )
            for layer in self.layers
        )
        return replace(self, layers=layers)

    @property
    def skips(self) -> tuple[Skip, ...]:
        """All skip edges, in order of their sources. Assumes a checked backbone."""
        popped = {name: i for i, layer in enumerate(self.layers) for name in layer.pops}
        return tuple(
            Skip(name, i, popped[name], index, layer.outputs[index])
            for i, layer in enumerate(self.layers)
            for name, index in layer.pushes.items()
        )

    @property
    def conditioning(self) -> tuple[Conditioning, ...]:
        """All conditioning edges whose source is a layer (not the batch)."""
        return tuple(
            Conditioning(
                name,
                i,
                tuple(j for j, user in enumerate(self.layers) if name in user.uses),
                spec,
            )
            for i, layer in enumerate(self.layers)
            for name, spec in layer.provides.items()
        )
