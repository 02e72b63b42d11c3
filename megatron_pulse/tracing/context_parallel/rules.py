"""Rules by which tokens stay divided through an operation.

A rule gets the operation's node and adds to the divided graph what a rank computes of it.
It returns the new node with the division of its result, or raises NoRule.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from megatron_pulse.adapters.kronecker import add_product
from megatron_pulse.adapters.low_rank import add_dora_linear, add_linear
from megatron_pulse.adapters.quantized_linear import quantized_linear
from megatron_pulse.backbone.token_shares import uses_ring
from megatron_pulse.tracing.context_parallel.collectives import attention
from megatron_pulse.tracing.context_parallel.division import Division
from megatron_pulse.tracing.context_parallel.graph_builder import Divided, GraphBuilder, NoRule
from megatron_pulse.tracing.context_parallel.ring import ring_attention
from megatron_pulse.tracing.graph_analysis import argument, operation, written

aten = torch.ops.aten

LINEAR_MAPS = frozenset({quantized_linear, add_linear, add_dora_linear, add_product})
"""Functions of the package in graphs with adapters and quantised weights: each as linear maps."""

type Rule = Callable[[GraphBuilder, fx.Node], tuple[fx.Node, Divided]]


def rule_of(node: fx.Node) -> Rule:
    """Rule of an operation."""
    name = operation(node).partition(".")[0]
    if node.target is operator.getitem:
        return _getitem
    if node.target in LINEAR_MAPS:
        return _features
    if name in _RULES:
        return _RULES[name]
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return _pointwise
    return _unknown


def _unknown(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    raise NoRule(_REASONS.get(operation(node).partition(".")[0].rstrip("123d"), "no rule for it"))


_REASONS = {
    "conv": "convolutions are not divided: wide ones need their neighbours' tokens (halos)",
    "group_norm": "its statistics are over all tokens",
    "batch_norm": "its statistics are over all tokens",
    "matmul": "a product of two divided values",
    "wrap_with_autocast": "a region of autocast",
    "wrap_with_set_grad_enabled": "a region without gradients",
}


def _dims(node: fx.Node, rank: int, name: str = "dim") -> list[int]:
    """Dimensions that an argument names, counted from 0."""
    given = argument(node, name)
    given = given if isinstance(given, list | tuple) else [given]
    return [dim % rank for dim in given]


def _first(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Division, Tensor]:
    """First argument, its division and its value; raises NoRule unless only it is divided."""
    given = node.args[0]
    if not isinstance(given, fx.Node) or builder.divided_inputs(node) != [given]:
        raise NoRule("another operand is divided")
    division = builder.divisions[given]
    assert isinstance(division, Division)
    return given, division, builder.values[given]


def _pointwise(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Element by element, with broadcasting; what is whole and as long is narrowed."""
    if any(each not in builder.divisions for each in written(node)):
        raise NoRule("it writes divided tokens to a whole value")
    return builder.copy_narrowed(node, builder.values[node].dim())


