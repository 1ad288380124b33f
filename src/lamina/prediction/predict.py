"""Predict with the readers of a bank, or with a whole model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast
from weakref import WeakKeyDictionary

from torch import nn

from lamina.bank import ReaderBank, ReaderModule
from lamina.bank.reader import MONITORS, WATCHES, warn_of_untrained
from lamina.data.continuations import reads_replies_apart
from lamina.data.encode import Windows
from lamina.data.state_cache import hash_processor
from lamina.errors import ConfigError, LaminaError, UnknownNameError
from lamina.layers.base_facts import hash_settings
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_modules, fingerprint_of_tensors
from lamina.layers.types import Processor, tokenizer_of
from lamina.layers.wrappers import checked_model
from lamina.prediction.backends import BACKENDS, Backend, engine_of
from lamina.store.open_saved import open_cached
from lamina.tasks.base import EncodeOptions, GenerationOptions, Kind, KindedTask, TaskOutline
from lamina.tasks.split import JOIN_WORDS, Split, as_examples
from lamina.train.bank_runner import AnswerEngine, BankRunner
from lamina.train.checkpoint import reader_settings
from lamina.train.groups import encoder_of, max_length
from lamina.train.model_runner import ModelRunner, task_of
from lamina.train.options import PassOptions
from lamina.train.plan import Group
from lamina.utils import JSONObject, check_type, pluralize

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence

    import torch
    from transformers import PreTrainedModel

    from lamina.data.batches import Budget
    from lamina.tasks.lazy_file import LazyFile
    from lamina.tasks.outputs import Results
    from lamina.train.base import Runner

logger = logging.getLogger(__name__)

Answers: TypeAlias = JSONObject  # reader name (or kind) -> prediction, in JSON types; see `predict`

_TRAINED = ("max_length", "stride", "add_prefix_space", "pair")  # facts of a reader's training that a plan depends on


def predict(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel | str | Path,
    examples: Iterable[object],
    *,
    readers: Collection[str] | str | None = None,
    kind: str | None = None,
    processor: Processor | None = None,
    batch_size: int = 32,
    add_prefix_space: bool = False,
    prefix: str = "",
    max_target_length: int = 128,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    num_workers: int = 0,
    backend: Backend = "auto",
    progress: bool = False,
) -> list[Answers]:
    """Predict with the readers of a bank, which share every pass, or with a whole model.

    A text is too long if it has more tokens than `max_length` in the readers' training or, if that is not known, than
    the model allows. Readers that predict one thing per text read only the start of it (the end, if the tokenizer
    truncates on the left); readers that predict per token read it in overlapping windows. In a pair of texts, readers
    that predict per token label the second text. Masked language modelling fills in the mask tokens of a text, such as
    "[MASK]". Causal language modelling continues a text or a chat, and leaves out the start of one that is too long.
    Warnings count examples that are blank or too long.

    Args:
        bank_or_model: A bank, or a whole model. Or the folder or hub id of a saved bank or model, which is loaded, on a
            GPU if there is one, and kept in memory for the next call.
        examples: Texts, pairs of texts or (causal language models) chats; all examples are of one type. Images: paths,
            bytes of files, Pillow images, or arrays (uint8 `[height, width]` or `[height, width, 3]`). Audio clips:
            paths, bytes, `{"array": ..., "sampling_rate": ...}`, or arrays at the rate of the feature extractor. The
            examples may come as a list, an array, a column of a data frame, or any other iterable.
        readers: Names of the readers that answer. None: all readers of the bank.
        kind: Kind of task that a whole model is used for. None: what its head is for.
        processor: Tokenizer, image processor or feature extractor. None: the bank's, or the one that belongs to
            `model.name_or_path`.
        batch_size: Rows per pass. A row is a window of tokens, an image or an audio clip.
        add_prefix_space: Put a space before every text if the tokenizer needs one to read the first word as it reads
            any other word. False: it is put only for readers that were trained with this option.
        prefix: Text that is put before every text to summarise or translate. "": none.
        max_target_length: Maximum number of tokens to generate per example.
        num_beams: Number of beams for generating. 1: greedy decoding.
        length_penalty: Exponent of the length in beam search; above 0 prefers longer texts.
        num_workers: Number of processes that prepare batches. 0: this process prepares them.
        backend: What computes a bank's answers on a CPU. "torch": PyTorch. "onnx": ONNX Runtime; the bank is exported
            on first use, into its folder if that can be written. "int8": the quantised graph that `lamina export
            --int8` wrote into the bank's folder. "auto": ONNX Runtime if a fitting export is in the bank's folder;
            otherwise PyTorch.
        progress: Show a progress bar on standard error.

    Returns:
        One dict per example: reader name -> prediction. For a whole model, the name is the kind of task.
        Classification: "label", "score" and "probabilities". Regression: "value". Multi-label: "labels" and
        "probabilities". Token classification: a list of spans with "start" and "end" (characters), "label", "text" and
        "score". Masked language modelling: for each mask token its "start" and "end", and "candidates", the five
        likeliest tokens with "token" and "score", best first. Summarisation and translation: "text". Causal language
        modelling: "text", the continuation that a model generates; for a reader "candidates" for the next token.

    Raises:
        ConfigError: If there is no processor or reader; if an option does not fit the bank or model; if `examples` is
            one text or path, a mapping, a set or a table; if a reader cannot read an example, or there is no mask token
            to fill in; if the frozen model or the processor of a bank has changed.
        DataError: If an image or audio file cannot be read.
        UnknownNameError: If a reader, the kind or the backend does not exist.
        ModelNotFoundError: If a model, or the base model of a bank, cannot be found.
        StoreError: If nothing is saved at a folder or hub id, an int8 export does not fit its bank, or a new ONNX
            export answers differently from PyTorch.
        BaseMismatchError: If `processor` makes different inputs than the bank's own.
        NotFiniteError: If a reader gives NaN or infinity for an example.
        UnsupportedModelError: If `backend` is "onnx" and the model or a reader cannot be exported.
        MissingExtraError: If packages for `backend` "onnx" or "int8", or for an audio file, are not installed.
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
    predictor = Predictor(bank_or_model, options, readers=readers, kind=kind, processor=processor, backend=backend)
    return predictor(examples)


