"""The keys of a recipe, a YAML file that says what to train.

Every key and value is checked here, as far as that is possible before data or a model is loaded. A run's coordinates
are its model, `train_base`, task, method and settings.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

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
from lamina.errors import ConfigError, UnknownNameError, check_known
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.recipes.edits import arguments_of, check_edit, check_named_edit, check_selector, config_of
from lamina.recipes.monitor_keys import MonitorRecipe, check_monitor
from lamina.recipes.strict_yaml import NAMED, Fields, Strict, YamlFile, checked, error_at, fail, raise_first, read_yaml
from lamina.recipes.table_layouts import (
    AS_LIST,
    PARAMETERS,
    AxisLayout,
    Coordinates,
    FigureRecipe,
    Grid,
    TableRecipe,
    axes_label,
    column_name,
    matches,
    to_patterns,
    to_text,
    with_published,
)
from lamina.tasks import kind_of
from lamina.tasks.base import KindedTask, TaskOutline, check_image_size, check_label_all_tokens
from lamina.tasks.presets import Preset, find_preset
from lamina.tasks.stratify import SampleSize
from lamina.train.grid import METHOD, MOST_RUNS, check_count, check_values, expand, full_key, keys_of
from lamina.train.options import FitOptions, Seed
from lamina.utils import check_types, derive_seed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from lamina.fusion.base import FusionConfig
    from lamina.registry import Registry

# Keys of a task that describe its files. They are refused beside a preset, which settles all of them.
FILE_KEYS = {
    *("kind", "text", "inputs", "text_pair", "label", "labels", "positive", "problem_type"),
    *("missing_labels", "by_row", "stratify", "separator"),
}


def check_options(options: Mapping[str, object]) -> None:
    """Check the options of `lamina.fit` in a recipe.

    Raises ConfigError if a value is not allowed, or "epochs" or "learning_rate" is a mapping (reader name -> number);
    UnknownNameError if an option, or the chosen value of an option, does not exist.
    """
    for key in ("epochs", "learning_rate"):
        if isinstance(options.get(key), dict):
            raise ConfigError(f"{key} is {options[key]}; give one number here, and tasks and readers their own")
    FitOptions.of(options)


Edit: TypeAlias = dict[str, Fields]  # the name of an edit -> its arguments
Options = Annotated[dict[str, object], checked(check_options)]  # options of `lamina.fit`


class ReaderRecipe(Strict):
    """A reader of a task in a recipe. With a `grid`, it stands for one reader per combination of the grid's values.

    `fusion`: A name, or settings with "name"; "default" chooses by task: `Reader.default`. `head`: settings of the
    head; unless they name labels and problem type, these are the task's. `stack`: None: the model's only stack, or its
    encoder. `learning_rate`: None: the task's. `grid`: "fusion.alpha", "head.dropout", "seed", "epochs" and the like
    -> values.
    """

    fusion: Annotated[Fields, NAMED]
    head: Fields = Field(default_factory=dict)
    stack: str | None = None
    learning_rate: PositiveFloat | None = None
    grid: Grid = Field(default_factory=dict)

    def template(self, task: KindedTask) -> Reader:
        """Return the reader's config for a task, without the values of its grid.

        Raises ConfigError if a setting is not allowed, or the default reader gets settings; UnknownNameError if a
        fusion or setting does not exist.
        """
        if (fusion := self._fusion()) is None:
            if self.head or len(self.fusion) > 1:
                raise ConfigError("reader: the default reader has settings of its own; give none, or name a fusion.")
            return replace(Reader.default(task), stack=self.stack)
        known = {field.name for field in fields(HEADS.get(task.kind.name)) if field.init}
        facts: Fields = {"problem_type": task.problem_type}
        if task.kind.has_classes:
            facts["labels"] = task.labels
        head = {"name": task.kind.name, **{key: value for key, value in facts.items() if key in known}, **self.head}
        return Reader(fusion, _build(HEADS, head), self.stack)

    def _fusion(self) -> FusionConfig | None:
        """Return the config of the reader's fusion, with the errors of `_build`; None for the default reader."""
        return None if self.fusion.get("name") == "default" else _build(FUSIONS, self.fusion)

    def keys(self, task: KindedTask) -> list[str]:
        """Return every key that the reader's grid may have for a task, in full form such as "fusion.alpha".

        Raises the errors of `template`.
        """
        reader = self.template(task)
        return keys_of(reader.fusion, reader.head)

    def check(self, task: KindedTask) -> None:
        """Check the settings of a reader and every value of its grid, by building the reader's config for a task.

        Raises ValidationError, which names the key, if a setting or a value of the grid is not allowed.
        """
        with error_at("fusion", blame=self.fusion):
            self._fusion()
        with error_at("head", blame=self.head):
            template = self.template(task)
        with error_at("grid", blame=self.grid):
            for spec in expand(template, self.grid):
                if spec.reader is not None:
                    check_selector(spec.reader.fusion.selector())


