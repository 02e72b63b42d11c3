"""Pictures that a run draws while it trains, through its own pipeline.

All ranks run the sampler in lockstep. A denoising step is one forward-only pass, whose predictions
return to the first stage's device. This device has x_t, the scheduler and the guidance; the other
devices of a pipeline step a sample of the same shape that nobody reads. Replicas share the samples.
The last rank, which has Megatron's writers, decodes and writes the pictures.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import megatron.training.training as training
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.training.global_vars import get_tensorboard_writer, get_timers, get_wandb_writer
from torch import Tensor, nn

from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.rng_state import generators_kept
from megatron_pulse.dataclass_flags import DTYPES
from megatron_pulse.diffusion.objectives import DiffusionProcess
from megatron_pulse.diffusion.process_flags import FlowGrid
from megatron_pulse.diffusion.sampling import Fields, setting_faults
from megatron_pulse.encoders.autoencoder import Autoencoder
from megatron_pulse.encoders.components import pipeline_folder_faults
from megatron_pulse.encoders.sample_decoder import (
    SampleDecoder,
    write_animation,
    write_folder,
    write_sheet,
)
from megatron_pulse.encoders.text_encoders import TextEncoders
from megatron_pulse.encoders.text_recipe import VAE
from megatron_pulse.errors import UserError, collecting
from megatron_pulse.files import unwritable
from megatron_pulse.integration.flags.pulse_options import PulseOptions, drops_captions
from megatron_pulse.integration.flags.sample_flags import (
    DEFAULT_GUIDANCE,
    DEFAULT_ROWS,
    SampleChoice,
    parse_classes,
)
from megatron_pulse.integration.loop.forward_backward import PulseSchedule
from megatron_pulse.integration.loop.stop_requests import EvaluationStopped, agreed_stop_request
from megatron_pulse.integration.megatron.model import unwrap
from megatron_pulse.integration.sampling import (
    Parts,
    Request,
    Sampler,
    TrainedModel,
    request_classes,
    request_encoded,
    request_from_data,
    request_prompts,
    sample_parts,
)
from megatron_pulse.integration.training_data import DiffusionData, makes_pixels
from megatron_pulse.integration.training_encoders import other_autoencoder, require_same_encoders
from megatron_pulse.planner.program.plan import Plan
from megatron_pulse.runtime.collectives import broadcast_from_rank_0, gather_objects
from megatron_pulse.runtime.tensor_settings import compute_device
from megatron_pulse.runtime.watchdog.progress import PROGRESS
from model_specs import padding_frames, text_recipe

FOLDER = "samples"
"""Folder in ``--save``, and name of the images in TensorBoard and W&B."""
SHEET = "sheet.png"
ANIMATION = "sheet.gif"
"""Videos beside the sheet, on which each is a row of frames."""
_PREFIX = "--pulse-sample-"


def picture_faults(
    args: argparse.Namespace, choice: SampleChoice, backbone: Backbone, process: DiffusionProcess
) -> list[str]:
    """Faults of pictures that this run cannot draw, found without reading any weights."""
    if choice.sample_every is None:
        return []
    every = f"{_PREFIX}every"
    if backbone.parts:
        return [f"{every} does not apply to a cascade: leave it out, and use 'pulse sample'"]
    faults = [*_row_faults(args, choice, backbone)]
    if choice.sample_folder is None and args.save is None:
        faults.append(f"{every} needs a place for pictures: give {_PREFIX}folder DIR, or --save")
    elif fault := unwritable(_folder(args, choice)):
        faults.append(f"{_PREFIX}folder {_folder(args, choice)}: {fault}")
    guidance = 1.0 if choice.sample_guidance is None else choice.sample_guidance
    with collecting(faults):
        grid = FlowGrid(choice.sample_flow_grid or FlowGrid.EVEN)
        known = process.for_tokens(backbone.image_tokens)
        steps, eta = choice.sample_steps, choice.sample_eta
        found = setting_faults(known, steps, guidance, eta, grid, has_null=True)
        faults += [f"pictures: {fault}" for fault in found]
    with collecting(faults):
        faults += _decoder(args, choice, backbone, weighs=False).faults(_PREFIX, f"drop {every}")
    if choice.sample_vae is not None and makes_pixels(args):
        faults.append(f"{_PREFIX}vae decodes latents, but the run trains on pixels: leave it out")
    return faults


def _row_faults(
    args: argparse.Namespace, choice: SampleChoice, backbone: Backbone
) -> Iterator[str]:
    """Faults of prompts and classes."""
    count, text = backbone.num_classes, choice.sample_classes
    if text is not None and count is None:
        yield f"{_PREFIX}classes: {backbone.name} has no classes: leave it out"
    elif text is not None and count is not None:
        with_numbers: list[int] = []
        with collecting([]):  # a malformed text is the flag's own fault
            with_numbers = parse_classes(text)
        if beyond := [number for number in with_numbers if number >= count]:
            shown = ", ".join(map(str, beyond[:5])) + (", ..." if len(beyond) > 5 else "")
            yield f"{_PREFIX}classes: the model has classes 0-{count - 1}, not {shown}"
    folder = _encoders_folder(args, choice)
    if choice.sample_encoders is not None and folder is not None:
        yield from (f"{_PREFIX}encoders {fault}" for fault in pipeline_folder_faults(folder))
    worded = ("captions:", "pairs:", "videos:")
    if not choice.sample_prompt or (args.pulse_data or "").startswith(worded):
        return
    if folder is None:
        yield (
            f"{_PREFIX}prompt: {args.pulse_data or 'the data'} does not name its text encoders. "
            f"Give their pipeline folder ({_PREFIX}encoders DIR), or use {_PREFIX}from-data"
        )


def _folder(args: argparse.Namespace, choice: SampleChoice) -> Path:
    return Path(choice.sample_folder or Path(args.save) / FOLDER)


def _folder_of_step(args: argparse.Namespace, choice: SampleChoice, iteration: int) -> Path:
    return _folder(args, choice) / f"step_{iteration}"


def _encoders_folder(args: argparse.Namespace, choice: SampleChoice) -> Path | None:
    named = choice.sample_encoders or args.pulse_encoders
    return None if named is None else Path(named)


def _decoder(
    args: argparse.Namespace, choice: SampleChoice, backbone: Backbone, *, weighs: bool
) -> SampleDecoder:
    """Decoder of the run's samples into pictures; raises UserError for an unusable folder."""
    folder = None if choice.sample_vae is None else Path(choice.sample_vae)
    encoders = _encoders_folder(args, choice)
    if folder is None and encoders is not None and (encoders / VAE).is_dir():
        folder = encoders / VAE
    if folder is None or makes_pixels(args):
        if choice.sample_vae_tiling:
            raise UserError(
                f"{_PREFIX}vae-tiling: no autoencoder decodes the samples. Leave it out"
            )
        if choice.sample_encoders is not None and not makes_pixels(args):
            raise UserError(
                f"{_PREFIX}encoders {encoders}: there is no folder {VAE} in it, so samples stay "
                f"latents. Give {_PREFIX}vae DIR"
            )
        return SampleDecoder(backbone.sample_spec.shape, None)
    autoencoder = Autoencoder(folder, weighs=weighs, tiled=choice.sample_vae_tiling)
    padding = padding_frames(backbone.record)
    return SampleDecoder(backbone.sample_spec.shape, autoencoder, padding)


