"""`lamina train RECIPE`: train the readers a recipe names, in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.options import JsonOption
from lamina.cli.output import print_json, print_table

if TYPE_CHECKING:
    from lamina.runner import Run


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file that says what to train.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder with a subfolder per preset; by default sets come from the hub."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to save; by default out/<recipe>.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Train the readers that a recipe names, all of them in one pass of the model."""
    from lamina.recipe import load_recipe
    from lamina.runner import run_recipe

    loaded = load_recipe(recipe)
    folder = output or Path("out") / recipe.stem
    run = run_recipe(loaded, data=data, output=folder, resume=resume, progress=progress)
    if as_json:
        print_json(
            {"table": run.table, "seconds": run.result.seconds, "steps": run.result.steps, "output": str(folder)}
        )
        return
    show(run)
    for name, count in run.result.truncated.items():
        if count:
            print(f"{name}: {count} training texts were longer than the model reads; their ends were not seen")
    print(f"{run.result.steps} steps in {run.result.seconds:.0f} s; saved in {folder}")


def show(run: Run) -> None:
    """Print the table of a run, one row per task and method."""
    columns = ("task", "method", "metric", "mean", "spread", "seeds", "best epoch", "parameters")
    rows: list[tuple[Any, ...]] = [
        (
            row["task"],
            row["method"],
            row["metric"],
            row["mean"],
            row["spread"],
            len(row["seeds"]),
            f"{row['best_epoch']:.1f}",
            row["parameters"],
        )
        for row in run.table
    ]
    print_table("Best validation scores", columns, rows)
