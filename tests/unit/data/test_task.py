from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from lamina.data.build import METRICS
from lamina.data.presets import PRESETS, find_preset
from lamina.data.task import Task
from lamina.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path

SEQUENCE, TOKEN = "sequence_classification", "token_classification"


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
    "wikitext2": (" \n = A heading = \n \n Some words . \n", (" = A heading = ", " Some words . "), (None, None)),
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_reads_published_files(tmp_path: Path, name: str):
    text, texts, labels = PUBLISHED[name]
    for names in PRESETS[name].files.values():
        put(tmp_path / names[0], text)
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
    assert 5 < preset.length < 512


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
    with pytest.raises(ConfigError, match="labels are x, y; the labels of masked_lm are the texts' own tokens"):
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
