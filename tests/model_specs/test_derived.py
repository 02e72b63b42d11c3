"""Names with a colon: diffusers' classes and code of one's own, recorded, rebuilt and refused."""

from __future__ import annotations

import json
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_pulse as pulse
import model_specs
from megatron_pulse.backbone.chain import Backbone, TensorSpec
from megatron_pulse.cli.main import main
from megatron_pulse.errors import Faults
from megatron_pulse.integration.flags.pulse_options import PulseOptions
from megatron_pulse.integration.planning.run_plan import with_trainable_params
from megatron_pulse.planner.layout.placement import Partition, sequential
from megatron_pulse.planner.layout.routes import trace_routes
from megatron_pulse.profile.parameters import count_parameters
from megatron_pulse.profile.trainable import TrainedError
from megatron_pulse.runtime.stage import Stage
from megatron_pulse.tracing.input_leaves import leaves_of
from model_specs.derived import rank0_messages, user_code
from model_specs.derived.classes import CLASSES
from model_specs.derived.inputs import Input
from tests.tracing.zoo import make

UNET = {
    "block_out_channels": "8,16",
    "down_block_types": "DownBlock2D,AttnDownBlock2D",
    "up_block_types": "AttnUpBlock2D,UpBlock2D",
    "layers_per_block": "1",
    "norm_num_groups": "4",
    "attention_head_dim": "4",
    "sample_size": "8",
}
"""Of a class that no family here has."""
NAME = "diffusers:UNet2DModel"
OPTIONS = [word for key, value in UNET.items() for word in ("--option", f"{key}={value}")]


def test_a_class_is_a_backbone_that_its_record_rebuilds(tmp_path: Path) -> None:
    import diffusers

    backbone = model_specs.load_backbone(NAME, UNET)
    assert backbone.input_spec == TensorSpec((3, 8, 8)) == backbone.output_spec
    assert list(backbone.batch_fields) == ["timesteps"] and len(backbone.skips) == 4
    record = json.loads(json.dumps(backbone.record))
    assert (record["name"], record["family"]) == (NAME, "UNet2DModel")
    assert model_specs.load_recorded(record).record == backbone.record
    options = model_specs.changed_options(backbone)
    assert model_specs.load_backbone(NAME, options).record == backbone.record

    settings = {key: value for key, value in record["options"].items() if key not in
                ("height", "width", "dtype", "buckets")}  # fmt: skip
    module = diffusers.UNet2DModel.from_config(settings)
    assert sum(count_parameters(backbone)) == sum(p.numel() for p in module.parameters())
    module.save_config(tmp_path)
    folder = model_specs.load_backbone(f"diffusers:{tmp_path}")
    assert folder.record == backbone.record
    form = model_specs.published_form(folder)
    assert form is not None and form.class_name == "UNet2DModel" and form.config == settings


def test_what_a_run_chooses_makes_no_other_model() -> None:
    backbone = model_specs.load_backbone(NAME, UNET)
    chosen = {**UNET, "height": "16", "dtype": "bfloat16"}
    other = model_specs.continue_model(backbone.record, NAME, chosen)
    assert other.input_spec == TensorSpec((3, 16, 8))
    compared = model_specs.compare_models(backbone.record, other.record)
    assert not compared.different and len(compared.changed) == 2
    wider = {**backbone.record, "options": {**backbone.record["options"], "norm_num_groups": 8}}
    (different,) = model_specs.compare_models(wider, backbone.record).different
    assert different == "norm_num_groups 8 there, 4 here"
    with torch.device("meta"):
        (weight,) = {p.dtype for p in other.layers[1].build(None).parameters()}
    assert weight == torch.bfloat16


SIZES = {
    "sd": {"text_length": 5},
    "sdxl": {"text_length": 5},
    "svd": {},
    "motion": {"frames": 3, "text_length": 5},
    "hunyuan": {"height": 16, "width": 16},
    "hunyuan_video": {"frames": 3, "text_length": 6},
    "wan": {"frames": 3, "text_length": 7},
    "wan_i2v": {"frames": 3},
    "cogvideox_2b": {},
    "cogvideox_5b": {},
    "ltx": {"frames": 3, "height": 2, "width": 2, "text_length": 6},
    "mochi": {"frames": 2},
    "flux": {"height": 8, "width": 8, "text_length": 6},
    "sd3": {"height": 16, "width": 16, "text_length": 6},
    "pixart_alpha": {"height": 16, "width": 16, "text_length": 6},
    "pixart_sigma": {"height": 16, "width": 16, "text_length": 6},
    "autoencoder": {"height": 16, "width": 16},
}
"""Of the study's classes that are diffusers', where they are not 8 x 8."""


