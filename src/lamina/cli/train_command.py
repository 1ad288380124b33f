"""`lamina train RECIPE`: train the readers of a recipe in one pass, or fine-tune its model."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lamina.cli import shared_options
from lamina.cli.report_command import write as write_report
from lamina.cli.shared_options import check_used, print_json, print_table
from lamina.utils import JSONObject, check_range, pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.recipes.estimate import Estimate
    from lamina.recipes.run_recipe import RecipeResult
    from lamina.recipes.schema import Recipe

_LEAST_GIB, _MOST_GIB = 0.1, 100_000  # memory of a GPU
SHOWN = 20  # rows of the printed table of a sweep
_OUTPUT = "Folder to save to. Default: out/<recipe>."
_SWEEP = 'Train every reader or method once per value of this setting, such as "fusion.alpha=1,8,64"; may be repeated.'

_ONLY = (
    'Run only the part of the recipe whose task, method or grid value matches, such as "task=cola" or '
    '"method=baseline,unit*"; may be repeated. The paper\'s numbers stay beside this part.'
)
_FIT_MEMORY = (
    "Split batches so that they fit the GPU (without one, the RAM); a step keeps its rows, with accumulated gradients. "
    "With --dry-run: only propose them."
)
_MEMORY = "With --fit-memory: GiB of memory of each GPU. Default: what is free; with --resume the batches stay."
_DRY_RUN = "Train nothing; estimate parameters, steps, operations and memory."
_RESUME = "Continue from the newest checkpoint in the output folder."
_SEEDS = "Run every reader or method with this many seeds: 0, 1, ... Default: the recipe's own seeds."


def train(  # noqa: PLR0913
    recipe: Annotated[Path, Argument(metavar="RECIPE", help="YAML file that says what to train.")],
    data: shared_options.DataOption = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    sweep: Annotated[list[str] | None, Option(metavar="KEY=A,B,...", help=_SWEEP)] = None,
    only: Annotated[list[str] | None, Option(metavar="KEY=A,B,...", help=_ONLY)] = None,
    seeds: Annotated[int | None, Option(min=1, max=1000, help=_SEEDS)] = None,
    fit_memory: Annotated[bool, Option("--fit-memory", help=_FIT_MEMORY)] = False,
    memory: Annotated[float | None, Option(metavar="GIB", help=_MEMORY)] = None,
    dry_run: Annotated[bool, Option("--dry-run", help=_DRY_RUN)] = False,
    resume: Annotated[bool, Option("--resume", help=_RESUME)] = False,
    overwrite: shared_options.OverwriteOption = False,
    ray: shared_options.RayOption = None,
    progress: Annotated[bool | None, Option(help="Show a progress bar. Default: what the recipe says.")] = None,
    as_json: shared_options.JsonOption = False,
) -> None:
    """Train the readers of a recipe, all in one pass of the model, or fine-tune the model once per method.

    With several --sweep options, every combination of their values is trained. With --only, the runs that match every
    KEY are trained. Readers that share a bank are trained in one run; fine-tuning runs, and readers that are trained
    separately, are independent pieces of work (cells).

    Cells can be trained in parts: --only with --resume adds a part to the output folder, and the whole recipe with
    --resume writes the tables at the end. --ray runs cells in parallel. If a cell fails, it is listed, the others
    continue, and the exit code is 1.

    At the end the recipe's tables and figures and the importances of the layers are written, as `lamina report` does.
    Wrong input ends with one sentence and exit code 2.
    """
    loaded = _load(recipe, sweep or [], only or [], seeds)
    folder = output or Path("out") / recipe.stem
    memory_bytes = _memory_bytes(memory, fit_memory=fit_memory)
    logging.getLogger("lamina.tasks.problem_type").setLevel(logging.INFO)  # whole numbers that are read as classes
    if dry_run:
        shared_options.check_output("train", folder, overwrite=True)
        from lamina.recipes.estimate import estimate

        cost = estimate(loaded, data=data, output=folder, memory_bytes=memory_bytes)
        print_json(cost) if as_json else print_estimate(cost, "method" if loaded.methods else "reader")
        return
    from lamina.utils import rank

    if rank() == 0:  # the other processes of a distributed run may come when the first has begun to write
        shared_options.check_output("train", folder, overwrite=overwrite, resume=resume)
    from lamina.recipes.run_recipe import run_recipe

    options: dict[str, object] = {"resume": True} if resume else {}
    if progress is not None:
        options["progress"] = progress
    run = run_recipe(loaded, data=data, output=folder, ray=ray, memory_bytes=memory_bytes, **options)
    if rank() != 0:
        return  # in a distributed run only the first process prints
    failures = [asdict(failure) for failure in run.failures]
    written: list[str] = []
    if run.importances or loaded.model_fields_set & {"table", "figure"}:
        written = write_report(folder, ["png"]).files
    if as_json:
        facts = {"seconds": run.seconds, "steps": run.steps, "output": str(folder), "failures": failures}
        print_json({"table": run.table, **facts})
    else:
        _show(run, folder)
        saved = ", ".join([str(folder), *written])
        duration = f"{pluralize(run.steps, 'step')} in {run.seconds:.0f} s"
        print(f"{duration}; saved in {saved}; lamina report {folder} -o page.html shows it")
    shared_options.end_if_failed(failures)


def _load(recipe: Path, sweep: Sequence[str], only: Sequence[str], seeds: int | None) -> Recipe:
    """Return the recipe in a file, changed by the command line's options. Raise LaminaError if one is wrong.

    Args:
        recipe: The file.
        sweep: Texts such as "fusion.dim=32,64", whose values go into the grids.
        only: Texts such as "task=cola". Only runs that match them are kept. Without any, the recipe's `only` applies.
        seeds: Number of seeds, from 0. They replace the recipe's. None: the recipe's.
    """
    from lamina.recipes.expand import read_sweeps, with_part, with_sweep
    from lamina.recipes.schema import load_recipe
    from lamina.recipes.table_layouts import read_only

    loaded = load_recipe(recipe)
    if sweep:
        loaded = with_sweep(loaded, read_sweeps(sweep))
    return with_part(loaded, read_only(only), seeds)


def _memory_bytes(memory: float | None, *, fit_memory: bool) -> int | None:
    """Return the bytes that a batch may take: `memory` (GiB), or else what is free; None if `fit_memory` is False.

    Raises ConfigError if `memory` is out of range, or given without `fit_memory`.
    """
    check_used("train", "--fit-memory", {"--memory": memory is not None}, requested=fit_memory)
    if not fit_memory:
        return None
    check_range("train", "--memory", memory, _LEAST_GIB, _MOST_GIB)
    if memory is not None:
        return int(memory * (1 << 30))
    from lamina.recipes.estimate import free_memory

    return free_memory()


def _show(run: RecipeResult, folder: Path) -> None:
    """Print a table with a row per task, reader (or method) and setting, and remarks below it.

    A sweep prints the first 20 rows; `table.md` in the output `folder` has all rows.
    """
    from lamina.recipes.paper_tables import notes, printed

    columns, cells = printed(run.table)
    rows = run.table[:SHOWN] if any(row["settings"] for row in run.table) else run.table
    shown = [[*line, f"{row['best_epoch']:.1f}".removesuffix(".0")] for line, row in zip(cells, rows, strict=False)]
    repeated = any(row["interval"] is not None for row in rows)
    title = "Best validation scores" + ("; ± is half a 95 % interval" if repeated else "")
    print_table(title, (*columns, "best epoch"), shown)
    if left := len(run.table) - len(rows):
        print(f"and {pluralize(left, 'more row')}, in {folder / 'table.md'}")
    for note in notes(run.table):
        print(note)
    _show_facts(run)


def _show_facts(run: RecipeResult) -> None:
    """Print how many training texts were truncated or have no label, and what the constant prediction scores.

    The line of a task also says if no reader is better than the constant prediction.
    """
    from lamina.tasks.metrics import better

    for name, count in run.truncated.items():
        if count:
            print(f"{name}: {count} training texts were longer than the model reads, and were cut")
    for name, count in run.unlabelled.items():
        print(f"{name}: {pluralize(count, 'training row')} without a label, which gave no loss")
    for name, facts in run.baselines.items():
        rows = [row for row in run.table if row["task"] == name and row["metric"] in facts]
        if rows:
            metric, scores = rows[0]["metric"], [row["mean"] for row in rows]
            errors = [row["scores"]["mae"]["mean"] for row in rows if "mae" in row["scores"]]
            if errors and "mae" in facts:  # a constant has no correlation
                metric, scores = "mae", errors
            verdict = "" if any(better(metric, score, facts[metric]) for score in scores) else "; no reader is better"
            what = f"has a mae of {facts['mae']:.3g}" if metric == "mae" else f"scores {facts[metric]:.2f}"
            print(f"{name}: always answering '{facts['always']}' {what}{verdict}")


def print_estimate(cost: Estimate, word: str = "reader") -> None:
    """Print the estimate of a recipe: what it would train, with parameters, steps, operations and memory.

    `word` says what the recipe trains: "reader", or "method" for ways to fine-tune the model.
    """
    from lamina.recipes.estimate import readable

    model, flops = cost.model, cost.flops
    print(f"{model['name']}: {model['parameters']:,} parameters, {'trained' if model['trained'] else 'frozen'}")
    columns = ("task", word, "settings", "runs", "epochs", "steps", "parameters", "by edits", "trained", "FLOPs")
    groups: dict[tuple[str, str], list[JSONObject]] = {}
    for row in cost.runs:
        groups.setdefault((row["task"], row["method"]), []).append(row)
    print_table("Runs", columns, [_runs_row(rows) for rows in groups.values()])
    names = ("task", "rows", "validation", "tokens", "repeats", "runs", "steps_per_epoch", "steps")
    tasks = [{**row, "tokens": f"{row['tokens']} + {row['target']}"} if row["target"] else row for row in cost.tasks]
    print_table("Tasks", [name.replace("_", " ") for name in names], [[row[name] for name in names] for row in tasks])
    _show_parts(cost, word)
    shared = f" ({readable(flops['base'])}FLOPs in the model that readers share)" if flops["base"] else ""
    steps = pluralize(cost.steps, "step")
    print(
        f"At most {steps}, about {readable(flops['total'])}FLOPs{shared}: "
        f"2 x parameters x tokens, 3 times that with gradients; {flops['total'] / 3.6e15:.2g} h at 1 TFLOP/s."
    )
    cache = f"; a cache of the states would take {readable(cost.cache_bytes)}B" if cost.cache_bytes else ""
    print(f"Weights, gradients and the optimizer's moments take up to {readable(cost.memory_bytes)}B{cache}.")
    batch = f"a batch of {pluralize(cost.kept_rows, 'row')}"
    activations = f"readers hold up to {readable(cost.kept_bytes)}B for the gradients of {batch}"
    for note in [*([activations] if cost.kept_rows else []), *cost.notes]:
        print(f"({note})")


def _show_parts(cost: Estimate, word: str) -> None:
    """Print what each task and each reader or method costs, and the batches that fit the memory, if `cost` has them.

    `word` is the heading of the column of names: "reader" or "method".
    """
    from lamina.recipes.estimate import readable
    from lamina.recipes.model_size import CARDS, REACHED

    rows = [
        (
            *(part["task"], part["method"] or "(the base model)", part["runs"], readable(part["flops"])),
            *(_hours(part["hours"][card]) for card in CARDS),
        )
        for part in cost.parts
    ]
    totals = {card: sum(part["hours"][card] for part in cost.parts) for card in CARDS}
    rows.append(("all", "", "", readable(cost.flops["total"]), *map(_hours, totals.values())))
    print_table(
        f"Cost in hours of one GPU at {REACHED:.0%} of its peak; short texts and small batches take longer",
        ("task", word, "runs", "FLOPs", *(f"{card} hours" for card in CARDS)),
        rows,
    )
    if cost.batches:
        columns = ("task", word, "tokens", "weights", "a row", "asked", "fits")
        batches = [
            (
                *(batch["task"], batch["method"], batch["tokens"]),
                *(f"{readable(batch[key])}B" for key in ("weight_bytes", "row_bytes")),
                *(f"{batch[key][0]} x {batch[key][1]}" for key in ("asked", "fitted")),
            )
            for batch in cost.batches
        ]
        print_table("Batches that fit the memory: rows x batches per step", columns, batches)


def _hours(hours: float) -> str:
    return "< 0.01" if 0 < hours < 0.01 else f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _runs_row(rows: Sequence[JSONObject]) -> tuple[object, ...]:
    """Return the row of the table of runs (see `print_estimate`) for all settings of one task and method.

    Runs and operations are added up. Any other number is shown once if all settings share it, else as "lowest to
    highest". A setting with one value is shown as "key=value", one with several as "3 x key".
    """
    from lamina.recipes.estimate import readable

    values = {key: list(dict.fromkeys(str(row["settings"][key]) for row in rows)) for key in rows[0]["settings"]}
    settings = [f"{key}={few[0]}" if len(few) == 1 else f"{len(few)} x {key}" for key, few in values.items()]
    columns = ("epochs", "steps", "parameters", "added", "trained")
    spans = ([min(row[key] for row in rows), max(row[key] for row in rows)] for key in columns)
    return (
        *(rows[0]["task"], rows[0]["method"], ", ".join(settings), sum(row["count"] for row in rows)),
        *(low if low == high else f"{readable(low)} to {readable(high)}" for low, high in spans),
        readable(sum(row["flops"] for row in rows)),
    )
