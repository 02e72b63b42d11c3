"""Families for ``diffusers:FOLDER`` and ``diffusers:CLASS``."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published_weights import Published, PublishedError, names_on_load
from megatron_pulse.errors import Faults, describe_exception, unknown_name
from model_specs.common.options import FamilyConfig
from model_specs.common.sample_sizes import BUCKETS
from model_specs.derived.classes import CLASSES
from model_specs.derived.family import DTYPE, DTYPES, DerivedFamily, options_class
from model_specs.derived.rank0_messages import report_if_slow, say_once

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_pulse.tracing.initial_weights.sources import TensorFiles

PREFIX = "diffusers:"
_CLASS_OF_NORM = {
    "ada_norm_zero": "DiTTransformer2DModel",
    "ada_norm_single": "PixArtTransformer2DModel",
}
"""Actual class of an old Transformer2DModel by norm_type, following diffusers."""
_AVERAGES = frozenset(
    {"decay", "min_decay", "optimization_step", "update_after_step", "use_ema_warmup", "inv_gamma",
     "power"}
)  # fmt: skip
"""Bookkeeping keys that diffusers' EMAModel writes into a model's settings."""
_DTYPE_EFFECT = "the module is exported in {0.dtype}"


def family_of(name: str) -> DerivedFamily:
    """Family of ``diffusers:CLASS``, or of the class and config in ``diffusers:FOLDER``.

    Raises ValueError if the folder or class does not exist, or if the inputs of the class are
    unknown.
    """
    target = name.removeprefix(PREFIX)
    folder = Path(target)
    given: Mapping[str, Any] = {}
    class_name, component = target, None
    if folder.is_dir():
        from megatron_pulse.diffusion.published import find_component

        component = find_component(folder)
        given = read_published(component)
        class_name = given["_class_name"]
    elif not target.isidentifier():
        raise ValueError(f"{name}: neither a folder nor a class {target} exists")
    known = CLASSES.get(class_name)
    if known is None:
        raise ValueError(f"{name}: {_undeclared(class_name)}")
    identity = defaults_of(class_name)
    options, kept = split(class_name, given)
    config = {**identity, **options}
    try:
        sizes = known.defaults(config)
    except ValueError as error:
        raise ValueError(f"{component / 'config.json' if component else name}: {error}") from error
    choices: dict[str, tuple[Any, Any, str]] = {
        size: (int | None, None, f"samples are of {size} {{0.{size}}}")
        for size in sizes
        if size not in config
    }
    if choices:
        choices[BUCKETS] = (str, "", "microbatches are of {0.buckets}")
    kinds = options_class(class_name, identity, {**choices, DTYPE: (str, DTYPES[0], _DTYPE_EFFECT)})
    return DerivedFamily(
        class_name,
        f"{PREFIX}{class_name}",
        kinds(**config),
        functools.partial(_build, class_name, component),
        functools.partial(_published, class_name),
        kept,
    )


def read_published(component: Path) -> dict[str, Any]:
    """Read a component's ``config.json``, with the current diffusers name of its class.

    Settings that the class lacks are dropped with a warning, as in diffusers. EMA bookkeeping of
    ``EMAModel.save_pretrained`` is dropped silently.
    """
    from megatron_pulse.diffusion.published import read_config

    config = read_config(component)
    named = config["_class_name"]
    class_name = class_of(config)
    if not (known := _settings(class_name)):
        return config
    unknown_name = [key for key in config if not key.startswith("_") and key not in known]
    if said := [key for key in unknown_name if key not in _AVERAGES | _settings(named)]:
        say_once(
            f"warning: {component / 'config.json'}: unknown settings of {class_name} are ignored: "
            f"{', '.join(sorted(said))}"
        )
    kept = {key: value for key, value in config.items() if key not in unknown_name}
    return {**kept, "_class_name": class_name}


def class_of(config: Mapping[str, Any]) -> str:
    """Class of a ``config.json``; older folders name several models Transformer2DModel."""
    named = str(config.get("_class_name"))
    if named != "Transformer2DModel":
        return named
    return _CLASS_OF_NORM.get(str(config.get("norm_type")), named)


@functools.cache
def _settings(class_name: str) -> frozenset[str]:
    """Setting names of a class; empty if diffusers has no such model."""
    import diffusers

    kind: Any = getattr(diffusers, class_name, None)
    if not isinstance(kind, type) or not issubclass(kind, diffusers.ModelMixin):
        return frozenset()
    return frozenset(inspect.signature(kind).parameters)


def weights_folder(name: str) -> Path | None:
    """Folder with the weights of ``diffusers:FOLDER``; None without weights or for other names."""
    from megatron_pulse.diffusion.published import find_component, holds_weights

    folder = Path(name.removeprefix(PREFIX))
    if not name.startswith(PREFIX) or not folder.is_dir():
        return None
    try:
        component = find_component(folder)
    except PublishedError:
        return None  # the family reports the error
    return component if holds_weights(component) else None


def pipeline_folder(name: str) -> Path | None:
    """Pipeline folder that ``diffusers:FOLDER`` is, or is a component of; None if neither."""
    folder = Path(name.removeprefix(PREFIX))
    if not folder.is_dir():
        return None
    places = (folder, folder.resolve().parent)
    return next((each for each in places if (each / "tokenizer").is_dir()), None)


def describe_weights(name: str) -> str:
    """Describe the source of the initial weights of ``diffusers:FOLDER`` or ``diffusers:CLASS``.

    The text is empty for other names. Weights of a checkpoint take precedence.
    """
    if not name.startswith(PREFIX):
        return ""
    folder = weights_folder(name)
    if folder is not None:
        return f"weights: {folder}"
    there = (
        "the folder has none" if Path(name.removeprefix(PREFIX)).is_dir() else "a class has none"
    )
    return f"weights: initialised by --seed: {there}"


def split(class_name: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a ``config.json`` into settings that the class takes and settings without effect."""
    known = defaults_of(class_name)
    settings = {key: value for key, value in config.items() if not key.startswith("_")}
    return (
        {key: value for key, value in settings.items() if key in known},
        {key: value for key, value in settings.items() if key not in known},
    )


