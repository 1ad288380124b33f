from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.pictures import CLASSES, encoded, picture, picture_folder, picture_tar

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks.kinds import METRICS
from lamina.tasks.presets import PRESETS, find_preset
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCE, TOKEN, IMAGE = "sequence_classification", "token_classification", "image_classification"


def put(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def tsv(path: Path, rows: list[str], header: str = "sentence\tlabel") -> Path:
    return put(path, "\n".join([header, *rows]) + "\n")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    return put(path, "".join(json.dumps(row) + "\n" for row in rows))


# From files


def test_classification_is_read_off_the_file(tmp_path: Path):
    train = tsv(tmp_path / "moods.tsv", ["good\tpos", "bad\tneg", "fine\tpos"])
    task = Task.from_files(SEQUENCE, train=train, validation=tsv(tmp_path / "dev.tsv", ["so\tneg"]))
    assert (task.kind, task.problem, task.labels, task.name) == (SEQUENCE, "classification", ("neg", "pos"), "moods")
    assert (task.metric, task.metrics) == ("accuracy", ("accuracy", "f1", "mcc"))
    assert task.split("train").texts == ("good", "bad", "fine")
    assert task.split("train").labels == (1, 0, 1)
    assert task.split("train").words is None
    assert task.split("validation").labels == (0,)


def test_unknown_split(tmp_path: Path):
    task = Task.from_files(SEQUENCE, train=tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"] * 10))
    with pytest.raises(UnknownNameError, match="task t: unknown split 'test'; known: train, validation"):
        task.split("test")


def test_a_tenth_of_train_validates(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{'ab'[i % 4 == 0]}" for i in range(200)])
    task = Task.from_files(SEQUENCE, train=train, seed=5)
    assert (len(task.split("train")), len(task.split("validation"))) == (180, 20)
    assert Counter(task.split("validation").labels) == {0: 15, 1: 5}
    assert task == Task.from_files(SEQUENCE, train=train, seed=5)


def test_limit_leaves_validation_whole(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{i % 2}" for i in range(200)])
    task = Task.from_files(SEQUENCE, train=train, limit=7)
    assert (len(task.split("train")), len(task.split("validation"))) == (7, 20)
    assert task.split("validation") == Task.from_files(SEQUENCE, train=train).split("validation")


def test_numbers_sort_as_numbers(tmp_path: Path):
    task = Task.from_files(SEQUENCE, train=tsv(tmp_path / "t.tsv", [f"a\t{i}" for i in range(12)] * 5))
    assert task.labels == tuple(map(str, range(12)))


@pytest.mark.parametrize("cells", [["0", "1", "2"], ["no", "yes", "maybe"]])
def test_labels_given_by_name_or_id(tmp_path: Path, cells: list[str]):
    rows = [f"a\t{cell}" for cell in cells]
    labels = ("no", "yes", "maybe")
    task = Task.from_files(
        SEQUENCE, train=tsv(tmp_path / "t.tsv", rows), test=tsv(tmp_path / "u.tsv", rows), labels=labels
    )
    assert task.labels == labels
    assert task.split("test").labels == (0, 1, 2)


def test_numeric_names_are_not_taken_as_ids(tmp_path: Path):
    task = Task.from_files(SEQUENCE, test=tsv(tmp_path / "t.tsv", ["a\t1", "a\t3"]), labels=("3", "1"))
    assert task.split("test").labels == (1, 0)


def test_pairs(tmp_path: Path):
    rows = [{"first": "a", "second": "b", "same": True}, {"first": "c", "second": "d", "same": False}]
    path = jsonl(tmp_path / "t.jsonl", rows)
    task = Task.from_files(SEQUENCE, train=path, validation=path, text="first", text_pair="second", label="same")
    assert task.labels == ("False", "True")
    assert task.split("train").texts == (("a", "b"), ("c", "d"))


@pytest.mark.parametrize("cells", [["1.5", "2", "-0.25"], ["1.0", "2.0", "3e0"]])
def test_decimal_points_mean_regression(tmp_path: Path, cells: list[str]):
    path = tsv(tmp_path / "t.tsv", [f"a\t{cell}" for cell in cells], header="sentence\tgrade")
    task = Task.from_files(SEQUENCE, train=path, validation=path, label="grade")
    assert (task.problem, task.labels, task.metrics) == ("regression", ("grade",), ("pearson", "spearman"))
    assert task.split("train").labels == tuple(map(float, cells))


def test_problem_can_be_named(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\t1", "b\t0"])
    task = Task.from_files(SEQUENCE, train=path, validation=path, problem="regression")
    assert (task.problem, task.split("train").labels) == ("regression", (1.0, 0.0))
    floats = jsonl(tmp_path / "t.jsonl", [{"sentence": "a", "label": 1.0}, {"sentence": "b", "label": 0.0}])
    task = Task.from_files(SEQUENCE, train=floats, validation=floats, problem="classification")
    assert (task.labels, task.split("train").labels) == (("0", "1"), (1, 0))


@pytest.mark.parametrize("cell", ["high", "nan", "inf", ""])
def test_regression_needs_numbers(tmp_path: Path, cell: str):
    path = tsv(tmp_path / "t.tsv", ["a\t1.5", f"b\t{cell}"])
    with pytest.raises(DataError, match=f"row 3 has '{cell}' in column 'label'; a regression task needs a number"):
        Task.from_files(SEQUENCE, train=path, problem="regression")


def test_lists_mean_multi_label(tmp_path: Path):
    rows = [{"sentence": "a", "label": ["x", "z"]}, {"sentence": "b", "label": []}, {"sentence": "c", "label": ["y"]}]
    path = jsonl(tmp_path / "t.jsonl", rows)
    task = Task.from_files(SEQUENCE, train=path, validation=path)
    assert (task.problem, task.labels, task.metric) == ("multi_label", ("x", "y", "z"), "f1")
    assert task.split("train").labels == ((1, 0, 1), (0, 0, 0), (0, 1, 0))


def test_multi_label_in_one_cell(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\tx, z", "b\t", "c\ty"])
    task = Task.from_files(SEQUENCE, train=path, validation=path, problem="multi_label")
    assert task.split("train").labels == ((1, 0, 1), (0, 0, 0), (0, 1, 0))
    with pytest.raises(DataError, match="row 2 has label 'x'; the labels are: y, z"):
        Task.from_files(SEQUENCE, train=path, problem="multi_label", labels=("y", "z"))


def test_label_outside_the_set(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", ["a\tyes", "b\tno"])
    dev = tsv(tmp_path / "d.tsv", ["a\tyes", "b\tmayb"])
    with pytest.raises(DataError, match=r"d\.tsv row 3 has label 'mayb'; the labels are: no, yes") as info:
        Task.from_files(SEQUENCE, train=train, validation=dev)
    assert (info.value.row, info.value.column, info.value.path) == (3, "label", str(dev))


def test_text_must_be_text(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"sentence": ["a"], "label": 1}])
    with pytest.raises(DataError, match="row 1 has no text in column 'sentence' but list"):
        Task.from_files(SEQUENCE, train=path)


def test_metric_first(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"])
    task = Task.from_files(SEQUENCE, train=path, validation=path, metric="mcc", name="moods")
    assert (task.metric, task.metrics, task.name) == ("mcc", ("mcc", "accuracy", "f1"), "moods")
    with pytest.raises(UnknownNameError, match=r"unknown metric 'acuracy'; known: accuracy, f1, mcc\. Did you mean"):
        Task.from_files(SEQUENCE, train=path, metric="acuracy")


def test_names_that_do_not_exist(tmp_path: Path):
    path = tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"])
    with pytest.raises(UnknownNameError, match="unknown kind 'classification'"):
        Task.from_files("classification", train=path)
    with pytest.raises(UnknownNameError, match=r"unknown problem 'regresion'.* Did you mean 'regression'"):
        Task.from_files(SEQUENCE, train=path, problem="regresion")
    with pytest.raises(DataError, match="no column 'text'; its columns are: sentence, label"):
        Task.from_files(SEQUENCE, train=path, text="text")


def test_files_and_labels_are_needed(tmp_path: Path):
    with pytest.raises(DataError, match="no file was given"):
        Task.from_files(SEQUENCE)
    path = tsv(tmp_path / "t.tsv", ["a\tx", "b\ty"])
    with pytest.raises(DataError, match="no train file was given, and no labels"):
        Task.from_files(SEQUENCE, test=path)
    task = Task.from_files(SEQUENCE, test=path, labels=["x", "y"])
    assert list(task.splits) == ["test"]


@pytest.mark.parametrize("labels", [[], ["x", "y", "x"]])
def test_labels_are_distinct(tmp_path: Path, labels: list[str]):
    with pytest.raises(ConfigError, match="every class has a name of its own"):
        Task.from_files(SEQUENCE, train=tsv(tmp_path / "t.tsv", ["a\tx"]), labels=labels)


# Token tasks


def test_words_and_tags_from_jsonl(tmp_path: Path):
    rows = [{"tokens": ["EU", "rejects", "a"], "tags": ["I-ORG", "O", "O"]}, {"tokens": [], "tags": []}]
    path = jsonl(tmp_path / "t.jsonl", rows)
    task = Task.from_files(TOKEN, train=path, validation=path, text="tokens", label="tags")
    assert (task.labels, task.metrics) == (("B-ORG", "I-ORG", "O"), ("span_f1", "accuracy", "f1"))
    train = task.split("train")
    assert train.texts == ("EU rejects a", "")
    assert train.labels == ((0, 2, 2), ())
    assert train.words == (((0, 2), (3, 10), (11, 12)), ())


def test_tags_as_ids(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"tokens": ["EU", "a"], "tags": [1, 0]}])
    task = Task.from_files(TOKEN, test=path, text="tokens", label="tags", labels=("O", "B-ORG", "I-ORG"))
    assert task.split("test").labels == ((1, 0),)


def test_tags_that_mark_no_spans(tmp_path: Path):
    path = put(tmp_path / "pos.conll", "the DT\ncat NN\n\nsat VB\nI PRP\n")
    task = Task.from_files(TOKEN, train=path, validation=path)
    assert (task.labels, task.metric) == (("DT", "NN", "PRP", "VB"), "accuracy")
    assert task.split("train").labels == ((0, 1), (3, 2))
    with pytest.raises(UnknownNameError, match="unknown metric 'span_f1'"):
        Task.from_files(TOKEN, train=path, metric="span_f1")


def test_tags_without_b_stay_when_so_named(tmp_path: Path):
    path = put(tmp_path / "t.conll", "EU I-ORG\nof O\n")
    task = Task.from_files(TOKEN, test=path, labels=("O", "I-ORG"))
    assert task.split("test").labels == ((1, 0),)


def test_conll_columns_by_number(tmp_path: Path):
    path = put(tmp_path / "eng.train", "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n")
    task = Task.from_files(TOKEN, train=path, validation=path, label=1)
    assert task.labels == ("NNP", "VBZ")
    task = Task.from_files(TOKEN, train=path, validation=path, label="-2")
    assert task.labels == ("B-NP", "B-VP", "I-NP", "I-VP", "O")


def test_unknown_tag_names_its_line(tmp_path: Path):
    train = put(tmp_path / "a.conll", "x B-A\n")
    dev = put(tmp_path / "b.conll", "x B-A\n\nx O\ny I-B\n")
    with pytest.raises(DataError, match=r"b\.conll row 4 has label 'B-B'; the labels are: B-A, I-A, O"):
        Task.from_files(TOKEN, train=train, validation=dev)


def test_words_and_tags_of_different_length(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"tokens": ["a"], "tags": ["O"]}, {"tokens": ["a", "b"], "tags": ["O"]}])
    with pytest.raises(DataError, match="row 2 has 2 words and 1 tags") as info:
        Task.from_files(TOKEN, train=path, text="tokens", label="tags")
    assert info.value.row == 2


@pytest.mark.parametrize(("row", "column"), [({"a": "text", "b": ["O"]}, "a"), ({"a": ["text"], "b": "O"}, "b")])
def test_token_tasks_need_lists(tmp_path: Path, row: dict[str, Any], column: str):
    with pytest.raises(DataError, match=f"row 1 has no list in column '{column}'"):
        Task.from_files(TOKEN, train=jsonl(tmp_path / "t.jsonl", [row]), text="a", label="b")


def test_token_tasks_have_no_pairs(tmp_path: Path):
    with pytest.raises(ConfigError, match="text_pair is 'b'"):
        Task.from_files(TOKEN, train=put(tmp_path / "a.conll", "x O\n"), text_pair="b")


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
            put(tmp_path / file, content)
    task = Task.preset(name, files=tmp_path)
    part = "test" if name == "imdb" else "validation"  # IMDB has no validation file: a row of train is set aside
    assert task.split(part).texts == texts
    assert task.split(part).labels == labels
    assert task.metrics == PRESETS[name].metrics
    assert set(task.metrics) <= set(METRICS[task.kind, task.problem])
    assert (task.metric, task.name) == (task.metrics[0], name)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_how_large_they_are(name: str):
    preset = PRESETS[name]
    assert set(preset.rows) == set(preset.parts)
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
    put(tmp_path / "train.tsv", PUBLISHED["cola"][0])
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
    with pytest.raises(UnknownNameError, match="unknown preset 'imdb/de'"):
        find_preset("imdb/de")
    for name in ("wikiann/", "wikiann/German", "wikiann/de/x"):
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


# Masked language modelling

TEXT = "\n".join(["", " = One = ", " ", *(f" Line {i} . " for i in range(39))])


def test_plain_text_is_read_line_by_line(tmp_path: Path):
    train = put(tmp_path / "some.txt", TEXT)
    task = Task.from_files("masked_lm", train=train)
    assert (task.kind, task.problem, task.labels, task.name) == ("masked_lm", "classification", ("token",), "some")
    assert (task.metric, task.metrics) == ("perplexity", ("perplexity", "accuracy"))
    assert task.split("train").texts == (" = One = ", *(f" Line {i} . " for i in range(35)))
    assert task.split("train").labels == (None,) * 36


def test_the_last_tenth_of_a_text_validates(tmp_path: Path):
    """Its lines belong together: those set aside are one piece, whatever the seed."""
    train = put(tmp_path / "some.txt", TEXT)
    for seed in (0, 1):
        task = Task.from_files("masked_lm", train=train, seed=seed)
        assert task.split("validation").texts == tuple(f" Line {i} . " for i in range(35, 39))


@pytest.mark.parametrize(("column", "given"), [("text", {}), ("sentence", {}), ("body", {"text": "body"})])
def test_running_text_may_stand_in_a_column(tmp_path: Path, column: str, given: dict[str, str]):
    path = jsonl(tmp_path / "t.jsonl", [{column: "one\n"}, {column: " \n"}, {column: "two"}])
    assert Task.from_files("masked_lm", test=path, **given).split("test").texts == ("one", "two")


def test_running_text_has_no_labels_and_no_pairs(tmp_path: Path):
    path = put(tmp_path / "t.txt", "a\nb\n")
    with pytest.raises(ConfigError, match="labels are x, y; a task of kind masked_lm has the texts' own tokens"):
        Task.from_files("masked_lm", train=path, labels=("x", "y"))
    with pytest.raises(ConfigError, match="text_pair is 'b'; a task of kind masked_lm reads one text a row"):
        Task.from_files("masked_lm", train=path, text_pair="b")
    with pytest.raises(UnknownNameError, match="unknown metric 'f1'; known: perplexity, accuracy"):
        Task.from_files("masked_lm", train=path, metric="f1")


def test_blank_lines_alone_are_no_text(tmp_path: Path):
    with pytest.raises(DataError, match="is empty; a task needs at least one row"):
        Task.from_files("masked_lm", train=put(tmp_path / "t.txt", "\n \n\t\n"))


def test_without_a_train_file_the_validation_text_stands_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path / "valid.txt", TEXT)
    put(tmp_path / "test.txt", "other\n")
    task = Task.preset("wikitext2", files=tmp_path)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 36, "validation": 4, "test": 1}
    assert "has no train file; the validation file stands in for it" in caplog.text
    assert "the last tenth of the text is set aside" in caplog.text
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(DataError, match=r"has no train\.txt or wiki\.train\.raw"):
        Task.preset("wikitext2", files=tmp_path)


