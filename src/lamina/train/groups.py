"""Tasks over the same examples, encoded once and run in one pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError
from lamina.tasks.base import EncodeOptions
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, MutableMapping, Sequence

    from torch import Tensor

    from lamina.tasks.base import Inputs, Kind, KindedTask, Targets
    from lamina.train.base import Runner
    from lamina.train.options import PassOptions

    Encodings = MutableMapping[Hashable, Inputs]
    """Inputs that were made before, for runs that read the same examples again."""


def tasks_by_name(op: str, tasks: Any) -> dict[str, Task]:
    """Name -> task, of a mapping or a single task; ConfigError if it is neither."""
    if isinstance(tasks, Task):
        return {tasks.name: tasks}
    if not isinstance(tasks, Mapping) or not all(isinstance(task, Task) for task in tasks.values()):
        came = type(tasks).__name__
        if isinstance(tasks, Mapping):
            came = f"a mapping to {type(next(one for one in tasks.values() if not isinstance(one, Task))).__name__}"
        raise ConfigError(f"{op}: tasks are {came}; a lamina.Task, or a mapping of names to tasks, is needed.")
    return dict(tasks)


def groups_of(
    runner: Runner,
    tasks: Mapping[str, Task],
    part: str,
    options: PassOptions,
    encodings: Encodings | None = None,
) -> list[Group]:
    """The tasks' examples in one part, encoded for a runner."""
    together: dict[str, dict[str, Task]] = defaultdict(dict)
    for name, task in tasks.items():
        together[task.kind.inputs][name] = task
    groups: list[Group] = []
    for same_inputs in together.values():
        limit = max_length(runner, same_inputs, options.max_length)
        groups += group_tasks(same_inputs, options.encode_options(part, limit), runner.processor, encodings)
    return groups


def max_length(runner: Runner, tasks: Mapping[str, Any], asked: int | None) -> int:
    """What is read of one example of these tasks, which share their inputs; see `Kind.length_limit`."""
    kinds = {task.kind for task in tasks.values()}
    return max(kind.length_limit(runner.base, runner.processor, asked) for kind in kinds)


@dataclass
class Group:
    """Tasks over the same inputs: encoded once, run in one pass."""

    part: str  # "train", "validation", "test" or "predict"
    tasks: Mapping[str, Any]  # learner name -> `Task`; to predict, `KindedTask`
    inputs: Inputs
    targets: dict[str, Targets | None]  # learner name -> its labels; None where the inputs make them
    states: Any = None  # the cached states of the rows, where the model is not to be run

    @property
    def names(self) -> tuple[str, ...]:
        """The learners."""
        return tuple(self.tasks)

    @property
    def equal_lengths(self) -> bool:
        """Whether the rows of a batch must be of one length; see `AudioInputs`."""
        return bool(getattr(self.inputs, "equal_lengths", False))

    def labels(self, rows: Sequence[int], of_inputs: Tensor | None, names: Iterable[str]) -> dict[str, Tensor]:
        """Learner name -> labels of some rows, which the inputs may have made (`of_inputs`)."""
        targets = {name: self.targets[name] for name in names}
        labels = {name: of_inputs if own is None else own.tensor(rows) for name, own in targets.items()}
        return {name: tensor for name, tensor in labels.items() if tensor is not None}

    def truncated(self, name: str) -> int:
        """How many examples a learner sees without their end."""
        return self.tasks[name].kind.truncated(self.inputs)


def group_tasks(
    tasks: Mapping[str, Task], options: EncodeOptions, processor: Any, encodings: Encodings | None = None
) -> list[Group]:
    """Put the tasks with the same inputs together, and encode each set of examples once.

    `encodings` is what was encoded before, and is used again; it is filled.
    """
    encodings = {} if encodings is None else encodings
    splits = {name: task.split(options.part) for name, task in tasks.items()}
    kinds = {name: task.kind for name, task in tasks.items()}
    together: dict[tuple[str, str, bool, int | None], list[str]] = defaultdict(list)
    for name, split in splits.items():
        task = tasks[name]
        together[kinds[name].inputs, split.key, task.by_row, task.image_size].append(name)
    groups: list[Group] = []
    for key, names in together.items():
        first = encoder_of(tasks, names)
        own = {"by_row": tasks[first].by_row, "image_size": tasks[first].image_size}
        how = replace(options, windows=kinds[first].per_token, **own)
        how = how if kinds[first].draws else replace(how, seed=0)
        mark = (*key, how, len(splits[first]))
        if mark not in encodings:
            encodings[mark] = kinds[first].encode(splits[first], processor, how)
        inputs = encodings[mark]
        targets: dict[tuple[int, Kind, bool], Targets | None] = {}  # made once for readers of one task
        same = {name: (id(splits[name]), tasks[name].kind, tasks[name].label_all_tokens) for name in names}
        for name in names:
            if same[name] not in targets:
                targets[same[name]] = kinds[name].targets(tasks[name], splits[name], inputs)
        own = {name: targets[same[name]] for name in names}
        groups.append(Group(options.part, {name: tasks[name] for name in names}, inputs, own))
    return groups


def encoder_of(tasks: Mapping[str, KindedTask], names: Sequence[str]) -> str:
    """Which learner's kind encodes the examples of several: one that answers token by token needs them whole."""
    return next((name for name in names if tasks[name].kind.per_token), names[0])
