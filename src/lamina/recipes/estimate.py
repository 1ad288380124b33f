"""What a recipe would train and cost: everything is built without weights, and only data that is named is read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any

from lamina.errors import LaminaError, ModelNotFoundError
from lamina.recipes.edits import config_of
from lamina.recipes.expand import expand_recipe, grid_of
from lamina.recipes.loading import load_stats
from lamina.recipes.model_size import Sizes
from lamina.store import load_config
from lamina.tasks import kind_of
from lamina.tasks.base import PARTS
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transformers import PretrainedConfig

    from lamina.recipes.loading import TaskStats
    from lamina.recipes.model_size import ReaderSize
    from lamina.recipes.schema import Recipe
    from lamina.train.grid import RunSpec

FORWARD, TRAINING = 2, 6  # operations per parameter and token; gradients take twice a forward's
STATE_BYTES, CACHED_BYTES = 4, 2  # of a weight, and of an entry of a cached state
OWN, GIVEN = "its own", "that of the recipe, since the hub cannot be reached"


@dataclass(frozen=True)
class Estimate:
    """What a recipe would do, at most: early stops are not known beforehand.

    Operations are 2 x parameters x tokens for a forward, and three times that where there are gradients. Embeddings,
    with which nothing is multiplied, and attention's products of tokens with tokens are left out.

    Attributes:
        model: Its "name" and "parameters", whether it is "trained", and where its "config" came from.
        runs: One row per task, method and setting: how many runs share it ("count"), epochs and steps of each,
            parameters of the reader or model, those that edits add, those that are trained, and operations of all.
        tasks: One row per task: rows to learn from and to validate on, as the model reads them, tokens of each and
            tokens to write; repeats, runs, steps per epoch, and steps of all runs (readers of one run share theirs).
        flops: Operations of the "base" that readers share, of the "runs", and "total".
        memory_bytes: What weights, gradients and the optimizer's moments take at most, in single precision.
        cache_bytes: What a cache of all states that are read would take, in half precision; 0 where there is none.
        notes: What was assumed.
    """

    model: dict[str, Any]
    runs: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    flops: dict[str, int]
    memory_bytes: int
    cache_bytes: int
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


def estimate(recipe: Recipe, *, data: str | Path | None = None, **options: Any) -> Estimate:
    """Build everything that a recipe names on the meta device, and count.

    Args:
        recipe: From `load_recipe`.
        data: Folder of the data, as in `run_recipe`; None: published numbers stand for those of presets.
        **options: Override the recipe's `fit` options.

    Raises:
        LaminaError: If the recipe does not fit the model, or nothing is known of a task.
    """
    chosen = {**recipe.fit, **options, **({"test": True} if recipe.evaluate else {})}
    stats = load_stats(recipe, data)
    specs = expand_recipe(recipe, chosen, stats)
    config, source = _config(recipe)
    notes = [] if data is not None else ["rows and lengths are as published; --data counts those of local files"]
    if source != OWN:
        notes.append(f"the config of {recipe.model} is {source}")
    sizes = Sizes(config)
    planned = [_Planned(recipe, spec, stats[spec.task], sizes) for spec in specs.values()]
    passes = [] if recipe.methods else _passes(planned)
    base, runs = sum(shared.flops for shared in passes), sum(run.flops for run in planned)
    model = {"name": recipe.model, "parameters": planned[0].model.parameters}
    return Estimate(
        model={**model, "trained": recipe.train_base or bool(recipe.methods), "config": source},
        runs=_rows(planned),
        tasks=[_task_row(name, [run for run in planned if run.spec.task == name], passes) for name in stats],
        flops={"base": base, "runs": runs, "total": base + runs},
        memory_bytes=_memory(recipe, planned),
        cache_bytes=0 if recipe.train_base else sum(shared.cache_bytes for shared in passes),
        notes=notes,
    )


def _config(recipe: Recipe) -> tuple[PretrainedConfig, str]:
    """The model's config, or what the recipe has in its place; and which of the two it is."""
    try:
        return load_config(recipe.model, revision=recipe.revision), OWN
    except ModelNotFoundError as error:
        if recipe.architecture is None:
            error.add_note("a recipe may carry its model's config as 'architecture', for estimates")
            raise
        return config_of(recipe.architecture), GIVEN


