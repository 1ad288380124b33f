"""A label that is not there is never a class, and one bad cell never changes what a task is."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.files import jsonl, put, tsv

from lamina.errors import DataError, UnknownNameError
from lamina.prediction.calibrate import positives_of
from lamina.recipes.load_tasks import load_task
from lamina.recipes.schema import TaskRecipe
from lamina.tasks.label_cells import EvaluateOnly
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

KIND = "sequence_classification"
TEXTS = ["", " ", "\t", "NA", "N/A", "n/a", "#N/A", "null", "NULL", "NaN", "nan", "None", "none", "<NA>", " NA "]
CELLS = [None, math.nan, np.float32("nan"), np.nan, pd.NA, pd.NaT, *TEXTS]
WRITTEN = {
    "tsv": lambda path, labels: tsv(path, [f"text {n}\t{label}" for n, label in enumerate(labels)]),
    "csv": lambda path, labels: put(path, "sentence,label\n" + "".join(f"text,{label}\n" for label in labels)),
    "jsonl": lambda path, labels: jsonl(path, [{"sentence": "text", "label": label} for label in labels]),
}


def parquet(path: Path, labels: list[Any]) -> Path:
    pq.write_table(pa.table({"sentence": ["text"] * len(labels), "label": pa.array(labels, from_pandas=False)}), path)
    return path


def classify(**more: Any) -> Task:
    return Task.from_files(KIND, **more)


@pytest.mark.parametrize("ending", WRITTEN)
@pytest.mark.parametrize("label", [cell for cell in TEXTS if "\t" not in cell])
def test_in_a_file_it_is_an_error_with_its_row(tmp_path: Path, ending: str, label: str):
    path = WRITTEN[ending](tmp_path / f"some.{ending}", ["yes", "no", label, "yes", "no"])
    row = 3 if ending == "jsonl" else 4
    with pytest.raises(DataError, match=rf"some.{ending} row {row} has no label in column 'label'") as caught:
        classify(train=path)
    assert (caught.value.path, caught.value.row, caught.value.column) == (str(path), row, "label")
    task = classify(train=path, missing_labels="drop")
    assert task.labels == ("no", "yes")
    assert sum(map(len, task.splits.values())) == 4


@pytest.mark.parametrize("cell", [None, math.nan, pd.NA, np.float32("nan")])
def test_in_memory_beside_a_part_whose_labels_are_secret(cell: Any, caplog: pytest.LogCaptureFixture):
    rows = [{"sentence": "a", "label": label} for label in ("yes", "no", cell, "yes")]
    parts = {"train": rows, "validation": rows, "test": [{"sentence": "b", "label": cell}] * 2}
    with pytest.raises(DataError, match="row 3 has no label in column 'label'"):
        Task.from_dataset(KIND, parts)
    task = Task.from_dataset(KIND, parts, missing_labels="drop")
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 3, "validation": 3}
    assert "every cell is -1 or empty" in caplog.text


@pytest.mark.parametrize("cell", ["null", "NaN", '""', None])
def test_in_json_lines(tmp_path: Path, cell: str | None):
    rows = ['"yes"', '"no"', cell, '"no"']
    lines = ['{"sentence": "a"' + ("" if row is None else f', "label": {row}') + "}\n" for row in rows]
    with pytest.raises(DataError, match="row 3 has no label in column 'label'"):
        classify(train=put(tmp_path / "some.jsonl", "".join(lines)))


@pytest.mark.parametrize("labels", [["a", None, "b"], [0, None, 1], [2.0, math.nan, 1.0], ["a", "", "b"]])
def test_in_parquet(tmp_path: Path, labels: list[Any]):
    path = parquet(tmp_path / "some.parquet", labels)
    with pytest.raises(DataError, match="row 2 has no label in column 'label'"):
        classify(train=path)
    kept = classify(train=path, missing_labels="drop", problem_type="classification")
    assert len(kept.labels) == 2


@pytest.mark.parametrize("cell", CELLS, ids=repr)
def test_in_data_at_hand(cell: Any):
    rows = [{"sentence": str(n), "label": label} for n, label in enumerate(["yes", "no", cell, "no"])]
    with pytest.raises(DataError, match="task/train row 3 has no label in column 'label'"):
        Task.from_dataset(KIND, {"train": rows})
    task = Task.from_dataset(KIND, {"train": rows, "test": rows}, missing_labels="drop")
    assert task.labels == ("no", "yes")
    assert task.split("test").texts == ("0", "1", "3")


def test_in_a_data_set_minus_one_is_no_label():
    names = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"sentence": ["a", "b", "c", "d"], "label": [0, 1, -1, None]}, features=names)
    with pytest.raises(DataError, match="row 3 has no label in column 'label'"):
        Task.from_dataset(KIND, {"test": rows})
    task = Task.from_dataset(KIND, {"test": rows}, missing_labels="drop")
    assert task.split("test").labels == (0, 1)


@pytest.mark.parametrize("text", ["null", "NA", "None", "n/a"])
def test_a_declared_label_may_read_so(tmp_path: Path, text: str):
    path = tsv(tmp_path / "some.tsv", [f"a\t{text}", "b\tyes", f"c\t{text}"])
    assert classify(test=path, labels=[text, "yes"]).split("test").labels == (0, 1, 0)
    with pytest.raises(DataError, match=rf"has no label in column 'label' \({text}\).*labels=\['{text}', \.\.\.\]"):
        classify(train=path)
    rows = [{"sentence": "a", "label": None}, {"sentence": "b", "label": text}]
    with pytest.raises(DataError, match="row 1 has no label"):
        Task.from_dataset(KIND, {"test": rows}, labels=[text, "yes"])


def test_rows_that_are_left_out_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tsv(tmp_path / "some.tsv", ["a\tyes", "b\t", "c\tNA", "d\tno", "e\tno"])
    task = classify(train=path, test=path, missing_labels="drop")
    assert task.split("test").texts == ("a", "d", "e")
    said = [record.getMessage() for record in caplog.records]
    rest = "and are left out (rows 3, 4)"
    assert said == [f"task: {path}: 2 of 5 rows have no label in column 'label' {rest}"] * 2
    with pytest.raises(DataError, match=r"some\.tsv has no row with a label in column 'label'"):
        classify(test=tsv(path, ["a\t", "b\tnull"]), missing_labels="drop", labels=["x", "y"])
    with pytest.raises(UnknownNameError, match="unknown missing_labels 'ignore'; known: error, drop"):
        classify(train=path, missing_labels="ignore")


@pytest.mark.parametrize("cell", ["", "NA", "nan"])
def test_a_regression_stays_one(tmp_path: Path, cell: str):
    path = tsv(tmp_path / "some.tsv", ["a\t1.5", f"b\t{cell}", "c\t2.5", "d\t3"])
    with pytest.raises(DataError, match="row 3 has no label in column 'label'"):
        classify(train=path)
    task = classify(train=path, missing_labels="drop")
    assert task.problem_type == "regression"
    assert sum(map(len, task.splits.values())) == 3


@pytest.mark.parametrize("cell", ["three", "inf", "1,5", "-", "1.5.2", "0x1", "1e", "\u0664x"])
def test_one_name_among_numbers_is_an_error(tmp_path: Path, cell: str):
    path = tsv(tmp_path / "some.tsv", ["a\t1.5", f"b\t{cell}", "c\t2.5", "d\t3"])
    with pytest.raises(DataError, match=rf"row 3 has '{cell}' in column 'label' and row 2 has '1.5'; .*problem_type"):
        classify(train=path)
    with pytest.raises(DataError, match=f"row 3 has '{cell}' in column 'label'; a regression task needs a number"):
        classify(train=path, problem_type="regression")
    assert len(classify(train=path, problem_type="classification").labels) == 4


def test_one_list_among_names_is_an_error():
    rows = [{"sentence": "a", "label": label} for label in (["x"], ["x", "y"], "y")]
    with pytest.raises(DataError, match=r"row 3 has 'y' in column 'label' and row 1 has \['x'\]"):
        Task.from_dataset(KIND, {"train": rows})


def test_declared_classes_that_read_as_numbers_are_classes(tmp_path: Path):
    path = tsv(tmp_path / "some.tsv", ["a\t1.5", "b\t2.5"])
    task = classify(test=path, labels=["1.5", "2.5"])
    assert (task.problem_type, task.split("test").labels) == ("classification", (0, 1))


@pytest.mark.parametrize("labels", [["0.0", "", "1.0"], [0.0, math.nan, 1.0]])
def test_whole_numbers_that_an_empty_cell_made_floats(labels: list[Any]):
    rows = [{"sentence": "a", "label": label} for label in labels]
    with pytest.raises(DataError, match=r"are whole numbers with a decimal point.*Set problem_type"):
        Task.from_dataset(KIND, {"train": rows}, missing_labels="drop")
    for problem in ("classification", "regression"):
        task = Task.from_dataset(KIND, {"train": rows}, missing_labels="drop", problem_type=problem)
        assert task.problem_type == problem


def test_of_several_labels_none_may_be_missing():
    rows = [{"sentence": str(n), "label": label} for n, label in enumerate([["x"], [], ["y", None], ["", "x"], ["y"]])]
    with pytest.raises(DataError, match="row 3 has no label in column 'label'"):
        Task.from_dataset(KIND, {"train": rows})
    task = Task.from_dataset(KIND, {"test": rows}, labels=["x", "y"], missing_labels="drop")
    assert task.split("test").labels == ((1, 0), (0, 0), (0, 1))


def test_of_several_labels_in_a_text_none_may_be_set(tmp_path: Path):
    path = tsv(tmp_path / "some.tsv", ["a\tx,y", "b\t", "c\ty"])
    assert classify(test=path, labels=["x", "y"], problem_type="multi_label").split("test").labels[1] == (0, 0)
    with pytest.raises(DataError, match="row 2 has no label in column 'label'"):
        classify(train=tsv(path, ["a\tx,NA"]), problem_type="multi_label")


def test_tags(tmp_path: Path):
    path = put(tmp_path / "some.conll", "EU\tB-ORG\nsaid\tO\n\nso\tO\nwhat\t\n\nyes\tO\n")
    with pytest.raises(DataError, match=r"some\.conll row 4 has no label in column '-1'"):
        Task.from_files("token_classification", train=path)
    task = Task.from_files("token_classification", test=path, labels=["O", "B-ORG", "I-ORG"], missing_labels="drop")
    assert task.split("test").texts == ("EU said", "yes")
    rows = [{"sentence": ["a", "b"], "label": tags} for tags in (["X", "Y"], ["X", None], None)]
    with pytest.raises(DataError, match="row 2 has no label"):
        Task.from_dataset("token_classification", {"train": rows})
    kept = Task.from_dataset("token_classification", {"test": rows}, labels=["X", "Y"], missing_labels="drop")
    assert len(kept.split("test")) == 1


def test_texts_to_write(tmp_path: Path):
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": "a", "target": t}) + "\n" for t in ["b", None, " ", "None", "NA"]))
    with pytest.raises(DataError, match="row 2 has no label in column 'target'"):
        Task.from_files("translation", train=path)
    task = Task.from_files("translation", test=path, missing_labels="drop")
    assert task.split("test").labels == ("b", "None", "NA")


def test_of_images(tmp_path: Path):
    rows = [{"image": str(tmp_path / "a.png"), "label": label} for label in ("cat", None, "dog")]
    with pytest.raises(DataError, match="row 2 has no label"):
        Task.from_dataset("image_classification", {"train": rows})
    task = Task.from_dataset("image_classification", {"test": rows}, labels=["cat", "dog"], missing_labels="drop")
    assert task.split("test").labels == (0, 1)


def test_in_a_recipe(tmp_path: Path):
    tsv(tmp_path / "some.tsv", ["a\tyes", "b\tno", "c\tno", "d\t"])
    given: dict[str, Any] = {"files": {"train": "some.tsv", "validation": "some.tsv"}}
    with pytest.raises(DataError, match="row 5 has no label"):
        load_task("some", TaskRecipe.model_validate(given), tmp_path)
    task = load_task("some", TaskRecipe.model_validate({**given, "missing_labels": "drop"}), tmp_path)
    assert len(task.split("train")) == 3
    with pytest.raises(ValueError, match="'missing_labels' is for files"):
        TaskRecipe.model_validate({"preset": "cola", "missing_labels": "drop"})


@pytest.mark.parametrize("number", [10**400, -(10**400), math.inf])
def test_numbers_beyond_floats(number: Any):
    rows = [{"sentence": "a", "label": label} for label in (1.5, number, 2.5)]
    for problem in (None, "regression"):
        with pytest.raises(DataError, match=r"row 2 has '.*' in column 'label'; a regression task needs a number"):
            Task.from_dataset(KIND, {"train": rows}, problem_type=problem)


@pytest.mark.parametrize("labels", [["bad", "good", None], [["bad"], [], None]])
def test_it_makes_a_row_neither_positive_nor_negative_for_a_monitor(labels: list[Any]):
    rows = [{"text": f"text {row}", "label": label} for row, label in enumerate(labels)]
    how: dict[str, Any] = {"text": "text", "labels": ["bad", "good"], "missing_labels": "mask"}
    task = Task.from_dataset(KIND, {"test": rows}, **how)
    assert positives_of(task, "test", ["bad"]) == [True, False, None]


def test_of_several_labels_in_a_text_an_empty_one_is_missing_if_the_user_chose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tsv(tmp_path / "some.tsv", ["a\tx;y", "b\t", "c\ty", "d\t;"])
    how: dict[str, Any] = {"problem_type": "multi_label", "labels": ["x", "y"]}
    with caplog.at_level("INFO"):
        assert classify(test=path, **how).split("test").labels == ((1, 1), (0, 0), (0, 1), (0, 0))
    assert "1 of 4 cells in column 'label' are empty, which is read as no class. Give missing" in caplog.text
    assert classify(test=path, missing_labels="drop", **how).split("test").labels == ((1, 1), (0, 1), (0, 0))
    assert classify(test=path, missing_labels="mask", **how).split("test").unlabelled == 1
    assert classify(test=path, missing_labels=EvaluateOnly.MASK_NULLS, **how).split("test").unlabelled == 0
    with pytest.raises(UnknownNameError, match="unknown missing_labels 'mask_nulls'"):
        classify(test=path, missing_labels="mask_nulls", **how)
    with pytest.raises(
        DataError, match=r"row 3 has no label .*, or leave missing_labels out, and an empty text is no cl"
    ):
        classify(test=path, missing_labels="error", **how)
    with pytest.raises(DataError, match="or problem_type='multi_label' if a cell has several classes and may be empty"):
        classify(train=path)


@pytest.mark.parametrize(
    ("kind", "labels", "hint"),
    [
        (KIND, ["buy | now", "N/A"], r", or labels=\['N/A', ...\] if that is a class"),
        (KIND, ["buy | now", ""], ", or problem_type='multi_label' if"),
        ("token_classification", ["[] ;", ""], "'mask' to keep them for other tasks over the same rows"),
    ],
)
def test_the_last_advice_about_a_missing_label(tmp_path: Path, kind: str, labels: list[str], hint: str):
    path = WRITTEN["tsv"](tmp_path / "some.tsv", labels)
    with pytest.raises(DataError, match=f"row 3 has no label .* needs one. Give missing_labels=[^;]*{hint}") as caught:
        Task.from_files(kind, train=path)
    assert ("multi_label" in str(caught.value)) == ("multi_label" in hint)
