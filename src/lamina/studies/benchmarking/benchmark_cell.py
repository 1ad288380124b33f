"""One cell of the benchmark: run every method on the rows drawn from one data set for training and scoring."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, cast, final

import numpy as np

from lamina.bank import Reader, ReaderBank
from lamina.data.state_cache import CacheSettings, open_states
from lamina.errors import CacheError, DataError, check_known
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers.preserve import preserve_training
from lamina.layers.wrappers import unwrapped
from lamina.store import load
from lamina.studies.benchmarking import regressions
from lamina.studies.benchmarking.probing_sets import portion, read_set
from lamina.studies.probing.controls import text_features
from lamina.studies.probing.probe_cell import results_of
from lamina.tasks import kind_of
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.train.groups import groups_of
from lamina.train.options import FitOptions
from lamina.train.plan import usual_epochs
from lamina.train.training_run import open_runner, train
from lamina.utils import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.data.state_cache import CachedStates
    from lamina.layers.types import Processor
    from lamina.studies.benchmarking.probing_sets import Portion, Setting
    from lamina.studies.benchmarking.regressions import Fitted, Matrix
    from lamina.tasks.outputs import Results
    from lamina.train.base import Runner
    from lamina.train.groups import Encodings
    from lamina.train.plan import Group

_OP, _METRIC, _LABELS = "bench", "auroc", ("0", "1")
_BATCH = 32
_POOLED_AT_ONCE = 64  # rows whose states are averaged in one operation
_BYTES = 4  # size of a parameter

ReaderOf: TypeAlias = Callable[[Task, int], Reader]  # task and seed -> the reader to train


def _with_linear_head(fusion: Any, **head: Any) -> ReaderOf:  # noqa: ANN401 any config, any setting of the head
    return lambda task, seed: Reader(fusion, SequenceClassification(task.labels, **head), seed=seed)


READERS: Mapping[str, ReaderOf] = {
    "attention_probe": _with_linear_head(LastLayer(), pooling="query", dropout=0.0),
    "scalar_mix": _with_linear_head(ScalarMix(), pooling="mean"),
    "ada_layers": _with_linear_head(AdaLayers(), pooling="mean"),
    "default": lambda task, seed: replace(Reader.default(task), seed=seed),
}
"""Method -> the reader that it trains, all with the batch size, learning rate and epochs of `LaminaClassifier`."""
FEATURES = ("majority", "tfidf", "embedding", "best_layer", "all_layers", "pca", "knn", "xgboost")
"""Methods that fit fixed features: the words, or the mean of a layer's states over the tokens."""
OF_MEANS = {*FEATURES} - {"majority", "tfidf"}
"""Methods in `FEATURES` that read means of states."""
METHODS = (*FEATURES, *READERS)
USUAL = tuple(name for name in METHODS if name != "xgboost")


@final
@dataclass(frozen=True)
class CellSettings:
    """The settings that all cells of a benchmark share. A cell runs all methods on rows drawn from one data set.

    Attributes:
        setting: "normal", "scarce", "imbalance" or "shift".
        methods: Names of the methods, from `METHODS`.
        seeds: Seeds of the readers: initial weights and dropout. The other methods have one result.
        scored: Maximum number of scored rows; None: all.
        unique: Whether each text counts once; see `ProbingSet.without_repeats`. No text is then trained on and scored.
        max_length: Maximum tokens per text.
        draw: Seed of the choice of rows.
        training: Options of `lamina.fit` that replace those of `LaminaClassifier`. They are not compared with the
            settings of a saved cell.
    """

    setting: Setting
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    scored: int | None = 500
    unique: bool = True
    max_length: int = 128
    draw: int = 42
    training: Mapping[str, Any] = field(default_factory=dict)


def cell_portion(folder: Path, name: str, point: float | None, settings: CellSettings) -> Portion:
    """Read the data set `name`, and draw the rows to train on and to score.

    `point` is the number of training rows in the setting "scarce", the share of the positive class in "imbalance", else
    None: as many rows as possible are trained on, half of them positive; see `portion`. In "shift", the scored rows are
    those of the set's shifted version; if each text counts once, without the texts that the set itself has too. Raises
    DataError if the set is missing, damaged or too small.
    """
    data = read_set(folder, name)
    other = read_set(folder, name, shifted=True) if settings.setting == "shift" else None
    if other is not None and settings.unique:
        other = other.without_repeats().without_texts(data.texts)
    return portion(
        data.without_repeats() if settings.unique else data,
        rows=int(point) if settings.setting == "scarce" and point is not None else None,
        share=point if settings.setting == "imbalance" else None,
        scored=settings.scored,
        other=other,
        seed=settings.draw,
    )


