"""The recipes that come along, and their dry runs: each is made once per process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.recipes.estimate import estimate
from lamina.recipes.schema import load_recipe

if TYPE_CHECKING:
    from lamina.recipes.estimate import Estimate
    from lamina.recipes.schema import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"


@cache
def recipe(path: str) -> Recipe:
    """A recipe by its path below `recipes`, without its ending."""
    return load_recipe(RECIPES / f"{path}.yaml")


@cache
def tried(path: str) -> Estimate:
    """What a dry run of it finds."""
    return estimate(recipe(path))
