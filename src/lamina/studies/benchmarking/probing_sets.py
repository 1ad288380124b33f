"""Find and read the public binary probing data sets of the package sae-probes, and draw rows from them.

The data sets are those of Kantamneni et al. 2025, arXiv:2502.16681, "Are Sparse Autoencoders Useful?". The package is
not imported; only its data files are read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, final, get_args

import numpy as np

from lamina.errors import DataError, check_known, convert_errors
from lamina.studies.runner import check_each_once

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pandas import DataFrame

    Rows: TypeAlias = NDArray[np.integer]

Setting = Literal["normal", "scarce", "imbalance", "shift"]
SETTINGS: tuple[Setting, ...] = get_args(Setting)
MOST_TRAINED = 1024  # most training rows of a set; at least `LEAST_SCORED` further rows must be left to score
LEAST_SCORED = 100
SIZES = (16, 64, 256, 1024)  # training rows in the setting "scarce"
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)  # share of the positive class in the setting "imbalance"
_MASTER, _SETS, _SHIFTED = "probing_datasets_MASTER.csv.zst", "cleaned_data", "OOD data"
_PACKAGE, _INSTALL = "sae_probes", "pip install --no-deps sae-probes==0.4.2"
_OP = "bench"


@final
@dataclass(frozen=True)
class ProbingSet:
    """One probing data set: its texts, and the class (0 or 1) of each.

    Attributes:
        name: Name of the set, with its number, such as "87_glue_cola".
        texts: The texts.
        labels: The classes `[texts]`.
    """

    name: str
    texts: Sequence[str]
    labels: Rows

    def without_repeats(self) -> ProbingSet:
        """Return the data set with each text once, in order; texts that occur with both classes are left out."""
        classes: dict[str, set[int]] = {}
        for text, label in zip(self.texts, self.labels.tolist(), strict=True):
            classes.setdefault(text, set()).add(label)
        once = {text: labels.pop() for text, labels in classes.items() if len(labels) == 1}
        return ProbingSet(self.name, list(once), np.array(list(once.values()), dtype=int))

    def without_texts(self, texts: Collection[str]) -> ProbingSet:
        """Return the data set without the rows whose text is one of `texts`."""
        left_out = set(texts)
        return _select(self, np.array([row for row, text in enumerate(self.texts) if text not in left_out], dtype=int))


@final
@dataclass(frozen=True)
class Portion:
    """The rows drawn from a data set: texts and classes to train on and to score."""

    train: ProbingSet
    test: ProbingSet


def find_data(data: str | Path | None) -> Path:
    """Return the folder of the data files; raise DataError if there are no such files.

    `data` is that folder, or one that contains it, such as an unpacked wheel of sae-probes. None: the installed
    package.
    """
    if data is None:
        spec = find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            got = "the package sae-probes, which carries the data sets, is not installed"
            raise DataError(f"{_OP}: {got}. Run {_INSTALL}, or give its folder with --data.")
        data = Path(spec.submodule_search_locations[0])
    for folder in (Path(data) / below for below in ("", "data", f"{_PACKAGE}/data")):
        if (folder / _MASTER).is_file():
            return folder
    got = f"{data} has no {_MASTER}"
    raise DataError(f"{_OP}: {got}; the folder of the package sae-probes has. Get it with {_INSTALL}.")


def set_names(folder: Path, setting: Setting = "normal") -> tuple[str, ...]:
    """Return the names of the data sets in their published order; for "shift", only those with a shifted version.

    A shifted version has the same classes and texts of another kind. Raises UnknownNameError if the setting does not
    exist, and DataError if the list of sets in `folder` cannot be read.
    """
    check_known(_OP, [setting], SETTINGS, "setting")
    table = _read(folder / _MASTER, ("Data type", "Dataset save name"))
    files = table.loc[table["Data type"] == "Binary Classification", "Dataset save name"]
    names = tuple(Path(str(file)).name.removesuffix(".csv") for file in files)
    return tuple(name for name in names if setting != "shift" or _shifted_file(folder, name).exists())


def read_set(folder: Path, name: str, *, shifted: bool = False) -> ProbingSet:
    """Return the data set `name`; with `shifted`, its version with texts of another kind.

    `folder` is the folder of the data files. Rows without a text or class are left out. The class whose name sorts
    last is 1; in the shifted version, a class with the same name in both versions keeps its number. Raises DataError if
    a file is missing or damaged, the version does not have two classes, or the two versions share no class name.
    """
    path = _shifted_file(folder, name) if shifted else folder / _SETS / f"{name}.csv.zst"
    table = _read(path, ("prompt", "target")).dropna(subset=["prompt", "target"])
    targets = table["target"].astype(str)
    names = sorted(set(targets))
    if len(names) != 2:
        raise DataError(f"{_OP}: set {name} has {len(names)} classes; 2 are needed. Read its file anew: {path}.")
    if shifted:  # one published twin writes its negative class as "not_entailment" in place of "0"
        own = _read(folder / _SETS / f"{name}.csv.zst", ("target",))
        known = sorted(set(own["target"].dropna().astype(str)))
        if (shared := next((label for label in reversed(known) if label in names), None)) is None:
            came = f"the classes {', '.join(names)} in its shifted file and {', '.join(known)} in its own"
            raise DataError(f"{_OP}: set {name} has {came}; at least one has the same name. Correct {path}.")
        names.sort(key=lambda label: (label == shared) == (shared == known[-1]))  # the negative class first
    texts = [str(text) for text in table["prompt"]]
    return ProbingSet(name, texts, (targets == names[1]).to_numpy().astype(int))


def _shifted_file(folder: Path, name: str) -> Path:
    return folder / _SHIFTED / f"{name}_OOD.csv.zst"


def _read(path: Path, columns: Sequence[str]) -> DataFrame:
    """Return columns of a compressed CSV file; raise DataError if the file is missing or damaged, or lacks a column."""
    import pandas as pd
    import pyarrow as pa

    if not path.is_file():
        raise DataError(f"{_OP}: {path} does not exist; it is a file of sae-probes. Get it with {_INSTALL}.")
    hint = f"Get it again with {_INSTALL}"
    with (
        convert_errors(lambda reason: DataError(f"{_OP}: {path} is damaged ({reason}). {hint}.")),
        pa.input_stream(str(path), compression="zstd") as stream,
    ):
        return pd.read_csv(stream, usecols=list(columns))


def portion(
    data: ProbingSet,
    *,
    rows: int | None = None,
    share: float | None = None,
    scored: int | None = 500,
    other: ProbingSet | None = None,
    seed: int = 42,
) -> Portion:
    """Draw the rows to train on and the rows to score.

    At most 1,024 rows are trained on, and at least 100 are left to be scored. Both have the same share of the positive
    class. The largest number of training rows is drawn as the package sae-probes draws it. For smaller numbers, the
    first rows of each class in that draw are used, so that all sizes are scored on the same rows. Raises DataError if
    fewer than 2 rows, or fewer than `rows`, can be trained on, or `other` has one class only.

    Args:
        data: The data set.
        rows: Number of training rows. None: as many as possible.
        share: Share of the positive class. None: half. With a share, only so many rows are used that each of `SHARES`
            could be drawn.
        scored: Maximum number of scored rows. None: all that are left.
        other: A data set whose rows are scored instead: all, or `scored` of them with its shares of the classes.
        seed: Seed of the draw.
    """
    counts = np.bincount(data.labels, minlength=2)
    size = 2 * int(counts.min())
    if share is not None:
        size = int(min(counts[0] / (1 - min(SHARES)), counts[1] / max(SHARES)))
    most = min(size - LEAST_SCORED, MOST_TRAINED)
    held = max(LEAST_SCORED, size - most - 1)
    if most < 2 or (rows is not None and rows > most):
        wanted = LEAST_SCORED + (2 if rows is None else rows)
        got = f"set {data.name} has {size} rows of both classes in these shares"
        raise DataError(f"{_OP}: {got}; {wanted} are needed to train and score on. Leave the set or the size out.")
    share = 0.5 if share is None else share
    train, test = _draw(data.labels, most, held, share, seed)
    if rows is not None and rows < most:
        positives = int(np.ceil(share * rows))
        place = np.concatenate(
            [
                np.flatnonzero(data.labels[train] == 0)[: rows - positives],
                np.flatnonzero(data.labels[train] == 1)[:positives],
            ]
        )
        train = train[np.sort(place)]
    chosen = _select(data, test if scored is None else test[:scored]) if other is None else _fewer(other, scored, seed)
    return Portion(_select(data, train), chosen)


def _fewer(data: ProbingSet, most: int | None, seed: int) -> ProbingSet:
    """Return a data set with at most `most` of its rows, in their order and with the same share of both classes.

    Each class keeps at least one row; `seed` decides which rows. If `most` is None, all rows stay. Raises DataError if
    fewer than two classes are left, so that nothing can be scored.
    """
    by_class = [np.flatnonzero(data.labels == label) for label in (0, 1)]
    if not all(len(rows) for rows in by_class):
        got = f"the shifted texts of {data.name} that may be scored are of {len(np.unique(data.labels))} of 2 classes"
        raise DataError(f"{_OP}: {got}; both are needed. Leave the set out.")
    if most is None or most >= len(data.texts):
        return data
    positives = min(most - 1, max(1, round(most * float(data.labels.mean()))))
    rng = np.random.RandomState(seed)
    drawn = [rng.permutation(rows)[:n] for rows, n in zip(by_class, (most - positives, positives), strict=True)]
    return _select(data, np.sort(np.concatenate(drawn)))


def _select(data: ProbingSet, rows: Rows) -> ProbingSet:
    return ProbingSet(data.name, [data.texts[int(row)] for row in rows], data.labels[rows])


def _draw(labels: Rows, train: int, test: int, share: float, seed: int) -> tuple[Rows, Rows]:
    """Return shuffled indices of training rows and test rows, drawn like `get_train_test_indices` of sae-probes 0.4.2.

    `labels` are the classes of all rows, `train` and `test` the numbers of rows to draw with `seed`, and `share` is the
    share of the positive class in both. If a class has too few rows left for the test, all of them are drawn.
    """
    rng = np.random.RandomState(seed)
    positives, negatives = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    trained, scored = int(np.ceil(share * train)), int(np.ceil(share * test))
    train_positives = rng.choice(positives, size=trained, replace=False)
    train_negatives = rng.choice(negatives, size=train - trained, replace=False)
    left = np.setdiff1d(positives, train_positives)
    test_positives = rng.choice(left, size=min(scored, len(left)), replace=False)
    left = np.setdiff1d(negatives, train_negatives)
    test_negatives = rng.choice(left, size=min(test - scored, len(left)), replace=False)
    train_rows = rng.permutation(np.concatenate([train_positives, train_negatives]))
    return train_rows, rng.permutation(np.concatenate([test_positives, test_negatives]))


def chosen_sets(folder: Path, setting: Setting, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the data sets to run, in the order of `names` (full names or numbers). None: all sets of the setting.

    Raises ConfigError if no set is named, or a set twice; UnknownNameError if a set or the setting does not exist;
    DataError if the setting has no set, or the list of sets cannot be read.
    """
    known = set_names(folder, setting)
    if not known:
        raise DataError(f"{_OP}: {folder} has no binary set for the setting '{setting}'; {_MASTER} lists the sets.")
    numbers = {name.partition("_")[0]: name for name in known}
    listed = known if names is None else tuple(numbers.get(name, name) for name in names)
    check_known(_OP, listed, known, "set")
    check_each_once(_OP, "sets", listed)
    return listed


def set_digest(folder: Path, name: str, setting: Setting) -> str:
    """Return a digest (16 hexadecimal digits) of a set's file and, with "shift", of its shifted version, if they exist.

    `folder` is the folder of the data files.
    """
    paths = folder / _SETS / f"{name}.csv.zst", _shifted_file(folder, name)
    used = [path.read_bytes() for path in paths[: 2 if setting == "shift" else 1] if path.is_file()]
    return sha256(b"".join(used)).hexdigest()[:16]
