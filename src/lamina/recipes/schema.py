"""Recipes: YAML files that say what to train, checked down to the options before data or a model is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from lamina.bank import Reader
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.recipes.edits import arguments_of, check_edit, check_selector, config_of
from lamina.recipes.located import Strict, at, checked, fail, raise_first, read_yaml
from lamina.tasks import kind_of
from lamina.tasks.presets import find_preset
from lamina.tasks.sampling import SampleSize
from lamina.train.grid import expand, full_key, keys_of
from lamina.train.options import FitOptions

if TYPE_CHECKING:
    from lamina.recipes.located import YamlFile
    from lamina.registry import Registry
    from lamina.tasks.base import TaskLike
    from lamina.tasks.presets import Preset

MASKED_LM = "masked_lm"  # the key of a task that is also the kind it then has
_OF_FILES = ("kind", "text", "text_pair", "label", "labels", "problem_type")  # a preset has its own


@dataclass(frozen=True)
class TaskOutline:
    """What is known of a task before its data is read; see `lamina.tasks.base.TaskLike`."""

    kind: str
    problem_type: str
    labels: tuple[str, ...]


def _check_options(given: dict[str, Any]) -> None:
    for key in ("epochs", "learning_rate"):
        if isinstance(given.get(key), dict):
            raise ConfigError(f"{key} is {given[key]}; give one number here, and tasks and readers their own")
    FitOptions.of(given)


def _check_edit(edit: dict[str, dict[str, Any]]) -> None:
    if len(edit) != 1:
        raise ConfigError("each edit is one name with its arguments; the next starts with '-'")
    for name, arguments in edit.items():
        with at(name):
            check_edit(name, arguments)


def _name_first(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


Options = Annotated[dict[str, Any], checked(_check_options)]


class ReaderRecipe(Strict):
    """One reader, or with a `grid` one for every combination of its values.

    Attributes:
        fusion: A name, or a name with settings.
        head: Settings; the labels come from the task.
        stack: Which stack is read.
        learning_rate: Its own; by default the task's.
        grid: Key ("fusion.alpha", "head.dropout", "seed", "learning_rate", "epochs" ...) to the values it takes.
    """

    fusion: Annotated[dict[str, Any], BeforeValidator(_name_first)]
    head: dict[str, Any] = Field(default_factory=dict)
    stack: str | None = None
    learning_rate: PositiveFloat | None = None
    grid: dict[str, list[Any]] = Field(default_factory=dict)

    def template(self, task: TaskLike) -> Reader:
        """The reader before its grid, for a task.

        Raises:
            UnknownNameError: If the fusion, or a key of the fusion or the head, does not exist.
            ConfigError: If a value does not fit.
        """
        known = {field.name for field in fields(HEADS.get(task.kind)) if field.init}
        given: dict[str, Any] = {"problem_type": task.problem_type}
        if kind_of(task.kind).has_classes:
            given["labels"] = task.labels
        head = {"name": task.kind, **{key: value for key, value in given.items() if key in known}, **self.head}
        return Reader(_build(FUSIONS, self.fusion), _build(HEADS, head), self.stack)

    def keys(self, kind: str) -> list[str]:
        """Every key that the grid may have."""
        return keys_of(FUSIONS.get(str(self.fusion.get("name"))), HEADS.get(kind))

    def check(self, task: TaskLike) -> None:
        """Build everything that the reader and its grid name; a ValidationError says where something does not fit."""
        with at("fusion", blame=self.fusion):
            _build(FUSIONS, self.fusion)
        with at("head", blame=self.head):
            template = self.template(task)
        with at("grid", blame=self.grid):
            for spec in expand(template, self.grid):
                if spec.reader is not None:
                    check_selector(spec.reader.fusion.selector())


def _build(registry: Registry, given: dict[str, Any]) -> Any:
    """Build a config from a recipe's fields; lists become tuples."""
    try:
        return registry.from_dict({key: tuple(v) if isinstance(v, list) else v for key, v in given.items()})
    except TypeError as error:
        texts = [key for key, value in given.items() if isinstance(value, str) and key != "name"]
        what = f"{texts[0]} is {given[texts[0]]!r}; it must be a number, such as 0.001" if texts else str(error)
        raise ConfigError(f"{given['name']}: {what}.") from error


