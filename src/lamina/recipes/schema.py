"""The keys of a recipe, a YAML file that says what to train; all are checked before data or a model is loaded."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from lamina.bank import Reader
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.recipes.edits import arguments_of, check_edit, check_selector, config_of
from lamina.recipes.paper_tables import AS_LIST, FigureRecipe, TableRecipe, check_layout, with_published
from lamina.recipes.strict_yaml import Strict, at, checked, fail, raise_first, read_yaml
from lamina.tasks import kind_of
from lamina.tasks.base import TaskOutline, check_image_size
from lamina.tasks.presets import find_preset
from lamina.tasks.sampling import SampleSize
from lamina.train.grid import MOST_RUNS, check_count, expand, full_key, keys_of
from lamina.train.options import FitOptions, Seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.fusion.base import FusionConfig
    from lamina.heads.base import ReadTask
    from lamina.recipes.strict_yaml import YamlFile
    from lamina.registry import Registry
    from lamina.tasks.presets import Preset

OF_FILES = {  # a preset has its own
    *("kind", "text", "text_pair", "label", "labels", "problem_type", "missing_labels", "by_row", "stratify")
}


def check_options(given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless all keys are options of `lamina.fit` with valid values; a dict per reader is refused."""
    for key in ("epochs", "learning_rate"):
        if isinstance(given.get(key), dict):
            raise ConfigError(f"{key} is {given[key]}; give one number here, and tasks and readers their own")
    FitOptions.of(dict(given))


def _check_edit(edit: dict[str, dict[str, Any]]) -> None:
    if len(edit) != 1:
        raise ConfigError("each edit is one name with its arguments; the next starts with '-'")
    for name, arguments in edit.items():
        with at(name):
            check_edit(name, arguments)


_NAMED = BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)
Options = Annotated[dict[str, Any], checked(check_options)]  # of `lamina.fit`
Grid = dict[str, list[Any]]  # key -> the values it takes


class ReaderRecipe(Strict):
    """One reader, or with a `grid` one for every combination of its values."""

    fusion: Annotated[dict[str, Any], _NAMED]  # a name, or a name with settings; "default": see `Reader.default`
    head: dict[str, Any] = Field(default_factory=dict)  # settings; the labels come from the task
    stack: str | None = None
    learning_rate: PositiveFloat | None = None  # by default the task's
    grid: Grid = Field(default_factory=dict)  # of "fusion.alpha", "head.dropout", "seed", "epochs" ...

    def template(self, task: ReadTask) -> Reader:
        """Return the reader for a task, without the values of its grid."""
        if (fusion := self._fusion()) is None:
            if self.head or len(self.fusion) > 1:
                raise ConfigError("reader: the default reader has settings of its own; give none, or name a fusion.")
            return replace(Reader.default(task), stack=self.stack)
        known = {field.name for field in fields(HEADS.get(str(task.kind))) if field.init}
        given: dict[str, Any] = {"problem_type": task.problem_type}
        if kind_of(str(task.kind)).has_classes:
            given["labels"] = task.labels
        head = {"name": str(task.kind), **{key: value for key, value in given.items() if key in known}, **self.head}
        return Reader(fusion, _build(HEADS, head), self.stack)

    def _fusion(self) -> FusionConfig | None:
        """Return the fusion's config; None for the default reader."""
        return None if self.fusion.get("name") == "default" else _build(FUSIONS, self.fusion)

    def keys(self, task: ReadTask) -> list[str]:
        """Return every key that the grid may have."""
        reader = self.template(task)
        return keys_of(reader.fusion, reader.head)

    def check(self, task: ReadTask) -> None:
        """Build the reader with every value of its grid; raise a ValidationError that names the key that is wrong."""
        with at("fusion", blame=self.fusion):
            self._fusion()
        with at("head", blame=self.head):
            template = self.template(task)
        with at("grid", blame=self.grid):
            for spec in expand(template, self.grid):
                if spec.reader is not None:
                    check_selector(spec.reader.fusion.selector())


def _build(registry: Registry, given: dict[str, Any]) -> Any:
    """Return a fusion or head config from a recipe's fields; raise ConfigError if a value has a wrong type."""
    try:
        return registry.from_dict(given)
    except TypeError as error:
        numbers = [field.name for field in fields(registry.get(given["name"])) if str(field.type) in ("int", "float")]
        texts = [key for key in numbers if isinstance(given.get(key), str)]
        what = f"{texts[0]} is {given[texts[0]]!r}; it must be a number, such as 0.001" if texts else str(error)
        raise ConfigError(f"{given['name']}: {what}.") from error


class SubsampleRecipe(Strict):
    """Fewer training rows, taken at random without replacement: exactly one of the first three says how many."""

    per_class: int | None = None  # times the number of classes
    fraction: float | None = None
    rows: int | None = None
    stratified: bool = False  # class by class
    repeats: Annotated[int, Field(gt=0, le=MOST_RUNS)] = (
        1  # with the seeds 0, 1, ...; each has rows and runs of its own
    )

    @model_validator(mode="after")
    def _one_size(self) -> SubsampleRecipe:
        with at(blame=sorted(self.model_fields_set)):
            self.size()
        return self

    def size(self) -> SampleSize:
        """Return the number of rows as a `SampleSize`."""
        return SampleSize(self.per_class, self.fraction, self.rows)


