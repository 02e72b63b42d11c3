"""Registry of backbone families by name.

Neither torch nor Megatron is imported until a layer builds. A family is a file of this package
(``example.py``) or a folder (``dit/``). No registration is needed. A family defines two names:

- ``CONFIGS``: named configurations, frozen dataclasses with a method ``faults()``. Their fields are
  the options that users give. A field is part of a model's identity unless declared by
  ``run_choice`` or ``settled_by`` of ``common/options.py``.
- ``build_backbone(name, config)``: returns the chain, a ``Backbone``. Nothing is guessed from
  option names. The ``Backbone`` therefore states facts that its layers do not show: ``num_classes``
  (wherever the batch has ``labels``), ``null_label`` (for classifier-free guidance), ``num_heads``
  (shared by tensor-parallel ranks), ``patch_size`` (if its tokens are patches).

A family with published weights defines three more names. ``PUBLISHED_AS`` is the publishing class.
``published(config)`` describes the storage format. ``config_from_published(config)`` reads a
published ``config.json``.

A family that reads text may define ``TEXTS``, its recipes (``common/text_recipes.py``). A recipe
maps states of the pipeline's encoders to batch fields. Of several recipes, the one whose fields a
configuration reads applies.

Family folders share one layout: ``config.py`` (no torch), ``chain.py`` (``build_backbone``),
``modules.py`` (torch, imported when a layer builds) and ``published_weights.py``. ``common/`` is
shared code. The folder's name is the family's name in checkpoints.

A name with a colon is not a registered configuration. It names the user's module or chain
(``derived/``), or a cascade of backbones (``derived/cascades.py``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from megatron_pulse.adapters.adapter import DEFAULT_TARGETS, Adapter
from megatron_pulse.backbone.cascade import CASCADE, cascade
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.check import BackboneError, require_valid
from megatron_pulse.backbone.published_weights import Published, Rule
from megatron_pulse.dataclass_flags import flag_value
from megatron_pulse.encoders.text_recipe import TextRecipe, folder_name, padded_length, text_fields
from megatron_pulse.errors import (
    Faults,
    UserError,
    collecting,
    describe_exception,
    format_faults,
    naming,
    unknown_name,
)
from megatron_pulse.profile.trainable import TrainedPart, choose_trained, trained_part
from model_specs.common.compare_configs import BackboneComparison, compare_configs, left_open
from model_specs.common.options import (
    FamilyConfig,
    OptionError,
    Value,
    json_value,
    require_config,
    resolve,
    to_record,
)
from model_specs.common.sample_sizes import BUCKETS
from model_specs.common.text_recipes import BY_CLASS
from model_specs.derived.classes import CLASSES
from model_specs.derived.diffusers_modules import PREFIX as DIFFUSERS
from model_specs.derived.diffusers_modules import class_of, pipeline_folder, split
from model_specs.derived.diffusers_modules import describe_weights as describe_weights
from model_specs.derived.diffusers_modules import read_published as read_published
from model_specs.derived.diffusers_modules import weights_folder as weights_folder
from model_specs.derived.family import DTYPE as DTYPE
from model_specs.derived.family import DerivedFamily
from model_specs.derived.names import PREFIX as CASCADE_PREFIX
from model_specs.derived.names import allow as allow
from model_specs.derived.names import family_of, options_of, parts_of, require_known
from model_specs.derived.names import is_cascade as is_cascade
from model_specs.derived.names import is_code as is_code
from model_specs.derived.names import is_module as is_module
from model_specs.derived.names import misnamed as misnamed

if TYPE_CHECKING:
    from megatron_pulse.diffusion.sampling_rules import SamplingRules

_NO_OPTIONS: Mapping[str, Value] = MappingProxyType({})


@functools.cache
def _families() -> dict[str, ModuleType]:
    return _find_families()[0]


@functools.cache
def _find_families() -> tuple[dict[str, ModuleType], tuple[str, ...]]:
    """Family modules by configuration name, and the import faults of unusable files."""
    found: dict[str, ModuleType] = {}
    faults = []
    for info in pkgutil.iter_modules(__path__):
        if info.name in ("common", "derived") or info.name.startswith("_"):
            continue
        where = f"model_specs/{info.name}" + ("" if info.ispkg else ".py")
        try:
            family = importlib.import_module(f"{__name__}.{info.name}")
            configs = family.CONFIGS
            if not callable(family.build_backbone):
                raise TypeError("build_backbone must be a function")
            for config in configs.values():
                require_config(config)
        except Exception as error:  # user-defined families may raise anything
            faults.append(f"{where} is not a family: {describe_exception(error)}")
            continue
        for name in configs:
            if name in found:
                faults.append(f"{where}: {name!r} is already defined by {found[name].__name__}")
            found.setdefault(name, family)
    return found, tuple(faults)


def unusable_families() -> tuple[str, ...]:
    """Import faults of unusable family files, one text each. Other families still work."""
    return _find_families()[1]


def available() -> dict[str, FamilyConfig]:
    """Named configurations of all families."""
    return {name: family.CONFIGS[name] for name, family in _families().items()}


def _family(name: str) -> ModuleType | DerivedFamily:
    if is_module(name):
        return family_of(name)
    if fault := unknown_backbone(name):
        raise UserError(fault)
    return _families()[name]


def _name_of(family: ModuleType | DerivedFamily) -> str:
    """Name of the family in records."""
    return family.family if isinstance(family, DerivedFamily) else family.__name__.split(".")[-1]


def _name_in(family: ModuleType | DerivedFamily, name: str) -> str:
    """Name in records of the configuration requested as ``name``."""
    return family.recorded if isinstance(family, DerivedFamily) else name


def unknown_backbone(name: str) -> str:
    """Error text for an unknown backbone name; empty if the name is known.

    The text lists close matches, all names and the families that failed to import. Names of modules
    and cascades are not checked here.
    """
    if is_module(name) or is_cascade(name) or name in available():
        return ""
    if fault := misnamed(name):
        return fault
    broken = "".join(f"\n{fault}" for fault in unusable_families())
    return unknown_name("backbone", name, sorted(available())) + broken


def load_backbone(name: str, options: Mapping[str, Value] = _NO_OPTIONS) -> Backbone:
    """Build the chain of the configuration ``name`` with some of its fields overridden.

    ``options`` are fields of the family's config. Strings are converted (``"320,640"``, ``"true"``,
    ``"none"``). The result's ``record`` rebuilds the same chain: ``load_backbone(record["name"],
    record["options"])``.

    Raises ValueError for an unknown name, with close matches. Raises ValueError for faulty options,
    with all faults and the legal keys. Raises BackboneError for a family whose chain is unsound,
    with all faults.
    """
    if is_cascade(name):
        return _load_cascade(name, options)
    family = _family(name)
    options = with_texts_of(name, options)
    name = _name_in(family, name)
    config = resolve(name, family.CONFIGS[name], options)
    try:
        backbone = family.build_backbone(name, config)
    except Exception as error:  # user-defined families may raise anything
        if isinstance(family, DerivedFamily) and isinstance(error, ValueError):
            raise  # the error already names the fault and its place
        raise BackboneError(
            name, [f"build_backbone failed: {describe_exception(error)}"]
        ) from error
    if not isinstance(backbone, Backbone):
        fault = f"build_backbone must return a Backbone, returned {type(backbone).__name__}"
        raise BackboneError(name, [fault])
    require_valid(backbone)
    found = backbone.record if isinstance(family, DerivedFamily) else {}
    record = {
        "name": name,
        "family": _name_of(family),
        "options": {**to_record(config), **found},
    }
    return dataclasses.replace(backbone, record=record)


def _load_cascade(name: str, options: Mapping[str, Value]) -> Backbone:
    require_known(name, options)
    parts, faults = dict[str, Backbone](), list[str]()
    for chain, backbone in parts_of(name).items():
        with collecting(faults), naming(f"options {chain}.*"):
            parts[chain] = load_backbone(backbone, options_of(chain, options))
    if faults:
        raise Faults(faults)
    joined = cascade(parts)
    name = CASCADE_PREFIX + ",".join(f"{c}={part.record['name']}" for c, part in parts.items())
    record = {
        "name": name,
        "family": CASCADE,
        "options": {
            f"{chain}.{key}": value
            for chain, part in parts.items()
            for key, value in part.record["options"].items()
        },
    }
    return dataclasses.replace(joined, name=name, record=record)


def part_record(record: Mapping[str, Any], chain: str) -> dict[str, Any]:
    """Record of one chain within a cascade's record, with its part of an adapter.

    Raises ValueError for an unknown chain.
    """
    parts = parts_of(record["name"])
    if chain not in parts:
        raise ValueError(f"{record['name']} has no chain {chain!r}: {', '.join(parts)}")
    part = load_backbone(parts[chain], options_of(chain, record["options"]))
    trained = trained_part(record)
    own: dict[str, Any] = {}
    if trained.quantization is not None:
        own["quantization"] = trained.quantization
    if trained.adapter is not None:
        adapter = Adapter.from_record(trained.adapter)
        if targets := _targets_of(chain, part, adapter):
            own["adapter"] = dataclasses.replace(adapter, targets=targets).to_record()
    return {**part.record, **own}


def _targets_of(chain: str, part: Backbone, adapter: Adapter) -> tuple[str, ...]:
    """Targets of a cascade's adapter that are layers of ``part``, by their names in it."""
    from model_specs.common.adapters import adapt
    from model_specs.common.attach_adapter import adaptable_layers

    layers = adaptable_layers(part, functools.partial(adapt, {"": _rules(part)}))
    if adapter.targets in DEFAULT_TARGETS:
        return adapter.targets if any(map(adapter.matches, layers)) else ()
    own = [target.removeprefix(f"{chain}.") for target in adapter.targets]
    return tuple(
        t for t in own if any(map(dataclasses.replace(adapter, targets=(t,)).matches, layers))
    )


