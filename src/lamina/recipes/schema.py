"""Recipes: YAML files that say what to train; unknown keys are errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.registry import Registry


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _named(value: Any) -> Any:
    """Allow a bare method name where fields are expected."""
    return {"name": value} if isinstance(value, str) else value


class ReaderRecipe(_Strict):
    """One reader, or with a `grid` one for every combination of its values.

    Attributes:
        fusion: A name, or a name with settings.
        head: Settings; the labels come from the task.
        stack: Which stack is read.
        learning_rate: Its own; by default the task's.
        grid: Key ("fusion.alpha", "head.dropout", "seed", "learning_rate", "epochs" ...) to the values it takes.
    """

    fusion: dict[str, Any]
    head: dict[str, Any] = Field(default_factory=dict)
    stack: str | None = None
    learning_rate: PositiveFloat | None = None
    grid: dict[str, list[Any]] = Field(default_factory=dict)

    _fusion_name = field_validator("fusion", mode="before")(_named)


class DrawRecipe(_Strict):
    """A few of the training rows, drawn uniformly without replacement: exactly one of the first three says how many.

    Attributes:
        per_class: So many times the number of classes.
        fraction: A share of all rows.
        rows: So many.
        stratified: Draw class by class.
        trials: Repeat with the seeds 0, 1, ...; every trial has rows and readers of its own.
    """

    per_class: PositiveInt | None = None
    fraction: float | None = Field(default=None, gt=0, le=1)
    rows: PositiveInt | None = None
    stratified: bool = False
    trials: PositiveInt = 1

    @model_validator(mode="after")
    def _one_size(self) -> DrawRecipe:
        if len(self.size()) != 1:
            raise ValueError("give one of 'per_class', 'fraction' and 'rows'")
        return self

    def size(self) -> dict[str, Any]:
        """What was given of `per_class`, `fraction` and `rows`."""
        return {key: value for key in ("per_class", "fraction", "rows") if (value := getattr(self, key)) is not None}


class MethodRecipe(_Strict):
    """One way to fine-tune the model itself, or with a `grid` one for every combination of its values.

    Attributes:
        edits: What is done to the model beforehand, in this order: each a name ("insert", "reinit", "truncate",
            "freeze", "merge") with the arguments of `lamina.insert_` and the like.
        fit: Options of `lamina.finetune`, in place of the run's.
        grid: Key to the values it takes: "insert.layers" and the like (null as layers leaves the edit out), or an
            option of `lamina.finetune`.
    """

    edits: list[dict[str, dict[str, Any]]] = Field(default_factory=list)
    fit: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)

    @field_validator("grid")
    @classmethod
    def _some_values(cls, grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in grid.items():
            if not values:
                raise ValueError(f"'{key}' has no values; give it some, or leave it out")
        return grid

    @field_validator("edits")
    @classmethod
    def _one_each(cls, edits: list[dict[str, dict[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
        if any(len(edit) != 1 for edit in edits):
            raise ValueError("each edit is one name with its arguments; start a new line with '-' for the next")
        return edits


_OF_FILES = ("kind", "text", "text_pair", "label", "labels", "problem")  # a preset has its own


class TaskRecipe(_Strict):
    """One task: a preset, or files with their columns; and the readers that learn it, unless the run has methods.

    Attributes:
        preset: A known public task.
        files: Part ("train", "validation", "test") to file; of translations perhaps to two, line by line.
        metric: What picks the best epoch; by default the usual one of the task.
        limit: At most so many training rows.
        limit_validation: At most so many validation rows.
        hold_out: Choose by a tenth of the training rows; the published validation part becomes the test part, where
            there is none with labels.
        draw: Learn from a few of the training rows.
        masked_lm: Guess hidden tokens of the texts instead.
        epochs: By default the run's.
        learning_rate: By default the run's.
        readers: Method -> reader.
    """

    preset: str | None = None
    kind: str = "sequence_classification"
    files: dict[str, str | list[str]] | None = None
    text: str | int = "sentence"
    text_pair: str | int | None = None
    label: str | int = "label"
    labels: list[str] | None = None
    metric: str | None = None
    problem: str | None = None
    limit: PositiveInt | None = None
    limit_validation: PositiveInt | None = None
    hold_out: bool = False
    draw: DrawRecipe | None = None
    masked_lm: bool = False
    epochs: PositiveInt | None = None
    learning_rate: PositiveFloat | None = None
    readers: dict[str, ReaderRecipe] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> TaskRecipe:
        if (self.preset is None) == (self.files is None):
            raise ValueError("give either 'preset' or 'files', and not both")
        extra = [key for key in _OF_FILES if key in self.model_fields_set]
        if self.preset is not None and extra:
            raise ValueError(f"'{extra[0]}' is for files; the preset '{self.preset}' has its own. Leave it out")
        return self


class Recipe(_Strict):
    """A training run.

    Attributes:
        model: Hub id, local folder, or "minilm" for the packaged model.
        revision: Of the model, on the hub.
        architecture: Settings of the model's config ("model_type" first), for dry runs that cannot reach the hub.
        train_base: Fine-tune the model with the readers.
        separately: Train every reader in a run of its own, on a fresh model: what a comparison of fine-tuned methods
            needs, since readers of one run share their base.
        seeds: Every reader is trained once per seed.
        evaluate: "test": score the best epochs on the test parts too.
        tasks: Name -> task and its readers.
        methods: Method -> how the model itself is fine-tuned, on each of the tasks, which then have no readers; every
            method, task and seed starts with a fresh model.
        keep: Which fine-tuned models are saved in the output folder: of each task the "best" (by its validation part),
            "all", or "none".
        fit: Options of `lamina.fit`, or with methods of `lamina.finetune`.
    """

    model: str
    revision: str | None = None
    architecture: dict[str, Any] | None = None
    train_base: bool = False
    separately: bool = False
    seeds: list[int] = Field(default=[0], min_length=1)
    evaluate: Literal["test"] | None = None
    tasks: dict[str, TaskRecipe] = Field(min_length=1)
    methods: dict[str, MethodRecipe] = Field(default_factory=dict)
    keep: Literal["best", "all", "none"] = "best"
    fit: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _family(self) -> Recipe:
        if self.architecture is not None and "model_type" not in self.architecture:
            raise ValueError("'architecture' has no 'model_type'; it says which family the settings are of")
        return self

    @model_validator(mode="after")
    def _readers_or_methods(self) -> Recipe:
        read = [name for name, task in self.tasks.items() if task.readers]
        if self.methods and read:
            raise ValueError(f"task '{read[0]}' has readers and the run has methods; give one or the other")
        if self.methods and (self.train_base or self.separately):
            raise ValueError(
                "'train_base' and 'separately' are for readers; methods always train the model, each alone"
            )
        bare = [name for name in self.tasks if name not in read]
        if bare and not self.methods:
            raise ValueError(f"task '{bare[0]}' has no readers; give it some, or give the run 'methods'")
        return self


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe.

    Raises:
        DataError: If the file is missing, not UTF-8, or not YAML.
        UnknownNameError: If a key does not exist.
        ConfigError: If a value cannot be.
    """
    path = Path(path)
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"recipe: {path} cannot be read ({error.strerror}); a recipe is a YAML file. Check the path."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"recipe: {path} is not YAML; {reason}. Correct it there.", path=str(path)) from error
    if not isinstance(fields, dict):
        raise DataError(f"recipe: {path} holds no keys; it needs 'model' and 'tasks'. Add them.", path=str(path))
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        raise _plain(error, path) from error


