"""Labels of several sources by class name: one name has one label."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from megatron_pulse.data.dataset import Derived, DiffusionDataset

Source = tuple[str, DiffusionDataset]
"""(name in ``--pulse-data``, all samples)."""
_SHOWN = 3


class Relabelled(Derived):
    """``source`` with labels of ``class_names``, which has all names of the source."""

    def __init__(self, source: DiffusionDataset, class_names: Sequence[str]) -> None:
        super().__init__(source)
        label_of = {name: label for label, name in enumerate(class_names)}
        self._labels = [label_of[name] for name in source.class_names]
        self.class_names = class_names
        self.num_classes = len(class_names)

    def label(self, index: int) -> int:
        return self._labels[self.source.label(index)]


def labelled_by_name(sources: Sequence[Source]) -> list[Source]:
    """Sources of which one class name has one label in all.

    Labels of the first source stay. Names that first occur in a later source follow, in its order.
    Sources without class names keep their labels.
    """
    known = [source.class_names for _, source in sources if _named(source)]
    names = list(dict.fromkeys(chain.from_iterable(known)))

    def labelled(source: DiffusionDataset) -> DiffusionDataset:
        same = not _named(source) or list(source.class_names) == names
        return source if same else Relabelled(source, names)

    return [(spec, labelled(source)) for spec, source in sources]


def unnamed_beside_named(sources: Sequence[Source]) -> list[str]:
    """Faults of sources whose labels have no names, beside sources with class names."""
    named = [(spec, source.class_names) for spec, source in sources if _named(source)]
    if not named:
        return []
    first, names = named[0]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return [
        f"{spec} has no class names, but {first} has ({shown}): label 0 would mean {names[0]} and "
        f"a class of {spec}"
        for spec, source in sources
        if not _named(source)
    ]


def _named(source: DiffusionDataset) -> bool:
    """True if every class has a name."""
    return 0 < len(source.class_names) == source.num_classes
