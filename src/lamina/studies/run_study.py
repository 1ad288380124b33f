"""Read study recipes, and run one study of a recipe: load the model, tasks and texts, call its function, save."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

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
from lamina.utils import JSON, is_dir

if TYPE_CHECKING:
    from lamina.studies.passes import Text
    from lamina.studies.study import Study
    from lamina.tasks.task import Task

SHARED = ("model", "base", "tasks", "texts")  # parameters that the recipe sets for every study that has them
CONTROLS = ("output", "resume", "progress", "ray")  # parameters that the command sets
_IN_MEMORY = ("processor", "other_processor", "batches")  # parameters that hold objects, which no recipe can name


class Loads(Enum):
    """What a name in a recipe stands for, if the study's parameter is a model, a bank or a checkpoint.

    MODEL and BANK are loaded before the study's function is called. A CHECKPOINT is loaded by the study itself; here
    its name is only replaced by the folder's path, if there is such a folder.
    """

    MODEL = "model"
    BANK = "bank"
    CHECKPOINT = "checkpoint"


# In recipes, models, banks and studies are written as names or folders. An entry of `Loads` marks a name that is
# replaced by what it names before the study's function is called.
_NAMESPACE: dict[str, object] = {
    "PreTrainedModel": Annotated[str, Loads.MODEL],
    "ReaderBank": Annotated[str, Loads.BANK],
    "Checkpoint": Annotated[str, Loads.CHECKPOINT],
    "Study": str,
    "Path": str,
    "Selector": Annotated[Any, checked(check_selector)],
    "Any": Any,
    "Collection": Sequence,  # a recipe has no sets
    "Iterable": Iterable,
    "Literal": Literal,
    "Mapping": Mapping,
    "Sequence": Sequence,
}


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
    """Run one study of a recipe, and save it if `output` is given.

    Raises UnknownNameError if the study does not exist; ConfigError if the recipe lacks something that the study needs,
    or `resume` or `ray` is given for a study without cells (independent pieces of work); and StoreError, before
    anything runs, if the folder cannot be written, or has other files under the names of a study's files. Errors of
    loading and of the study's function are raised as they are.

    Args:
        name: Name of the study, such as "similarity".
        recipe: The recipe, as `load_study_recipe` returns it.
        data: Data folder, with one subfolder per preset; paths of files and models in the recipe may be relative to it.
            None: presets are downloaded from the hub.
        output: Folder for the study, and for its finished cells if the study has cells. None: nothing is written.
        resume: Do not repeat cells that are already finished in `output`.
        progress: Show a progress bar, if the study has one.
        ray: Where to run cells as Ray tasks; see `lamina.studies.runner.run_cells`. None: in this process.

    Returns:
        The study. `settings["recipe"]` is the recipe with this study alone. If the study has cells,
        `settings["failures"]` lists those that failed.
    """
    options = recipe.options(name)
    parameters = parameters_of(name)
    controls = {"output": output, "resume": resume, "progress": progress, "ray": ray}
    for key in ("resume", "ray"):
        if controls[key] and key not in parameters:
            raise ConfigError(f"study {name}: {key} is given, but the study is one pass without cells. Leave it out.")
    controls = {key: value for key, value in controls.items() if key in parameters}
    used = recipe.model_copy(update={"studies": {name: options}}).model_dump(exclude_unset=True)
    with nullcontext() if output is None else claimed(Path(output), FILES):
        arguments = {**_inputs(name, recipe, data), **_load_options(name, options, data), **controls}
        study: Study = STUDIES.get(name)(**arguments)
        study = replace(study, settings={**study.settings, "recipe": used})
        if output is not None:
            study.save(output)
    return study


def _inputs(name: str, recipe: StudyRecipe, data: str | Path | None) -> dict[str, object]:
    """Return the arguments of a study's function that the recipe sets for all studies.

    These are "model" or "base", "processor", "tasks" and "texts". A `model` parameter that accepts names gets the
    model's name, because the study's cells load it; otherwise the model and its processor are loaded here. Arguments
    that the study or the recipe lacks are left out. Raises ConfigError if the recipe has a `head`, but the study loads
    the model itself; and LaminaError if tasks, texts or the model cannot be loaded.
    """
    parameters, inputs = parameters_of(name), dict[str, object]()
    tasks = load_tasks(recipe, data)
    if "texts" in parameters and recipe.texts:
        inputs["texts"] = load_texts(recipe, tasks, data)
    if "tasks" in parameters and tasks:
        inputs["tasks"] = tasks
    source = source_of(recipe.model, data)
    if "base" in parameters:
        inputs["base"] = source
    if "model" in parameters and str in get_args(_types_of(name, ("model",))["model"]):
        if recipe.head is not None:
            rule = "the study loads the model itself, with the head it was saved with or one for each task"
            raise ConfigError(f"study {name}: head is '{recipe.head}'; {rule}. Leave it out.")
        inputs["model"] = source
    elif "model" in parameters:
        inputs["model"], processor = load(source, recipe.head or saved_class(source))
        inputs |= {"processor": processor} if "processor" in parameters else {}
    return inputs


def load_tasks(recipe: StudyRecipe, data: str | Path | None) -> dict[str, Task]:
    """Load the tasks of a recipe with their rows, and return task name -> task.

    Files and presets are looked for in the folder `data`. None: files are relative to the current folder, and presets
    come from the hub. If a task is subsampled with repeats, only the first repeat is returned. Raises DataError if data
    cannot be read or does not fit its task; ConfigError if a limit or the size of a subsample is not allowed; and
    UnknownNameError if a task lacks the metric that the recipe names.
    """
    return {name: repeats(body, load_task(name, body, data))[0] for name, body in recipe.tasks.items()}


def load_texts(recipe: StudyRecipe, tasks: Mapping[str, Task], data: str | Path | None) -> list[Text]:
    """Return the texts, or pairs of texts, that a recipe names, the first `limit` of them; [] if it names none.

    The texts are a list, a split of one of the recipe's `tasks` (from `load_tasks`), or a column of a file. The file's
    path is relative to the folder `data`; None: to the current folder. Raises DataError if the file cannot be read or
    lacks the column, and UnknownNameError if the task has no such split.
    """
    texts = recipe.texts
    if texts is None or texts.lines is not None:
        return [] if texts is None else [*islice(texts.lines or (), texts.limit)]
    if texts.task is not None:
        return list(islice(tasks[texts.task].split(texts.part).texts, texts.limit))
    chunks = read_chunks(Path(data or ".") / str(texts.file), columns=[texts.column])
    return list(islice((text for chunk in chunks for text in chunk.column(texts.column)), texts.limit))


def source_of(name: str, data: str | Path | None) -> str:
    """Return where to load a model from: the absolute path of a folder, or else `name` itself as a hub id.

    A folder `name` is looked for in the data folder first, then in the current folder. `data` is the data folder; None:
    there is none.
    """
    # absolute, so that workers with another current folder find it too
    places = [Path(name)] if data is None else [Path(data) / name, Path(name)]
    return next((str(place.absolute()) for place in places if is_dir(place)), name)


def _load_options(name: str, options: Mapping[str, JSON], data: str | Path | None) -> dict[str, object]:
    """Return a study's `options` with the names of models, banks and checkpoints replaced by what they name.

    Models and banks are loaded; a checkpoint becomes the path of its folder, or stays a hub id. An option may hold one
    name, or a list or mapping of names. `name` is the study's. The folder `data` is searched before the current one;
    None: only the current one. Raises LaminaError, naming the option, if loading fails.
    """
    loaded: dict[str, object] = dict(options)
    types = _types_of(name, tuple(options))
    for key, value in options.items():
        what = _stands_for(types[key])
        if value is None or what is None:
            continue
        with error_context(f"studies.{name}.{key}"):
            loaded[key] = _load(value, what, data)
    return loaded


def _load(names: JSON, what: Loads, data: str | Path | None) -> object:
    """Load the model or bank that a recipe names by hub id or folder; for a checkpoint, only return the id or path.

    `what` says whether `names` are models, banks or checkpoints. A list or mapping of names gives a list or mapping of
    results. The folder `data` is searched before the current one. Raises LaminaError if loading fails.
    """
    if isinstance(names, Mapping):
        return {own_name: _load(source, what, data) for own_name, source in names.items()}
    if not isinstance(names, str):
        return [_load(source, what, data) for source in cast("Sequence[JSON]", names)]
    source = source_of(names, data)
    if what is Loads.BANK:
        return load_bank(source)
    return load(source, saved_class(source))[0] if what is Loads.MODEL else source


def _stands_for(annotation: object) -> Loads | None:
    """Return what the name in a recipe stands for, from its parameter's `annotation`; None: it is a plain value."""
    if isinstance(annotation, Loads):
        return annotation
    metadata = getattr(annotation, "__metadata__", ())
    return next(filter(None, map(_stands_for, (*metadata, *get_args(annotation)))), None)


