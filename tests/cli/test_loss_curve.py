import json

import pytest
from PIL import Image

from megatron_pulse.files import replacing
from megatron_pulse.integration.loss_curve import draw_loss_curve, read_scalars


def test_curves_are_read_and_drawn(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in range(1, 41):
            writer.add_scalar("loss", 1 / step, step)
            if step % 10 == 0:
                writer.add_scalar("loss validation", 2 / step, step)
    values = draw_loss_curve(tmp_path, tmp_path / "loss.png")
    assert values["training"]["steps"] == list(range(1, 41))
    assert values["validation"]["values"] == pytest.approx([0.2, 0.1, 2 / 30, 0.05])
    assert json.loads((tmp_path / "loss.json").read_text()) == values
    with Image.open(tmp_path / "loss.png") as image:
        assert image.width > 500
    with SummaryWriter(tmp_path / "other") as writer:
        writer.add_scalar("loss validation", 1.0, 1)
    with pytest.raises(KeyError, match="loss validation"):
        draw_loss_curve(tmp_path / "other", tmp_path / "x.png")


def test_read_scalars_keeps_the_latest_value_of_a_repeated_step(tmp_path):
    """A run of nine steps goes on from step 3 up to step 8."""
    from torch.utils.tensorboard import SummaryWriter

    for suffix, (first, last), value in ((".a", (1, 9), 1.0), (".b", (4, 8), 2.0)):
        with SummaryWriter(tmp_path, filename_suffix=suffix) as writer:
            for step in range(first, last + 1):
                writer.add_scalar("loss", value, step)
                writer.add_scalar("loss validation", value, step)
    for curve in draw_loss_curve(tmp_path, tmp_path / "loss.png").values():
        assert curve["steps"] == list(range(1, 10))
        assert curve["values"] == [1.0] * 3 + [2.0] * 5 + [1.0]


def test_no_event_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="--tensorboard-dir"):
        read_scalars(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