@dataclass(frozen=True)
class Prepared:
    """Examples that `Predictor.prepare` has encoded for the model.

    Attributes:
        count: Number of examples.
        splits: Kind of task -> the examples as that kind reads them.
        groups: The encoded examples, once for each set of readers that read the same inputs. Each group has its own
            passes.
    """

    count: int
    splits: Mapping[str, Split]
    groups: Sequence[Group]

    @property
    def cut(self) -> int:
        """Number of examples that are too long to be read whole, by the reader for which most are; 0 if none is."""
        counts = [task.kind.truncated(group.inputs) for group in self.groups for task in group.tasks.values()]
        return max(counts, default=0)

    @property
    def tokens(self) -> int:
        """Number of tokens in all groups, without padding."""
        return sum(int(sum(group.inputs.lengths)) for group in self.groups)

    def warn(self, op: str) -> None:
        """Log a warning if an example is too long to be read whole; `op` begins the message."""
        if cut := self.cut:
            longer = "is longer than what is read of it" if cut == 1 else "are longer than what is read of them"
            logger.warning("%s: %s %s; the rest was left out or cut off", op, pluralize(cut, "example"), longer)


@dataclass(frozen=True)
class Reading:
    """How to encode examples for readers with equal inputs, or for a whole model. Computed once, then reused.

    Attributes:
        tasks: Reader name (or the kind of a whole model's task) -> the outline of its task, a `TaskOutline`.
        kind: Encodes the examples.
        options: How it encodes them.
        apart: If the readers read different parts of a long text, one `Reading` for each part; else empty.
        apart_pairs: The same for long pairs of texts.
    """

    tasks: dict[str, KindedTask]
    kind: Kind
    options: EncodeOptions
    apart: tuple[Reading, ...] = ()
    apart_pairs: tuple[Reading, ...] = ()


class _Plan(NamedTuple):
    """How to run the readers (or a whole model); it depends on their training, the processor and the options.

    Attributes:
        tasks: As in `Reading`, for all readers.
        readings: How to encode the examples for each group of readers.
        paired: Reader name -> whether it was trained on pairs of texts, where this is known.
    """

    tasks: dict[str, KindedTask]
    readings: tuple[Reading, ...]
    paired: Mapping[str, bool]


# Bank or model -> what its plan depends on, and the plan. Plans hold no module, so the weak keys can be collected.
_plans: WeakKeyDictionary[nn.Module, tuple[object, _Plan]] = WeakKeyDictionary()