class TrainedReader(NamedTuple):
    """A reader trained on one data set: its results on the test rows, its number of parameters, and the seconds."""

    results: Results
    size: int
    seconds: float


@final
class SetStates:
    """The hidden states of one data set's texts, so that the model reads them once for all points of the set.

    A point is a number of training rows, or a share of the positive class. The states of one set are held at a time,
    in a temporary folder, which is removed at the end of the `with` block. `seconds` is the time that the model took to
    read that set.

    Args:
        texts_of: Called with a set's name; returns the texts of the set that any point trains on or scores.
    """

    def __init__(self, texts_of: Callable[[str], Sequence[str]]) -> None:
        self.seconds = 0.0
        self._texts_of, self._name = texts_of, ""
        self._index: dict[str, int] = {}  # text -> its row
        self._states: CachedStates | None = None
        self._folder: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def _drop(self) -> None:
        self._name, self._states = "", None
        if self._folder is not None:
            self._folder.cleanup()

    def of(self, name: str, texts: Sequence[str], read: Callable[[Sequence[str], str], CachedStates]) -> CachedStates:
        """Return the hidden states of some texts of a set, in the order of `texts`; drop the states of any other set.

        Args:
            name: Name of the data set.
            texts: Texts among those of `texts_of(name)`.
            read: Computes the states of texts, and stores them in the folder that is its second argument. It is called
                only if the states of this set are not held yet.
        """
        if self._name != name or self._states is None:
            self._drop()
            self._folder = TemporaryDirectory(ignore_cleanup_errors=True)
            all_texts = list(dict.fromkeys(self._texts_of(name)))
            start = time.perf_counter()
            self._states = read(all_texts, self._folder.name)
            self._name, self._index = name, {text: row for row, text in enumerate(all_texts)}
            self.seconds = time.perf_counter() - start
        return self._states.select([self._index[text] for text in texts])


def set_texts(folder: Path, points: Sequence[float | None], settings: CellSettings, name: str) -> list[str]:
    """Return the texts of the set `name` that any of the `points` trains on or scores; texts may repeat.

    A point (see `cell_portion`) for which the set has too few rows adds none. If the set is missing or damaged, the
    result is [].
    """
    texts: list[str] = []
    for point in points:
        with suppress(DataError):
            drawn = cell_portion(folder, name, point, settings)
            texts += [*drawn.train.texts, *drawn.test.texts]
    return texts


def cell_rows(
    model: PreTrainedModel | str | Path,
    processor: Processor | None,
    folder: Path,
    name: str,
    point: float | None,
    settings: CellSettings,
    kept: Path | SetStates | None = None,
) -> list[Row]:
    """Run all methods on rows drawn from one data set for training and for scoring.

    The model reads each text once. All seeds of one method are trained at the same time. Raises DataError if the data
    set is missing, damaged or too small, UnknownNameError if a method does not exist, MissingExtraError if xgboost is
    chosen but not installed, and CacheError or another LaminaError as `States` does.

    Args:
        model: The model, which is not changed, or its name or folder.
        processor: Its tokenizer. None: the one saved with the model.
        folder: The folder of the data files.
        name: Name of the data set.
        point: Number of training rows in the setting "scarce", share of the positive class in "imbalance"; else None.
        settings: Settings of the benchmark, with the names of the methods.
        kept: A folder that keeps the hidden states for later calls, or the `SetStates` of the data set, which all its
            points share. None: a temporary folder.

    Returns:
        A row per method and seed: "method", "seed" (None without one), "metric" and "score" (AUC on the scored rows).
        "trained" and "rows": numbers of training rows and scored rows. "seconds": time of training, without the model's
        passes and the averaging of states over tokens. "bytes": size of the parameters. "chosen": the layer, only for
        "best_layer". "pass_seconds": time of the model's passes; if points share states, for all texts of the set.
    """
    drawn = cell_portion(folder, name, point, settings)
    rows: list[Row] = []
    base = load(model)[0] if isinstance(model, str | Path) else unwrapped(model)
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary, preserve_training(base):
        states = States(base, processor, drawn, settings, temporary if kept is None else kept)
        for method in settings.methods:
            make = READERS.get(method)
            rows += states.train(method, make) if make is not None else [states.fit(method)]
        facts = {"metric": _METRIC, "trained": len(drawn.train.texts), "rows": len(drawn.test.texts)}
        return [{**row, **facts, "pass_seconds": states.seconds} for row in rows]