# Fewer rows


def test_validation_can_be_capped(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{i % 2}" for i in range(200)])
    whole = Task.from_files(SEQUENCE, train=train, validation=train)
    task = Task.from_files(SEQUENCE, train=train, validation=train, test=train, limit_validation=7)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 200, "validation": 7, "test": 200}
    assert set(task.split("validation").texts) < set(whole.split("validation").texts)
    again = Task.from_files(SEQUENCE, train=train, validation=train, limit_validation=7, seed=1)
    assert again.split("validation") != task.split("validation")
    with pytest.raises(ConfigError, match="task: limit_validation is 0; at least one row must be left"):
        Task.from_files(SEQUENCE, train=train, limit_validation=0)


def test_a_limit_is_a_draw(tmp_path: Path):
    train = tsv(tmp_path / "t.tsv", [f"text {i}\t{i % 2}" for i in range(200)])
    task = Task.from_files(SEQUENCE, train=train, validation=train, limit=7, seed=3)
    assert task.drawn == {"rows": 7, "of": 200, "stratified": False, "seed": 3}
    assert task == Task.from_files(SEQUENCE, train=train, validation=train).draw(rows=7, seed=3)
    assert Task.from_files(SEQUENCE, train=train, validation=train, limit=200).drawn is None
    with pytest.raises(ConfigError, match="task: limit is 0"):
        Task.from_files(SEQUENCE, train=train, limit=0)


