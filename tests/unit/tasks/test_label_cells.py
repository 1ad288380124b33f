"""What a cell of a label column is: a name, several names, a number, or an error with its row."""

from __future__ import annotations

import datetime
import enum
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from tests.support.files import put

from lamina.errors import ConfigError, DataError
from lamina.tasks.label_cells import LabelCellError, class_name, is_missing, spelled_list, trimmed
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

KIND = "sequence_classification"
NAMES = ["toxic", "insult", "threat"]
TEXT_ENUM = enum.Enum("TextEnum", {"NEG": "neg", "POS": "pos"}, type=str)
NUMBER_ENUM = enum.Enum("NumberEnum", {"LOW": 0, "HIGH": 1}, type=int)
HOT = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 0, 0]]


def read(cells: list[Any], **how: Any) -> Task:
    rows = [{"sentence": f"text {number}", "label": cell} for number, cell in enumerate(cells)]
    return Task.from_dataset(KIND, {"train": rows, "validation": rows}, **how)


def csv(path: Path, cells: list[str], **how: Any) -> Task:
    lines = "".join(f'text,"{cell.replace(chr(34), chr(34) * 2)}"\n' for cell in cells)
    file = put(path / "some.csv", f"sentence,label\n{lines}")
    return Task.from_files(KIND, train=file, validation=file, **how)


def chosen(task: Task) -> list[list[str]]:
    """The names of the classes of each row of several."""
    return [[name for name, flag in zip(task.labels, row, strict=True) if flag] for row in task.split("train").labels]


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (" pos\u00a0", "pos"),
        ("\ufeffpos\u200b", "pos"),
        ("\u202bpos\u200f\u00ad", "pos"),
        ("Zoe\u0308", "Zo\u00eb"),
        (2.0, "2"),
        (np.int8(2), "2"),
        (torch.tensor(2), "2"),
        (np.bool_(True), "True"),
        (np.str_("x"), "x"),
        (TEXT_ENUM.NEG, "neg"),
        (enum.StrEnum("S", {"NEG": "neg"}).NEG, "neg"),
        (NUMBER_ENUM.HIGH, "1"),
        (enum.IntEnum("I", {"HIGH": 1}).HIGH, "1"),
        (enum.Enum("F", {"HIGH": 1.0}, type=float).HIGH, "1"),
        ("[unknown]", "[unknown]"),
    ],
)
def test_names(cell: object, name: str):
    assert class_name(cell) == name


@pytest.mark.parametrize("kind", [TEXT_ENUM, NUMBER_ENUM])
def test_enums_are_the_values_of_their_members(kind: Any):
    first, second = kind
    names = (str(first.value), str(second.value))
    assert read([first, second, first]).labels == names
    assert read([first, second, first], labels=names).split("train").labels == (0, 1, 0)
    assert chosen(read([[first, second], [second]], problem_type="multi_label")) == [[*names], [names[1]]]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({"name": "ham"}, r"an object with keys; .* Name the field that has the class, as in label='label.name'"),
        (b"ham", "of type bytes; .* Decode it"),
        (Decimal("1.50"), "of type float; .* problem_type='regression'"),
        (Decimal("9007199254740993.5"), "of type Decimal; .* problem_type='regression'"),
        (Decimal("sNaN"), "of type Decimal"),
        (Decimal("Infinity"), "of type float"),
        (1.5, "of type float; .* problem_type='regression'"),
        (["ham", "spam"], "a list; .* problem_type='multi_label'"),
        ("['a', 'b']", "a list; .* problem_type='multi_label'"),
        (datetime.date(2020, 1, 1), "of type date; .* Convert it to a text"),
    ],
)
def test_what_is_no_name_is_an_error_with_its_row(cell: object, message: str):
    with pytest.raises(LabelCellError, match=message):
        class_name(cell)
    with pytest.raises(DataError, match=rf"task/train row 2 has .*{message}") as info:
        read(["x", cell, "y"], problem_type="classification")
    assert (info.value.row, info.value.column) == (2, "label")


def test_two_forms_of_one_name_are_one_class():
    assert read(["Zoe\u0308", "Zo\u00eb", "Ana"], labels=["Zoe\u0308", "Ana"]).split("train").labels == (0, 0, 1)
    assert read(["Zoe\u0308", "Zo\u00eb", "Ana"]).labels == ("Ana", "Zo\u00eb")
    with pytest.raises(ConfigError, match="every class needs its own name"):
        read(["Ana"], labels=["Zoe\u0308", "Zo\u00eb"])