class MethodRecipe(Strict):
    """One way to fine-tune the model itself, or with a `grid` one for every combination of its values.

    Edits are made beforehand, in their order: each a name ("insert") with the arguments of `lamina.insert_` and the
    like. Keys of the grid are such arguments ("insert.layers", where null leaves the edit out) and options of `fit`.
    """

    edits: list[Annotated[dict[str, dict[str, Any]], checked(_check_edit)]] = Field(default_factory=list)
    fit: Options = Field(default_factory=dict)  # in place of the run's
    grid: Grid = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_grid(self) -> MethodRecipe:
        with at("grid"):
            check_count("grid", self.grid)
        for key, values in self.grid.items():
            with at("grid", key):
                edit, dot, argument = full_key(key, self.keys(), "grid").partition(".")
                if not values:
                    raise ConfigError(f"'{key}' has no values")
            for number, value in enumerate(values):
                with at("grid", key, number):
                    check_edit(edit, {argument: value}) if dot else check_options({edit: value})
        return self

    def keys(self) -> list[str]:
        """Return every key that the grid may have."""
        names = dict.fromkeys(name for edit in self.edits for name in edit)
        places = [f"{name}.{argument}" for name in names for argument in arguments_of(name).model_fields]
        return [*places, *FitOptions.model_fields]


class MaskedLMRecipe(Strict):
    """Options of masked language modelling."""

    rows: bool = False  # of each row by itself, a pair as one text; else of blocks of joined rows


def _masked_lm(given: Any) -> Any:
    """Return the options for the value of `masked_lm`: true is the default options, false is None."""
    if isinstance(given, bool):
        return {} if given else None
    if given is None or isinstance(given, dict):
        return given
    raise ValueError("masked_lm must be true, false or {rows: true}")