def _build(registry: Registry, settings: Fields) -> Any:  # noqa: ANN401
    """Return the config of a fusion or head of the `registry`; `settings` are a recipe's settings, "name" included.

    Raises ConfigError if "name" is missing, or a value is not allowed or has a wrong type, such as a string instead of
    a number; UnknownNameError if the fusion, head or setting does not exist.
    """
    try:
        return registry.from_dict(settings)
    except TypeError as error:
        name = settings["name"]
        numbers = [field.name for field in fields(registry.get(name)) if str(field.type) in ("int", "float")]
        texts = [key for key in numbers if isinstance(settings.get(key), str)]
        reason = f"{texts[0]} is {settings[texts[0]]!r}; it must be a number, such as 0.001" if texts else str(error)
        raise ConfigError(f"{name}: {reason}.") from error


class SubsampleRecipe(Strict):
    """A random subsample of a task's training rows, drawn without replacement.

    Exactly one of `per_class` (rows, times the number of classes), `fraction` (of the training rows) and `rows` must be
    set. `stratified`: draw the same number (with `per_class`) or fraction of each class; False: draw uniformly.
    `repeats`: number of subsamples, drawn with the seeds 0, 1, ...; each has its own runs.
    """

    per_class: int | None = None
    fraction: float | None = None
    rows: int | None = None
    stratified: bool = False
    repeats: Annotated[int, Field(gt=0, le=MOST_RUNS)] = 1

    @model_validator(mode="after")
    def _check_size(self) -> SubsampleRecipe:
        with error_at(blame=sorted(self.model_fields_set)):
            self.size()
        return self

    def size(self) -> SampleSize:
        """Return the size of the subsample; raise ConfigError unless exactly one size is set, and is allowed."""
        return SampleSize(self.per_class, self.fraction, self.rows)


class MethodRecipe(Strict):
    """A way to fine-tune the model. With a `grid`, it stands for one way per combination of the grid's values.

    `edits` are applied to the model before training, in order. An edit is the name of a function, without its final
    underscore ("insert" for `lamina.insert_`), with the function's arguments. An edit with null layers is left out.
    Keys of the grid are arguments of edits ("insert.layers") and options of `lamina.fit`. Options in `fit` replace the
    task's and the recipe's, and those of the grid replace all.
    """

    edits: list[Annotated[Edit, checked(check_named_edit)]] = Field(default_factory=list)
    fit: Options = Field(default_factory=dict)
    grid: Grid = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_grid(self) -> MethodRecipe:
        """Raise ValidationError if a key is unknown or set twice, a value wrong or repeated, or the grid too big."""
        with error_at("grid"):
            check_count("grid", self.grid)
        for key, values in self.grid.items():
            with error_at("grid", key):
                full = full_key(key, self.keys(), "grid")
                if key != full and full in self.grid:
                    raise ConfigError(f"'{key}' and '{full}' are one key, which can have one list only")
                check_values(f"'{key}'", values)
                edit, dot, argument = full.partition(".")
            for number, value in enumerate(values):
                with error_at("grid", key, number):
                    check_edit(edit, {argument: value}) if dot else check_options({edit: value})
        return self

    def keys(self) -> list[str]:
        """Return every full key that the method's grid may have: arguments of edits ("insert.layers"), and options."""
        names = dict.fromkeys(name for edit in self.edits for name in edit)
        places = [f"{name}.{argument}" for name in names for argument in arguments_of(name).model_fields]
        return [*places, *FitOptions.model_fields]


