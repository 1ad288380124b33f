"""`lamina train RECIPE`: train the readers a recipe names in one pass, or fine-tune its model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from lamina.cli.options import DataOption, JsonOption, RayOption
from lamina.cli.output import end_if_failed, print_json, print_table
from lamina.cli.report import write as write_report
from lamina.utils import pluralize

if TYPE_CHECKING:
    from lamina.recipes.run import Run

SHOWN = 20  # rows of a sweep's table
_OUTPUT = "Where to save, in place of an earlier run; by default out/<recipe>."
_SWEEP = "Train every reader or method that has this key with each value."


def train(  # noqa: PLR0913
    recipe: Annotated[Path, Argument(metavar="RECIPE", help="YAML file that says what to train.")],
    data: DataOption = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    sweep: Annotated[list[str] | None, Option(metavar="KEY=A,B,...", help=_SWEEP)] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Estimate parameters, steps and operations only.")] = False,
    resume: Annotated[bool, Option("--resume", help="Go on from the newest checkpoint in the output.")] = False,
    ray: RayOption = None,
    progress: Annotated[bool | None, Option(help="Show a progress bar; by default as the recipe says.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train what a recipe names: readers, all in one pass of the model, or the model itself, once per method.

    With --sweep fusion.alpha=1,8,64 (or insert.layers, learning_rate ...) every combination of the values is trained.
    Fine-tunings, and readers that are trained separately, are cells of their own, which --ray spreads over workers. One
    that fails is listed, the others go on, and the command ends with 1.
    Tables and figures that the recipe names, and importances of layers, are drawn at the end, as by `lamina report`.
    """
    from lamina.recipes.expand import read_sweeps, with_sweep
    from lamina.recipes.schema import load_recipe

    loaded = load_recipe(recipe)
    if sweep:
        loaded = with_sweep(loaded, read_sweeps(sweep))
    folder = output or Path("out") / recipe.stem
    if dry_run:
        from lamina.cli.estimate_table import print_estimate
        from lamina.recipes.estimate import estimate

        cost = estimate(loaded, data=data, output=folder)
        print_json(cost) if as_json else print_estimate(cost)
        return
    from lamina.recipes.run import run_recipe
    from lamina.utils import rank

    options: dict[str, Any] = {"resume": True} if resume else {}
    if progress is not None:
        options["progress"] = progress
    run = run_recipe(loaded, data=data, output=folder, ray=ray, **options)
    if rank() != 0:
        return  # several processes share the run, and one of them tells
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


def _show(run: Run, folder: Path) -> None:
    """Print the table of a run, one row per task, method and setting, of a sweep the best; and what texts lost."""
    from lamina.recipes.summary import printed

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
