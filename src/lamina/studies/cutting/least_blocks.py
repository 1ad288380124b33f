"""Drop the blocks of a model that matter least to a task, heal the model, and measure what was lost."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, final, get_args

import numpy as np
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from lamina.bank import ReaderBank
from lamina.editing.editable import movable_stack
from lamina.editing.keep import drop_
from lamina.errors import ConfigError, UnknownNameError, check_known
from lamina.layers.preserve import preserve_training
from lamina.prediction.evaluate import evaluate, scoring_groups
from lamina.recipes.edits import apply_edits, check_named_edit, is_random
from lamina.recipes.load_tasks import NOT_DATA, load_task
from lamina.recipes.schema import TaskRecipe
from lamina.recipes.strict_yaml import Fields, Strict, checked, error_at, raise_first, read_yaml
from lamina.studies.cutting.advise import measure_speedup
from lamina.studies.cutting.removal import skipping, without_warnings
from lamina.studies.passes import unlabelled_batches
from lamina.studies.runner import encode_rows, linear_reader
from lamina.studies.states.similarity import similarity
from lamina.studies.statistics import LEAST_DIFFERING, few_differ, paired_bootstrap, repeats_for, row_counts
from lamina.tasks.metrics import LOWER, labelled_words
from lamina.train.model_runner import ModelRunner, UnfitHeadError
from lamina.train.options import FitOptions, PassOptions, Seed
from lamina.train.results import summarise
from lamina.train.training_run import train
from lamina.utils import JSON, check_range, check_types, derive_seed, is_file, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.studies.statistics import Label
    from lamina.tasks.metrics import Tags
    from lamina.tasks.outputs import Results
    from lamina.tasks.task import Task


logger = logging.getLogger(__name__)
By = Literal["influence", "loss", "readers"]
_OP = "edit"
_ROWS, _SEEDS = 256, (0, 1, 2)  # training rows that influence is measured on; seeds of readers
_LEAST_ROWS = 40  # fewer validation rows give no interval, and a warning
_TRIED = 8  # rows that a head is tried on
DROP_LEAST = "drop_least"  # an entry of a plan only: it needs a task


@final
@dataclass(frozen=True)
class LeastBlocks:
    """The report of `drop_least_`: which blocks it dropped, and what the model lost.

    Attributes:
        task: Name of the task.
        metric: The task's metric.
        by: The method of choosing blocks, as passed to `drop_least_`.
        dropped: Numbers, from 1, that the dropped blocks had before the edit.
        costs: Number of each block -> its influence, or how far the score falls if only this block is removed.
        scored_by: "head": the model's own head, on all validation rows at once; "readers": linear readers of the last
            layer, one per seed, trained on the whole model and again on the cut one.
        whole, cut, healed: Scores of the whole model, after the cut, and after healing (None: it was not healed). With
            readers, they are means over seeds.
        change: The last score (after healing, if any) minus the score of the whole model; negative if it fell.
        interval: Half the width of the 95 % interval of `change`: from a paired bootstrap over the rows, or over the
            seeds of the readers. None: fewer than 40 rows or six differing ones, or a metric that the bootstrap cannot
            compute from sums over rows.
        values: Number of labelled rows that the head was scored on, or of seeds.
        differing: Number of rows on which the head's last answer is not that of the whole model. None: scored by
            readers, or by a metric that the bootstrap cannot compute.
        speedup: Time of a pass of the whole model, divided by the time of a pass of the cut model.
        parameters: Numbers of parameters before and after.
        bytes: Sizes of the weights in memory before and after.
    """

    task: str
    metric: str
    by: str
    dropped: tuple[int, ...]
    costs: Mapping[int, float]
    scored_by: str
    whole: float
    cut: float
    healed: float | None
    change: float
    interval: float | None
    values: int
    differing: int | None
    speedup: float
    parameters: tuple[int, int]
    bytes: tuple[int, int]

    def to_dict(self) -> dict[str, JSON]:
        """Return the report as it comes back from JSON: all attributes, and "sentence"."""
        return json.loads(json.dumps({**asdict(self), "sentence": self.sentence()}))

    def sentence(self) -> str:
        """Return a sentence: which blocks were dropped, how the score changed, and how speed and size changed.

        It has the interval, or the reason why there is none.
        """
        blocks = ", ".join(map(str, self.dropped))
        if self.interval is not None:
            over = f" ± {self.interval:.3f}, 95 % interval over {self.values} "
            over += "rows" if self.scored_by == "head" else "seeds"
        elif self.differing is None:
            over = f", no interval for {self.metric}"
        elif self.values < _LEAST_ROWS:
            over = ", too few rows for an interval"
        else:
            over = f", {few_differ(self.differing, 'row')}"
        after = f"{self.cut:.3f}" + ("" if self.healed is None else f", healed {self.healed:.3f}")
        fewer = 1 - self.parameters[1] / self.parameters[0]
        return (
            f"{self.task}: without blocks {blocks} {self.metric} {self.whole:.3f} -> {after} "
            f"({self.change:+.3f}{over}), {self.speedup:.2f} x as fast, {fewer:.0%} fewer parameters, "
            f"{self.bytes[0] / 2**20:.1f} -> {self.bytes[1] / 2**20:.1f} MiB of weights."
        )


@check_types(_OP)
def drop_least_(  # noqa: PLR0913 options of the command
    model: PreTrainedModel,
    task: Task,
    count: int,
    *,
    by: By = "influence",
    heal_epochs: int = 0,
    processor: Processor | None = None,
    stack: str | None = None,
    seed: int = 0,
    progress: bool = False,
) -> LeastBlocks:
    """Drop the `count` blocks that matter least to a task, in place, and return a report of what the model lost.

    Blocks are chosen on training rows only. Scores are measured on the validation split. A warning is logged if fewer
    than 40 rows are scored, or blocks are chosen by "loss" or "readers" on fewer. Raises ConfigError if `count` is out
    of range, the model cannot be edited, it needs a head for the task and has none, there is no processor, or
    "influence" gets fewer than 4 training rows. Raises UnknownNameError if `by` or the stack is unknown, or the task
    lacks a split; UnsupportedModelError if the model's layers cannot be found, or (unless `by` is "influence") a block
    cannot be skipped. With `heal_epochs`, the errors of `finetune` are raised too. An error before the cut leaves
    the model whole; a later one, in scoring or healing, leaves it cut.

    Args:
        model: A model. If it has a head for the task, the head is scored; otherwise linear readers of the last layer.
        task: The task, with the splits "train" and "validation".
        count: Number of blocks to drop, less than the depth.
        by: How blocks are chosen. "influence": the blocks that change the tokens' states least, by 1 - mean cosine
            between a block's input and output. "loss": blocks are removed one after the other, each time the one whose
            removal lowers the score of the model's head least. The model needs a head for the task. "readers": the
            blocks whose removal lowers the score of a trained linear reader least.
        heal_epochs: Epochs of fine-tuning after the cut; the model needs a head for the task. 0: none.
        processor: Tokenizer or image processor. None: the one saved with the model.
        stack: Name of the stack. None: the only one, or the encoder.
        seed: Seed of the bootstrap over the validation rows and of healing.
        progress: Whether to show progress bars.

    Source:
        Block influence: Men et al. 2024, "ShortGPT", arXiv:2403.03853.
    """
    check_known(_OP, [by], get_args(By), "way to choose blocks")
    edited = movable_stack(model, stack, _OP)
    check_range(_OP, "count", count, 1, edited.depth - 1)
    own, processor = _has_head(model, task, processor)
    if not own and (by == "loss" or heal_epochs):
        what = "--by loss" if by == "loss" else "--heal"
        raise ConfigError(
            f"{_OP}: {what} needs a {type(model).__name__} with a trained head for '{task.name}', and it has none. Use "
            "--by influence or readers, or a model that was fine-tuned for the task."
        )
    healing = {"epochs": heal_epochs, "seed": seed, "progress": progress, "keep": "last"}
    options = FitOptions.checked(_OP, **healing) if heal_epochs else None
    _warn_of_few_rows(task, by)
    subject = _Subject(model, task, processor, edited, seed, own, progress)
    before = _scores(subject, "scoring the whole model")
    if before.truncated:
        logger.warning("%s: the model sees only the start of %d rows, which are too long", _OP, before.truncated)
    with without_warnings():  # those of the whole model, on the same task, were logged
        costs, chosen = _CHOICES[by](subject, count)
        trial, sizes = copy.deepcopy(model), [_sizes(model)]
        drop_(trial, chosen, stack=edited.name)
        speedup = measure_speedup(model, trial, task, processor)
        del trial  # the model itself is cut last, so that it stays whole if a pass fails
        drop_(model, chosen, stack=edited.name)
        sizes.append(_sizes(model))
        after = cut = _scores(subject, "scoring the cut model")
        if options is not None:
            train(model, task.without_test(), options, op="healing", processor=processor)
            after = _scores(subject, "scoring the healed model")
    change = _change(subject, before, after)
    return LeastBlocks(
        task=task.name,
        metric=task.metric,
        by=by,
        dropped=tuple(chosen),
        costs=costs,
        scored_by="head" if own else "readers",
        whole=fmean(before.scores),
        cut=fmean(cut.scores),
        healed=fmean(after.scores) if heal_epochs else None,
        change=fmean(after.scores) - fmean(before.scores),
        interval=change.interval,
        values=change.values,
        differing=change.differing,
        speedup=speedup,
        parameters=(sizes[0][0], sizes[1][0]),
        bytes=(sizes[0][1], sizes[1][1]),
    )


@final
@dataclass(frozen=True)
class _Subject:
    """What `drop_least_` cuts: `stack` of `model`. It is scored on `task`, by the model's own head if `own`.

    `processor` reads the rows, `seed` decides the resamples of the bootstrap, and `progress` shows bars.
    """

    model: PreTrainedModel
    task: Task
    processor: Processor
    stack: LayerStack
    seed: int
    own: bool
    progress: bool


def _has_head(model: PreTrainedModel, task: Task, processor: Processor | None) -> tuple[bool, Processor]:
    """Return whether the model's own head fits the task; and `processor`, or if it is None, the model's.

    Raises LaminaError if data or processor are not usable.
    """
    few = {task.name: _rows_of(task, range(min(_TRIED, len(task.split("validation")))))}
    runner = ModelRunner(model, few[task.name], _OP, processor, PassOptions())
    runner.check(few, ("validation",))
    try:
        for group in scoring_groups(runner, few, "validation", PassOptions()):
            runner.fit_head(group, keep=False)
    except UnfitHeadError:
        return False, runner.processor
    return True, runner.processor


def _warn_of_few_rows(task: Task, by: By) -> None:
    """Log a warning if the task has fewer than 40 validation rows to measure a loss on.

    Unless `by` is "influence", blocks are chosen on a tenth of the training rows. If these are fewer than 40, another
    warning is logged.
    """
    if (count := len(task.split("validation"))) < _LEAST_ROWS:
        what = "too few to tell a small loss from chance. Give it more"
        logger.warning("%s: '%s' has %d validation rows, %s.", _OP, task.name, count, what)
    if by != "influence" and (count := len(_held_out(task).split("validation"))) < _LEAST_ROWS:
        where = f"{count} rows of '{task.name}', a tenth of its training rows, which are few"
        logger.warning("%s: --by %s chooses blocks on %s. Give it more, or use --by influence.", _OP, by, where)


def _held_out(task: Task) -> Task:
    """Return the task with a tenth of its training rows as its validation split, and without a test split."""
    return task.held_out(0).without_test()


def _rows_of(task: Task, rows: Sequence[int]) -> Task:
    return replace(task, splits={**task.splits, "validation": task.split("validation").select_rows(rows)})


@final
@dataclass(frozen=True)
class _Scored:
    """Scores of a model on the validation split: one of its own head, or one per reader; see `_scores`.

    `answers` are the labels that the head predicts, one per row; [] for readers, and for tasks without classes.
    `truncated` is the number of rows whose end the head does not see; 0 for readers.
    """

    scores: list[float]
    answers: list[Label]
    truncated: int = 0


def _scores(subject: _Subject, desc: str) -> _Scored:
    """Score the model on the whole validation split, by its own head or by linear readers.

    The three readers, one per seed, are trained here. `desc` is the text of their progress bar.
    """
    task = subject.task
    if subject.own:
        return _own_scores(subject, task, progress=subject.progress)
    scores: list[float] = []
    for number, reader_seed in enumerate(progress_bar(_SEEDS, show=subject.progress, desc=desc)):
        # the readers of all seeds would log the same warnings
        with without_warnings() if number else nullcontext(), _reader(subject, task, reader_seed) as score:
            scores.append(score())
    return _Scored(scores, [])


def _own_scores(subject: _Subject, task: Task, *, progress: bool) -> _Scored:
    """Score the model's own head on the validation split of `task`, in one pass over all rows."""
    tasks, options, results = {task.name: task}, PassOptions(), dict[str, "Results"]()
    runner = ModelRunner(subject.model, task, _OP, subject.processor, options)
    runner.check(tasks, ("validation",))
    groups = list(scoring_groups(runner, tasks, "validation", options))
    for group in groups:
        runner.fit_head(group, keep=False)
    scores = runner.score(groups, options, progress=progress, collected=results)
    truncated = sum(group.truncated(task.name) for group in groups)
    return _Scored([float(scores[task.name][task.metric])], results[task.name].guesses(), truncated)


