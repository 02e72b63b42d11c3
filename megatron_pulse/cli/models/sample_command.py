"""``pulse sample``: pictures from a checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from megatron_pulse.backbone.appended_fields import REFERENCE_IMAGE, TIME_IDS
from megatron_pulse.backbone.recorded_sizes import GIVES_SIZE, options_at_size
from megatron_pulse.cli import run_command
from megatron_pulse.cli.backbone_flags import add_option_flag, option_faults, options_of
from megatron_pulse.cli.flag_checks import (
    add_flag,
    add_parser,
    as_user_error,
    command_faults,
    require,
    vae_faults,
    warn,
)
from megatron_pulse.cli.import_megatron import prepare_megatron
from megatron_pulse.cli.models.encoder_flags import (
    add_encoder_flags,
    add_vae_tiling,
    autoencoder_folder,
    encoder_faults,
    open_encoders,
    take_encoders_of,
)
from megatron_pulse.cli.models.input_images import (
    SEEN,
    ClipSettings,
    continued,
    controlled,
    inpainted,
    referenced,
)
from megatron_pulse.cli.models.sample_output import (
    Output,
    output_faults,
    output_of,
    writer_of,
)
from megatron_pulse.cli.output import add_json, print_result
from megatron_pulse.cli.shared_flags import add_checkpoint_flags
from megatron_pulse.dataclass_flags import (
    ABOVE_ZERO,
    DTYPES,
    FROM_ZERO,
    FROM_ZERO_TO_ONE,
    PIXELS,
    RECIPE,
    TO_4096,
    TO_MILLION,
    Range,
    add_flags,
    flag_name,
    read_flags,
)
from megatron_pulse.diffusion.process_flags import (
    OF_TRAINING,
    FlowGrid,
    Objective,
    ProcessChoice,
    SamplingNoise,
)
from megatron_pulse.encoders.sample_decoder import FPS, SampleDecoder
from megatron_pulse.errors import UserError, collecting
from megatron_pulse.integration.flags.sample_flags import (
    DEFAULT_BATCH,
    DEFAULT_GUIDANCE,
    DEFAULT_STEPS,
    SEED,
    guidance_faults,
    guidance_text,
    parse_classes,
    parse_guidance,
)
from megatron_pulse.mp4 import require_pyav

if TYPE_CHECKING:
    from megatron_pulse.encoders.image_encoder import ImageEncoder
    from megatron_pulse.integration.pipeline_sampling import SamplingJob
    from megatron_pulse.integration.sampling import Request, TrainedModel

_DESCRIPTION = """\
Runs in one process (on a GPU if there is one) or on --devices, for checkpoints of any layout, with
EMA weights unless --raw. The output is

  -o FILE.png           a sheet with one row per class, prompt, or sample of the data
  -o FILE.gif|.mp4      videos side by side (.mp4: pip install megatron-pulse[video])
  -o DIR                a file for each picture or video frame, which --json lists
  -o FILE.safetensors   the samples undecoded