@pytest.mark.parametrize("name", SIZES)
def test_classes_are_called_as_they_want(name: str) -> None:
    """The names and shapes of what is declared are those of what the study calls them with."""
    module, given = make(name)
    known = CLASSES[type(module).__name__]
    declared = known.declared(module.config, {"height": 8, "width": 8, **SIZES[name]})

    def kinds(inputs: Mapping[str, Any]) -> dict[str, object]:
        leaves = leaves_of(inputs).items()
        shapes = {n: tuple(v.shape) if isinstance(v, torch.Tensor) else None for n, v in leaves}
        return {n: shape for n, shape in shapes.items() if n != "encoder_hidden_states_image"}

    inputs = called = declared.make("float32")(2)
    for each in declared.inputs:
        if isinstance(each, Input) and each.appended:
            parts = inputs[declared.sample], inputs.pop(each.path)
            inputs[declared.sample] = torch.cat(parts, dim=declared.channel_axis)
    if declared.around is not None:  # latents are packed, as a pipeline would
        latents = inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
        called = {}

        def forward(hidden_states: torch.Tensor, return_dict: bool = True, **others: Any) -> Any:
            called.update(others, hidden_states=hidden_states)
            return hidden_states if return_dict else (hidden_states,)

        called_by = declared.around(SimpleNamespace(forward=forward))
        assert torch.equal(called_by(**inputs).abs(), latents.abs())
    assert kinds(called) == kinds(given(2))


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "QwenImageTransformer2DModel"])
def test_tokens_are_those_of_the_pipeline(name: str) -> None:
    """Latents become tokens with positions as in diffusers' pipeline, and the chain predicts."""
    import diffusers

    is_flux = name.startswith("Flux2")
    options: dict[str, Any] = {
        "in_channels": 16, "num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2,
        "joint_attention_dim": 24,
    }  # fmt: skip
    if is_flux:
        options |= {"num_single_layers": 1, "axes_dims_rope": [4, 4, 4, 4]}
    else:
        options |= {"out_channels": 4, "axes_dims_rope": [4, 6, 6]}
    module = getattr(diffusers, name)(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    )
    known, sizes = CLASSES[name], {"height": 4, "width": 6, "text_length": 5}
    declared = known.declared(module.config, sizes)
    torch.manual_seed(0)
    inputs = declared.make("float32")(2)
    inputs = {
        key: torch.rand_like(value) if isinstance(value, torch.Tensor) and value.is_floating_point()
        and not key.endswith("_ids") else value
        for key, value in inputs.items()
    }  # fmt: skip
    latents = inputs.pop("hidden_states")
    given = dict(inputs)
    if is_flux:
        pipeline = diffusers.Flux2Pipeline
        assert torch.equal(given["img_ids"], pipeline._prepare_latent_ids(latents)[0])
        assert torch.equal(
            given["txt_ids"], pipeline._prepare_text_ids(given["encoder_hidden_states"])[0]
        )
        given["hidden_states"] = pipeline._pack_latents(latents)
        (expected,) = module(**given, return_dict=False)
        places = pipeline._prepare_latent_ids(latents)
        expected = pipeline._unpack_latents_with_ids(expected, places).view_as(latents)
    else:
        packing = diffusers.QwenImagePipeline
        given["hidden_states"] = packing._pack_latents(latents, *latents.shape)
        (expected,) = module(**given, return_dict=False)
        expected = packing._unpack_latents(expected, 8 * 4, 8 * 6, 8).squeeze(2)
    found = declared.wrap(module)(hidden_states=latents, **inputs)
    assert torch.equal(found, expected)
    chain = pulse.from_module(
        module, {"hidden_states": latents, **inputs}, **declared.keywords()
    )  # compares its prediction
    assert chain.input_spec.shape == tuple(latents.shape[1:])