@final
@dataclass(frozen=True)
class _Change:
    """How well a change of scores is known; see the attributes of `LeastBlocks`."""

    interval: float | None
    values: int
    differing: int | None


def _change(subject: _Subject, before: _Scored, after: _Scored) -> _Change:
    """Return the interval of the change from the scores `before` to those `after`, and what it is computed from.

    Readers have a t interval over their seeds. A head has a paired bootstrap over the rows with a label, since most
    metrics of all rows are not the mean of those of parts.
    """
    if not subject.own:
        change = summarise([now - then for now, then in zip(after.scores, before.scores, strict=True)])
        return _Change(change.interval, change.count, None)
    task, split = subject.task, subject.task.split("validation")
    rows = split.labelled_rows()
    if not task.kind.has_classes:
        return _Change(None, len(rows), None)
    truths: list[Label] = [split.labels[row] for row in rows]
    now, then = ([side.answers[row] for row in rows] for side in (after, before))
    try:
        (last, score), (first, _) = (row_counts(task, task.metric, side, truths) for side in (now, then))
    except UnknownNameError:  # auroc, for example
        return _Change(None, len(rows), None)
    if task.kind.tags_words:  # words without a label do not count
        now, then = (labelled_words(cast("Tags", side), cast("Tags", truths))[0] for side in (now, then))
    differing = sum(not np.array_equal(*answers) for answers in zip(now, then, strict=True))
    if len(rows) < _LEAST_ROWS or differing < LEAST_DIFFERING:
        return _Change(None, len(rows), differing)
    change = paired_bootstrap(last, first, metric=score, repeats=repeats_for(1), seed=subject.seed)
    return _Change((change.high - change.low) / 2, len(rows), differing)


