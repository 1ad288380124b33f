"""Known public tasks: where they are, which columns they have, and how they are scored."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import yaml
from pydantic import ConfigDict, TypeAdapter

from lamina.errors import ConfigError, DataError, UnknownNameError, first_line
from lamina.tasks import kind_of
from lamina.utils import is_dir, is_file

logger = logging.getLogger(__name__)
_LANGUAGE = re.compile(r"[a-z]{2,}(-[a-z]+)*")


@dataclass(frozen=True)
class Preset:
    """One public task."""

    hub: str  # data set on the hub
    columns: tuple[str | int, str | None, str | int]  # text, second text (or None) and label in the published files
    labels: tuple[str, ...]  # in the order of the ids; none named: those of the hub set, or the names of the folders
    metrics: tuple[str, ...]  # all that are reported; the first picks the best checkpoint
    rows: Mapping[str, int]  # part that has labels -> its rows as published; of several languages, those of English
    length: int  # mean tokens of a row, special ones included; of what is read; of images patches of 16 of 224 pixels
    files: Mapping[str, tuple[str | tuple[str, str], ...]]  # part -> names of its file, pair of files, or folder
    kind: str = "sequence_classification"
    problem_type: str = "classification"
    config: str | None = None  # of the hub set
    revision: str | None = None  # of the hub set
    hub_columns: tuple[str, str | None, str] | None = None  # where the columns have other names on the hub
    header: tuple[str, ...] | None = None  # column names of files that have none
    stand_ins: tuple[str | tuple[str, str], ...] = ()  # for the train part, where no published file is there
    languages: bool = False  # `config` is a language, which may follow the name: "wikiann/de"
    classes: int = 0  # how many labels there are, where none is named

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # what the file names must be a field

    @property
    def class_names(self) -> tuple[str, ...]:
        """`labels`; where none is named, numbers stand for them."""
        return self.labels or tuple(map(str, range(self.classes)))


# Name -> preset, of `presets.yaml`.
_rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_named = {name: row for name, row in _rows.items() if not name.startswith(".")}
PRESETS: Mapping[str, Preset] = MappingProxyType(TypeAdapter(dict[str, Preset]).validate_python(_named))


def find_preset(name: str) -> tuple[str, Preset]:
    """What to call a task, and its preset, by a name as "cola", "glue/cola" or (with a language) "wikiann/de"."""
    short, slash, language = name.removeprefix("glue/").partition("/")
    preset = PRESETS.get(short)
    if preset is None or (slash and not preset.languages):
        raise UnknownNameError(op="task", got=name, known=PRESETS, what="preset")
    if not slash:
        return short, preset
    if not _LANGUAGE.fullmatch(language):
        raise ConfigError(f"task: '{name}' names the language '{language}'; a language is a short code, as {short}/de.")
    return f"{short}-{language}", replace(preset, config=language)


def published_files(name: str, preset: Preset, folder: Path) -> dict[str, Any]:
    """The published files of a preset that a folder holds: part -> file, pair of files, or folder."""
    sources = {part: _first_present(folder, names) for part, names in preset.files.items()}
    if sources["train"] is None and kind_of(preset.kind).sequential and sources["validation"] is not None:
        sources["train"] = sources.pop("validation")
        logger.warning("task %s: %s has no train file; the validation file stands in for it", name, folder)
        logger.warning("task %s: the last tenth of the text is set aside for validation", name)
    elif not any(sources.values()) and (stand_in := _first_present(folder, preset.stand_ins)):
        sources["train"] = stand_in
        logger.warning("task %s: %s has no train file; the train part is read from %s", name, folder, _names(stand_in))
    if sources["train"] is None:
        known = " or ".join(_names(names) for names in preset.files["train"])
        problem = f"{folder} has no {known}; a folder holds the published files, or `files` names them one by one."
        raise DataError(f"task {name}: {problem}", path=str(folder))
    if sources.get("validation", folder) is None:
        logger.warning("task %s: %s has no validation file; a tenth of the train part is set aside", name, folder)
    return {part: source for part, source in sources.items() if source is not None}


def fetch(name: str, preset: Preset) -> dict[str, Any]:
    """The parts of a hub set that have labels: part -> `datasets.Dataset`."""
    import datasets

    try:
        fetched = datasets.load_dataset(preset.hub, preset.config, revision=preset.revision)
    except Exception as error:  # the hub's clients raise many unrelated kinds
        came = f"'{preset.hub}' cannot be fetched ({first_line(error)})"
        raise DataError(f"task {name}: {came}; without `files` a preset comes from the hub.") from error
    return {part: fetched[part] for part in preset.rows}  # pyright: ignore


def _first_present(folder: Path, names: Sequence[str | tuple[str, str]]) -> Path | tuple[Path, Path] | None:
    """The first of some files, pairs of files or folders that a folder holds."""
    for name in names:
        paths = [folder / file for file in ((name,) if isinstance(name, str) else name)]
        if all(is_file(path) or is_dir(path) for path in paths):
            return paths[0] if isinstance(name, str) else (paths[0], paths[1])
    return None


def _names(source: str | Path | Sequence[str | Path]) -> str:
    """How messages call one file or a pair."""
    return Path(source).name if isinstance(source, str | Path) else " and ".join(Path(file).name for file in source)
