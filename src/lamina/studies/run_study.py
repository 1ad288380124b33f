"""Run one study of a recipe: load what it reads, call its function, and save what it found."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError, create_model, model_validator

from lamina.data.read import read_chunks
from lamina.errors import ConfigError, check_known, error_context
from lamina.recipes.edits import check_selector
from lamina.recipes.load_tasks import load_task, repeats
from lamina.recipes.schema import TaskRecipe
from lamina.recipes.strict_yaml import Strict, checked, error_at, raise_first, read_yaml
from lamina.registry import STUDIES
from lamina.store import load, load_bank
from lamina.store.files import claimed
from lamina.store.models import saved_class
from lamina.studies.study import FILES
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from lamina.studies.study import Study
    from lamina.tasks.task import Task


def run_study(
    name: str,
    recipe: StudyRecipe,
    *,
    data: str | Path | None = None,
    output: Path | None = None,
    resume: bool = False,
    progress: bool = True,
    ray: str | None = None,
) -> Study:
    """Run a study of a recipe.

    Args:
        name: Of the study, such as "similarity".
        recipe: From `load_study_recipe`.
        data: Folder with one subfolder per preset, that files and models may be relative to; None: presets come from
            the hub.
        output: Folder for the study, and for the cells of one that has cells; None: nothing is written.
        resume: Run no cell of that folder again that has ended.
        progress: Show a progress bar.
        ray: Where a study of cells runs them; see `lamina.studies.runner.run_cells`.

    Returns:
        The study; its settings have the recipe, and cells that failed under "failures".

    Raises:
        UnknownNameError: If there is no such study.
        ConfigError: If the recipe lacks what the study needs, or `resume` or `ray` is given to one without cells.
        StoreError: If the folder cannot be written, or holds such files that are no study's, before anything runs.
    """
    options = recipe.options(name)
    parameters = parameters_of(name)
    given = {"output": output, "resume": resume, "progress": progress, "ray": ray}
    for key in ("resume", "ray"):
        if given[key] and key not in parameters:
            raise ConfigError(f"study {name}: {key} is given; the study is one pass and has no cells. Leave it out.")
    controls = {key: value for key, value in given.items() if key in parameters}
    used = recipe.model_copy(update={"studies": {name: options}}).model_dump(exclude_unset=True)
    with nullcontext() if output is None else claimed(Path(output), FILES):
        study = STUDIES.get(name)(**{**_inputs(name, recipe, data), **_opened(name, options, data), **controls})
        study = replace(study, settings={**study.settings, "recipe": used})
        if output is not None:
            study.save(output)
    return study


def _inputs(name: str, recipe: StudyRecipe, data: str | Path | None) -> dict[str, Any]:
    """The model, tasks and texts of a recipe, as far as the study takes them."""
    parameters, inputs = parameters_of(name), dict[str, Any]()
    tasks = load_tasks(recipe, data)
    if "texts" in parameters and recipe.texts:
        inputs["texts"] = load_texts(recipe, tasks, data)
    if "tasks" in parameters and tasks:
        inputs["tasks"] = tasks
    where = source_of(recipe.model, data)
    if "base" in parameters:
        inputs["base"] = where
    if "model" in parameters and "str" in str(parameters["model"].annotation):
        if recipe.head is not None:
            rule = "the study loads the model itself, with the head it was saved with or one for each task"
            raise ConfigError(f"study {name}: head is '{recipe.head}'; {rule}. Leave it out.")
        inputs["model"] = where  # cell by cell
    elif "model" in parameters:
        inputs["model"], processor = load(where, recipe.head or saved_class(where))
        inputs |= {"processor": processor} if "processor" in parameters else {}
    return inputs


def load_tasks(recipe: StudyRecipe, data: str | Path | None) -> dict[str, Task]:
    """The tasks of a recipe with their data."""
    return {name: repeats(body, load_task(name, body, data))[0] for name, body in recipe.tasks.items()}


def load_texts(recipe: StudyRecipe, tasks: Mapping[str, Task], data: str | Path | None) -> list[Any]:
    """The texts of a recipe, or pairs of texts."""
    texts = recipe.texts
    if texts is None or texts.lines is not None:
        return [] if texts is None else list(texts.lines or ())[: texts.limit]
    if texts.task is not None:
        return list(islice(tasks[texts.task].split(texts.part).texts, texts.limit))
    chunks = read_chunks(Path(data or ".") / str(texts.file), columns=[texts.column])
    return list(islice((text for chunk in chunks for text in chunk.column(texts.column)), texts.limit))


def source_of(name: str, data: str | Path | None) -> str:
    """Where a model is: a folder in the data folder, one here, in full so that workers find it too, or a hub id."""
    places = [Path(name)] if data is None else [Path(data) / name, Path(name)]
    return next((str(place.absolute()) for place in places if is_dir(place)), name)


def _opened(name: str, options: dict[str, Any], data: str | Path | None) -> dict[str, Any]:
    """Options that name a model or a bank, with that in place of the name."""
    opened = dict(options)
    for key, value in options.items():
        annotation = str(parameters_of(name)[key].annotation)
        if value is None or not any(kind in annotation for kind in ("PreTrainedModel", "ReaderBank", "Checkpoint")):
            continue

        with error_context(f"studies.{name}.{key}"):
            if isinstance(value, dict):
                opened[key] = {own: _open(where, annotation, data) for own, where in value.items()}
            elif isinstance(value, list):
                opened[key] = [_open(where, annotation, data) for where in value]
            else:
                opened[key] = _open(value, annotation, data)
    return opened


def _open(name: str, annotation: str, data: str | Path | None) -> Any:
    where = source_of(name, data)
    if "ReaderBank" in annotation:
        return load_bank(where)
    return load(where, saved_class(where))[0] if "PreTrainedModel" in annotation else where


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
            with error_at(*given[:1]):
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
            with error_at("texts", "task"):
                check_known("texts", [self.texts.task], self.tasks, "task")
        for name, given in self.studies.items():
            with error_at("studies", name):
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