--prompt takes the text encoders and autoencoder of --encoders, a diffusers pipeline folder
(default: that of the training's --pulse-encoders). Encoders other than those of the training are
refused. Without any, the model must have been trained on the words of --pulse-data captions:PATH.
--from-data takes the text states of validation samples. A ControlNet sees the central square of
--control-image, as in training. An inpainting model draws the white parts of --mask in --image.

Noise is drawn in float32 on the CPU and depends on --seed and the number of the sample alone. With
--noise diffusers it is that of torch.Generator().manual_seed(SEED) for the whole batch: DDIM and
FlowMatchEulerDiscreteScheduler with the same --steps, --guidance and encoders then give the
pipeline's picture.

examples:
  pulse sample --load runs/quickstart/checkpoints -o digits.png --score mnist
  pulse sample --load runs/a --iteration 4000 --raw --classes 3,5 --guidance 1.5 -o raw.png
  pulse sample --load runs/latents --classes 0-9 --vae sd-vae-ft-mse -o birds.png
  pulse sample --load runs/emoji/checkpoints --prompt "red heart" --prompt "cat face" -o emoji.png
  pulse sample --load runs/photos --prompt "a red bird" --encoders sd-v1.5 -o birds/ --json
  pulse sample --load runs/control --prompt "a red bird" --control-image edges.png -o bird.png
  pulse sample --load runs/fill --prompt "a red bird" --image tree.png --mask where.png -o bird.png
  pulse sample --load runs/svd --image bird.png --encoders svd --guidance 1,3 -o bird.mp4
  pulse sample --load runs/high --low-noise runs/low --prompt "a bird" --encoders wan -o bird.mp4
  pulse sample --load runs/text --from-data 4 --vae sd-vae-ft-mse -o held-out.png
  pulse sample --load runs/flux --prompt "a red bird" --devices 4 -o bird.png
  pulse sample --load runs/a --height 768 --width 512 --vae sd-vae-ft-mse -o tall.png
"""


SVD = ClipSettings()
"""Settings of SVD's pipeline."""
_STEPS_END = "the timesteps of the model's process"
_STEPS = Range(lambda value: 1 <= value <= 1_000_000, f"from 1 to {_STEPS_END}")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``sample``."""
    parser = add_parser(commands, "sample", "draw samples from a checkpoint", _DESCRIPTION, run)
    add = partial(add_flag, parser)
    add_checkpoint_flags(parser)
    add(
        "-o, --output PATH",
        "FILE.png (a sheet), FILE.gif, FILE.mp4, DIR (a file for each picture) or FILE.safetensors",
        type=Path,
        required=True,
    )
    what = parser.add_mutually_exclusive_group()
    add_flag(
        what, "--classes CLASSES", "such as 0-9 or 3,5 (default: the first ten, or all if fewer)"
    )
    add_flag(what, "--prompt TEXT", "text to draw (repeatable)", action="append")
    add_flag(
        what,
        "--from-data N",
        "draw with the conditioning of the first N validation samples of the training data",
        within=TO_MILLION,
        type=int,
    )
    add("--negative-prompt TEXT", "text to be guided away from, with --prompt")
    add(
        "--control-image FILE",
        "picture that a ControlNet follows, for all rows, or one for each (repeatable)",
        type=Path,
        action="append",
        default=[],
    )
    add(
        "--image FILE",
        "picture that a model of image to video continues, of which an inpainting model draws "
        "parts anew, or that is edited; counts as of --control-image (repeatable)",
        type=Path,
        action="append",
        default=[],
    )
    add(
        "--mask FILE",
        "parts to draw anew, white in a grey picture: one for each --image",
        type=Path,
        action="append",
        default=[],
    )
    add_encoder_flags(parser)
    add("--data SPEC", "dataset of --from-data (default: that of the training)")
    images = "images in each row (default 8)"
    add("--per-class N", images, within=TO_MILLION, default=8)
    add("--steps N", "sampler steps (default 50)", within=_STEPS, default=DEFAULT_STEPS)
    add(
        "--devices N",
        "ranks of this machine that share the model, for one that exceeds a device (default 1; "
        "torchrun's ranks share it without the flag)",
        within=TO_4096,
        type=int,
    )
    add(
        "--batch-size N",
        f"samples of one forward pass, which guidance doubles; bits depend on it (default "
        f"{DEFAULT_BATCH})",
        within=TO_MILLION,
        default=DEFAULT_BATCH,
    )
    add(
        "--guidance W|W,W",
        "classifier-free guidance; 1 is none (default 2; 1 after training with "
        "--pulse-class-dropout 0, unless there is a --negative-prompt); of SVD that of the first "
        "and of the last frame, 1,3 in its pipeline",
        type=parse_guidance,
    )
    add(
        "--low-noise DIR",
        "checkpoint of the expert for times below the boundary (Wan 2.2: transformer_2); --load is "
        "that for later ones (default: the other expert of --load, if it has two)",
        type=Path,
    )
    add(
        "--boundary-ratio R",
        "share of the process where --low-noise begins (default: where --pulse-min-time of the one "
        "and --pulse-max-time of the other meet)",
        type=FROM_ZERO_TO_ONE.read,
    )
    add(
        "--low-noise-guidance W",
        "guidance of --low-noise (default: --guidance)",
        within=FROM_ZERO,
        type=float,
    )
    add(
        "--eta E",
        "DDIM's share of fresh noise in each step, 0 to 1; not for flow (default 0)",
        type=FROM_ZERO_TO_ONE.read,
        default=0.0,
    )
    add("--seed SEED", "of the starting noise (default 0)", within=SEED, default=0)
    add(
        "--noise",
        "each sample's own, or that of a diffusers pipeline's generator (default per-sample)",
        choices=[str(kind) for kind in SamplingNoise],
        default=str(SamplingNoise.PER_SAMPLE),
    )
    add(
        "--flow-grid",
        "times of flow before the shift: N equal steps from 1, as Flux, or the scheduler's "
        "own, as SD3 and Wan (default: as the pipeline of imported weights, else even)",
        choices=[str(kind) for kind in FlowGrid],
    )
    size = "of the pictures in pixels (default: that of training, the first of several)"
    add("--height H", size, within=PIXELS, type=int)
    add("--width W", size, within=PIXELS, type=int)
    add_option_flag(parser, "draw at another size of latents or text length: sample_size=64")
    add("--vae DIR|hf:ID", "decode latents with this AutoencoderKL folder", type=Path)
    add_vae_tiling(parser, "decode")
    add(
        "--score",
        "share of images that a classifier of these real digits takes for the digit asked for",
        choices=["mnist", "digits8"],
    )
    add(
        "--fps R",
        "frames a second of -o .gif and .mp4, which SVD also reads (default 16; SVD 7)",
        type=float,
        within=ABOVE_ZERO,
    )
    add("--motion-bucket M", "motion that SVD reads (default 127)", within=FROM_ZERO, type=float)
    add(
        "--frame-noise S",
        "strength of the noise on SVD's first frame (default 0.02)",
        within=FROM_ZERO,
        type=float,
    )
    add_json(parser)
    process = parser.add_argument_group(
        "diffusion process", "Replaces the process of the checkpoint."
    )
    add_flags(ProcessChoice, process, without=OF_TRAINING, unsaid="default: the checkpoint's")


def run(args: argparse.Namespace) -> None:
    """Load, sample, score, write; with ``--devices`` on ranks that this process starts."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks == 1:
        require(_check(args))
        if (args.devices or 1) > 1:
            words = ["--nproc-per-node", str(args.devices), "-m", "megatron_pulse.cli"]
            run_command.run(argparse.Namespace(command_line=[*words, *args.words]))
        else:
            _run(args, None)
        return
    prepare_megatron()
    from megatron_pulse.integration.pipeline_sampling import joined_job

    with joined_job() as job:
        try:
            require(_check(args))
            if args.devices not in (None, num_ranks):
                raise UserError(f"--devices {args.devices}: {num_ranks} ranks were started")
            _run(args, job) if job.rank == 0 else job.serve(_load(args, job))
        except UserError as error:
            job.release()
            job.say_once(f"pulse sample: error: {error}")
            sys.exit(2)


def _load(args: argparse.Namespace, job: SamplingJob | None, on_host: bool = False) -> TrainedModel:
    from megatron_pulse.integration.sampling import load_model

    load = partial(load_model, on_host=on_host) if job is None else job.load_model
    with as_user_error(ValueError):
        return load(
            args.load,
            args.iteration,
            averaged=not args.raw,
            data=args.data,
            options={**options_of(args), **_size(args)},
            choice=read_flags(ProcessChoice, args),
            chain=args.chain,
            frozen_folder=args.frozen_weights,
        )


def _experts(args: argparse.Namespace) -> tuple[argparse.Namespace, argparse.Namespace | None]:
    """Arguments that load the model, and those of the expert for low noise, if there is one.

    A checkpoint of two experts has both, in this order.
    """
    own = _pair_in(args.load, args.iteration)
    if args.low_noise is None and (args.chain is not None or not own):
        return args, None
    of_low: dict[str, Any] = {"load": args.low_noise, "iteration": None}
    if args.low_noise is None:
        of_low, args.low_noise = {}, args.load
    if args.chain is None and own:
        args.chain = own[0]
    of_low["chain"] = next(iter(_pair_in(args.low_noise, of_low.get("iteration"))[1:]), None)
    return args, argparse.Namespace(**{**vars(args), **of_low})


def _pair_in(folder: Path, iteration: Any) -> tuple[str, ...]:
    """Chains of the two experts in a checkpoint; none for others."""
    prepare_megatron()
    from megatron_pulse.integration.checkpoint.folders import CheckpointError
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
    from model_specs.derived.names import parts_of

    with suppress(CheckpointError):  # loading reports it
        saved = read_saved_run(folder, iteration)
        if saved.boundary is not None:
            return tuple(parts_of(saved.record["name"]))
    return ()


def _size(args: argparse.Namespace) -> dict[str, str]:
    """Options for samples of ``--height`` and ``--width``; empty without these flags."""
    if args.height is None:
        return {}
    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.integration.checkpoint.saved_run import read_saved_run
    from megatron_pulse.integration.training_data import makes_pixels

    saved = read_saved_run(args.load, args.iteration, args.frozen_weights).of_chain(args.chain)
    of_run, factor = argparse.Namespace(**vars(args)), 1
    take_encoders_of(of_run, saved.arguments)
    if (vae := autoencoder_folder(of_run)) is not None:
        factor = Autoencoder(vae, weighs=False).factor
    elif not makes_pixels(saved.arguments):
        raise UserError(
            "--height and --width count pixels of pictures, and latents need an autoencoder for "
            "these: give --vae or --encoders, or --option buckets=HEIGHTxWIDTH in latents"
        )
    require(
        [
            f"--{name} is {side}: must be a multiple of {factor}, the autoencoder's factor"
            for name, side in (("height", args.height), ("width", args.width))
            if side % factor
        ]
    )
    return options_at_size(saved.record, args.height // factor, args.width // factor)


def _run(args: argparse.Namespace, job: SamplingJob | None) -> None:
    prepare_megatron()
    import torch

    from megatron_pulse.data.digit_score import digit_score
    from megatron_pulse.diffusion.sampling import noise_left
    from megatron_pulse.diffusion.scheduler_export import describe_sampler
    from megatron_pulse.integration.experts import with_low_noise
    from megatron_pulse.integration.sampling import Sampler, sample_images

    first, second = _experts(args)
    model, boundary = _load(first, job), 0.0
    if second is not None:
        low = _load(second, None, on_host=True)
        with as_user_error(ValueError):
            model, boundary = with_low_noise(model, low, args.boundary_ratio)
    for change in model.changes:
        print(change, file=sys.stderr)
    if (shapes := model.backbone.num_shapes) > 1:
        shape = "x".join(map(str, model.backbone.sample_spec.shape))
        print(
            f"samples are {shape}, the first of its {shapes} shapes; --height H --width W draws "
            "another size",
            file=sys.stderr,
        )
    if args.from_data is not None and args.encoders is not None:
        if getattr(model.arguments, "pulse_encoders", None) is None:
            raise UserError("--encoders is for --prompt: the data have what the model reads")
        model.arguments.pulse_encoders = str(args.encoders)
    take_encoders_of(args, model.arguments)
    vae = autoencoder_folder(args)
    drawing = _drawing(vae, model, args.vae_tiling)
    kind, rows, request, drawn_before = _asked(args, model, drawing)
    require(_check_model(args, model, kind, rows, drawing))
    warn(noise_left(model.process, args.steps), model.rules.caution)
    asked = [row for row in rows for _ in range(args.per_class)]
    with as_user_error(ValueError, OSError):
        wanted = replace(request(model, asked), drawn_before=drawn_before)
    guidance, unguided = _guidance(args, model, bool(wanted.null))
    settings = Sampler(
        args.steps,
        1.0 if guidance is None else guidance,
        args.seed,
        args.eta,
        SamplingNoise(args.noise),
        None if args.flow_grid is None else FlowGrid(args.flow_grid),
        None if args.low_noise_guidance is None else (boundary, args.low_noise_guidance),
    )
    with as_user_error(ValueError, OSError):
        if job is not None:
            samples = job.draw(model, wanted, settings, args.batch_size)
        else:
            shows = sys.stderr.isatty()
            samples = sample_images(model, wanted, settings, args.batch_size, progress=shows)
    weights = "raw" if args.raw else "averaged"
    process = model.process_of(args.steps)
    described = process.describe()
    if boundary:
        ratio = boundary / model.process.num_timesteps
        whole = replace(process, min_time=0.0, max_time=1.0)
        described = f"{whole.describe()}, of two experts that meet at {ratio:g}"
    sampler, objective = describe_sampler(process), process.objective
    is_flow = objective == Objective.FLOW
    record: dict[str, Any] = {
        "checkpoint": str(model.folder),
        "low_noise": None if args.low_noise is None else str(args.low_noise),
        "boundary_ratio": boundary / model.process.num_timesteps or None,
        "backbone": model.backbone.name,
        "options": options_of(args),
        "height": args.height,
        "width": args.width,
        "weights": weights,
        "process": described,
        "sampler": sampler,
        "num_steps": args.steps,
        "guidance": guidance,
        "eta": args.eta if objective.has_betas else None,
        "flow_grid": str(model.flow_grid(settings.flow_grid)) if is_flow else None,
        "seed": args.seed,
        "noise": args.noise,
        kind: asked,
    }
    if args.control_image:
        record["control_images"] = [str(path) for path in args.control_image]
    if args.image:
        record["images"] = [str(path) for path in args.image]
        record["masks"] = [str(path) for path in args.mask]
    score = None
    if args.score:
        score = digit_score(samples, torch.tensor(asked), args.score)
        record["score"] = score.to_dict()
    captions = _captions(kind, rows, args.per_class)
    fps = args.fps or (SVD.fps if TIME_IDS in model.backbone.batch_fields else FPS)
    write = writer_of(args.output, drawing, args.per_class, captions, fps)
    with as_user_error(OSError):
        record |= write(samples)
    lines = [] if score is None else [str(score)]
    lines.append(
        f"{len(asked)} samples of {model.folder} ({weights} weights; {described}; "
        f"{sampler}, {args.steps} steps{unguided}): {args.output}"
    )
    if "frames" in record and len(record["frames"]) < samples.shape[drawing.frame_axis]:
        shown = ", ".join(map(str, record["frames"]))
        lines.append(f"the sheet shows frames {shown}; -o DIR writes all")
    print_result(args, lines, lambda: record)


def _guidance(
    args: argparse.Namespace, model: TrainedModel, has_null: bool
) -> tuple[float | tuple[float, float] | None, str]:
    """The guidance to sample with, and why it is none where nothing was said, for the report.

    None if there is no conditioning that can be dropped. Guidance away from a null class or caption
    that training never dropped to is guidance away from noise; a negative prompt takes its place.
    """
    from megatron_pulse.integration.flags.pulse_options import drops_captions
    from megatron_pulse.integration.flags.recipe_keys import with_keys
    from megatron_pulse.recipe.flags import keys_by_flag

    given = DEFAULT_GUIDANCE if args.guidance is None else args.guidance
    if not has_null:
        lacks = f"{model.backbone.name} is unconditional"
        if model.is_conditional:
            lacks = f"{model.backbone.name} has no null class"
        if args.guidance is None:
            return None, f"; not guided: {lacks}"
        if given != 1:
            raise UserError(
                f"--guidance {guidance_text(given)}: {lacks}, so there is nothing to guide away "
                "from; leave it out"
            )
        return None, ""
    if given == 1:
        return given, ""
    if drops_captions(model.arguments, model.backbone) or args.negative_prompt is not None:
        return given, ""
    null = "empty caption" if model.num_classes is None else "null class"
    by = "--pulse-class-dropout 0"
    if (model.folder.parent.parent / RECIPE).exists():
        by = with_keys(by, keys_by_flag())
    trained = f"trained with {by}, which trains no {null}"
    if args.guidance is None:
        return 1.0, f"; not guided: it was {trained} (--guidance W guides)"
    warn(
        f"{model.folder} was {trained}: guidance starts from an untrained one; --guidance 1 "
        "samples without"
    )
    return given, ""


def _check(args: argparse.Namespace) -> list[str]:
    faults = output_faults(args.output, "--output")
    faults += command_faults(args) + option_faults(args) + guidance_faults(args.guidance)
    if args.vae is not None and output_of(args.output) is Output.TENSORS:
        faults.append("--vae decodes samples, and -o FILE.safetensors writes them undecoded")
    faults += encoder_faults(args)
    if args.encoders is not None and not args.prompt and args.from_data is None and not args.image:
        faults.append("--encoders is for --prompt, --image, or for --from-data that it encodes")
    if args.negative_prompt is not None and not args.prompt:
        faults.append("--negative-prompt is for --prompt")
    elif args.negative_prompt is not None and args.guidance == 1:
        faults.append("--negative-prompt needs guidance, and --guidance 1 is none")
    if args.control_image and args.from_data is not None:
        faults.append("--control-image is for --prompt or --classes: --from-data has its own")
    faults += [
        f"--control-image {p}: there is no such file" for p in args.control_image if not p.is_file()
    ]
    if args.mask and len(args.image) != len(args.mask):
        faults.append("--mask: give one for each --image")
    if args.image and args.from_data is not None:
        faults.append("--image is for --prompt or --classes: --from-data has its own")
    faults += [
        f"--{kind} {p}: there is no such file"
        for kind, paths in (("image", args.image), ("mask", args.mask))
        for p in paths
        if not p.is_file()
    ]
    if args.data is not None and args.from_data is None:
        faults.append("--data is for --from-data")
    of_two = ("boundary_ratio", "low_noise_guidance")
    given = [flag_name(name) for name in of_two if getattr(args, name) is not None]
    if args.low_noise is None:
        if given and not (args.load.is_dir() and _pair_in(args.load, args.iteration)):
            faults += [f"{name} is for --low-noise" for name in given]
    elif not args.low_noise.is_dir():
        faults.append(f"--low-noise {args.low_noise} is not a folder of a checkpoint")
    elif (args.devices or int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        faults.append("--low-noise: two experts are sampled in one process: leave --devices out")
    elif isinstance(args.guidance, tuple):
        faults.append(f"--guidance {guidance_text(args.guidance)}: give one number to two experts")
    elif args.low_noise_guidance is not None and args.guidance in (None, 1):
        faults.append("--low-noise-guidance: also give --guidance, other than 1")
    if args.classes is not None:
        with collecting(faults):
            parse_classes(args.classes)
    if (args.height is None) != (args.width is None):
        faults.append("--height and --width are given together")
    elif args.height is not None and not option_faults(args):
        sized = [f"--option {key}" for key in options_of(args) if key in GIVES_SIZE]
        faults += [f"{option} and --height, --width give the same size twice" for option in sized]
    if not args.load.is_dir():
        faults.append(f"--load {args.load} is not a folder; give what training had as --save")
    return faults + vae_faults(args.vae)


def _asked(
    args: argparse.Namespace, model: TrainedModel, drawing: SampleDecoder
) -> tuple[str, list[Any], Callable[[TrainedModel, list[Any]], Request], tuple[int, ...]]:
    """Kind of the picture's rows, as the report calls it; the rows; a request for some of them; the
    shape of the noise on first frames."""
    from megatron_pulse.integration import sampling

    if args.from_data is not None:
        return "validation_samples", list(range(args.from_data)), sampling.request_from_data, ()
    classes = list(range(min(model.num_classes or 1, 10)))
    if args.classes is not None:
        classes = parse_classes(args.classes)
    rows, beside = controlled(
        args.control_image, model.backbone, args.prompt or classes, args.per_class
    )
    of_row = model.backbone, rows, args.per_class, drawing.autoencoder
    noise_shape: tuple[int, ...] = ()
    if args.mask:
        rows, masked = inpainted(list(zip(args.image, args.mask, strict=True)), *of_row)
    elif REFERENCE_IMAGE in model.backbone.batch_fields:
        rows, masked = referenced(args.image, *of_row)
    else:
        rows, masked, noise_shape = continued(
            args.image, *of_row, _image_encoder(args), _clip_settings(args, model)
        )
    seen = masked.pop(SEEN, ())
    beside = {**beside, **masked}
    if args.prompt and args.encoders is not None:
        opened = open_encoders(args, model.backbone.name, model.backbone)
        if opened is None:
            raise UserError(f"{model.backbone.name} reads no text")
        from megatron_pulse.integration.training_encoders import require_same_encoders

        encoders, _ = opened
        require_same_encoders(encoders, model.arguments)
        height, width = (drawing.factor * side for side in model.backbone.sample_spec.shape[-2:])
        negative = args.negative_prompt

        def encoded(model: TrainedModel, prompts: list[str]) -> Request:
            size = height, width
            return sampling.request_encoded(
                model, prompts, encoders, size, negative, beside, tuple(seen)
            )

        _warn_of_cut([*args.prompt, *filter(None, [negative])], encoders.excess, "token")
        return "prompts", rows, encoded, noise_shape
    if args.negative_prompt is not None:
        raise UserError("--negative-prompt needs text encoders: give --encoders DIR")
    if args.prompt:
        if not model.no_words:
            _warn_of_cut(args.prompt, model.word_encoder.excess, "word")
        return "prompts", rows, partial(sampling.request_prompts, beside=beside), noise_shape
    return "labels", rows, partial(sampling.request_classes, beside=beside), noise_shape


def _image_encoder(args: argparse.Namespace) -> Callable[[str], ImageEncoder] | None:
    """Opener of the vision encoder of ``--encoders``, for a field."""
    if args.encoders is None:
        return None
    import torch

    from megatron_pulse.encoders.image_encoder import ImageEncoder

    dtype = getattr(torch, DTYPES[args.encoders_dtype]) if args.encoders_dtype else None
    return lambda field: ImageEncoder(args.encoders, dtype, field)


def _clip_settings(args: argparse.Namespace, model: TrainedModel) -> ClipSettings:
    """Settings of SVD's clips; raises UserError if the model reads none."""
    given = {
        "--motion-bucket": args.motion_bucket,
        "--frame-noise": args.frame_noise,
    }
    if not {TIME_IDS} <= model.backbone.batch_fields.keys():
        require(
            [
                f"{flag}: {model.backbone.name} does not read it: leave it out"
                for flag, value in given.items()
                if value is not None
            ]
        )
    return ClipSettings(
        fps=SVD.fps if args.fps is None else max(1, round(args.fps)),
        motion_bucket=SVD.motion_bucket if args.motion_bucket is None else args.motion_bucket,
        noise=SVD.noise if args.frame_noise is None else args.frame_noise,
        seed=args.seed,
        as_diffusers=args.noise == SamplingNoise.DIFFUSERS,
    )


def _warn_of_cut(texts: list[str], excess: Callable[[str], int], unit: str) -> None:
    """Warn of each text that is truncated; ``excess`` counts the units that it loses."""
    for text in dict.fromkeys(texts):
        if over := excess(text):
            named = shorten(text, 60, placeholder=" ...")
            warn(f"{named!r} is {over} {unit}{'s' * (over > 1)} too long: its end does not count")


def _captions(kind: str, rows: list[Any], each: int) -> list[str]:
    """Under each image its class; under the first of a row its prompt, which may be long."""
    if kind == "labels":
        return [str(row) for row in rows for _ in range(each)]
    return [text for row in rows for text in (str(row), *[""] * (each - 1))]


def _check_model(
    args: argparse.Namespace,
    model: TrainedModel,
    kind: str,
    rows: list[Any],
    drawing: SampleDecoder,
) -> list[str]:
    faults = [] if output_of(args.output) is Output.TENSORS else drawing.faults()
    if output_of(args.output) is Output.ANIMATION:
        if len(drawing.shape) != 4:
            faults.append(f"-o {args.output}: the samples are pictures: give .png")
        if args.output.suffix.lower() == ".mp4":
            with collecting(faults):
                require_pyav()
    process, count = model.process, model.num_classes
    most = process.num_timesteps
    if args.steps > most:
        faults.append(f"--steps is {args.steps:,}; it must be from 1 to {most:,}, {_STEPS_END}")
    if not process.objective.has_betas and args.eta:
        faults.append(
            f"--eta is DDIM's, and the model's process is {process.objective}: leave it out"
        )
    if process.objective != Objective.FLOW and args.flow_grid == FlowGrid.SCHEDULER:
        faults.append(
            f"--flow-grid {args.flow_grid} is flow's, and the model's process is "
            f"{process.objective}: leave it out"
        )
    if args.classes is not None and count is None:
        faults.append(f"{model.backbone.name} has no classes: leave --classes out")
    if args.classes is not None and count is not None and any(row >= count for row in rows):
        beyond = [row for row in rows if row >= count]
        shown = ", ".join(map(str, beyond[:5])) + (", ..." if len(beyond) > 5 else "")
        faults.append(f"--classes: the model has classes 0-{count - 1}, not {shown}")
    if drawing.autoencoder is not None and model.makes_pixels:
        faults.append("--vae decodes latents, but the model was trained on pixels")
    if args.vae_tiling and drawing.autoencoder is None:
        faults.append("--vae-tiling needs an autoencoder: give --vae, or --encoders with one")
    if args.prompt and args.encoders is None and model.no_words:
        faults.append(f"--prompt: {model.no_words}")
    if args.score and (drawing.shape[0] != 1 or drawing.autoencoder is not None):
        faults.append("--score needs a model of grey digits (1 channel, no --vae)")
    if args.score and (kind != "labels" or any(row > 9 for row in rows)):
        faults.append("--score is for the classes 0-9")
    return faults


def _drawing(vae: Path | None, model: TrainedModel, tiled: bool) -> SampleDecoder:
    """Decoder of the model's samples into pictures."""
    shape = model.backbone.sample_spec.shape
    if vae is None:
        return SampleDecoder(shape, None)
    from megatron_pulse.encoders.autoencoder import Autoencoder
    from megatron_pulse.integration.training_encoders import other_autoencoder
    from model_specs import padding_frames

    autoencoder = Autoencoder(vae, tiled=tiled)
    warn(other_autoencoder(autoencoder, model.arguments))
    return SampleDecoder(shape, autoencoder, padding_frames(model.backbone.record))