def letters(tmp_path: Path, counts: dict[str, int]) -> Task:
    rows = [f"{label} {i}\t{label}" for label, count in counts.items() for i in range(count)]
    path = tsv(tmp_path / "t.tsv", rows)
    return Task.from_files(SEQUENCE, train=path, validation=path, test=path)


def test_a_draw_leaves_the_other_parts_whole(tmp_path: Path):
    task = letters(tmp_path, {"a": 60, "b": 30, "c": 10})
    drawn = task.draw(per_class=8, seed=2)
    assert {part: len(split) for part, split in drawn.splits.items()} == {"train": 24, "validation": 100, "test": 100}
    assert drawn.drawn == {"per_class": 8, "of": 100, "stratified": False, "seed": 2}
    assert task.drawn is None
    assert len(task.split("train")) == 100
    texts = drawn.split("train").texts
    assert len(set(texts)) == 24
    assert sorted(texts, key=task.split("train").texts.index) == list(texts)
    assert drawn == task.draw(per_class=8, seed=2)
    assert drawn.split("train") != task.draw(per_class=8, seed=3).split("train")


def test_draws_of_a_draw_are_recorded(tmp_path: Path):
    task = letters(tmp_path, {"a": 60, "b": 30, "c": 10}).draw(fraction=0.5, seed=1).draw(rows=3)
    before = {"fraction": 0.5, "of": 100, "stratified": False, "seed": 1}
    assert task.drawn == {"rows": 3, "of": 50, "stratified": False, "seed": 0, "before": before}
    assert json.loads(json.dumps(task.drawn)) == task.drawn


