"""What a model is fine-tuned on, row by row: texts, pairs of texts to write, or images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lamina.data.batches import tokenizer_of
from lamina.data.encode import length_limit
from lamina.errors import ConfigError
from lamina.tasks.kinds import GENERATION, IMAGE
from lamina.train.plan import Group, group_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.tasks.task import Task
    from lamina.train.options import TuneOptions


@runtime_checkable
class Rows(Protocol):
    """One part of a task, ready for a model.

    Attributes:
        lengths: Tokens of each row, by which batches are put together.
        truncated: How many rows lost their end.
    """

    @property
    def lengths(self) -> list[int]: ...  # noqa: D102
    @property
    def truncated(self) -> int: ...  # noqa: D102
    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """What the model is called with for some rows, labels included."""
        ...


@dataclass(frozen=True)
class TextRows:
    """Windows of texts that are classified, word by word or as a whole, or whose hidden tokens are guessed."""

    group: Group
    processor: Any
    several: bool = False  # labels of a row, whose loss is that of numbers

    @property
    def lengths(self) -> list[int]:
        """Tokens of each window."""
        return self.group.encoded.lengths

    @property
    def truncated(self) -> int:
        """How many texts are seen without their end."""
        return self.group.cut(self.group.names[0])

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, Tensor]:
        """What the model is called with for some windows; in masked language modelling epochs hide other tokens."""
        name = self.group.names[0]
        batch = self.group.batch(rows, [name], self.processor, epoch=epoch)
        labels = batch.pop("labels")[name]
        del batch["readers"]
        return {**batch, "labels": labels.float() if self.several else labels}


def open_rows(task: Task, part: str, model: PreTrainedModel, processor: Any, options: TuneOptions) -> Rows:
    """One part of a task for a model.

    Args:
        task: The task.
        part: "train", "validation" or "test".
        model: What reads it; says how long a text may be.
        processor: Tokenizer or image processor.
        options: How to read it.

    Raises:
        UnknownNameError: If the task has no such part.
        ConfigError: If it is empty, or an option does not fit the kind of task.
    """
    split = task.split(part)
    if not len(split):
        raise ConfigError(f"task {task.name}: its {part} part is empty; it needs a row at least. Add rows.")
    if options.prefix and task.kind not in GENERATION:
        raise ConfigError(
            f"finetune: prefix is '{options.prefix}' for a task of kind {task.kind}; only summaries and translations "
            "have one. Leave it out."
        )
    if task.kind == IMAGE:
        from lamina.tasks.pictures import Pictures

        return Pictures(split, processor, augment=options.augment and part == "train", seed=options.seed)
    _check_tokenizer(processor, task)
    limit = length_limit(model, processor, options.max_length)
    if task.kind in GENERATION:
        from lamina.tasks.seq2seq import Pairs

        target = options.max_target_length
        return Pairs.of(split, processor, prefix=options.prefix, max_length=limit, max_target_length=target)
    (group,) = group_tasks({task.name: task}, part, processor, max_length=limit, stride=options.stride)
    group.seed = options.seed
    return TextRows(group, processor, several=task.problem == "multi_label")


def _check_tokenizer(processor: Any, task: Task) -> None:
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer_of(processor), PreTrainedTokenizerBase):
        raise ConfigError(
            f"finetune: the processor is a {type(processor).__name__}; the texts of task {task.name} are read by a "
            "tokenizer. Give the one that AutoTokenizer.from_pretrained finds for the model."
        )