def check_options(name: str, options: Mapping[str, Value]) -> None:
    """Raise the ValueError that ``load_backbone`` would raise before building a chain."""
    if is_cascade(name):
        require_known(name, options)
        for chain, backbone in parts_of(name).items():
            with naming(f"options {chain}.*"):
                check_options(backbone, options_of(chain, options))
        return
    family = _family(name)
    resolve(name, family.CONFIGS[_name_in(family, name)], options)


def in_dtype(
    name: str, options: Mapping[str, Value], dtype: str, by: str = "the run"
) -> Mapping[str, Value]:
    """``options`` with the parameter dtype of the run added for exported modules.

    Raises ValueError if ``options`` already name another dtype. ``by`` names the source of
    ``dtype`` in the error.
    """
    if is_cascade(name):
        for chain, part in parts_of(name).items():
            found = in_dtype(part, options_of(chain, options), dtype, by)
            options = {**options, **{f"{chain}.{key}": value for key, value in found.items()}}
        return options
    if not is_module(name):
        return options
    if options.get(DTYPE, dtype) != dtype:
        raise ValueError(f"{DTYPE}={options[DTYPE]}, but {by} has dtype {dtype}. Leave it out")
    return {**options, DTYPE: dtype}


def load_recorded(record: Mapping[str, Any]) -> Backbone:
    """Rebuild the backbone of a record, with the record's choice of trained parameters.

    Options newer than the record get their defaults. Raises ValueError as ``load_backbone`` and
    ``choose_trained`` do. Also raises ValueError if the record's family is not that of its name, or
    if the record describes a table of layers.
    """
    if "table" in record:
        raise ValueError(
            f"the layers of {record['table']} come from a table and cannot run. For a plan that "
            "runs, profile a backbone or module ('pulse profile --backbone' or '--module')"
        )
    backbone = load_backbone(record["name"], record["options"])
    family = backbone.record["family"]
    if (said := record.get("family", family)) != family:
        raise ValueError(f"{record['name']} belongs to the family {family}, not {said!r}")
    return trained_as(backbone, trained_part(record))


