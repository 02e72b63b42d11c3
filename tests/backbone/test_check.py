"""Every kind of fault is found, named, and listed together with the others."""

from dataclasses import replace

import pytest

from megatron_pulse.backbone.chain import Backbone, Layer, TensorSpec
from megatron_pulse.backbone.check import BackboneError, check_backbone, require_valid

X = TensorSpec((4, 8, 8))
Y = TensorSpec((8, 4, 4))


def layer(name, inputs=(X,), outputs=(X,), **fields):
    return Layer(name, lambda context: None, tuple(inputs), tuple(outputs), **fields)


def sound():
    """a pushes to d; b provides temb for c and d, who read the batch's context too."""
    return Backbone(
        "sound",
        (
            layer("a", pushes={"s": 0}, uses=("timesteps",)),
            layer("b.0", provides={"temb": TensorSpec((16,))}),
            layer("b.1", uses=("temb", "context")),
            layer("d", pops={"s": X}, uses=("temb", "context")),
        ),
        {"timesteps": TensorSpec((), dtype="float32"), "context": TensorSpec((7, 16))},
    )


def changed(index, **fields):
    backbone = sound()
    layers = list(backbone.layers)
    layers[index] = replace(layers[index], **fields)
    return replace(backbone, layers=tuple(layers))


def test_sound():
    assert check_backbone(sound()) == []
    require_valid(sound())


@pytest.mark.parametrize(
    ("backbone", "words"),
    [
        (Backbone("none", ()), ["chain is empty"]),
        (changed(2, name="a"), ["layer 2", "'a'", "layer 0 is already called"]),
        (changed(2, name=""), ["layer 2", "cannot prefix"]),
        (changed(2, name="b..1"), ["cannot prefix"]),
        (changed(2, name="b."), ["cannot prefix"]),
        (changed(2, name=".b"), ["cannot prefix"]),
        (changed(2, name="b 1"), ["cannot prefix"]),
        (changed(2, name="a.1"), ["'a.1' lies inside layer 0 ('a')"]),
        (changed(0, name="b.1.x"), ["'b.1.x' lies inside layer 2 ('b.1')"]),
        (changed(0, pushes={}), ["'s'", "popped by layer 3 (d) but never pushed"]),
        (changed(3, pops={}), ["'s'", "pushed by layer 0 (a) but never popped"]),
        (changed(1, pushes={"s": 0}), ["'s'", "pushed by both layer 0 (a) and layer 1 (b.0)"]),
        (changed(2, pops={"s": X}), ["'s'", "popped by both layer 2 (b.1) and layer 3 (d)"]),
        (changed(0, pushes={"s": 1}), ["'s'", "pushes output 1, but has 1"]),
        (changed(0, beside={0: 1}), ["layer 0 (a)", "output 0 passes by as input 1", "1 inputs"]),
        (changed(0, beside={"x": 0}), ["layer 0 (a)", "beside must map output numbers"]),
        (changed(3, outputs=(Y,), beside={0: 0}), ["layer 3 (d)", "passes by as", "output 0 is"]),
        (changed(0, pushes={"s": -1}), ["'s'", "pushes output -1"]),
        (changed(3, pops={"s": Y}), ["'s'", "compute[b, 4, 8, 8]", "compute[b, 8, 4, 4]"]),
        (changed(3, pops={"s": replace(X, dtype="float32")}), ["float32[b, 4, 8, 8]"]),
        (changed(3, pops={"s": replace(X, batch_dim=1)}), ["compute[4, b, 8, 8]"]),
        (changed(1, outputs=(Y,)), ["boundary 1|2 (b.0 -> b.1)", "[b, 8, 4, 4]"]),
        (changed(1, outputs=(replace(X, dtype="float32"),)), ["boundary 1|2", "float32"]),
        (changed(1, outputs=(replace(X, batch_dim=1),)), ["boundary 1|2", "[4, b, 8, 8]"]),
        (changed(1, outputs=(replace(X, batch_dim=None),)), ["boundary 1|2", "compute[4, 8, 8]"]),
        (changed(1, outputs=(X, X)), ["boundary 1|2", "2 tensors leave, 1 are expected"]),
        (changed(0, uses=("mask",)), ["'mask'", "used by layer 0 (a)", "neither a batch field"]),
        (changed(0, uses=("temb",)), ["'temb'", "before layer 1 (b.0) provides it"]),
        (changed(1, uses=("temb",)), ["'temb'", "used by layer 1 (b.0) before layer 1"]),
        (changed(2, provides={"temb": X}), ["'temb'", "both layer 1 (b.0) and layer 2 (b.1)"]),
        (changed(2, provides={"z": X}), ["'z'", "provided by layer 2 (b.1) but never used"]),
        (changed(0, provides={"context": X}), ["'context'", "also a batch field"]),
        (changed(0, inputs=(X, X)), ["layer 0 (a)", "exactly one, the noisy sample"]),
        (changed(3, outputs=(X, X)), ["layer 3 (d)", "exactly one, the prediction"]),
        (changed(3, outputs=(TensorSpec((4, 0)),)), ["d: output 0", "dimension below 1"]),
        (changed(3, outputs=(TensorSpec((4,), batch_dim=2),)), ["d: output 0", "batch_dim 2"]),
        (changed(3, outputs=(TensorSpec((10**6, 10**6)),)), ["d: output 0", "each sample, 4.0 TB"]),
    ],
)
def test_one_fault(backbone, words):
    faults = check_backbone(backbone)
    assert any(all(word in fault for word in words) for fault in faults), faults
    with pytest.raises(BackboneError) as error:
        require_valid(backbone)
    assert error.value.faults == faults


