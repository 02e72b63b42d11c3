import pytest
import torch

from megatron_pulse.data.digit_score import digit_score
from megatron_pulse.data.images.digits import open_digits


@pytest.mark.parametrize("source, size", [("mnist", 16), ("mnist", 28), ("digits8", 8)])
def test_real_digits_are_recognised(source, size):
    _, held_out = open_digits(source, size)
    report = digit_score(held_out.images, torch.from_numpy(held_out.labels), source)
    assert report.score == report.classifier_accuracy >= 0.95
    assert min(report.per_class) > 0.85
    assert sum(map(sum, report.confusion)) == report.num_images == len(held_out)


def test_wrong_digits_are_not():
    _, held_out = open_digits("digits8")
    labels = (torch.from_numpy(held_out.labels) + 1) % 10
    report = digit_score(held_out.images, labels, "digits8")
    assert report.score < 0.05 and "most often read as" in str(report)
    assert digit_score(held_out.images[:1], labels[:1], "digits8").per_class.count(None) == 9
    with pytest.raises(ValueError, match="images"):
        digit_score(torch.zeros(1, 3, 8, 8), labels[:1])