def trained_as(
    backbone: Backbone,
    part: TrainedPart,
    adapter_weights: str | None = None,
    quantized_from: str | None = None,
) -> Backbone:
    """``backbone`` with the quantisation, adapter and selection of parameters of ``part``.

    ``adapter_weights`` is a file of first values for the adapter. ``quantized_from`` is the dtype
    to which weights are rounded before quantisation (default: the chain's). Raises ValueError for
    patterns, an adapter or a quantisation that do not fit.
    """
    if part.quantization is not None:
        import torch

        from megatron_pulse.tracing.from_module import with_quantization

        dtype = None if quantized_from is None else getattr(torch, quantized_from)
        kind, chains = part.quantization, backbone.parts
        if chains:
            held = {c: with_quantization(one, kind, dtype) for c, one in chains.items()}
            record = {**backbone.record, "quantization": kind}
            backbone = dataclasses.replace(cascade(held), name=backbone.name, record=record)
        else:
            backbone = with_quantization(backbone, kind, dtype)
    if part.adapter is not None:
        from megatron_pulse.adapters.files import read_adapter
        from megatron_pulse.tracing.from_module import source_of
        from model_specs.common.adapters import adapt
        from model_specs.common.attach_adapter import with_adapter

        for each in backbone.parts.values() or (backbone,):
            if part.adapter["type"] == "lokr" and source_of(each) is None:
                raise ValueError(
                    f"{each.name} is a hand-written family, which takes no lokr. Train lora or "
                    "dora, or its diffusers class (diffusers:FOLDER)"
                )
        start = None if adapter_weights is None else read_adapter(Path(adapter_weights))
        rules = {chain: _rules(one) for chain, one in (backbone.parts or {"": backbone}).items()}
        of_rules = functools.partial(adapt, rules)
        backbone = with_adapter(backbone, Adapter.from_record(part.adapter), start, of_rules)
    if part.train or part.freeze:
        backbone = choose_trained(backbone, part.train, part.freeze)
    return backbone


