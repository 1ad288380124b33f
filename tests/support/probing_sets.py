"""Made-up probing sets in the files of the package sae-probes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

WORDS = ["the", "a", "film", "is", "paris", "anna", "to"]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.output_stream(str(path), compression="zstd") as stream:
        stream.write(text.encode())


def rows(count: int, seed: int = 0, names: tuple[str, str] = ("bad", "good")) -> str:
    rng = np.random.default_rng(seed)
    lines = ["prompt,target"]
    for row in range(count):
        words = [*rng.choice(WORDS, 6), ("slow", "fun")[row % 2], str(row)]
        lines.append(f"{' '.join(words)},{names[row % 2]}")
    return "\n".join(lines) + "\n"


def probing_sets(folder: Path) -> Path:
    """Two sets, one of several classes, and one whose file is missing; the first has a twin of other texts."""
    place = folder / "sae_probes" / "data"
    kinds = [("1_mood", "Binary"), ("2_again", "Binary"), ("3_many", "Multiclass"), ("4_lost", "Binary")]
    master = ["Data type,Dataset save name"]
    master += [f"{kind} Classification,cleaned_data/{name}.csv" for name, kind in kinds]
    write(place / "probing_datasets_MASTER.csv.zst", "\n".join(master) + "\n")
    write(place / "cleaned_data/1_mood.csv.zst", rows(180))
    write(place / "cleaned_data/2_again.csv.zst", rows(180, 1))
    write(place / "OOD data/1_mood_OOD.csv.zst", rows(20, 2, ("not", "good")))
    return place
