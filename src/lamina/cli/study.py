"""`lamina study NAME RECIPE`: see what every layer does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from lamina.cli.output import end_if_failed, print_json, print_table
from lamina.cli.shared_options import DataOption, JsonOption, RayOption
from lamina.registry import STUDIES
from lamina.utils import pluralize

if TYPE_CHECKING:
    from lamina.studies.run_study import StudyRecipe
    from lamina.studies.study import Study

SHOWN = 20  # rows of the table that are printed
_NAMES = STUDIES.names()
_NAME = f"Name of the study: {', '.join(_NAMES[:-1])} or {_NAMES[-1]}."
_OUTPUT = "Folder to save to. Default: out/<recipe>/<study>."


def study(  # noqa: PLR0913
    name: Annotated[str, Argument(metavar="NAME", help=_NAME)],
    recipe: Annotated[Path, Argument(metavar="RECIPE", help="YAML file with the model, tasks, texts and options.")],
    data: DataOption = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    resume: Annotated[
        bool, Option("--resume", help="Skip cells that are already complete in the output folder.")
    ] = False,
    ray: RayOption = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Read the recipe and its data and print what would run.")
    ] = False,
    progress: Annotated[bool, Option(help="Show a progress bar.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Run one study of a recipe, and save its table, figures and settings.

    A study of several cells (for example one per task and seed) saves each cell when it ends. If a cell fails, it is
    listed, the others continue, and the exit code is 1.
    """
    from lamina.studies.run_study import load_study_recipe

    loaded = load_study_recipe(recipe)
    options = loaded.options(name)
    folder = output or Path("out") / recipe.stem / name
    if dry_run:
        _show_plan(_plan(name, loaded, options, data, folder), as_json=as_json)
        return
    from lamina.studies.run_study import run_study

    found = run_study(name, loaded, data=data, output=folder, resume=resume, progress=progress, ray=ray)
    _show(found, folder, as_json=as_json)
    end_if_failed(found.settings.get("failures") or [])


def _show(found: Study, folder: Path, *, as_json: bool) -> None:
    failures = found.settings.get("failures") or []
    if as_json:
        rows = found.table.to_dict("records")
        facts = {"study": found.name, "conclusions": found.conclusions, "failures": failures, "output": str(folder)}
        print_json({**facts, "table": rows})
        return
    summary = found.summary()
    shown = (summary if found.pivot else summary.head(SHOWN)).astype(object)
    rows = shown.where(shown.notna(), None).to_numpy().tolist()
    print_table(f"Study: {found.name}", list(shown.columns), rows)
    if found.pivot is not None:
        print(f"means over seeds; all {pluralize(len(found.table), 'row')} are in {folder / 'table.csv'}")
    elif (left := len(found.table) - SHOWN) > 0:
        print(f"and {pluralize(left, 'more row')}, in {folder / 'table.csv'}")
    for sentence in found.conclusions:
        print(f"- {sentence}")
    print(f"saved in {folder}; lamina report {folder} -o page.html shows it")


def _plan(name: str, recipe: StudyRecipe, options: dict[str, Any], data: Path | None, folder: Path) -> dict[str, Any]:
    """Return what a study would run: model, tasks, number of texts, options and output folder."""
    from lamina.studies.run_study import CONTROLS, load_tasks, load_texts, parameters_of, source_of

    tasks = load_tasks(recipe, data)
    defaults = {key: given.default for key, given in parameters_of(name).items() if given.default is not given.empty}
    known = {key: value for key, value in defaults.items() if value is not None and key not in CONTROLS}
    return {
        "study": name,
        "model": source_of(recipe.model, data),
        "tasks": {task: {part: len(rows) for part, rows in own.splits.items()} for task, own in tasks.items()},
        "texts": len(load_texts(recipe, tasks, data)),
        "options": {**known, **options},
        "output": str(folder),
    }


def _show_plan(plan: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(plan)
        return
    print(f"{plan['study']} of {plan['model']}, to be saved in {plan['output']}")
    rows = [
        (name, ", ".join(f"{part}: {count:,}" for part, count in own.items())) for name, own in plan["tasks"].items()
    ]
    print_table("Tasks", ("task", "rows"), rows)
    print(pluralize(plan["texts"], "text"))
    print_table("Options", ("option", "value"), [(key, str(value)) for key, value in plan["options"].items()])
