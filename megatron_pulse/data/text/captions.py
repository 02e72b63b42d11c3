"""A folder of images, all with captions, whose words stand for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_pulse.data.dataset import NO_FIELDS, DataError, FieldSpec
from megatron_pulse.data.images.folder import ImageFiles
from megatron_pulse.data.images.metadata import TEXT, read_captions
from megatron_pulse.data.text.words import WordEncoder


class CaptionedImages(ImageFiles):
    """Images and captions below ``root`` (see ``images/metadata.py``), encoded by WordEncoder.

    ``fields`` are what a backbone asks for: the dataset has those of them that are text. Dropped
    samples get the encoding of the empty text. ``verify`` is that of ImageFiles, ``column`` the
    captions' in lists, ``default`` that of images without one. Raises DataError with everything
    that is wrong with them.
    """

    kind = "captions"

    def __init__(
        self,
        root: str | Path,
        image_size: int,
        channels: int = 3,
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
        verify: bool = False,
        column: str = TEXT,
        default: str = "",
    ) -> None:
        root = Path(root)
        said = read_captions(root, column, default)
        if not said.pairs:
            raise DataError(
                f"captioned images {root}",
                ["there are no captions" if root.is_dir() else "it is not a folder"],
                "Give a folder of images with a text beside each, or with metadata.jsonl, one "
                '{"file_name": ..., "text": ...} a line, or with such a metadata.csv; '
                "'pulse data emoji' makes one.",
            )
        files, captions = zip(*said.pairs, strict=True)
        groups = [said.groups.get(path, "") for path in files]
        super().__init__(
            root, list(files), [0] * len(files), 1, image_size, channels, verify, captions, groups
        )
        self.cautions = said.cautions
        self._encoder = WordEncoder(fields)
        self.fields = self._encoder.fields

    def conditioning(self, index: int) -> dict[str, Tensor]:
        return self._encoder(self.captions[index])

    def null_conditioning(self) -> dict[str, Tensor]:
        return self._encoder("")
