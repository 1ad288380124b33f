"""Predict with the readers of a bank, or with a whole model."""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lamina.bank import ReaderBank
from lamina.data.state_cache import hash_processor
from lamina.errors import ConfigError, error_context
from lamina.layers.fingerprints import fingerprint_of_modules
from lamina.layers.wrappers import unwrapped
from lamina.store.open_saved import open_cached
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions, as_examples
from lamina.train.bank_runner import BankRunner
from lamina.train.groups import Group, encoder_of, max_length
from lamina.train.model_runner import ModelRunner, task_of
from lamina.train.options import PassOptions
from lamina.train.scoring import collect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.data.batches import Budget
    from lamina.tasks.base import Results
    from lamina.tasks.split import Split

logger = logging.getLogger(__name__)


def predict(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel | str | Path,
    examples: Iterable[Any],
    *,
    readers: Sequence[str] | None = None,
    kind: str | None = None,
    processor: Any = None,
    batch_size: int = 32,
    add_prefix_space: bool = False,
    prefix: str = "",
    max_target_length: int = 128,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    num_workers: int = 0,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Predict: every reader's answer, off one pass per batch; or a whole model's.

    Texts longer than the model reads are cut for readers of whole texts, and read in overlapping windows by readers of
    tokens. Of a pair, readers of tokens answer for the second text. Masked language modelling fills in the mask tokens
    that stand in a text, such as "[MASK]". Causal language modelling goes on with a text or a chat, of which the start
    is left out where it is too long.

    Args:
        bank_or_model: The readers and their model; or a whole model. Or the folder or hub id of what was saved: it is
            opened, on a GPU if there is one, and kept for the next call.
        examples: Texts, pairs of texts or (of causal language models) chats, the same kind throughout. Images: paths,
            bytes of files, images of Pillow, or arrays (uint8 `[height, width]` or `[height, width, 3]`). Clips of
            sound: paths, bytes, `{"array": ..., "sampling_rate": ...}`, or arrays at the rate of the feature extractor.
            A list, an array, a column of a data frame, or any other iterable of them.
        readers: Which readers; None: all.
        kind: What a whole model is asked for, as the kind of a task; None: what its head is for.
        processor: Tokenizer, image processor or feature extractor; None: the bank's, or the one that belongs to
            `model.name_or_path`.
        batch_size: Rows per pass.
        add_prefix_space: As of `fit`; readers that were trained with it get it in any case.
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
        translations: "text". Causal language modelling: of a model "text", what it writes after the example, of a
        reader "candidates" for the next token.

    Raises:
        ConfigError: If there is no processor or reader, an example is not what the reader reads, or there is no mask
            token to fill in.
        UnknownNameError: If a reader does not exist.
    """
    options = PassOptions.checked(
        "predict",
        batch_size=batch_size,
        add_prefix_space=add_prefix_space,
        prefix=prefix,
        max_target_length=max_target_length,
        num_beams=num_beams,
        length_penalty=length_penalty,
        num_workers=num_workers,
        progress=progress,
    )
    if isinstance(bank_or_model, str | Path):
        bank_or_model = open_cached(bank_or_model)
    return Predictor(bank_or_model, options, readers=readers, kind=kind, processor=processor)(examples)


@dataclass(frozen=True)
class Prepared:
    """Examples that a `Predictor` has read."""

    count: int
    splits: Mapping[str, Split]  # kind -> the examples as it reads them
    groups: Sequence[Group]

    @property
    def cut(self) -> int:
        """Examples that are longer than what is read of them."""
        return max((group.truncated(name) for group in self.groups for name in group.tasks), default=0)

    def warn(self, op: str) -> None:
        """Log how many examples lost their end, if any did."""
        if self.cut:
            logger.warning(
                "%s: %d examples are longer than what is read of them; the rest was left out or cut off", op, self.cut
            )

    @property
    def tokens(self) -> int:
        """Tokens in all, without padding."""
        return sum(int(sum(group.inputs.lengths)) for group in self.groups)


class Predictor:
    """Answers of a bank's readers, or of a whole model; made once for any number of calls. See `predict`."""

    def __init__(
        self,
        target: ReaderBank | PreTrainedModel,
        options: PassOptions,
        *,
        readers: Sequence[str] | None = None,
        kind: str | None = None,
        processor: Any = None,
    ) -> None:
        self._options, target, self._told = options, unwrapped(target), set[str]()  # who was told about
        readers = (readers,) if isinstance(readers, str) else readers
        self._tasks: dict[str, Any]  # name -> what is asked, a `TaskLike`
        self._lengths: dict[tuple[str, ...], int] = {}
        if kind is not None and isinstance(target, ReaderBank):
            raise ConfigError(f"predict: kind is '{kind}' for a bank; each of its readers has its own.")
        if readers is not None and not isinstance(target, ReaderBank):
            raise ConfigError(f"predict: readers are {list(readers)} for a whole model, which has none.")
        if isinstance(target, ReaderBank):
            self._tasks = {name: target[name].config.head for name in (target if readers is None else readers)}
            self._subject = BankRunner(target, "predict", processor)
        else:
            task = task_of(target, kind)
            self._tasks = {task.kind: task}
            self._subject = ModelRunner(target, task, "predict", processor, options)
        if not self._tasks:
            raise ConfigError("predict: there is no reader; at least one is needed.")
        self.names = tuple(self._tasks)

    def digest(self) -> str:
        """Differs between models and readers of other weights."""
        digest = hashlib.blake2b(digest_size=16)
        for module in dict.fromkeys((*self._subject.modules, self._subject.base)):
            digest.update(fingerprint_of_modules(module.modules()).encode())
        return digest.hexdigest()

    def processor_digest(self) -> str:
        """Differs between processors that read otherwise."""
        return hash_processor(self._subject.processor)

    @property
    def reads_files(self) -> bool:
        """Whether the examples are images or sound."""
        return any(kind_of(task.kind).file is not None for task in self._tasks.values())

    def to(self, device: str) -> None:
        """Answer on another device."""
        for module in (*self._subject.modules, self._subject.base):
            nn.Module.to(module, device)

    def __call__(self, examples: Iterable[Any]) -> list[dict[str, Any]]:
        """Per example, name -> answer."""
        prepared = self.prepare(examples)
        prepared.warn("predict")
        self._subject.warn_about_pairs(
            {name: prepared.splits[task.kind].pairs for name, task in self._tasks.items() if name not in self._told}
        )
        self._told.update(self._tasks if prepared.count else ())
        return self.answer(prepared)

    def prepare(self, examples: Iterable[Any]) -> Prepared:
        """Read examples, say as tokens, without a pass of the model."""
        return self.prepared(self._splits(as_examples(examples)))

    def prepared(self, splits: Mapping[str, Split]) -> Prepared:
        """The same of examples that are read already: kind -> a split, all of the same length."""
        count = min(map(len, splits.values()))
        if not count:
            return Prepared(0, splits, [])
        together: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for name, task in self._tasks.items():
            space = self._options.add_prefix_space or bool(self._subject.trained_with([name], "add_prefix_space"))
            together[kind_of(task.kind).predict_inputs, space].append(name)
        parts = (self._groups(names, splits, add_prefix_space=space) for (_, space), names in together.items())
        return Prepared(count, splits, [group for part in parts for group in part])

    def answer(self, prepared: Prepared, *, raw: bool = False, budget: Budget | None = None) -> list[dict[str, Any]]:
        """Per example, name -> answer; `raw` ones have logits where there are any; `budget` is as of `results`."""
        results = self.results(prepared, budget=budget)
        answers = {name: own.raw_predictions() if raw else own.predictions() for name, own in results.items()}
        return [{name: answers[name][row] for name in self._tasks} for row in range(prepared.count)]

    def results(self, prepared: Prepared, *, budget: Budget | None = None) -> dict[str, Results]:
        """Name -> all that its reader says of the examples.

        A `budget` says how many tokens a pass takes, else it is a number of rows.
        """
        collected: dict[str, Results] = {}
        for group in prepared.groups:
            results = {
                name: kind_of(task.kind).answers(
                    task, prepared.splits[task.kind], group.inputs, self._subject.processor
                )
                for name, task in group.tasks.items()
            }
            shown = self._options.progress
            collect(self._subject, group, results, self._options, progress=shown, budget=budget)
            collected |= results
        return collected

    def _splits(self, examples: Sequence[Any]) -> dict[str, Split]:
        """Kind -> examples as it reads them."""
        splits: dict[str, Split] = {}
        for name, task in self._tasks.items():
            if task.kind not in splits:
                with error_context(f"asked of '{name}'"):
                    splits[task.kind] = kind_of(task.kind).examples(examples, self._subject.processor)
        return splits

    def max_length(self, names: Sequence[str]) -> int:
        """Tokens of an example, or of a window of it, that some readers read."""
        if (asked := tuple(names)) not in self._lengths:  # all modules of the model are looked at
            tasks = {name: self._tasks[name] for name in names}
            self._lengths[asked] = max_length(self._subject, tasks, self._subject.trained_with(names, "max_length"))
        return self._lengths[asked]

    def _groups(self, names: Sequence[str], splits: Mapping[str, Split], *, add_prefix_space: bool) -> list[Group]:
        """The inputs of some tasks: common ones, unless one of them would be shown more or less than alone."""
        group = self._group(names, splits, add_prefix_space=add_prefix_space)
        per_token = [name for name in names if kind_of(self._tasks[name].kind).per_token]
        strides = {name: self._subject.trained_with([name], "stride") for name in per_token}
        apart: dict[tuple[int, int | None], list[str]] = defaultdict(list)
        for name in names:
            stride = strides.get(name, next(iter(strides.values()), None))
            apart[self.max_length([name]), stride].append(name)
        if len(apart) == 1 or max(group.inputs.lengths) < min(length for length, _ in apart):
            return [group]
        return [self._group(part, splits, add_prefix_space=add_prefix_space) for part in apart.values()]

    def _group(self, names: Sequence[str], splits: Mapping[str, Split], *, add_prefix_space: bool) -> Group:
        """Some tasks' common inputs."""
        runner, options = self._subject, self._options
        tasks = {name: self._tasks[name] for name in names}
        first, per_token = encoder_of(tasks, names), [name for name in names if kind_of(tasks[name].kind).per_token]
        kind = kind_of(tasks[first].kind)
        how = EncodeOptions(
            part="predict",
            max_length=self.max_length(names),
            stride=runner.trained_with(per_token or names, "stride"),
            windows=kind.per_token,
            add_prefix_space=add_prefix_space,
            prefix=options.prefix if kind.takes_prefix else "",
        )
        inputs = kind.encode(splits[tasks[first].kind], runner.processor, how)
        return Group("predict", tasks, inputs, {})