@contextmanager
def _reader(subject: _Subject, task: Task, seed: int) -> Generator[Callable[[], float]]:
    """Train a linear reader of the last layer with `seed`; yield a function that scores it on the validation split.

    At the end of the `with` block, the model's mode and `requires_grad` are restored.
    """
    with preserve_training(subject.model):
        bank, name = ReaderBank(subject.model, subject.processor), "task"  # a task's name may not fit a reader
        bank.add(name, linear_reader(task, seed=seed, stack=subject.stack.name))
        # the last epoch: the rows that choose the best one are those that the reader is scored on
        options = FitOptions.checked(_OP, seed=seed, keep="last", progress=False)
        train(bank, {name: task.without_test()}, options, op=_OP)
        yield lambda: evaluate(bank, {name: task})[name][task.metric]


def _sizes(model: PreTrainedModel) -> tuple[int, int]:
    return model.num_parameters(), sum(part.numel() * part.element_size() for part in model.parameters())


# The choice of blocks: each returns the cost of each block, where it was measured, and the chosen blocks.
_Choice = tuple[dict[int, float], list[int]]


def _by_influence(subject: _Subject, count: int) -> _Choice:
    """Choose the `count` blocks with the lowest block influence on up to 256 training rows.

    Among equals, the highest block is chosen. Returns block -> influence, and the chosen blocks, ascending. Raises
    ConfigError for fewer than 4 rows.
    """
    model, train = subject.model, subject.task.split("train")
    rows = range(min(len(train), _ROWS))
    inputs = encode_rows(subject.task, train.select_rows(rows), model, subject.processor, None)
    bar = progress_bar(unlabelled_batches(inputs, len(rows)), show=subject.progress, desc="influence of the blocks")
    table = similarity(model, batches=bar, stack=subject.stack.name, measures=["block_influence"]).table
    costs = {int(layer): float(score) for layer, score in zip(table["layer"], table["score"], strict=True)}
    return costs, _least(costs, count)