class MaskedLMRecipe(Strict):
    """Options of masked language modelling.

    With `rows`, each row (a pair as one text) is masked by itself; otherwise texts are joined and cut into blocks.
    """

    rows: bool = False


def _masked_lm(value: object) -> object:
    """Return the value of a recipe's key `masked_lm` in its long form: {} (defaults) for true, and None for false.

    None and a mapping are returned unchanged. Raises ValueError for any other value.
    """
    if isinstance(value, bool):
        return {} if value else None
    if value is None or isinstance(value, dict):
        return value
    raise ValueError("masked_lm must be true, false or {rows: true}")


class TaskRecipe(Strict):
    """A task, from a preset or from files with named columns, and the readers that learn it.

    There are no readers if the recipe has methods, or is for a study. docs/recipes.md explains the keys.
    """

    preset: Annotated[str, checked(find_preset)] | None = None
    kind: Annotated[str, checked(kind_of)] = "sequence_classification"
    # split -> file, relative to the data folder; a list of two is a text file and its translation, line by line
    files: dict[Literal["train", "validation", "test"], str | list[str]] | None = None
    text: str | int = "sentence"
    inputs: str | int | None = None  # column of the texts, images or audio: the same as `text`
    text_pair: str | int | None = None
    pair_separator: str | None = None  # joins a pair into one text; by default the tokenizer's own form of a pair
    label: str | int = "label"
    labels: list[str] | None = None
    # the positive one of two classes; None: 1, yes or true if the other is 0, no or false
    positive: str | int | None = None
    metric: str | None = None  # chooses the best epoch; None: the usual metric of such a task
    problem_type: str | None = None  # None: found from the labels
    # what to do with rows that have no label; None: "mask" where tasks share them, otherwise "error"
    missing_labels: Literal["error", "drop", "mask", "ignore"] | None = None
    separator: str | None = None  # sign between the labels in one text, for multi_label; None: found in the column
    by_row: bool = False  # for running text: read each row by itself, not blocks of text that join many rows
    label_all_tokens: bool = False  # learn from every sub-token of a word, not from its first sub-token only
    limit: PositiveInt | None = None  # maximum number of training rows
    limit_validation: PositiveInt | None = None  # maximum number of validation rows
    # validate on a tenth of the training rows; the validation split then serves as test split if there is none
    hold_out: bool = False
    stratify: bool = True  # hold out the same share of each class; False: the same rows in all tasks of one size
    subsample: SubsampleRecipe | None = None
    image_size: int | None = None  # width and height of images in pixels; None: that of the model's processor
    masked_lm: Annotated[MaskedLMRecipe | None, BeforeValidator(_masked_lm)] = None  # predict masked tokens instead
    epochs: PositiveInt | None = None  # None: the recipe's
    learning_rate: PositiveFloat | None = None  # None: the recipe's
    readers: dict[str, ReaderRecipe] = Field(default_factory=dict)  # name of the method -> reader

    @model_validator(mode="after")
    def _check_texts(self) -> TaskRecipe:
        """Raise ValidationError for "pair_separator" without pairs, or "label_all_tokens" without tagged words."""
        preset = self._preset
        if self.pair_separator is not None and (self.text_pair if preset is None else preset.columns[1]) is None:
            raise ValueError("'pair_separator' is for pairs of texts; this task has one text a row")
        with error_at(blame=["label_all_tokens"]):
            check_label_all_tokens(self.label_all_tokens, self.outline().kind)
        return self

    @model_validator(mode="after")
    def _check(self) -> TaskRecipe:
        """Raise ValidationError if a name, image size or reader does not suit the task, or keys contradict each other.

        Exactly one of "preset" and "files" must be set, and the keys in `FILE_KEYS` only with files.
        """
        if (self.preset is None) == (self.files is None):
            raise ValueError("give either 'preset' or 'files', and not both")
        extra = sorted(FILE_KEYS & self.model_fields_set)
        if "stratify" in extra and not self.hold_out and "validation" in (self.files or {}):
            fail(ConfigError("it is about held-out rows; the task has a validation split. Set hold_out"), "stratify")
        if self.preset is not None and extra:
            raise ValueError(f"'{extra[0]}' is for files; the preset '{self.preset}' has its own")
        outline = self.outline()
        types = outline.kind.problem_types
        for key, known in (("problem_type", types), ("metric", self.metrics)):
            name = getattr(self, key)
            if name is not None and name not in known:
                fail(UnknownNameError(op="recipe", got=name, known=known, what=key.replace("_", " ")), key)
        if self.image_size is not None:
            with error_at("image_size"):
                check_image_size(self.image_size, outline.kind, "recipe")
        if self.readers and not outline.kind.readers:
            raise ValueError(f"tasks of kind {outline.kind} have no readers; give the run 'methods'")
        for name, reader in self.readers.items():
            with error_at("readers", name):
                reader.check(outline)
        return self

    @property
    def _preset(self) -> Preset | None:
        return None if self.preset is None else find_preset(self.preset)[1]

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the task may have, as far as they are known before its data is read.

        Without a preset and a `problem_type`, they are those of all problem types of the kind.
        """
        if (preset := self._preset) is not None and self.masked_lm is None:
            return (*preset.metrics, *kind_of(preset.kind).further_metrics(preset.problem_type, preset.class_names))
        types = self.outline().kind.problem_types
        chosen = types if self.problem_type is None else [self.problem_type]
        labels = self.labels or ("", "")
        further = [self.outline().kind.further_metrics(problem_type, labels) for problem_type in chosen]
        usual = [types.get(problem_type, ()) for problem_type in chosen]
        return tuple(dict.fromkeys(metric for metrics in (*usual, *further) for metric in metrics))

    def outline(self) -> TaskOutline:
        """Return the `TaskOutline`: what is known about the task before its data is read.

        A preset brings its own labels, except with `masked_lm`. If no labels are known, "0", "1", ... stand in for
        them: one for a regression, else one per class weight of the first reader that has any, or two.
        """
        second = self.text_pair if self._preset is None else self._preset.columns[1]
        how: Fields = {"by_row": self.by_row if self.masked_lm is None else self.masked_lm.rows}
        how |= {"image_size": self.image_size, "pairs": second is not None and self.pair_separator is None}
        if (preset := self._preset) is not None and self.masked_lm is None:
            return TaskOutline(kind_of(preset.kind), preset.problem_type, preset.class_names, **how)
        kind = kind_of(self.kind if self.masked_lm is None else "masked_lm")
        problem_type = self.problem_type or next(iter(kind.problem_types))
        weights = (reader.head.get("class_weights") for reader in self.readers.values())
        listed = (values for values in weights if isinstance(values, list) and values)
        count = 1 if problem_type == "regression" else len(next(listed, (0, 0)))
        return TaskOutline(kind, problem_type, tuple(self.labels or map(str, range(count))), **how)


class Recipe(Strict):
    """A whole recipe: a model, tasks, and either readers for each task or methods that fine-tune the model itself.

    All readers share each pass of the model and are trained together. With `separately`, each reader is trained on its
    own fresh model, which is needed to compare readers that train the model too. Each method is trained on every task,
    always on a fresh model. docs/recipes.md explains the keys.
    """

    model: str  # hub id, local folder, or "minilm" for the packaged model
    revision: str | None = None  # branch, tag or commit on the hub
    architecture: Annotated[Fields, checked(config_of)] | None = None  # the model's config, for estimates offline
    train_base: bool = False  # fine-tune the model together with the readers
    separately: bool = False
    seeds: list[Seed] = Field(default=[0], min_length=1)  # every reader or method has one run for each seed
    evaluate: Literal["test"] | None = None  # score the best epochs on the test splits too
    tasks: dict[str, TaskRecipe] = Field(min_length=1)
    methods: dict[str, MethodRecipe] = Field(default_factory=dict)
    # train only the runs that match: "task", "method" or a key of a grid -> patterns with *
    only: Annotated[dict[str, list[str]], BeforeValidator(to_patterns)] = Field(default_factory=dict)
    keep: Literal["best", "all", "none"] = "best"  # which fine-tuned models of each task to save in the output folder
    fit: Options = Field(default_factory=dict)
    monitors: dict[str, MonitorRecipe] = Field(default_factory=dict)  # calibrated on the trained readers, and saved
    table: Annotated[list[TableRecipe], AS_LIST] = Field(default_factory=lambda: [TableRecipe()])  # see `lamina report`
    figure: Annotated[list[FigureRecipe], AS_LIST] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Recipe:
        """Raise ValidationError if keys contradict each other, or a key refers to something unknown.

        A recipe has either readers or methods. "train_base", "separately" and monitors need readers, and "keep" needs
        methods; methods take no "seed" among their options. If `info` has a context, a sweep has replaced values of
        grids, and tables and figures may name the old values.
        """
        with error_at("seeds"):
            check_values("'seeds'", self.seeds)
        read = [name for name, task in self.tasks.items() if task.readers]
        if self.methods and read:
            raise ValueError(f"task '{read[0]}' has readers and the run has methods; give one or the other")
        if self.methods and (self.train_base or self.separately):
            raise ValueError("'train_base' and 'separately' are for readers; methods train the model, each alone")
        if "keep" in self.model_fields_set and not self.methods:
            fail(ConfigError("it is about models that methods fine-tune; a bank saves all of its readers"), "keep")
        bare = [name for name in self.tasks if name not in read]
        if bare and not self.methods:
            raise ValueError(f"task '{bare[0]}' has no readers; give it some, or give the run 'methods'")
        places = {("methods", name, "fit"): method.fit for name, method in self.methods.items()}
        for place, options in {("fit",): self.fit, **places}.items() if self.methods else ():
            if "seed" in options:
                fail(ConfigError(f"seed is {options['seed']}; methods take theirs from 'seeds'"), *place, "seed")
        readers = {name: list(task.readers) for name, task in self.tasks.items()}
        for name, monitor in self.monitors.items():
            with error_at("monitors", name):
                check_monitor(monitor, readers, shared=not (self.methods or self.separately))
        check_layout(self, whole=info.context is None)
        with error_at("only"):
            check_known("only", self.only, full_only(self, self.only), "key")  # a file has full keys
        return self

    @property
    def chosen_tasks(self) -> dict[str, TaskRecipe]:
        """Task name -> task, for the tasks with at least one run that the key `only` chooses; all without `only`."""
        names = {run["task"] for run in all_coordinates(self, ())} if self.only else self.tasks
        return {name: task for name, task in self.tasks.items() if name in names}


@check_types("load_recipe")
def load_recipe(path: str | Path) -> Recipe:
    """Read and check the recipe in a YAML file.

    Raises DataError if the file, or the `published.yaml` that it refers to, cannot be read or is not valid YAML;
    ConfigError if a value is not allowed; and UnknownNameError if a key or name does not exist. The last two name the
    line and the key.
    """
    file = read_yaml(Path(path))
    return parse_recipe(with_published(file, Path(path)), op=f"recipe {path}", file=file)


def parse_recipe(fields: Fields, *, op: str = "recipe", file: YamlFile | None = None, swept: bool = False) -> Recipe:
    """Return the recipe with these fields (keys and values, as YAML has them), after checking it.

    Messages begin with `op`, and name the line if there is a `file`. `swept` says that a sweep has replaced values of
    grids; tables and figures may then name values that are gone. Raises ConfigError if a value is not allowed, and
    UnknownNameError if a key or name does not exist.
    """
    try:
        return Recipe.model_validate(fields, context={"swept": True} if swept else None)
    except ValidationError as error:
        raise_first(error, op=op, file=file)


def slug(name: str) -> str:
    """Return a text as it appears in names of runs: "last layer + linear" becomes "last-layer-linear".

    Characters other than ASCII letters, digits and "_" become one "-", none at either end. If all are others: a hash.
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or f"{derive_seed(name):x}"


