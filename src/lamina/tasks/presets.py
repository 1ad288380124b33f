"""Known public tasks: where they are, which columns they have, and how they are scored."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, UnknownNameError
from lamina.tasks.kinds import IMAGE, MASKED, MASKED_LABELS, SEQUENCE, SUMMARIZATION, TEXT_LABELS, TOKEN, TRANSLATION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GLUE_FILES = MappingProxyType({"train": ("train.tsv",), "validation": ("dev.tsv",)})
_GLUE_PARTS = ("train", "validation")  # the labels of GLUE's test parts are not public


@dataclass(frozen=True)
class Preset:
    """One public task.

    Attributes:
        hub: Data set on the hub, `config` and `revision` with it.
        hub_columns: Text, second text (or None) and label there.
        columns: The same three in the published files.
        labels: Class names in the order of the ids; for regression the name of the score. None named: those of the hub
            set, or the names of the folders.
        metrics: All that are reported; the first picks the best checkpoint.
        kind: The kind of task.
        problem: What is predicted.
        header: Column names of files that have none.
        files: Part to the names its published file goes by; a name may be a pair of files whose lines belong together,
            and of pictures a folder.
        stand_ins: Names of files that stand in for the train part where none of the published ones is there.
        parts: Parts of the hub set that have labels.
        rows: Part to the number of its rows as published; where there are several languages, that of English.
        length: Tokens of a usual row (the mean over the published rows, special tokens included; of texts that become
            others those that are read; of a picture patches of 16 of 224 pixels and one more).
        languages: Whether `config` is a language, which may follow the name: "wikiann/de".
        classes: How many labels there are, where none is named.
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
    files: Mapping[str, tuple[str | tuple[str, str], ...]] = field(default_factory=lambda: _GLUE_FILES)
    stand_ins: tuple[str | tuple[str, str], ...] = ()
    parts: tuple[str, ...] = _GLUE_PARTS
    rows: Mapping[str, int] = field(default_factory=dict)
    length: int = 64
    languages: bool = False
    classes: int = 0

    @property
    def class_names(self) -> tuple[str, ...]:
        """`labels`; where none is named, numbers stand for them."""
        return self.labels or tuple(map(str, range(self.classes)))


_LANGUAGE = re.compile(r"[a-z]{2,}(-[a-z]+)*")
_GLUE = "nyu-mll/glue"
_TWO = ("sentence1", "sentence2", "label")
_PICTURES = ("image", None, "label")
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
        "cnn_dailymail": Preset(
            "abisee/cnn_dailymail",
            ("article", None, "highlights"),
            ("article", None, "highlights"),
            TEXT_LABELS,
            ("rougeL", "rouge1", "rouge2", "rougeLsum"),
            config="3.0.0",
            kind=SUMMARIZATION,
            problem="generation",
            files=_parts_of("{0}.csv"),
            stand_ins=("articles.csv",),
            parts=("train", "validation", "test"),
            rows=MappingProxyType({"train": 287113, "validation": 13368, "test": 11490}),
            length=900,
        ),
        "wmt16_en_ro": Preset(
            "wmt/wmt16",
            ("translation.en", None, "translation.ro"),
            ("translation.en", None, "translation.ro"),
            TEXT_LABELS,
            ("bleu", "chrf"),
            config="ro-en",
            kind=TRANSLATION,
            problem="generation",
            files=MappingProxyType(
                {part: ((f"{part}.en", f"{part}.ro"), f"{part}.jsonl") for part in ("train", "validation", "test")}
            ),
            stand_ins=(("tatoeba.ron-eng.eng", "tatoeba.ron-eng.ron"),),
            parts=("train", "validation", "test"),
            rows=MappingProxyType({"train": 610320, "validation": 1999, "test": 1999}),
            length=35,
        ),
        "cifar10": Preset(
            "uoft-cs/cifar10",
            ("img", None, "label"),
            _PICTURES,
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            ("accuracy", "f1"),
            kind=IMAGE,
            files=MappingProxyType(
                {
                    "train": ("train.tar", "train", "train_1000_per_class.tar"),
                    "test": ("test.tar", "test", "test_200_per_class.tar"),
                }
            ),
            parts=("train", "test"),
            rows=MappingProxyType({"train": 50000, "test": 10000}),
            length=197,
        ),
        "cifar100": Preset(
            "uoft-cs/cifar100",
            ("img", None, "fine_label"),
            _PICTURES,
            (),
            ("accuracy", "f1"),
            kind=IMAGE,
            files=MappingProxyType({"train": ("train.tar", "train"), "test": ("test.tar", "test")}),
            parts=("train", "test"),
            rows=MappingProxyType({"train": 50000, "test": 10000}),
            length=197,
            classes=100,
        ),
        "imagenet": Preset(
            "ILSVRC/imagenet-1k",
            ("image", None, "label"),
            _PICTURES,
            (),
            ("accuracy", "f1"),
            kind=IMAGE,
            files=MappingProxyType({"train": ("train", "train.tar"), "validation": ("val", "validation", "val.tar")}),
            parts=_GLUE_PARTS,  # the labels of the test part are not public here either
            rows=MappingProxyType({"train": 1281167, "validation": 50000}),
            length=197,
            classes=1000,
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


def first_there(folder: Path, names: Sequence[str | tuple[str, str]]) -> Path | tuple[Path, Path] | None:
    """The first of some files, pairs of files or folders that a folder holds."""
    for name in names:
        paths = [folder / one for one in ((name,) if isinstance(name, str) else name)]
        if all(path.exists() for path in paths):
            return paths[0] if isinstance(name, str) else (paths[0], paths[1])
    return None


def file_names(source: str | Path | Sequence[str | Path]) -> str:
    """How messages call one file or a pair."""
    return Path(source).name if isinstance(source, str | Path) else " and ".join(Path(one).name for one in source)


def class_names(rows: Any, column: str) -> tuple[str, ...] | None:
    """The class names that a column of a hub set has, in the order of their ids; None if it has none."""
    names = getattr(rows.features.get(column), "names", None)
    return None if names is None else tuple(names)
