"""What a study found: a tidy table, how it is drawn, and the exact settings; saved and loaded as a folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from lamina.errors import ConfigError, StoreError, check_known, convert_errors
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint_of
from lamina.store.files import damaged, read_steady, staged, write_json
from lamina.store.manifest import FORMAT, SavedFacts
from lamina.utils import pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pandas import DataFrame
    from transformers import PreTrainedModel

FILES = (STUDY, PARQUET, CSV) = ("lamina_study.json", "table.parquet", "table.csv")  # the first marks a study


@final
@dataclass(frozen=True)
class Figure:
    """Which rows of a study's table are drawn, and how.

    Attributes:
        kind: "line" (a curve over `x`), "heat" (a cell per `x` and `y`, coloured by `value`), "bar", or "scatter" (a
            point per row).
        x: Column along the bottom.
        value: Column of the numbers.
        y: Column up the side of a "heat" figure.
        colour: Column that tells curves, bars or points apart; None: there is one.
        facet: Column with one panel per value; None: there is one panel.
        label: Column that is written in the cells of a "heat" figure, such as the token that a layer foretells; None:
            the numbers, where there is room.
        x_label: Column that names each `x`, such as the token at a position; None: `x` itself.
        where: Column -> the value of the rows that are drawn.
        title: Written above.
        x_title: Of the axis along the bottom, with its unit; "": the column's name.
        value_title: What the numbers are, with their unit; "": the column's name.
        note: What to see in it, in a sentence.

    Rows that differ in column "seed" alone are drawn as their mean, with the 95 % t interval over seeds.
    """

    kind: Literal["line", "heat", "bar", "scatter"]
    x: str
    value: str = "score"
    y: str | None = None
    colour: str | None = None
    facet: str | None = None
    label: str | None = None
    x_label: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    x_title: str = ""
    value_title: str = ""
    note: str = ""


class _StudyFacts(SavedFacts):
    """`lamina_study.json`."""

    format: int
    lamina: str
    name: str
    settings: dict[str, Any]
    figures: dict[str, dict[str, Any]]
    conclusions: list[str]
    table: str  # SHA-256 of the Parquet file


@final
@dataclass(frozen=True, eq=False)
class Study:
    """What a study found.

    Attributes:
        name: Of the study, such as "similarity".
        table: One row per measured number; "score" is the number, the other columns say of what. Rows of examples have
            "text", "true" and "predicted" in place of it, and are shown as such.
        settings: All options as they were used, "versions" of the libraries, and under "models" the name, class and
            fingerprints of each model; JSON-ready.
        figures: Name -> how it is drawn; `rows` gives what it is drawn from.
        conclusions: What may be concluded, a sentence each, most important first.

    Raises:
        ConfigError: If the settings hold something that JSON does not have.
    """

    name: str
    table: DataFrame
    settings: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    conclusions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        own = "settings hold text, numbers, lists and mappings"
        with convert_errors(lambda reason: ConfigError(f"study {self.name}: {reason}; {own}.")):
            object.__setattr__(self, "settings", json.loads(json.dumps(self.settings)))

    def __repr__(self) -> str:
        """Its conclusions, and how much there is to look at."""
        size = f"{pluralize(len(self.table), 'row')}, figures: {', '.join(self.figures) or 'none'}"
        return "\n".join([f"Study('{self.name}', {size})", *(f"- {sentence}" for sentence in self.conclusions)])

    def rows(self, figure: str) -> DataFrame:
        """The rows of the table that a figure is drawn from.

        Raises:
            UnknownNameError: If there is no such figure, or it is drawn from a column that the table does not have.
        """
        check_known(f"study {self.name}", [figure], self.figures, "figure")
        drawn, rows = self.figures[figure], self.table
        columns = (drawn.x, drawn.y, drawn.value, drawn.colour, drawn.facet, drawn.label, drawn.x_label, *drawn.where)
        named = [column for column in columns if column is not None]
        check_known(f"study {self.name}: figure '{figure}'", named, list(rows.columns), "column")
        for column, value in drawn.where.items():
            rows = rows.loc[rows[column] == value]
        return rows

    def save(self, folder: str | Path) -> None:
        """Write the table as Parquet and CSV and the settings as JSON: all of it, or nothing.

        Args:
            folder: Where to; made if it is not there. A study that is there is replaced, other files stay.

        Raises:
            StoreError: If the folder cannot be written, or holds such files that are no study's.
        """
        with staged(Path(folder), FILES) as stage:
            self.table.to_parquet(stage / PARQUET, index=False)
            self.table.to_csv(stage / CSV, index=False)
            facts = _StudyFacts(
                format=FORMAT,
                lamina=library_versions()["lamina"],
                name=self.name,
                settings=dict(self.settings),
                figures={name: asdict(figure) for name, figure in self.figures.items()},
                conclusions=list(self.conclusions),
                table=hashlib.sha256((stage / PARQUET).read_bytes()).hexdigest(),
            )
            write_json(stage / STUDY, facts.model_dump())

    @classmethod
    def load(cls, folder: str | Path) -> Study:
        """Read a study that `save` wrote.

        Raises:
            StoreError: If there is none in the folder, it is damaged, or another version of lamina wrote it.
            UnknownNameError: If its settings file has a key that no study has.
        """
        folder = Path(folder)
        with convert_errors(lambda reason: damaged(folder, f"cannot be loaded ({reason})")):
            return read_steady(folder, STUDY, partial(_load, folder))


def _load(folder: Path) -> Study:
    import pandas as pd

    if not (folder / STUDY).exists():
        raise StoreError(f"load: {folder} holds no study: there is no {STUDY}. Give a folder that Study.save wrote.")
    facts, path = _StudyFacts.read(folder / STUDY), folder / PARQUET
    if not path.exists():
        raise damaged(path, "is not there; the folder is incomplete")
    if hashlib.sha256(path.read_bytes()).hexdigest() != facts.table:
        raise damaged(path, f"is not the table that {STUDY} was saved with")
    with convert_errors(lambda reason: damaged(folder / STUDY, f"has a figure that cannot be understood ({reason})")):
        figures = {name: Figure(**figure) for name, figure in facts.figures.items()}
    return Study(facts.name, pd.read_parquet(path), facts.settings, figures, tuple(facts.conclusions))


_LIBRARIES = ("lamina", "torch", "transformers", "numpy", "scipy", "pandas")


def library_versions() -> dict[str, str]:
    """Library -> its version, of those that a study's numbers depend on."""
    return {name: _version(name) for name in _LIBRARIES}


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """What a model was: its name, class, family and dtype, and stack -> fingerprint of its weights; JSON-ready."""
    return {
        "name": model.name_or_path or None,
        "class": type(model).__name__,
        "family": str(model.config.model_type),
        "dtype": str(model.dtype).removeprefix("torch."),
        "fingerprints": {name: fingerprint_of(stack) for name, stack in stacks(model).items()},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
