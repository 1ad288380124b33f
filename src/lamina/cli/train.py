"""`lamina train RECIPE`: train the readers a recipe names in one pass, or fine-tune its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lamina.cli.options import JsonOption
from lamina.cli.output import print_json, print_table

if TYPE_CHECKING:
    from lamina.recipes.dry_run import DryRun
    from lamina.recipes.run import Run
    from lamina.recipes.schema import Recipe

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
        typer.Option(
            "--sweep", metavar="KEY=A,B,...", help="Train every reader or method that has this key with each value."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: build all, and print parameters, steps and cost.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the output.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Train what a recipe names: readers, all in one pass of the model, or the model itself, once per method.

    With --sweep fusion.alpha=1,8,64 (or insert.layers, learning_rate ...) every combination of the values is trained.
    """
    from lamina.recipes.schema import load_recipe

    loaded = load_recipe(recipe)
    if sweep:
        from lamina.recipes.members import read_sweeps, with_sweep
        from lamina.recipes.methods import sweep_methods

        loaded = (sweep_methods if loaded.methods else with_sweep)(loaded, read_sweeps(sweep))
    if dry_run:
        _try(loaded, data, as_json=as_json)
        return
    from lamina.recipes.run import run_recipe
    from lamina.utils import rank

    folder = output or Path("out") / recipe.stem
    run = run_recipe(loaded, data=data, output=folder, resume=resume, progress=progress)
    if rank() != 0:
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
    from lamina.recipes.run import cell, columns_of

    columns = columns_of(run.table)
    rows = run.table[:SHOWN] if any(row["settings"] for row in run.table) else run.table
    shown = [[*(cell(row, name) for name in columns), f"{row['best_epoch']:.1f}"] for row in rows]
    repeated = any(row["interval"] is not None for row in rows)
    title = "Best validation scores" + ("; ± is half a 95 % interval" if repeated else "")
    print_table(title, (*columns, "best epoch"), shown)
    if left := len(run.table) - len(rows):
        print(f"and {left} rows more, in table.md")


def _try(recipe: Recipe, data: Path | None, *, as_json: bool) -> None:
    from lamina.recipes.dry_run import dry_run

    found = dry_run(recipe, data=data)
    if as_json:
        print_json(found.to_json())
    else:
        show_dry_run(found)


def show_dry_run(found: DryRun) -> None:
    """Print what a recipe would do and cost."""
    from lamina.recipes.costs import readable

    if found.methods:
        _show_methods(found)
    else:
        _show_readers(found)
    print(f"That is {found.flops['total'] / 3.6e15:.2g} h at 1 TFLOP/s.")
    held, cached = readable(found.weights_bytes), readable(found.cache_bytes)
    if found.methods:
        print(f"Weights, gradients and the optimizer's moments take up to {held}B; what a pass keeps comes on top.")
    else:
        print(f"Weights, gradients and Adam's moments take {held}B, a cache of the states would take {cached}B.")
    for note in found.notes:
        print(f"({note})")


def _show_readers(found: DryRun) -> None:
    from lamina.recipes.costs import readable

    model = found.model
    print(f"{model['name']}: {model['parameters']:,} parameters, {'trained' if model['trained'] else 'frozen'}")
    columns = ("task", "method", "settings", "readers", "epochs", "layers", "parameters", "FLOPs/text", "states kept")
    print_table("Readers", columns, [_reader(row) for row in found.readers])
    names = ("task", "rows", "validation", "tokens", "draws", "readers", "steps_per_epoch", "steps")
    print_table("Tasks", [name.replace("_", " ") for name in names], [[row[n] for n in names] for row in found.tasks])
    flops = found.flops
    parts = f"{readable(flops['base'])} in the model, {readable(flops['readers'])} in the readers"
    print(f"At most {_steps(found):,} steps, about {readable(flops['total'])}FLOPs: {parts}.")


def _show_methods(found: DryRun) -> None:
    from lamina.recipes.costs import readable

    print(f"{found.model['name']}, fine-tuned anew in every run")
    columns = (
        "task",
        "method",
        "settings",
        "runs",
        "steps",
        "parameters",
        "by edits",
        "trained",
        "FLOPs/row",
        "memory",
    )
    print_table("Runs", columns, [_method(rows) for rows in _alike(found.methods)])
    names = ("task", "rows", "validation", "input", "draws", "runs", "steps_per_epoch", "steps")
    cells = [[_input(row["input"]) if name == "input" else row[name] for name in names] for row in found.tasks]
    print_table("Tasks", [name.replace("_", " ") for name in names], cells)
    flops = found.flops
    parts = f"{readable(flops['training'])} to train, {readable(flops['scoring'])} to score"
    print(f"At most {_steps(found):,} steps, about {readable(flops['total'])}FLOPs: {parts}.")


def _steps(found: DryRun) -> int:
    return sum(row["steps"] for row in found.tasks)


def _reader(row: dict[str, Any]) -> tuple[object, ...]:
    from lamina.recipes.costs import readable

    settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
    kept = f"{readable(row['states_bytes'])}B" if row["states_bytes"] else "-"
    return (
        *(row["task"], row["method"], settings, row["count"], row["epochs"], row["layers"], row["parameters"]),
        *(_operations(row, "flops_per_text"), kept),
    )


def _operations(row: dict[str, Any], key: str) -> str:
    from lamina.recipes.costs import readable

    return f"{'' if row['counted'] else '~'}{readable(row[key])}"


_SIZES = ("task", "method", "steps", "parameters", "trained", "flops_per_row", "memory_bytes")


def _alike(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of one task and method that are of the same size, whatever their settings."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in _SIZES), []).append(row)
    return list(found.values())


def _method(rows: list[dict[str, Any]]) -> tuple[object, ...]:
    from lamina.recipes.costs import readable

    first = rows[0]
    more = first["parameters"] - first["before"]
    return (
        *(first["task"], first["method"], _settings(rows), sum(row["count"] for row in rows), first["steps"]),
        *(first["parameters"], f"{more:+,}" if more else "-", first["trained"]),
        *(_operations(first, "flops_per_row"), f"{readable(first['memory_bytes'])}B"),
    )


def _settings(rows: list[dict[str, Any]]) -> str:
    """Settings of rows of the same size: a value, or how many there are."""
    said = []
    for key in rows[0]["settings"]:
        values = list(dict.fromkeys(str(row["settings"][key]) for row in rows))
        said.append(f"{key}={values[0]}" if len(values) == 1 else f"{len(values)} x {key}")
    return ", ".join(said)


def _input(size: dict[str, Any]) -> str:
    """How large a row is."""
    if size["pixels"] is not None:
        return " x ".join(map(str, size["pixels"][1:])) + " pixels"
    return f"{size['tokens']}{' + ' + str(size['target']) if size['target'] else ''} tokens"