def _undeclared(class_name: str) -> str:
    """Error text for a class with undeclared inputs, including the alternative."""
    import diffusers

    kind = getattr(diffusers, class_name, None)
    if kind is None or not hasattr(kind, "forward"):
        return unknown_name("class with known inputs", class_name, CLASSES)
    taken = list(inspect.signature(kind.forward).parameters)[1:]
    return (
        f"the inputs of a {class_name} are unknown. Write a function (FILE.py:FACTORY) that "
        f"returns the module with example tensors by name. It takes: {', '.join(taken)}. Known: "
        f"{', '.join(sorted(CLASSES))}"
    )


@functools.cache
def defaults_of(class_name: str) -> dict[str, Any]:
    """Settings of a class with their defaults as JSON values."""
    import diffusers

    parameters = inspect.signature(getattr(diffusers, class_name).__init__).parameters
    return {
        key: None
        if each.default is inspect.Parameter.empty
        else json.loads(json.dumps(each.default))
        for key, each in list(parameters.items())[1:]
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _build(class_name: str, folder: Path | None, config: FamilyConfig) -> Backbone:
    """Chain with the weights in ``folder``, or with the class's own initialisation."""
    from megatron_pulse.diffusion.published import holds_weights
    from megatron_pulse.tracing.from_module import module_of, with_weights
    from megatron_pulse.tracing.initial_weights.deferred_init import from_scratch
    from megatron_pulse.tracing.initial_weights.sources import from_stored, on_first_use

    backbone = _built(class_name, json.dumps(vars(config)))
    if folder is None or not holds_weights(folder):
        settings = {key: vars(config)[key] for key in defaults_of(class_name)}
        return with_weights(backbone, from_scratch(lambda: _make(class_name, settings)))
    module = module_of(backbone)
    stored = functools.partial(_stored, folder, _published(class_name, config))
    return with_weights(backbone, on_first_use(lambda: from_stored(stored(), module, str(folder))))


def _stored(folder: Path, published: Published) -> TensorFiles:
    """Weights in a folder by diffusers' names; they may have the names of an original file."""
    from megatron_pulse.diffusion.float8 import Float8Tensors
    from megatron_pulse.diffusion.published import read_folder
    from megatron_pulse.diffusion.single_file import OriginalLayout
    from megatron_pulse.diffusion.single_file_refusal import READ, find_original

    stored = Float8Tensors(read_folder(folder, any_layout=True))
    original = find_original(stored)
    if original is None:
        return stored
    if READ.get(original[1]) != published.class_name:
        read_folder(folder)  # which refuses it
    return OriginalLayout(published).read(stored, str(folder))


def _make(class_name: str, settings: Mapping[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, class_name).from_config(copy.deepcopy(dict(settings)))


@functools.lru_cache(maxsize=8)
def _built(class_name: str, options: str) -> Backbone:
    """Chain without weights; one export serves all callers with the same options."""
    import torch

    from megatron_pulse.tracing.from_module import from_module
    from megatron_pulse.tracing.initial_weights.meta_init import (
        build_without_memory,
        release_parameter_memory,
    )

    values = json.loads(options)
    settings = {key: values[key] for key in defaults_of(class_name)}
    dtype, known = values[DTYPE], CLASSES[class_name]
    sizes = known.sizes_of(settings, values, values.get(BUCKETS, ""))
    try:
        declared, *others = (known.declared(settings, size) for size in sizes)
        with report_if_slow(f"making {class_name}"):
            module = build_without_memory(lambda: _make(class_name, settings))
    except Exception as error:  # a class may raise anything
        raise ValueError(
            f"{class_name} cannot be built from this config: {describe_exception(error)}"
        ) from error
    module = declared.wrap(release_parameter_memory(module.train(), getattr(torch, dtype)))
    made = [each.make(dtype) for each in others]
    with report_if_slow(f"deriving {class_name}"):
        chain = from_module(module, declared.make(dtype), other_inputs=made, **declared.keywords())
    _require_whole_patches(class_name, chain, declared.channel_axis - 1)
    return chain


def _require_whole_patches(class_name: str, chain: Backbone, channel_axis: int) -> None:
    """Raise Faults if a prediction has other sides than its sample.

    Convolutions of patches cut off rows and columns without complaint.
    """
    faults = []
    for shape_index in range(chain.num_shapes):
        taken, given = (
            list(spec.at(shape_index).shape) for spec in (chain.input_spec, chain.output_spec)
        )
        if taken[:channel_axis] + taken[channel_axis + 1 :] != (
            given[:channel_axis] + given[channel_axis + 1 :]
        ):
            faults.append(
                f"{class_name} predicts {given} for samples of {taken}: give frames, height and "
                "width that its patches divide"
            )
    if faults:
        raise Faults(faults)


def _published(class_name: str, config: FamilyConfig) -> Published:
    values = vars(config)
    return Published(
        "diffusers",
        class_name,
        {key: values[key] for key in defaults_of(class_name)},
        constants=functools.partial(_constants, class_name, config),
        on_load=functools.partial(_names_on_load, class_name, config),
        tied=functools.partial(_tied, class_name, config),
    )


def _names_on_load(class_name: str, config: FamilyConfig, names: Iterable[str]) -> dict[str, str]:
    from megatron_pulse.tracing.from_module import module_of

    return names_on_load(module_of(_built(class_name, json.dumps(vars(config)))), names)


def _tied(class_name: str, config: FamilyConfig) -> Mapping[str, str]:
    from megatron_pulse.tracing.from_module import tied_names

    return tied_names(_built(class_name, json.dumps(vars(config))))


def _constants(class_name: str, config: FamilyConfig) -> Mapping[str, Tensor]:
    from megatron_pulse.tracing.from_module import buffers_of

    return buffers_of(_built(class_name, json.dumps(vars(config))))