class SubsampleRecipe(Strict):
    """Fewer training rows, taken at random without replacement: exactly one of the first three says how many.

    Attributes:
        per_class: So many times the number of classes.
        fraction: A share of all rows.
        rows: So many.
        stratified: Class by class.
        repeats: Repeat with the seeds 0, 1, ...; every repeat has rows and runs of its own.
    """

    per_class: int | None = None
    fraction: float | None = None
    rows: int | None = None
    stratified: bool = False
    repeats: PositiveInt = 1

    @model_validator(mode="after")
    def _one_size(self) -> SubsampleRecipe:
        with at(blame=sorted(self.model_fields_set)):
            self.size()
        return self

    def size(self) -> SampleSize:
        """How many rows."""
        return SampleSize(self.per_class, self.fraction, self.rows)


class MethodRecipe(Strict):
    """One way to fine-tune the model itself, or with a `grid` one for every combination of its values.

    Attributes:
        edits: What is done to the model beforehand, in this order: each a name ("insert", "reinit", "truncate",
            "freeze", "merge") with the arguments of `lamina.insert_` and the like.
        fit: Options of `lamina.fit`, in place of the run's.
        grid: Key to the values it takes: "insert.layers" and the like (null as layers leaves the edit out), or an
            option of `lamina.fit`.
    """

    edits: list[Annotated[dict[str, dict[str, Any]], checked(_check_edit)]] = Field(default_factory=list)
    fit: Options = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_grid(self) -> MethodRecipe:
        for key, values in self.grid.items():
            with at("grid", key):
                edit, dot, argument = full_key(key, self.keys(), "grid").partition(".")
                if not values:
                    raise ConfigError(f"'{key}' has no values")
            for number, value in enumerate(values):
                with at("grid", key, number):
                    check_edit(edit, {argument: value}) if dot else FitOptions.of({edit: value})
        return self

    def keys(self) -> list[str]:
        """Every key that the grid may have."""
        names = dict.fromkeys(name for edit in self.edits for name in edit)
        places = [f"{name}.{argument}" for name in names for argument in arguments_of(name).model_fields]
        return [*places, *FitOptions.model_fields]


class TaskRecipe(Strict):
    """One task: a preset, or files with their columns; and the readers that learn it, unless the run has methods.

    Attributes:
        preset: A known public task.
        files: Part ("train", "validation", "test") to file; of translations perhaps to two, line by line.
        metric: What picks the best epoch; by default the usual one of the task.
        limit: At most so many training rows.
        limit_validation: At most so many validation rows.
        hold_out: Choose by a tenth of the training rows; the published validation part becomes the test part, where
            there is none with labels.
        subsample: Learn from fewer of the training rows.
        masked_lm: Predict hidden tokens of the texts instead.
        epochs: By default the run's.
        learning_rate: By default the run's.
        readers: Method -> reader.
    """

    preset: Annotated[str, checked(find_preset)] | None = None
    kind: Annotated[str, checked(kind_of)] = "sequence_classification"
    files: dict[Literal["train", "validation", "test"], str | list[str]] | None = None
    text: str | int = "sentence"
    text_pair: str | int | None = None
    label: str | int = "label"
    labels: list[str] | None = None
    metric: str | None = None
    problem_type: str | None = None
    limit: PositiveInt | None = None
    limit_validation: PositiveInt | None = None
    hold_out: bool = False
    subsample: SubsampleRecipe | None = None
    masked_lm: bool = False
    epochs: PositiveInt | None = None
    learning_rate: PositiveFloat | None = None
    readers: dict[str, ReaderRecipe] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> TaskRecipe:
        if (self.preset is None) == (self.files is None):
            raise ValueError("give either 'preset' or 'files', and not both")
        extra = [key for key in _OF_FILES if key in self.model_fields_set]
        if self.preset is not None and extra:
            raise ValueError(f"'{extra[0]}' is for files; the preset '{self.preset}' has its own")
        outline, preset = self.outline(), self.known_preset()
        types = kind_of(outline.kind).problem_types
        chosen = types if self.problem_type is None else [self.problem_type]
        metrics = [metric for problem_type in chosen for metric in types.get(problem_type, ())]
        if preset is not None and not self.masked_lm:
            metrics = preset.metrics
        for key, known in (("problem_type", types), ("metric", dict.fromkeys(metrics))):
            name = getattr(self, key)
            if name is not None and name not in known:
                fail(UnknownNameError(op="recipe", got=name, known=known, what=key.replace("_", " ")), key)
        if self.readers and not kind_of(outline.kind).readers:
            raise ValueError(f"tasks of kind {outline.kind} have no readers; give the run 'methods'")
        for name, reader in self.readers.items():
            with at("readers", name):
                reader.check(outline)
        return self

    def known_preset(self) -> Preset | None:
        """The preset; None for files."""
        return None if self.preset is None else find_preset(self.preset)[1]

    def outline(self) -> TaskOutline:
        """What is known of the task before its data is read; of files that say no labels, two stand for them."""
        preset = self.known_preset()
        if preset is not None and not self.masked_lm:
            return TaskOutline(preset.kind, preset.problem_type, preset.class_names)
        kind = MASKED_LM if self.masked_lm else self.kind
        problem_type = self.problem_type or next(iter(kind_of(kind).problem_types))
        weights = (reader.head.get("class_weights") for reader in self.readers.values())
        count = 1 if problem_type == "regression" else len(next(filter(None, weights), (0, 0)))
        return TaskOutline(kind, problem_type, tuple(self.labels or map(str, range(count))))


