"""``pulse module``: a torch module exported as a chain."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_pulse.cli.backbone_flags import (
    add_option_flag,
    backbone_faults,
    backbone_name_type,
    options_of,
)
from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
    warn,
)
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.models.context_report import context_report
from megatron_pulse.cli.output import add_json, print_result, table
from megatron_pulse.dataclass_flags import TO_4096

if TYPE_CHECKING:
    from megatron_pulse.backbone.chain import Backbone, TensorSpec

_DESCRIPTION = """\
Traces the module with torch.export, without memory for its weights, and shows its inputs (noisy
sample, timesteps, fields of the batch, constants), layers, skips and embedders. NAME is what
--module and --pulse-module take:

  diffusers:FOLDER        the class and the sizes that the folder's config.json says
  diffusers:CLASS         the class with its defaults; --option says other sizes
  FILE.py:FACTORY         a function of your own (its keywords are options), which returns
  PACKAGE.MODULE:FACTORY    module, inputs              example tensors by the names of forward's
                                                        arguments, or a function of the microbatch
                                                        size that makes them
                            module, inputs, keywords    and what those are: {"sample": "x"} is the
                                                        noisy sample, "timestep", "constants" (the
                                                        same for every batch), "fields" (how the
                                                        batch calls them), "output" (which of
                                                        several results is the prediction),
                                                        "other_inputs" (a list of examples of
                                                        other sizes that a microbatch may have)
                            backbone                    a chain by hand (megatron_pulse.Backbone)

What a pipeline cannot run is named with its line of the model.

examples:
  pulse module diffusers:UNet2DModel --option sample_size=32
  pulse module diffusers:UNet2DModel --option buckets=32x32,24x40,40x24
  pulse module diffusers:downloads/kandinsky3/unet
  pulse module mine.py:build --option depth=8 --json
  pulse module diffusers:WanTransformer3DModel --context-parallel-size 4
"""


@dataclass(frozen=True)
class InputRow:
    """Input of the module: names in module and batch, shape of a sample, dtype.

    ``others`` are its shapes in the chain's other microbatches.
    """

    name: str
    field: str
    shape: tuple[int, ...]
    dtype: str
    others: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LinkRow:
    """Chain layer or embedder; ``boundary`` counts the values of one sample that it passes on."""

    name: str
    embedder: bool
    num_parameters: int
    boundary: int
    pushes: tuple[str, ...]
    pops: tuple[str, ...]
    uses: tuple[str, ...]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``module``."""
    parser = add_parser(commands, "module", "show a torch module as a chain", _DESCRIPTION, run)
    add_flag(parser, "backbone NAME", "as --module takes it", type=backbone_name_type)
    add_option_flag(parser, "override one of its options")
    add_flag(
        parser,
        "--context-parallel-size K",
        "show what K ranks that share the tokens divide and send",
        within=TO_4096,
        type=int,
    )
    add_json(parser, to_file=False)


def run(args: argparse.Namespace) -> None:
    """Export and print; the exit status is 1 if tokens cannot be divided as asked."""
    require([*command_faults(args), *backbone_faults(args)])
    prepare_megatron()
    from megatron_pulse.planner.partition.legal_cuts import largest_fold
    from megatron_pulse.profile.parameters import count_parameters
    from megatron_pulse.profile.trainable import none_trained
    from megatron_pulse.tracing.from_module import check_weights
    from model_specs import describe_weights, load_backbone

    with as_user_error(ValueError):
        backbone = load_backbone(args.backbone, options_of(args))
        counts = count_parameters(backbone)
        check_weights(backbone)
    warn(none_trained(backbone))
    inputs, same = _inputs(backbone)
    links = [
        LinkRow(
            layer.name,
            layer.embedder,
            count,
            sum(spec.numel_per_sample for spec in layer.outputs),
            tuple(layer.pushes),
            tuple(layer.pops),
            layer.uses,
        )
        for layer, count in zip(backbone.layers, counts, strict=True)
    ]
    fold = largest_fold(len(backbone.layers), backbone.skips)
    embedders = sum(link.embedder for link in links)
    lines = [
        f"{backbone.name}: {len(links) - embedders} links, {embedders} embedders, "
        f"{len(backbone.skips)} skips, {sum(counts):,} parameters; folds over {fold} devices",
        *([weights] if (weights := describe_weights(args.backbone)) else []),
        "",
        *table(
            [
                ("input", "in a batch", "a sample", "dtype"),
                *((row.name, row.field, _shapes(row), row.dtype) for row in inputs),
            ],
            left=(0, 1, 2, 3),
        ),
        *([f"the same for every batch: {', '.join(same)}"] if same else []),
        "",
        *table(
            [
                ("link", "parameters", "hands on", "skips", "conditioning"),
                *(
                    (
                        link.name + " (embedder)" * link.embedder,
                        f"{link.num_parameters:,}",
                        f"{link.boundary:,}",
                        " ".join([*["begins"] * len(link.pushes), *["ends"] * len(link.pops)]),
                        ", ".join(link.uses),
                    )
                    for link in links
                ),
            ],
            left=(0, 3, 4),
        ),
    ]
    of_context: dict[str, Any] = {}
    if args.context_parallel_size is not None and args.context_parallel_size > 1:
        more, of_context["context_parallel"] = context_report(backbone, args.context_parallel_size)
        lines += ["", *more]
    record = {
        **backbone.record,
        "inputs": [asdict(row) for row in inputs],
        "constants": same,
        "links": [asdict(link) for link in links],
        "largest_fold": fold,
        **of_context,
    }
    print_result(args, lines, lambda: record)
    if "refused" in of_context.get("context_parallel", {}):
        raise SystemExit(1)


def _inputs(backbone: Backbone) -> tuple[list[InputRow], list[str]]:
    """Inputs of the module, and the names of those that are the same for every batch."""
    from megatron_pulse.tracing.from_module import source_of

    source = source_of(backbone)
    fields = {"noisy": backbone.input_spec, **backbone.batch_fields}
    if source is None:
        return [_row(name, name, spec) for name, spec in fields.items()], []
    chain = source.chains.first
    called = {field: chain.inputs[name] for name, field in source.field_of.items()}
    called["noisy"] = chain.inputs[chain.sample]
    rows = [_row(called[name], name, spec) for name, spec in fields.items()]
    return rows, sorted(source.chains.constants)


def _row(name: str, field: str, spec: TensorSpec) -> InputRow:
    dtype = "the run's" if spec.dtype == "compute" else spec.dtype
    return InputRow(name, field, spec.shape, dtype, spec.others)


def _shapes(row: InputRow) -> str:
    return ", ".join(dict.fromkeys(map(_shape, (row.shape, *row.others))))


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"