def test_weights_are_those_of_the_folder_or_of_the_class_s_own_initialisation(
    tmp_path: Path,
) -> None:
    import diffusers

    settings = model_specs.published_form(model_specs.load_backbone(NAME, UNET))
    assert settings is not None
    torch.manual_seed(4)
    module = diffusers.UNet2DModel.from_config(dict(settings.config))
    assert not unlike(model_specs.load_backbone(NAME, UNET), 4, module)
    module.save_config(tmp_path)
    scratch = "weights: initialised by --seed: the folder has none"
    assert model_specs.describe_weights(f"diffusers:{tmp_path}") == scratch
    torch.manual_seed(5)
    other = diffusers.UNet2DModel.from_config(dict(settings.config))
    assert not unlike(model_specs.load_backbone(f"diffusers:{tmp_path}"), 5, other)
    module.save_pretrained(tmp_path)
    assert model_specs.describe_weights(f"diffusers:{tmp_path}") == f"weights: {tmp_path}"
    assert not unlike(model_specs.load_backbone(f"diffusers:{tmp_path}"), 5, module)


def test_what_does_not_fit_a_folder_is_said_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import diffusers
    from safetensors.torch import load_file, save_file

    form = model_specs.published_form(model_specs.load_backbone(NAME, UNET))
    assert form is not None
    diffusers.UNet2DModel.from_config(dict(form.config)).save_pretrained(tmp_path)
    config, weights = (tmp_path / n for n in ("config.json", "diffusion_pytorch_model.safetensors"))
    settings, whole = json.loads(config.read_text()), weights.read_bytes()
    config.write_text(json.dumps({**settings, "num_train_steps": 3, "attention": True}))

    def shown() -> tuple[int, str]:
        return main(["module", f"diffusers:{tmp_path}"]), capsys.readouterr().err

    passed_over = "are ignored: attention, num_train_steps\n"
    status, said = shown()
    assert status == 0 and said.endswith(passed_over)
    tensors = load_file(weights)
    tensors["conv_in.more"] = tensors.pop("conv_in.bias")
    tensors["conv_out.bias"] = tensors["conv_out.bias"][1:].clone()
    save_file(tensors, weights)
    status, said = shown()
    assert status == 2 and f"error: {tmp_path} (3 faults):" in said
    assert "conv_in.bias is missing" in said and "conv_in.more is unexpected" in said
    assert "conv_out.bias has the shape [2], expected [3]" in said
    for damage in (whole[:-5], whole[:40], b"\xff" * 8 + whole[8:], b""):
        weights.write_bytes(damage)
        status, said = shown()
        assert status == 2 and said.startswith(f"pulse module: error: {tmp_path}: {weights.name}: ")
    config.write_text(json.dumps({**settings, "sample_size": "large"}))
    status, said = shown()
    assert status == 2 and f"{config}: sample_size is 'large': must be a whole number" in said


def unlike(backbone: Backbone, seed: int, module: torch.nn.Module) -> list[str]:
    """Tensors that start differently from ``module`` in a run of ``seed``."""
    whole = Partition(sequential(1), (0, len(backbone.layers)))
    stage = Stage(backbone, trace_routes(backbone, whole), 0, seed)
    wanted = module.state_dict()
    assert stage.state_dict().keys() == wanted.keys()
    return [n for n, value in stage.state_dict().items() if not torch.equal(value, wanted[n])]


FACTORIES = """
    import torch
    from torch import nn

    import megatron_pulse as pulse

    print("run")


    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            blocks = (nn.Sequential(nn.Linear(width, width)) for _ in range(depth))
            self.blocks = nn.ModuleList(blocks)
            self.register_buffer("table", torch.arange(width).float(), persistent=False)

        def forward(self, x, when):
            for block in self.blocks:
                x = x + block(x + when[:, None] * self.table)
            return x


    def build(width=8, depth=2):
        given = {"x": torch.randn(2, width), "when": torch.rand(2)}
        return Net(width, depth), given, {"sample": "x", "timestep": "when"}


    def halved():
        module, *others = build()
        return module.half(), *others


    def alone():
        return Net(8, 2)


    def needs(width):
        return None


    def frozen():
        module, *others = build()
        return module.requires_grad_(False), *others


    def unnamed():
        return Net(8, 2), (torch.randn(2, 8), torch.rand(2))


    def misspelt():
        given = {"y": torch.randn(2, 8), "when": torch.rand(2)}
        return Net(8, 2), given, {"sampel": "x"}


    class Deciding(Net):
        def forward(self, x, when):
            x = super().forward(x, when)
            return x * 2 if x.mean() > 0 else x


    def deciding():
        return Deciding(8, 2), *build()[1:]


    hand = pulse.chain([nn.Linear] * 2, pulse.TensorSpec((4,)))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file of one's own that nobody has allowed."""
    monkeypatch.setattr(user_code, "_allowed", set())
    (tmp_path / "mine.py").write_text(textwrap.dedent(FACTORIES))
    return f"{tmp_path}/mine.py"