def test_an_empty_class_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    task = letters(tmp_path, {"a": 60, "b": 40})
    task.draw(rows=100)
    assert caplog.text == ""
    only = task.draw(rows=1).split("train").texts[0][0]
    assert f"task t: none of the 1 rows drawn is of class '{'ab'.replace(only, '')}'" in caplog.text


def test_only_rows_of_one_class_are_drawn_by_class(tmp_path: Path):
    path = put(tmp_path / "a.conll", "EU B-ORG\nof O\n\nUK B-LOC\n")
    task = Task.from_files(TOKEN, train=path, validation=path)
    assert len(task.draw(per_class=1).split("train")) == 2
    with pytest.raises(
        ConfigError, match=r"stratified is set for a task of kind token_classification \(classification\)"
    ):
        task.draw(per_class=1, stratified=True)
    with pytest.raises(UnknownNameError, match="unknown split 'train'"):
        Task.from_files(TOKEN, test=path, labels=task.labels).draw(rows=1)


def test_any_texts_become_running_text(tmp_path: Path):
    rows = [{"first": "a b", "second": "c d", "same": i % 2} for i in range(20)]
    path = jsonl(tmp_path / "t.jsonl", rows)
    columns: dict[str, Any] = {"text": "first", "text_pair": "second", "label": "same"}
    task = Task.from_files(SEQUENCE, train=path, validation=path, test=path, **columns)
    running = task.draw(rows=3).masked_lm()
    assert (running.kind, running.problem, running.labels) == ("masked_lm", "classification", ("token",))
    assert (running.name, running.metric, running.metrics) == ("t-mlm", "perplexity", ("perplexity", "accuracy"))
    assert {part: len(split) for part, split in running.splits.items()} == {"train": 6, "validation": 40, "test": 40}
    assert running.split("train").texts == ("a b", "c d") * 3
    assert running.split("train").labels == (None,) * 6
    assert running.drawn == {"rows": 3, "of": 20, "stratified": False, "seed": 0}


