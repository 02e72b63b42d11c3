"""Loading of 512 px pictures beside webdataset's reader and torchvision's ImageFolder.

    .venv/bin/uv pip install torchvision
    .venv/bin/python -m tests.benchmarks.loading [--workers N]

JPEGs of 768x512 are written to a temporary place, as files and in a tar. Each reader makes batches
of four: decoded, scaled and cropped to 512x512, in [-1, 1]. Ours add the noise of a training step.
Readers take turns. Without workers the rate is by processor time, with workers by the clock.
"""

from __future__ import annotations

import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from megatron_pulse.data.build import open_dataset
from megatron_pulse.data.fields import WantedFields
from megatron_pulse.data.microbatches import DiffusionLoader
from megatron_pulse.data.sampler import MicrobatchSampler
from megatron_pulse.diffusion.objectives import DiffusionProcess, Objective
from tests.benchmarks.report import Flags, Report, count

BATCH = 4
SIZE = 512
_WIDE = 768


def write_pictures(root: Path, number: int) -> tuple[Path, Path]:
    """Write JPEGs of some 140 KB as ``folder/a/*.jpg`` and into one tar; return both places."""
    rng, folder = np.random.default_rng(0), root / "folder"
    (folder / "a").mkdir(parents=True)
    patches = Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8))
    scene = np.asarray(patches.resize((_WIDE, SIZE), Image.Resampling.BICUBIC)).astype(int)
    (root / "tars").mkdir()
    with tarfile.open(root / "tars" / "0.tar", "w") as tar:
        for i in range(number):
            grain = rng.integers(-12, 12, scene.shape)
            pixels = np.clip(np.roll(scene, 7 * i, 1) + grain, 0, 255).astype(np.uint8)
            path = folder / "a" / f"{i:05}.jpg"
            Image.fromarray(pixels).save(path, quality=90)
            tar.add(path, path.name)
    return folder, root / "tars"


def ours(spec: str, workers: int) -> Iterator[Any]:
    """Batches of a run that encodes in the loop."""
    data, _ = open_dataset(spec, wanted=WantedFields((3, SIZE, SIZE), latent_shape=(4, 64, 64)))
    sampler = MicrobatchSampler(len(data), 0, BATCH, 0, 1, seed=0)
    process = DiffusionProcess(Objective.FLOW)
    return iter(DiffusionLoader(data, sampler, process, 0, num_workers=workers))


def readers(folder: Path, tars: Path, workers: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Readers by name, each a function that begins anew."""
    import torchvision
    import webdataset
    from torchvision import transforms

    scaled = transforms.Compose(
        [
            transforms.Resize(SIZE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    loader = torch.utils.data.DataLoader

    def image_folder() -> Iterator[Any]:
        data = torchvision.datasets.ImageFolder(str(folder), scaled)
        return iter(loader(data, BATCH, shuffle=True, num_workers=workers))

    def web() -> Iterator[Any]:
        urls = [str(path) for path in sorted(tars.glob("*.tar"))]
        data = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).shuffle(100)
        data = data.decode("pil").to_tuple("jpg").map_tuple(scaled).batched(BATCH)
        return iter(loader(data, None, num_workers=workers))

    return {
        "folder:": lambda: ours(f"folder:{folder}", workers),
        "webdataset:": lambda: ours(f"webdataset:{tars}", workers),
        "ImageFolder": image_folder,
        "webdataset": web,
    }


def main() -> None:
    """Measure and print."""
    flags = Flags(__doc__)
    flags.add("--workers", 0, "processes that read", type=int)
    flags.add("--pictures", 400, "JPEGs to read from", type=count)
    flags.add("--repetitions", 5, "of each reader", type=count)
    args = flags.parse_args()
    torch.set_num_threads(1)
    clock = time.perf_counter if args.workers else time.process_time
    batches = max(1, args.pictures // BATCH // 2)
    with tempfile.TemporaryDirectory() as root:
        kinds = readers(*write_pictures(Path(root), args.pictures), args.workers)
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(args.repetitions):
            for name, begin in kinds.items():
                made = begin()
                next(made)
                began = clock()
                found = sum(1 for _ in islice(made, batches))
                rates[name].append(BATCH * found / (clock() - began))
    report = Report(args.json)
    fastest = max(statistics.median(rates[name]) for name in ("ImageFolder", "webdataset"))
    for name, each in rates.items():
        middle = statistics.median(each)
        report.add(
            {
                "reader": name,
                "samples/s": middle,
                "least": min(each),
                "most": max(each),
                "x fastest other": middle / fastest if name.endswith(":") else None,
            }
        )


if __name__ == "__main__":
    main()
