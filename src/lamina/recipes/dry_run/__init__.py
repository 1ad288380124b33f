"""Dry runs: build everything a recipe names on the meta device, and say what it would cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lamina.recipes.dry_run.facts import DryRun, facts_of
from lamina.recipes.dry_run.methods import of_methods
from lamina.recipes.dry_run.readers import of_readers

if TYPE_CHECKING:
    from pathlib import Path

    from lamina.recipes.schema import Recipe

__all__ = ["DryRun", "dry_run"]


def dry_run(recipe: Recipe, *, data: str | Path | None = None, **options: Any) -> DryRun:
    """Build everything a recipe names on the meta device, and estimate its cost.

    Args:
        recipe: From `load_recipe`.
        data: Folder of the data, as in `run_recipe`; None: published numbers stand for those of presets.
        **options: Override the recipe's `fit` options.

    Raises:
        LaminaError: If the recipe does not fit the model, or nothing is known of a task.
    """
    facts = {name: facts_of(name, task, data) for name, task in recipe.tasks.items()}
    notes = [] if data is not None else ["rows and lengths are as published; --data counts those of local files"]
    of = of_methods if recipe.methods else of_readers
    return of(recipe, facts, {**recipe.fit, **options}, notes)
