"""Known public tasks: where they are, which columns they have, and how they are scored."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import kind_of
from lamina.tasks.base import PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the hub set that have labels."""
        return tuple(self.rows)

    @property
    def class_names(self) -> tuple[str, ...]:
        """`labels`; where none is named, numbers stand for them."""
        return self.labels or tuple(map(str, range(self.classes)))


_ONE, _TWO, _IMAGE = ("sentence", None, "label"), ("sentence1", "sentence2", "label"), ("image", None, "label")
_ENTAILMENT = ("entailment", "not_entailment")
_SPANS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC")
_CIFAR = {"train": ("train.tar", "train"), "test": ("test.tar", "test")}
_IMAGE_SIZES = {"train": 50000, "test": 10000}
_COLA_HEADER = ("source", "label", "mark", "sentence")


def _glue(
    config: str,
    columns: tuple[str, str | None, str],
    labels: tuple[str, ...],
    metrics: tuple[str, ...],
    rows: tuple[int, int],
    length: int,
    **more: Any,
) -> Preset:
    """A task of GLUE; the labels of its test parts are not public."""
    sizes: dict[str, int] = dict(zip(PARTS[:2], rows, strict=True))
    files = {"train": ("train.tsv",), "validation": ("dev.tsv",)}
    return Preset("nyu-mll/glue", columns, labels, metrics, sizes, length, files, config=config, **more)


def _sizes(*rows: int) -> dict[str, int]:
    return dict(zip(PARTS, rows, strict=True))


def _files(*names: str) -> dict[str, tuple[str, ...]]:
    return {part: tuple(name.format(part) for name in names) for part in PARTS}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "cola": _glue(
            "cola", _ONE, ("unacceptable", "acceptable"), ("mcc", "accuracy"), (8551, 1043), 12, header=_COLA_HEADER
        ),
        "sst2": _glue("sst2", _ONE, ("negative", "positive"), ("accuracy",), (67349, 872), 13),
        "mrpc": _glue(
            "mrpc",
            ("#1 String", "#2 String", "Quality"),
            ("not_equivalent", "equivalent"),
            ("accuracy", "f1"),
            (3668, 408),
            53,
            hub_columns=_TWO,
        ),
        "rte": _glue("rte", _TWO, _ENTAILMENT, ("accuracy",), (2490, 277), 70),
        "stsb": _glue(
            "stsb",
            ("sentence1", "sentence2", "score"),
            ("score",),
            ("pearson", "spearman"),
            (5749, 1500),
            28,
            hub_columns=_TWO,
            problem_type="regression",
        ),
        "wnli": _glue("wnli", _TWO, _ENTAILMENT[::-1], ("accuracy",), (635, 71), 37),
        "qnli": _glue("qnli", ("question", "sentence", "label"), _ENTAILMENT, ("accuracy",), (104743, 5463), 50),
        "imdb": Preset(
            "stanfordnlp/imdb",
            ("text", None, "label"),
            ("negative", "positive"),
            ("accuracy",),
            {"train": 25000, "test": 25000},
            314,
            {"train": ("train.jsonl",), "test": ("test.jsonl",)},
        ),
        "conll2003": Preset(
            "eriktks/conll2003",
            (0, None, -1),
            (*_SPANS, "B-MISC", "I-MISC"),
            ("span_f1", "accuracy"),
            _sizes(14041, 3250, 3453),
            20,
            {
                "train": ("eng.train", "train.txt"),
                "validation": ("eng.testa", "valid.txt"),
                "test": ("eng.testb", "test.txt"),
            },
            kind="token_classification",
            revision="refs/convert/parquet",  # the set's own loading script runs in no current version of datasets
            hub_columns=("tokens", None, "ner_tags"),
        ),
        "wikiann": Preset(
            "unimelb-nlp/wikiann",
            ("tokens", None, "ner_tags"),
            _SPANS,
            ("span_f1", "accuracy"),
            _sizes(20000, 10000, 10000),
            12,
            _files("{0}.jsonl", "{0}.parquet", "{0}-00000-of-00001.parquet"),
            kind="token_classification",
            config="en",
            languages=True,
        ),
        "wikitext2": Preset(
            "Salesforce/wikitext",
            ("text", None, ""),
            ("token",),
            ("perplexity", "accuracy"),
            _sizes(36718, 3760, 4358),
            70,
            {
                part: (f"{short}.txt", f"wiki.{short}.raw", f"wiki.{short}.tokens")
                for part, short in zip(PARTS, ("train", "valid", "test"), strict=True)
            },
            kind="masked_lm",
            config="wikitext-2-raw-v1",
        ),
        "cnn_dailymail": Preset(
            "abisee/cnn_dailymail",
            ("article", None, "highlights"),
            ("text",),
            ("rougeL", "rouge1", "rouge2", "rougeLsum"),
            _sizes(287113, 13368, 11490),
            900,
            _files("{0}.csv"),
            kind="summarization",
            problem_type="generation",
            config="3.0.0",
            stand_ins=("articles.csv",),
        ),
        "wmt16_en_ro": Preset(
            "wmt/wmt16",
            ("translation.en", None, "translation.ro"),
            ("text",),
            ("bleu", "chrf"),
            _sizes(610320, 1999, 1999),
            35,
            {part: ((f"{part}.en", f"{part}.ro"), f"{part}.jsonl") for part in PARTS},
            kind="translation",
            problem_type="generation",
            config="ro-en",
            stand_ins=(("tatoeba.ron-eng.eng", "tatoeba.ron-eng.ron"),),
        ),
        "cifar10": Preset(
            "uoft-cs/cifar10",
            _IMAGE,
            ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
            ("accuracy", "f1"),
            _IMAGE_SIZES,
            197,
            {
                "train": (*_CIFAR["train"], "train_1000_per_class.tar"),
                "test": (*_CIFAR["test"], "test_200_per_class.tar"),
            },
            kind="image_classification",
            hub_columns=("img", None, "label"),
        ),
        "cifar100": Preset(
            "uoft-cs/cifar100",
            _IMAGE,
            (),
            ("accuracy", "f1"),
            _IMAGE_SIZES,
            197,
            _CIFAR,
            kind="image_classification",
            hub_columns=("img", None, "fine_label"),
            classes=100,
        ),
        "imagenet": Preset(
            "ILSVRC/imagenet-1k",
            _IMAGE,
            (),
            ("accuracy", "f1"),
            {"train": 1281167, "validation": 50000},  # the labels of the test part are not public here either
            197,
            {"train": ("train", "train.tar"), "validation": ("val", "validation", "val.tar")},
            kind="image_classification",
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
            "a folder holds the published files, or `files` names them one by one.",
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
            f"task {name}: '{preset.hub}' cannot be fetched ({reason}); without `files` a preset comes from the hub."
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
