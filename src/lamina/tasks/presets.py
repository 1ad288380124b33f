"""Presets: public tasks with their hub dataset, file names, columns, labels and metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import yaml
from pydantic import ConfigDict, TypeAdapter

from lamina.errors import ConfigError, DataError, UnknownNameError, convert_errors
from lamina.tasks.base import kind_of
from lamina.utils import is_dir, is_file

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)
_LANGUAGE = re.compile(r"([a-z]{2,3}|simple)(-[a-z]+)*")  # "simple" is Simple English


@dataclass(frozen=True)
class Preset:
    """A public task, as described in `presets.yaml`.

    Attributes:
        hub: Name of the dataset on the hub.
        columns: Columns of text, second text (or None) and label in the published files.
        labels: Class names in the order of their ids. Empty: the hub dataset's class names, or the folders' names.
        metrics: All metrics that are reported; the first one picks the best checkpoint.
        rows: Name of each split with labels -> its number of rows. With several languages, the rows of English.
        length: Mean tokens of an example, special tokens included; for images, a token per 16-pixel patch at size 224.
        files: Split name -> possible names of its file, pair of files, or folder.
        kind: Name of the kind of task.
        problem_type: One of the kind's problem types.
        config: Configuration of the hub dataset. None: the default.
        revision: Revision of the hub dataset. None: the newest.
        hub_columns: Columns of the hub dataset. None: the same as `columns`.
        header: Column names, if the files have no header. None: they have one.
        stand_ins: Names of files to use as the train split if no published train file is found.
        languages: Whether `config` is a language, which may follow the name of the preset: "wikiann/de".
        classes: Number of classes, if `labels` is empty.
        positive: With two classes, the class that "f1" is about. None: as in `ColumnSpec`.
    """

    hub: str
    columns: tuple[str | int, str | None, str | int]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: Mapping[str, int]
    length: int
    files: Mapping[str, tuple[str | tuple[str, str], ...]]
    kind: str = "sequence_classification"
    problem_type: str = "classification"
    config: str | None = None
    revision: str | None = None
    hub_columns: tuple[str, str | None, str] | None = None
    header: tuple[str, ...] | None = None
    stand_ins: tuple[str | tuple[str, str], ...] = ()
    languages: bool = False
    classes: int = 0
    positive: str | None = None

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # an unknown key in the file is an error

    @property
    def class_names(self) -> tuple[str, ...]:
        """The class names; "0", "1" and so on if the names are only known from the data."""
        return self.labels or tuple(map(str, range(self.classes)))


# Name -> preset.
_rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_named = {name: row for name, row in _rows.items() if not name.startswith(".")}
PRESETS: Mapping[str, Preset] = MappingProxyType(TypeAdapter(dict[str, Preset]).validate_python(_named))


def find_preset(name: str) -> tuple[str, Preset]:
    """Return the name of a preset's task ("cola", "wikiann-de"), and the preset.

    `name` is like "cola", "glue/cola" or "wikiann/de" (German).

    Raises UnknownNameError if there is no such preset, and ConfigError if the language is not a language code.
    """
    short, slash, language = name.removeprefix("glue/").partition("/")
    preset = PRESETS.get(short)
    if preset is None or (slash and not preset.languages):
        raise UnknownNameError(op="task", got=name, known=PRESETS, what="preset", see="lamina.tasks.presets.PRESETS")
    if not slash:
        return short, preset
    if not _LANGUAGE.fullmatch(language):
        rule = f"a language is a short code, as in {short}/de"
        raise ConfigError(f"task: '{name}' names the language '{language}'; {rule}.")
    return f"{short}-{language}", replace(preset, config=language)


def published_files(name: str, preset: Preset, folder: Path) -> dict[str, Path | tuple[Path, Path]]:
    """Return split name -> file, pair of files or folder, for a preset's published files in the local folder `folder`.

    If there is no train file, another one becomes the train split, with a warning. For running text it is the
    validation file; for other tasks one of the preset's `stand_ins`, but only if no split has a file. `name` is the
    task's name in messages. A warning also says if there is no validation file. Raises DataError if there is nothing to
    train on.
    """
    sources = {part: _first_present(folder, names) for part, names in preset.files.items()}
    if sources["train"] is None and kind_of(preset.kind).sequential and sources["validation"] is not None:
        sources["train"] = sources.pop("validation")
        logger.warning("task %s: %s has no train file; the validation file is used instead", name, folder)
        logger.warning("task %s: the last tenth of the text is held out for validation", name)
    elif not any(sources.values()) and (stand_in := _first_present(folder, preset.stand_ins)):
        sources["train"] = stand_in
        logger.warning("task %s: %s has no train file; the train split is read from %s", name, folder, _names(stand_in))
    if sources["train"] is None:
        known = " or ".join(_names(names) for names in preset.files["train"])
        problem = f"{folder} has no {known}; a folder holds the published files, or `files` names them one by one."
        raise DataError(f"task {name}: {problem}", path=str(folder))
    if sources.get("validation", folder) is None:
        logger.warning("task %s: %s has no validation file; a tenth of the train split is held out", name, folder)
    return {part: source for part, source in sources.items() if source is not None}


def fetch(name: str, preset: Preset) -> dict[str, datasets.Dataset]:
    """Download a preset's dataset from the hub, and return split name -> rows. Splits without labels are left out.

    `name` is the task's name in messages. Raises DataError if the dataset cannot be downloaded.
    """
    import datasets

    got, rule = f"'{preset.hub}' cannot be fetched", "without `files`, a preset is downloaded from the hub"
    with convert_errors(lambda reason: DataError(f"task {name}: {got} ({reason}); {rule}.")):
        fetched = datasets.load_dataset(preset.hub, preset.config, revision=preset.revision)
    return {part: fetched[part] for part in preset.rows}  # pyright: ignore


def _first_present(folder: Path, names: Sequence[str | tuple[str, str]]) -> Path | tuple[Path, Path] | None:
    """Return the path of the first of `names` (files, pairs of files or folders) that exists in a folder, or None."""
    for name in names:
        paths = [folder / file for file in ((name,) if isinstance(name, str) else name)]
        if all(is_file(path) or is_dir(path) for path in paths):
            return paths[0] if isinstance(name, str) else (paths[0], paths[1])
    return None


def _names(source: str | Path | Sequence[str | Path]) -> str:
    return Path(source).name if isinstance(source, str | Path) else " and ".join(Path(file).name for file in source)