def _by_loss(subject: _Subject, count: int) -> _Choice:
    """Choose `count` blocks one by one: in each round, the block whose removal lowers the score least.

    The model's own head is scored on a tenth of the training rows. Among equals, the highest block is chosen. Returns
    block -> fall of the score in the first round, and the chosen blocks, ascending.
    """
    held_out = _held_out(subject.task)

    def score() -> float:
        return _own_scores(subject, held_out, progress=False).scores[0]

    whole, costs = score(), dict[int, float]()
    chosen: list[int] = []
    for number in range(count):
        desc = f"scoring without each block ({number + 1} of {count})"
        falls = _falls(subject, whole, score, chosen, desc)
        costs = costs or falls
        chosen += _least(falls, 1)
    return costs, sorted(chosen)


def _by_readers(subject: _Subject, count: int) -> _Choice:
    """Choose the `count` blocks whose removal, one at a time, lowers the score of a linear reader least.

    The score is measured on a tenth of the training rows. The reader is trained on the whole model, on the other rows.
    Among equals, the highest block is chosen. Returns block -> fall of the score, and the chosen blocks, ascending.
    """
    held_out = _held_out(subject.task)
    with _reader(subject, held_out, _SEEDS[0]) as score:
        costs = _falls(subject, score(), score, (), "scoring without each block")
    return costs, _least(costs, count)