def lacks_pictures(args: argparse.Namespace, choice: SampleChoice, iteration: int) -> bool:
    """True if the run draws pictures, and those of ``iteration`` are missing."""
    if choice.sample_every is None:
        return False
    return not (_folder_of_step(args, choice, iteration) / SHEET).exists()


class SamplePictures:
    """Pictures of a run: what is drawn, and when.

    Construction is collective; prompts are encoded by one rank. Raises ValueError, on all ranks, if
    the model reads more than is given.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        options: PulseOptions,
        plan: Plan,
        data: DiffusionData,
        schedule: PulseSchedule,
    ) -> None:
        self._args, self._choice, self._plan = args, options.samples, plan
        self._schedule = schedule
        self._model = TrainedModel(
            plan.backbone, data.process, self._predict, args, Path(args.save or "."),
            dynamic_shift=data.dynamic_shift,
        )  # fmt: skip
        self._chunks: list[nn.Module] = []
        self._decoder: SampleDecoder | None = None
        self._has_begun = False
        rows = self._rows()
        self._captions = [str(row) for row in rows for _ in range(self._choice.sample_count)]
        with PROGRESS.during("encoding the prompts of pictures", patient=True):
            self._request = broadcast_from_rank_0(lambda: self._requested(rows))
        self._sampler = Sampler(
            self._choice.sample_steps,
            self._guidance(),
            self._choice.sample_seed,
            self._choice.sample_eta,
            flow_grid=None if (grid := self._choice.sample_flow_grid) is None else FlowGrid(grid),
        )

    def describe(self) -> str:
        """Line on what is drawn, when, and where it is written."""
        choice = self._choice
        weights = "raw" if choice.sample_raw or not self._args.pulse_ema_decay else "EMA"
        backbone, what = self._plan.backbone, f"{self._request.count}"
        if backbone.num_shapes > 1:
            what += f" of {'x'.join(map(str, backbone.sample_spec.shape))} (the first shape)"
        caution = self._model.rules.caution
        return (
            f"pictures: {what} every {choice.sample_every} steps, with {weights} "
            f"weights, {self._sampler.num_steps} steps, guidance {self._sampler.guidance:g}, in "
            f"{_folder(self._args, choice)}" + (f"\nwarning: {caution}" if caution else "")
        )

    def before_first_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's ``train_step`` to draw with the weights at which this start begins."""

        def step(forward: Any, data: Any, model: Any, optimizer: Any, *rest: Any, **kw: Any) -> Any:
            if not self._has_begun:
                self._has_begun = True
                self.draw(model, optimizer, self._args.curr_iteration)
            return train_step(forward, data, model, optimizer, *rest, **kw)

        return step

    def after_steps(self, decide: Callable[..., bool]) -> Callable[..., bool]:
        """Wrap Megatron's ``checkpoint_and_decide_exit`` to draw after the step is saved."""

        def decide_and_draw(
            model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any, **kw: Any
        ) -> bool:
            if decide(model, optimizer, scheduler, iteration, *rest, **kw):
                return True
            every = self._choice.sample_every
            assert every is not None
            if iteration % every == 0 or iteration == self._args.train_iters:
                self.draw(model, optimizer, iteration)
            return False

        return decide_and_draw

    def in_place_of_training(
        self, forward: Any, chunks: list[nn.Module], optimizer: Any, *rest: Any, **kw: Any
    ) -> NoReturn:
        """Replacement of Megatron's ``train``: draw a finished run's last pictures, and end."""
        get_timers()("interval-time", log_level=0).start()
        self.draw(chunks, optimizer, self._args.iteration)
        raise SystemExit(0)

    def draw(self, chunks: list[nn.Module], optimizer: Any, iteration: int) -> None:
        """Draw and write the pictures of a step (collective).

        A stop request ends it between denoising steps. Pictures that cannot be drawn or written are
        a warning, and training continues.
        """
        interval = get_timers()("interval-time", log_level=0)
        interval.stop()
        self._chunks = chunks
        try:
            with PROGRESS.during(f"drawing the pictures of step {iteration}"):
                with _sampling(chunks, optimizer, raw=self._choice.sample_raw):
                    samples, fault = self._samples()
                if dist.get_rank() == dist.get_world_size() - 1:
                    self._finish(samples, fault, iteration)
        except EvaluationStopped:
            if dist.get_rank() == 0:
                print(f"stop request: no pictures of step {iteration}", flush=True)
        finally:
            self._chunks = []
            interval.start()

    def _predict(
        self, noisy: Tensor, timesteps: Tensor, conditioning: Fields, batch_size: int | None = None
    ) -> Tensor:
        """Prediction through the pipeline; zeros on devices without the first stage."""
        if agreed_stop_request():
            raise EvaluationStopped
        given = {"timesteps": timesteps, **conditioning}
        fields = {name: given[name] for name in self._plan.backbone.batch_fields}
        fields["timesteps"] = timesteps
        return self._schedule.predict(self._chunks, noisy, fields, batch_size or len(noisy))

    def _samples(self) -> tuple[Tensor, str]:
        """All samples on every rank, and a fault of those that are unusable."""
        parts = Parts.of(self._request.count, self._choice.sample_batch_size)
        num_replicas = parallel_state.get_data_parallel_world_size()
        replica = parallel_state.get_data_parallel_rank()
        # All replicas make equal passes. Parts beyond the last repeat samples, and are dropped.
        own = math.ceil(parts.num / num_replicas)
        numbers = range(replica * own, (replica + 1) * own)
        first_device = self._plan.placement.device_of_stage[0]
        has_samples = (
            parallel_state.get_pipeline_model_parallel_rank() == first_device
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )
        fault, drawn = "", None
        try:
            drawn = sample_parts(self._model, self._request, parts, numbers, self._sampler)
        except ValueError as error:  # samples that are not finite, after all passes
            fault = str(error)
        device = compute_device()
        shape = self._model.backbone.sample_spec.shape
        whole = torch.zeros((num_replicas * own * parts.size, *shape), device=device)
        if has_samples and drawn is not None:
            whole[numbers.start * parts.size : numbers.stop * parts.size] = drawn.to(device)
        dist.all_reduce(whole.view(torch.int32))  # as integers: -0.0 stays -0.0
        faults = gather_objects(fault if has_samples else "")
        return whole[: self._request.count].cpu(), next(filter(None, faults), "")

    def _finish(self, samples: Tensor, fault: str, iteration: int) -> None:
        """Write pictures, or warn of the reason why there are none."""
        folder = _folder_of_step(self._args, self._choice, iteration)
        with PROGRESS.during(f"writing the pictures of step {iteration}", patient=True):
            try:
                if fault:
                    raise ValueError(fault)
                self._write(samples, folder, iteration)
            except (ValueError, OSError) as error:
                print(f"warning: no pictures of step {iteration}: {error}", flush=True)
            else:
                print(f"pictures of step {iteration}: {folder}", flush=True)

    def _write(self, samples: Tensor, folder: Path, iteration: int) -> None:
        if self._decoder is None:
            self._decoder = _decoder(self._args, self._choice, self._plan.backbone, weighs=True)
        with generators_kept():
            pictures = self._decoder(samples).cpu()
        for old in folder.glob("[0-9]*.png"):  # of this step, before the run was resumed
            old.unlink()
        files = _write_beside_others(pictures, folder)
        each = self._choice.sample_count
        titles = [text if i % each == 0 else "" for i, text in enumerate(self._captions)]
        write_sheet(pictures, folder / SHEET, each, titles)
        if pictures.dim() == 5:
            write_animation(pictures, folder / ANIMATION, each, titles)
        _log_images(folder / SHEET, files, self._captions, iteration)

    def _rows(self) -> list[Any]:
        """Prompts, classes or indices of validation samples to draw."""
        choice = self._choice
        if choice.sample_prompt:
            return list(choice.sample_prompt)
        if choice.sample_from_data is not None:
            return list(range(choice.sample_from_data))
        if choice.sample_classes is not None:
            return list(parse_classes(choice.sample_classes))
        return list(range(min(self._model.num_classes or 1, DEFAULT_ROWS)))

    def _requested(self, rows: Sequence[Any]) -> Request:
        """Conditioning of all pictures, by the encoders of the run; raises ValueError."""
        choice = self._choice
        asked = [row for row in rows for _ in range(choice.sample_count)]
        folder = _encoders_folder(self._args, choice)
        try:
            if choice.sample_from_data is not None:
                return request_from_data(self._model, asked)
            if not choice.sample_prompt:
                return request_classes(self._model, asked)
            if folder is None:
                return request_prompts(self._model, asked)
            return self._encoded(folder, asked)
        except OSError as error:
            raise UserError(f"{_PREFIX}prompt: {error}") from error
        finally:
            gc.collect()
            if torch.cuda.is_available():  # the encoders' memory is for training
                torch.cuda.empty_cache()

    def _encoded(self, folder: Path, prompts: Sequence[str]) -> Request:
        backbone, named = self._plan.backbone, self._args.pulse_encoders_dtype
        recipe = text_recipe(backbone.name, backbone)
        if recipe is None:
            raise UserError(f"{_PREFIX}prompt: {backbone.name} reads no text: leave it out")
        shapes = {name: backbone.batch_fields[name].shape for name in recipe.fields}
        dtype = None if named is None else getattr(torch, DTYPES[named])
        encoders = TextEncoders(folder, recipe, shapes, dtype)
        require_same_encoders(encoders, self._args)
        decoder = _decoder(self._args, self._choice, backbone, weighs=False)
        if decoder.autoencoder is not None:
            if caution := other_autoencoder(decoder.autoencoder, self._args):
                print(f"warning: pictures: {caution}", flush=True)
        height, width = (decoder.factor * side for side in backbone.sample_spec.shape[-2:])
        negative = self._choice.sample_negative_prompt
        return request_encoded(self._model, prompts, encoders, (height, width), negative)

    def _guidance(self) -> float:
        """Guidance of the pictures; raises UserError if there is nothing to guide away from."""
        given = self._choice.sample_guidance
        if not self._request.null:
            if given not in (None, 1):
                raise UserError(
                    f"{_PREFIX}guidance {given:g}: {self._plan.backbone.name} has nothing that can "
                    "be dropped (no text, no null class): leave it out"
                )
            return 1.0
        if given is not None:
            return given
        dropped = drops_captions(self._args, self._plan.backbone)
        guides = dropped or self._choice.sample_negative_prompt is not None
        return DEFAULT_GUIDANCE if guides else 1.0