def test_words_and_sources_become_running_text(tmp_path: Path):
    words = Task.from_files(TOKEN, test=put(tmp_path / "a.conll", "EU B-ORG\nsaid O\n"), labels=("O", "B-ORG"))
    assert words.masked_lm().split("test").texts == ("EU said",)
    path = jsonl(tmp_path / "t.jsonl", [{"text": "long text", "target": "text"}])
    assert Task.from_files("summarization", test=path).masked_lm().split("test").texts == ("long text",)


# Summaries and translations

GENERATION = ("summarization", "translation")


@pytest.mark.parametrize("kind", GENERATION)
def test_texts_to_write(tmp_path: Path, kind: str):
    path = jsonl(tmp_path / "t.jsonl", [{"text": f"Text {i}", "target": f"t {i}"} for i in range(20)])
    task = Task.from_files(kind, train=path, test=path)
    assert (task.kind, task.problem, task.labels) == (kind, "generation", ("text",))
    assert task.metrics == METRICS[kind, "generation"]
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 18, "validation": 2, "test": 20}
    assert task.split("test").texts[:2] == ("Text 0", "Text 1")
    assert task.split("test").labels[:2] == ("t 0", "t 1")
    assert task.metric == ("rougeL" if kind == "summarization" else "bleu")
    assert len(task.draw(rows=5).split("train")) == 5


