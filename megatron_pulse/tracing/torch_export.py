"""Export of a module's graph, or the reasons why no pipeline can run the module.

Uses ``torch.export`` before dispatch: autograd works on the graph, and linear maps, convolutions,
norms and attention are one node each.
"""

from __future__ import annotations

import inspect
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, fields, is_dataclass
from io import StringIO
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from megatron_pulse.errors import PicklableError, describe_exception, format_faults
from megatron_pulse.tracing.checks.graph_faults import refusals
from megatron_pulse.tracing.checks.module_state import forget_results
from megatron_pulse.tracing.checks.shared_memory import shared_memory
from megatron_pulse.tracing.checks.torch_patches import alike, passes
from megatron_pulse.tracing.checks.untraced_effects import UntracedEffects, watched
from megatron_pulse.tracing.graph_analysis import (
    TORCH,
    GraphAnalysis,
    converts,
    operation,
    value_of,
)
from megatron_pulse.tracing.input_leaves import leaves_of


class DerivationError(PicklableError, ValueError):
    """Module without a possible chain; ``faults`` lists the reasons with source lines."""

    def __init__(self, module: str, faults: list[str]) -> None:
        self.faults = faults
        super().__init__(format_faults(f"{module} cannot run in a pipeline", faults))


@dataclass(frozen=True)
class Exported:
    """Graph of one call of a module.

    - ``inputs``: input nodes with the caller's names (``leaves_of``), which export changes.
    - ``weights``: nodes of parameters.
    - ``names``: qualified name of every parameter, buffer and constant.
    - ``state``: the module's own tensors by these names.
    - ``blocks``: qualified names of its blocks.
    """

    reading: GraphAnalysis
    inputs: Mapping[fx.Node, str]
    weights: frozenset[fx.Node]
    names: Mapping[fx.Node, str]
    state: Mapping[str, Any]
    output: fx.Node
    blocks: frozenset[str]


def export(
    module: nn.Module,
    given: Mapping[str, Any],
    fixed: frozenset[str],
    output: int | None,
    with_lines: bool = True,
) -> Exported:
    """Graph of ``module(**given)``; the inputs ``fixed`` become constants.

    ``output`` is the index of the prediction among several returned tensors. Without
    ``with_lines``, nodes have no source lines, and export takes a quarter less time. Raises
    DerivationError naming operation and source line if export fails.
    """
    name = type(module).__name__
    if faults := list(shared_memory(module)):
        raise DerivationError(name, faults)
    unseen = UntracedEffects()
    forget_results(module)
    try:
        with (
            watched(module) as unseen,
            dataclasses_as_dictionaries(module),
            nullcontext() if with_lines else _without_lines(),
            _use_lazy_graph_module(True),  # else every pass compiles code that nobody runs
            _quiet(),
        ):
            program = torch.export.export(module, (), dict(given), strict=False)
    except Exception as error:
        faults = unseen.faults
        if not passes(error, faults):
            faults = [*faults, _reason(error, module, unseen.suspects)]
        raise DerivationError(name, faults) from error
    finally:
        forget_results(module)
    if unseen.faults:
        raise DerivationError(name, unseen.faults)
    if faults := list(shared_memory(module, program.constants)):
        raise DerivationError(name, faults)
    graph = program.graph
    _drop_identities(graph)
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    result = _result(graph, output, name)
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    users = [n for n in placeholders if kinds[n.name].kind is InputKind.USER_INPUT]
    called = dict(zip(users, leaves_of(given), strict=True))
    leaves = dict(zip(users, leaves_of(given).values(), strict=True))
    state = {**program.constants, **program.state_dict, **dict(module.named_parameters())}
    # a tied weight has one name, whichever of its modules the export names
    first = {id(parameter): n for n, parameter in module.named_parameters()}
    names = {n: kinds[n.name].target for n in placeholders if n not in leaves}
    for node in names:
        if _is_weight(kinds[node.name]):
            names[node] = first[id(module.get_parameter(names[node]))]
    for node in (n for n in nodes if n.op == "get_attr"):
        names[node] = node.target
        state.setdefault(node.target, getattr(program.graph_module, node.target))
    for node in (n for n in users if called[n] in fixed):
        names[node] = f"input {called[node]}"
        state[names[node]] = leaves[node]
    reading = GraphAnalysis(nodes)
    if faults := list(refusals(reading, {**called, **names})):
        raise DerivationError(name, list(alike(faults)))
    return Exported(
        reading,
        {n: called[n] for n in users if n not in names and isinstance(value_of(n), Tensor)},
        frozenset(n for n in names if n.name in kinds and _is_weight(kinds[n.name])),
        names,
        state,
        result,
        _blocks(module),
    )