def test_one_number_has_one_spelling(tmp_path: Path):
    with pytest.raises(DataError, match=r"row 3 has label '1\.0' in column 'label', and another row has '1'"):
        csv(tmp_path, ["1", "1.0", "2"], problem_type="classification")


# Several classes


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda row: [float(x) for x in row]])
@pytest.mark.parametrize("labels", [NAMES, None])
def test_lists_of_zeros_and_ones_are_flags_of_classes(form: Any, labels: list[str] | None):
    task = read([form(row) for row in HOT], labels=labels)
    assert (task.problem_type, task.labels) == ("multi_label", tuple(labels or ("0", "1", "2")))
    assert task.split("train").labels == tuple(map(tuple, HOT))


def test_bools_are_flags_and_ids_stay_ids():
    assert read([[bool(x) for x in row] for row in HOT], labels=NAMES).split("train").labels == tuple(map(tuple, HOT))
    assert chosen(read([[0, 1], [1], [2], []], labels=NAMES)) == [["toxic", "insult"], ["insult"], ["threat"], []]
    assert read([[0], [1]]).labels == ("0", "1")


@pytest.mark.parametrize("labels", [NAMES, None])
@pytest.mark.parametrize("rows", [[[0, 0], [1], [2, 0]], [[2], [1, 1], [0, 2]], [[0, 0, 2], [1, 1], [2]]])
def test_an_id_may_come_twice_in_a_list(rows: list[list[int]], labels: list[str] | None):
    flags = tuple(tuple(int(number in row) for number in range(3)) for row in rows)
    assert read(rows, labels=labels).split("train").labels == flags


def test_flags_of_another_length_are_an_error():
    with pytest.raises(DataError, match=r"task/train row 1 has a list of 3 .*one entry for each of 2 classes"):
        read(HOT, labels=NAMES[:2])
    with pytest.raises(DataError, match="task/train row 3 has a list of 0 in column 'label'"):
        read([[1, 0, 0], [0, 1, 0], []])
    for first, second in (([1, 0, 0], [0.5, 0.5, 0.0]), ([0, 0, 1], [2]), ([2], [1, 0, 1])):
        odd = second if len(first) == 3 else first
        with pytest.raises(DataError, match=rf"has a list of {len(odd)} in column 'label' \({re.escape(str(odd))}\)"):
            read([first, second], labels=NAMES)
    with pytest.raises(DataError, match=r"row 1 has \[1, -1\] .*a list holds names, or 0 and 1 per class, not -1"):
        read([[1, -1], [-1, 1]])


def test_labels_without_an_order_are_an_error():
    for labels in ({"a", "b"}, {"a": 1, "b": 0}):
        with pytest.raises(ConfigError, match=r"task: labels is a (set|dict); it must be a list or None"):
            read(["a", "b"] * 3, labels=labels)


@pytest.mark.parametrize(
    ("cells", "how"),
    [
        (["['sport', 'news']", "['art']", "[]"], {}),
        (['["sport", "news"]', '["art"]', "[]"], {}),
        (["('sport', 'news')", "{'art'}", "[]"], {}),
        (["{'sport', 'news'}", "frozenset({'art'})", "set()"], {}),
        (['["sport"' + ', "news"' * 9000 + "]", '["art"]', "[]"], {}),
        (["sport;news", "art", ""], {"problem_type": "multi_label"}),
        (["sport|news", "art", ""], {"problem_type": "multi_label"}),
        (["sport, news", "art", ""], {"problem_type": "multi_label"}),
        (["sport#news", "art", ""], {"problem_type": "multi_label", "separator": "#"}),
    ],
)
def test_texts_that_list_names(tmp_path: Path, cells: list[str], how: dict[str, Any]):
    task = csv(tmp_path, cells, **how)
    assert (task.problem_type, task.labels) == ("multi_label", ("art", "news", "sport"))
    assert chosen(task) == [["news", "sport"], ["art"], []]


def test_texts_that_list_flags(tmp_path: Path):
    task = csv(tmp_path, ["[1, 0, 0]", "[0, 1, 1]"], labels=NAMES)
    assert chosen(task) == [["toxic"], ["insult", "threat"]]
    assert chosen(csv(tmp_path, ["1,0,0", "0,1,1"], labels=NAMES, problem_type="multi_label")) == chosen(task)


