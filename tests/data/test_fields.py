"""Fields that backbones need against fields that data has."""

import numpy as np
import pytest
import torch

from megatron_pulse.backbone.layer_selection import class_option, size_options
from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.dataset import ArrayDataset, DataError, FieldSpec, Framing
from megatron_pulse.data.fields import Fitted, WantedFields, default_null, default_value
from model_specs import load_backbone

CONTEXT, MASK = FieldSpec((4, 3)), FieldSpec((4,), "int64")


class Texts(ArrayDataset):
    fields = {"context": CONTEXT, "pooled": FieldSpec((5,))}
    pixel_size = (64, 48)

    def __init__(self):
        super().__init__(np.zeros((6, 2, 4, 4)), np.zeros(6), num_classes=1)

    def conditioning(self, index, variation=None):
        return {"context": torch.full((4, 3), float(index)), "pooled": torch.ones(5)}

    def null_conditioning(self):
        return {"context": torch.zeros(4, 3), "pooled": torch.zeros(5)}


def test_exactly_the_wanted_fields_with_defaults():
    wanted = {
        "context": CONTEXT,
        "context_mask": MASK,
        "time_ids": FieldSpec((6,), "float32"),
        "guidance": FieldSpec((), "float32"),
    }
    data = Fitted(Texts(), WantedFields((2, 4, 4), wanted))
    assert not data.faults
    sample = data[2]
    assert sample.keys() == {"image", "label", "index", *wanted}
    for name, spec in wanted.items():
        assert tuple(sample[name].shape) == spec.shape and sample[name].dtype == spec.torch_dtype
    assert (sample["context"] == 2).all() and sample["context_mask"].tolist() == [1] * 4
    assert sample["time_ids"].tolist() == [64, 48, 0, 0, 64, 48]
    assert sample["guidance"].item() == 3.5
    assert data.null_conditioning().keys() == {"context"}


def test_a_mask_needs_what_it_masks():
    (fault,) = Fitted(Texts(), WantedFields((2, 4, 4), {"context_t5_mask": MASK})).faults
    assert fault == "the backbone reads context_t5_mask (4 int64), the data has none"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("time_ids", (6,), [100, 90, 7, 8, 64, 48]),
        ("image_meta_size", (6,), [100, 90, 64, 48, 7, 8]),
        ("resolution", (2,), [64, 48]),
        ("aspect_ratio", (1,), [64 / 48]),
        ("crop_coords", (2,), [7, 8]),
        ("ofs", (), 2),
        ("time_ids", (5,), None),
        ("context", (6,), None),
    ],
)
def test_defaults(name, shape, expected):
    framing = Framing((100, 90), (7, 8), (64, 48))
    value = default_value(name, FieldSpec(shape, "float32"), framing)
    assert expected == (None if value is None else pytest.approx(expected))
    if value is not None:
        assert value.tolist() == pytest.approx(expected) and default_null(name, None) is None


def test_null_values():
    latent = FieldSpec((4, 3, 2, 2))
    for name in ("image_latent", "image_embeds", "control_hidden_states"):
        assert default_null(name, latent, {name, "context"}) is None, "as pipelines guide"
    assert not default_null("image_latent", latent, {"image_latent", "image_embedding"}).any()
    assert (default_null("context", CONTEXT) == 0).all()
    assert default_null("context_mask", MASK).tolist() == [1, 1, 1, 1]
    assert default_null("time_ids", FieldSpec((6,))) is None


def test_all_that_does_not_fit_is_listed_at_once():
    fields = {"context": CONTEXT, "pooled": FieldSpec((2,)), "timesteps_r": FieldSpec(())}
    with pytest.raises(DataError) as error:
        open_dataset("digits8", wanted=WantedFields((3, 8, 8), fields, num_classes=4))
    faults = error.value.faults
    assert len(faults) == 5 and not any("--pulse-option" in fault for fault in faults)
    for part in (
        "1x8x8",
        "keep 4 class folders",
        "context (4x3",
        "pooled (2 ",
        "timesteps_r (scalar ",
    ):
        assert any(part in fault for fault in faults), part


def test_remedies_name_the_options_that_a_backbone_has():
    wanted = WantedFields((1, 8, 8), num_classes=4, class_option="num_class_embeds")
    with pytest.raises(DataError, match="use --pulse-option num_class_embeds=10"):
        open_dataset("digits8", wanted=wanted)
    for name, sizes in (("uvit-tiny", ("image_size",)), ("dit-tiny", ("sample_size",))):
        record = load_backbone(name).record
        assert (class_option(record), size_options(record)) == ("num_classes", sizes)
    of_a_class = {"options": {"sample_size": 8, "num_embeds_ada_norm": 5, "height": 8, "width": 8}}
    assert class_option(of_a_class) == "num_embeds_ada_norm"
    assert size_options(of_a_class) == ("height", "width")
    assert class_option({"name": "own"}) == "" and size_options({"name": "own"}) == ()
