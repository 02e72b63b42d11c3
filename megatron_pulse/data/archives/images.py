"""Pictures in archives as a dataset, whatever the archive."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_pulse.data.captions import WordedImages
from megatron_pulse.data.dataset import NO_FIELDS, CorruptSample, FieldSpec
from megatron_pulse.data.images.folder import ImageSize
from megatron_pulse.data.split_groups import MOST_COMPARED
from megatron_pulse.data.stored_file import ArchivedFile

CAPTIONS = ("text", "caption")
"""Names of what holds the caption, unless another one is given; of several the first counts."""


class ArchivedImages(WordedImages):
    """Pictures of archives below ``root``, with captions and classes where there are any.

    ``labels`` are class numbers; ``class_names`` are empty where classes have none. The other
    arguments are those of WordedImages.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[ArchivedFile],
        labels: Sequence[int],
        image_size: ImageSize,
        channels: int = 3,
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
        verify: bool = False,
        captions: Sequence[str] = (),
        class_names: Sequence[str] = (),
    ) -> None:
        num_classes = len(class_names) or 1 + max(labels, default=0)
        self.class_names = class_names
        super().__init__(
            root, files, labels, num_classes, image_size, channels, verify, captions, fields=fields
        )

    def caption(self, index: int) -> str:
        try:
            return super().caption(index)
        except ValueError as error:
            fault = f"{self.files[index]}: its caption {error}"
            raise CorruptSample(f"{self.kind} {self.root}", [fault], self.remedy) from error

    def excess(self, index: int) -> int:
        with suppress(CorruptSample):  # told where it is read
            return super().excess(index)
        return 0

    def check(self, index: int) -> None:
        super().check(index)
        self.caption(index)

    def ties(self) -> Sequence[Sequence[Hashable]]:
        # No two are one file, and contents of so many are not compared.
        return super().ties() if len(self) <= MOST_COMPARED else ()

    def revision(self, index: int) -> str:
        file = self.files[index]
        assert isinstance(file, ArchivedFile)
        return file.relative_to(self.root)
