"""Known public tasks: where they are, which columns they have, and how they are scored."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from lamina.data.build import SEQUENCE, TOKEN
from lamina.errors import UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Mapping

_GLUE_FILES = MappingProxyType({"train": ("train.tsv",), "validation": ("dev.tsv",)})
_GLUE_PARTS = ("train", "validation")  # the labels of GLUE's test parts are not public


@dataclass(frozen=True)
class Preset:
    """One public task.

    Attributes:
        hub: Data set on the hub, `config` and `revision` with it.
        hub_columns: Text, second text (or None) and label there.
        columns: The same three in the published files.
        labels: Class names in the order of the ids; for regression the name of the score.
        metrics: All that are reported; the first picks the best checkpoint.
        kind: The kind of task.
        problem: What is predicted.
        header: Column names of files that have none.
        files: Part to the names its published file goes by.
        parts: Parts of the hub set that have labels.
    """

    hub: str
    hub_columns: tuple[str, str | None, str]
    columns: tuple[str | int, str | None, str | int]
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    config: str | None = None
    revision: str | None = None
    kind: str = SEQUENCE
    problem: str = "classification"
    header: tuple[str, ...] | None = None
    files: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _GLUE_FILES)
    parts: tuple[str, ...] = _GLUE_PARTS


_GLUE = "nyu-mll/glue"
_TWO = ("sentence1", "sentence2", "label")
_ENTAILS = ("entailment", "not_entailment")

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "cola": Preset(
            _GLUE,
            ("sentence", None, "label"),
            ("sentence", None, "label"),
            ("unacceptable", "acceptable"),
            ("mcc", "accuracy"),
            config="cola",
            header=("source", "label", "mark", "sentence"),
        ),
        "sst2": Preset(
            _GLUE,
            ("sentence", None, "label"),
            ("sentence", None, "label"),
            ("negative", "positive"),
            ("accuracy",),
            config="sst2",
        ),
        "mrpc": Preset(
            _GLUE,
            _TWO,
            ("#1 String", "#2 String", "Quality"),
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            config="mrpc",
        ),
        "rte": Preset(_GLUE, _TWO, _TWO, _ENTAILS, ("accuracy",), config="rte"),
        "stsb": Preset(
            _GLUE,
            _TWO,
            ("sentence1", "sentence2", "score"),
            ("score",),
            ("pearson", "spearman"),
            config="stsb",
            problem="regression",
        ),
        "wnli": Preset(_GLUE, _TWO, _TWO, ("not_entailment", "entailment"), ("accuracy",), config="wnli"),
        "qnli": Preset(
            _GLUE,
            ("question", "sentence", "label"),
            ("question", "sentence", "label"),
            _ENTAILS,
            ("accuracy",),
            config="qnli",
        ),
        "imdb": Preset(
            "stanfordnlp/imdb",
            ("text", None, "label"),
            ("text", None, "label"),
            ("negative", "positive"),
            ("accuracy",),
            files=MappingProxyType({"train": ("train.jsonl",), "test": ("test.jsonl",)}),
            parts=("train", "test"),
        ),
        "conll2003": Preset(
            "eriktks/conll2003",
            ("tokens", None, "ner_tags"),
            (0, None, -1),
            ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC"),
            ("span_f1", "accuracy"),
            revision="refs/convert/parquet",  # the set's own loading script runs in no current version of datasets
            kind=TOKEN,
            files=MappingProxyType(
                {
                    "train": ("eng.train", "train.txt"),
                    "validation": ("eng.testa", "valid.txt"),
                    "test": ("eng.testb", "test.txt"),
                }
            ),
            parts=("train", "validation", "test"),
        ),
    }
)


def find_preset(name: str) -> tuple[str, Preset]:
    """The preset of a name, with or without "glue/" in front.

    Raises:
        UnknownNameError: If there is none.
    """
    short = name.removeprefix("glue/")
    if short not in PRESETS:
        raise UnknownNameError(op="task", got=name, known=PRESETS, what="preset")
    return short, PRESETS[short]