def _like_first(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Element by element of the first argument; others give a dtype and a device alone."""
    return builder.copy(node), builder.divisions.get(node.args[0])


def _last(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Along trailing dimensions alone."""
    _, division, value = _first(builder, node)
    shape = argument(node, "normalized_shape")
    if division.dim >= value.dim() - (1 if shape is None else len(shape)):
        raise NoRule("it is along the tokens")
    return builder.copy(node), division


def _features(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """A function of the package, along the last dimension of all divided operands."""
    divisions = {builder.divisions[each] for each in builder.divided_inputs(node)}
    if len(divisions) != 1:
        raise NoRule("its operands are divided in two ways")
    return builder.copy(node), divisions.pop()


def _embedding(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    indices = node.args[1]
    if builder.divided_inputs(node) != [indices]:
        raise NoRule("its table is divided")
    return builder.copy(node), builder.divisions[indices]


def _along(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Along dimensions that it names and keeps."""
    _, division, value = _first(builder, node)
    name = "dims" if operation(node).startswith(("flip", "roll")) else "dim"
    if argument(node, name) in (None, []) or division.dim in _dims(node, value.dim(), name):
        raise NoRule("it is along the tokens")
    return builder.copy(node), division


def _reduction(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    _, division, value = _first(builder, node)
    if argument(node, "dim") in (None, []):
        raise NoRule("a reduction over tokens")
    gone = _dims(node, value.dim())
    if division.dim in gone:
        raise NoRule("a reduction over tokens")
    before = 0 if argument(node, "keepdim") else sum(dim < division.dim for dim in gone)
    return builder.copy(node), division.at(division.dim - before)


def _shaped(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Another shape, whose tokens are a dimension with as many values before it."""
    given, division, value = _first(builder, node)
    before, after = tuple(value.shape), tuple(builder.values[node].shape)
    if value.dtype != builder.values[node].dtype:
        raise NoRule("it reads the values as another dtype")
    outer = math.prod(before[: division.dim])
    dims = [
        dim
        for dim, length in enumerate(after)
        if length == division.length and math.prod(after[:dim]) == outer
    ]
    if not dims:
        raise NoRule(f"{list(before)} becomes {list(after)}, where tokens are no dimension")
    moved = division.at(dims[-1])
    # a view that is written to must stay one
    target = aten.view.default if builder.is_written(node) else aten.reshape.default
    return builder.call(target, builder.env[given], list(builder.own_shape(node, moved))), moved


def _expand(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    given, division, value = _first(builder, node)
    moved = division.at(division.dim + builder.values[node].dim() - value.dim())
    shape = list(builder.own_shape(node, moved))
    return builder.call(aten.expand.default, builder.env[given], shape), moved


def _repeat(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    _, division, value = _first(builder, node)
    repeats: Sequence[int] = argument(node, "repeats") or argument(node, "dims")
    dim = division.dim + max(len(repeats) - value.dim(), 0)
    if repeats[len(repeats) - value.dim() + division.dim] != 1:
        raise NoRule("it repeats the tokens")
    return builder.copy(node), division.at(dim)


def _permuted(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    _, division, value = _first(builder, node)
    assert callable(node.target)
    probe = torch.empty(tuple(range(2, 2 + value.dim())), device="meta")
    shape = node.target(probe, *node.args[1:], **node.kwargs).shape
    return builder.copy(node), division.at(list(shape).index(division.dim + 2))


def _unbind(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    _, division, value = _first(builder, node)
    (dim,) = _dims(node, value.dim())
    if dim == division.dim:
        raise NoRule("it takes tokens apart")
    kept = division.at(division.dim - (dim < division.dim))
    several = builder.values[node]
    return builder.copy(node), kept if isinstance(several, Tensor) else (kept,) * len(several)


def _split(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Into parts; along the tokens, into whole segments."""
    given, division, value = _first(builder, node)
    (dim,) = _dims(node, value.dim())
    parts = builder.values[node]
    if dim != division.dim:
        return builder.copy(node), (division,) * len(parts)
    found, start = [], 0
    for part in parts:
        found.append(_segments(division, start, start + part.shape[dim])[2])
        start += part.shape[dim]
    sizes = [sum(builder.own_segments(each)) for each in found]
    target = aten.split_with_sizes.default
    return builder.call(target, builder.env[given], sizes, dim), tuple(found)


def _slice(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    given, division, value = _first(builder, node)
    (dim,) = _dims(node, value.dim())
    if dim != division.dim:
        return builder.copy(node), division
    start = argument(node, "start") or 0
    start = min(start if start >= 0 else start + division.length, division.length)
    if (argument(node, "step") or 1) != 1:
        raise NoRule("it takes tokens apart")
    first, last, part = _segments(division, start, start + builder.values[node].shape[dim])
    own = builder.own_segments(division)
    bounds = sum(own[:first]), sum(own[:last])
    return builder.call(aten.slice.Tensor, builder.env[given], dim, *bounds), part


def _segments(division: Division, start: int, end: int) -> tuple[int, int, Division]:
    """Numbers of the segments from token ``start`` to ``end``, and their division."""
    borders = [sum(division.segments[:i]) for i in range(len(division.segments) + 1)]
    if start not in borders or end not in borders:
        raise NoRule(f"tokens {start} to {end} of segments that end at {borders[1:]}")
    first, last = borders.index(start), borders.index(end)
    return first, last, Division(division.dim, division.segments[first:last])


def _getitem(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    several, which = node.args
    divisions = builder.divisions[several]
    assert isinstance(divisions, tuple) and isinstance(which, int)
    return builder.copy(node), divisions[which]


def _stack(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    made, division = builder.copy_narrowed(node, builder.values[node].dim() - 1)
    (dim,) = _dims(node, builder.values[node].dim())
    return made, division.at(division.dim + (dim <= division.dim))


def _cat(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """One after another; along the tokens, what is whole becomes divided segments."""
    (dim,) = _dims(node, builder.values[node].dim())
    divided = [builder.divisions[each] for each in builder.divided_inputs(node)]
    (first, *_) = (each for each in divided if isinstance(each, Division))
    if first.dim != dim:
        return builder.copy_narrowed(node, builder.values[node].dim())
    parts, segments = [], list[int]()
    for each in node.args[0]:
        assert isinstance(each, fx.Node)
        if each not in builder.divisions:
            division = Division(dim, (builder.values[each].shape[dim],))
            parts.append(builder.narrow(builder.env[each], division))
        elif (division := builder.division_of(each)).dim == dim:
            parts.append(builder.env[each])
        else:
            raise NoRule("values divided in two dimensions")
        segments += division.segments
    return builder.call(aten.cat.default, parts, dim), Division(dim, tuple(segments))


def _matmul(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Product with a whole matrix, or with whole matrices of the same batch dimensions."""
    left, right = node.args[:2]
    rank, divided = builder.values[node].dim(), builder.divided_inputs(node)
    for given, other, contracted in ((left, right, -1), (right, left, -2)):
        if divided != [given]:
            continue
        division, value = builder.division_of(given), builder.values[given]
        from_end, others = division.dim - value.dim(), builder.values[other].dim()
        is_batched = from_end < -2 and others > 2
        if from_end != contracted and not is_batched and value.dim() > 1 < others:
            return builder.copy(node), division.at(rank + from_end)
    raise NoRule("a product over tokens, or of two divided values")


def _pad(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    _, division, value = _first(builder, node)
    pads = argument(node, "pad")
    if value.dim() - division.dim <= len(pads) // 2:
        raise NoRule("it pads the tokens")
    return builder.copy(node), division


def _new(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """A new whole tensor, like its input in dtype and device alone."""
    return builder.copy(node), None


def _attention(builder: GraphBuilder, node: fx.Node) -> tuple[fx.Node, Divided]:
    """Nothing is sent for whole keys and values; else all-to-alls over heads, or a ring if those do
    not divide.
    """
    query, key, value = node.args[:3]
    mask, is_causal = argument(node, "attn_mask"), bool(argument(node, "is_causal"))
    of_query, of_key, of_value = (builder.divisions.get(each) for each in (query, key, value))
    if mask in builder.divisions:
        raise NoRule("a divided mask")
    if of_key != of_value or not isinstance(of_query, Division):
        raise NoRule("queries are whole, but keys or values are divided")
    if builder.values[query].dim() != 4 or of_query.dim != 2:
        raise NoRule("queries are not [batch, heads, tokens, width] with divided tokens")
    if of_key is None:
        if is_causal:
            raise NoRule("a causal mask of whole keys")
        found = None if mask is None else builder.values[mask]
        if found is None or found.dim() < 2 or found.shape[-2] == 1:
            return builder.copy(node), of_query
        own = builder.narrow(builder.env[mask], of_query.at(found.dim() - 2))
        return builder.copy(node, {mask: own}), of_query
    if not isinstance(of_key, Division) or of_key.dim != 2:
        raise NoRule("keys are not divided along their tokens")
    if is_causal and (len(of_query.segments) > 1 or of_query != of_key):
        raise NoRule("a causal mask over several segments")
    heads = [builder.values[each].shape[1] for each in (query, key)]
    if uses_ring(heads, builder.size):
        return _ring(builder, node, heads), of_query
    settings = {name: argument(node, name) for name in ("is_causal", "scale", "enable_gqa")}
    made = builder.call(
        attention,
        *(builder.env[each] for each in (query, key, value)),
        None if mask is None else builder.env[mask],
        (of_query.segments, of_key.segments),
        (of_query.counts(builder.size), of_key.counts(builder.size)),
        settings,
        builder.group,
    )
    builder.exchanged(node)
    return made, of_query


def _ring(builder: GraphBuilder, node: fx.Node, heads: Sequence[int]) -> fx.Node:
    """Attention of divided keys whose heads do not divide."""
    mask = argument(node, "attn_mask")
    counts = " and ".join(map(str, dict.fromkeys(heads)))
    whose = f"its {counts} heads do not divide over {builder.size} ranks, and ring attention"
    if argument(node, "is_causal"):
        raise NoRule(f"{whose} has no causal mask")
    if mask is not None and builder.values[mask].dtype != torch.bool:
        raise NoRule(f"{whose} takes boolean masks alone")
    query, key, value = node.args[:3]
    made = builder.call(
        ring_attention,
        *(builder.env[each] for each in (query, key, value)),
        None if mask is None else builder.env[mask],
        (builder.division_of(query).segments, builder.division_of(key).segments),
        argument(node, "scale"),
        builder.group,
    )
    builder.visited(node)
    return made


_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("to", "contiguous", "dropout", "clone", "detach", "alias", "copy_"),
            *("fill_", "empty_like", "zeros_like", "ones_like", "full_like", "lift_fresh_copy"),
            *("__and__", "__or__", "__xor__", "masked_fill", "where", "expand_as", "square"),
            *("float_power", "rsub"),
        ),
        _pointwise,
    ),
    **dict.fromkeys(("linear", "layer_norm", "rms_norm", "view_as_complex"), _last),
    **dict.fromkeys(
        (
            *("softmax", "_softmax", "log_softmax", "cumsum", "glu", "flip", "roll"),
            *("repeat_interleave", "index_select"),
        ),
        _along,
    ),
    **dict.fromkeys(
        (
            *("mean", "sum", "amax", "amin", "var", "std", "linalg_vector_norm", "norm"),
            *("logsumexp", "any", "all"),
        ),
        _reduction,
    ),
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"), _shaped
    ),
    **dict.fromkeys(
        (
            *("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "mT"),
            *("mH", "adjoint", "numpy_T"),
        ),
        _permuted,
    ),
    **dict.fromkeys(("unbind", "select"), _unbind),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split),
    **dict.fromkeys(("slice", "narrow"), _slice),
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **dict.fromkeys(("matmul", "bmm", "mm"), _matmul),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), _new),
    "type_as": _like_first,
    "embedding": _embedding,
    "expand": _expand,
    "stack": _stack,
    "view_as_real": lambda builder, node: (builder.copy(node), _first(builder, node)[1]),
    "scaled_dot_product_attention": _attention,
}
"""Rules of operations by name; others that torch tags as pointwise have that rule."""