@contextmanager
def _sampling(chunks: Sequence[nn.Module], optimizer: Any, *, raw: bool) -> Iterator[None]:
    """Evaluation mode with EMA weights (unless ``raw``); afterwards all is as before, to the bit.

    Restores weights, modes, the generators of the process, and Megatron's. Collective.
    """
    is_hooked = bool(getattr(chunks[0], "remove_forward_pre_hook_handles", None))
    if is_hooked:  # parameters are gathered now, not in forward
        training.disable_forward_pre_hook(chunks, optimizer=optimizer)
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with generators_kept(), torch.no_grad():
            for chunk in chunks:
                chunk.eval()
            for chunk in [] if raw else chunks:
                _take_ema(chunk, kept)
            yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
        for chunk in chunks:
            chunk.train()
        tracker.set_states(states)
        if is_hooked:
            training.enable_forward_pre_hook(chunks)


def _take_ema(chunk: nn.Module, kept: list[tuple[Tensor, Tensor]]) -> None:
    """Replace a stage's trained parameters by their EMA; append their copies in host memory."""
    stage = unwrap(chunk)
    if stage.ema is None or stage.main_params is None:
        return
    if stage.fully_sharded is not None:
        for name, average in stage.ema.state.items():
            rows = stage.fully_sharded.own[name].detach()
            kept.append((rows, rows.to("cpu", copy=True)))
            rows.copy_(average.view(rows.shape))
        return
    parameters = dict(stage.named_parameters())
    for name in stage.trained_names:
        average = stage.main_params.gather(stage.ema.state, [name])[name]
        kept.append((parameters[name], parameters[name].detach().to("cpu", copy=True)))
        parameters[name].copy_(average)


