"""Tables and keys of a recipe, with the flag of each.

A key without a value leaves its flag out, so that the flag's default holds. Imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Gt, Lt

from megatron_pulse.adapters.adapter import ADAPTERS
from megatron_pulse.json_validation import Count, Natural, OneOf, Some, Text

Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Patterns = tuple[str, ...]


def key(meaning: str, flag: str = "", default: Any = None) -> Any:
    """Field of a table; ``flag`` takes its value, and is empty for keys of the launcher.

    A ``default`` of MISSING makes the key required.
    """
    metadata = {"meaning": meaning, "flag": flag}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Model:
    """The backbone, and the weights at which training begins."""

    weights: Text | None = key(
        "pretrained weights: a diffusers folder, hf:OWNER/NAME[@REVISION], a single file of "
        "'backbone' or 'module', or a checkpoint that 'pulse import' wrote. A diffusers folder "
        "also names the backbone"
    )
    backbone: Text | None = key("backbone by name ('pulse backbones')", "--pulse-backbone")
    module: Text | None = key(
        "torch module in place of a backbone: diffusers:CLASS, diffusers:FOLDER, FILE.py:FACTORY",
        "--pulse-module",
    )
    options: Mapping[str, Any] = key("options of the backbone or module", "--pulse-option", {})
    train: Patterns = key("patterns of the only parameters to train", "--pulse-train", ())
    freeze: Patterns = key("patterns of parameters to freeze", "--pulse-freeze", ())
    controlnet: Text | None = key(
        "freeze the UNet of 'weights' and train a ControlNet: new, a folder, or hf:OWNER/NAME"
    )
    null_class: bool = key("add a null class to a UNet with classes, for guidance", default=False)


@dataclass(frozen=True)
class AdapterKeys:
    """Adapter that is trained in place of the weights, which stay as they are."""

    type: Annotated[str, OneOf(ADAPTERS)] | None = key("lora, dora or lokr", "--pulse-adapter")
    rank: Count | None = key("rank of its matrices (default: 16)", "--pulse-adapter-rank")
    alpha: Positive | None = key(
        "its effect is multiplied by alpha / rank (default: the rank)", "--pulse-adapter-alpha"
    )
    targets: Some[Text] = key(
        "layers that it changes: ends of their names in diffusers, or patterns (default: the "
        "projections of attention)",
        "--pulse-adapter-target",
        (),
    )
    dropout: Annotated[float, Ge(0), Lt(1)] | None = key(
        "probability of dropping an entry of its input", "--pulse-adapter-dropout"
    )
    weights: Text | None = key(
        "adapter to begin with: a file or folder of diffusers, peft or kohya",
        "--pulse-adapter-weights",
    )
    factor: Count | None = key(
        "of lokr: size of the first Kronecker factor", "--pulse-adapter-factor"
    )


@dataclass(frozen=True)
class QuantizationKeys:
    """Storage of the frozen weights below an adapter."""

    type: Literal["nf4", "int8", "fp8"] | None = key(
        "quantise the linear layers of blocks; 'weights' is a diffusers folder of a traced class",
        "--pulse-quantization",
    )


@dataclass(frozen=True)
class DataSource:
    """One of several sources of samples."""

    path: Text = key("as data.source", default=MISSING)
    repeats: Count | None = key("times that each sample comes in an epoch")
    caption_prefix: Text | None = key("text before each caption")


@dataclass(frozen=True)
class Data:
    """Training samples."""

    source: Text | None = key(
        "mnist, digits8, or folder, captions, pairs, webdataset, parquet, datasets, videos, "
        "latents, each as KIND:PATH; several with commas, each perhaps with *REPEATS",
        "--pulse-data",
    )
    sources: tuple[DataSource, ...] = key(
        "in place of source: tables [[data.sources]] with path, repeats, caption_prefix",
        default=(),
    )
    resolution: Count | None = key(
        "side of pictures in pixels, or with buckets auto that of their area", "--pulse-resolution"
    )
    buckets: Text | Some[tuple[Count, Count]] | None = key(
        "shapes of pictures in pixels: auto, or [[width, height], ...]", "--pulse-buckets"
    )
    bucket_step: Count | None = key("of the sides of buckets auto", "--pulse-bucket-step")
    max_buckets: Count | None = key("most buckets auto (9)", "--pulse-max-buckets")
    flip: Annotated[float, Ge(0), Lt(1)] | None = key(
        "probability of mirroring a picture", "--pulse-flip"
    )
    crop: Literal["center", "random"] | None = key("where pictures are cropped", "--pulse-crop")
    fps: Positive | None = key("frames a second of clips", "--pulse-fps")
    frame_stride: Count | None = key("every so many are taken", "--pulse-frame-stride")
    motion_bucket: NotNegative | None = key("of SVD's clips", "--pulse-motion-bucket")
    frame_noise: Text | None = key(
        'on SVD\'s first frames, as "0.05,0.5": median, deviation', "--pulse-frame-noise"
    )
    clip_start: Literal["middle", "random"] | None = key(
        "where clips begin in films", "--pulse-clip-start"
    )
    shuffle_tags: bool = key("draw the order of captions' tags", "--pulse-shuffle-tags", False)
    keep_tags: Natural | None = key("first tags that keep their place", "--pulse-keep-tags")
    caption_prefix: Patterns = key(
        "text before each caption: one, or one for each source", "--pulse-caption-prefix", ()
    )
    default_caption: str | None = key("of pictures without one", "--pulse-default-caption")
    skip_corrupt: bool = key("replace unreadable pictures", "--pulse-skip-corrupt", False)
    masks: Text | None = key("folder of masks of the pictures, for the loss", "--pulse-masks")
    inpaint_masks: Text | None = key(
        "of an inpainting model: random, or a folder of masks", "--pulse-inpaint-masks"
    )
    bucket_batch: Count | None = key("samples in a row of one shape", "--pulse-bucket-batch")
    workers: Natural | None = key("processes per rank that read samples", "--num-workers")


@dataclass(frozen=True)
class Encoders:
    """Text encoders and autoencoder in the loop."""

    folder: Text | None = key("pipeline folder, or hf:OWNER/NAME", "--pulse-encoders")
    schedule: Patterns = key(
        "when they run: auto, store, fill, before-step, or NAME=one of these",
        "--pulse-encoder-schedule",
        (),
    )
    dtype: Literal["fp32", "bf16", "fp16"] | None = key(
        "of their weights", "--pulse-encoders-dtype"
    )


@dataclass(frozen=True)
class Process:
    """Diffusion process; by default that of the weights."""

    objective: Text | None = key("epsilon, v, sample, flow or edm", "--pulse-objective")
    noise_schedule: Text | None = key("scaled_linear, linear or cosine", "--pulse-noise-schedule")
    beta_start: Positive | None = key("first beta", "--pulse-beta-start")
    beta_end: Positive | None = key("last beta", "--pulse-beta-end")
    trained_betas: Text | None = key("JSON file of all betas", "--pulse-trained-betas")
    zero_terminal_snr: bool | None = key(
        "make the last timestep pure noise", "--pulse-zero-terminal-snr"
    )
    num_timesteps: Count | None = key("timesteps", "--pulse-num-timesteps")
    flow_shift: float | str | None = key(
        "shift of a flow's times: a number, or dynamic", "--pulse-flow-shift"
    )
    timestep_density: Text | None = key(
        "uniform; for flow, edm logit_normal, mode, cosmap; else speed", "--pulse-timestep-density"
    )
    logit_mean: float | None = key("of logit_normal (edm: of ln sigma)", "--pulse-logit-mean")
    logit_std: Positive | None = key("of logit_normal", "--pulse-logit-std")
    mode_scale: float | None = key("of mode", "--pulse-mode-scale")
    min_time: NotNegative | None = key("train times from this share on", "--pulse-min-time")
    max_time: Positive | None = key("train times below this share", "--pulse-max-time")
    boundary_ratio: Positive | None = key(
        "share of the process where two experts of a cascade meet", "--pulse-boundary-ratio"
    )
    self_conditioning: float | None = key(
        "share of steps with self-conditioning", "--pulse-self-conditioning"
    )
    replace: bool = key("train the weights to this new process", "--pulse-new-process", False)


@dataclass(frozen=True)
class Loss:
    """Training loss."""

    type: Text | None = key("mse, huber, or dpo on pairs", "--pulse-loss")
    huber_c: Positive | None = key("of huber", "--pulse-huber-c")
    dpo_beta: Positive | None = key("of dpo", "--pulse-dpo-beta")
    weighting: Text | None = key(
        "min-snr, debiased or p2; for flow also sigma-sqrt or cosmap", "--pulse-loss-weighting"
    )
    snr_gamma: Positive | None = key("of min-snr", "--pulse-snr-gamma")
    p2_gamma: NotNegative | None = key("of p2", "--pulse-p2-gamma")
    learned_sigma: bool = key("train it by the variational bound", "--pulse-learned-sigma", False)
    noise_offset: NotNegative | None = key("share of noise by channel", "--pulse-noise-offset")


@dataclass(frozen=True)
class Optimizer:
    """Optimizer and learning-rate schedule."""

    lr: Positive = key("maximum learning rate", "--lr", MISSING)
    type: Text | None = key(
        "adam or sgd; with emerging-optimizers muon or lion, for matrices", "--optimizer"
    )
    betas: tuple[float, float] | None = key("of Adam and Lion", "--adam-beta1 --adam-beta2")
    eps: Positive | None = key("of Adam", "--adam-eps")
    momentum: NotNegative | None = key("of SGD", "--sgd-momentum")
    weight_decay: NotNegative | None = key("of matrices", "--weight-decay")
    clip_grad: NotNegative | None = key(
        "maximum norm of all gradients; 0: no clipping", "--clip-grad"
    )
    schedule: Text | None = key(
        "constant, linear, cosine, inverse-square-root or WSD", "--lr-decay-style"
    )
    warmup_steps: Natural | None = key("warm-up of the learning rate", "--lr-warmup-iters")
    warmup_epochs: Positive | None = key(
        "warm-up in passes over the data, in place of warmup_steps", "--pulse-warmup-epochs"
    )
    min_lr: NotNegative | None = key("at the end of the schedule", "--min-lr")
    decay_steps: Count | None = key("length of the schedule", "--lr-decay-iters")
    wsd_decay_steps: Count | None = key("last part of WSD", "--lr-wsd-decay-iters")
    sharded: bool = key("shard its state over replicas", "--use-distributed-optimizer", False)
    cpu_offload: bool = key(
        "keep its state in host memory (needs sharded)", "--optimizer-cpu-offload", False
    )


@dataclass(frozen=True)
class Training:
    """Steps, batch, numbers."""

    batch_size: Count = key("samples a step, over all devices", "--global-batch-size", MISSING)
    steps: Count | None = key("steps in all, over all starts", "--train-iters")
    epochs: Positive | None = key("passes over the data, in place of steps", "--pulse-epochs")
    micro_batch_size: Count | None = key(
        "samples of a microbatch (auto: searched)", "--micro-batch-size"
    )
    dtype: Literal["fp32", "bf16", "fp16"] = key("of layers; main weights are fp32", default="fp32")
    seed: Natural | None = key("of weights, noise, times and order", "--seed")
    dropout: Annotated[float, Ge(0)] | None = key(
        "probability of dropping label and captions, for guidance", "--pulse-class-dropout"
    )
    encoder_dropout: Mapping[str, Annotated[float, Ge(0)]] = key(
        "of dropping a sample's text for one encoder: {text_encoder_2 = 0.1}",
        "--pulse-encoder-dropout",
        {},
    )
    ema_decay: Annotated[float, Ge(0)] | None = key("0: no EMA", "--pulse-ema-decay")
    deterministic: bool = key("deterministic kernels only", "--deterministic-mode", False)


@dataclass(frozen=True)
class Parallel:
    """Devices, and the plan by which they train."""

    devices: Count | None = key(
        "ranks that 'pulse train' starts (default: all GPUs; without any, pipeline x tensor x "
        "context)"
    )
    auto: bool | None = key(
        "profile, tune and keep the plan beside the run (default: unless a plan or a layout is "
        "given)",
        "--pulse-auto",
    )
    auto_context: bool = key(
        "let auto search context as well", "--pulse-auto-context", default=False
    )
    plan: Text | None = key("plan of 'pulse tune', file or folder", "--pulse-plan")
    pipeline: Count | None = key("devices of a pipeline", "--pipeline-model-parallel-size")
    tensor: Count | None = key("tensor parallelism", "--tensor-model-parallel-size")
    context: Count | None = key(
        "ranks that divide the tokens of each sample", "--context-parallel-size"
    )
    fsdp: bool = key(
        "shard the weights over all devices by FSDP2, without a pipeline (auto chooses it too)",
        "--pulse-fsdp",
        default=False,
    )
    fsdp_group: Count | None = key(
        "devices that share the weights, for HSDP (default: all)", "--pulse-fsdp-group"
    )
    fsdp_layers: Count | None = key("layers gathered together", "--pulse-fsdp-layers")
    fsdp_gather: Literal["pass", "microbatch", "step"] | None = key(
        "how often weights are gathered", "--pulse-fsdp-gather"
    )
    fsdp_reduce: Literal["microbatch", "step"] | None = key(
        "how often gradients are reduced", "--pulse-fsdp-reduce"
    )
    fsdp_prefetch: Natural | None = key("units gathered ahead", "--pulse-fsdp-prefetch")
    placement: Text | None = key("fold, sequential, interleaved, ...", "--pulse-placement")
    chunks: Count | None = key("stages a device", "--pulse-num-chunks")
    schedule: Text | None = key("pipeline schedule or CSV file", "--pulse-schedule")
    activation_cap: Count | None = key(
        "most microbatches in flight a device", "--pulse-activation-cap"
    )
    conditioning: Text | None = key("auto, send or replicate", "--pulse-conditioning")
    partition: Text | None = key("exact or soft", "--pulse-partition")
    profile: Text | None = key("layer costs: file or device", "--pulse-profile")
    link_gbs: Positive | None = key("bandwidth of a link", "--pulse-link-gbs")
    link_us: NotNegative | None = key("latency of a link", "--pulse-link-us")
    memory_gb: Positive | None = key("memory limit a device", "--pulse-memory-gb")
    recompute: Patterns = key(
        "layers to recompute: full (all), selective (all, cheap results), or patterns",
        "--pulse-recompute",
        (),
    )
    recompute_selective: Patterns = key(
        "patterns of layers to recompute selectively", "--pulse-recompute-selective", ()
    )
    offload: Patterns = key(
        "patterns of layers whose activations wait in host memory", "--pulse-offload", ()
    )
    offload_weights: Patterns = key(
        "patterns of layers whose frozen weights are in host memory (with auto too)",
        "--pulse-offload-weights",
        (),
    )
    token_slices: Count | None = key(
        "slices of the tokens of MLPs, norms and projections", "--pulse-token-slices"
    )
    solver: Text | None = key("auto, highs, glpk or none", "--pulse-solver")
    solver_seconds: Positive | None = key("of the schedule search", "--pulse-solver-seconds")
    timeout_s: Positive | None = key("longest wait without progress", "--pulse-timeout-s")
    straggler_threshold: NotNegative | None = key(
        "warn of a rank slower by this factor", "--pulse-straggler-threshold"
    )
    sdc_check_interval: Natural | None = key(
        "steps between checks for silent data corruption", "--pulse-sdc-check-interval"
    )
    max_skipped_steps: Count | None = key(
        "of fp16, until the run ends", "--pulse-max-skipped-steps"
    )


@dataclass(frozen=True)
class Validation:
    """Loss on samples that are not trained on."""

    source: Text | None = key(
        "a set of one's own, as data.source (default: a tenth of that is held back)",
        "--pulse-validation-data",
    )
    times: Count | None = key("times of each sample: 1 or 8", "--pulse-validation-times")
    target: Positive | None = key("loss at which the run ends", "--pulse-validation-target")
    every: Count | None = key("steps between evaluations", "--eval-interval")
    batches: Natural | None = key(
        "of each evaluation (default: 10; all of 'source')", "--eval-iters"
    )


@dataclass(frozen=True)
class Samples:
    """Pictures drawn while the run trains, as 'pulse sample' draws them."""

    every: Count | None = key("steps between pictures; without it none", "--pulse-sample-every")
    prompts: Patterns = key("texts to draw", "--pulse-sample-prompt", ())
    negative_prompt: str | None = key(
        "text to be guided away from", "--pulse-sample-negative-prompt"
    )
    classes: Text | None = key("classes to draw, such as 0-9 or 3,5", "--pulse-sample-classes")
    from_data: Count | None = key(
        "validation samples whose conditioning is drawn", "--pulse-sample-from-data"
    )
    count: Count | None = key("pictures of each", "--pulse-sample-count")
    steps: Count | None = key("of the sampler", "--pulse-sample-steps")
    guidance: NotNegative | None = key(
        "classifier-free guidance; 1 is none", "--pulse-sample-guidance"
    )
    eta: NotNegative | None = key("share of fresh noise of DDIM", "--pulse-sample-eta")
    flow_grid: Text | None = key("times of flow: even or scheduler", "--pulse-sample-flow-grid")
    seed: Natural | None = key("of the starting noise", "--pulse-sample-seed")
    batch_size: Count | None = key("samples of a forward pass", "--pulse-sample-batch-size")
    encoders: Text | None = key(
        "pipeline folder for prompts and latents (default: encoders.folder)",
        "--pulse-sample-encoders",
    )
    vae: Text | None = key("autoencoder that decodes latents", "--pulse-sample-vae")
    vae_tiling: bool = key("decode in tiles", "--pulse-sample-vae-tiling", False)
    raw: bool = key("trained weights instead of their EMA", "--pulse-sample-raw", False)
    folder: Text | None = key("of the pictures (default: output/samples)", "--pulse-sample-folder")


@dataclass(frozen=True)
class Checkpoint:
    """Saved states."""

    every: Count | None = key("steps between checkpoints", "--save-interval")
    keep_every: Count | None = key(
        "keep only checkpoints at multiples of this, and the last", "--save-retain-interval"
    )
    keep_last: Count | None = key("keep the last N checkpoints", "--pulse-keep-last")
    keep_best: bool = key(
        "keep and record the one with the lowest validation loss", "--pulse-keep-best", False
    )
    background: bool = key("write while training goes on", "--async-save", False)


@dataclass(frozen=True)
class Log:
    """Log lines and trackers."""

    every: Count | None = key("steps between lines", "--log-interval")
    progress: bool = key("a progress bar on a terminal", default=True)
    verbose: bool = key("all of Megatron's log", "--pulse-verbose", False)
    wandb_project: Text | None = key("project in Weights & Biases", "--wandb-project")
    wandb_name: Text | None = key("name of the run there", "--wandb-exp-name")
    wandb_entity: Text | None = key("team there", "--wandb-entity")
    trace: Text | None = key("folder for traces of some steps", "--pulse-trace")
    trace_steps: Text | None = key("FIRST-LAST", "--pulse-trace-steps")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training; each field is a table, but ``output``."""

    output: Text = key("folder of the run: checkpoints, logs, plan, this recipe", default=MISSING)
    model: Model
    adapter: AdapterKeys = AdapterKeys()
    quantization: QuantizationKeys = QuantizationKeys()
    data: Data
    encoders: Encoders = Encoders()
    process: Process = Process()
    loss: Loss = Loss()
    training: Training
    optimizer: Optimizer
    parallel: Parallel = Parallel()
    validation: Validation = Validation()
    samples: Samples = Samples()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    megatron: Mapping[str, Any] = key("further flags of Megatron ('pulse flags')", default={})


TABLES: Mapping[str, type] = {
    name: kind
    for name, kind in get_type_hints(Recipe).items()
    if isinstance(kind, type) and is_dataclass(kind)
}
"""Tables with typed keys, by name."""