@pytest.mark.parametrize("text", ["{art,sport}", '{"art": 1}', '{"art": 1, "b": 0}', "{'art': 0.5}"])
def test_a_text_in_braces_that_is_no_set_is_an_error(tmp_path: Path, text: str):
    with pytest.raises(DataError, match=r"row 2 has .* an object or an array of Postgres; a list is .*labels="):
        csv(tmp_path, [text, "x"], problem_type="multi_label")
    assert spelled_list("{other}") is None


@pytest.mark.parametrize("text", ["['art' 'sport']", "[1 0 0]", "[art, sport]"])
def test_a_text_in_brackets_that_is_no_list_is_an_error(tmp_path: Path, text: str):
    with pytest.raises(DataError, match=r"row 2 has .* in brackets but not a list .*labels="):
        csv(tmp_path, [text, "x"], problem_type="multi_label")
    assert spelled_list("(other)") is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            "[1 0 1]",
            "[0. 1.]",
            "array([1, 0])",
            "tensor(1)",
            '{"art": 1}',
            "{'art': 0.5}",
            "<object at 0x7f01>",
            "-100",
        ),
        *("b'art'", "np.int64(1)", "[np.str_('art')]", "Decimal('1')", "dict_values(['art'])", "<Kind.ART: 1>"),
        *("datetime.date(2020, 1, 1)", "UUID('0a1b')", "[Decimal('1'), Decimal('2')]"),
    ],
)
def test_a_printed_value_is_no_class(tmp_path: Path, text: str):
    with pytest.raises(DataError, match=r"row 2 has .* (which is a printed value|models skip this label).*labels="):
        csv(tmp_path, [text, "x", "<unk>", "(a)"] * 2)
    assert text in csv(tmp_path, [text, "x"] * 2, labels=["x", text]).labels


@pytest.mark.parametrize(
    "text",
    [
        *("play('x')", 'play("music")', "Other('misc')", "poly((R)-3HB)", "C([O-])", "log((x))", "f(x=[1])"),
        *("{a, b}", "[CLS, x]", "np.sum(x)", "Decimal(10, 2)", "[np.int64(1)", "np.int64(1)]"),
    ],
)
def test_a_name_that_looks_like_a_call_or_a_list_is_a_class(text: str):
    assert text in read([text, "x"]).labels


@pytest.mark.parametrize("text", ["{art,sport}", "[art, sport]"])  # the first is an array of Postgres
def test_a_class_that_looks_like_a_list_is_told(text: str, caplog: pytest.LogCaptureFixture):
    read([text, "x"])
    assert f"label column 'label' has '{text}', which is read as one class" in caplog.text
    caplog.clear()
    read([text, "x"], problem_type="classification")
    assert not caplog.messages


@pytest.mark.parametrize("texts", [["010", "100"], ["0 1 0", "1 0 0"]])
def test_flags_without_commas_are_an_error(tmp_path: Path, texts: list[str]):
    with pytest.raises(DataError, match=rf"row 2 has '{texts[0]}' .* 0 and 1 per class. Write it as \[0, 1, 0\]"):
        csv(tmp_path, texts, problem_type="multi_label")
    assert csv(tmp_path, texts, problem_type="multi_label", labels=texts).labels == tuple(texts)


def test_an_object_with_a_score_per_class_is_an_error():
    with pytest.raises(DataError, match=r"row 2 has .* which is an object with keys; a row has a list of names"):
        read([["a"], {"a": 1, "b": 0}], problem_type="multi_label")


def test_signs_that_may_or_may_not_divide_names_are_an_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"row 3 has one of the signs ';' and ','.*Give separator=';'"):
        csv(tmp_path, ["a;b", "c, d"], problem_type="multi_label")
    with pytest.raises(DataError, match=r"row 3 has one of the signs ';', ',' and '\|', all of which occur in column"):
        csv(tmp_path, ["a;b", "c, d", "e|f"], problem_type="multi_label")
    task = csv(tmp_path, ["a;c, d", "c, d"], problem_type="multi_label", labels=["a", "c, d"])
    assert chosen(task) == [["a", "c, d"], ["c, d"]]
    for sign in ",;|":
        with pytest.raises(
            DataError, match=rf"row 2 has 'a\{sign}b' .*problem_type='multi_label' and separator='\{sign}'"
        ):
            csv(tmp_path, [f"a{sign}b", "a", "b"])
        assert csv(tmp_path, [f"a{sign}b", "a", "b"], problem_type="classification").labels == ("a", f"a{sign}b", "b")
    assert csv(tmp_path, ["Washington, D.C.", "Paris, Texas"]).labels == ("Paris, Texas", "Washington, D.C.")


