"""A family of one's own that is faulty: every fault at once, in every command, no traceback."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import model_specs
from megatron_pulse.cli.main import main
from tests.integration.runs import BASE
from tests.integration.test_bad_input import refuse

FAMILY = """
import functools
from dataclasses import dataclass

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec


@dataclass(frozen=True)
class Config:
    kind: str = "sound"

    def faults(self):
        return []


KINDS = ("sound", "chain", "form", "dtype", "raises", "nothing", "build", "call", "returns")
CONFIGS = {f"own-{kind}": Config(kind) for kind in KINDS}
TIMES = {"timesteps": TensorSpec((), dtype="float32")}


def build_backbone(name, config):
    image = TensorSpec((1, 8, 8), dtype="flaot32" if config.kind == "dtype" else "compute")
    layer = functools.partial(Layer, build=functools.partial(build, config.kind), outputs=(image,))
    if config.kind == "raises":
        raise KeyError("width")
    if config.kind == "nothing":
        return None
    if config.kind == "form":
        return Backbone(name, (layer("a", inputs=image), layer("b", inputs=(image,), uses="t")))
    if config.kind == "chain":
        wide = TensorSpec((2, 8, 8))
        first = layer("a", inputs=(image,), pushes={"s": 3})
        return Backbone(name, (first, layer("a", inputs=(wide,), uses=("x",))))
    return Backbone(name, (layer("a", inputs=(image,)), layer("b", inputs=(image,))), TIMES)


def build(kind, context):
    import torch

    if kind == "build":
        raise TypeError("no such width")

    class Convolution(torch.nn.Conv2d):
        def forward(self, inputs, skips, conditioning):
            if kind == "call":
                return conditioning["temb"]
            return (super().forward(inputs[0]),)

    padding = 0 if kind == "returns" else 1
    return Convolution(1, 1, 3, padding=padding).to(context.config.params_dtype)
"""

# Kind, what the error must say of it; the last line that is named is that of the family's file.
CHAIN = {
    "chain": ["layer 1: layer 0 is already called 'a'", "tensor 0 is compute[b, 1, 8, 8]",
              "skip 's': layer 0 (a) pushes output 3", "conditioning 'x': used by layer 1"],
    "form": ["layer 0 (a): inputs must be a tuple of TensorSpec, is of type TensorSpec",
             "layer 1 (b): uses must be a tuple of names, is the text 't'"],
    "dtype": ["a: input 0: the dtype 'flaot32' is none of compute, float32"],
    "raises": ["build_backbone failed: KeyError: 'width' (own.py, line "],
    "nothing": ["build_backbone must return a Backbone, returned NoneType"],
}  # fmt: skip
MODULES = {
    "build": [f"layer {i} ({n}): cannot be built: TypeError: no such width (own.py, line "
              for i, n in enumerate("ab")],
    "call": ["layer 0 (a): cannot be called", "layer 1 (b)", "KeyError: 'temb' (own.py, line "],
    "returns": ["layer 0 (a): returns float32[2, 1, 6, 6], its layer declares float32[2, 1, 8, 8]",
                "layer 1 (b): returns"],
}  # fmt: skip


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of files beside the families of the package."""
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "own.py").write_text(FAMILY)
    monkeypatch.setattr(model_specs, "__path__", [*model_specs.__path__, str(folder)])
    caches = model_specs._families, model_specs._find_families
    for cache in caches:
        cache.cache_clear()
    yield folder
    for cache in caches:
        cache.cache_clear()
    for name in [name for name in sys.modules if name.startswith("model_specs.")]:
        if name.split(".")[1] in ("own", "broken", "odd", "grown", "torn"):
            del sys.modules[name]


