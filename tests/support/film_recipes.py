"""Recipes that train readers and models on a tiny base: is the film good?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.stored import save_base

from lamina.recipes.schema import Recipe, parse_recipe

LINEAR = {"pooling": "mean"}
ADA = {"fusion": {"name": "ada_layers", "dim": 8, "dropout": 0.0}, "head": LINEAR}
LAST = {"fusion": "last_layer", "head": LINEAR}
FILES = {part: f"{part}.tsv" for part in ("train", "validation", "test")}
METHODS = {
    "plain": {},
    "more": {
        "edits": [{"insert": {"position": "ffn", "init": "xavier"}}],
        "fit": {"epochs": 1},
        "grid": {"insert.layers": [None, "1-2"]},
    },
}


def write_films(folder: Path) -> Path:
    """Write a tiny model and the three splits of a task, and return their folder."""
    save_base(folder / "base")
    for part, count in (("train", 24), ("validation", 8), ("test", 8)):
        rows = [f"the film is {('bad', 'good')[row % 2]} .\t{('no', 'yes')[row % 2]}\n" for row in range(count)]
        (folder / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    return folder


def recipe(folder: Path, readers: dict[str, Any], *, task: dict[str, Any] | None = None, **fields: Any) -> Recipe:
    """Return a recipe that trains readers."""
    body = {"files": FILES, "metric": "accuracy", "readers": readers, **(task or {})}
    fit = {"epochs": 2, "batch_size": 8, "learning_rate": 0.05, "progress": False}
    return parse_recipe({"model": str(folder / "base"), "tasks": {"film": body}, "fit": fit, **fields})


def methods(folder: Path, given: dict[str, Any] | None = None, **fields: Any) -> Recipe:
    """Return a recipe that trains whole models."""
    fit = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01, "progress": False}
    task = {"files": FILES, "metric": "accuracy"}
    body = {"model": str(folder / "base"), "tasks": {"film": task}, "fit": fit, "methods": given or METHODS}
    return parse_recipe({**body, **fields})
