"""`lamina study NAME RECIPE`: run one study of the layers of a recipe's model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from typer import Argument, Option

from lamina.cli import shared_options
from lamina.cli.shared_options import print_json, print_table
from lamina.registry import STUDIES
from lamina.utils import pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.studies.run_study import StudyRecipe
    from lamina.studies.study import Study

SHOWN = 20  # rows of the table that are printed
_NAMES = STUDIES.names()
_NAME = f"Name of the study: {', '.join(_NAMES[:-1])} or {_NAMES[-1]}."
_OUTPUT = "Folder to save to. Default: out/<recipe>/<study>."
_RESUME = "Skip cells that are already complete in the output folder."
_DRY_RUN = "Run nothing; read the recipe, its data and the model's config, and print what would run."


class Plan(TypedDict):
    """The facts about a study that `lamina study --dry-run` prints.

    Attributes:
        study: Name of the study.
        model: Name or folder of the model.
        tasks: Task -> split -> number of rows.
        texts: Number of texts.
        options: The study's options, with the defaults that are not None.
        output: The output folder.
    """

    study: str
    model: str
    tasks: dict[str, dict[str, int]]
    texts: int
    options: dict[str, object]
    output: str


def study(  # noqa: PLR0913
    name: Annotated[str, Argument(metavar="NAME", help=_NAME)],
    recipe: Annotated[Path, Argument(metavar="RECIPE", help="YAML file with the model, tasks, texts and options.")],
    data: shared_options.DataOption = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    resume: Annotated[bool, Option("--resume", help=_RESUME)] = False,
    ray: shared_options.RayOption = None,
    dry_run: Annotated[bool, Option("--dry-run", help=_DRY_RUN)] = False,
    overwrite: shared_options.OverwriteOption = False,
    progress: shared_options.ProgressOption = True,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Run one study of a recipe, and save its table, figures and settings.

    A study is an experiment on the layers of a model, for example which layer knows a task (probe). docs/studies.md
    explains all of them. A study may consist of several independent cells, such as one per task and seed. Each cell is
    saved when it ends. If a cell fails, it is listed, the others continue, and the exit code is 1. Wrong input ends
    with one sentence and exit code 2.
    """
    from lamina.studies.run_study import load_study_recipe

    loaded = load_study_recipe(recipe)
    options = loaded.options(name)
    folder = output or Path("out") / recipe.stem / name
    if dry_run:
        plan = _plan(name, loaded, options, data, folder)
        print_json(plan) if as_json else _show_plan(plan)
        return
    shared_options.check_output("study", folder, overwrite=overwrite, resume=resume)
    from lamina.studies.run_study import run_study

    result = run_study(name, loaded, data=data, output=folder, resume=resume, progress=progress, ray=ray)
    _show(result, folder, as_json=as_json)
    shared_options.end_if_failed(result.settings.get("failures") or [])


def _show(result: Study, folder: Path, *, as_json: bool) -> None:
    """Print the table and conclusions of a study, or everything as JSON; `folder` is where the study was saved.

    The table is the study's summary, or the first 20 rows of a study that has none.
    """
    failures = result.settings.get("failures") or []
    if as_json:
        rows = result.table.to_dict("records")
        facts = {"study": result.name, "conclusions": result.conclusions, "failures": failures, "output": str(folder)}
        print_json({**facts, "table": rows})
        return
    summary = result.summary()
    shown = (summary if result.pivot else summary.head(SHOWN)).astype(object)
    rows = shown.where(shown.notna(), None).to_numpy().tolist()
    print_table(f"Study: {result.name}", list(shown.columns), rows)
    for line in _baselines(result):
        print(line)
    if result.pivot is not None:
        print(f"means over seeds; all {pluralize(len(result.table), 'row')} are in {folder / 'table.csv'}")
    elif (left := len(result.table) - SHOWN) > 0:
        print(f"and {pluralize(left, 'more row')}, in {folder / 'table.csv'}")
    for sentence in result.conclusions:
        print(f"- {sentence}")
    print(f"saved in {folder}; lamina report {folder} -o page.html shows it")


def _baselines(result: Study) -> list[str]:
    """Return a line per task with the mean scores of its baselines, which have no layer and so no row in the summary.

    [] for studies other than `probe`.
    """
    from lamina.studies.study import rows_where

    if result.pivot is None or not {"task", "metric", "layer", "probe"} <= set(result.table.columns):
        return []
    rows = rows_where(result.table, result.pivot.where)
    scores = rows.loc[rows["layer"].isna()].astype({"score": float})
    groups = scores.groupby(["task", "metric", "probe"], sort=False, dropna=False)["score"]
    means = groups.agg(lambda values: values.mean(skipna=False)).reset_index()
    lines: dict[str, list[str]] = {}
    for row in means.to_dict("records"):
        line = lines.setdefault(f"{row['task']}, {row['metric']} without the model", [])
        line.append(f"{row['probe']} {row['score']:.4f}")
    return [f"{start}: {', '.join(parts)}" for start, parts in lines.items()]


def _plan(name: str, recipe: StudyRecipe, options: Mapping[str, object], data: Path | None, folder: Path) -> Plan:
    """Return what a study would run, without running it.

    `options` are those that the recipe sets; defaults are added. `data` is the folder of the recipe's data files (None:
    the current folder), and `folder` the output folder. Raises LaminaError if the tasks or texts cannot be read, or the
    model does not exist.
    """
    from lamina.store.models import load_config
    from lamina.studies.run_study import CONTROLS, load_tasks, load_texts, parameters_of, source_of

    model = source_of(recipe.model, data)
    load_config(model)
    tasks = load_tasks(recipe, data)
    parameters = parameters_of(name).items()
    defaults = {key: parameter.default for key, parameter in parameters if parameter.default is not parameter.empty}
    known = {key: value for key, value in defaults.items() if value is not None and key not in CONTROLS}
    return Plan(
        study=name,
        model=model,
        tasks={key: {split: len(rows) for split, rows in task.splits.items()} for key, task in tasks.items()},
        texts=len(load_texts(recipe, tasks, data)),
        options={**known, **options},
        output=str(folder),
    )


def _show_plan(plan: Plan) -> None:
    print(f"study {plan['study']} of {plan['model']}, to be saved in {plan['output']}")
    rows = [
        (name, ", ".join(f"{split}: {count:,}" for split, count in sizes.items()))
        for name, sizes in plan["tasks"].items()
    ]
    print_table("Tasks", ("task", "rows"), rows)
    if plan["texts"]:
        print(pluralize(plan["texts"], "text"))
    print_table("Options", ("option", "value"), [(key, _value(value)) for key, value in plan["options"].items()])


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