@contextmanager
def dataclasses_as_dictionaries(module: nn.Module) -> Iterator[None]:
    """Convert a returned dataclass unknown to torch into a dict, within the context."""

    def plain(_module: nn.Module, _args: Any, result: Any) -> Any:
        known = type(result) in pytree.SUPPORTED_NODES
        if known or not is_dataclass(result):
            return None
        return {each.name: getattr(result, each.name) for each in fields(result)}

    handle = module.register_forward_hook(plain)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _without_lines() -> Iterator[None]:
    kept = getattr(fx.config, "do_not_emit_stack_traces", False)  # absent in older torch
    fx.config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx.config.do_not_emit_stack_traces = kept


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's loggers and the printout of a partial graph; a failing export's error
    suffices.
    """
    loggers = [
        each
        for name, each in logging.root.manager.loggerDict.items()
        if name.split(".")[0] == "torch" and isinstance(each, logging.Logger) and not each.disabled
    ]
    for each in loggers:
        each.disabled = True
    printed, graph = StringIO(), None
    try:
        with redirect_stderr(printed):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", None)
        raise
    finally:
        for each in loggers:
            each.disabled = False
        text = printed.getvalue()
        sys.stderr.write(text if graph is None else text.replace(f"{graph}\n", ""))


def _is_weight(spec: Any) -> bool:
    return spec.kind is InputKind.PARAMETER


def _blocks(module: nn.Module) -> frozenset[str]:
    """Qualified names of the blocks: members of lists in which all members have children.

    Without such lists: the outermost submodules with children, if there are several. Without those:
    all submodules with parameters of their own.
    """
    members = {
        f"{name}.{key}".lstrip(".")
        for name, parent in module.named_modules()
        if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        and all(child._modules for child in parent.children())
        for key in parent._modules
    }
    if members:
        return frozenset(members)
    name, parts = "", module
    while len(list(parts.children())) == 1:
        ((key, parts),) = parts.named_children()
        name = f"{name}.{key}".lstrip(".")
    outermost = {
        f"{name}.{key}".lstrip(".") for key, part in parts.named_children() if part._modules
    }
    if len(outermost) > 1:
        return frozenset(outermost)
    return frozenset(name for name, part in module.named_modules() if name and part._parameters)


def _reason(error: Exception, module: nn.Module, suspects: Sequence[str]) -> str:
    """Text of an export error, with the last source line of the model on its stack.

    If the cause is a tensor from outside the trace, suspicious calls are named instead.
    """
    sources = {inspect.getsourcefile(type(m)) for m in module.modules()}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename in sources and not frame.filename.startswith(TORCH)
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    said = describe_exception(error)
    if "found a fake tensor in the exported program constant" in said:
        where, said = (
            "",
            "it uses a tensor that is not computed from its inputs: "
            + (", ".join(suspects) or "does it keep one between calls, in a cache?"),
        )
    dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
    return (
        f"torch.export cannot follow it{where}: {said} (exported in "
        f"{', '.join(sorted(dtypes)) or 'no dtype'}; the dtype is set by --dtype, in training by "
        "--bf16 and --fp16, in 'pulse module' by --option dtype=, else by the module itself)"
    )


def _result(graph: fx.Graph, output: int | None, name: str) -> fx.Node:
    """Node of the prediction, which becomes the graph's only result."""
    last = list(graph.nodes)[-1]
    results = [n for n in pytree.tree_leaves(last.args) if isinstance(n, fx.Node)]
    if output is None and len(results) != 1:
        found = ", ".join(f"{i}: {list(value_of(n).shape)}" for i, n in enumerate(results))
        raise DerivationError(
            name,
            [
                f"it returns {len(results)} tensors ({found}), but a chain returns one. Name the "
                "prediction, e.g. output=0"
            ],
        )
    if output is not None and not 0 <= output < len(results):
        raise DerivationError(name, [f"output={output}: it returns {len(results)} tensors"])
    result = results[output or 0]
    last.args = (result,)
    return result


_LAID = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _drop_identities(graph: fx.Graph) -> None:
    """Remove operations without effect, which would hide that two values are equal.

    These are casts to the same dtype, dropout of probability 0, and division by 1.
    """
    for node in list(graph.nodes):
        name = operation(node)
        if name.startswith("dropout."):
            same = not (node.args[1] and node.args[2])
        elif name.startswith(("to.", "type_as.")):
            copies = node.kwargs.get("copy") or (
                name != "to.device" and True in node.args[3:4] or True in node.args[4:5]
            )
            laid = [a for a in (*node.args, *node.kwargs.values()) if a in _LAID]
            same = not copies and not laid and not converts(node, node.args[0])
        elif name == "div.Tensor":  # diffusers' attention divides by rescale_output_factor
            same = node.args[1] == 1 and value_of(node).dtype == value_of(node.args[0]).dtype
        else:
            same = False
        if same:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
