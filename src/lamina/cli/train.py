"""`lamina train RECIPE`: train the readers a recipe names, in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.options import JsonOption
from lamina.cli.output import print_json, print_table

if TYPE_CHECKING:
    from lamina.dry_run import DryRun
    from lamina.recipe import Recipe
    from lamina.runner import Run

SHOWN = 20  # rows of a sweep's table


def train(  # noqa: PLR0913
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file that says what to train.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Folder with a subfolder per preset; by default sets come from the hub."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to save; by default out/<recipe>.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="KEY=A,B,...", help="Train every reader that has this key with each value."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: build all, and print parameters, steps and cost.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Train the readers that a recipe names, all of them in one pass of the model.

    With --sweep fusion.alpha=1,8,64 and the like, every combination of the values becomes a reader of the same run.
    """
    from lamina.recipe import load_recipe

    loaded = load_recipe(recipe)
    if sweep:
        from lamina.members import read_sweeps, with_sweep

        loaded = with_sweep(loaded, read_sweeps(sweep))
    if dry_run:
        _try(loaded, data, as_json=as_json)
        return
    from lamina.processes import processes
    from lamina.runner import run_recipe

    folder = output or Path("out") / recipe.stem
    run = run_recipe(loaded, data=data, output=folder, resume=resume, progress=progress)
    if processes()[0] != 0:
        return  # several processes share the run, and one of them tells
    if as_json:
        print_json({"table": run.table, "seconds": run.seconds, "steps": run.steps, "output": str(folder)})
        return
    show(run)
    for name, count in run.truncated.items():
        if count:
            print(f"{name}: {count} training texts were longer than the model reads; their ends were not seen")
    print(f"{run.steps} steps in {run.seconds:.0f} s; saved in {folder}")


def show(run: Run) -> None:
    """Print the table of a run, one row per task, method and setting; of a sweep the best."""
    from lamina.runner import cell, columns_of

    columns = columns_of(run.table)
    rows = run.table[:SHOWN] if any(row["settings"] for row in run.table) else run.table
    shown = [[*(cell(row, name) for name in columns), f"{row['best_epoch']:.1f}"] for row in rows]
    repeated = any(row["interval"] is not None for row in rows)
    title = "Best validation scores" + ("; ± is half a 95 % interval" if repeated else "")
    print_table(title, (*columns, "best epoch"), shown)
    if left := len(run.table) - len(rows):
        print(f"and {left} rows more, in table.md")


def _try(recipe: Recipe, data: Path | None, *, as_json: bool) -> None:
    from lamina.dry_run import dry_run

    found = dry_run(recipe, data=data)
    if as_json:
        print_json(found.to_json())
    else:
        show_dry_run(found)


def show_dry_run(found: DryRun) -> None:
    """Print what a recipe would do and cost."""
    from lamina.costs import readable

    model = found.model
    print(f"{model['name']}: {model['parameters']:,} parameters, {'trained' if model['trained'] else 'frozen'}")
    columns = ("task", "method", "settings", "readers", "epochs", "layers", "parameters", "FLOPs/text", "states kept")
    print_table("Readers", columns, [_reader(row) for row in found.readers])
    names = ("task", "rows", "validation", "tokens", "draws", "readers", "steps_per_epoch", "steps")
    print_table("Tasks", [name.replace("_", " ") for name in names], [[row[n] for n in names] for row in found.tasks])
    flops, held, cached = found.flops, readable(found.weights_bytes), readable(found.cache_bytes)
    parts = f"{readable(flops['base'])} in the model, {readable(flops['readers'])} in the readers"
    print(
        f"At most {sum(row['steps'] for row in found.tasks):,} steps, about {readable(flops['total'])}FLOPs: {parts}."
    )
    print(f"That is {flops['total'] / 3.6e15:.2g} h at 1 TFLOP/s.")
    print(f"Weights, gradients and Adam's moments take {held}B, a cache of the states would take {cached}B.")
    for note in found.notes:
        print(f"({note})")


def _reader(row: dict[str, Any]) -> tuple[object, ...]:
    from lamina.costs import readable

    settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    flops = f"{'' if row['counted'] else '~'}{readable(row['flops_per_text'])}"
    kept = f"{readable(row['states_bytes'])}B" if row["states_bytes"] else "-"
    return (
        *(row["task"], row["method"], settings, row["count"], row["epochs"], row["layers"], row["parameters"]),
        *(flops, kept),
    )
