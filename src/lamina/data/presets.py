"""Known public tasks: where they are, which columns they have, and how they are scored."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from lamina.data.build import MASKED, MASKED_LABELS, SEQUENCE, TOKEN
from lamina.errors import ConfigError, UnknownNameError

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
        rows: Part to the number of its rows as published; where there are several languages, that of English.
        length: Tokens of a usual row (the mean over the published rows, special tokens included).
        languages: Whether `config` is a language, which may follow the name: "wikiann/de".
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
    rows: Mapping[str, int] = field(default_factory=dict)
    length: int = 64
    languages: bool = False


_LANGUAGE = re.compile(r"[a-z]{2,}(-[a-z]+)*")
_GLUE = "nyu-mll/glue"
_TWO = ("sentence1", "sentence2", "label")
_ENTAILS = ("entailment", "not_entailment")


def _parts_of(*names: str) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType(
        {part: tuple(name.format(part) for name in names) for part in ("train", "validation", "test")}
    )


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
            rows=MappingProxyType({"train": 8551, "validation": 1043}),
            length=12,
        ),
        "sst2": Preset(
            _GLUE,
            ("sentence", None, "label"),
            ("sentence", None, "label"),
            ("negative", "positive"),
            ("accuracy",),
            config="sst2",
            rows=MappingProxyType({"train": 67349, "validation": 872}),
            length=13,
        ),
        "mrpc": Preset(
            _GLUE,
            _TWO,
            ("#1 String", "#2 String", "Quality"),
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            config="mrpc",
            rows=MappingProxyType({"train": 3668, "validation": 408}),
            length=53,
        ),
        "rte": Preset(
            _GLUE,
            _TWO,
            _TWO,
            _ENTAILS,
            ("accuracy",),
            config="rte",
            rows=MappingProxyType({"train": 2490, "validation": 277}),
            length=70,
        ),
        "stsb": Preset(
            _GLUE,
            _TWO,
            ("sentence1", "sentence2", "score"),
            ("score",),
            ("pearson", "spearman"),
            config="stsb",
            problem="regression",
            rows=MappingProxyType({"train": 5749, "validation": 1500}),
            length=28,
        ),
        "wnli": Preset(
            _GLUE,
            _TWO,
            _TWO,
            ("not_entailment", "entailment"),
            ("accuracy",),
            config="wnli",
            rows=MappingProxyType({"train": 635, "validation": 71}),
            length=37,
        ),
        "qnli": Preset(
            _GLUE,
            ("question", "sentence", "label"),
            ("question", "sentence", "label"),
            _ENTAILS,
            ("accuracy",),
            config="qnli",
            rows=MappingProxyType({"train": 104743, "validation": 5463}),
            length=50,
        ),
        "imdb": Preset(
            "stanfordnlp/imdb",
            ("text", None, "label"),
            ("text", None, "label"),
            ("negative", "positive"),
            ("accuracy",),
            files=MappingProxyType({"train": ("train.jsonl",), "test": ("test.jsonl",)}),
            parts=("train", "test"),
            rows=MappingProxyType({"train": 25000, "test": 25000}),
            length=314,
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
            rows=MappingProxyType({"train": 14041, "validation": 3250, "test": 3453}),
            length=20,
        ),
        "wikiann": Preset(
            "unimelb-nlp/wikiann",
            ("tokens", None, "ner_tags"),
            ("tokens", None, "ner_tags"),
            ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"),
            ("span_f1", "accuracy"),
            config="en",
            kind=TOKEN,
            files=_parts_of("{0}.jsonl", "{0}.parquet", "{0}-00000-of-00001.parquet"),
            parts=("train", "validation", "test"),
            rows=MappingProxyType({"train": 20000, "validation": 10000, "test": 10000}),
            length=12,
            languages=True,
        ),
        "wikitext2": Preset(
            "Salesforce/wikitext",
            ("text", None, ""),
            ("text", None, ""),
            MASKED_LABELS,
            ("perplexity", "accuracy"),
            config="wikitext-2-raw-v1",
            kind=MASKED,
            files=MappingProxyType(
                {
                    "train": ("train.txt", "wiki.train.raw", "wiki.train.tokens"),
                    "validation": ("valid.txt", "wiki.valid.raw", "wiki.valid.tokens"),
                    "test": ("test.txt", "wiki.test.raw", "wiki.test.tokens"),
                }
            ),
            parts=("train", "validation", "test"),
            rows=MappingProxyType({"train": 36718, "validation": 3760, "test": 4358}),
            length=70,
        ),
    }
)


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
        raise ConfigError(
            f"task: '{name}' names the language '{language}'; a language is a short code. Write {short}/de, say."
        )
    return f"{short}-{language}", replace(preset, config=language)
