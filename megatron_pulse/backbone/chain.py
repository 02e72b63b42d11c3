"""Description of a backbone: an ordered chain of layers with named skips and conditioning.

This module imports neither torch nor Megatron. A backbone can be described, checked and partitioned
without building a tensor. ``Layer.build`` builds modules later, layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

COMPUTE = "compute"
"""dtype name for the run's parameter dtype (fp32, or bf16 under ``--bf16``)."""
DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4,
               "bool": 1}  # fmt: skip
"""Other dtypes of boundaries, skips and conditioning, with bytes per element."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape of one tensor of a microbatch, without its batch dimension.

    - ``batch_dim``: position of the batch dimension. 0 for images ``[b, c, h, w]``, 1 for token
      streams in Megatron's order ``[s, b, h]``. None for a tensor common to all samples (T5's
      position bias), counted as one sample.
    - ``dtype``: ``"compute"`` or the name of a torch dtype (``"float32"``, ``"int64"``).
    - ``sequence``: the first dimension holds tokens. Context-parallel ranks divide them; under
      sequence parallelism tensor-parallel ranks do too.
    - ``others``: shapes in microbatches of the chain's other shapes (see ``shapes``). Sizes in
      elements and bytes refer to the largest.
    - ``detached``: no parameter has a part in the tensor. Attention masks of floats are an example:
      with a gradient they would have another kernel than where they are computed.
    """

    shape: tuple[int, ...]
    batch_dim: int | None = 0
    dtype: str = COMPUTE
    sequence: bool = False
    others: tuple[tuple[int, ...], ...] = ()
    detached: bool = False

    def at(self, shape_index: int) -> TensorSpec:
        """Spec in microbatches of the chain's shape ``shape_index`` alone; 0 is the first."""
        if not shape_index and not self.others:
            return self
        return replace(self, shape=(self.shape, *self.others)[shape_index], others=())

    def full_shape(self, micro_batch_size: int) -> tuple[int, ...]:
        """Shape including the batch dimension."""
        if self.batch_dim is None:
            return self.shape
        return (*self.shape[: self.batch_dim], micro_batch_size, *self.shape[self.batch_dim :])

    @property
    def numel_per_sample(self) -> int:
        """Number of elements per sample."""
        return max(map(math.prod, (self.shape, *self.others)))

    @property
    def differentiable(self) -> bool:
        """True if the tensor can have a gradient: neither integers nor detached."""
        return not self.detached and self.dtype not in ("int64", "int32", "bool")

    def bytes_per_sample(self, compute_bytes: int) -> int:
        """Bytes per sample, with ``compute_bytes`` per element of ``"compute"``."""
        return self.numel_per_sample * DTYPE_BYTES.get(self.dtype, compute_bytes)