@pytest.mark.parametrize("sign", ["/", "+", "\u3001"])
def test_labels_of_other_rows_in_one_text_are_told(sign: str, caplog: pytest.LogCaptureFixture):
    text = f"art{sign}sport"
    assert text in read([text, "art", "sport", "half/art"]).labels
    assert f"has {text!r}, whose parts are labels of other rows, and it is read as one class." in caplog.text
    assert f"separator={sign!r}, or set problem_type='classification' to hide this line." in caplog.text
    caplog.clear()
    read(["very good", "very", "good", "positive-negative", "positive", "negative", "half/good", "a'b", "a", "b"])
    read(["left_right", "left", "right"])
    read([text, "art", "sport", *map(str, range(999))])
    read([text, "art", "sport"], problem_type="classification")
    assert not [line for line in caplog.messages if "labels of other rows" in line]


def test_a_column_without_a_second_label_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    csv(tmp_path, ["a#b", "a"], problem_type="multi_label")
    assert "no row has more than one label in column 'label'" in caplog.text


def test_lists_with_one_label_each_are_told_and_may_be_read_as_classes(caplog: pytest.LogCaptureFixture):
    cells = [["a"], ["b"], ["a"]]
    assert read(cells).problem_type == "multi_label"
    assert "every row has a list with one label in column 'label'" in caplog.text
    caplog.clear()
    task = read(cells, problem_type="classification")
    assert (task.labels, list(task.split("train").labels)) == (("a", "b"), [0, 1, 0])
    assert read(cells, problem_type="multi_label").problem_type == "multi_label"
    assert read([["a"], []]).problem_type == "multi_label"
    assert "every row has a list" not in caplog.text
    with pytest.raises(DataError, match="which is a list; a class is"):
        read([["a"], ["a", "b"]], problem_type="classification")
    read([["a"], ["0"]])  # the entry of the last row alone looks like 0 and 1 per class
    assert "every row has a list" in caplog.text
    caplog.clear()
    read([[1], [0]])
    assert "every row has a list" not in caplog.text


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        ([[1], [2], [1]], ("1", "2")),
        ([[True], [False], [True]], ("False", "True")),
        (["['b']", "['a']", '["b"]'], ("a", "b")),
        (["('b',)", ["a"], "b"], ("a", "b")),
        (["[2]", "[UNK]", "[ 2 ]"], ("2", "[UNK]")),
    ],
)
def test_a_list_with_one_class_is_that_class(cells: list[object], labels: tuple[str, ...]):
    task = read(cells, problem_type="classification")
    first = labels.index(task.labels[task.split("train").labels[0]])
    assert (task.labels, list(task.split("train").labels)) == (labels, [first, 1 - first, first])
    names = ["['b']", *labels]  # a text that is a name is no list
    given = read(cells, problem_type="classification", labels=names).split("train").labels[0]
    assert names[given] == ("['b']" if cells[0] == "['b']" else labels[first])


# Numbers


GROUPED = ["1.234,5", "1,234.5", "1,234,567", "1.234.567", "1 234.5", "1'234"]


@pytest.mark.parametrize("amount", [*GROUPED, "1,5", "1,5 %", "$1,234", "\u22121,5"])
def test_numbers_with_signs_are_an_error(amount: str, tmp_path: Path):
    with pytest.raises(DataError, match=rf"row 3 has .{re.escape(amount)}. .*may be a number with a comma or another"):
        csv(tmp_path, ["2", amount])
    with pytest.raises(DataError, match=rf"row 3 has '{re.escape(amount)}' .* needs a number\. Write it as in 1234\.5"):
        csv(tmp_path, ["2.5", amount], problem_type="regression")


@pytest.mark.parametrize("sign", ["{}%", "${}.50", "{} \u20ac", "-{}%"])
def test_a_few_amounts_are_classes_and_many_an_error(sign: str, caplog: pytest.LogCaptureFixture):
    names = [sign.format(number) for number in range(10, 31)]
    assert read(names[:20]).labels == tuple(sorted(names[:20]))
    assert f"has numbers such as '{names[0]}', each of which is read as a class. Write them as in 12.5" in caplog.text
    with pytest.raises(DataError, match=rf"row 1 has '{re.escape(names[0])}' .*may be a number with a comma"):
        read(names)