def _falls(
    subject: _Subject, whole: float, score: Callable[[], float], without: Sequence[int], desc: str
) -> dict[int, float]:
    """Return block number (from 1) -> how far `score()` falls below `whole` (the whole model) if the block is skipped.

    Blocks in `without` are skipped with each block, and are not in the result. Where lower scores are better, values
    are how far it rises. `desc` is the text of the progress bar. Raises UnsupportedModelError if a block cannot be
    skipped.
    """
    sign = -1 if subject.task.metric in LOWER else 1
    left = [layer for layer in range(1, subject.stack.depth + 1) if layer not in without]
    falls: dict[int, float] = {}
    for layer in progress_bar(left, show=subject.progress, desc=desc):
        with skipping(subject.model, subject.stack, [*without, layer], op=_OP):
            falls[layer] = sign * (whole - score())
    return falls


def _least(costs: Mapping[int, float], count: int) -> list[int]:
    return sorted(sorted(costs, key=lambda layer: (costs[layer], -layer))[:count])


_CHOICES = {"influence": _by_influence, "loss": _by_loss, "readers": _by_readers}


class DropLeast(Strict):
    """Arguments of the edit `drop_least` of a plan; `drop_least_` explains them."""

    count: PositiveInt
    by: By = "influence"
    heal_epochs: NonNegativeInt = 0
    stack: str | None = None


_CHECKED = checked(partial(check_named_edit, op="plan", more={DROP_LEAST: DropLeast}))
_NAMED = BeforeValidator(lambda value: {"preset": value} if isinstance(value, str) else value)


class PlanTask(TaskRecipe):
    """The task that a plan measures on. Keys that only matter in a training recipe are not allowed."""

    @model_validator(mode="after")
    def _only_data(self) -> PlanTask:
        """Raise ValidationError if the task has a key without an effect in a plan, such as "readers" or "subsample"."""
        if names := sorted(self.model_fields_set & NOT_DATA):
            with error_at(names[0]):
                raise ConfigError(f"'{names[0]}' is for lamina train, and has no effect on a plan. Leave it out")
        return self