def test_a_skip_may_not_be_popped_before_it_is_pushed():
    backbone = Backbone("early", (layer("a", pops={"s": X}), layer("b", pushes={"s": 0})))
    assert check_backbone(backbone) == [
        "skip 's': popped by layer 0 (a), which is not after layer 1 (b), where it is pushed"
    ]
    same = Backbone("same", (layer("a", pops={"s": X}, pushes={"s": 0}),))
    assert len(check_backbone(same)) == 1


def test_names_of_layers_may_nest_where_parameters_have_their_own():
    names = ("a", "a.b", "a.b.c")
    assert len(check_backbone(Backbone("nested", tuple(map(layer, names))))) == 3
    qualified = tuple(replace(layer(name), qualified=True) for name in names)
    assert check_backbone(Backbone("nested", qualified)) == []


def test_all_faults_at_once():
    backbone = Backbone(
        "bad",
        (
            layer("a", pushes={"s": 0, "t": 3}, outputs=(Y,)),
            layer("a", uses=("temb",)),
            layer("c.", pops={"u": X}, provides={"z": X}),
        ),
    )
    faults = check_backbone(backbone)
    assert len(faults) == 9
    with pytest.raises(BackboneError) as error:
        require_valid(backbone)
    assert all(fault in str(error.value) for fault in faults)
    assert "'bad' is invalid (9 faults)" in str(error.value)


def embedder(**changes):
    fields = {"inputs": (X,), "outputs": (X,), "provides": {"z": X}, "embedder": True}
    return Layer("e", None, **{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"provides": {}}, "provides nothing"),
        ({"outputs": (TensorSpec((9,)),)}, "must return its inputs unchanged"),
        ({"pushes": {"s": 0}}, "must return its inputs unchanged"),
        ({"uses": ("other",)}, "uses other; an embedder reads only batch fields"),
    ],
)
def test_embedders_only_read_the_batch(changes, words):
    faults = check_backbone(
        Backbone("b", (embedder(**changes), Layer("f", None, (X,), (X,), uses=("z",))))
    )
    assert any(words in fault for fault in faults) if words else faults == []


def test_sequences_divide():
    tokens, text = TensorSpec((12, 4), 1, sequence=True), TensorSpec((5, 4))
    layers = (
        Layer("a", None, (tokens,), (tokens,), pushes={"s": 0}, provides={"t": text}),
        Layer("b", None, (tokens,), (tokens,), pops={"s": tokens}, uses=("t",)),
    )
    divided = Backbone("b", layers).divide_sequences(4)
    assert check_backbone(divided) == []
    assert divided.skips[0].spec.shape == (3, 4) and divided.layers[1].inputs[0].shape == (3, 4)
    assert divided.conditioning[0].spec.shape == (5, 4)
    with pytest.raises(ValueError, match=r"over 5 ranks: 12 tokens of . do not divide"):
        Backbone("b", layers).divide_sequences(5)


LABELS = {**sound().batch_fields, "labels": TensorSpec((), dtype="int64")}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"batch_fields": LABELS}, ["'labels': the number of classes is missing"]),
        ({"num_classes": 10}, ["num_classes: is 10, but no batch field is called 'labels'"]),
        ({"null_label": 3}, ["null_label: label 3 is of no classes"]),
        (
            {"batch_fields": LABELS, "num_classes": 10, "null_label": 9, "patch_size": 3},
            ["label 9 is one of the 10 classes", "3 does not divide the sample's 8 x 8"],
        ),
        (
            {"num_classes": 0, "null_label": -1, "patch_size": None, "num_heads": [8]},
            [
                "num_classes: must be a whole number from 1 on, is 0",
                "null_label: must be a whole number from 0 on, is -1",
                "patch_size: must be a whole number from 1 on, is None",
                "num_heads: must be a tuple of whole numbers from 1 on, is [8]",
            ],
        ),
        ({"num_heads": (8, 0)}, ["num_heads: must be a tuple of whole numbers from 1"]),
    ],
)
def test_what_a_backbone_says_of_itself(said, words):
    faults = check_backbone(replace(sound(), **said))
    assert len(faults) == len(words)
    for word in words:
        assert any(word in fault for fault in faults), faults


def test_classes_with_and_without_a_null_label():
    for null in (None, 10, 1000):
        said = {"batch_fields": LABELS, "num_classes": 10, "null_label": null, "patch_size": 2}
        backbone = replace(sound(), **said)
        assert check_backbone(backbone) == []
        assert backbone.image_tokens == 16
