"""Spans in the forms of annotation tools, checked against their texts."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pytest
from tests.support.files import put

from lamina.errors import DataError
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "Zo\u00eb flew to Lima \U0001f6eb with Ana Ruiz today"
LIMA, ANA = (TEXT.index("Lima"), TEXT.index("Lima") + 4), (TEXT.index("Ana"), TEXT.index("Ana") + 8)
EXPECTED = [("Lima", "B-LOC"), ("Ana", "B-PER"), ("Ruiz", "I-PER")]


def read(spans: Any, text: str = TEXT, **how: Any) -> Task:
    rows = [{"text": text, "label": spans}]
    return Task.from_dataset("token_classification", {"train": rows, "validation": rows}, **how)


def tagged(task: Task) -> list[tuple[str, str]]:
    """The words of the first row that have a tag."""
    split = task.split("train")
    words = [split.texts[0][start:end] for start, end in next(iter(split.words or ()))]
    tags = [task.labels[tag] for tag in split.labels[0]]
    return [(word, tag) for word, tag in zip(words, tags, strict=True) if tag != "O"]


def spans(start: str, end: str, label: str, **more: list[str]) -> list[dict[str, Any]]:
    """Both spans as objects with these keys; `more` has further keys with a value for each."""
    both = [{start: edges[0], end: edges[1], label: name} for edges, name in ((LIMA, "LOC"), (ANA, "PER"))]
    return [{**span, **{key: values[at] for key, values in more.items()}} for at, span in enumerate(both)]


WORDS = ["Lima", "Ana Ruiz"]
PLACED = [("Lima", LIMA, "LOC"), ("Ana Ruiz", ANA, "PER")]
KEYED = spans("start", "end", "labels", text=WORDS)
FORMS = {
    "triples": [[*LIMA, "LOC"], [*ANA, "PER"]],
    "tuples": [(*LIMA, "LOC"), (*ANA, "PER")],
    "arrays": [np.array([*LIMA, "LOC"], dtype=object), np.array([*ANA, "PER"], dtype=object)],
    "pipelines": spans("start", "end", "entity_group", word=["lima", "ana rui ##z"]),
    "lists of one label": [{**span, "labels": [span["labels"]]} for span in KEYED],
    "Label Studio": [{"type": "labels", "from_name": "label", "value": span, "id": "x"} for span in KEYED],
    "a result of Label Studio": [{"id": 1, "result": [{"value": span} for span in KEYED]}],
    "Label Studio with other results": [
        *({"type": "labels", "from_name": "label", "value": span, "id": "x"} for span in KEYED),
        {"type": "choices", "from_name": "mood", "value": {"choices": ["good"]}},
        {"type": "textarea", "from_name": "note", "value": {"start": 0, "end": 3, "text": ["who?"]}},
        {"type": "relation", "from_id": "x", "to_id": "x", "labels": ["at"]},
    ],
    "flattened results of Label Studio": [
        {"start": start, "end": end, "label": label, "from_name": "x", "from_id": None, "type": label}
        for _, (start, end), label in PLACED
    ],
    "language models": [{"entity": "Lima", "type": "LOC"}, {"type": "PER", "entity": "Ana Ruiz"}],
    "types": spans("start", "end", "type"),
    "doccano": spans("start_offset", "end_offset", "label"),
    "floats": [[*map(float, LIMA), "LOC"], [*map(float, ANA), "PER"]],
    "spaCy": {"entities": [(*LIMA, "LOC"), (*ANA, "PER")]},
    "columns": {"start": [LIMA[0], ANA[0]], "end": [LIMA[1], ANA[1]], "label": ["LOC", "PER"]},
    "texts by label": {"entities": {"LOC": ["Lima"], "PER": ["Ana Ruiz"]}},
    "texts with labels": [{"text": "Lima", "label": "LOC", "page": 3}, {"text": "Ana Ruiz", "label": "PER", "p": 0.9}],
    "AWS": {"Entities": spans("BeginOffset", "EndOffset", "Type", Text=WORDS, Score=["0.9", "0.8"])},
    "flair": [
        {"text": word, "start_pos": start, "end_pos": end, "labels": [{"value": label, "confidence": 0.9}]}
        for word, (start, end), label in PLACED
    ],
    "spaCy's to_json": {"text": TEXT, "ents": spans("start", "end", "label")},
    "Prodigy": {"answer": "accept", "spans": spans("start", "end", "label", token_start=["3", "6"], text=WORDS)},
    "Azure": {
        "entities": [
            {
                "text": word,
                "category": label,
                "subcategory": "x",
                "offset": start,
                "length": end - start,
                "confidenceScore": 1,
            }
            for word, (start, end), label in PLACED
        ]
    },
    "Google": {
        "entities": [
            {
                "name": word,
                "type": label,
                "mentions": [{"text": {"content": word, "beginOffset": start}, "type": "PROPER"}],
            }
            for word, (start, _), label in PLACED
        ]
    },
    "mentions by place": [
        {"label": label, "mentions": [{"start": start, "end": end, "type": "PROPER"}]}
        for _, (start, end), label in PLACED
    ],
    "mentions of the same": spans("start", "end", "label", mentions=[[{"start": 0, "end": 3}], []]),
    "bigbio": [
        {"id": f"T{start}", "type": label, "text": [word], "offsets": [[start, end]], "normalized": []}
        for word, (start, end), label in PLACED
    ],
    "columns of bigbio": {
        "id": ["T1", "T2"],
        "type": ["LOC", "PER"],
        "text": [["Lima"], ["Ana Ruiz"]],
        "offsets": [[[*LIMA]], [[*ANA]]],
    },
    "JSON": json.dumps(spans("start", "end", "label")),
    "Python": str([(*LIMA, "LOC"), (*ANA, "PER")]),
    "objects with commas": json.dumps(spans("start", "end", "label"))[1:-1],
    "an object in Python": str({"entities": [(*LIMA, "LOC"), (*ANA, "PER")]}),
    "long JSON": json.dumps(spans("start", "end", "label", note=["x" * 70_000, ""])),
    "twice": [[*LIMA, "LOC"], [*ANA, "PER"], [*LIMA, "LOC"]],
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_spans(form: str):
    task = read(FORMS[form])
    assert tagged(task) == EXPECTED
    assert task.labels == ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")


@pytest.mark.parametrize(
    ("span", "problem"),
    [
        ({"start": 0, "end": 3, "klass": "PER"}, "with the keys klass; its label is under one of: label, labels"),
        (
            {"text": "Ana", "offset": 0, "length": 3, "label": "PER"},
            "whose text is not 'Zo\u00eb', the characters 0 to 3",
        ),
        ({"offset": 0, "length": 3, "label": "PER"}, "its first character under 'start'"),
        (
            {"text": ["Zo\u00eb", "Ana"], "offsets": [[0, 3], [22, 25]], "type": "PER"},
            "a span is one piece of its text",
        ),
        ({"text": {"content": "Zo\u00eb", "beginOffset": 0}, "type": "PROPER"}, "its first character under 'start'"),
        ({"start": 0, "end": 3, "labels": [{"value": "PER"}, {"value": "LOC"}]}, "with the labels PER, LOC"),
        ({"start": 0, "label": "PER"}, "its first character under 'start' and the one after its last under 'end'"),
        ({"start": "0", "end": "3", "label": "PER"}, "as whole numbers"),
        ({"start": False, "end": True, "label": "PER"}, "as whole numbers"),
        ({"start": 0, "end": 3, "label": None}, "without a label in .*; a span has one label"),
        ({"start": 0, "end": 3, "label": {"name": "PER"}}, "an object with keys"),
        ({"start": 0, "end": 3, "entity": "B-PER"}, "with the tag B-PER in .* aggregation_strategy='simple'"),
        (
            {"start": 0, "end": 3, "entity": "U-PER", "index": 1},
            "with the tag U-PER in .*; labels of spans have no B-, I-, .* aggregation_strategy='simple'",
        ),
        ({"start": 0, "end": 3, "labels": ["PER", "ORG"]}, "with the labels PER, ORG in .*; a word has one label"),
        ({"start": 0, "end": 3, "entity": "PER", "tag": "NNP"}, "with the labels PER, NNP in .*; a word has one label"),
        ({"start": 0, "end": 3, "entity": "PER", "type": "x"}, "with the labels PER, x in .*; a word has one label"),
        ({"entity": "LOC", "entity_type": "x"}, "with the labels LOC, x in .*; a word has one label"),
        ([0, 3, "PER", "Q1"], r"as a span in column 'label'; a span is a text, \[start, end\]"),
        (["PER", 0, 3], "a span is a text"),
        ({"text": "Lima", "type": "LOC", "at": 12, "length": 4}, "with numbers under length; its place is under start"),
        ({"text": "Lima", "type": "LOC", "span": [12, 16]}, "with numbers under span; its place is under start"),
        ([0, 99, "PER"], "which is not in its text of 38 characters"),
        ([3, 4, "PER"], "which has no letter or sign"),
        ({"start": LIMA[0], "end": LIMA[1] - 1, "label": "LOC", "text": "Lima"}, "last character; add 1"),
        ({"start": 1, "end": 4, "label": "PER", "text": "Zo\u00eb"}, "count from 1; subtract 1"),
        ({"start": ANA[0] + 4, "end": ANA[1] + 4, "label": "PER", "text": "Ana Ruiz"}, "fit as bytes of UTF-8"),
        ({"start": 0, "end": 3, "label": "PER", "text": "Ana"}, "whose text is not 'Zo\u00eb', the characters 0 to 3"),
    ],
)
def test_a_span_that_does_not_fit_is_an_error(span: Any, problem: str):
    with pytest.raises(DataError, match=rf"task/train row 1 has .*{problem}"):
        read([span])


@pytest.mark.parametrize(
    "both",
    [
        [[*ANA, "PER"], [ANA[0] + 4, ANA[1], "SURNAME"]],
        [[ANA[0] + 4, ANA[1], "SURNAME"], [*ANA, "PER"]],
        [[*ANA, "PER"], [*ANA, "ACTOR"]],
        [[ANA[0], ANA[0] + 1, "A"], [ANA[0] + 1, ANA[0] + 3, "B"]],
    ],
)
def test_two_labels_of_a_word_are_an_error(both: list[Any], caplog: pytest.LogCaptureFixture):
    with pytest.raises(DataError, match=r"row 1 has the spans .* which share the word '\w+'; a word has one label"):
        read(both)
    assert set(read(both, missing_labels="ignore").split("train").labels[0]) == {-100}
    assert "1 of 1 rows have a span that is not in their text or that tags cannot mark" in caplog.text


@pytest.mark.parametrize(
    "cell",
    [
        '[{"start": 0, "end": 3, "label": "PER", "label": "ORG"}]',
        "[{'start': 0, 'end': 3, 'label': 'PER', 'label': 'ORG'}]",
        '{"label": [], "label": [[0, 3, "PER"]]}',
    ],
)
def test_a_key_that_comes_twice_in_a_cell_is_an_error(cell: str):
    with pytest.raises(DataError, match="in which the key 'label' comes twice"):
        read(cell)


@pytest.mark.parametrize("cell", ["[1,2] x", "[1, 2", '{"start": 0} x'])
def test_text_that_is_not_json_is_quoted(cell: str):
    with pytest.raises(DataError, match=rf"row 1 has '{re.escape(cell)}'.*, which is not JSON; a text with spans is a"):
        read(cell)


def test_utf16_units_become_characters(caplog: pytest.LogCaptureFixture):
    """As annotation tools in JavaScript count them; all rows are read alike, also those that could be characters."""
    party = "\U0001f389" * 5 + " Ana met Bo"
    rows = [
        {"text": party, "label": [{"start": 11, "end": 14, "label": "PER", "text": "Ana"}]},
        {"text": party, "label": [{"start": 19, "end": 21, "label": "PER"}]},
        {"text": "Ana met Bo", "label": [{"start": 0, "end": 3, "label": "PER"}]},
    ]
    split = Task.from_dataset("token_classification", {"train": rows, "test": rows}).split("test")
    found = [
        [text[start:end] for (start, end), tag in zip(words, tags, strict=True) if tag == 0]
        for text, words, tags in zip(split.texts, split.words or (), split.labels, strict=True)
    ]
    assert found == [["Ana"], ["Bo"], ["Ana"]]
    assert "task/test: the edges of spans in column 'label' fit as UTF-16 units only" in caplog.text


def test_utf16_units_are_recognised_by_words_too(caplog: pytest.LogCaptureFixture):
    assert tagged(read([[ANA[0] + 1, ANA[1] + 1, "PER"]])) == EXPECTED[1:]
    assert "fit as UTF-16 units only" in caplog.text
    with pytest.raises(DataError, match="which share the word"):  # as characters; as units, one would cut a word
        read([[ANA[0], ANA[0] + 5, "PER"], [ANA[0] + 4, ANA[1], "PER"]])


@pytest.mark.parametrize("edges", [(0, -2), (-1, 0), (0, 1), (0, 2)])
def test_a_span_that_is_not_of_whole_words_is_told(edges: tuple[int, int], caplog: pytest.LogCaptureFixture):
    text = TEXT.replace("\U0001f6eb", "\u200b")
    assert tagged(read([[LIMA[0] + edges[0], LIMA[1] + edges[1], "LOC"]], text)) == [("Lima", "B-LOC")]
    assert "1 of 1 rows have a span that does not begin and end with a word" in caplog.text


@pytest.mark.parametrize("mark", ["\u200b", "\ufeff", "\u00ad", "\u200e", "\u202b", "\u2060", "\x00"])
def test_unseen_characters_do_not_count_in_what_a_span_states(mark: str):
    text = f"to {mark}Lima{mark} now"
    assert tagged(read([{"start": 3, "end": 9, "text": "Lima", "label": "LOC"}], text)) == EXPECTED[:1]
    assert tagged(read([{"start": 4, "end": 8, "text": f"{mark}Lima", "label": "LOC"}], text)) == EXPECTED[:1]
    if mark != "\x00":
        assert tagged(read([{"text": f"{mark}Lima", "label": "LOC"}], "to Lima now")) == EXPECTED[:1]


@pytest.mark.parametrize(
    ("characters", "stated"),
    [
        ("C:\\new", "C:\\new"),
        ("C:\\new\nLima", "C:\\new\\nLima"),
        ("to\nLima", "to\\nLima"),
        ("a \u200b b", "a b"),
        ("a b", "a\t\u00ad\nb"),
        ("a\x1cb", "a b"),
    ],
)
def test_blanks_and_line_breaks_of_a_stated_text_may_differ(characters: str, stated: str):
    mark = {"start": 4, "end": 4 + len(characters), "text": stated, "label": "LOC"}
    assert tagged(read([mark], f"See {characters}."))[0][1] == "B-LOC"


def test_a_text_is_found_as_whole_words_before_parts_of_words(caplog: pytest.LogCaptureFixture):
    assert tagged(read([{"text": "Ana", "label": "PER"}], "Anabel saw Ana")) == [("Ana", "B-PER")]
    assert tagged(read([{"text": "\u5317\u4eac", "label": "LOC"}], "\u5317\u4eac\u3001\u5728\u5317\u4eac"))[2:] == [
        ("\u5317", "B-LOC"),
        ("\u4eac", "I-LOC"),
    ]
    assert not caplog.messages
    assert tagged(read([{"text": "Ana", "label": "PER"}], "Anabel")) == [("Anabel", "B-PER")]


def test_other_results_of_label_studio_are_told(caplog: pytest.LogCaptureFixture):
    mood = {"type": "choices", "from_name": "mood", "value": {"choices": ["good"]}}
    person = {"type": "labels", "from_name": "label", "value": {"start": 0, "end": 3, "labels": ["PER"]}}
    rows = [{"text": TEXT, "label": results} for results in ([person, mood], [mood, mood], [], [person])]
    Task.from_dataset("token_classification", {"train": rows, "validation": rows[3:]})
    what = "3 results of Label Studio in column 'label' are no spans; 1 of 4 rows have no others, so their words are O"
    assert [line for line in caplog.messages if "Label Studio" in line] == [f"task: task/train: {what}"]


@pytest.mark.parametrize("label", ["E-mail", "S-Bahn", "U-Boot", "L-Dopa"])
def test_a_label_with_a_hyphen_is_no_tag_beside_an_index(label: str):
    assert tagged(read([{"start": LIMA[0], "end": LIMA[1], "label": label, "index": 1}])) == [("Lima", f"B-{label}")]


def test_rows_without_any_span_are_told(caplog: pytest.LogCaptureFixture):
    read([])
    assert "task/train: column 'label' has no span in any row" in caplog.text


def test_tags_beside_a_text_that_is_no_list_of_words_are_an_error():
    with pytest.raises(
        DataError, match=r"has \['O', 'B-geo'\] in column 'label'; they are tags of words, .* text.split"
    ):
        read(["O", "B-geo"], "On Oslo")
    assert tagged(read(["B-52", "I-95"], "a B-52 on I-95")) == [("B-52", "B-span"), ("I-95", "B-span")]
    for mark in (["B-X"], {"tag": "B-X"}):
        rows = [{"text": ["a"], "label": [mark]}]
        with pytest.raises(
            DataError, match=r"row 1 has .* in column 'label'; every word has one tag, a name or a number"
        ):
            Task.from_dataset("token_classification", {"train": rows}, text="text", label="label")


def test_a_text_of_another_unicode_form_is_found():
    assert tagged(read([{"text": "Zoe\u0308", "label": "PER"}])) == [("Zo\u00eb", "B-PER")]


def test_labels_of_spans_stand_for_their_tags():
    task = read(FORMS["triples"], labels=["PER", "LOC"])
    assert task.labels == ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    assert tagged(task) == EXPECTED


def test_class_names_inside_spans_are_kept(tmp_path: Path):
    names = datasets.ClassLabel(names=["LOC", "ORG", "PER"])
    number = datasets.Value("int32")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.List({"start": number, "end": number, "label": names})}
    )
    cells = [{"start": start, "end": end, "label": at} for (start, end), at in ((LIMA, 0), (ANA, 2))]
    rows = datasets.Dataset.from_dict({"text": [TEXT], "label": [cells]}, features=features)
    rows.to_parquet(tmp_path / "some.parquet")
    for task in (
        Task.from_dataset("token_classification", {"train": rows, "validation": rows}),
        Task.from_files("token_classification", train=tmp_path / "some.parquet", validation=tmp_path / "some.parquet"),
    ):
        assert tagged(task) == EXPECTED
        assert "B-ORG" in task.labels


# Tags


def conll(path: Path, text: str, **how: Any) -> Task:
    file = put(path / "some.conll", text)
    return Task.from_files("token_classification", train=file, validation=file, **how)


@pytest.mark.parametrize(
    "text",
    [
        "Ana B-PER\nRuiz E-PER\nleft O\n\nLima S-LOC\n",
        "Ana PER-B\nRuiz PER-I\nleft O\n\nLima LOC-B\n",
        "Ana b_per\nRuiz i_per\nleft o\n\nLima b_loc\n".replace("per", "PER").replace("loc", "LOC"),
    ],
)
def test_schemes_of_tags_become_one(tmp_path: Path, text: str):
    task = conll(tmp_path, text)
    assert (task.metric, task.labels) == ("span_f1", ("B-LOC", "B-PER", "I-LOC", "I-PER", "O"))
    assert [[task.labels[tag] for tag in row] for row in task.split("train").labels] == [
        ["B-PER", "I-PER", "O"],
        ["B-LOC"],
    ]
    again = Task.from_files(
        "token_classification", test=tmp_path / "some.conll", labels=task.labels
    )  # as evaluate does
    assert again.split("test").labels == task.split("train").labels


def test_a_mark_that_train_lacks_is_known(tmp_path: Path):
    train = put(tmp_path / "train.conll", "Ana S-PER\nleft O\n")
    test = put(tmp_path / "test.conll", "Ana B-PER\nRuiz E-PER\n")
    task = Task.from_files("token_classification", train=train, validation=test)
    assert [task.labels[tag] for tag in task.split("validation").labels[0]] == ["B-PER", "I-PER"]


def test_an_odd_tag_is_named_with_its_row(tmp_path: Path):
    with pytest.raises(DataError, match=r"some\.conll row 5 has the tag '0' \(word 'at'\) .* other tags mark spans"):
        conll(tmp_path, "Ana B-PER\nleft O\n\nLima B-LOC\nat 0\n")
    labels = ["B-PER", "B-LOC", "O", "0"]
    assert conll(tmp_path, "Ana B-PER\nleft O\n\nLima B-LOC\nat 0\n", labels=labels).labels == tuple(labels)


def test_tags_that_mark_no_spans_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    assert conll(tmp_path, "Ana PER\nRuiz PER\nleft O\n").metric == "accuracy"
    assert "some.conll: the tags PER, O mark no spans, so words are scored one by one" in caplog.text
    caplog.clear()
    assert conll(tmp_path, "dogs NN\nbark VB\n").metric == "accuracy"
    assert not caplog.messages


def test_a_file_of_one_column_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"some\.conll has one column; .* divided by tabs or blanks"):
        conll(tmp_path, "Ana,B-PER\nleft,O\n")


def test_minus_100_is_a_word_without_a_label():
    rows = [{"tokens": ["Ana", "##x", "left"], "tags": [1, -100, 0]}, {"tokens": ["Lima"], "tags": ["B-PER"]}]
    how: dict[str, Any] = {"text": "tokens", "label": "tags"}
    task = Task.from_dataset("token_classification", {"test": rows}, labels=["O", "B-PER", "I-PER"], **how)
    assert task.split("test").labels == ((1, -100, 0), (1,))
    task = Task.from_dataset("token_classification", {"train": rows[:1], "validation": rows[:1]}, **how)
    assert task.labels == ("0", "1")
    with pytest.raises(DataError, match="row 1 has no label in column 'tags'"):
        Task.from_dataset("token_classification", {"train": [{"tokens": ["a", "b"], "tags": ["O", None]}]}, **how)


def test_a_span_with_the_label_o_is_an_error():
    with pytest.raises(DataError, match="with the label O in column 'label'; O is the tag of words outside all spans"):
        read([[0, 4, "O"]])


def test_a_missing_word_is_an_error():
    rows = [{"words": ["a", None], "tags": ["B-X", "O"]}]
    with pytest.raises(DataError, match="row 1 has a word that is missing in column 'words'"):
        Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="words", label="tags")


def test_tags_without_any_span_are_an_error(tmp_path: Path):
    with pytest.raises(
        DataError, match=r"'O' is its only class; a task needs at least two .* from column '-1'; label="
    ):
        conll(tmp_path, "Anna O\nin O\n")


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ({"spans": [{"start": 0, "end": 3, "label": "PER"}], "answer": "reject"}, "its annotator skipped or rejected"),
        ([{"result": [], "was_cancelled": True}], "its annotator skipped or rejected"),
        ("0 3 PER", "'0 3 PER' in column 'label'; spans are a list"),
    ],
)
def test_cells_that_hold_no_spans_to_learn(cell: Any, problem: str):
    with pytest.raises(DataError, match=problem):
        read(cell)


def marked(*answers: str | None, kind: str = "token_classification", **how: Any) -> Task:
    """A task of rows as Prodigy exports them."""
    spans = [{"start": 0, "end": 4, "label": "PER"}]
    label = spans if kind == "token_classification" else "good"
    row = {"text": TEXT, "label": label, "_view_id": "x"}
    rows = [{**row, "answer": answer} for answer in answers]
    other = {**row, "label": [] if kind == "token_classification" else "bad", "answer": "accept"}
    return Task.from_dataset(kind, {"train": [other, *rows]}, text="text", stratify=False, **how)


@pytest.mark.parametrize("kind", ["token_classification", "sequence_classification"])
def test_rows_that_an_annotator_rejected_are_not_learnt(kind: str, caplog: pytest.LogCaptureFixture):
    task = marked("accept", "reject", "ignore", "accept", kind=kind)
    assert sum(map(len, task.splits.values())) == 3
    assert "2 of 5 rows have no label in column 'label' and are left out (rows 3, 4). The annotator" in caplog.text
    masked = marked("reject", "accept", "accept", kind=kind, missing_labels="mask")
    assert sum(map(len, masked.splits.values())) == 4
    with pytest.raises(DataError, match="row 3 has no label in column 'label' that counts: its annotator rejected"):
        marked("accept", "reject", kind=kind, missing_labels="error")


def test_a_column_answer_of_another_meaning_is_left_alone(caplog: pytest.LogCaptureFixture):
    assert sum(map(len, marked("reject", "accept", "maybe").splits.values())) == 4
    rows = [{"text": TEXT, "answer": answer} for answer in ("accept", "reject", "accept", "reject")]
    task = Task.from_dataset("sequence_classification", {"train": rows}, text="text", label="answer", stratify=False)
    assert sum(map(len, task.splits.values())) == 4
    loans = [{"text": TEXT, "topic": "ab"[row % 2], "answer": ("accept", "reject")[row // 2]} for row in range(4)]
    task = Task.from_dataset("sequence_classification", {"train": loans}, text="text", label="topic", stratify=False)
    assert sum(map(len, task.splits.values())) == 4
    assert "annotator" not in caplog.text


def test_an_answer_beside_spans_is_that_of_their_annotator():
    spans = [{"start": 0, "end": 4, "label": "PER"}]
    rows = [{"text": TEXT, "spans": spans, "answer": answer} for answer in ("accept", "reject", "accept")]
    task = Task.from_dataset("token_classification", {"train": rows}, text="text", label="spans", stratify=False)
    assert sum(map(len, task.splits.values())) == 2


def studio(*annotations: Any, **how: Any) -> Task:
    """A task of rows as Label Studio exports them."""
    value = {"start": 0, "end": 4, "labels": ["PER"]}
    done = [{"result": [{"type": "labels", "value": value}], "was_cancelled": False}]
    rows = [{"text": TEXT, "annotations": cell} for cell in (done, *annotations)]
    parts = {"train": rows, "validation": rows}
    return Task.from_dataset("token_classification", parts, text="text", label="annotations", **how)


def test_tasks_without_an_annotation_are_not_learnt_as_texts_without_spans():
    assert len(studio([], [{"result": []}]).split("train")) == 2
    assert len(studio([], missing_labels="ignore").split("train")) == 2
    assert studio([], missing_labels="ignore").split("train").unlabelled == 1


def test_two_annotations_of_one_text():
    twice = [{"result": []}, {"result": []}]
    with pytest.raises(DataError, match="row 2 has 2 annotations of one text in column 'annotations'; a row has one"):
        studio(twice)
    assert studio(twice, missing_labels="ignore").split("train").unlabelled == 1
    assert len(studio([{"result": [], "was_cancelled": True}, {"result": []}]).split("train")) == 2
