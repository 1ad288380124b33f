"""The page of the recipes' keys has every one of them, and its examples are recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from lamina.recipes.monitor_keys import MonitorRecipe
from lamina.recipes.schema import MethodRecipe, ReaderRecipe, Recipe, TaskRecipe, load_recipe
from lamina.recipes.table_layouts import FigureRecipe, TableRecipe
from lamina.studies.run_study import StudyRecipe, load_study_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
SECTIONS = {title: body for title, _, body in (part.partition("\n") for part in PAGE.split("\n## ")[1:])}


@pytest.mark.parametrize(
    ("section", "models"),
    [
        ("Keys of a run", [Recipe]),
        ("Keys of a task", [TaskRecipe]),
        ("Keys of a reader", [ReaderRecipe]),
        ("Keys of a method", [MethodRecipe]),
        ("Keys of a monitor", [MonitorRecipe]),
        ("Keys of a table and a figure", [TableRecipe, FigureRecipe]),
        ("Keys of studies", [StudyRecipe]),
    ],
)
def test_every_key_is_there_and_no_other(section: str, models: list[type[BaseModel]]):
    cells = re.findall(r"^\| (`[^|]*) \|", SECTIONS[section], re.MULTILINE)
    listed = [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]
    known = dict.fromkeys(key for model in models for key in model.model_fields)
    if section == "Keys of studies":
        known = [key for key in known if key not in ("model", "tasks")]
    assert sorted(listed) == sorted(known)


def test_the_examples_are_recipes(tmp_path: Path):
    for block, read in zip(
        re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL), (load_recipe, load_study_recipe), strict=True
    ):
        (tmp_path / "it.yaml").write_text(block)
        assert read(tmp_path / "it.yaml").model == "minilm"
