"""Known public tasks, from files in the published formats and from the hub."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.files import jsonl, put
from tests.support.pictures import picture, picture_folder, picture_tar

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks.presets import PRESETS, find_preset
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

IMAGE = "image_classification"
TEXT = "\n".join(["", " = One = ", " ", *(f" Line {i} . " for i in range(39))])


# Presets, on files in the published formats

PUBLISHED = {
    "cola": ('gj04\t1\t\tHe said "go.\ngj04\t0\t*\tgo He said.\n', ('He said "go.', "go He said."), (1, 0)),
    "sst2": ("sentence\tlabel\nso good \t1\nso bad \t0\n", ("so good ", "so bad "), (1, 0)),
    "mrpc": (
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tA " b\tB a\n0\t7\t9\tC\tD\n',
        (('A " b', "B a"), ("C", "D")),
        (1, 0),
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n",
        (("A", "B"), ("C", "D")),
        (1, 0),
    ),
    "stsb": (
        "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\tA\tB\t5.000\n1\tx\tC\tD\t2\n",
        (("A", "B"), ("C", "D")),
        (5.0, 2.0),
    ),
    "wnli": ("index\tsentence1\tsentence2\tlabel\n0\tA\tB\t1\n1\tC\tD\t0\n", (("A", "B"), ("C", "D")), (1, 0)),
    "qnli": (
        "index\tquestion\tsentence\tlabel\n0\tA?\tB\tnot_entailment\n1\tC?\tD\tentailment\n",
        (("A?", "B"), ("C?", "D")),
        (1, 0),
    ),
    "imdb": ('{"text": "Fun", "label": 1}\n{"text": "Dull", "label": 0}\n', ("Fun", "Dull"), (1, 0)),
    "conll2003": (
        "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nsaid V I-VP O\n\nUS NNP I-NP I-LOC\nUK NNP I-NP B-LOC\n",
        ("EU said", "US UK"),
        ((3, 0), (5, 5)),
    ),
    "wikiann": (
        '{"tokens": ["EU", "said"], "ner_tags": [3, 0]}\n{"tokens": ["US", "UK"], "ner_tags": [5, 5]}\n',
        ("EU said", "US UK"),
        ((3, 0), (5, 5)),
    ),
    "cnn_dailymail": (
        'article,highlights,id\n"He said ""go"".\nThey went.",They went .,7\nA cat.,Cat .,8\n',
        ('He said "go".\nThey went.', "A cat."),
        ("They went .", "Cat ."),
    ),
    "wmt16_en_ro": (("yes\nno\n", "da\nnu\n"), ("yes", "no"), ("da", "nu")),
    "wikitext2": (" \n = A heading = \n \n Some words . \n", (" = A heading = ", " Some words . "), (None, None)),
}


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.kind != IMAGE])
def test_preset_reads_published_files(tmp_path: Path, name: str):
    text, texts, labels = PUBLISHED[name]
    for names in PRESETS[name].files.values():
        for file, content in [(names[0], text)] if isinstance(text, str) else zip(names[0], text, strict=True):
            put(tmp_path / file, content)  # pyright: ignore
    task = Task.preset(name, files=tmp_path)
    part = "test" if name == "imdb" else "validation"  # IMDB has no validation file: a row of train is set aside
    assert task.split(part).texts == texts
    assert task.split(part).labels == labels
    assert task.metrics == PRESETS[name].metrics
    assert set(task.metrics) <= set(task.kind.problem_types[task.problem_type])
    assert (task.metric, task.name) == (task.metrics[0], name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_how_large_they_are(name: str):
    preset = PRESETS[name]
    assert set(preset.rows) <= {"train", "validation", "test"}
    assert all(count > 0 for count in preset.rows.values())
    assert 5 < preset.length < 1024
    assert bool(preset.labels) != bool(preset.classes)
    assert len(preset.class_names) == (len(preset.labels) or preset.classes)


def test_preset_with_files_named(tmp_path: Path):
    path = put(tmp_path / "some.tsv", PUBLISHED["cola"][0])
    task = Task.preset("glue/cola", files={"train": path, "validation": str(path)}, limit=1)
    assert (task.name, len(task.split("train")), len(task.split("validation"))) == ("cola", 1, 2)
    with pytest.raises(UnknownNameError, match="unknown split 'dev'; known: train, validation, test"):
        Task.preset("cola", files={"train": path, "dev": path})


def test_folder_without_published_files(tmp_path: Path):
    with pytest.raises(DataError, match=r"task conll2003: .* has no eng\.train or train\.txt"):
        Task.preset("conll2003", files=tmp_path)


def test_folder_without_validation_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path / "train.tsv", PUBLISHED["cola"][0] * 2)
    task = Task.preset("cola", files=str(tmp_path))
    assert len(task.split("validation")) == 1
    assert "has no validation file" in caplog.text


def test_unknown_preset():
    with pytest.raises(UnknownNameError, match=r"unknown preset 'colla'.* Did you mean 'cola'"):
        find_preset("colla")


def test_a_language_may_follow_the_name():
    name, preset = find_preset("wikiann/zh-yue")
    assert (name, preset.config) == ("wikiann-zh-yue", "zh-yue")
    assert find_preset("wikiann")[1].config == "en"
    assert find_preset("wikiann/simple")[1].config == "simple"
    with pytest.raises(UnknownNameError, match="unknown preset 'imdb/de'"):
        find_preset("imdb/de")
    for name in ("wikiann/", "wikiann/German", "wikiann/german", "wikiann/de/x"):
        with pytest.raises(ConfigError, match="; a language is a short code"):
            find_preset(name)


def test_preset_from_the_hub(monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked: list[Any] = []

    def load(*args: Any, **options: Any) -> datasets.DatasetDict:
        asked.append((args, options))
        rows = {"tokens": [["EU", "said"], ["US"]], "ner_tags": [[3, 0], [5]]}
        return datasets.DatasetDict(
            {part: datasets.Dataset.from_dict(rows) for part in ("train", "validation", "test")}
        )

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = Task.preset("conll2003")
    assert asked == [(("eriktks/conll2003", None), {"revision": "refs/convert/parquet"})]
    assert task.split("test").texts == ("EU said", "US")
    assert task.split("test").labels == ((3, 0), (5,))


def test_a_language_from_the_hub(monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked: list[Any] = []

    def load(*args: Any, **options: Any) -> datasets.DatasetDict:
        asked.append(args)
        rows = datasets.Dataset.from_dict({"tokens": [["EU", "said"]], "ner_tags": [[3, 0]], "langs": [["sw", "sw"]]})
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = Task.preset("wikiann/sw")
    assert asked == [("unimelb-nlp/wikiann", "sw")]
    assert (task.name, task.split("test").labels) == ("wikiann-sw", ((3, 0),))


def test_hub_parts_without_labels_are_left(monkeypatch: pytest.MonkeyPatch):
    import datasets

    parts = {part: {"sentence": ["a", "b"], "label": [0, 1]} for part in ("train", "validation")}
    parts["test"] = {"sentence": ["c"], "label": [-1]}
    fetched = datasets.DatasetDict({part: datasets.Dataset.from_dict(rows) for part, rows in parts.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: fetched)
    task = Task.preset("sst2")
    assert list(task.splits) == ["train", "validation"]
    assert task.split("train").labels == (0, 1)


def test_hub_out_of_reach():
    with pytest.raises(DataError, match="task rte: 'nyu-mll/glue' cannot be fetched"):
        Task.preset("rte")


def test_without_a_train_file_the_validation_text_stands_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path / "valid.txt", TEXT)
    put(tmp_path / "test.txt", "other\n")
    task = Task.preset("wikitext2", files=tmp_path)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 36, "validation": 4, "test": 1}
    assert "has no train file; the validation file is used instead" in caplog.text
    assert "the last tenth of the text is held out" in caplog.text
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(DataError, match=r"has no train\.txt or wiki\.train\.raw"):
        Task.preset("wikitext2", files=tmp_path)


def test_lone_articles_stand_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = "".join(f"Article {i},Short {i},{i}\n" for i in range(20))
    put(tmp_path / "articles.csv", "article,highlights,id\n" + rows)
    task = Task.preset("cnn_dailymail", files=tmp_path)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 18, "validation": 2}
    assert "has no train file; the train split is read from articles.csv" in caplog.text
    assert "has no validation file; a tenth of the train split is held out" in caplog.text
    put(tmp_path / "validation.csv", PUBLISHED["cnn_dailymail"][0])  # the articles may be a part of it
    with pytest.raises(DataError, match=r"has no train\.csv; a folder holds the published files"):
        Task.preset("cnn_dailymail", files=tmp_path)


def test_a_lone_pair_stands_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path / "tatoeba.ron-eng.eng", "yes\n" * 10)
    with pytest.raises(DataError, match=r"has no train\.en and train\.ro or train\.jsonl;"):
        Task.preset("wmt16_en_ro", files=tmp_path)
    put(tmp_path / "tatoeba.ron-eng.ron", "da\n" * 10)
    task = Task.preset("wmt16_en_ro", files=tmp_path)
    assert set(task.split("train").labels) == {"da"}
    assert "is read from tatoeba.ron-eng.eng and tatoeba.ron-eng.ron" in caplog.text
    files = put(tmp_path / "a.en", "yes\nno\n"), put(tmp_path / "a.ro", "da\nnu\n")
    assert Task.preset("wmt16_en_ro", files={"test": files}).split("test").labels == ("da", "nu")


def test_translations_as_published_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = {"translation": [{"en": "yes", "ro": "da"}, {"en": "no", "ro": "nu"}]}
    asked = on_the_hub(monkeypatch, dict.fromkeys(("train", "validation", "test"), rows))
    task = Task.preset("wmt16_en_ro")
    assert asked == [("wmt/wmt16", "ro-en")]
    assert (task.split("test").texts, task.split("test").labels) == (("yes", "no"), ("da", "nu"))
    for part in ("train", "validation"):
        jsonl(tmp_path / f"{part}.jsonl", [{"translation": {"en": "yes", "ro": "da"}}])
    assert Task.preset("wmt16_en_ro", files=tmp_path).split("train").labels == ("da",)


def on_the_hub(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, dict[str, list[Any]]], features: Any = None
) -> list[Any]:
    """Put a set there; returns what will be asked for."""
    import datasets

    asked: list[Any] = []
    sets = {part: datasets.Dataset.from_dict(rows, features=features) for part, rows in parts.items()}

    def load(*args: Any, **options: Any) -> datasets.DatasetDict:
        asked.append(args)
        return datasets.DatasetDict(sets)  # pyright: ignore

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def test_presets_of_pictures_read_published_files(tmp_path: Path):
    labels = PRESETS["cifar10"].labels
    folder = picture_folder(tmp_path / "some", classes=labels, rows=10)
    for name in ("cifar10", "cifar100"):
        picture_folder(tmp_path / name / "test", classes=labels, rows=1)
        picture_tar(tmp_path / name / "train.tar", folder)
        task = Task.preset(name, files=tmp_path / name)
        assert (task.kind, task.labels, task.metrics) == (IMAGE, labels, ("accuracy", "f1"))
        assert {part: len(split) for part, split in task.splits.items()} == {"train": 90, "validation": 10, "test": 10}
        assert Counter(task.split("validation").labels) == Counter(range(10))
    for part in ("train", "val"):
        picture_folder(tmp_path / "imagenet" / part, classes=("n02", "n01"))
    task = Task.preset("imagenet", files=tmp_path / "imagenet")
    assert task.labels == ("n01", "n02")
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 4, "validation": 4}


def test_a_smaller_tar_is_taken_too(tmp_path: Path):
    folder = picture_folder(tmp_path / "some", classes=("cat", "dog"), under="train")
    picture_tar(tmp_path / "train_1000_per_class.tar", folder)
    assert len(Task.preset("cifar10", files=tmp_path).split("train")) == 3


def test_classes_have_the_names_and_ids_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    import datasets

    names = ["tench", "crane", "cock"]  # in an order of their own
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = {"image": [picture(shade) for shade in (0, 120, 250)], "label": [2, 1, 0]}
    on_the_hub(monkeypatch, dict.fromkeys(("train", "validation"), rows), features)
    task = Task.preset("imagenet")
    assert task.labels == tuple(names)
    assert task.split("train").labels == (2, 1, 0)
    assert task.split("train").texts[2].open().getpixel((0, 0))[0] > 200
