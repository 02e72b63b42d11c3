"""Families of user code: ``package.module:factory`` and ``path/to/file.py:factory``."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published_weights import Published, names_on_load
from megatron_pulse.errors import describe_exception, did_you_mean, format_faults, unknown_name
from model_specs.common.options import FamilyConfig
from model_specs.derived.family import DTYPE, DTYPES, DerivedFamily, options_class
from model_specs.derived.inputs import cast
from model_specs.derived.rank0_messages import report_if_slow, say
from model_specs.derived.user_code import canonical, find

if TYPE_CHECKING:
    import torch
    from torch import Tensor

type Given = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
WEIGHTS = "weights"
"""Option that identifies the parameters of a factory's module: a digest of names and shapes."""
_HOW = """\
a factory must return one of
  a torch module of a diffusers class with known inputs
  (module, inputs) for pulse.from_module: example tensors by name
  (module, inputs, {"sample": NAME, "timestep": NAME, ...}): with keywords of from_module
  a chain: megatron_pulse.Backbone"""


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def family_of(name: str) -> DerivedFamily:
    """Family of the module or chain that the code ``name`` makes. Raises ValueError."""
    code = canonical(name)
    made = find(code)
    identity = {**_parameters(code, made), WEIGHTS: ""}
    kinds = options_class("Options", identity, {DTYPE: (str, DTYPES[0], "exported in {0.dtype}")})
    build, publish = functools.partial(_build, code), functools.partial(_published, code)
    return DerivedFamily("own", code, kinds(), build, publish)


def _parameters(name: str, factory: Any) -> dict[str, Any]:
    """Keyword parameters of a factory with their defaults; these become options."""
    if isinstance(factory, Backbone):
        return {}
    if not callable(factory):
        raise ValueError(f"{name} is of type {type(factory).__name__}; {_HOW}")
    found = {}
    for key, each in inspect.signature(factory).parameters.items():
        if each.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if each.default is inspect.Parameter.empty:
            raise ValueError(
                f"{name}: {key} has no default. Every argument of a factory is an option and "
                "needs one"
            )
        try:
            found[key] = json.loads(json.dumps(each.default))
        except TypeError:
            raise ValueError(
                f"{name}: {key} is {each.default!r:.60}; options must be numbers, text or lists"
            ) from None
    if clash := {WEIGHTS, DTYPE} & found.keys():
        raise ValueError(f"{name}: {', '.join(sorted(clash))} is reserved. Rename it")
    return found


def _build(name: str, config: FamilyConfig) -> Backbone:
    values = dict(vars(config))
    recorded = values.pop(WEIGHTS)
    backbone, digest = _built(name, json.dumps(values))
    if recorded and recorded != digest:
        raise ValueError(f"{name} makes other parameters than recorded: the factory has changed")
    return dataclasses.replace(backbone, record={WEIGHTS: digest})


def _published(name: str, config: FamilyConfig) -> Published:
    """Format of a state dict with the module's own names, for ``load_state_dict``."""
    return Published(
        "torch",
        name,
        {},
        constants=functools.partial(_constants, name, config),
        on_load=functools.partial(_names_on_load, name, config),
        tied=functools.partial(_tied, name, config),
    )


def _names_on_load(name: str, config: FamilyConfig, names: Iterable[str]) -> Mapping[str, str]:
    from megatron_pulse.tracing.from_module import module_of, source_of

    backbone = _build(name, config)
    return names_on_load(module_of(backbone) if source_of(backbone) else None, names)


def _tied(name: str, config: FamilyConfig) -> Mapping[str, str]:
    from megatron_pulse.tracing.from_module import tied_names

    return tied_names(_build(name, config))


def _constants(name: str, config: FamilyConfig) -> Mapping[str, Tensor]:
    from megatron_pulse.tracing.from_module import buffers_of

    return buffers_of(_build(name, config))


@functools.lru_cache(maxsize=8)
def _built(name: str, options: str) -> tuple[Backbone, str]:
    from megatron_pulse.tracing.initial_weights.meta_init import build_without_memory

    factory, values = find(name), json.loads(options)
    dtype = values.pop(DTYPE)
    if isinstance(factory, Backbone):
        return factory, ""
    try:
        with report_if_slow(f"making {name}"):
            made = build_without_memory(lambda: factory(**values))
    except Exception as error:  # user code may raise anything
        raise ValueError(f"{name} failed: {describe_exception(error)}") from error
    if isinstance(made, Backbone):
        return made, ""
    called = f"{name}{_place(factory)}"
    return _derived(called, made, dtype, lambda: _module_of(factory(**values)))