class States:
    """The hidden states of the drawn rows, and the methods that read them. The model runs when an instance is made.

    Args:
        model: The model. It is frozen and put in eval mode; the caller undoes that.
        processor: Its tokenizer. None: the one saved with the model.
        drawn: The rows to train on and to score.
        settings: Settings of the benchmark.
        kept: Folder in which the states are stored and stay; or the `SetStates` of the data set, which all its points
            share.

    Attributes:
        seconds: Seconds that the model took to read the texts; with `SetStates`, all texts of the set.

    Raises:
        CacheError: If the states cannot be cached or written, for example because the disk is full, or a state is not
            finite.
        ConfigError, UnknownNameError: If an option in `settings.training` is not allowed or does not exist.
        UnsupportedModelError: If the layers of the model cannot be found.
        NotFiniteError: If a weight of the model is NaN or infinite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        processor: Processor | None,
        drawn: Portion,
        settings: CellSettings,
        kept: str | Path | SetStates,
    ) -> None:
        self._model, self._processor, self._drawn, self._settings = model, processor, drawn, settings
        parts = {"train": drawn.train, "test": drawn.test}
        splits = {part: Split.of(rows.texts, rows.labels.tolist()) for part, rows in parts.items()}
        kind = kind_of(SequenceClassification.kind)
        self._task = Task(kind, "classification", _LABELS, _METRIC, (_METRIC,), splits, drawn.train.name, "1")
        epochs = usual_epochs(len(drawn.train.texts), _BATCH)
        usual: dict[str, Any] = {"batch_size": _BATCH, "epochs": epochs, "keep": "last", "progress": False}
        usual |= {"max_length": settings.max_length, "cache": "off"}  # `train` is handed the states
        self._options = FitOptions.of({**usual, **settings.training}, _OP)
        self._encodings: Encodings = {}
        bank = self._new_bank({"all": _with_linear_head(ScalarMix(), pooling="mean")(self._task, 0)})
        start = time.perf_counter()
        self._groups = {part: self._group(bank, ["all"], part) for part in parts}
        for part, group in self._groups.items():
            if isinstance(kept, SetStates):
                group.states = kept.of(drawn.train.name, parts[part].texts, partial(self._read_texts, bank))
            else:
                group.states = self._read(bank, group, kept)
        self.seconds = kept.seconds if isinstance(kept, SetStates) else time.perf_counter() - start

    def _new_bank(self, readers: Mapping[str, Reader]) -> ReaderBank:
        bank = ReaderBank(self._model, self._processor)
        for name, reader in readers.items():
            bank.add(name, reader)
        return bank

    def _runner(self, bank: ReaderBank) -> Runner:
        return open_runner(bank, dict.fromkeys(bank, self._task), _OP, None, self._options)

    def _read_texts(self, bank: ReaderBank, texts: Sequence[str], folder: str) -> CachedStates:
        """Return the states of all layers for some texts; `bank`, `folder` and CacheError are as in `_read`."""
        task = replace(self._task, splits={"train": Split.of(list(texts), [0] * len(texts))})
        (group,) = groups_of(self._runner(bank), {"all": task}, "train", self._options)
        return self._read(bank, group, folder)

    def _read(self, bank: ReaderBank, group: Group, folder: str | Path) -> CachedStates:
        """Return the states of all layers for the rows of a group (the encoded rows of a split).

        The model computes states that `folder` does not hold yet, and stores them there as float16; as float32 if they
        are beyond the range of float16. `bank` has one reader, "all", which needs all layers. Raises CacheError if they
        cannot be stored or are not finite.
        """
        size = self._options.scoring_batch_size
        settings = CacheSettings(mode="on", dtype="float16", folder=folder, batch_size=size)
        try:
            states = open_states(bank, group.inputs, ["all"], settings=settings)
        except CacheError as error:
            if error.dtype is None:
                raise
            states = open_states(bank, group.inputs, ["all"], settings=replace(settings, dtype="float32"))
        return cast("CachedStates", states)

    def _group(self, bank: ReaderBank, names: Sequence[str], part: str) -> Group:
        """Return the encoded rows of the split `part` ("train" or "test"), as input for a bank's readers `names`."""
        tasks = dict.fromkeys(names, self._task)
        (group,) = groups_of(self._runner(bank), tasks, part, self._options, self._encodings)
        return group

    def train(self, method: str, make: ReaderOf) -> list[Row]:
        """Train one reader per seed of a method, all at once; return a table row for each, with its test AUC.

        `make` returns the config of the reader for a task and a seed. The column "seconds" is the time of all, divided
        by their number.
        """
        return [
            {
                "method": method,
                "seed": seed,
                "score": reader.results.scores((_METRIC,))[_METRIC],
                "seconds": reader.seconds,
                "bytes": reader.size * _BYTES,
            }
            for seed, reader in self.trained(make).items()
        ]

    def trained(self, make: ReaderOf) -> dict[int, TrainedReader]:
        """Train one reader per seed, all at once; return seed -> its results on the test rows, size and time.

        `make` is as for `train`.
        """
        readers = {f"seed-{seed}": make(self._task, seed) for seed in self._settings.seeds}
        bank = self._new_bank(readers)
        task = replace(self._task, splits={"train": self._task.split("train")})
        states = {group.inputs.digest: group.states for group in self._groups.values() if group.states is not None}
        start = time.perf_counter()
        train(bank, dict.fromkeys(readers, task), self._options, op=_OP, encodings=self._encodings, states=states)
        seconds = (time.perf_counter() - start) / len(readers)
        group = self._group(bank, list(readers), "test")
        group.states = cast("CachedStates", self._groups["test"].states)
        group.states.device = bank.device  # training may have moved the model
        results = {name: results_of(name, group) for name in readers}
        self._runner(bank).collect(group, results, self._options)
        return {
            seed: TrainedReader(results[name], bank[name].size(), seconds)
            for seed, name in zip(self._settings.seeds, readers, strict=True)
        }

    def fit(self, method: str) -> Row:
        """Fit a method that uses fixed features, and return its table row, with the AUC on the test rows.

        Raises UnknownNameError for an unknown method, and MissingExtraError if XGBoost is needed but not installed.
        """
        check_known(_OP, [method], METHODS, "method")
        if method in OF_MEANS:
            _ = self.means  # computed once for all methods, so that the first does not pay for the others
        regressions.import_packages(method)  # for the same reason
        start = time.perf_counter()
        fitted, chosen = self.fitted(method)
        truths = self._drawn.test.labels
        row: Row = {"method": method, "seed": None, "score": regressions.auc(truths, fitted.scores)}
        row |= {"seconds": time.perf_counter() - start, "bytes": fitted.size * _BYTES}
        return row | ({} if chosen is None else {"chosen": chosen})

    def fitted(self, method: str) -> tuple[Fitted, int | None]:
        """Fit a method that uses fixed features; return its result, and the layer that it chose.

        The layer is None for all methods but "best_layer". Raises MissingExtraError as `boosted_trees` does.
        """
        classes, seed = self._drawn.train.labels, self._settings.draw
        if method == "majority":
            return regressions.Fitted(np.zeros(len(self._drawn.test.labels)), 0.5, 0), None
        if method == "tfidf":
            words = text_features("tfidf", [list(self._drawn.train.texts)], [list(self._drawn.test.texts)], tags=False)
            train_words, test_words = (cast("Matrix", part) for part in words)  # sparse
            return regressions.logistic(train_words, classes, test_words, seed=seed), None
        train, test = self.means["train"], self.means["test"]
        if method == "best_layer":
            fits = [
                regressions.logistic(train[:, layer], classes, test[:, layer], seed=seed)
                for layer in range(train.shape[1])
            ]
            chosen = int(np.argmax([fit.held_out for fit in fits]))
            return fits[chosen], chosen
        if method == "all_layers":
            return regressions.logistic(
                train.reshape(len(train), -1), classes, test.reshape(len(test), -1), seed=seed
            ), None
        return _ON_EMBEDDINGS[method](train[:, -1], classes, test[:, -1], seed=seed), None

    @cached_property
    def means(self) -> dict[str, Matrix]:
        """Split ("train" or "test") -> the states of each row, averaged over its tokens, `[rows, layers, width]`."""
        return {part: mean_states(group) for part, group in self._groups.items()}


