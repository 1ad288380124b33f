"""Known public tasks: where they are, which columns they have, and how they are scored."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from pydantic import ConfigDict, TypeAdapter

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import kind_of
from lamina.utils import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_LANGUAGE = re.compile(r"[a-z]{2,}(-[a-z]+)*")


@dataclass(frozen=True)
class Preset:
    """One public task.

    Attributes:
        hub: Data set on the hub, `config` and `revision` with it.
        columns: Text, second text (or None) and label in the published files.
        labels: Class names in the order of the ids; for regression the name of the score. None named: those of the hub
            set, or the names of the folders.
        metrics: All that are reported; the first picks the best checkpoint.
        rows: Part that has labels to the number of its rows as published; of several languages, that of English.
        length: Tokens of a usual row (the mean over the published rows, special tokens included; of texts that become
            others those that are read; of an image patches of 16 of 224 pixels and one more).
        files: Part to the names its published file goes by; a name may be a pair of files whose lines belong together,
            and of images a folder.
        kind: The kind of task.
        problem_type: What is predicted.
        config: Of the hub set.
        revision: Of the hub set.
        hub_columns: The columns on the hub, where they have other names there.
        header: Column names of files that have none.
        stand_ins: Names of files that stand in for the train part where none of the published ones is there.
        languages: Whether `config` is a language, which may follow the name: "wikiann/de".
        classes: How many labels there are, where none is named.
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

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # what the file names must be a field

    @property
    def class_names(self) -> tuple[str, ...]:
        """`labels`; where none is named, numbers stand for them."""
        return self.labels or tuple(map(str, range(self.classes)))


def _read() -> dict[str, Preset]:
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    named = {name: row for name, row in rows.items() if not name.startswith(".")}
    return TypeAdapter(dict[str, Preset]).validate_python(named)


PRESETS: Mapping[str, Preset] = MappingProxyType(_read())
"""Name -> preset, of `presets.yaml`."""


def find_preset(name: str) -> tuple[str, Preset]:
    """The preset of a name, with or without "glue/" in front, and for some with a language behind: "wikiann/de".

    Returns:
        What to call the task, and where it is.

    Raises:
        UnknownNameError: If there is none.
        ConfigError: If what stands behind the name is no language.
    """
    short, slash, language = name.removeprefix("glue/").partition("/")
    if short not in PRESETS or (slash and not PRESETS[short].languages):
        raise UnknownNameError(op="task", got=name, known=PRESETS, what="preset")
    preset = PRESETS[short]
    if not slash:
        return short, preset
    if not _LANGUAGE.fullmatch(language):
        raise ConfigError(f"task: '{name}' names the language '{language}'; a language is a short code, as {short}/de.")
    return f"{short}-{language}", replace(preset, config=language)


def published_files(name: str, preset: Preset, folder: Path) -> dict[str, Any]:
    """The published files of a preset that a folder holds: part -> file, pair of files, or folder.

    Raises:
        DataError: If there is nothing to train on.
    """
    found = {part: _first_present(folder, names) for part, names in preset.files.items()}
    if found["train"] is None and kind_of(preset.kind).sequential and found["validation"] is not None:
        found["train"] = found.pop("validation")
        logger.warning("task %s: %s has no train file; the validation file stands in for it", name, folder)
        logger.warning("task %s: the last tenth of the text is set aside for validation", name)
    elif not any(found.values()) and (stand_in := _first_present(folder, preset.stand_ins)):
        found["train"] = stand_in
        logger.warning("task %s: %s has no train file; the train part is read from %s", name, folder, _names(stand_in))
    if found["train"] is None:
        known = " or ".join(_names(names) for names in preset.files["train"])
        problem = f"{folder} has no {known}; a folder holds the published files, or `files` names them one by one."
        raise DataError(f"task {name}: {problem}", path=str(folder))
    if found.get("validation", folder) is None:
        logger.warning("task %s: %s has no validation file; a tenth of the train part is set aside", name, folder)
    return {part: source for part, source in found.items() if source is not None}


def fetch(name: str, preset: Preset) -> dict[str, Any]:
    """The parts of a hub set that have labels: part -> `datasets.Dataset`.

    Raises:
        DataError: If the hub cannot be reached, or has no such set.
    """
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
        if all(path.exists() for path in paths):
            return paths[0] if isinstance(name, str) else (paths[0], paths[1])
    return None


def _names(source: str | Path | Sequence[str | Path]) -> str:
    """How messages call one file or a pair."""
    return Path(source).name if isinstance(source, str | Path) else " and ".join(Path(file).name for file in source)
