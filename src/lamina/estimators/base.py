"""The base class of the estimators: a reader on a frozen model, trained by `lamina.fit`, pickled without the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar, cast

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, StoreError, convert_errors, error_context
from lamina.estimators.examples import Targets, Texts, as_texts, data_errors
from lamina.fusion import FUSIONS
from lamina.fusion.base import FusionConfig
from lamina.heads import HEADS
from lamina.heads.sequence_classification import SequenceClassification
from lamina.prediction.predict import Predictor
from lamina.store import load, save_bank
from lamina.store.files import damaged, read_json, read_steady, write_json
from lamina.store.manifest import MANIFEST, Manifest
from lamina.store.models import load_processor
from lamina.tasks import kind_of
from lamina.tasks.metrics import metrics_of, named_class
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.train.fit import fit
from lamina.train.options import FitOptions, PassOptions
from lamina.train.plan import usual_epochs
from lamina.utils import JSON, JSONObject, check_type, is_dir

if TYPE_CHECKING:
    from sklearn.utils import Tags
    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.prediction.backends import Backend
    from lamina.tasks.class_results import ClassResults
    from lamina.tasks.outputs import Results
    from lamina.train.results import FitResult


# A hub id, a folder or "minilm"; or a loaded model.
ModelLike: TypeAlias = "str | Path | PreTrainedModel"
# What scikit-learn calls a random state: a seed, a generator, or None for the global generator.
RandomState: TypeAlias = "int | np.integer | np.random.RandomState | None"
_CACHED_MODELS = 2  # a search runs all folds with one model before it moves on to the next
_loading = Lock()  # threads that need the same model at the same time wait for a single load


def model_of(model: ModelLike, processor: Processor | None, op: str) -> tuple[PreTrainedModel, Processor]:
    """Return the model and its processor. The two models that were last used by name are cached.

    Raises ConfigError if `model` is neither a name nor a model, or if there is no processor; and the errors of
    `lamina.load`.

    Args:
        model: Hub id, folder or "minilm"; or a loaded model, which is returned itself.
        processor: Tokenizer to use. None: the tokenizer that was saved with the model.
        op: Name of the calling method, which begins the error messages.
    """
    if isinstance(model, str | Path):
        with _loading:
            files = Path(model).glob("*") if is_dir(model) else ()
            times = sorted((path.name, path.stat().st_mtime_ns) for path in files if path.is_file())
            loaded, saved_processor = _load(str(model), tuple(times))
        return loaded, _checked(saved_processor if processor is None else processor, op)
    if not hasattr(model, "config"):
        came = f"model is {type(model).__name__}"
        raise ConfigError(f"{op}: {came}; it must be a hub id, a folder, 'minilm', or a model of transformers.")
    if processor is None and (name := getattr(model, "name_or_path", "")):
        processor = load_processor(name, model)
    return model, _checked(processor, op)


def _checked(processor: Processor | None, op: str) -> Processor:
    if processor is None:
        raise ConfigError(f"{op}: there is no tokenizer with the model; one is needed. Give it as `processor`.")
    return processor


@lru_cache(maxsize=_CACHED_MODELS)
def _load(name: str, file_times: tuple[tuple[str, int], ...]) -> tuple[PreTrainedModel, Processor | None]:
    """Return the model `name` and its processor, which is None if there is none saved. Recent results are cached.

    `file_times` are the names and times of the files, if `name` is a folder. Raises the errors of `lamina.load`.
    """
    del file_times  # only part of the cache key, so that a folder whose files changed is loaded again
    return load(name)


T = TypeVar("T")
FILE, FORMAT = "estimator.json", 1
_NOT_SAVED = ("processor", "random_state")  # objects without a JSON form; a `random_state` that is an integer is saved
READER = "reader"  # name of the estimator's reader in its bank
_PARAMETERS = ("epochs", "batch_size", "learning_rate", "max_length")  # also options of `lamina.fit`
_OWN: dict[str, str] = {
    **dict.fromkeys(_PARAMETERS, "it is a parameter by itself"),
    "seed": "use random_state instead",
    "keep": "validation_fraction decides it",
}
_STEP = ("batch_size", "gradient_accumulation_steps")  # options that decide how many texts an optimizer step reads
_COLUMNS = ("n_features_in_", "feature_names_in_", "pairs_")  # attributes that say which columns X of `fit` had
_SHARED = ("model", "processor")  # parameters that clones share instead of copying them


@dataclass(eq=False, repr=False)
class LaminaEstimator(BaseEstimator):
    """Base class of the four estimators: a reader on a frozen model. Each subclass documents its parameters.

    The fields are the parameters, which scikit-learn clones and searches. If an estimator was pickled by an earlier
    version, parameters that it lacks have their defaults. A subclass sets `kind`, and defines `fit`, which sets `bank_`
    to the bank with the reader.
    """

    kind: ClassVar[str]  # name of the kind of task
    bank_: ReaderBank = field(init=False)

    model: ModelLike = "minilm"
    _: KW_ONLY
    processor: Processor | None = None
    epochs: int | None = None
    batch_size: int = 32
    learning_rate: float | None = None
    max_length: int | None = None
    validation_fraction: float | None = None
    random_state: RandomState = 0
    options: Mapping[str, object] | None = None
    backend: Backend = "auto"

    # Training

    def _op(self, method: str = "fit") -> str:
        return f"{type(self).__name__}.{method}"

    def _new_bank(self, columns: Mapping[str, object]) -> ReaderBank:
        """Return a new bank without readers on the estimator's model; delete the `bank_` of an earlier `fit`.

        `columns`, the attributes `_COLUMNS` from `_new_texts`, become fitted attributes. The model and processor
        are also recorded, to load the estimator from a pickle. Raises ConfigError without a tokenizer, and the errors
        of `lamina.load`; the estimator is then as before.
        """
        bank = ReaderBank(*model_of(self.model, self.processor, self._op()))
        for name in ("bank_", *_COLUMNS):  # of an earlier `fit`, which may have other classes or columns
            vars(self).pop(name, None)
        vars(self).update(columns)
        self._base: tuple[ModelLike, Processor | None] = (self.model, self.processor)
        return bank

    def _new_texts(self, X: object) -> tuple[Texts, Mapping[str, object]]:
        """Return X of `fit` as a list of texts or pairs of texts, and the attributes `_COLUMNS` that follow from it.

        Raises DataError if X has another form, as `as_texts` does. The estimator is unchanged.
        """
        other = BaseEstimator()  # `fit` may yet be refused
        return as_texts(other, X, self._op(), reset=True), vars(other)

    def _seed(self) -> int:
        """Return `random_state` if it is an integer; otherwise draw an integer from it, as scikit-learn does.

        Raises DataError if scikit-learn does not accept `random_state`.
        """
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        with data_errors(self._op()):
            return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _task(self, split: Split, targets: Targets, seed: int) -> Task:
        """Return a task whose training split is `split`, with the labels and problem type of `targets`.

        With the parameter `validation_fraction`, that share of the rows becomes the validation split, with the same
        share of each class if each text has one; `seed` decides which rows. Raises DataError if scikit-learn refuses
        the fraction, UnknownNameError if y lacks the class `positive`, and ConfigError if that is no name of a class.
        """
        parts = {"train": split}
        if self.validation_fraction is not None:
            with data_errors(self._op()):
                train, validation = train_test_split(
                    range(len(split)),
                    test_size=self.validation_fraction,
                    random_state=seed % 2**32,
                    stratify=targets.stratify,
                )
            parts = {"train": split.select_rows(sorted(train)), "validation": split.select_rows(sorted(validation))}
        problem, labels, positive = targets.problem_type, targets.labels, getattr(self, "positive", None)
        positive = None if positive is None else named_class(self._op(), positive, labels)
        metrics = metrics_of(kind_of(self.kind), problem, labels, None, positive, self._op())
        name = type(self).__name__
        return Task(kind_of(self.kind), problem, labels, metrics[0], metrics, parts, name, positive)

    def _reader(self, task: Task, given: object, seed: int, **settings: object) -> Reader:
        """Return the config of the estimator's reader, with the labels and problem type of the task.

        `given` is the estimator's parameter `reader`: None (the task's default reader), a fusion (it gets the
        default head, with mean pooling) or a whole reader, whose own seed is not used. `seed` decides the initial
        weights. `settings` that are not None replace settings of the head; those that it does not have are ignored.
        Raises ConfigError if `given` is anything else, or a reader for another kind of task, with `weights`, or with
        class weights of other labels.
        """
        default = Reader.default(task)
        if given is None:
            fusion, head, stack = default.fusion, default.head, None
        elif isinstance(given, FusionConfig):
            fusion, head, stack = given, default.head, None
            if isinstance(head, SequenceClassification):
                head = replace(head, pooling="mean")
        elif isinstance(given, Reader) and type(given.head) is type(default.head):
            fusion, head, stack = given.fusion, given.head, given.stack
        else:
            came = f"reader is {type(given.head if isinstance(given, Reader) else given).__name__}"
            rule = "it must be None, a fusion such as lamina.ScalarMix(), or a lamina.Reader with a"
            raise ConfigError(f"{self._op()}: {came}; {rule} {type(default.head).__name__}.")
        own: dict[str, object] = {"labels": task.labels, "problem_type": task.problem_type}
        own |= {name: value for name, value in settings.items() if value is not None}
        known = {field.name for field in fields(head)}
        if isinstance(given, Reader) and given.weights is not None:
            raise ConfigError(
                f"{self._op()}: reader has weights, and fit trains from new ones. Add it to a bank instead."
            )
        if getattr(head, "class_weights", None) and "class_weights" not in own and head.labels != task.labels:
            came = f"the reader's class_weights are for {', '.join(head.labels)}, and y has {', '.join(task.labels)}"
            raise ConfigError(f"{self._op()}: {came}, in this order. Give class_weight to the estimator instead.")
        head = replace(head, **{key: value for key, value in own.items() if key in known})
        return Reader(fusion, head, stack=stack, seed=seed)

    def _train(self, bank: ReaderBank, task: Task, seed: int, targets: Targets) -> None:
        """Train the bank's reader on the task with `lamina.fit` and `seed`, and set `bank_` and `result_`.

        `targets` are those that the task was made of; the scores of scaled numbers are converted to the units of y.

        Without `epochs`, their number depends on the number of rows. The last epoch's weights stay, or the best epoch's
        if there is a validation split. Unless `options` has `cache`, states are cached in float32 for this run. Raises
        ConfigError if `options` is not a mapping, or has an option that is a parameter of the estimator; and the errors
        of `lamina.fit`.
        """
        own: JSONObject = {name: getattr(self, name) for name in _PARAMETERS}
        own |= {"seed": seed, "keep": "last" if self.validation_fraction is None else "best"}
        if not isinstance(self.options, Mapping | None):
            came = f"options are a {type(self.options).__name__}"
            raise ConfigError(f"{self._op()}: {came}; they must be a mapping of names to values, or None.")
        more = {"progress": False, **(self.options or {})}
        for name in more:
            if name in own:
                raise ConfigError(f"{self._op()}: options has '{name}'; {_OWN[name]}.")
        if own["epochs"] is None:
            rows = {key: value for key, value in (own | more).items() if key in _STEP}
            own["epochs"] = usual_epochs(len(task.split("train")), FitOptions.of(rows, self._op()).step_size)
        if targets.problem_type == "regression" and more.get("output") is not None:
            reason = "its folder would hold a reader of scaled numbers"
            raise ConfigError(
                f"{self._op()}: options has 'output'; {reason}. Leave it out, and call save(folder) instead."
            )
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            kept: JSONObject = {"cache": "auto", "cache_dtype": "float32", "cache_dir": folder}
            self.result_ = fit(bank, {READER: task}, **({} if "cache" in more else kept) | own | more)
        if targets.problem_type == "regression":
            self.result_ = _in_units(self.result_, targets)
            info = bank[READER].info
            info["scores"] = _mae_in_units(info["scores"], targets)
        self.bank_ = bank.eval()

    # Use

    def _results(self, split: Split, method: str) -> dict[str, Results]:
        """Return reader name -> the reader's outputs for a split. Messages begin with the calling `method`.

        A pass reads as many rows as `eval_batch_size` in `options` says, or twice `batch_size`. Warnings are logged if
        texts are blank or too long to be read whole. Raises UnknownNameError if `backend` does not exist, and
        LaminaError if it cannot be used, or an output is NaN or infinite.
        """
        given = {"batch_size": self.batch_size, "eval_batch_size": (self.options or {}).get("eval_batch_size")}
        rows = FitOptions.of(given, self._op(method)).scoring_batch_size
        predictor = Predictor(self.bank_, PassOptions(batch_size=rows), backend=self.backend)
        predictor.choose_engine()
        prepared = predictor.prepared({self.kind: split})
        prepared.warn(self._op(method))
        results = predictor.results(prepared)
        predictor.warn_of_blank(self._op(method))
        return results

    def _logits_of(self, X: object, method: str) -> dict[str, Tensor]:
        """Return reader name -> logits `[texts, labels]` for texts X; messages begin with the calling `method`.

        The readers' heads must give one row per text. Raises NotFittedError before `fit`, DataError if X has the wrong
        form, and the errors of `_results`.
        """
        self._check_fitted()
        results = self._results(Split.of(self._texts(X, method)), method)
        return {name: cast("ClassResults", result).logits for name, result in results.items()}

    def _texts(self, X: object, method: str) -> Texts:
        """Return X as a list of texts or pairs of texts; raise DataError if it has another form, as `as_texts` does.

        X is compared with the attributes `_COLUMNS` from `fit`. Messages begin with the calling `method`.
        """
        return as_texts(self, X, self._op(method), reset=False)

    def _check_fitted(self) -> None:
        check_is_fitted(self, "bank_")

    # Methods that scikit-learn requires

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.one_d_array, tags.input_tags.two_d_array = True, True, False
        return tags

    def __sklearn_clone__(self) -> Self:
        shared = {name: getattr(self, name) for name in _SHARED}
        plain = type(self)(**{**self.get_params(deep=False), **dict.fromkeys(_SHARED)})
        vars(plain).update({name: value for name, value in vars(self).items() if name.startswith("_sklearn")})
        copied = cast("Self", super(LaminaEstimator, plain).__sklearn_clone__())
        return copied.set_params(**shared)

    def __getstate__(self) -> dict[str, object]:
        state: dict[str, object] = dict(vars(self))
        if (bank := state.pop("bank_", None)) is not None:
            state["_files"] = files_of(cast("ReaderBank", bank))
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        files = (state := dict(state)).pop("_files", None)
        super().__setstate__(state)
        if files is not None:
            self.bank_ = bank_of(cast("Mapping[str, bytes]", files), *model_of(*self._base, "load"))

    # On disk

    def save(self, folder: str | Path) -> None:
        """Save a fitted estimator in a folder: its bank, its parameters and its fitted attributes.

        `lamina predict` and `lamina serve` can use the folder. The model itself is not saved; nor are `result_`,
        `processor`, and a `random_state` that is not an integer.

        Args:
            folder: Folder to write to; it is created if it does not exist. An estimator or bank saved there before is
                replaced.

        Raises:
            NotFittedError: If `fit` was not called.
            StoreError: If the folder cannot be written, or holds other files.
            NotFiniteError: If a weight of the reader is NaN or infinite.
            ConfigError: If the weights of the model have changed since `fit`.
        """
        self._check_fitted()
        folder = Path(check_type(self._op("save"), "folder", folder, "str | Path"))
        params = {name: _to_json(value) for name, value in self.get_params(deep=False).items()}
        # JSON cannot hold a loaded model, a processor or a random generator
        params |= {name: None for name in _NOT_SAVED if not isinstance(params[name], int)}
        params["model"] = params["model"] if isinstance(params["model"], str) else None
        learnt = {
            name: _to_json(value)
            for name, value in vars(self).items()
            if name.endswith("_") and not name.startswith("_") and name not in ("bank_", "result_")
        }
        facts = {"format": FORMAT, "estimator": type(self).__name__, "params": params, "learnt": learnt}
        save_bank(self.bank_, folder, files={FILE: lambda path: write_json(path, facts)})

    @classmethod
    def load(cls, folder: str | Path, *, model: ModelLike | None = None, processor: Processor | None = None) -> Self:
        """Load an estimator that `save` wrote. Its parameters `model` and `processor` become those that are used here.

        Args:
            folder: Folder that `save` wrote.
            model: Hub id, folder or "minilm"; or a loaded model. None: the model that the estimator was fitted with, by
                its name.
            processor: Tokenizer of the model. None: the one saved with the model.

        Raises:
            StoreError: If the folder is missing or damaged, or was saved by another class; or if `model` is None, and
                the model that the estimator was fitted with has no name.
            BaseMismatchError: If the model is not the one that the estimator was fitted with, or the processor makes
                other inputs.
            NotFiniteError: If a weight holds NaN or infinity.
            ModelNotFoundError: If the model cannot be found.
            UnsupportedModelError: If transformers does not know the family of the model.
            UnknownNameError: If a fusion or head that was saved does not exist.
            ConfigError: If there is no tokenizer with the model.
        """
        place = Path(check_type(f"{cls.__name__}.load", "folder", folder, "str | Path"))

        def read() -> Self:
            estimator, base = read_estimator(place, cls)
            if (named := base if model is None else model) is None:
                came = f"{folder} names no model, since the one it was fitted on has no name"
                raise StoreError(f"load: {came}. Give `model`, and its `processor`.")
            estimator._base = (named, processor)
            estimator.model, estimator.processor = estimator._base
            loaded = model_of(*estimator._base, f"{cls.__name__}.load")
            estimator.bank_ = ReaderBank.from_pretrained(place, *loaded)
            return estimator

        return read_steady(place, MANIFEST, read)


def files_of(bank: ReaderBank) -> dict[str, bytes]:
    """Return relative path -> content of the files that `bank.save_pretrained` writes; its errors pass through."""
    with TemporaryDirectory() as folder:
        bank.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def bank_of(files: Mapping[str, bytes], model: PreTrainedModel, processor: Processor) -> ReaderBank:
    """Return a bank on `model` and `processor` from the files that `files_of` returned.

    Raises BaseMismatchError if `model` is not the model that the bank was trained on. Other errors are those of
    `ReaderBank.from_pretrained`.
    """
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return ReaderBank.from_pretrained(folder, model, processor)


def read_estimator(folder: Path, kind: type[T]) -> tuple[T, str | None]:
    """Return the estimator that `LaminaEstimator.save` wrote to a folder, without its bank, and the name of its model.

    The name is None if the model has none. Raises StoreError if `estimator.json` is missing or damaged, has another
    format, or is from a different class than `kind`, the estimator's class. Other errors are those of `_from_json`.
    """
    path = folder / FILE
    if not path.is_file():
        way = " It is a bank: ask it by lamina.predict(folder, texts), or open it by ReaderBank.from_pretrained."
        hint = way if (folder / MANIFEST).is_file() else ""
        raise StoreError(f"load: {folder} has no {FILE}; give a folder that the `save` of an estimator wrote.{hint}")
    facts = read_json(path)
    if facts.get("format") != FORMAT:
        what = f"has format {facts.get('format')}; this version of lamina reads format {FORMAT}"
        raise StoreError(f"load: {path} {what}. Use the version that saved it, or a newer one.")
    if facts.get("estimator") != kind.__name__:
        raise StoreError(f"load: {folder} was saved by a {facts.get('estimator')}; it is not a {kind.__name__}.")
    with error_context(f"in {path}"), convert_errors(lambda reason: damaged(path, f"cannot be understood ({reason})")):
        params, learnt = ({key: _from_json(cell) for key, cell in facts[part].items()} for part in ("params", "learnt"))
        estimator = kind(**params)
        vars(estimator).update(learnt)
        return estimator, cast("str | None", params["model"]) or Manifest.read(folder / MANIFEST).base.id


def _to_json(value: object) -> JSON:
    """Return a parameter or fitted attribute in a form that JSON can hold, from which `_from_json` restores it.

    Readers, fusions, arrays and dictionaries become objects whose first key names their type.
    """
    if isinstance(value, Reader):
        parts = {"fusion": FUSIONS.to_dict(value.fusion), "head": HEADS.to_dict(value.head)}
        return {"reader": {**parts, "stack": value.stack, "seed": value.seed}}
    if isinstance(value, FusionConfig):
        return {"fusion": FUSIONS.to_dict(value)}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": value.dtype.str}
    if isinstance(value, dict):
        return {"pairs": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    plain = value.item() if isinstance(value, np.generic) else str(value) if isinstance(value, Path) else value
    return cast("JSON", plain)


def _from_json(value: JSON) -> object:
    """Return the parameter or fitted attribute for which `_to_json` returned `value`.

    Raises UnknownNameError if a fusion or head in it does not exist, and ConfigError if one of its settings is not
    allowed.
    """
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "reader" in value:
        reader = dict(value["reader"])
        return Reader(FUSIONS.from_dict(reader.pop("fusion")), HEADS.from_dict(reader.pop("head")), **reader)
    if "fusion" in value:
        return FUSIONS.from_dict(value["fusion"])
    if "array" in value:
        return np.array(value["array"], dtype=value["dtype"])
    return {_from_json(key): _from_json(item) for key, item in value["pairs"]}


def _in_units(result: FitResult, targets: Targets) -> FitResult:
    """Return the result of a regressor's training with errors and constants in the units of y, not of the targets."""
    results: dict[str, tuple[ClassResults, Sequence[str]]] = {
        name: (cast("ClassResults", of_name).in_units(targets.mean, targets.scale), metrics)
        for name, (of_name, metrics) in result.results.items()
    }
    baselines = dict(result.baselines)
    for name, (of_name, metrics) in results.items():
        if (found := of_name.baseline(metrics)) is not None:
            baselines[name] = {"always": found[0], **found[1]}
    return replace(
        result,
        best={name: _mae_in_units(row, targets) for name, row in result.best.items()},
        history=[_mae_in_units(row, targets) for row in result.history],
        table=[_mae_in_units(row, targets) for row in result.table],
        test={name: _mae_in_units(row, targets) for name, row in result.test.items()},
        baselines=baselines,
        results=results,
    )


def _mae_in_units(row: Mapping[str, Any], targets: Targets) -> dict[str, Any]:
    """Return a row of scores, in which only the mean absolute error has a unit, in the units of y."""
    return {**row, "mae": row["mae"] * targets.scale} if "mae" in row else dict(row)