class EditPlan(Strict):
    """A plan: a list of edits in order, and the task that its edit `drop_least` measures on. `read_plan` reads it.

    Attributes:
        edits: The edits.
        seed: Seed of random weights, and of what `drop_least_` draws.
        task: The name of a preset, or the keys of a task in a recipe. None: no task; only `drop_least` needs one.
    """

    edits: list[Annotated[Fields, _CHECKED]] = Field(min_length=1)
    seed: Seed = 0
    task: Annotated[PlanTask | None, _NAMED] = None

    @model_validator(mode="after")
    def _uses_task(self) -> EditPlan:
        """Raise ValidationError if the plan names a task and no edit uses it."""
        if self.task is not None and not self.needs_weights():
            with error_at("task"):
                raise ConfigError(
                    f"no edit measures on a task; only {DROP_LEAST} does. Add it to the edits, or remove the task"
                )
        return self

    def __call__(
        self,
        model: PreTrainedModel,
        processor: Processor | None,
        data: Path | None = None,
        *,
        progress: bool = False,
    ) -> list[LeastBlocks]:
        """Apply the edits to a model, in place; return one report per edit `drop_least`: what the model lost by it.

        `drop_least` alone uses the other arguments: the processor, the folder `data` of the task's data (None: the
        current folder for files, the hub for presets), and whether to show progress bars. Raises LaminaError if an edit
        cannot be applied. Earlier edits then stay applied.
        """
        task: Task | None = None
        reports: list[LeastBlocks] = []
        for number, edit in enumerate(self.edits):
            ((name, arguments),) = edit.items()
            seed = derive_seed(self.seed, "plan", number)
            if name != DROP_LEAST:
                arguments = {} if arguments is None else arguments
                apply_edits(model, [(name, arguments)], seed=seed, where=f"plan, edit {number + 1}")
                continue
            if self.task is None:
                raise ConfigError(f"plan: {DROP_LEAST} has no task to measure on. Give the plan a 'task', or --task.")
            task = task or load_task(self.task.preset or "task", self.task, data)
            chosen: dict[str, Any] = DropLeast.model_validate(arguments).model_dump()
            how: dict[str, Any] = {"processor": processor, "seed": self.seed, "progress": progress}
            reports.append(drop_least_(model, task, chosen.pop("count"), **how, **chosen))
        return reports

    def needs_weights(self) -> bool:
        """Return whether the model must have its weights, not just its shapes, because the plan measures it."""
        return any(DROP_LEAST in edit for edit in self.edits)

    def uses_seed(self) -> bool:
        """Return whether the result depends on the seed, because an edit makes random weights or measures the model."""
        named = [(name, arguments) for edit in self.edits for name, arguments in edit.items()]
        is_drawn = (is_random(name, {} if arguments is None else arguments) for name, arguments in named)
        return self.needs_weights() or any(is_drawn)


def read_plan(path: Path) -> EditPlan:
    """Return the plan in a YAML file.

    Raises DataError if the file cannot be read or is not valid YAML; ConfigError if a value is not allowed; and
    UnknownNameError if a key or name does not exist. The last two name the line and the key.
    """
    file = read_yaml(path, "'edits'", op="plan")
    return parse_plan(file.fields, op=f"plan {path}", file=file)


def parse_plan(fields: Fields, *, op: str = "plan", file: Any = None) -> EditPlan:  # noqa: ANN401 a `YamlFile`
    """Return a plan from its fields; raise ConfigError or UnknownNameError if one is not allowed.

    Messages begin with `op`, and name the line in `file`, the `YamlFile` of the fields. None: no line.
    """
    try:
        return EditPlan.model_validate(fields)
    except ValidationError as error:
        raise_first(error, op=op, file=file)


def task_fields(name: str) -> str | Fields:
    """Return what the option --task names: the name of a preset, or the keys of a task, read from a YAML file.

    Raises DataError if there is a file `name` that cannot be read or is not YAML.
    """
    return read_yaml(Path(name), "those of a task, such as 'preset'", "task").fields if is_file(name) else name