_ON_EMBEDDINGS: Mapping[str, Callable[..., Fitted]] = {
    "embedding": regressions.logistic,
    "pca": regressions.principal_components,
    "knn": regressions.neighbours,
    "xgboost": regressions.boosted_trees,
}


def mean_states(group: Group) -> Matrix:
    """Return the cached states of a group's rows, averaged over the tokens of each row, `[rows, layers, width]`.

    Without rows, the result is `[0, 0, 0]`.
    """
    count = len(group.inputs.lengths)
    lengths = np.array([int(length) for length in group.inputs.lengths], dtype=float)
    states: CachedStates = group.states  # pyright: ignore[reportAssignmentType]
    order = sorted(range(count), key=lambda row: -lengths[row])
    means: Matrix | None = None
    for start in range(0, count, _POOLED_AT_ONCE):
        rows = order[start : start + _POOLED_AT_ONCE]
        ((_, by_layer),) = states.batch(rows).items()
        # padding is zero, so that a sum over all positions is the sum over the tokens
        sums = np.stack([by_layer[layer].float().sum(1).cpu().numpy() for layer in sorted(by_layer)], axis=1)
        means = np.zeros((count, *sums.shape[1:]), dtype=np.float32) if means is None else means
        means[rows] = sums / lengths[rows, None, None]
    return means if means is not None else np.zeros((0, 0, 0), dtype=np.float32)
