"""`lamina train RECIPE`: train the readers a recipe names in one pass, or fine-tune its model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from lamina.cli.output import end_if_failed, print_json, print_table
from lamina.cli.report import write as write_report
from lamina.cli.shared_options import DataOption, JsonOption, RayOption
from lamina.utils import pluralize

if TYPE_CHECKING:
    from lamina.recipes.estimate import Estimate
    from lamina.recipes.run_recipe import RecipeResult

SHOWN = 20  # rows of the printed table of a sweep
_OUTPUT = "Folder to save to; an earlier run in it is replaced. Default: out/<recipe>."
_SWEEP = "Train every reader or method that has this setting once per value; may be repeated."


def train(  # noqa: PLR0913
    recipe: Annotated[Path, Argument(metavar="RECIPE", help="YAML file that says what to train.")],
    data: DataOption = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    sweep: Annotated[list[str] | None, Option(metavar="KEY=A,B,...", help=_SWEEP)] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only estimate parameters, steps and operations.")] = False,
    resume: Annotated[
        bool, Option("--resume", help="Continue from the newest checkpoint in the output folder.")
    ] = False,
    ray: RayOption = None,
    progress: Annotated[bool | None, Option(help="Show a progress bar. Default: as the recipe says.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train the readers of a recipe, all in one pass of the model, or fine-tune the model once per method.

    With --sweep fusion.alpha=1,8,64 (or insert.layers, learning_rate ...) every combination of the values is trained.
    Fine-tuning runs, and readers that are trained separately, are independent cells, which --ray runs in parallel. If a
    cell fails, it is listed, the others continue, and the exit code is 1.
    At the end the recipe's tables and figures and the importances of layers are drawn, as by `lamina report`.
    """
    from lamina.recipes.expand import read_sweeps, with_sweep
    from lamina.recipes.schema import load_recipe

    loaded = load_recipe(recipe)
    if sweep:
        loaded = with_sweep(loaded, read_sweeps(sweep))
    folder = output or Path("out") / recipe.stem
    if dry_run:
        from lamina.cli.train import print_estimate
        from lamina.recipes.estimate import estimate

        cost = estimate(loaded, data=data, output=folder)
        print_json(cost) if as_json else print_estimate(cost)
        return
    from lamina.recipes.run_recipe import run_recipe
    from lamina.utils import rank

    options: dict[str, Any] = {"resume": True} if resume else {}
    if progress is not None:
        options["progress"] = progress
    run = run_recipe(loaded, data=data, output=folder, ray=ray, **options)
    if rank() != 0:
        return  # of several processes only the first one prints
    failures = [asdict(failure) for failure in run.failures]
    drawn: list[str] = []
    if run.importances or loaded.model_fields_set & {"table", "figure"}:
        drawn = write_report(folder, ["png"]).files
    if as_json:
        facts = {"seconds": run.seconds, "steps": run.steps, "output": str(folder), "failures": failures}
        print_json({"table": run.table, **facts})
    else:
        _show(run, folder)
        saved = ", ".join([str(folder), *drawn])
        took = f"{pluralize(run.steps, 'step')} in {run.seconds:.0f} s"
        print(f"{took}; saved in {saved}; lamina report {folder} -o page.html shows it")
    end_if_failed(failures)


def _show(run: RecipeResult, folder: Path) -> None:
    """Print a row per task, method and setting of a run (the best of a sweep) and how many texts were truncated."""
    from lamina.recipes.summary_table import printed

    columns, cells = printed(run.table)
    rows = run.table[:SHOWN] if any(row["settings"] for row in run.table) else run.table
    shown = [[*line, f"{row['best_epoch']:.1f}"] for line, row in zip(cells, rows, strict=False)]
    repeated = any(row["interval"] is not None for row in rows)
    title = "Best validation scores" + ("; ± is half a 95 % interval" if repeated else "")
    print_table(title, (*columns, "best epoch"), shown)
    if left := len(run.table) - len(rows):
        print(f"and {pluralize(left, 'more row')}, in {folder / 'table.md'}")
    for name, count in run.truncated.items():
        if count:
            print(f"{name}: {count} training texts were longer than the model reads; their ends were not seen")


def print_estimate(cost: Estimate) -> None:
    """Print what a recipe would train, and its parameters, steps, operations and memory."""
    from lamina.recipes.estimate import readable

    model, flops = cost.model, cost.flops
    print(f"{model['name']}: {model['parameters']:,} parameters, {'trained' if model['trained'] else 'frozen'}")
    columns = ("task", "method", "settings", "runs", "epochs", "steps", "parameters", "by edits", "trained", "FLOPs")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in cost.runs:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    print_table("Runs", columns, [_run(rows) for rows in groups.values()])
    names = ("task", "rows", "validation", "tokens", "repeats", "runs", "steps_per_epoch", "steps")
    tasks = [{**row, "tokens": f"{row['tokens']} + {row['target']}"} if row["target"] else row for row in cost.tasks]
    print_table("Tasks", [name.replace("_", " ") for name in names], [[row[name] for name in names] for row in tasks])
    shared = f", {readable(flops['base'])} of them in the model that readers share" if flops["base"] else ""
    steps = pluralize(sum(row["steps"] for row in tasks), "step")
    print(
        f"At most {steps}, about {readable(flops['total'])}FLOPs{shared}: "
        f"2 x parameters x tokens, 3 times that with gradients; {flops['total'] / 3.6e15:.2g} h at 1 TFLOP/s."
    )
    cache = f"; a cache of the states would take {readable(cost.cache_bytes)}B" if cost.cache_bytes else ""
    print(f"Weights, gradients and the optimizer's moments take up to {readable(cost.memory_bytes)}B{cache}.")
    batch = f"a batch of {pluralize(cost.kept_rows, 'row')}"
    kept = f"readers keep up to {readable(cost.kept_bytes)}B for the gradients of {batch}"
    for note in [*([kept] if cost.kept_rows else []), *cost.notes]:
        print(f"({note})")


def _run(rows: list[dict[str, Any]]) -> tuple[object, ...]:
    """Return one row for all settings of a task and method: a single value, or the lowest and the highest."""
    from lamina.recipes.estimate import readable

    values = {key: list(dict.fromkeys(str(row["settings"][key]) for row in rows)) for key in rows[0]["settings"]}
    settings = [f"{key}={given[0]}" if len(given) == 1 else f"{len(given)} x {key}" for key, given in values.items()]
    columns = ("epochs", "steps", "parameters", "added", "trained")
    spans = ([min(row[key] for row in rows), max(row[key] for row in rows)] for key in columns)
    return (
        *(rows[0]["task"], rows[0]["method"], ", ".join(settings), sum(row["count"] for row in rows)),
        *(low if low == high else f"{readable(low)} to {readable(high)}" for low, high in spans),
        readable(sum(row["flops"] for row in rows)),
    )
