"""``pulse export --pipeline``: a folder that diffusers loads whole, and its card; ``--push``."""

from __future__ import annotations

import base64
import json
import os
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
import yaml

from megatron_pulse.backbone.published_weights import PublishedError
from megatron_pulse.cli.main import main
from megatron_pulse.diffusion import hub
from megatron_pulse.encoders import pipeline_export
from megatron_pulse.encoders.pipeline_export import open_base
from tests.cli.conftest import Refused
from tests.cli.small_unet import make_folder
from tests.cli.test_prompts import FAMILIES, draw, drawn, expected  # noqa: F401

CARD = "---\nlicense: openrail++\nbase_model: stabilityai/a-base\n---\n\n# Base\n"


@pytest.mark.parametrize("name", ["sd", "sd3", "pixart"])
def test_exported_pipeline_gives_the_pictures_of_pulse_sample(
    name: str,
    drawn: list[torch.Tensor],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline_export, "_LINKED_BYTES", 1000)
    family, base, checkpoint = FAMILIES[name], tmp_path / "base", tmp_path / "checkpoint"
    base.mkdir()
    family.write(base)
    (base / "README.md").write_text(CARD)
    assert main(["import", "--from", str(base), "--to", str(checkpoint)]) == 0
    draw(family, base, checkpoint)
    target = tmp_path / "pipeline"
    assert main(["export", "--load", str(checkpoint), "--to", str(target), "--pipeline"]) == 0
    index = json.loads((target / "model_index.json").read_text())
    assert index["scheduler"] == ["diffusers", type(family.scheduler).__name__]
    weights = "vae/diffusion_pytorch_model.safetensors"
    assert os.path.samefile(target / weights, base / weights)
    assert not os.path.samefile(target / "vae/config.json", base / "vae/config.json")
    shutil.rmtree(base)
    without = dict.fromkeys(("safety_checker", "feature_extractor")) if name == "sd" else {}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(target, **without)
    assert type(pipeline) is family.pipeline
    theirs = expected(family, pipeline)
    torch.testing.assert_close(drawn[0] / 2 + 0.5, theirs, rtol=0, atol=family.close)
    head = yaml.safe_load((target / "README.md").read_text().split("---\n")[1])
    assert head["base_model"] == "stabilityai/a-base" and head["license"] == "openrail++"
    assert head["library_name"] == "diffusers" and head["pipeline_tag"] == "text-to-image"


def test_pipeline_without_a_whole_base_is_refused(
    tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = make_folder(tmp_path / "alone")
    checkpoint = tmp_path / "checkpoint"
    assert main(["import", "--from", str(alone), "--to", str(checkpoint)]) == 0
    capsys.readouterr()
    export = ["export", "--load", str(checkpoint), "--to", str(tmp_path / "to"), "--pipeline"]
    refused(export, "no base pipeline is known", "Give --pipeline DIR")
    refused([*export, str(alone)], "holds no model_index.json of a diffusers pipeline")
    refused([*export, str(tmp_path / "none")], "there is no such folder")
    whole = tmp_path / "sd3"
    whole.mkdir()
    FAMILIES["sd3"].write(whole)
    capsys.readouterr()
    refused([*export, str(whole)], "base of another model", "SD3Transformer2DModel")
    shutil.rmtree(whole / "tokenizer_3")
    (whole / "vae" / "config.json").unlink()
    with pytest.raises(PublishedError, match="2 faults") as error:
        open_base(whole, "SD3Transformer2DModel")
    assert "tokenizer_3: there is no such folder" in str(error.value)


def test_push_is_refused_without_token_or_network(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    push = ["export", "--load", str(tmp_path), "--to", str(tmp_path / "to"), "--push"]
    refused([*push, "me/model"], "there is no token of the hub", "hf auth login")
    refused([*push, "model"], "write OWNER/NAME")
    refused([*push, "me/my model/x"], "write OWNER/NAME")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused([*push, "me/model"], "HF_HUB_OFFLINE is set")


def test_push_keeps_the_folder_when_the_hub_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _at(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(
        ValueError,
        match="no upload to http://127.0.0.1:9: .*'hf upload me/model .*' uploads it later",
    ):
        hub.push(tmp_path, "me/model")
    assert tmp_path.is_dir()


def _at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The hub is at this address, with a token."""

    class Here(huggingface_hub.HfApi):
        def __init__(self) -> None:
            super().__init__(endpoint=endpoint, token="hf_none")

    monkeypatch.setattr("huggingface_hub.HfApi", Here)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files asks."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, body))  # type: ignore[attr-defined]
        answer: dict[str, Any] = {
            "url": "https://huggingface.co/me/model",
            "warnings": [],
            "errors": [],
        }
        if "/preupload/" in self.path:
            files = [{**one, "uploadMode": "regular"} for one in json.loads(body)["files"]]
            answer = {"files": [{**one, "shouldIgnore": False} for one in files]}
        elif "/commit/" in self.path:
            answer = {"commitUrl": "https://huggingface.co/me/model/commit/1", "commitOid": "1"}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def test_push_uploads_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"README.md": b"---\nlicense: mit\n---\n", "unet/config.json": b"{}"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        _at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        said = hub.push(tmp_path, "me/model")
        server.shutdown()
        thread.join(10)
    asked = dict(server.asked)  # type: ignore[attr-defined]
    created = json.loads(asked["/api/repos/create"])
    assert created["name"] == "model" and (created.get("private") or "private" in str(created))
    (commit,) = (body for path, body in asked.items() if "/me/model/commit/main" in path)
    sent = [json.loads(line) for line in commit.splitlines()]
    found = {
        one["value"]["path"]: base64.b64decode(one["value"]["content"])
        for one in sent
        if one["key"] == "file"
    }
    assert found == files and "me/model" in said