class Predictor:
    """Predicts with some readers of a bank, or with a whole model, for any number of calls; see `predict`.

    At the first pass, the config of a whole model that classifies texts gets the tokenizer's padding token, if it names
    none.

    Args:
        target: The bank or model.
        options: Options of each pass.
        readers: Names of readers. None: all readers of the bank.
        kind: Kind of task of a whole model. None: what its head is for.
        processor: Tokenizer, image processor or feature extractor. None: the bank's or the model's.
        backend: What computes the answers of a bank in `__call__` and `predict`; see the function `predict`.

    Attributes:
        options: Options of each pass.
        names: Names of the readers, or the kind of a whole model's task; the keys of the answers.
        readers: The bank's readers that answer, by name; empty for a whole model.

    Raises:
        UnknownNameError: If a reader, the kind or the backend does not exist.
        ConfigError: If there is no reader or processor, the model has no head for `kind` (None: for any kind), or the
            processor of a bank has changed. Also if `kind` is set for a bank, if `readers` is set for a whole model, or
            if an option is set that has no effect on the kinds of tasks.
        BaseMismatchError: If `processor` makes different inputs than the bank's own.
    """

    def __init__(
        self,
        target: ReaderBank | PreTrainedModel,
        options: PassOptions,
        *,
        readers: Collection[str] | None = None,
        kind: str | None = None,
        processor: Processor | None = None,
        backend: str = "torch",
    ) -> None:
        if backend not in BACKENDS:
            raise UnknownNameError(op="predict", got=backend, known=BACKENDS, what="backend")
        self._backend: Backend = cast("Backend", backend)
        self.options = options
        self.readers: dict[str, ReaderModule] = {}
        self._whole: TaskOutline | None = None
        self._blank = 0  # blank texts that `results` has answered since `warn_of_blank` was called
        self._runner: Runner
        if processor is not None:
            check_type("predict", "processor", processor, "Processor")
        if isinstance(target, ReaderBank):
            if kind is not None:
                raise ConfigError(f"predict: kind is '{kind}' for a bank; each of its readers has its own.")
            self.readers = target.select(readers, "predict")
            self._runner = BankRunner(target, "predict", processor, readers=self.readers)
        else:
            model = checked_model(target, "predict", "a bank or a transformers model")
            if readers is not None:
                raise ConfigError(f"predict: readers are {readers!r} for a whole model, which has none.")
            self._whole = task_of(model, kind)
            self._runner = ModelRunner(model, self._whole, "predict", processor, options)
        self._tasks, self._readings, self._paired = self._plan()
        if not self._tasks:
            raise ConfigError("predict: there is no reader; at least one is needed.")
        self.names = tuple(self._tasks)

    def digest(self) -> str:
        """Return a digest of the weights of the readers, and of the model as far as they read it.

        Raises ConfigError if the frozen model of a bank has changed since the bank was made.
        """
        readers = self.readers.values()
        marks = [fingerprint_of_modules(module.modules()) for module in readers or self._runner.modules]
        marks += [fingerprint_of_tensors(reader.head.borrowed_tensors().items()) for reader in readers]
        if isinstance(self._runner, BankRunner):
            bank = self._runner.bank
            bank.seal_base("predict")
            marks += [fingerprint_of(bank.stacks[name]) for name in sorted({reader.stack for reader in readers})]
        return hashlib.blake2b(" ".join(marks).encode(), digest_size=16).hexdigest()

    def settings_digest(self) -> str:
        """Return a digest of all settings, beside weights, on which answers depend.

        They are those of the model and of each reader, such as its labels, and what training and calibration found.
        """
        base = hash_settings(self._runner.base)
        facts: list[object] = []
        for name, reader in self.readers.items():
            learnt = {key: value for key, value in reader.info.items() if key not in (MONITORS, WATCHES)}
            facts.append((name, {**reader_settings(reader.config), "stack": reader.stack}, learnt))
        learnt = {} if self.readers else {name: self._runner.info(name) for name in self.names}
        outline = self._whole and (self._whole.kind.name, self._whole.problem_type, self._whole.labels)
        parts = [base, facts, learnt, outline]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()

    def processor_digest(self) -> str:
        """Return a digest of the processor. It differs for processors that make different inputs."""
        return hash_processor(self._runner.processor)

    @property
    def file(self) -> type[LazyFile] | None:
        """Class of the examples if they are images or audio clips, which may be given as paths; None for texts."""
        return next((task.kind.file for task in self._tasks.values() if task.kind.file is not None), None)

    @property
    def device(self) -> torch.device:
        """The device on which the model runs."""
        return self._runner.device

    def to(self, device: str | torch.device) -> None:
        """Move the model and its readers to a device, in place."""
        for module in (*self._runner.modules, self._runner.base):
            nn.Module.to(module, device)

    def __call__(self, examples: Iterable[object]) -> list[Answers]:
        """Return one dict per example: reader name -> prediction. Log a warning if examples are blank or too long.

        Raises the errors of the function `predict`.
        """
        answers = self.predict(self.prepare(examples))
        self.warn_of_blank("predict")
        return answers

    def warn_of_blank(self, op: str) -> None:
        """Log a warning if `results` has answered blank texts since the last call; `op` begins the message.

        There is no warning if all readers predict for every token: for a blank text they rightly say nothing.
        """
        if self._blank and not all(task.kind.per_token for task in self._tasks.values()):
            are = "is" if self._blank == 1 else "are"
            logger.warning("%s: %s %s blank; the answers to them mean nothing", op, pluralize(self._blank, "text"), are)
        self._blank = 0

    def predict(self, prepared: Prepared, *, budget: Budget | None = None) -> list[Answers]:
        """Predict as `__call__` does, for examples that `prepare` has encoded; errors as in the function `predict`.

        For `budget` see `answer_by_pass`. The backend is chosen again for each call; see `choose_engine`. Warnings also
        name readers that are untrained, and those that learnt from pairs and read single texts, or vice versa. A reader
        is named once by the latter.
        """
        prepared.warn("predict")
        if prepared.count:
            reads_pairs = {name: prepared.splits[self._tasks[name].kind.name].pairs for name in self._paired}
            if reads_pairs != self._paired:
                self._runner.warn_about_pairs(reads_pairs)
                # one warning per reader is enough
                self._paired = {name: pairs for name, pairs in self._paired.items() if pairs == reads_pairs[name]}
            if isinstance(self._runner, BankRunner):
                warn_of_untrained("predict", self.readers)
            self.choose_engine()
        return self._answers(self.results(prepared, budget=budget))

    def choose_engine(self) -> None:
        """Set the engine for the backend: PyTorch or ONNX Runtime.

        Raises:
            LaminaError: If the backend cannot be used; see `engine_of`. Whole models can use PyTorch only.
        """
        if isinstance(self._runner, BankRunner):
            self._runner.engine = engine_of(self._runner.bank, self._backend, self.names)
        elif self._backend not in ("auto", "torch"):
            raise ConfigError(f"predict: backend is '{self._backend}' for a whole model; it is for banks.")

    @property
    def engine(self) -> AnswerEngine | None:
        """The engine that computes a bank's answers in place of PyTorch; None if PyTorch computes them.

        Setting it changes the engine. For a whole model it is always None, and setting it does nothing.
        """
        return self._runner.engine if isinstance(self._runner, BankRunner) else None

    @engine.setter
    def engine(self, engine: AnswerEngine | None) -> None:
        if isinstance(self._runner, BankRunner):
            self._runner.engine = engine

    def prepare(self, examples: Iterable[object]) -> Prepared:
        """Encode examples, for instance as tokens, without running the model.

        Raises:
            ConfigError: If `examples` is one text or path, a mapping, a set or a table; or an example is not what a
                reader reads (a note on the error names the reader).
            DataError: If an object in memory, such as an image, has wrong values; a note names the reader.
        """
        listed = as_examples(examples)
        if any(map(_is_words, listed)) and all(
            task.kind.tags_words and self._runner.trained_with([name], "pair") == 0  # all learnt from single texts
            for name, task in self._tasks.items()
        ):
            number = [*map(_is_words, listed)].index(True)
            got = f"entry {number} is a list of words, and the readers learnt from single texts"
            raise ConfigError(f"predict: {got}. {JOIN_WORDS}; a pair is a tuple of two texts.")
        splits: dict[str, Split] = {}
        for name, task in self._tasks.items():
            if task.kind.name not in splits:
                try:
                    splits[task.kind.name] = task.kind.examples(listed, self._runner.processor)
                except LaminaError as error:
                    error.add_note(f"asked of '{name}'")
                    raise
        return self.prepared(splits)

    def prepared(self, splits: Mapping[str, Split]) -> Prepared:
        """Encode `splits`, as `prepare` makes them: kind of task -> the examples in the form that this kind reads.

        All splits have the same examples. Without examples, `groups` is empty.
        """
        count = min(map(len, splits.values()))
        groups: list[Group] = []
        for reading in self._readings if count else ():
            pairs = splits[reading.kind.name].pairs
            apart = reading.apart_pairs if pairs else reading.apart
            mixed = pairs and len({part.kind.per_token for part in apart}) > 1
            together = None if mixed and reads_replies_apart(self._runner.processor) else self._encode(reading, splits)
            # Long examples are encoded again if the readers read different parts of them.
            if together is None or (apart and _is_long(together, apart)):
                groups += [self._encode(part, splits) for part in apart]
            else:
                groups.append(together)
        return Prepared(count, splits, groups)

    def _encode(self, reading: Reading, splits: Mapping[str, Split]) -> Group:
        inputs = reading.kind.encode(splits[reading.kind.name], self._runner.processor, reading.options)
        inputs = inputs.for_model(self._runner.base) if isinstance(inputs, Windows) else inputs
        return Group("predict", reading.tasks, inputs, {})

    def answer_by_pass(
        self, prepared: Prepared, *, raw: bool = False, budget: Budget | None = None
    ) -> Generator[None, None, list[Answers]]:
        """Return one dict per example: reader name -> prediction.

        A generator: it yields after each pass but the last, so that the caller can do other work in between. It logs no
        warnings, and uses the `engine` that is set.

        Args:
            prepared: The examples, from `prepare`.
            raw: Return logits in place of probabilities, if the kind of task has logits.
            budget: Maximum number of tokens per pass, beside its `batch_size` rows. None: no such limit.

        Raises:
            ConfigError: If the engine must answer but cannot, or a frozen model has changed since its bank was made.
            NotFiniteError: If a reader gives NaN or infinity for an example.
        """
        collected: dict[str, Results] = {}
        yield from self._passes(prepared, collected, budget)
        return self._answers(collected, raw=raw)

    def results(self, prepared: Prepared, *, budget: Budget | None = None) -> dict[str, Results]:
        """Run the model on encoded examples, and return reader name -> its outputs for all of them.

        For `budget` and the errors see `answer_by_pass`. Without examples, the dict is empty. Blank texts are counted
        for `warn_of_blank`.
        """
        collected: dict[str, Results] = {}
        for _ in self._passes(prepared, collected, budget):
            pass
        split = next(iter(prepared.splits.values()))
        if split.written:  # a blank pair is a pair of blank texts
            self._blank += len([text for text in split.texts if not "".join(text).strip()])
        return collected

    def _passes(self, prepared: Prepared, collected: dict[str, Results], budget: Budget | None) -> Iterator[None]:
        """Run the model in passes within `budget`, and add each reader's outputs to `collected`; yield in between."""
        for number, group in enumerate(prepared.groups):
            if number:
                yield
            results: dict[str, Results] = {}
            for name, task in group.tasks.items():
                split = prepared.splits[task.kind.name]
                results[name] = task.kind.answers(task, split, group.inputs, self._runner.processor)
            progress = self.options.progress
            yield from self._runner.passes(group, results, self.options, progress=progress, budget=budget)
            collected |= results

    def _answers(self, results: Mapping[str, Results], *, raw: bool = False) -> list[Answers]:
        """Return one dict per example: reader name -> prediction; with `raw`, logits in place of probabilities."""
        answers: list[Sequence[object]] = []
        for name in self.names if results else ():  # without examples, there are no results
            answers.append(results[name].raw_predictions() if raw else results[name].predictions())
        return [dict(zip(self.names, row, strict=True)) for row in zip(*answers, strict=True)]

    def max_length(self, names: Sequence[str]) -> int:
        """Return how many tokens the readers `names` read of an example or, if they read in windows, of each window."""
        return self._max_length({name: self._tasks[name] for name in names})

    def _max_length(self, tasks: Mapping[str, KindedTask]) -> int:
        return max_length(self._runner, tasks, self._runner.trained_with([*tasks], "max_length"))

    def _plan(self) -> _Plan:
        """Return the plan for the readers. It is derived again (see `_derive_plan`) only if something has changed."""
        runner, options = self._runner, self.options
        tokenizer = tokenizer_of(runner.processor)
        depends = (
            [(name, reader.config, *map(reader.info.get, _TRAINED)) for name, reader in self.readers.items()],
            self._whole,
            (options.add_prefix_space, options.prefix),
            (options.max_target_length, options.num_beams, options.length_penalty),
            id(runner.processor),
            (getattr(tokenizer, "model_max_length", None), getattr(tokenizer, "truncation_side", None)),
        )
        before, plan = _plans.get(runner.modules[0], (None, None))
        if plan is None or before != depends:
            plan = self._derive_plan()
            _plans[runner.modules[0]] = depends, plan
        return plan

    def _derive_plan(self) -> _Plan:
        """Return a new plan: one `Reading` per set of readers with the same kind of input and `add_prefix_space`.

        Raises ConfigError if an option has no effect on the readers' kinds of tasks.
        """
        tasks: dict[str, KindedTask] = {n: TaskOutline.of_head(r.config.head) for n, r in self.readers.items()}
        options = self.options
        if self._whole is not None:
            tasks = {self._whole.kind.name: self._whole}
            if self._whole.kind.keeps_end:  # it continues texts
                options = options.model_copy(update=GenerationOptions().__dict__)
        options.check_kinds("predict", {task.kind for task in tasks.values()})
        together: dict[tuple[str, bool], dict[str, KindedTask]] = defaultdict(dict)
        for name, task in tasks.items():
            space = options.add_prefix_space or bool(self._runner.trained_with([name], "add_prefix_space"))
            together[task.kind.predict_inputs, space][name] = task
        readings: list[Reading] = []
        for (_, space), members in together.items():
            # Readers of tokens keep the beginning of a text, and half of the first text of a pair; the others keep what
            # the tokenizer keeps.
            cuts_left = getattr(tokenizer_of(self._runner.processor), "truncation_side", "right") == "left"
            apart, apart_pairs = (self._parts(members, space, by_kind=by_kind) for by_kind in (cuts_left, True))
            readings.append(replace(self._reading(members, space), apart=apart, apart_pairs=apart_pairs))
        learnt = {name: self._runner.trained_with([name], "pair") for name in tasks}
        paired = {name: bool(pairs) for name, pairs in learnt.items() if pairs is not None}
        return _Plan(tasks, tuple(readings), paired)

    def _parts(self, tasks: dict[str, KindedTask], add_prefix_space: bool, *, by_kind: bool) -> tuple[Reading, ...]:
        """Return one `Reading` per group of readers that read the same part of a long example; () if all read one part.

        Readers of one part have the same length and stride; with `by_kind`, also all or none predict per token.
        """
        strides = {n: self._runner.trained_with([n], "stride") for n, task in tasks.items() if task.kind.per_token}
        parts: dict[tuple[int, int | None, bool], dict[str, KindedTask]] = defaultdict(dict)
        for name, task in tasks.items():
            stride = strides.get(name, next(iter(strides.values()), None))
            parts[self._max_length({name: task}), stride, by_kind and task.kind.per_token][name] = task
        return tuple(self._reading(part, add_prefix_space) for part in parts.values()) if len(parts) > 1 else ()

    def _reading(self, tasks: dict[str, KindedTask], add_prefix_space: bool) -> Reading:
        """Return how to encode examples once for all readers in `tasks` (name -> task).

        Length and stride are the largest that the readers were trained with, or the default if a reader has no record.
        If readers predict per token, only their strides count, and long examples are cut into windows. Raises
        ConfigError if the model cannot read that length.
        """
        names = list(tasks)
        encoder = tasks[encoder_of(tasks, names)].kind
        per_token = [name for name in names if tasks[name].kind.per_token]
        options = EncodeOptions(
            part="predict",
            max_length=self._max_length(tasks),
            stride=self._runner.trained_with(per_token or names, "stride"),
            windows=encoder.per_token,
            add_prefix_space=add_prefix_space,
            prefix=self.options.prefix if encoder.takes_prefix else "",
        )
        return Reading(tasks, encoder, options)


def _is_words(example: object) -> bool:
    """Return whether an example is a list of single words, at least one."""
    return (
        isinstance(example, list)
        and bool(example)
        and all(isinstance(word, str) and [word] == word.split() for word in example)
    )


def _is_long(group: Group, parts: Sequence[Reading]) -> bool:
    """Return whether an example of this group is so long that `parts` may read different parts of it."""
    shortest = min(part.options.max_length for part in parts)
    is_cut = any(task.kind.truncated(group.inputs) for task in group.tasks.values())
    return is_cut or max(group.inputs.lengths) >= shortest