@pytest.mark.parametrize("kind", [*CHAIN, *MODULES])
def test_every_command_lists_the_faults(
    kind: str,
    family: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, words = f"own-{kind}", {**CHAIN, **MODULES}[kind]
    output = ["-o", str(tmp_path / "out.json")]
    roofline = ["--device", "analytic", "--preset", "H100", "--dtype", "float32"]
    profile = ["profile", "--backbone", name, *output]
    commands = [
        [*profile, *roofline, "--micro-batch-size", "2"],
        [*profile, "--seconds-per-layer", "0.01", "--micro-batch-size", "2"],
    ]
    commands += [["tune", "--backbone", name, "--cluster", "dgx-h100", "--dtype", "float32",
                  "--global-batch-size", "8", *output]]  # fmt: skip
    if kind in CHAIN or kind == "build":  # the list calls no module
        commands.append(["backbones", name])
    for argv in commands:
        assert main(argv) == 2, argv
        error = capsys.readouterr().err
        for word in words:
            assert word in error, (argv, error)
        assert "Traceback" not in error
    flags = ["--pulse-backbone", name, *BASE, "--global-batch-size", "2", "--train-iters", "1"]
    (fault,) = refuse(monkeypatch, 1, [], flags)
    for word in words:
        assert word in fault
    assert not (tmp_path / "out.json").exists()


def test_a_file_that_is_no_family_takes_none_of_the_others_away(
    family: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (family / "broken.py").write_text("def build_backbone(name, config:\n")
    (family / "odd.py").write_text(
        textwrap.dedent("""\
            from dataclasses import dataclass
            @dataclass
            class Config:
                width: dict
                def faults(self):
                    return []
            CONFIGS = {"odd": Config({})}
            def build_backbone(name, config): ...
            """)
    )
    assert main(["backbones", "own-sound", "uvit-tiny"]) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == [
        "backbone", "own-sound", "uvit-tiny"
    ]  # fmt: skip
    assert "model_specs/broken.py is not a family: SyntaxError" in said.err
    assert (
        "model_specs/odd.py is not a family: TypeError: width is of type dict; options" in said.err
    )
    with pytest.raises(
        ValueError, match=r"called 'broken';[\s\S]*broken\.py is not a family: Syntax"
    ):
        model_specs.load_backbone("broken")


CONFIG = """
from dataclasses import dataclass

from model_specs.common.config_faults import below


@dataclass(frozen=True)
class Config:
    width: int = 4
    num_classes: int = 3

    def faults(self):
        return below(self, 1)


CONFIGS = {"grown-tiny": Config()}
"""
CHAIN_FILE = """
from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from model_specs.common.deferred_build import builder


def build_backbone(name, config):
    image, build = TensorSpec((1, 8, 8)), builder("model_specs.grown.modules", config)
    fields = {"timesteps": TensorSpec((), dtype="float32"), "labels": TensorSpec((), dtype="int64")}
    layers = [Layer(n, build("make", of=n), (image,), (image,), uses=(*fields,)) for n in "ab"]
    classes = config.num_classes
    return Backbone(name, tuple(layers), fields, num_classes=classes, null_label=classes)
"""
MODULES_FILE = """
def make(config, context, of):
    return config, context, of
"""


def test_a_family_may_be_a_folder(family: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grown, torn = family / "grown", family / "torn"
    for folder in (grown, torn):
        folder.mkdir()
    (grown / "config.py").write_text(CONFIG)
    (grown / "chain.py").write_text(CHAIN_FILE)
    (grown / "modules.py").write_text(MODULES_FILE)
    (grown / "__init__.py").write_text(
        "from model_specs.grown.chain import build_backbone\n"
        "from model_specs.grown.config import CONFIGS\n"
    )
    (torn / "__init__.py").write_text("from model_specs.torn.config import CONFIGS\n")
    backbone = model_specs.load_backbone("grown-tiny", {"width": "6"})
    assert backbone.record == {
        "name": "grown-tiny", "family": "grown", "options": {"width": 6, "num_classes": 3}
    }  # fmt: skip
    assert (backbone.num_classes, backbone.null_label) == (3, 3)
    assert "model_specs.grown.modules" not in sys.modules
    config, context, of = backbone.layers[1].build("the context")
    assert (config.width, context, of) == (6, "the context", "b")
    with pytest.raises(ValueError, match="width: must be at least 1, is 0"):
        model_specs.load_backbone("grown-tiny", {"width": 0})
    assert main(["backbones", "grown-tiny"]) == 2  # its layers are no modules
    assert "Traceback" not in capsys.readouterr().err
    (fault,) = [f for f in model_specs.unusable_families() if "torn" in f]
    assert "model_specs/torn is not a family: ModuleNotFoundError" in fault
