"""The recipe of studies: a model, tasks and texts that several studies share, and each study's own options."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError, create_model, model_validator

from lamina.errors import ConfigError, check_known
from lamina.recipes.edits import check_selector
from lamina.recipes.located import Strict, at, checked, raise_first, read_yaml
from lamina.recipes.schema import TaskRecipe
from lamina.registry import STUDIES

if TYPE_CHECKING:
    from collections.abc import Callable

SHARED = ("model", "base", "tasks", "texts")  # parameters that the recipe gives to every study that has them
CONTROLS = ("output", "resume", "progress", "ray")  # those that the command gives
_IN_MEMORY = ("processor", "other_processor", "batches")  # those that no recipe can give
_AS_NAMES: dict[str, Any] = {  # what a recipe says by a name or folder
    **dict.fromkeys(("PreTrainedModel", "ReaderBank", "Checkpoint", "Study"), str),
    "Selector": Annotated[Any, checked(check_selector)],
}
_TYPES: dict[str, Any] = {"Any": Any, "Iterable": Iterable, "Literal": Literal, "Mapping": Mapping, "Path": str}


class TextsRecipe(Strict):
    """Texts as they are, of a file, or those of one of the recipe's tasks."""

    lines: list[str] | None = None  # `texts: [...]` for short
    file: str | None = None  # .txt (a text per line), .tsv, .csv, .jsonl, .parquet; relative to the data folder
    column: str = "text"  # of the file
    task: str | None = None
    part: str = "validation"  # of the task
    limit: PositiveInt | None = None  # texts at most

    @model_validator(mode="after")
    def _one_source(self) -> TextsRecipe:
        if sum(source is not None for source in (self.lines, self.file, self.task)) != 1:
            raise ValueError("texts are a list, or have one of 'file' and 'task'")
        return self


def _listed(given: Any) -> Any:
    return {"lines": given} if isinstance(given, list) else given


class StudyTask(TaskRecipe):
    """A task; studies make their own readers."""

    @model_validator(mode="after")
    def _no_readers(self) -> StudyTask:
        if given := sorted(self.model_fields_set & {"readers", "epochs", "learning_rate"}):
            with at(*given[:1]):
                raise ConfigError(
                    f"'{given[0]}' is for lamina train; studies have options of their own under 'studies'"
                )
        return self


class StudyRecipe(Strict):
    """What to study, and how."""

    model: str  # hub id, local folder (one in the data folder too), or "minilm" for the packaged model
    head: str | None = None  # a kind of task or an auto class; by default the class that was saved
    tasks: dict[str, StudyTask] = Field(default_factory=dict)
    texts: Annotated[TextsRecipe | None, BeforeValidator(_listed)] = None
    studies: dict[str, dict[str, Any] | None] = Field(default_factory=dict)  # name -> options; null: as they are

    @model_validator(mode="after")
    def _check(self) -> StudyRecipe:
        if self.texts is not None and self.texts.task is not None:
            with at("texts", "task"):
                check_known("texts", [self.texts.task], self.tasks, "task")
        for name, given in self.studies.items():
            with at("studies", name):
                check_known("recipe", [name], STUDIES.names(), "study")
                options_of(name).model_validate(given or {})
        return self

    def options(self, name: str) -> dict[str, Any]:
        """The options that the recipe gives a study.

        Raises:
            UnknownNameError: If there is no such study.
            ConfigError: If it needs something that the recipe does not have.
        """
        given = self.studies.get(name) or {}
        for key, parameter in parameters_of(name).items():
            shared = key in SHARED and (key in ("model", "base") or bool(getattr(self, key)))
            if parameter.default is parameter.empty and key not in given and not shared:
                place = f"'{key}'" if key in SHARED else f"'{key}' under studies.{name}"
                raise ConfigError(f"study {name}: the recipe has no {place}; it is required.")
        return dict(given)


def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a study's function."""
    function: Callable[..., Any] = STUDIES.get(name)
    return inspect.signature(function).parameters


@cache
def options_of(name: str) -> type[BaseModel]:
    """The options of a study as a pydantic model, none of them required."""
    function: Any = STUDIES.get(name)
    kept = {
        key: parameter
        for key, parameter in parameters_of(name).items()
        if key not in (*(key for key in SHARED if key != "base"), *CONTROLS, *_IN_MEMORY)
    }
    fields: Any = {key: (f"{parameter.annotation} | None", None) for key, parameter in kept.items()}
    options = create_model(name, __base__=Strict, **fields)
    options.model_rebuild(_types_namespace={**function.__globals__, **_TYPES, "Sequence": Sequence, **_AS_NAMES})
    return options


def load_study_recipe(path: str | Path) -> StudyRecipe:
    """Read a recipe; what is wrong with it is raised as one of Lamina's errors, with the line."""
    file = read_yaml(Path(path))
    try:
        return StudyRecipe.model_validate(file.fields)
    except ValidationError as error:
        raise_first(error, op=f"recipe {path}", file=file)