class TaskRecipe(Strict):
    """One task: a preset, or files with their columns; and the readers that learn it, unless the run has methods."""

    preset: Annotated[str, checked(find_preset)] | None = None
    kind: Annotated[str, checked(kind_of)] = "sequence_classification"
    files: dict[Literal["train", "validation", "test"], str | list[str]] | None = None  # two: translations, by line
    text: str | int = "sentence"
    text_pair: str | int | None = None
    pair_separator: str | None = None  # joins a pair into one text; by default the tokenizer's own form of a pair
    label: str | int = "label"
    labels: list[str] | None = None
    metric: str | None = None  # picks the best epoch; by default the usual one of the task
    problem_type: str | None = None
    missing_labels: Literal["error", "drop", "ignore"] = "error"  # what becomes of rows without a label
    by_row: bool = False  # of running text: read each row by itself, not blocks of joined rows
    label_all_tokens: bool = False  # learn from every sub-token of a word, not from its first alone
    limit: PositiveInt | None = None  # training rows at most
    limit_validation: PositiveInt | None = None
    hold_out: bool = False  # choose by a tenth of the training rows; without a test part, validation becomes it
    stratify: bool = True  # set rows aside class by class; else as other tasks over as many rows do
    subsample: SubsampleRecipe | None = None
    image_size: int | None = None  # pixels of images' width and height; by default as the model's processor has it
    masked_lm: Annotated[MaskedLMRecipe | None, BeforeValidator(_masked_lm)] = None  # predict hidden tokens instead
    epochs: PositiveInt | None = None  # by default the run's
    learning_rate: PositiveFloat | None = None  # by default the run's
    readers: dict[str, ReaderRecipe] = Field(default_factory=dict)  # method -> reader

    @model_validator(mode="after")
    def _check_form(self) -> TaskRecipe:
        preset = self._preset
        if self.pair_separator is not None and (self.text_pair if preset is None else preset.columns[1]) is None:
            raise ValueError("'pair_separator' is for pairs of texts; this task has one text a row")
        with at(blame=["label_all_tokens"]):
            self.outline().kind.check_tags(label_all_tokens=self.label_all_tokens)
        return self

    @model_validator(mode="after")
    def _check(self) -> TaskRecipe:
        if (self.preset is None) == (self.files is None):
            raise ValueError("give either 'preset' or 'files', and not both")
        extra = sorted(OF_FILES & self.model_fields_set)
        if self.preset is not None and extra:
            raise ValueError(f"'{extra[0]}' is for files; the preset '{self.preset}' has its own")
        outline = self.outline()
        types = outline.kind.problem_types
        for key, known in (("problem_type", types), ("metric", self.metrics)):
            name = getattr(self, key)
            if name is not None and name not in known:
                fail(UnknownNameError(op="recipe", got=name, known=known, what=key.replace("_", " ")), key)
        if self.image_size is not None:
            with at("image_size"):
                check_image_size(self.image_size, outline.kind, "recipe")
        if self.readers and not outline.kind.readers:
            raise ValueError(f"tasks of kind {outline.kind} have no readers; give the run 'methods'")
        for name, reader in self.readers.items():
            with at("readers", name):
                reader.check(outline)
        return self

    @property
    def _preset(self) -> Preset | None:
        return None if self.preset is None else find_preset(self.preset)[1]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the task may have, as far as they are known without its data."""
        if (preset := self._preset) is not None and self.masked_lm is None:
            return tuple(preset.metrics)
        types = self.outline().kind.problem_types
        chosen = types if self.problem_type is None else [self.problem_type]
        labels = self.labels or ("", "")
        further = [self.outline().kind.further_metrics(problem_type, labels) for problem_type in chosen]
        usual = [types.get(problem_type, ()) for problem_type in chosen]
        return tuple(dict.fromkeys(metric for metrics in (*usual, *further) for metric in metrics))

    def outline(self) -> TaskOutline:
        """Return what is known of the task without its data; two placeholders stand for labels that are not named."""
        second = self.text_pair if self._preset is None else self._preset.columns[1]
        how: dict[str, Any] = {"by_row": self.by_row if self.masked_lm is None else self.masked_lm.rows}
        how |= {"image_size": self.image_size, "pairs": second is not None and self.pair_separator is None}
        if (preset := self._preset) is not None and self.masked_lm is None:
            return TaskOutline(kind_of(preset.kind), preset.problem_type, preset.class_names, **how)
        kind = kind_of(self.kind if self.masked_lm is None else "masked_lm")
        problem_type = self.problem_type or next(iter(kind.problem_types))
        weights = (reader.head.get("class_weights") for reader in self.readers.values())
        listed = (own for own in weights if isinstance(own, list) and own)
        count = 1 if problem_type == "regression" else len(next(listed, (0, 0)))
        return TaskOutline(kind, problem_type, tuple(self.labels or map(str, range(count))), **how)


class Recipe(Strict):
    """A training run.

    Readers of one run share their base, so methods that train it are compared `separately`: each reader in a run of
    its own, on a fresh model. `methods` fine-tune the model itself on every task, each time from a fresh one.
    """

    model: str  # hub id, local folder, or "minilm" for the packaged model
    revision: str | None = None  # on the hub
    architecture: Annotated[dict[str, Any], checked(config_of)] | None = None  # for estimates without the hub
    train_base: bool = False  # fine-tune the model with the readers
    separately: bool = False
    seeds: list[Seed] = Field(default=[0], min_length=1)  # one run each of every reader or method
    evaluate: Literal["test"] | None = None  # score the best epochs on the test parts too
    tasks: dict[str, TaskRecipe] = Field(min_length=1)
    methods: dict[str, MethodRecipe] = Field(default_factory=dict)
    keep: Literal["best", "all", "none"] = "best"  # of a task's fine-tuned models, in the output folder
    fit: Options = Field(default_factory=dict)
    table: Annotated[list[TableRecipe], AS_LIST] = Field(default_factory=lambda: [TableRecipe()])  # see `lamina report`
    figure: Annotated[list[FigureRecipe], AS_LIST] = Field(default_factory=list)

    @model_validator(mode="after")
    def _readers_or_methods(self, info: ValidationInfo) -> Recipe:
        read = [name for name, task in self.tasks.items() if task.readers]
        if self.methods and read:
            raise ValueError(f"task '{read[0]}' has readers and the run has methods; give one or the other")
        if self.methods and (self.train_base or self.separately):
            raise ValueError("'train_base' and 'separately' are for readers; methods train the model, each alone")
        bare = [name for name in self.tasks if name not in read]
        if bare and not self.methods:
            raise ValueError(f"task '{bare[0]}' has no readers; give it some, or give the run 'methods'")
        places = {("methods", name, "fit"): method.fit for name, method in self.methods.items()}
        for place, given in {("fit",): self.fit, **places}.items() if self.methods else ():
            if "seed" in given:
                fail(ConfigError(f"seed is {given['seed']}; methods take theirs from 'seeds'"), *place, "seed")
        check_layout(self, whole=info.context is None)
        return self


def load_recipe(path: str | Path) -> Recipe:
    """Return the recipe of a YAML file; what is wrong in it is raised as an error of Lamina that names the line."""
    file = read_yaml(Path(path))
    return parse_recipe(with_published(file, Path(path)), op=f"recipe {path}", file=file)


def parse_recipe(
    given: dict[str, Any], *, op: str = "recipe", file: YamlFile | None = None, swept: bool = False
) -> Recipe:
    """Check a recipe's fields; errors name `op`, and the lines of the file where there is one.

    Of one that is `swept`, tables and figures may name values that the sweep has taken away.
    """
    try:
        return Recipe.model_validate(given, context={"swept": True} if swept else None)
    except ValidationError as error:
        raise_first(error, op=op, file=file)


def slug(name: str) -> str:
    """Return a text as part of a run's name: "last layer + linear" becomes "last-layer-linear"."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")
