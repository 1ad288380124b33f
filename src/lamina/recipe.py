"""Recipes: YAML files that say what to train; unknown keys are errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.registry import Registry


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _named(value: Any) -> Any:
    """Allow a bare method name where fields are expected."""
    return {"name": value} if isinstance(value, str) else value


class ReaderRecipe(_Strict):
    """One reader: `fusion` (a name, or a name with settings) and `head` (settings; the labels come from the task)."""

    fusion: dict[str, Any]
    head: dict[str, Any] = Field(default_factory=dict)
    stack: str | None = None
    learning_rate: float | None = None

    _fusion_name = field_validator("fusion", mode="before")(_named)


class TaskRecipe(_Strict):
    """One task: a preset, or files with their columns; and the readers that learn it."""

    preset: str | None = None
    kind: str = "sequence_classification"
    files: dict[str, str] | None = None
    text: str | int = "sentence"
    text_pair: str | int | None = None
    label: str | int = "label"
    labels: list[str] | None = None
    metric: str | None = None
    problem: str | None = None
    limit: int | None = None
    epochs: int | None = None
    learning_rate: float | None = None
    readers: dict[str, ReaderRecipe]

    @model_validator(mode="after")
    def _one_source(self) -> TaskRecipe:
        if (self.preset is None) == (self.files is None):
            raise ValueError("give either 'preset' or 'files', and not both")
        return self


class Recipe(_Strict):
    """A training run.

    Attributes:
        model: Hub id, local folder, or "minilm" for the packaged model.
        revision: Of the model, on the hub.
        seeds: Every reader is trained once per seed, all in the same run.
        tasks: Name -> task and its readers.
        fit: Options of `lamina.fit`.
    """

    model: str
    revision: str | None = None
    seeds: list[int] = Field(default=[0], min_length=1)
    tasks: dict[str, TaskRecipe] = Field(min_length=1)
    fit: dict[str, Any] = Field(default_factory=dict)


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
    return ConfigError(f"recipe: {path}, {'.'.join(where) or 'top level'}: {first['msg'].lower()}. Correct it there.")


def _keys(where: list[str]) -> list[str]:
    kind = Recipe if not where else ReaderRecipe if "readers" in where else TaskRecipe
    return list(kind.model_fields)


def build(registry: Registry, fields: dict[str, Any], where: str) -> Any:
    """Build a method's config from a recipe's fields, with the place in the recipe added to errors."""
    try:
        return registry.from_dict({k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
    except TypeError as error:
        raise ConfigError(f"recipe, {where}: {error}. Correct the value there.") from error


def slug(name: str) -> str:
    """A reader's name from a free text: "last layer + linear" -> "last-layer-linear"."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")
