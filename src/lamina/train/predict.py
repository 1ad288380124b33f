"""Predict with the readers of a bank, or with a whole model."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, LaminaError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.train.model import ModelSubject, task_of
from lamina.train.options import FitOptions
from lamina.train.plan import Group
from lamina.train.readers import BankSubject
from lamina.train.run import max_length
from lamina.train.scoring import collect

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.tasks.base import Results, TaskLike
    from lamina.tasks.split import Split
    from lamina.train.subjects import Subject

logger = logging.getLogger(__name__)


def predict(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel,
    examples: Sequence[Any],
    *,
    readers: Sequence[str] | None = None,
    kind: str | None = None,
    processor: Any = None,
    batch_size: int = 32,
    prefix: str = "",
    max_target_length: int = 128,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    num_workers: int = 0,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Predict: every reader's answer, off one pass per batch; or a whole model's.

    Texts longer than the model reads are cut for readers of whole texts, and read in overlapping windows by readers of
    tokens. Masked language modelling fills in the mask tokens that stand in a text, such as "[MASK]".

    Args:
        bank_or_model: The readers and their model; or a whole model.
        examples: Texts or pairs of texts, the same kind throughout; for a model of images their paths.
        readers: Which readers; None: all.
        kind: What a whole model is asked for, as the kind of a task; None: what its head is for.
        processor: Tokenizer or image processor; None: the bank's, or the one that belongs to `model.name_or_path`.
        batch_size: Rows per pass.
        prefix: Stands before every text that is to be summarised or translated.
        max_target_length: Tokens of a text to write.
        num_beams: Of the search for it.
        length_penalty: Of a search with beams.
        num_workers: Processes that make batches ahead.
        progress: Show a progress bar.

    Returns:
        Per example, reader name (of a whole model the kind) -> answer. Classification: "label", "score" and
        "probabilities". Regression: "value". Multi-label: "labels" and "probabilities". Tokens: a list of spans with
        "start" and "end" (characters), "label", "text" and "score". Masked language modelling: per mask token its
        "start" and "end", and "candidates", the five likeliest with "token" and "score", best first. Summaries and
        translations: "text".

    Raises:
        ConfigError: If there is no processor or reader, an example is not what the reader reads, or there is no mask
            token to fill in.
        UnknownNameError: If a reader does not exist.
    """
    options = FitOptions.of(
        {
            "eval_batch_size": batch_size,
            "prefix": prefix,
            "max_target_length": max_target_length,
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "num_workers": num_workers,
            "progress": progress,
        },
        "predict",
    )
    return Predictor.of(bank_or_model, options, readers=readers, kind=kind, processor=processor)(examples)


class Predictor:
    """Answers about examples; made once for any number of calls.

    Args:
        subject: What answers.
        tasks: Name -> what it is asked.
        options: How examples are read.
    """

    def __init__(self, subject: Subject, tasks: Mapping[str, TaskLike], options: FitOptions) -> None:
        self._subject, self._tasks, self._options = subject, tasks, options
        if not tasks:
            raise ConfigError("predict: there is no reader; at least one is needed.")

    @classmethod
    def of(
        cls,
        target: ReaderBank | PreTrainedModel,
        options: FitOptions,
        *,
        readers: Sequence[str] | None = None,
        kind: str | None = None,
        processor: Any = None,
    ) -> Predictor:
        """Of a bank's readers, or a whole model; see `predict`."""
        if isinstance(target, ReaderBank):
            names = list(target) if readers is None else readers
            heads: dict[str, Any] = {name: target[name].config.head for name in names}
            return cls(BankSubject(target, "predict", processor), heads, options)
        task = task_of(target, kind)
        return cls(ModelSubject(target, task, "predict", processor, options), {task.kind: task}, options)

    @property
    def names(self) -> tuple[str, ...]:
        """Who answers."""
        return tuple(self._tasks)

    def digest(self) -> str:
        """Differs between models and readers of other weights; quick, so no proof that all of them are equal."""
        digest = hashlib.blake2b(digest_size=16)
        for module in {id(one): one for one in (*self._subject.modules, self._subject.base)}.values():
            for name, value in module.state_dict().items():
                few = value.detach().flatten()[:8].float().tolist()
                digest.update(repr((name, tuple(value.shape), few, float(value.detach().double().sum()))).encode())
        return digest.hexdigest()

    def __call__(self, examples: Sequence[Any]) -> list[dict[str, Any]]:
        """Per example, name -> answer."""
        splits = self._splits(examples)
        if not len(examples):
            return []
        together: dict[str, list[str]] = defaultdict(list)
        for name, task in self._tasks.items():
            together[kind_of(task.kind).predict_inputs].append(name)
        found: dict[str, list[Any]] = {}
        for names in together.values():
            found |= self._answers(names, splits)
        return [{name: found[name][row] for name in self._tasks} for row in range(len(examples))]

    def _splits(self, examples: Sequence[Any]) -> dict[str, Split]:
        """Kind -> examples as it reads them."""
        splits: dict[str, Split] = {}
        for name, task in self._tasks.items():
            if task.kind not in splits:
                try:
                    splits[task.kind] = kind_of(task.kind).examples(examples, self._subject.processor)
                except LaminaError as error:
                    error.add_note(f"asked of '{name}'")
                    raise
        return splits

    def _answers(self, names: Sequence[str], splits: Mapping[str, Split]) -> dict[str, list[Any]]:
        subject, options = self._subject, self._options
        tasks = {name: self._tasks[name] for name in names}
        first = next((name for name in names if kind_of(tasks[name].kind).per_token), names[0])
        kind = kind_of(tasks[first].kind)
        how = EncodeOptions(
            part="predict",
            max_length=max_length(subject, tasks, subject.trained_with(names, "max_length")),
            stride=subject.trained_with(names, "stride"),
            windows=kind.per_token,
            prefix=options.prefix if kind.takes_prefix else "",
        )
        inputs = kind.encode(splits[tasks[first].kind], subject.processor, how)
        cut = max(kind_of(task.kind).truncated(inputs) for task in tasks.values())
        if cut:
            logger.warning("predict: %d texts are longer than the model reads; only their start was seen whole", cut)
        results: dict[str, Results] = {}
        for name, task in tasks.items():
            results[name] = kind_of(task.kind).answers(task, splits[task.kind], inputs, subject.processor)
        group = Group("predict", tasks, kind, inputs, {})
        size, workers = options.scoring_batch_size, options.num_workers
        collect(subject, group, results, batch_size=size, num_workers=workers, progress=options.progress)
        return {name: result.predictions() for name, result in results.items()}