def test_code_runs_only_where_it_is_named(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{own}:build"
    record = {"name": name, "family": "own", "options": {"width": 4}}
    for load in (model_specs.load_recorded, lambda r: model_specs.continue_model(r, name)):
        with pytest.raises(ValueError, match=r"is code[\s\S]*--pulse-module"):
            load(record)
    assert "run" not in capsys.readouterr().out
    model_specs.allow(f"{Path(own).parent}/./mine.py:build")
    backbone = model_specs.load_recorded(record)
    assert "run" in capsys.readouterr().out
    assert sum(count_parameters(backbone)) == 2 * (4 * 4 + 4)
    assert list(backbone.batch_fields) == ["timesteps"]
    assert model_specs.load_recorded(backbone.record).record == backbone.record
    changed = {**backbone.record["options"], "width": 8}
    with pytest.raises(ValueError, match="the factory has changed"):
        model_specs.load_backbone(name, changed)
    wider = model_specs.load_backbone(name, {"width": "8"})
    different = model_specs.compare_models(backbone.record, wider.record).different
    assert [text.split()[0] for text in different] == ["width", "weights"]


class _Late(threading.Timer):
    """A timer whose time has always come."""

    def start(self) -> None:
        assert self.interval == 4.0
        self.function(*self.args)


def test_what_a_factory_may_return(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("hand", "alone", "needs", "nothing", "unnamed", "misspelt", "deciding", "halved")
    for name in names:
        model_specs.allow(f"{own}:{name}")
    by_hand = model_specs.load_backbone(f"{own}:hand")
    assert len(by_hand.layers) == 2 and by_hand.record["name"] == f"{own}:hand"
    for name, reason in (
        ("alone", "returned Net without its inputs"),
        ("needs", "width has no default"),
        ("nothing", "has no 'nothing'; it has: "),
        (
            "unnamed",
            r"mine.py:\d+\): inputs must be a dict .* not tuple",
        ),
        ("misspelt", r"mine.py:\d+\) \(3 faults\)"),
        (
            "misspelt",
            r"no input 'y'; it takes: x, when\n.*forward takes x, which is missing in the inputs",
        ),
        ("misspelt", "no keyword of from_module is called 'sampel'; did you mean sample"),
        ("deciding", "exported in float32; the dtype is set by --dtype"),
    ):
        with pytest.raises(ValueError, match=reason):
            model_specs.load_backbone(f"{own}:{name}")
    assert capsys.readouterr() == ("run\n", "")  # no graph, no stack of torch's
    monkeypatch.setattr(rank0_messages, "Timer", _Late)
    model_specs.load_backbone(f"{own}:halved")
    making, warned, deriving = capsys.readouterr().err.splitlines()
    assert making == f"making {own}:halved ..."
    assert warned.endswith("makes parameters of float16; the run's are float32")
    assert deriving.startswith(f"deriving {own}:halved (") and deriving.endswith(") ...")
    monkeypatch.setenv("RANK", "1")
    with rank0_messages.report_if_slow("nothing on other ranks"):
        assert capsys.readouterr().err == ""


def test_names_are_found_from_here(
    own: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package from the current folder, and a record's file as it is named from another."""
    folder = Path(own).parent
    monkeypatch.chdir(folder)
    model_specs.allow("mine:build")
    record = model_specs.load_backbone("mine:build").record
    monkeypatch.delitem(sys.modules, "mine")
    (folder / "sub").mkdir()
    (folder / "sub" / "other.py").touch()
    monkeypatch.chdir(folder / "sub")
    for name in ("mine.py:build", f"{own}:build"):
        with pytest.raises(ValueError, match=r"\(you named mine:build\)"):
            model_specs.load_recorded({**record, "name": name})
    model_specs.allow("../mine.py:build")
    for name in ("mine.py:build", f"{own}:build"):
        assert model_specs.load_recorded({**record, "name": name}).record["name"] == name
    for name in ("other.py:build", "mine.py:alone"):
        with pytest.raises(ValueError, match="is code. It runs only if named on the command line"):
            model_specs.load_recorded({**record, "name": name})
    Path("config.json").touch()
    for name, said in (
        ("other.py", "Write other.py:FACTORY"),
        ("..", "Write diffusers:.."),
        (":build", "no file or package before the colon"),
        ("other.py:", "no function after the colon"),
        ("Diffusers:UNet2DModel", "did you mean diffusers:UNet2DModel?"),
        ("diffusers:config.json", "Give its folder, diffusers:."),
    ):
        assert main(["module", name]) == 2
        assert said in capsys.readouterr().err


def test_what_is_all_frozen_cannot_be_trained(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["module", f"{own}:frozen"]) == 0
    said = "none of its 4 parameters is trained"
    assert said in capsys.readouterr().err
    options = PulseOptions(backbone=f"{own}:frozen")
    with pytest.raises(TrainedError, match=said):
        with_trainable_params(model_specs.load_backbone(f"{own}:frozen"), options)


def test_labels_are_dropped_in_the_batch_not_by_the_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank0_messages, "Timer", _Late)
    small = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 1, "num_layers": 1,
             "sample_size": 4, "num_embeds_ada_norm": 10, "norm_num_groups": 1}  # fmt: skip
    chain = model_specs.load_backbone("diffusers:DiTTransformer2DModel", small)
    assert chain.null_label == chain.num_classes == 10
    kind = "DiTTransformer2DModel"
    assert capsys.readouterr().err == f"making {kind} ...\nderiving {kind} ...\n"


def test_commands_take_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The front page's are called with code (``tests/test_readmes.py``)."""
    output = ["-o", str(tmp_path / "profile.json")]
    analytic = ["--preset", "H100", "--dtype", "float32", "--micro-batch-size", "2,3", *output]
    assert main(["profile", "--module", NAME, *OPTIONS, *analytic]) == 0
    assert main(["partition", "--profile", output[1], "-p", "2"]) == 0
    capsys.readouterr()
    assert main(["module", NAME, *OPTIONS, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["field"] for row in shown["inputs"]] == ["noisy", "timesteps"]
    assert sum(len(link["pops"]) for link in shown["links"]) == 4
    with pytest.raises(SystemExit):
        main(["profile", "--module", "uvit-tiny", *output])
    assert "'uvit-tiny' is no module: write diffusers:FOLDER" in capsys.readouterr().err


def test_microbatches_of_a_class_may_be_of_several_sizes() -> None:
    """The options name only the further sizes; Flux packs the latents of each."""
    small = {"block_out_channels": [32], "layers_per_block": 1, "add_attention": False,
             "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"]}  # fmt: skip
    chain = model_specs.load_backbone("diffusers:UNet2DModel", {**small, "buckets": "8x12,16x4"})
    assert chain.input_spec == TensorSpec((3, 8, 12), others=((3, 16, 4),))
    flux = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 8,
            "axes_dims_rope": [4, 6, 6], "text_length": 3, "buckets": "4x8,8x4"}  # fmt: skip
    chain = model_specs.load_backbone("diffusers:FluxTransformer2DModel", flux)
    assert chain.output_spec == TensorSpec((4, 4, 8), others=((4, 8, 4),))
    for options, said in (
        ({"buckets": "8x,4x4"}, "'8x' is not HEIGHTxWIDTH, as in buckets=64x96,96x64"),
        ({"buckets": "8x8x8,0x4"}, r"(?s)2 faults.*'8x8x8' is not HEIGHTxWIDTH.*'0x4' is not"),
        ({"buckets": "8x8,4x4", "width": 8}, "give width there or alone, not both"),
        ({"height": 0, "width": -8}, r"(?s)2 faults.*height is 0.*width is -8: must be 1 or more"),
        ({"sample_size": 0}, "^sample_size is 0: must be a whole number up to 16384, or two$"),
        ({"sample_size": [8, "x"]}, r"^sample_size is \[8, 'x'\]: must be a whole number"),
    ):
        with pytest.raises(ValueError, match=said):
            model_specs.load_backbone("diffusers:UNet2DModel", {**small, **options})


def test_sizes_that_patches_do_not_divide_are_refused_with_the_nearest() -> None:
    known, config = CLASSES["WanTransformer3DModel"], {"patch_size": (1, 2, 2)}
    faults = r"height = 13: .*Give height=12 or 14(?s:.*)width = 1: .*Give width=2$"
    with pytest.raises(Faults, match=faults):
        known.sizes_of(config, {"height": 13, "width": 1}, "")
    with pytest.raises(Faults, match="width = 15: .*Give width=14 or 16"):
        known.sizes_of(config, {}, "5x12x16,5x16x15")
    assert known.sizes_of(config, {"height": 12}, "")[0]["height"] == 12
