"""A folder of captioned images, as Hugging Face's ``imagefolder`` has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_pulse.data.dataset import NO_FIELDS, DataError, FieldSpec
from megatron_pulse.data.images.folder import METADATA, ImageFiles
from megatron_pulse.data.text.words import WordEncoder
from megatron_pulse.file_kinds import FileKind
from megatron_pulse.files import FileError, parse_json, read_lines


class CaptionedImages(ImageFiles):
    """Images and texts of ``root/metadata.jsonl``, encoded by WordEncoder.

    Each line is ``{"file_name": "a.png", "text": "a red bird"}``; other keys are passed over.
    ``fields`` are what a backbone asks for: the dataset has those of them that are text. Dropped
    samples get the encoding of the empty text. ``verify`` is that of ImageFiles. Raises
    DataError with every bad line.
    """

    kind = "captions"
    has_captions = True

    def __init__(
        self,
        root: str | Path,
        image_size: int,
        channels: int = 3,
        fields: Mapping[str, FieldSpec] = NO_FIELDS,
        verify: bool = False,
    ) -> None:
        files, self.captions = _read(Path(root))
        super().__init__(Path(root), files, [0] * len(files), 1, image_size, channels, verify)
        self._encoder = WordEncoder(fields)
        self.fields = self._encoder.fields

    def caption(self, index: int) -> str:
        return self.captions[index]

    def conditioning(self, index: int) -> dict[str, Tensor]:
        return self._encoder(self.captions[index])

    def null_conditioning(self) -> dict[str, Tensor]:
        return self._encoder("")


def _read(root: Path) -> tuple[list[Path], list[str]]:
    what = f"captioned images {root}"
    try:
        lines = list(read_lines(root / METADATA, FileKind.CAPTIONS))
    except FileError as error:
        raise DataError(
            what,
            [str(error)],
            f'Give a folder of images with {METADATA}, one {{"file_name": ..., "text": ...}} a '
            "line; 'pulse data emoji' makes one.",
        ) from error
    files, captions, faults = [], [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
            name, text = record["file_name"], record["text"]
            if not isinstance(name, str) or not isinstance(text, str):
                raise TypeError("file_name and text must be strings")
            if "\0" in name or not (root / name).is_file():
                raise ValueError(f"there is no file {name}")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            faults.append(f"{METADATA}, line {number}: {reason}")
            continue
        files.append(root / name)
        captions.append(text)
    if not files and not faults:
        faults.append(f"{METADATA} names no images")
    if faults:
        raise DataError(what, faults, "Correct these lines.")
    return files, captions