def _module_of(made: Any) -> Any:
    return made[0] if isinstance(made, tuple) else made


def _derived(
    name: str, made: Any, dtype: str, make: Callable[[], torch.nn.Module]
) -> tuple[Backbone, str]:
    """Chain of the factory's result ``made``; ``make`` builds the module again with values."""
    import torch

    from megatron_pulse.tracing.checks.module_state import is_small
    from megatron_pulse.tracing.from_module import from_module, require_equal_results
    from megatron_pulse.tracing.initial_weights.deferred_init import from_scratch
    from megatron_pulse.tracing.initial_weights.meta_init import release_parameter_memory
    from model_specs.derived.classes import CLASSES

    parts = made if isinstance(made, tuple) else (made,)
    module, *rest = parts
    if not isinstance(module, torch.nn.Module) or len(rest) > 2:
        raise ValueError(f"{name} returned {_kind(made)}; {_HOW}")
    said: Mapping[str, Any] = rest[1] if len(rest) > 1 else {}
    if rest and (faults := [*_given_faults(module, rest[0]), *_said_faults(said)]):
        raise ValueError(format_faults(name, faults))
    kind = getattr(torch, dtype)
    if made_in := {p.dtype for p in module.parameters() if p.is_floating_point()} - {kind}:
        kinds = " and ".join(sorted(str(each).removeprefix("torch.") for each in made_in))
        say(f"warning: {name} makes parameters of {kinds}; the run's are {dtype}")
    inputs: Given
    if rest:
        times = said.get("timestep")
        inputs = _cast(rest[0], times, kind)
        if others := said.get("other_inputs"):
            said = {**said, "other_inputs": [_cast(given, times, kind) for given in others]}
    elif type(module).__name__ in CLASSES:
        declared = CLASSES[type(module).__name__].declared(module.config, {})
        declared.wrap(module)
        inputs, said = declared.make(dtype), declared.keywords()
    else:
        taken = ", ".join(inspect.signature(module.forward).parameters)
        raise ValueError(
            f"{name} returned {_kind(made)} without its inputs (it takes {taken}); {_HOW}"
        )
    with report_if_slow(f"deriving {name}"):
        said = {"weights": from_scratch(make), **said}
        backbone = from_module(release_parameter_memory(module, kind), inputs, **said)
    if rest and is_small(module):
        with torch.random.fork_rng(devices=[]):
            require_equal_results(backbone, make().to(kind))
    weights = sorted((n, tuple(p.shape)) for n, p in module.named_parameters())
    return backbone, f"sha256:{hashlib.sha256(repr(weights).encode()).hexdigest()[:16]}"


def _place(factory: Any) -> str:
    """File and line of a factory in brackets; empty for objects without code, such as partials."""
    code = getattr(inspect.unwrap(factory), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _given_faults(module: torch.nn.Module, given: Any) -> Iterator[str]:
    """Faults of the given inputs against the module's forward.

    A function of the microbatch size is called with size two.
    """
    what = "inputs must be"
    if callable(given):
        what, given = "its function of the microbatch size must return", given(2)
    if not isinstance(given, Mapping):
        yield f"{what} a dict of tensors by name, not {type(given).__name__}"
        return
    taken = inspect.signature(module.forward).parameters.values()
    names = [each.name for each in taken if each.kind in _BY_NAME]
    if all(each.kind is not inspect.Parameter.VAR_KEYWORD for each in taken):
        for wrong in (key for key in given if key not in names):
            yield (
                f"forward has no input {wrong!r}; {did_you_mean(str(wrong), names)}"
                f"it takes: {', '.join(names)}"
            )
    for each in taken:
        needed = each.default is inspect.Parameter.empty and each.kind in _BY_NAME
        if needed and each.name not in given:
            yield f"forward takes {each.name}, which is missing in the inputs"


def _said_faults(said: Any) -> list[str]:
    """Faults of the given keywords of ``from_module``."""
    from megatron_pulse.tracing.from_module import from_module

    if not isinstance(said, Mapping):
        return [f"keywords must be a dict, not {type(said).__name__}"]
    taken = inspect.signature(from_module).parameters.values()
    known = [each.name for each in taken if each.kind is inspect.Parameter.KEYWORD_ONLY]
    return [unknown_name("keyword of from_module", key, known) for key in said if key not in known]


def _cast(given: Given, times: str | None, kind: torch.dtype) -> Given:
    """Cast the inputs, or the results of an input function, to a dtype."""
    if callable(given):
        return lambda size: cast(given(size), times, kind)
    return cast(given, times, kind)


def _kind(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__
