"""Score of generated digits by a classifier of real digits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from megatron_pulse.data.images.digits import open_digits


@dataclass(frozen=True)
class ScoreReport:
    """Scores of generated digits; shares in [0, 1].

    - ``score``: share classified as the requested digit.

    - ``classifier_accuracy``: the classifier's accuracy on real validation digits.

    - ``confusion[i][j]``: number of digits requested as i and classified as j.
    """

    score: float
    classifier_accuracy: float
    num_images: int
    confusion: tuple[tuple[int, ...], ...]

    @property
    def per_class(self) -> tuple[float | None, ...]:
        """Score of each digit; None if it was not requested."""
        return tuple(
            row[digit] / sum(row) if sum(row) else None for digit, row in enumerate(self.confusion)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"per_class": self.per_class}

    def __str__(self) -> str:
        lines = [
            f"{self.score:.1%} of {self.num_images} generated digits show the requested digit",
            f"(the classifier's accuracy on held-out real digits: {self.classifier_accuracy:.1%})",
            "digit  asked  right  most often read as",
        ]
        for digit, row in enumerate(self.confusion):
            wrong = sorted(((n, d) for d, n in enumerate(row) if n and d != digit), reverse=True)
            taken = ", ".join(f"{d} ({n})" for n, d in wrong[:2])
            lines.append(f"{digit:5d}{sum(row):7d}{row[digit]:7d}  {taken}".rstrip())
        return "\n".join(lines)


def digit_score(images: Tensor, labels: Tensor, source: str = "mnist") -> ScoreReport:
    """Classify ``images [n, 1, s, s]`` in [-1, 1] made for ``labels [n]``.

    The classifier is a support vector machine with an RBF kernel. It is fitted at resolution s to
    the training split of ``source``, and evaluated on the validation split.
    """
    if images.dim() != 4 or images.shape[1] != 1 or images.shape[2] != images.shape[3]:
        raise ValueError(f"digit_score takes images [n, 1, s, s], got {tuple(images.shape)}")
    if len(images) != len(labels):
        raise ValueError(f"digit_score got {len(images)} images and {len(labels)} labels")
    classifier, accuracy = _classifier(source, images.shape[-1])
    found = classifier.predict(images.detach().cpu().float().clamp(-1, 1).flatten(1).numpy())
    confusion: np.ndarray = np.zeros((10, 10), dtype=int)
    np.add.at(confusion, (labels.cpu().numpy(), found), 1)
    return ScoreReport(
        score=float(np.trace(confusion) / max(len(images), 1)),
        classifier_accuracy=accuracy,
        num_images=len(images),
        confusion=tuple(tuple(int(n) for n in row) for row in confusion),
    )


@lru_cache(maxsize=4)
def _classifier(source: str, image_size: int) -> tuple[Any, float]:
    from sklearn.svm import SVC

    train, held_out = open_digits(source, image_size)
    classifier = SVC(C=10.0, gamma="scale").fit(train.images.flatten(1).numpy(), train.labels)
    accuracy = classifier.score(held_out.images.flatten(1).numpy(), held_out.labels)
    return classifier, float(accuracy)