class _Planned:
    """One run of a recipe, built on the meta device; a LaminaError says if it does not fit the model."""

    reader: ReaderSize | None = None
    added = frozen = 0
    deep = True

    def __init__(self, recipe: Recipe, spec: RunSpec, stats: TaskStats, sizes: Sizes) -> None:
        self.recipe, self.spec, self.stats = recipe, spec, stats
        self.options, kind = FitOptions.of(spec.options), kind_of(stats.kind)
        try:
            if spec.reader is None:
                self.model = sizes.model(kind.auto_class, stats.labels if kind.has_classes else ())
                where = f"recipe, methods.{spec.settings['method']}"
                self.added, self.frozen, self.deep = self.model.edited(spec.edits, where=where)
            else:
                heads = [kind_of(task.outline().kind).base_class for task in recipe.tasks.values()]
                self.model = sizes.model(next((head for head in heads if head != "AutoModel"), "AutoModel"))
                self.reader = self.model.reader(spec.reader)
        except LaminaError as error:
            error.add_note(f"run {spec.name}")
            raise
        longest = int(self.options.max_length or getattr(sizes.config, "max_position_embeddings", None) or 512)
        rows = {part: kind.model_rows(stats.rows.get(part, 0), stats.tokens, longest, sizes.config) for part in PARTS}
        self.rows = {part: count for part, (count, _) in rows.items()}
        self.tokens = rows["train"][1]
        self.target = kind.target_tokens(self.options.max_target_length)
        # parameters of the reader or the edited model, and how many of them are trained
        self.parameters = self.model.parameters + self.added if self.reader is None else self.reader.parameters
        self.trained = self.parameters - self.frozen
        batches = ceil(self.rows["train"] / self.options.batch_size)
        self.steps_per_epoch = ceil(batches / self.options.gradient_accumulation_steps)
        self.steps = self.options.max_steps or self.epochs * self.steps_per_epoch

    @property
    def epochs(self) -> int:
        """Epochs that begin."""
        limit = self.options.max_steps
        given: Any = self.options.epochs  # one number: readers' own epochs are options of theirs here
        return given if limit is None else ceil(limit / self.steps_per_epoch)

    @property
    def learnt(self) -> int:
        """Rows that are learnt from, repetitions included."""
        whole, rest = divmod(self.steps, self.steps_per_epoch)
        return whole * self.rows["train"] + rest * self.options.step_size

    @cached_property
    def flops(self) -> int:
        """Operations of the run, without those of a base that readers share; texts are written beam by beam."""
        scored = self.epochs * self.rows["validation"] + (self.rows["test"] if self.recipe.evaluate else 0)
        if self.reader is not None:
            return self.parameters * self.tokens * (TRAINING * self.learnt + FORWARD * scored)
        row = self.model.row(self.tokens, self.target) + self.added * self.tokens
        beams = self.options.num_beams if self.target else 1
        return row * ((TRAINING if self.deep else FORWARD) * self.learnt + FORWARD * scored * beams)


