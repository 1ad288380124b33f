"""Check how a user names columns, classes and options of a task, before and after its data is read."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, check_known
from lamina.tasks.label_cells import EvaluateOnly, look

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lamina.data.read import Table
    from lamina.tasks.base import ColumnSpec

logger = logging.getLogger(__name__)
NOTHING_SPARE = (
    "every row of the train split is the only one of a class, so none can be held out for validation. Give a "
    "validation split, or more rows."
)


def input_column(text: str | int, inputs: str | int | None) -> str | int:
    """Return `inputs`, or `text` if `inputs` is None; ConfigError if the user set both and they differ."""
    if inputs is None:
        return text
    if text not in ("sentence", inputs):
        got = f"text is {text!r} and inputs is {inputs!r}"
        raise ConfigError(f"task: {got}; both options name the column of the inputs. Give one.")
    return inputs


def warn_of_cases(name: str, labels: Sequence[str]) -> None:
    """Log a warning if two class names of the task `name` differ only in case, width, spaces or unseen characters."""
    first: dict[str, str] = {}
    for label in labels:
        if (other := first.setdefault(look(label), label)) != label:
            hint = "if they are one class, write them alike"
            what = f"task %s: the classes '%s' and '%s' differ in case, width, spaces or unseen characters only; {hint}"
            logger.warning(what, name, other, label)


def check_spec(spec: ColumnSpec) -> None:
    """Check that the kind of `spec` allows the user's choices in it, as far as this is known without the data.

    Raises UnknownNameError if the kind has no such problem type, or no such value of `missing_labels`; ConfigError if
    labels or separator are empty, a label is named twice, or an option is set that the kind does not have (`by_row`,
    `separator`, `text_pair`).
    """
    kind, labels = spec.kind, spec.labels
    if spec.missing_labels is not None and not isinstance(spec.missing_labels, EvaluateOnly):
        check_known("task", [spec.missing_labels], kind.missing, "missing_labels")
    if spec.problem_type is not None:
        check_known("task", [spec.problem_type], kind.problem_types, "problem type")
    if labels is not None and (not labels or len(set(labels)) < len(labels)):
        raise ConfigError(f"task: labels are {', '.join(labels) or 'none'}; every class needs its own name.")
    if spec.by_row and not kind.sequential:
        raise ConfigError(f"task: by_row is set for a task of kind {spec.kind}; it is for running text.")
    if spec.separator is not None and (not spec.separator or "multi_label" not in kind.problem_types):
        raise ConfigError(f"task: separator is {spec.separator!r}; it is a sign between labels, for 'multi_label'.")
    if spec.text_pair is not None and not kind.reads_pairs:
        raise ConfigError(f"task: text_pair is '{spec.text_pair}'; a task of kind {spec.kind} reads one text per row.")


def check_columns(spec: ColumnSpec, tables: Iterable[Table]) -> None:
    """Raise ConfigError if two of text, second text and label are one column of a table; see `Table.key` for numbers.

    Kinds without classes, and kinds of running text, are not checked.
    """
    for table in tables if spec.kind.has_classes and not spec.kind.sequential else ():
        label, *texts = (table.key(column) for column in (spec.label, spec.text, spec.text_pair) if column is not None)
        if label in texts:
            raise ConfigError(f"task: text and label are both '{label}'; a model would learn to copy. Name two.")
        if len(set(texts)) < len(texts):
            raise ConfigError(f"task: text and text_pair are both '{texts[0]}'; the two texts are equal. Name two.")


def classes_without_rows(names: Sequence[str], classes: Iterable[Sequence[int]]) -> list[str]:
    """Return the names of the classes that no row has; `classes` holds the class ids of each row."""
    seen = set(chain.from_iterable(classes))
    return [name for number, name in enumerate(names) if number not in seen]