@pytest.mark.parametrize("columns", [{"text": "article", "label": "highlights"}, {}])
def test_columns_of_texts_to_write(tmp_path: Path, columns: dict[str, str]):
    """The usual names are found where a file has them."""
    names = tuple(columns.values()) or ("sentence", "label")
    path = put(tmp_path / "t.csv", f"{names[0]},{names[1]}\nlong,short\n")
    split = Task.from_files("summarization", test=path, **columns).split("test")
    assert (split.texts, split.labels) == (("long",), ("short",))


def test_columns_of_objects_hold_translations(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"translation": {"en": "yes", "ro": "da"}}])
    task = Task.from_files("translation", test=path, text="translation.en", label="translation.ro")
    assert (task.split("test").texts, task.split("test").labels) == (("yes",), ("da",))


@pytest.mark.parametrize("kind", GENERATION)
def test_a_part_may_be_a_pair_of_files(tmp_path: Path, kind: str):
    files = put(tmp_path / "train.en", "yes\nno\n"), put(tmp_path / "train.ro", "da\nnu\n")
    task = Task.from_files(kind, train=files, validation=[str(file) for file in files])
    assert task.name == "train"
    for part in ("train", "validation"):
        assert (task.split(part).texts, task.split(part).labels) == (("yes", "no"), ("da", "nu"))


@pytest.mark.parametrize("kind", [SEQUENCE, "masked_lm", IMAGE])
def test_other_kinds_have_one_file_for_a_part(tmp_path: Path, kind: str):
    path = tsv(tmp_path / "t.tsv", ["a\tx"])
    with pytest.raises(ConfigError, match=f"2 files were given for one part of a task of kind {kind}; a pair"):
        Task.from_files(kind, train=(path, path))


@pytest.mark.parametrize(
    ("row", "column"), [({"text": " ", "target": "b"}, "text"), ({"text": "a", "target": ""}, "target")]
)
def test_blank_texts_are_refused(tmp_path: Path, row: dict[str, str], column: str):
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "target": "b"}, row])
    with pytest.raises(DataError, match=f"row 2 is blank in column '{column}'; every text has one") as info:
        Task.from_files("translation", train=path)
    assert (info.value.row, info.value.column) == (2, column)


def test_blank_lines_of_a_pair_are_refused(tmp_path: Path):
    files = put(tmp_path / "a.en", "yes\n\nno\n"), put(tmp_path / "a.ro", "da\nnu\nba\n")
    with pytest.raises(DataError, match=r"a\.ro row 2 is blank in column 'sentence'"):
        Task.from_files("translation", train=files)