class TextsRecipe(Strict):
    """The texts of a study recipe: exactly one of `lines`, `file` and `task`.

    Attributes:
        lines: The texts themselves. In YAML, `texts: [...]` is short for it.
        file: A .txt file with one text per line, or a .tsv, .csv, .jsonl or .parquet file; relative to the data folder.
        column: Column of the file; a .txt file has only "text".
        task: Name of one of the recipe's tasks.
        part: Split of the task.
        limit: Maximum number of texts; None: all of them.
    """

    lines: list[str] | None = None
    file: str | None = None
    column: str = "text"
    task: str | None = None
    part: str = "validation"
    limit: PositiveInt | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TextsRecipe:
        if sum(source is not None for source in (self.lines, self.file, self.task)) != 1:
            raise ValueError("texts are a list, or have one of 'file' and 'task'")
        return self


def _lines(texts: object) -> object:
    return {"lines": texts} if isinstance(texts, list) else texts


class StudyTask(TaskRecipe):
    """A task of a study recipe. Keys that are only for training ("readers", "epochs", "learning_rate") are refused."""

    @model_validator(mode="after")
    def _no_readers(self) -> StudyTask:
        """Raise ValidationError if the task has a key for training only."""
        if names := sorted(self.model_fields_set & {"readers", "epochs", "learning_rate"}):
            with error_at(names[0]):
                raise ConfigError(
                    f"'{names[0]}' is for lamina train; studies have options of their own under 'studies'"
                )
        return self