@pytest.mark.parametrize("name", ["9.30 am", "1.5 T", "3.10 LTS", "100 000", "5$"])
def test_numbers_with_signs_beside_names_are_names(name: str, caplog: pytest.LogCaptureFixture):
    assert read([name, "x"]).labels == tuple(sorted([name, "x"]))
    assert not caplog.text


@pytest.mark.parametrize("number", ["1,5", "-1,5", "1.234,5", "1,234.5"])
def test_a_number_with_a_comma_is_an_error_also_beside_names(number: str):
    with pytest.raises(DataError, match=rf"row 2 has '{re.escape(number)}' .*may be a number with a comma"):
        read(["unknown", number])


@pytest.mark.parametrize("name", ["5 stars", "2.0L", "1.2.3", "10.0.0.1", "01.02.2020", "10-20", "<=50K", "$$", "1 2"])
def test_names_that_hold_numbers_are_names(name: str):
    assert read([name, "x"]).labels == tuple(sorted([name, "x"]))


def test_decimals_are_numbers_and_without_a_point_ids():
    task = read([Decimal("1.5"), Decimal("2.0")])
    assert (task.problem_type, task.split("train").labels) == ("regression", (1.5, 2.0))
    for how in ({}, {"problem_type": "regression"}):
        with pytest.raises(DataError, match=r"row 1 has .*sNaN"):
            read([Decimal("sNaN"), Decimal("1.5")], **how)
    assert read([Decimal("9007199254740993.5"), Decimal("0.5")]).split("train").labels == (9007199254740994.0, 0.5)
    assert read([Decimal(10), Decimal(2), Decimal("1E+1")]).labels == ("2", "10")
    assert read([Decimal(1), Decimal(0)], labels=["no", "yes"]).split("train").labels == (1, 0)


def test_decimals_with_a_point_are_classes_where_floats_are():
    """Databases store 1 in a column NUMERIC(10, 2) as 1.00."""
    zero, one = Decimal("0.00"), Decimal("1.00")
    assert read([one, zero], problem_type="classification").labels == ("0", "1")
    assert read([one, zero], labels=["no", "yes"]).split("train").labels == (1, 0)
    assert read([[one, zero, one], [zero, one, zero]]).split("train").labels == ((1, 0, 1), (0, 1, 0))
    long = [Decimal("12345678901234567.00"), Decimal("12345678901234568.00")]
    assert read(long, problem_type="classification").labels == ("12345678901234567", "12345678901234568")
    assert read([one, Decimal("NaN"), zero], problem_type="classification", missing_labels="drop").labels == ("0", "1")


# Names that the data declare


def test_flags_in_a_column_of_class_ids_are_an_error():
    ids = datasets.List(datasets.ClassLabel(names=["zeal", "art", "music"]))
    features = datasets.Features({"sentence": datasets.Value("string"), "label": ids})
    rows = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [[0, 1, 2], [1, 0, 0]]}, features=features)
    with pytest.raises(
        DataError, match=r"row 2 has .* which seems to be 0 and 1 per class; its type says .* ids\. Cast"
    ):
        Task.from_dataset(KIND, {"test": rows})
    assert Task.from_dataset(KIND, {"test": rows.select([0])}).split("test").labels == ((1, 1, 1),)


def test_class_names_of_streams_files_and_nested_features_are_kept(tmp_path: Path):
    names = datasets.ClassLabel(names=["neg", "pos"])
    value = datasets.Value("string")
    single = datasets.Dataset.from_dict(
        {"sentence": ["a", "b"], "label": [1, 0]}, features=datasets.Features({"sentence": value, "label": names})
    )
    several = datasets.Dataset.from_dict(
        {"sentence": ["a", "b"], "label": [[1, 0], []]},
        features=datasets.Features({"sentence": value, "label": datasets.List(names)}),
    )
    for rows, expected in ((single, (1, 0)), (several, ((1, 1), (0, 0)))):
        rows.to_parquet(tmp_path / "some.parquet")
        for task in (
            Task.from_dataset(KIND, {"test": rows}),
            Task.from_dataset(KIND, {"test": rows.to_iterable_dataset()}),
            Task.from_files(KIND, test=tmp_path / "some.parquet"),
        ):
            assert (task.labels, task.split("test").labels) == (("neg", "pos"), expected)
        with pytest.raises(ConfigError, match=r"labels are pos, neg, but column 'label' of .*some\.parquet has"):
            Task.from_files(KIND, test=tmp_path / "some.parquet", labels=["pos", "neg"])