def _rules(backbone: Backbone) -> tuple[Rule, ...]:
    """Rules from a family's parameter names to the published ones; none for other backbones."""
    if not backbone.record or is_module(backbone.record["name"]):
        return ()
    form = published_form(backbone)
    return form.rules if form is not None else ()


def compare_models(there: Mapping[str, Any], here: Mapping[str, Any]) -> BackboneComparison:
    """Compare the backbone of the record ``here`` with the model of the record ``there``.

    Options missing from an older record take the values of the named configuration.
    """
    theirs = there.get("family")
    if here["family"] == CASCADE and theirs == CASCADE:
        return _compare_cascades(there, here)
    if CASCADE in (theirs, here["family"]):
        return BackboneComparison((f"family {theirs} there, {here['family']} here",))
    family = _family(here["name"])
    if theirs != here["family"]:
        return BackboneComparison((f"family {theirs} there, {here['family']} here",))
    ours = resolve(here["name"], family.CONFIGS[here["name"]], here["options"])
    try:
        config, unknown_name = _recorded(family, there)
    except ValueError as error:
        return BackboneComparison((str(error),))
    return compare_configs(config, ours, unknown_name)


def _compare_cascades(there: Mapping[str, Any], here: Mapping[str, Any]) -> BackboneComparison:
    theirs, ours = parts_of(there["name"]), parts_of(here["name"])
    if list(theirs) != list(ours):
        said = f"chains {', '.join(theirs)} there, {', '.join(ours)} here"
        return BackboneComparison((said,))
    found = [compare_models(part_record(there, chain), part_record(here, chain)) for chain in ours]
    return BackboneComparison(
        tuple(f"{c}: {text}" for c, one in zip(ours, found, strict=True) for text in one.different),
        tuple(f"{c}: {text}" for c, one in zip(ours, found, strict=True) for text in one.changed),
    )


def continue_model(
    there: Mapping[str, Any], name: str, options: Mapping[str, Value] = _NO_OPTIONS
) -> Backbone:
    """``load_backbone(name, options)`` with unset ``settled_by`` options taken from ``there``.

    A model continued at another size thus keeps its position spacing. Nothing is taken from a
    record of another family or from a faulty record; ``compare_models`` reports those.
    """
    backbone = load_backbone(name, options)
    if there.get("family") != backbone.record["family"] or is_cascade(name):
        return backbone
    family = _family(name)
    try:
        config, _ = _recorded(family, there)
    except ValueError:
        return backbone
    ours = resolve(name, family.CONFIGS[_name_in(family, name)], options)
    backbone = load_backbone(name, {**options, **left_open(config, ours)})
    return dataclasses.replace(backbone, kept=there.get("kept", {}))


