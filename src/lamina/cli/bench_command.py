"""`lamina bench probes`: compare readers with rival methods on public probing data sets."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import print_json, print_table

if TYPE_CHECKING:
    from lamina.studies.study import Study

_DATA = "Folder of the package sae-probes, or of its data. Default: the installed package."
_MODEL = 'Folder or hub id of a model, or "minilm".'
_POINTS = "Training rows (setting scarce) or shares of the positive class (imbalance). Default: those of the setting."
_SETS = "Names or numbers of sets, such as 87,92; may be repeated. Default: all of the setting."
_METHODS = "Names of methods, such as default,tfidf; may be repeated. Default: all but xgboost."
_SEEDS = "Seeds of the readers, such as 0,1; may be repeated. Default: 0 to 4."
_UNIQUE = "Count each text once, or keep the published rows, some of which repeat."


class Suite(StrEnum):
    """The benchmarks that `lamina bench` can run."""

    PROBES = "probes"


class SettingOfSets(StrEnum):
    """How `lamina bench` chooses the rows that it trains on and scores.

    It trains on up to 1,024 rows ("normal"), on few ("scarce"), on fewer of one class ("imbalance"), or scores rows of
    another kind ("shift").
    """

    NORMAL = "normal"
    SCARCE = "scarce"
    IMBALANCE = "imbalance"
    SHIFT = "shift"


def bench(  # noqa: PLR0913
    suite: Annotated[Suite, Argument(metavar="NAME", help="Name of the benchmark: probes.")],
    model: Annotated[str, Option(help=_MODEL)] = "minilm",
    data: Annotated[Path | None, Option(help=_DATA)] = None,
    setting: Annotated[SettingOfSets, Option(help="Which rows are trained on and scored.")] = SettingOfSets.NORMAL,
    sets: Annotated[list[str] | None, Option("--sets", metavar="NAME,...", help=_SETS)] = None,
    methods: Annotated[list[str] | None, Option("--methods", metavar="NAME,...", help=_METHODS)] = None,
    seeds: Annotated[list[str] | None, Option("--seeds", metavar="INTEGER,...", help=_SEEDS)] = None,
    points: Annotated[list[str] | None, Option("--points", metavar="FLOAT,...", help=_POINTS)] = None,
    scored: Annotated[int, Option(min=0, help="Maximum number of scored rows per set. 0: all.")] = 500,
    unique: Annotated[bool, Option("--unique/--repeated", help=_UNIQUE)] = True,
    max_length: Annotated[int, Option(min=1, help="Maximum tokens per text.")] = 128,
    output: Annotated[Path, Option("--output", "-o", help="Folder to save to.")] = Path("out/bench"),
    resume: Annotated[bool, Option("--resume", help="Skip sets that are already complete in the folder.")] = False,
    ray: options.RayOption = None,
    overwrite: options.OverwriteOption = False,
    progress: options.ProgressOption = True,
    as_json: options.JsonOption = False,
) -> None:
    """Compare readers with regressions and other methods on 113 public probing data sets.

    The sets come with the PyPI package sae-probes (pip install --no-deps sae-probes==0.4.2). The model reads each text
    once; every method learns from the states of that pass. Each set is saved when it ends. If a set fails, it is named,
    the others continue, and the exit code is 1. Wrong input ends with one sentence and exit code 2.
    """
    del suite  # the only one
    numbers, shares = options.numbers_of("--seeds", seeds, int), options.numbers_of("--points", points, float)
    options.check_output("bench", output, overwrite=overwrite, resume=resume)
    from lamina.studies import benchmark
    from lamina.studies.benchmarking.benchmark_cell import USUAL

    study = benchmark(
        model,
        data=data,
        setting=setting.value,
        sets=options.names_of("--sets", sets),
        methods=options.names_of("--methods", methods) or USUAL,
        seeds=numbers or (0, 1, 2, 3, 4),
        points=shares or None,
        scored=scored or None,
        unique=unique,
        max_length=max_length,
        output=output,
        resume=resume,
        progress=progress,
        ray=ray,
    )
    _show(study, output, as_json=as_json)
    options.end_if_failed(study.settings.get("failures") or [])


def _show(study: Study, folder: Path, *, as_json: bool) -> None:
    """Print a benchmark's comparison of methods and its conclusions; `folder` has the study.

    With `as_json`, print JSON, which also has the scores on every set and the failures.
    """
    from lamina.studies.benchmarking.benchmark import over_sets
    from lamina.studies.study import rows_where

    table = over_sets(study).astype(object)
    table = table.where(table.notna(), None)
    if as_json:
        facts = {"conclusions": study.conclusions, "failures": study.settings.get("failures") or []}
        sets = rows_where(study.table, {"measure": "score"}).to_dict("records")
        print_json({**facts, "methods": table.to_dict("records"), "sets": sets, "output": str(folder)})
        return
    shown = table.dropna(axis="columns", how="all")  # few sets: no interval; most settings: no point
    print_table("Methods over all sets", list(shown.columns), shown.to_numpy().tolist())
    for sentence in study.conclusions:
        print(f"- {sentence}")
    print(f"every set is in {folder / 'summary.md'}; lamina report {folder} -o page.html shows it")