# Tables and figures must fit the runs of the recipe


def method_grid(recipe: Recipe, task: str, method: str) -> Grid:
    """Return the grid of a method on a task (key -> values), with full keys and without "seed".

    Raises UnknownNameError if a key does not exist, and ConfigError if a short key may mean two keys.
    """
    if recipe.methods:
        body, known = recipe.methods[method], recipe.methods[method].keys()
    else:
        body = recipe.tasks[task].readers[method]
        known = body.keys(recipe.tasks[task].outline())
    grid = {full_key(key, known, "grid"): values for key, values in body.grid.items()}
    return {key: values for key, values in grid.items() if key != "seed"}


def _grid_keys(recipe: Recipe) -> list[str]:
    """Return the full keys (see `method_grid`) of the grids of all methods on all tasks; a key may occur repeatedly.

    Raises the errors of `method_grid`.
    """
    pairs = [(task, method) for task, body in recipe.tasks.items() for method in recipe.methods or body.readers]
    return [key for pair in pairs for key in method_grid(recipe, *pair)]


def recipe_coordinates(recipe: Recipe) -> Coordinates:
    """Return the coordinates "model" and "train_base", in which runs of one recipe agree and recipes may differ."""
    return {"model": recipe.model, "train_base": recipe.train_base}


def all_coordinates(recipe: Recipe, keys: Collection[str], *, whole: bool = False) -> Iterator[Coordinates]:
    """Yield the coordinates (model, train_base, task, method and settings) of every task and method of a recipe.

    The settings have only the keys in `keys`, those that the recipe's `only` names, and "fusion"; never "seed". Every
    combination of their values in the grids is yielded, in the order of the runs. Equal coordinates may occur several
    times. Runs that `only` excludes are left out, unless `whole` is True. Raises the errors of `method_grid`.
    """
    keys = {*keys, *recipe.only}
    for name, task in recipe.tasks.items():
        for method in recipe.methods or task.readers:
            full = method_grid(recipe, name, method)
            grid = {key: values for key, values in full.items() if key in (*keys, METHOD)}
            if recipe.methods:
                settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
            else:
                settings = [spec.settings for spec in expand(task.readers[method].template(task.outline()), grid)]
            for chosen in settings:
                run: Coordinates = {**recipe_coordinates(recipe), "task": name, "method": method, **chosen}
                if whole or matches(recipe.only, run):
                    yield run