def _recorded(
    family: ModuleType | DerivedFamily, record: Mapping[str, Any]
) -> tuple[FamilyConfig, dict[str, Any]]:
    """Config of a record, and the record's options without a field. Raises ValueError."""
    named = family.CONFIGS.get(record["name"]) or next(iter(family.CONFIGS.values()))
    known = {key: value for key, value in record["options"].items() if key in vars(named)}
    unknown_name = {key: value for key, value in record["options"].items() if key not in known}
    return resolve(record["name"], named, known), unknown_name


def changed_options(backbone: Backbone) -> dict[str, str]:
    """Options, as flag texts, in which ``backbone`` differs from its named configuration."""
    name = backbone.record["name"]
    named = to_record(_family(name).CONFIGS[name])
    written = json_value if is_module(name) else flag_value
    return {
        key: written(value)
        for key, value in backbone.record["options"].items()
        if named[key] != value
    }


def weights_folders(name: str) -> dict[str, Path | None]:
    """``weights_folder`` of each chain of the named backbone; the key is empty for one chain."""
    parts = {"": name}
    if is_cascade(name):
        with contextlib.suppress(ValueError):  # loading the backbone reports it
            parts = parts_of(name)
    return {chain: weights_folder(part) for chain, part in parts.items()}


def published_form(backbone: Backbone) -> Published | None:
    """Storage format of this backbone in the library that published the model, or None."""
    name = backbone.record["name"]
    family = _family(name)
    if not hasattr(family, "published"):
        return None
    config = resolve(name, family.CONFIGS[name], backbone.record["options"])
    form: Published | None = family.published(config)
    if form is None or not backbone.kept:
        return form
    if isinstance(family, DerivedFamily):
        return dataclasses.replace(form, config={**backbone.kept, **form.config})
    settings = {**form.config, **backbone.kept}
    if not _means(family, settings, form):
        settings = {**backbone.kept, **form.config}
    return dataclasses.replace(form, config=settings)


def _means(family: ModuleType, settings: Mapping[str, Any], form: Published) -> bool:
    try:
        again = family.published(family.config_from_published(settings))
    except ValueError:
        return False
    return bool(again.config == form.config)


_OF_MODULES = {"UNet2DConditionModel": "encoder_hid_dim"}
"""Setting of a class that its family lacks (Kolors), by class."""


def is_traced(config: Mapping[str, Any]) -> bool:
    """True if the class of a published ``config.json`` is built as a module, not by a family."""
    wanted = class_of(config)
    needs = config.get(_OF_MODULES.get(wanted, "")) is not None
    return needs or wanted not in _published_families() and wanted in CLASSES


def load_published(
    config: Mapping[str, Any], options: Mapping[str, Value] = _NO_OPTIONS
) -> Backbone:
    """Build the backbone described by a published ``config.json``; a module with ``options``.

    The result's ``kept`` holds settings without effect here, such as ``upcast_attention``, or
    settings written in another form. ``published_form`` writes ``kept`` settings back.

    A class without a family is built as a module, and so is one with a setting of ``_OF_MODULES``.
    Raises ValueError for a class with unknown inputs, and for settings that the family lacks.
    """
    wanted = class_of(config)
    families = _published_families()
    if is_traced(config):
        own, kept = split(wanted, config)
        backbone = load_backbone(f"{DIFFUSERS}{wanted}", {**own, **options})
        return dataclasses.replace(backbone, kept=kept)
    if options:
        raise ValueError(
            f"--option is for classes that are built as modules; a {wanted} has a family, whose "
            "options are given when it is trained"
        )
    if wanted not in families:
        known = sorted({*families, *CLASSES})
        raise ValueError(f"no family builds {wanted!r}; known classes: {', '.join(known)}")
    family = families[wanted]
    ours = family.config_from_published(config)
    record = to_record(ours)

    def distance(name: str) -> int:
        return sum(record[key] != value for key, value in to_record(family.CONFIGS[name]).items())

    try:
        backbone = load_backbone(min(family.CONFIGS, key=distance), record)
    except (OptionError, BackboneError) as error:  # whose text names our config
        what = f"the published configuration of a {wanted} has unsupported settings"
        raise ValueError(format_faults(what, error.faults)) from error
    form = published_form(backbone)
    if form is None or config["_class_name"] != form.class_name:
        return backbone
    kept = {
        key: value
        for key, value in config.items()
        if not key.startswith("_") and (key not in form.config or _plain(form.config[key]) != value)
    }
    return dataclasses.replace(backbone, kept=kept)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _published_families() -> dict[str, ModuleType]:
    return {
        family.PUBLISHED_AS: family
        for family in _families().values()
        if hasattr(family, "PUBLISHED_AS")
    }