def test_categories_of_a_parquet_file_are_kept(tmp_path: Path):
    path = tmp_path / "some.parquet"
    for ordered, labels in ((True, ("low", "mid", "high")), (False, ("high", "low", "mid"))):
        cells = pd.Categorical(["high", "low"], categories=["low", "mid", "high"], ordered=ordered)
        pd.DataFrame({"sentence": ["a", "b"], "label": cells}).to_parquet(path)
        task = Task.from_files(KIND, test=path)
        assert (task.labels, [task.labels[row] for row in task.split("test").labels]) == (labels, ["high", "low"])


def test_numbers_of_classes_can_be_named():
    features = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(num_classes=2)})
    rows = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [1, 0]}, features=features)
    assert Task.from_dataset(KIND, {"test": rows}, labels=["no", "yes"]).split("test").labels == (1, 0)


def test_bools_among_numbers_are_an_error():
    with pytest.raises(
        DataError, match="row 3 has False in column 'label', and another row has 0; labels are bools or"
    ):
        read([0, 1, False, True])


def test_rows_without_any_class_are_an_error():
    with pytest.raises(DataError, match="has no class in any row of column 'label'"):
        read([[], []])


def test_whole_numbers_with_a_point_may_be_classes(caplog: pytest.LogCaptureFixture):
    assert read([1.0, 0.0] * 3).problem_type == "regression"
    assert "has numbers with a decimal point, so the task is a regression" in caplog.text
    caplog.clear()
    assert read([1.0, 0.0] * 3, problem_type="classification").labels == ("0", "1")
    assert not caplog.messages


def test_names_that_differ_in_case_only_are_told(caplog: pytest.LogCaptureFixture):
    assert read(["Pos", "neg", "pos"] * 3).labels == ("Pos", "neg", "pos")
    assert (
        "the classes 'Pos' and 'pos' differ in case, width, spaces or unseen characters only; if they are one class"
        in caplog.text
    )


def test_a_positive_class_may_be_a_number_or_a_bool():
    assert [read([0, 1] * 3, positive=positive).positive for positive in (1, 0, "1")] == ["1", "0", "1"]
    assert read([False, True] * 3, positive=True).positive == "True"
    assert read(["bad", "ok"] * 3).with_positive("bad").positive == "bad"


@pytest.mark.parametrize(
    ("cells", "kind", "said"),
    [
        (
            [0.5, 1.25, 2.0],
            "regression",
            "has numbers with a decimal point, so the task is a regression",
        ),
        ([float(n) for n in range(40)], "regression", "has numbers with a decimal point, so the task is a regression"),
        (list(range(40)), "classification", "has more than 20 different whole numbers, each of which is read as a cl"),
        (
            list(range(11)),
            "classification",
            "has 11 different whole numbers, each of which is read as a class",
        ),
        (list(range(5)), "classification", None),
        ([f"{n}x" for n in range(40)], "classification", None),
    ],
)
def test_what_numbers_are_read_as_is_said(cells: list[Any], kind: str, said: str | None, caplog):
    caplog.set_level("INFO", "lamina.tasks.problem_type")
    assert read(cells * 2).problem_type == kind
    assert [said in message for message in caplog.messages] == ([] if said is None else [True])
    caplog.clear()
    assert read(cells * 2, problem_type=kind).problem_type == kind
    assert caplog.messages == []


@pytest.mark.parametrize("blanks", [" ", "\u200b\n"])
def test_a_long_run_of_blanks_is_trimmed_at_the_ends_only(blanks: str):
    inner = f"a{blanks * 200_000}b"  # with work that grows with the square of the length this would take hours
    assert trimmed(f"\ufeff {inner}\n\u00a0") == inner
    assert trimmed(blanks * 200_000) == ""


@pytest.mark.parametrize("cell", ["#N/A", "#VALUE!", "#DIV/0!", "#ref!"])
def test_an_error_of_a_spreadsheet_is_a_missing_label(cell: str):
    assert is_missing(cell)
    assert not is_missing(cell, [cell])
