"""A folder of small JPEG pictures, one folder for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

made = 0
"""How often a test's data set has made a sample. A module is no part of a digest."""


def make_folder(root: Path, count: int) -> None:
    """Write `count` pictures of waves of two classes, all different."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:32, :40]
    for number in range(count):
        folder = root / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        waves = generator.uniform(0.05, 0.5, (3, 2))
        pixels = np.stack([127 + 120 * np.sin(x * a + y * b + number) for a, b in waves], axis=-1)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:05}.jpg", quality=90)