def test_what_texts_to_write_do_not_have(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "target": "b"}] * 3)
    with pytest.raises(ConfigError, match="labels are x; a task of kind translation has texts to write"):
        Task.from_files("translation", train=path, labels=("x",))
    assert Task.from_files("translation", train=path, labels=("text",)).labels == ("text",)
    with pytest.raises(ConfigError, match="text_pair is 'b'; a task of kind summarization reads one text"):
        Task.from_files("summarization", train=path, text_pair="b")
    with pytest.raises(UnknownNameError, match="unknown metric 'bleu'; known: rougeL, rouge1, rouge2, rougeLsum"):
        Task.from_files("summarization", train=path, metric="bleu")
    with pytest.raises(UnknownNameError, match="unknown problem 'classification'; known: generation"):
        Task.from_files("summarization", train=path, problem="classification")
    task = Task.from_files("summarization", train=path)
    with pytest.raises(ConfigError, match="draw: per_class is 1; this task has no classes"):
        task.draw(per_class=1)
    with pytest.raises(ConfigError, match=r"stratified is set for a task of kind summarization \(generation\)"):
        task.draw(rows=1, stratified=True)


def test_lone_articles_stand_in(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = "".join(f"Article {i},Short {i},{i}\n" for i in range(20))
    put(tmp_path / "articles.csv", "article,highlights,id\n" + rows)
    task = Task.preset("cnn_dailymail", files=tmp_path)
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 18, "validation": 2}
    assert "has no train file; the train part is read from articles.csv" in caplog.text
    assert "has no validation file; a tenth of the train part is set aside" in caplog.text
    put(tmp_path / "validation.csv", PUBLISHED["cnn_dailymail"][0])  # the articles may be a part of it
    with pytest.raises(DataError, match=r"has no train\.csv; a folder must hold the published files"):
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
        return datasets.DatasetDict(sets)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


# Pictures


def test_pictures_from_folders_and_tars(tmp_path: Path):
    folder = picture_folder(tmp_path / "pets", rows=10)
    task = Task.from_files(IMAGE, train=folder, test=picture_tar(tmp_path / "pets.tar", folder))
    assert (task.kind, task.problem, task.labels, task.name) == (IMAGE, "classification", CLASSES, "pets")
    assert (task.metric, task.metrics) == ("accuracy", ("accuracy", "f1"))
    assert Counter(task.split("train").labels) == {0: 9, 1: 9, 2: 9}
    assert Counter(task.split("validation").labels) == {0: 1, 1: 1, 2: 1}
    assert task.split("test").labels == (0,) * 10 + (1,) * 10 + (2,) * 10
    assert task.split("test").texts[0].open().size == (12, 10)
    drawn = task.draw(per_class=2, stratified=True, seed=1)
    assert Counter(drawn.split("train").labels) == {0: 2, 1: 2, 2: 2}
    assert drawn == task.draw(per_class=2, stratified=True, seed=1)


def test_the_classes_are_those_of_train(tmp_path: Path):
    train = picture_folder(tmp_path / "train", classes=("bird", "frog"))
    test = picture_folder(tmp_path / "test", classes=("bird", "cat"))
    with pytest.raises(DataError, match="row 3 has label 'cat'; the labels are: bird, frog"):
        Task.from_files(IMAGE, train=train, test=test)
    task = Task.from_files(IMAGE, train=train, test=test, labels=("frog", "cat", "bird"))
    assert set(task.split("test").labels) == {2, 1}
    with pytest.raises(DataError, match="no train file was given, and no labels"):
        Task.from_files(IMAGE, test=test)


def test_pictures_have_no_texts(tmp_path: Path):
    task = Task.from_files(IMAGE, train=picture_folder(tmp_path / "pets"))
    with pytest.raises(ConfigError, match="task pets: a task of kind image_classification was asked for its texts"):
        task.masked_lm()


@pytest.mark.parametrize("column", [{}, {"text": "img"}])
def test_pictures_in_parquet(tmp_path: Path, column: dict[str, str]):
    cells = [{"bytes": encoded(picture(shade)), "path": None} for shade in (0, 250)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({column.get("text", "image"): cells, "label": ["dark", "light"]}), path)
    split = Task.from_files(IMAGE, train=path, test=path, **column).split("test")
    assert split.labels == (0, 1)
    assert split.texts[1].open().getpixel((0, 0))[0] > 200
    with pytest.raises(DataError, match="no column 'kind'"):
        Task.from_files(IMAGE, train=path, label="kind", **column)


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
