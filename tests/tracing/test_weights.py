"""Sources of the initial values of a derived chain."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import megatron_pulse as pulse
from megatron_pulse.backbone.chain import Backbone
from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.diffusion.published import find_component, read_folder
from megatron_pulse.runtime.stage import Stage
from megatron_pulse.tracing.from_module import with_weights
from megatron_pulse.tracing.initial_weights.meta_init import (
    build_without_memory,
    release_parameter_memory,
)
from megatron_pulse.tracing.initial_weights.sources import TensorFiles, from_stored
from tests.tracing.zoo import make

FILE = "diffusion_pytorch_model.safetensors"


class Watched:
    """Stored tensors, and which of them were read."""

    def __init__(self, stored: TensorFiles) -> None:
        self.stored, self.read = stored, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def kind_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self.stored.kind_of(name)


@pytest.fixture(scope="module")
def made() -> Any:
    return make("pixart_alpha")


@pytest.fixture(scope="module")
def empty(made: Any) -> nn.Module:
    """The same without values."""
    module = build_without_memory(lambda: type(made[0]).from_config(made[0].config))
    return release_parameter_memory(module, torch.float32)


@pytest.fixture(scope="module")
def chain(made: Any, empty: nn.Module) -> Backbone:
    return pulse.from_module(empty, made[1])


def stages(chain: Backbone, devices: int = 2) -> Iterator[Stage]:
    """All of a folded plan."""
    costs = pulse.weighted_costs(chain, [1.0] * len(chain.layers))
    plan = pulse.make_plan(chain, costs, pulse.fold(devices))
    return (Stage(chain, plan.routes, s, 0) for s in range(plan.placement.num_stages))


def test_every_stage_reads_its_own_tensors_of_a_folder(
    made: Any, empty: nn.Module, chain: Backbone, tmp_path: Path
) -> None:
    module = made[0]
    module.save_pretrained(tmp_path / "whole")
    module.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    wanted = type(module).from_pretrained(tmp_path / "whole").state_dict()
    for name in ("whole", "sharded"):
        stored = Watched(read_folder(tmp_path / name))
        loaded = with_weights(chain, from_stored(stored, empty, name))
        assert not stored.read
        found: dict[str, Tensor] = {}
        for stage in stages(loaded):
            own = stage.state_dict()
            assert sorted(stored.read) == sorted(own)
            stored.read.clear()
            assert not found.keys() & own.keys()
            found |= own
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_variant_in_another_precision_is_read_by_name_or_when_it_is_the_only_one(
    made: Any, empty: nn.Module, chain: Backbone, tmp_path: Path
) -> None:
    module = made[0]
    half = type(module).from_config(module.config).half()
    half.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    assert (tmp_path / f"{FILE}.index.fp16.json").is_file()
    wanted = half.state_dict()
    loaded = with_weights(chain, from_stored(read_folder(tmp_path), empty, "it"))
    for stage in stages(loaded):
        for name, value in stage.state_dict().items():
            assert value.dtype == torch.float32 and torch.equal(value, wanted[name].float())
    save_file(module.state_dict(), tmp_path / FILE)
    assert read_folder(tmp_path).kind_of("caption_projection.linear_1.bias")[1] == torch.float32
    assert (
        read_folder(tmp_path, "fp16").kind_of("caption_projection.linear_1.bias")[1]
        == torch.float16
    )
    with pytest.raises(PublishedError, match="no variant 'ema'.* variants none, fp16: name one"):
        read_folder(tmp_path, "ema")
    index = tmp_path / f"{FILE}.index.fp16.json"
    index.rename(tmp_path / "diffusion_pytorch_model.fp16.safetensors.index.json")
    assert read_folder(tmp_path, "fp16").keys() == wanted.keys()


def test_what_torch_saved_is_read_without_running_code(made: Any, tmp_path: Path) -> None:
    module = made[0]
    wanted = module.state_dict()
    for more in ({}, {"max_shard_size": "20KB"}, {"variant": "fp16", "max_shard_size": "20KB"}):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        module.save_pretrained(folder, safe_serialization=False, **more)
        found = read_folder(folder)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert found.kind_of("pos_embed.proj.weight")[0] == wanted["pos_embed.proj.weight"].shape
    (tmp_path / "diffusion_pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PublishedError, match="model.bin: it is empty or truncated"):
        read_folder(tmp_path)
    torch.save({"a": print}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(PublishedError, match="holds more than tensors"):
        read_folder(tmp_path)


def test_only_files_are_opened(tmp_path: Path) -> None:
    """A pipe would keep who opens it waiting for ever."""
    index = {"weight_map": {"a": "pipe", "b": "nowhere", "c": "folder", "d": "gone"}}
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps(index))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    with pytest.raises(PublishedError) as caught:
        read_folder(tmp_path)
    assert set(caught.value.faults) == {
        "pipe is no regular file",
        "nowhere is a link to nowhere, which does not exist",
        "folder is a folder, not a file",
        "gone is missing",
    }
    (tmp_path / f"{FILE}.index.json").unlink()
    os.mkfifo(tmp_path / FILE)
    with pytest.raises(PublishedError, match=f"{FILE} is no regular file"):
        read_folder(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(PublishedError, match="config.json is no regular file"):
        find_component(tmp_path)


@pytest.mark.parametrize("places", [["a"], {"a": 1}, {"a": {"b": 1}}, None])
def test_an_index_names_files(places: object, tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(PublishedError, match="object with the file of each tensor"):
        read_folder(tmp_path)


def test_a_damaged_index_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / f"{FILE}.index.json"
    path.write_text("{")
    with pytest.raises(PublishedError, match="cannot be read as an index") as caught:
        read_folder(tmp_path)
    assert str(caught.value).count(str(path)) == 1


def test_what_does_not_fit_is_listed_before_anything_is_read(
    made: Any, empty: nn.Module, chain: Backbone, tmp_path: Path
) -> None:
    made[0].save_pretrained(tmp_path)
    tensors = load_file(tmp_path / FILE)
    changed = {**tensors, "odd": torch.ones(1), "caption_projection.linear_1.bias": torch.ones(3)}
    changed["proj_out.bias"] = tensors["proj_out.bias"].long()
    del changed["caption_projection.linear_1.weight"]
    save_file(changed, tmp_path / FILE)
    stored = Watched(read_folder(tmp_path))
    with pytest.raises(PublishedError) as caught:
        from_stored(stored, empty, "it")
    assert caught.value.faults == [
        "odd is unexpected",
        "caption_projection.linear_1.weight is missing",
        "caption_projection.linear_1.bias has the shape [3], expected [48]",
        "proj_out.bias has the type int64, expected float32",
    ]
    assert not stored.read
    tensors["caption_projection.linear_1.bias"][0] = torch.nan
    save_file(tensors, tmp_path / FILE)
    loaded = with_weights(chain, from_stored(read_folder(tmp_path), empty, "it"))
    with pytest.raises(PublishedError, match=r"caption_projection.linear_1.bias holds NaN"):
        list(stages(loaded))


class Positions(nn.Module):
    """A network of ``WIDTH`` features whose head is its embedding, with a table in its state."""

    WIDTH = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(self.WIDTH, self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.WIDTH, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.linspace(0, 1, self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x) + self.table))


def test_tied_weights_and_buffers_are_those_of_a_folder(tmp_path: Path) -> None:
    module, other = Positions(), Positions()
    x = torch.randn(2, Positions.WIDTH)
    chain = pulse.from_module(other, {"x": x}, sample="x")
    tensors = {name: t.bfloat16() for name, t in module.state_dict().items()}
    del tensors["embed.weight"]
    save_file(tensors, tmp_path / FILE)
    (layer,) = with_weights(chain, from_stored(read_folder(tmp_path), other, "it")).layers
    module.load_state_dict({**tensors, "embed.weight": tensors["head.weight"]})
    assert torch.equal(layer.build(None)((x,), {}, {})[0], module(x))
    tensors["embed.weight"] = tensors["head.weight"].clone()
    save_file(tensors, tmp_path / FILE)
    from_stored(read_folder(tmp_path), other, "it")
    tensors["embed.weight"] += 1
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(PublishedError, match="embed.weight and head.weight are one weight here"):
        from_stored(read_folder(tmp_path), other, "it")
    tensors["embed.weight"] -= 1
    tensors["table"] += 1
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(
        PublishedError, match="table differs from the value that the module computes"
    ):
        from_stored(read_folder(tmp_path), other, "it")