def _write_beside_others(pictures: Tensor, folder: Path) -> list[Any]:
    """Write pictures into ``folder``, which may hold other files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        files = write_folder(pictures, Path(beside) / "new")["files"]
        for made in (Path(beside) / "new").iterdir():
            if (folder / made.name).is_dir():
                shutil.rmtree(folder / made.name)
            os.replace(made, folder / made.name)

    def moved(path: Any) -> Any:
        if isinstance(path, list):
            return [moved(each) for each in path]
        return str(folder / Path(path).relative_to(Path(beside) / "new"))

    return [moved(path) for path in files]


def _log_images(sheet: Path, files: Sequence[Any], captions: Sequence[str], step: int) -> None:
    """Show the sheet, and pictures that are no videos, in TensorBoard and W&B, if these are on."""
    import numpy as np
    from PIL import Image

    pairs = zip(files, captions, strict=True)
    alone = [(path, text) for path, text in pairs if isinstance(path, str)]
    if (writer := get_tensorboard_writer()) is not None:
        single = ((f"{FOLDER}/{i}", path) for i, (path, _) in enumerate(alone))
        for name, path in [(FOLDER, str(sheet)), *single]:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            writer.add_image(name, pixels, step, dataformats="HWC")
        writer.flush()
    if (wandb := get_wandb_writer()) is not None:
        shown = [wandb.Image(path, caption=text) for path, text in alone]
        wandb.log({f"{FOLDER} sheet": wandb.Image(str(sheet)), FOLDER: shown}, step)