_LENGTHS = ("text_length", "context_length", "caption_length")


def _recipes(name: str) -> list[TextRecipe]:
    """Text recipes of the configuration ``name``."""
    own = _family(name)
    family: Any = own
    if isinstance(own, DerivedFamily):
        family = _published_families().get(own.family)
    config = own.CONFIGS[_name_in(own, name)]
    option = next((each for each in _LENGTHS if hasattr(config, each)), "")
    texts: tuple[TextRecipe, ...] = getattr(family, "TEXTS", ())
    if isinstance(own, DerivedFamily):
        texts = (*texts, *BY_CLASS.get(own.family, ()))
    return [dataclasses.replace(recipe, length_option=option) for recipe in texts]


def with_texts_of(
    name: str, options: Mapping[str, Value], folder: str | Path | None = None
) -> Mapping[str, Value]:
    """``options`` of a diffusers class, with the text length of a pipeline's tokenizers added.

    The pipeline is in ``folder``, or is the folder that ``name`` gives. Nothing is added if the
    options state a length, if the pipeline truncates texts to a requested length, or for a cascade.
    """
    if not name.startswith(DIFFUSERS) or options.keys() & {*_LENGTHS, BUCKETS}:
        return options
    pipeline = pipeline_folder(name) if folder is None else Path(folder)
    if pipeline is None or not pipeline.is_dir():
        return options
    for recipe in _recipes(name):
        places = (pipeline / folder_name("tokenizer", place) for place in recipe.kinds)
        lengths = {padded_length(place) for place in places}
        if len(lengths) == 1 and (length := lengths.pop()) is not None:
            fitted = recipe.fitted or not recipe.length_option
            return options if fitted else {**options, recipe.length_option: str(length)}
    return options


def sampling_rules(name: str) -> SamplingRules:
    """Rules of sampling of the named backbone's pipeline."""
    from megatron_pulse.diffusion.sampling_rules import NO_RULES
    from model_specs.common.sampling_rules import BY_CLASS as RULES

    own: Any = _family(name)
    kind = own.family if isinstance(own, DerivedFamily) else getattr(own, "PUBLISHED_AS", None)
    return RULES.get(str(kind), NO_RULES)


def known_frames(record: Mapping[str, Any]) -> int:
    """Number of first frames that a backbone's samples are given in ``image_latent``."""
    return int(record.get("options", {}).get("known_frames") or 0)


def padding_frames(record: Mapping[str, Any]) -> int:
    """Number of first frames of latents that no decoder gets: those that fill CogVideoX 1.5's
    patches."""
    if record.get("family") != "CogVideoXTransformer3DModel":
        return 0
    options = record["options"]
    frames = (options["sample_frames"] - 1) // options["temporal_compression_ratio"] + 1
    return int(-frames % (options["patch_size_t"] or 1))


def text_recipe(name: str, backbone: Backbone) -> TextRecipe | None:
    """Recipe for the text fields of the named backbone; None if the backbone reads no text.

    A diffusers class uses the recipe of the family published as that class. Raises UserError if no
    recipe makes these fields.
    """
    read = text_fields(backbone.batch_fields)
    if not read:
        return None
    for recipe in sorted(_recipes(name), key=lambda recipe: not recipe.one_width):
        if recipe.is_of(backbone.batch_fields):
            return recipe
    raise UserError(
        f"{name} reads {', '.join(sorted(read))}, which no known encoders provide. Write them "
        "with megatron_pulse.data.latents.writer.LatentWriter"
    )
