"""Groups: tasks of a run with the same examples. The examples are encoded once and share each pass of the model."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lamina.data.continuations import reads_replies_apart
from lamina.data.encode import Windows
from lamina.errors import ConfigError, check_known
from lamina.tasks.base import EncodeOptions, Inputs, Kind, KindedTask, Targets
from lamina.tasks.recorded_rows import StatesInputs, recorded_inputs
from lamina.tasks.task import Task
from lamina.train.plan import Group
from lamina.utils import pluralize, rank

if TYPE_CHECKING:
    from lamina.layers.types import Processor
    from lamina.train.base import Runner
    from lamina.train.options import PassOptions

    Encodings = MutableMapping[Hashable, Inputs]
    """Encoded examples by what they depend on (examples and options), for runs that read the same examples again."""

logger = logging.getLogger(__name__)


def tasks_by_name(op: str, tasks: Mapping[str, Task] | Task | str) -> dict[str, Task]:
    """Return learner name -> task. `tasks` is such a mapping, or a single task, whose own name is then the key.

    {} stays {}: callers that need a task check that.
    Raises ConfigError, with `op` as the operation, if `tasks` is neither, or a value of the mapping is not a `Task`.
    """
    if isinstance(tasks, Task):
        return {tasks.name: tasks}
    if not isinstance(tasks, Mapping):
        came = type(tasks).__name__
    elif odd := [task for task in tasks.values() if not isinstance(task, Task)]:
        came = f"a mapping to {type(odd[0]).__name__}"
    else:
        return dict(tasks)
    raise ConfigError(f"{op}: tasks are {came}; a lamina.Task, or a mapping of names to tasks, is needed.")


def with_positive(
    op: str, tasks: Mapping[str, Task], positive: Mapping[str, str | int] | str | int | None
) -> dict[str, Task]:
    """Return the tasks with the positive classes that the user passed, as `Task.with_positive` sets them.

    `positive` is a class for all tasks, or learner name -> class. With None, and where a mapping has no class, tasks
    keep their own. `op` is the operation for messages.

    Raises:
        UnknownNameError: If there is no such learner or class.
        ConfigError: If a task to change does not have two classes, or the value cannot be the name of a class.
    """
    check_known(op, positive if isinstance(positive, Mapping) else (), tasks, "reader")
    chosen = {name: positive.get(name) if isinstance(positive, Mapping) else positive for name in tasks}
    return {name: task if (own := chosen[name]) is None else task.with_positive(own) for name, task in tasks.items()}


def groups_of(
    runner: Runner,
    tasks: Mapping[str, Task],
    part: str,
    options: PassOptions,
    encodings: Encodings | None = None,
) -> Iterator[Group]:
    """Yield the groups of one split of every task (see `group_tasks`), each encoded when it is asked for.

    Args:
        runner: Runs the model. Its processor encodes, and its model limits the length of the inputs.
        tasks: Learner name -> task.
        part: The split that is encoded: "train", "validation" or "test".
        options: Options of the run, which say how examples are encoded.
        encodings: Encoded examples of earlier runs, which are reused; new ones are added in place. None: encode all
            examples.

    Raises:
        UnknownNameError: If a task does not have the part.
        ConfigError: If the processor or an option does not fit a task.
        DataError: If an example cannot be read, or a temporary file for windows cannot be written.
    """
    by_inputs: dict[str, dict[str, Task]] = defaultdict(dict)
    for name, task in tasks.items():
        by_inputs[task.kind.inputs][name] = task
    for same_inputs in by_inputs.values():
        limit = max_length(runner, same_inputs, options.max_length) if runner.processor is not None else 1
        for group in group_tasks(same_inputs, options.encode_options(part, limit), runner.processor, encodings):
            if isinstance(group.inputs, Windows):
                group.inputs = group.inputs.for_model(runner.base)
            yield group


def max_length(runner: Runner, tasks: Mapping[str, KindedTask], requested: int | None) -> int:
    """Return the maximum length of one input for tasks that share their inputs; see `Kind.length_limit`.

    The length is in tokens of a window or text block, or in samples of an audio clip; images have length 1.

    Args:
        runner: Runs the model, whose positions limit the length.
        tasks: Learner name -> task, at least one. If their kinds have different limits, the largest is returned.
        requested: The length that the user asked for. None: the default of the kind.

    Raises:
        ConfigError: If `requested` is below 1, or more than the model can read.
    """
    kinds = {task.kind for task in tasks.values()}
    return max(kind.length_limit(runner.base, runner.processor, requested) for kind in kinds)


def group_tasks(
    tasks: Mapping[str, Task], options: EncodeOptions, processor: Processor, encodings: Encodings | None = None
) -> Iterator[Group]:
    """Put tasks with equal examples into groups; yield each once its examples are encoded and its labels are made.

    Tasks are in one group if their examples, kind of inputs, and options `by_row` and `image_size` are equal. But tasks
    on tokens and tasks on whole texts get a group each if they would read a long text or a pair differently.

    Args:
        tasks: Learner name -> task.
        options: How to encode, and which split of the tasks.
        processor: Tokenizer, image processor or feature extractor.
        encodings: Encoded examples of earlier calls, which are reused; new ones are added in place. None: encode all.

    Raises:
        UnknownNameError: If a task does not have the split.
        ConfigError: If the processor or an option does not fit a task.
        DataError: If an example cannot be read, or a temporary file for windows cannot be written.
    """
    splits = {name: task.split(options.part) for name, task in tasks.items()}
    names_by_key: dict[tuple[str, str, bool, int | None], list[str]] = defaultdict(list)
    for name, split in splits.items():
        task = tasks[name]
        names_by_key[task.kind.inputs, split.key, task.by_row, task.image_size].append(name)
    for names in names_by_key.values():
        made = {} if encodings is None else encodings
        inputs = _inputs(tasks, names, options, processor, made)
        per_token = [name for name in names if tasks[name].kind.per_token]
        others = [name for name in names if not tasks[name].kind.per_token]
        # Tasks on whole texts truncate long ones in their own way, and may join pairs differently.
        if (
            per_token
            and others
            and (
                tasks[others[0]].kind.truncated(inputs) > 0
                or (splits[others[0]].pairs and reads_replies_apart(processor))
            )
        ):
            logger.info("fit: %s and %s read long texts differently, so they share no passes", per_token, others)
            yield _group(tasks, per_token, options.part, inputs)
            names, inputs = others, _inputs(tasks, others, options, processor, made)
        yield _group(tasks, names, options.part, inputs)


def _inputs(
    tasks: Mapping[str, Task], names: Sequence[str], options: EncodeOptions, processor: Processor, encodings: Encodings
) -> Inputs:
    """Return the encoded examples that the tasks `names` share, from `encodings` if they are there; else add them.

    Examples with recorded states are not encoded: their states take the place of tokens.
    """
    task = tasks[encoder_of(tasks, names)]
    kind, split = task.kind, task.split(options.part)
    how = replace(options, windows=kind.per_token, by_row=task.by_row, image_size=task.image_size)
    # Inputs without random changes do not depend on the seed, so runs with other seeds use them again.
    how = how if kind.draws else replace(how, seed=0)
    key = (kind.inputs, split.key, how, len(split))
    if key not in encodings:
        encodings[key] = recorded_inputs(split, kind) or kind.encode(split, processor, how)
    return encodings[key]


def _group(tasks: Mapping[str, Task], names: Sequence[str], part: str, inputs: Inputs) -> Group:
    """Return a group of the learners `names`, with these inputs. `tasks` is learner name -> task.

    Labels are made once for learners with the same split, kind and `label_all_tokens`.
    """
    made: dict[tuple[int, Kind, bool], Targets | None] = {}
    targets: dict[str, Targets | None] = {}
    for name in names:
        task, split = tasks[name], tasks[name].split(part)
        key = (id(split), task.kind, task.label_all_tokens)
        if key not in made:
            made[key] = task.kind.targets(task, split, inputs)
        targets[name] = made[key]
    states = inputs.states if isinstance(inputs, StatesInputs) else None
    return Group(part, {name: tasks[name] for name in names}, inputs, targets, states)


def encoder_of(tasks: Mapping[str, KindedTask], names: Sequence[str]) -> str:
    """Return the learner among `names` whose kind of task decides how the shared examples are encoded.

    It is the first learner that predicts for every token; else the first.
    """
    return next((name for name in names if tasks[name].kind.per_token), names[0])


def warn_of_texts(op: str, tasks: Iterable[Task]) -> None:
    """Log a warning for blank texts, and for texts of a validation or test split that are in the train split too.

    Tasks over the same rows share their warnings. Left out are tasks without a train split, running text (it has blank
    and repeated lines), images, audio and recorded states. In a distributed run only the first process logs.

    Args:
        op: The operation that trains, with which the warnings begin.
        tasks: The tasks.
    """
    by_rows: dict[tuple[tuple[str, str], ...], list[Task]] = defaultdict(list)
    for task in tasks if rank() == 0 else ():
        splits = task.splits.values()
        if "train" in task.splits and all(split.written and split.labelled for split in splits):
            by_rows[tuple((part, split.key) for part, split in task.splits.items())].append(task)
    for same in by_rows.values():
        names = ", ".join(f"'{name}'" for name in dict.fromkeys(task.name for task in same))
        for problem in _problems({part: map(_plain, split.texts) for part, split in same[0].splits.items()}):
            logger.warning("%s: %s: %s.", op, names, problem)


def _problems(texts: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Yield a sentence for each split that has blank texts, and for each that shares texts with the train split.

    `texts` is split name -> texts without white space around them; "train" is among the names.
    """
    train: set[int] = set()  # hashes take less memory than texts, and hardly two texts have the same
    for part in sorted(texts, key=lambda name: name != "train"):
        count = blank = repeated = 0
        for text in texts[part]:
            count += 1
            blank += not text
            if part == "train":
                train.add(hash(text))
            elif text:
                repeated += hash(text) in train
        if blank:
            are = "is" if blank == 1 else "are"
            yield f"{pluralize(blank, 'text')} of {count:,} in the {part} split {are} blank. Remove these rows"
        if repeated:
            share = f"{repeated:,} of {pluralize(count, 'text')} in the {part} split ({100 * repeated / count:.3g} %)"
            hint = "their scores say little about new texts. Remove them from one of the splits"
            yield f"{share} {'is' if repeated == 1 else 'are'} in the train split too; {hint}"


def _plain(text: str | Sequence[str]) -> str:
    return text.strip() if isinstance(text, str) else "\0".join(part.strip() for part in text).strip("\0")