@dataclass(frozen=True)
class Layer:
    """One link of the chain, the smallest unit of partitioning.

    The module returned by ``build`` is called as ``module(inputs, skips, conditioning) -> tuple``.
    ``inputs`` is the tuple of boundary tensors. ``skips`` maps each name in ``pops`` to its tensor,
    ``conditioning`` each name in ``uses``. The module returns the boundary tensors of ``outputs``,
    followed by the tensors of ``provides``, in order.

    - ``name``: prefix of the layer's parameters in checkpoints. At construction, torch's generator
      has a seed of the layer's own.
    - ``qualified``: parameters have names of their whole chain, without the layer's name. At
      construction, torch's generator has the run's seed.
    - ``pushes``: index of the *boundary output* that each pushed skip is, by name. In every known
      backbone a skip is the output of a layer; see torchgpipe's stash/pop.
    - ``provides``: conditioning tensors computed for any later layer, such as a timestep embedding.
    - ``embedder``: the layer only provides, and reads only the batch. Its module returns its inputs
      unchanged before the provided tensors; without inputs, only the latter. An embedder can run
      anywhere, and on several devices.
    - ``trained``: a parameter of the module may have ``requires_grad``. Otherwise no gradient is
      computed for this layer's sake (see ``gradients``).
    - ``beside``: maps indices of outputs to the inputs that they equal. The layer returns such an
      input unchanged, and adds nothing to its gradient.
    - ``attends``: for each self-attention, the indices of the inputs whose tokens attend to each
      other. Context-parallel ranks exchange their queries, keys, values and results.
    - ``chain``: name of the layer's chain in a cascade. Names of the layer and of its
      skips, fields and conditioning begin with this name; its module does not know the prefix.

    Optional attributes of the module:

    - ``undivided``: parameters whose gradients are not deferred in split backwards, because an
      operation without deferral uses them too.
    - ``chain_shape``: set to the index of the microbatch's shape before each call, in a chain of
      several shapes (0 is the first).
    - ``adapter_dropout``: its ``key`` is set before each call to the run's seed and the
      microbatch's first position, or to None outside of training.
    - ``token_slices``, also of modules within: set to the number of slices in which its token-wise
      part runs (see ``token_slices.TokenSlices``).
    - ``begin_magnitudes()``, also of modules within: sets DoRA's magnitudes to the norms of the
      present weights, but for those of a file.
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
    attends: tuple[tuple[int, ...], ...] = ()
    chain: str = ""

    def own(self, name: str) -> str:
        """Name that the layer's chain uses for ``name`` outside a cascade."""
        return name.removeprefix(f"{self.chain}.") if self.chain else name

    @property
    def prefix(self) -> str:
        """Prefix of the module's parameter names in the whole model."""
        if self.qualified:
            return f"{self.chain}." if self.chain else ""
        return f"{self.name}."


@dataclass(frozen=True)
class Skip:
    """Named edge from the layer at index ``source`` to the layer at index ``destination``."""

    name: str
    source: int
    destination: int
    output_index: int
    spec: TensorSpec


@dataclass(frozen=True)
class Conditioning:
    """Tensor that layer ``source`` computes and the layers ``consumers`` use."""

    name: str
    source: int
    consumers: tuple[int, ...]
    spec: TensorSpec