class Recipe(Strict):
    """A training run.

    Attributes:
        model: Hub id, local folder, or "minilm" for the packaged model.
        revision: Of the model, on the hub.
        architecture: Settings of the model's config ("model_type" first), for estimates that cannot reach the hub.
        train_base: Fine-tune the model with the readers.
        separately: Train every reader in a run of its own, on a fresh model: what a comparison of fine-tuned methods
            needs, since readers of one run share their base.
        seeds: Every reader or method is trained once per seed.
        evaluate: "test": score the best epochs on the test parts too.
        tasks: Name -> task and its readers.
        methods: Method -> how the model itself is fine-tuned, on each of the tasks, which then have no readers; every
            method, task and seed starts with a fresh model.
        keep: Which fine-tuned models are saved in the output folder: of each task the "best" (by its validation part),
            "all", or "none".
        fit: Options of `lamina.fit`.
    """

    model: str
    revision: str | None = None
    architecture: Annotated[dict[str, Any], checked(config_of)] | None = None
    train_base: bool = False
    separately: bool = False
    seeds: list[int] = Field(default=[0], min_length=1)
    evaluate: Literal["test"] | None = None
    tasks: dict[str, TaskRecipe] = Field(min_length=1)
    methods: dict[str, MethodRecipe] = Field(default_factory=dict)
    keep: Literal["best", "all", "none"] = "best"
    fit: Options = Field(default_factory=dict)

    @model_validator(mode="after")
    def _readers_or_methods(self) -> Recipe:
        read = [name for name, task in self.tasks.items() if task.readers]
        if self.methods and read:
            raise ValueError(f"task '{read[0]}' has readers and the run has methods; give one or the other")
        if self.methods and (self.train_base or self.separately):
            raise ValueError("'train_base' and 'separately' are for readers; methods train the model, each alone")
        bare = [name for name in self.tasks if name not in read]
        if bare and not self.methods:
            raise ValueError(f"task '{bare[0]}' has no readers; give it some, or give the run 'methods'")
        places = {("methods", name, "fit"): method.fit for name, method in self.methods.items()}
        for place, given in {("fit",): self.fit, **places}.items():
            if self.methods and "seed" in given:
                fail(ConfigError(f"seed is {given['seed']}; methods take theirs from 'seeds'"), *place, "seed")
        return self

    @property
    def alone(self) -> bool:
        """Whether every run is by itself, on a fresh model."""
        return self.separately or bool(self.methods)


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe.

    Raises:
        DataError: If the file is missing, not UTF-8 or not YAML, or has a key twice.
        UnknownNameError: If a key, method, edit, option or metric does not exist; names the line and the nearest.
        ConfigError: If a value does not fit; names the line.
    """
    file = read_yaml(Path(path))
    return parse_recipe(file.fields, op=f"recipe {path}", file=file)


def parse_recipe(given: dict[str, Any], *, op: str = "recipe", file: YamlFile | None = None) -> Recipe:
    """Check a recipe's fields; errors name `op`, and the lines of the file where there is one.

    Raises:
        UnknownNameError: If a key, method, edit, option or metric does not exist.
        ConfigError: If a value does not fit.
    """
    try:
        return Recipe.model_validate(given)
    except ValidationError as error:
        raise_first(error, op=op, file=file)


def slug(name: str) -> str:
    """A run's name from a free text: "last layer + linear" -> "last-layer-linear"."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")
