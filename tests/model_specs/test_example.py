"""The example of a family in one file is short, listed, and sound."""

from pathlib import Path

import pytest
import torch

import model_specs
import model_specs.example
from megatron_pulse.backbone.check import check_backbone
from megatron_pulse.planner.partition.legal_cuts import largest_fold
from tests.model_specs.chains import build_chain


def test_it_fits_on_a_page():
    text = Path(model_specs.example.__file__).read_text()
    assert text.count("\n") <= 80
    assert "example-tiny" in model_specs.available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_as_declared(dtype, one_rank):
    backbone = model_specs.load_backbone("example-tiny", {"depth": 2, "image_size": 8})
    assert check_backbone(backbone) == []
    assert len(backbone.skips) == 2 and largest_fold(len(backbone.layers), backbone.skips) == 3
    chain = build_chain(backbone, dtype)
    image, fields = chain.batch(3)
    assert chain(image, fields).isfinite().all()
    (temb,) = chain.modules[0]((), {}, fields)
    assert torch.equal(temb, chain.modules[0]((image,), {}, fields)[1])


def test_faults_are_listed():
    with pytest.raises(ValueError, match=r"2 fault(.|\n)*width.*\n.*depth"):
        model_specs.load_backbone("example-tiny", {"width": 0, "depth": 0})