@dataclass(frozen=True)
class Backbone:
    """Ordered chain of layers, or several chains one after another (see ``cascade``).

    - ``batch_fields``: conditioning tensors of the batch (timesteps, labels, text states). Every
      device reads them from its own data loader, so they are never sent.
    - ``record``: description that rebuilds this backbone (``{"name": ..., "options": {...}}``),
      stored in checkpoints and compared on load.
    - ``kept``: settings of the source ``config.json`` without effect here, kept for writing it
      again.
    - ``num_classes``: number of classes of the batch field ``labels`` (0 to ``num_classes`` - 1).
    - ``null_label``: label of samples whose label is dropped for classifier-free guidance (None:
      there is none).
    - ``num_heads``: numbers of attention heads, each divisible by the number of tensor-parallel
      ranks.
    - ``ring_attention``: False if attention needs all tokens of a head at once, so that
      context-parallel ranks must divide the heads.
    - ``patch_size``: side of the sample's square patches. A resolution-dependent shift of the
      diffusion process needs this size.
    - ``shares``: fraction of microbatches of each shape, for planning (empty: equal).
    - ``parts``: backbones of a cascade by chain name. The fields above are then those of each part.
    - ``whole``: backbone of all tokens, if the sequences here are a context-parallel rank's shares.
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
    ring_attention: bool = True
    patch_size: int = 1
    shares: tuple[float, ...] = ()
    parts: Mapping[str, Backbone] = field(default_factory=dict)
    whole: Backbone | None = None

    @property
    def starts(self) -> tuple[int, ...]:
        """Indices of the layers where a chain begins."""
        chains = [layer.chain for layer in self.layers]
        return tuple(i for i, chain in enumerate(chains) if not i or chain != chains[i - 1])

    @property
    def ends(self) -> tuple[int, ...]:
        """Indices of the layers where a chain ends."""
        return tuple(start - 1 for start in (*self.starts[1:], len(self.layers)))

    @property
    def num_shapes(self) -> int:
        """Number of shapes that a microbatch may have."""
        return 1 + len(self.input_spec.others)

    @property
    def saved_record(self) -> dict[str, Any]:
        """``record`` and ``kept``, as stored in a checkpoint."""
        return {**self.record, "kept": dict(self.kept)}

    @property
    def input_spec(self) -> TensorSpec:
        """Spec of the first layer's input, the noisy sample."""
        return self.layers[0].inputs[0]

    @property
    def output_spec(self) -> TensorSpec:
        """Spec of the last layer's output, the prediction."""
        return self.layers[-1].outputs[0]

    @property
    def takes_prediction(self) -> bool:
        """True if the first layer takes twice the channels of a prediction (self-conditioning).

        The input is then a noisy sample followed by an earlier prediction.
        """
        channels, *sides = self.output_spec.shape or (0,)
        return self.input_spec.shape == (2 * channels, *sides)

    @property
    def sample_spec(self) -> TensorSpec:
        """Spec of the noisy sample: the first layer's input without an appended prediction."""
        return self.output_spec if self.takes_prediction else self.input_spec

    @property
    def image_tokens(self) -> int:
        """Number of tokens of the sample: patches, or positions without patches.

        Counted as in diffusers' pipelines for a resolution-dependent shift. A sample ``(n, c)``
        consists of packed tokens; all frames of a video ``(c, f, h, w)`` count.
        """
        shape = self.input_spec.shape
        if len(shape) < 3:
            return math.prod(shape[:-1])
        *frames, height, width = shape[1:]
        return math.prod(frames) * (height // self.patch_size) * (width // self.patch_size)

    @property
    def divides_sequences(self) -> bool:
        """True if there are sequences between layers, all of even length."""
        lengths = [length for _, _, length in self.sequences]
        return bool(lengths) and not any(length % 2 for length in lengths)

    @property
    def sequences(self) -> list[tuple[str, int, int]]:
        """Layer name, shape index and length of every sequence in layer inputs and outputs."""
        return [
            (layer.name, shape_index, shape[0])
            for layer in self.layers
            for spec in (*layer.inputs, *layer.outputs)
            for shape_index, shape in enumerate((spec.shape, *spec.others))
            if spec.sequence
        ]

    def divide_sequences(self, parts: int) -> Backbone:
        """Backbone of a rank that holds one of ``parts`` equal parts of every sequence.

        Raises ValueError listing the sequences that do not divide.
        """
        lengths = {each for each in self.sequences if each[-1] % parts}
        if lengths:
            first = {n: (name, shape) for name, shape, n in sorted(lengths, reverse=True)}
            raise ValueError(
                f"sequence parallelism over {parts} ranks: "
                + "; ".join(
                    f"{n} tokens of {self.place_of(*first[n])} do not divide" for n in sorted(first)
                )
            )
        return self.with_sequences(lambda length: length // parts)

    def with_sequences(self, own_length: Callable[[int], int]) -> Backbone:
        """Backbone of a rank that holds ``own_length(n)`` of the n tokens of every sequence."""

        def divide(spec: TensorSpec) -> TensorSpec:
            if not spec.sequence:
                return spec
            first, *others = (
                (own_length(shape[0]), *shape[1:]) for shape in (spec.shape, *spec.others)
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

    def place_of(self, layer_name: str, shape_index: int) -> str:
        """A layer in messages, with the sample's shape if there are several."""
        if self.num_shapes == 1:
            return layer_name
        shape = "x".join(map(str, self.input_spec.at(shape_index).shape))
        return f"{layer_name} in samples of {shape}"

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
        """All conditioning edges whose source is a layer, not the batch."""
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