class StudyRecipe(Strict):
    """A recipe for studies: a model, tasks and texts, and the options of each study.

    Attributes:
        model: Hub id, local folder (possibly inside the data folder), or "minilm" for the packaged model.
        head: Kind of task or auto class to load the model with; None: the class that was saved.
        tasks: Task name -> task.
        texts: Texts to read; None: no texts.
        studies: Study name -> its options. None as options: the defaults.
    """

    model: str
    head: str | None = None
    tasks: dict[str, StudyTask] = Field(default_factory=dict)
    texts: Annotated[TextsRecipe | None, BeforeValidator(_lines)] = None
    studies: dict[str, dict[str, Any] | None] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> StudyRecipe:
        """Raise ValidationError if a study, an option or the task of the texts does not exist, or a value is wrong.

        Missing options are found later, by `options`.
        """
        if self.texts is not None and self.texts.task is not None:
            with error_at("texts", "task"):
                check_known("texts", [self.texts.task], self.tasks, "task")
        for name, options in self.studies.items():
            with error_at("studies", name):
                check_known("recipe", [name], STUDIES.names(), "study")
                options_of(name).model_validate(options or {})
        return self

    def options(self, name: str) -> dict[str, JSON]:
        """Return the options that the recipe gives to the study `name`; {} if it gives none.

        Raises UnknownNameError if the study does not exist, and ConfigError if the recipe lacks tasks, texts or an
        option that the study requires.
        """
        options = self.studies.get(name) or {}
        for key, parameter in parameters_of(name).items():
            shared = key in SHARED and (key in ("model", "base") or bool(getattr(self, key)))
            if parameter.default is parameter.empty and key not in options and not shared:
                place = f"'{key}'" if key in SHARED else f"'{key}' under studies.{name}"
                raise ConfigError(f"study {name}: the recipe has no {place}; it is required.")
        return dict(options)


def parameters_of(name: str) -> Mapping[str, inspect.Parameter]:
    """Return name -> parameter of the study's function; raise UnknownNameError if there is no such study."""
    return inspect.signature(STUDIES.get(name)).parameters


@cache
def options_of(name: str) -> type[BaseModel]:
    """Return a pydantic model that checks the options of a study in a recipe; none of them is required.

    Raises UnknownNameError if there is no such study.
    """
    excluded = {*SHARED, *CONTROLS, *_IN_MEMORY} - {"base"}
    return _model_of(name, tuple(key for key in parameters_of(name) if key not in excluded))


def _types_of(name: str, keys: tuple[str, ...]) -> dict[str, object]:
    """Return parameter -> type for the parameters `keys` of the study `name`; each type is a union with None.

    Types that stand for a model, bank or checkpoint have a `Loads` in their metadata.
    """
    return {key: field.annotation for key, field in _model_of(name, keys).model_fields.items()}


def _model_of(name: str, keys: tuple[str, ...]) -> type[BaseModel]:
    """Return a pydantic model whose fields are the parameters `keys` of the study `name`; each field's default is None.

    The annotations of the study's function are strings, and some of their names are imported for type checkers only.
    Pydantic evaluates them with `_NAMESPACE`: there models, banks and folders are strings. Raises UnknownNameError if
    there is no such study.
    """
    function: Any = STUDIES.get(name)
    annotations = {key: parameters_of(name)[key].annotation for key in keys}
    types = {key: "Any" if given is inspect.Parameter.empty else given for key, given in annotations.items()}
    fields: Any = {key: (f"{annotation} | None", None) for key, annotation in types.items()}
    model = create_model(name, __base__=Strict, **fields)
    model.model_rebuild(_types_namespace={**inspect.unwrap(function).__globals__, **_NAMESPACE})
    return model


def load_study_recipe(path: str | Path) -> StudyRecipe:
    """Read a study recipe from a YAML file.

    Raises LaminaError if the file cannot be read or is not a valid recipe; the message names the line.
    """
    file = read_yaml(Path(path))
    try:
        return StudyRecipe.model_validate(file.fields)
    except ValidationError as error:
        raise_first(error, op=f"recipe {path}", file=file)