@dataclass(frozen=True)
class _Pass:
    """Rows that some readers go through together."""

    part: str
    runs: tuple[_Planned, ...]

    @property
    def longest(self) -> _Planned:
        """The run that goes through the rows most often."""
        return max(self.runs, key=lambda run: run.epochs)

    @property
    def flops(self) -> int:
        """Operations of the base, up to the highest layer that is read."""
        deepest: dict[str, int] = {}
        for reader in self._readers:
            deepest[reader.stack] = max(reader.layers[-1], deepest.get(reader.stack, 0))
        run, training = self.longest, self.part == "train"
        rows = run.learnt if training else run.rows[self.part] * (1 if self.part == "test" else run.epochs)
        times = TRAINING if training and run.recipe.train_base else FORWARD
        return times * rows * run.tokens * run.model.up_to(deepest)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the states that are read, each layer once; the test part is read once and not cached."""
        widths = {(reader.stack, layer): reader.width for reader in self._readers for layer in reader.layers}
        run = self.runs[0]
        return 0 if self.part == "test" else run.rows[self.part] * run.tokens * sum(widths.values()) * CACHED_BYTES

    @property
    def _readers(self) -> Iterable[ReaderSize]:
        return (run.reader for run in self.runs if run.reader is not None)


def _passes(planned: Iterable[_Planned]) -> list[_Pass]:
    """Every set of rows with its readers: those of one repeat learn together, and all validate together."""
    found: dict[tuple[object, ...], list[_Planned]] = {}
    for run in planned:
        recipe, spec = run.recipe, run.spec
        task = recipe.tasks[spec.task]
        texts = task.model_dump_json(exclude={"readers", "epochs", "learning_rate", "subsample", "metric"})
        alone = spec.name if recipe.separately else ""
        sample = "" if task.subsample is None else task.subsample.model_dump_json()
        found.setdefault(("train", texts, alone, sample, spec.repeat), []).append(run)
        found.setdefault(("validation", texts, alone), []).append(run)
        if recipe.evaluate is not None:
            found.setdefault(("test", texts, alone), []).append(run)
    return [_Pass(str(part), tuple(runs)) for (part, *_), runs in found.items()]


def _rows(planned: Iterable[_Planned]) -> list[dict[str, Any]]:
    """One row per task, method and setting."""
    rows: dict[str, dict[str, Any]] = {}
    for run in planned:
        about = {"task": run.spec.task, "method": run.spec.settings["method"], "settings": grid_of(run.spec)}
        sizes = {key: getattr(run, key) for key in ("epochs", "steps", "parameters", "added", "trained")}
        row = rows.setdefault(json.dumps(list(about.values())), {**about, "count": 0, **sizes, "flops": 0})
        row["count"] += 1
        row["flops"] += run.flops
    return list(rows.values())


def _task_row(name: str, runs: list[_Planned], passes: Iterable[_Pass]) -> dict[str, Any]:
    first, together = (
        runs[0],
        [shared for shared in passes if shared.part == "train" and shared.runs[0].spec.task == name],
    )
    steps = sum(shared.longest.steps for shared in together) if first.reader else sum(run.steps for run in runs)
    row = {"task": name, "kind": first.stats.kind, "rows": first.rows["train"], "validation": first.rows["validation"]}
    row |= {"tokens": first.tokens, "target": first.target, "repeats": 1 + max(run.spec.repeat for run in runs)}
    return row | {"runs": len(runs), "steps_per_epoch": first.steps_per_epoch, "steps": steps}


def _memory(recipe: Recipe, planned: list[_Planned]) -> int:
    """Bytes of weights, gradients and moments of all that is trained at once."""
    options = planned[0].options
    moments = (1 if options.momentum else 0) if options.optimizer == "sgd" else 2
    if recipe.methods:
        return STATE_BYTES * max(run.parameters + (1 + moments) * run.trained for run in planned)
    together = (max if recipe.separately else sum)(run.trained for run in planned)
    base = planned[0].model.parameters * (2 + moments if recipe.train_base else 1)
    return STATE_BYTES * ((2 + moments) * together + base)


def readable(count: float) -> str:
    """A number with three digits and the letter of its thousands: 1.23 G."""
    power = 0 if count < 1000 else min(int(math.log10(count) / 3 + 1e-9), 8)
    return f"{count / 1000**power:.3g} {' kMGTPEZY'[power]}".strip()
