"""Small images made from a seed: each class has its own shade, so that a model can tell them apart."""

from __future__ import annotations

import tarfile
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CLASSES = ("bird", "cat", "frog")


def picture(shade: int = 128, *, size: tuple[int, int] = (12, 10), seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Noise around one shade, `size` wide and high."""
    noise = np.random.default_rng(seed).integers(-30, 31, (size[1], size[0], 3))
    return Image.fromarray(np.clip(shade + noise, 0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def put(root: Path, name: str, data: bytes | str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def picture_folder(root: Path, *, classes: Sequence[str] = CLASSES, rows: int = 2, under: str = "") -> Path:
    """Write `rows` PNG files per class as `root/under/<class>/<number>.png`; returns `root`."""
    for number, label in enumerate(classes):
        for row in range(rows):
            shade = 40 + 170 * number // max(1, len(classes) - 1)
            image = picture(shade, seed=1000 * number + row)
            put(root, f"{under}/{label}/{row:04d}.png".lstrip("/"), encoded(image))
    return root


def picture_tar(path: Path, folder: Path, *, backwards: bool = False, mode: str = "w") -> Path:
    """Pack what a folder holds, in the order of the names or against it; returns `path`."""
    with tarfile.open(path, mode, format=tarfile.USTAR_FORMAT) as archive:  # type: ignore[call-overload]
        for file in sorted(folder.rglob("*"), reverse=backwards):
            archive.add(file, arcname=file.relative_to(folder).as_posix(), recursive=False)
    return path
