"""Datasets of pictures by their names: kinds, and one listing of each within a start."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_pulse.data.archives.tables import DatasetImages, ParquetImages, TableImages
from megatron_pulse.data.archives.webdataset import WebDataset
from megatron_pulse.data.captions import CaptionedImages, PairedImages
from megatron_pulse.data.images.folder import ImageFiles, ImageFolder
from megatron_pulse.data.images.metadata import TEXT
from megatron_pulse.data.picture_choice import ClipChoice
from megatron_pulse.data.videos.folder import VideoFolder

VIDEOS = VideoFolder.kind
"""Kind of datasets of clips."""
FOLDERS = ("folder", "captions", "pairs", VIDEOS)
"""Kinds of datasets that are folders of image files."""
WHOLE_CLIPS = ClipChoice()
"""Every frame, at the film's own times."""
ARCHIVES: Mapping[str, type[WebDataset | TableImages]] = {
    each.kind: each for each in (WebDataset, ParquetImages, DatasetImages)
}
"""Classes of archives of images by their kinds."""
IMAGES = (*FOLDERS, *ARCHIVES)
"""Kinds of datasets that are image files."""


class OpenedImages:
    """Datasets of pictures that one start has opened.

    A start reads a dataset for the shapes of its pictures, and again for the model. Files, captions
    and picture headers are read for the first alone. Changes of files between the two are found
    when a picture is read. ``clips`` chooses the frames of films.
    """

    def __init__(self, clips: ClipChoice = WHOLE_CLIPS) -> None:
        self.clips = clips
        self._known: dict[tuple[str, ...], ImageFiles] = {}

    def listed(self, kind: str, path: str, column: str, default_caption: str = "") -> ImageFiles:
        """Pictures of a dataset; ``ImageFiles.resized`` gives them a size. Raises DataError."""
        key = kind, path, column, default_caption
        if key not in self._known:
            self._known[key] = _listed(*key)
        found = self._known[key]
        if isinstance(found, VideoFolder):
            found.choice = self.clips
        return found


_ANY = 1
"""Size of pictures that are listed."""


def _listed(kind: str, path: str, column: str, default: str) -> ImageFiles:
    if kind == VIDEOS:
        return VideoFolder(path, _ANY, column=column, default=default)
    if kind in ARCHIVES:
        given = None if column == TEXT else column
        return ARCHIVES[kind](path, _ANY, column=given, default=default)
    if kind == "folder":
        return ImageFolder(path, _ANY, column=column, default=default)
    of_texts = PairedImages if kind == "pairs" else CaptionedImages
    return of_texts(path, _ANY, column=column, default=default)
