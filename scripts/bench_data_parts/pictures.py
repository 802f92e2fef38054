"""A folder of JPEGs that are as hard to decode as photographs: clouds of all sizes, with the noise of a sensor."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import track

CLASSES = 10
_COARSEST = 5
_NOISE = 4.0


def make_pictures(root: Path, count: int, size: tuple[int, int]) -> float:
    """Write `count` pictures of this width and height into `CLASSES` folders; returns the mean size in kB."""
    for number in range(CLASSES):
        (root / f"class{number}").mkdir(parents=True)
    paths = [root / f"class{number % CLASSES}" / f"{number:06}.jpg" for number in range(count)]
    with ProcessPoolExecutor() as processes:
        made = processes.map(_make, paths, [size] * count, range(count), chunksize=16)
        sizes = list(track(made, "pictures", total=count, console=Console(stderr=True), transient=True))
    return sum(sizes) / count / 1e3


def _make(path: Path, size: tuple[int, int], seed: int) -> int:
    generator = np.random.default_rng(seed)
    pixels = np.full((size[1], size[0], 3), 128.0, dtype=np.float32)
    for octave in range(_COARSEST):
        cells = 2 ** (octave + 2)
        coarse = generator.normal(0, 40 / (octave + 1), (cells, cells, 3))
        picture = Image.fromarray(np.clip(coarse + 128, 0, 255).astype(np.uint8))
        pixels += np.asarray(picture.resize(size, Image.Resampling.BICUBIC), dtype=np.float32) - 128
    pixels += generator.normal(0, _NOISE, pixels.shape)
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=88)
    return path.stat().st_size
