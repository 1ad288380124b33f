"""Known public tasks: where they are, which columns they have, and how they are scored."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

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
        problem_type: What is predicted.
        header: Column names of files that have none.
        files: Part to the names its published file goes by; a name may be a pair of files whose lines belong together,
            and of images a folder.
        stand_ins: Names of files that stand in for the train part where none of the published ones is there.
        parts: Parts of the hub set that have labels.
        rows: Part to the number of its rows as published; where there are several languages, that of English.
        length: Tokens of a usual row (the mean over the published rows, special tokens included; of texts that become
            others those that are read; of an image patches of 16 of 224 pixels and one more).
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
    kind: str = "sequence_classification"
    problem_type: str = "classification"
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
_IMAGES = ("image", None, "label")
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
            problem_type="regression",
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
            kind="token_classification",
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
            kind="token_classification",
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
            ("token",),
            ("perplexity", "accuracy"),
            config="wikitext-2-raw-v1",
            kind="masked_lm",
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
            ("text",),
            ("rougeL", "rouge1", "rouge2", "rougeLsum"),
            config="3.0.0",
            kind="summarization",
            problem_type="generation",
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
            ("text",),
            ("bleu", "chrf"),
            config="ro-en",
            kind="translation",
            problem_type="generation",
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
            _IMAGES,
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            ("accuracy", "f1"),
            kind="image_classification",
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
            _IMAGES,
            (),
            ("accuracy", "f1"),
            kind="image_classification",
            files=MappingProxyType({"train": ("train.tar", "train"), "test": ("test.tar", "test")}),
            parts=("train", "test"),
            rows=MappingProxyType({"train": 50000, "test": 10000}),
            length=197,
            classes=100,
        ),
        "imagenet": Preset(
            "ILSVRC/imagenet-1k",
            ("image", None, "label"),
            _IMAGES,
            (),
            ("accuracy", "f1"),
            kind="image_classification",
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
        raise DataError(
            f"task {name}: {folder} has no {known}; "
            "a folder must hold the published files. Check the folder, or name the files one by one.",
            path=str(folder),
        )
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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"task {name}: '{preset.hub}' cannot be fetched ({reason}); without files a preset comes from the hub. "
            "Give `files`, or try again with a connection."
        ) from error
    return {part: fetched[part] for part in preset.parts}  # pyright: ignore


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