def _plain(error: ValidationError, path: Path) -> Exception:
    """The first thing that is wrong, in one sentence."""
    found = error.errors()
    unknown = [one for one in found if one["type"] == "extra_forbidden"]  # a misspelt key leaves another missing
    first = (unknown or found)[0]
    where = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known = _keys(where[:-1])
        return UnknownNameError(
            op=f"recipe {path}, {'.'.join(where[:-1]) or 'top level'}", got=where[-1], known=known, what="key"
        )
    said = first["msg"].removeprefix("Value error, ")
    return ConfigError(
        f"recipe: {path}, {'.'.join(where) or 'top level'}: {said[0].lower()}{said[1:]}. Correct it there."
    )


def _keys(where: list[str]) -> list[str]:
    """The keys of what is at a place in a recipe."""
    if not where:
        return list(Recipe.model_fields)
    if where[-1] == "draw":
        return list(DrawRecipe.model_fields)
    if where[0] == "methods":
        return list(MethodRecipe.model_fields)
    return list((ReaderRecipe if "readers" in where else TaskRecipe).model_fields)


def build(registry: Registry, fields: dict[str, Any], where: str) -> Any:
    """Build a method's config from a recipe's fields, with the place in the recipe added to errors."""
    try:
        return registry.from_dict({k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    except TypeError as error:
        raise ConfigError(f"recipe, {where}: {error}. Correct the value there.") from error


def slug(name: str) -> str:
    """A reader's name from a free text: "last layer + linear" -> "last-layer-linear"."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")