def full_only(recipe: Recipe, only: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return the patterns of the key `only` with full keys, after checking them; {} if `only` is empty.

    Raises UnknownNameError if a key or pattern matches no run, and ConfigError if no run matches all of them, or a
    short key may mean two keys.
    """
    if not only:
        return {}
    known = dict.fromkeys(["task", "method", *_grid_keys(recipe)])
    full = {full_key(key, list(known), "only"): patterns for key, patterns in only.items()}
    runs = list(all_coordinates(recipe, full, whole=True))
    for key, patterns in full.items():
        values = dict.fromkeys(to_text(run[key]) for run in runs if key in run)
        for pattern in patterns:
            if not any(matches({key: [pattern]}, {key: value}) for value in values):
                raise UnknownNameError(op="only", got=pattern, known=values, what=key)
    if not any(matches(full, run) for run in runs):
        named = " and ".join(f"{key}={','.join(patterns)}" for key, patterns in full.items())
        chosen = {key: patterns for key, patterns in full.items() if key == "task"}
        methods = dict.fromkeys(str(run["method"]) for run in runs if matches(chosen, run))
        raise ConfigError(f"no run has {named}; the methods of these tasks are {', '.join(methods)}")
    return full


def row_and_column_names(recipe: Recipe, table: TableRecipe, *, whole: bool = False) -> tuple[list[str], list[str]]:
    """Return the row names and the column names of a table, in the order of the runs that will fill it.

    A column has one name for each metric (see `column_name`). Runs that `only` excludes do not count, unless `whole` is
    True. Values that an axis leaves out get no name.
    """
    runs = list(all_coordinates(recipe, {axis.key for axis in (*table.rows, *table.columns)}, whole=whole))
    labels = ([axes_label(axes, run) for run in runs] for axes in (table.rows, table.columns))
    rows, columns = ([name for name in dict.fromkeys(side) if name is not None] for side in labels)
    return rows, [column_name(column, metric, table) for column in columns for metric in table.metrics or [""]]


def check_layout(recipe: Recipe, *, whole: bool = True) -> None:
    """Raise ValidationError, which says where, if a table or figure refers to something that the recipe does not have.

    It is also raised if scores of several tasks would be mixed, or parameters shown over epochs. With `whole`, the
    values that axes rename, and the rows and columns of published numbers, are checked too. `whole` is False if a sweep
    has replaced values of the recipe.
    """
    for number, table in enumerate(recipe.table):
        with error_at("table", number):
            _check_axes(recipe, {"rows": table.rows, "columns": table.columns}, whole)
            _check_scores(recipe, table.metrics, "metrics", table.part)
            if whole and table.published is not None:
                rows, columns = row_and_column_names(recipe, table, whole=True)
                with error_at("published"):
                    check_known("recipe, published", table.published.values, rows, "row")
                    for values in (*table.published.values.values(), *table.published.others.values()):
                        check_known("recipe, published", values, columns, "column")
    for number, figure in enumerate(recipe.figure):
        with error_at("figure", number):
            axes = {"x": [figure.x], "series": [figure.series], "facet": [figure.facet] if figure.facet else []}
            _check_axes(recipe, axes, whole)
            _check_scores(recipe, [figure.metric] if figure.metric else [], "metric", figure.part)
            if figure.x.key == "epoch" and figure.metric == PARAMETERS:
                raise ConfigError("metric is parameters, which are the same in every epoch")


def _check_axes(recipe: Recipe, axes: Mapping[str, list[AxisLayout]], whole: bool) -> None:
    """Check the axes of one table or figure. `axes` maps a key such as "rows" or "x" to the axes under this key.

    With `whole`, the values that an axis renames must exist. Raises ConfigError if the recipe has several tasks and no
    axis is "task", and ValidationError if an axis or a value that it renames does not exist, or the number of layers of
    a value is not known to an axis that counts them.
    """
    keys = {axis.key for side in axes.values() for axis in side}
    if len(recipe.tasks) > 1 and "task" not in keys:
        raise ConfigError(f"scores of {len(recipe.tasks)} tasks would be mixed; {' or '.join(axes)} must name 'task'")
    runs = list(all_coordinates(recipe, keys, whole=True))
    known = dict.fromkeys(["task", "method", *recipe_coordinates(recipe), *_grid_keys(recipe)])
    for side, axis in ((side, axis) for side, side_axes in axes.items() for axis in side_axes):
        with error_at(side):
            check_known("recipe", [axis.key], [*known, *(["epoch"] if side == "x" else [])], "axis")
            values = dict.fromkeys(to_text(run[axis.key]) for run in runs if axis.key in run)
            check_known("recipe", axis.names if whole else (), values, axis.key)
            for run in runs:
                axis.shown_value(run)


def _check_scores(recipe: Recipe, metrics: Sequence[str], key: str, part: str | None) -> None:
    """Raise ValidationError if a task lacks one of `metrics`, or `part` is "test" and the recipe does not evaluate it.

    "parameters" is always known. `key` is the recipe's key of the metrics, for the error.
    """
    for task in recipe.tasks.values():
        with error_at(key):
            check_known("recipe", metrics, [*task.metrics, PARAMETERS], "metric")
    if part == "test" and recipe.evaluate != "test":
        with error_at("part"):
            raise ConfigError("part is test, but test parts are scored only with 'evaluate: test'")
