"""The recipes in recipes/studies: each is read, says how it is run, and has what its studies need."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamina.registry import STUDIES
from lamina.studies.run_study import load_study_recipe

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "recipes" / "studies").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_recipe_is_read_and_has_what_its_studies_need(path: Path):
    recipe = load_study_recipe(path)
    assert recipe.studies
    for name in recipe.studies:
        recipe.options(name)
    header = path.read_text().partition("model:")[0]
    assert f"lamina study {next(iter(recipe.studies))} recipes/studies/{path.name} --data" in header


def test_every_study_of_cells_has_a_recipe():
    named = {name for path in FILES for name in load_study_recipe(path).studies}
    assert (
        {"removal", "advise", "reinit", "insertion", "lens", "similarity", "variability"} <= named <= {*STUDIES.names()}
    )
