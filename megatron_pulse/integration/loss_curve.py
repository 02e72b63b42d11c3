"""Loss curve of a run, read from its TensorBoard files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_pulse.files import replacing
from megatron_pulse.fonts import drawable

_TRAINING, _VALIDATION = "loss", "loss validation"
"""Megatron's tags of the two curves."""


@dataclass(frozen=True)
class Curve:
    """Values of one scalar, with the steps at which they were written."""

    steps: list[int]
    values: list[float]


def read_scalars(directory: str | Path) -> dict[str, Curve]:
    """All scalars in the event files of ``directory``, by tag, in order of step.

    Of a step that was written several times, as after a resume from an earlier step, the latest
    value counts. Raises FileNotFoundError if there is no event file.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = Path(directory)
    if not any(directory.glob("*tfevents*")):
        raise FileNotFoundError(
            f"{directory} has no TensorBoard event files. Train with --tensorboard-dir {directory}"
        )
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    curves = {}
    for tag in events.Tags()["scalars"]:
        written = sorted(events.Scalars(tag), key=lambda point: point.wall_time)
        latest = {point.step: point.value for point in written}
        steps = sorted(latest)
        curves[tag] = Curve(steps, [latest[step] for step in steps])
    return curves


def draw_loss_curve(
    directory: str | Path, path: str | Path, title: str = "Loss"
) -> dict[str, dict[str, list[float]]]:
    """Draw training and validation loss over iterations as a PNG, and write the values as JSON.

    The JSON file lies beside ``path`` with the suffix ``.json`` and holds the returned value:
    ``{"training": {"steps", "values"}, "validation": {...}}``. Validation is absent if the run has
    none. Raises KeyError, listing the existing tags, if there is no training loss.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import font_manager, pyplot

    path = Path(path)
    scalars = read_scalars(directory)
    if _TRAINING not in scalars:
        raise KeyError(f"no scalar {_TRAINING!r} in {directory}; it has: {sorted(scalars)}")
    curves = {"training": scalars[_TRAINING]}
    if _VALIDATION in scalars:
        curves["validation"] = scalars[_VALIDATION]

    heading, fonts = drawable(title)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    train = curves["training"]
    # A line of one point has no length, so a single point gets a marker.
    lone = "o" if len(train.steps) == 1 else ""
    axes.plot(train.steps, train.values, color="tab:blue", alpha=0.3, linewidth=0.8)
    smoothed = _smoothed(train.values)
    axes.plot(train.steps, smoothed, color="tab:blue", marker=lone, label="training (smoothed)")
    if "validation" in curves:
        validation = curves["validation"]
        axes.plot(
            validation.steps,
            validation.values,
            "o-",
            color="tab:orange",
            markersize=4,
            label="validation",
        )
    axes.set(xlabel="iteration", ylabel="mean squared error", yscale="log")
    families = [font_manager.FontProperties(fname=font).get_name() for font in fonts]
    axes.set_title(heading, parse_math=False, fontfamily=families)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=150)
    pyplot.close(figure)

    values = {name: asdict(curve) for name, curve in curves.items()}
    with replacing(path.with_suffix(".json")) as beside:
        beside.write_text(json.dumps(values, indent=1) + "\n")
    return values


def _smoothed(values: list[float], weight: float = 0.95) -> list[float]:
    """Exponential smoothing with bias correction at the start (as in TensorBoard)."""
    result, running, norm = [], 0.0, 0.0
    for value in values:
        running = weight * running + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        result.append(running / norm)
    return result
