"""A recipe whose readers read one of two towers: what is estimated is what runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.pictures import picture_folder, put
from tests.support.towers import joint_processor, two_towers

from lamina.store import save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long
def test_readers_find_their_tower(lamina: Any, tmp_path: Path):
    """Before there are weights, too; an image has the patches of its tower."""
    save(two_towers(), tmp_path / "model", joint_processor())
    files = {"train": str(picture_folder(tmp_path / "pets", rows=8))}
    task = {"kind": "image_classification", "files": files, "readers": {"default": {"fusion": "default"}}}
    recipe = {"model": str(tmp_path / "model"), "tasks": {"shade": task}, "fit": {"epochs": 1}}
    file = put(tmp_path, "recipe.yaml", json.dumps(recipe))
    told = lamina("train", file, "--dry-run", "--json")
    assert told.code == 0, told.err
    (row,) = json.loads(told.out)["tasks"]
    assert (row["task"], row["tokens"]) == ("shade", 5)
    ran = lamina("train", file, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "shade" in ran.out
