from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.support.files import put

from lamina.errors import DataError
from lamina.tasks.metrics import marks_spans
from lamina.tasks.tag_schemes import both_ends, has_outside, is_iob2, odd_tag, recognise, to_iob2
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("I-ORG O I-MISC O O", "B-ORG O B-MISC O O"),
        ("I-PER I-PER O", "B-PER I-PER O"),
        ("I-LOC B-LOC I-LOC", "B-LOC B-LOC I-LOC"),
        ("I-LOC I-PER I-PER", "B-LOC B-PER I-PER"),
        ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC"),
        ("", ""),
    ],
)
def test_spans_start_with_b(tags: str, expected: str):
    assert to_iob2(tags.split()) == tuple(expected.split())


def test_a_word_without_a_tag_interrupts_no_span():
    assert to_iob2(["B-PER", None, "I-PER", None, "O"]) == ("B-PER", None, "I-PER", None, "O")


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-x E-x O S-y S-y", "B-x I-x O B-y B-y"),  # IOBES
        ("B-x I-x L-x O U-y", "B-x I-x I-x O B-y"),  # BILOU
        ("B-x M-x E-x O S-y", "B-x I-x I-x O B-y"),  # BMES
        ("B-x E-x M-x E-x O", "B-x I-x B-x I-x O"),  # a span ends at its last word
        ("x-B x-I O y-B", "B-x I-x O B-y"),
        ("B_x I_x O B_y", "B-x I-x O B-y"),
        ("x_B x_I O y_B", "B-x I-x O B-y"),
        ("b-x i-x o b-y", "B-x I-x O B-y"),
        ("B I O B", "B-span I-span O B-span"),
        ("B M E S", "B-span I-span I-span B-span"),
        ("I-x I-x O I-y", "B-x I-x O B-y"),  # IOB1
        ("B-a-b I-a-b O", "B-a-b I-a-b O"),
        ("S-x O", "B-x O"),
        ("B–x I–x O B–y", "B-x I-x O B-y"),  # noqa: RUF001  with dashes
        ("B:x I:x O B:y", "B-x I-x O B-y"),
        ("x/B x/I O y/B", "B-x I-x O B-y"),
    ],
)
def test_schemes_become_one(tags: str, expected: str):
    scheme = recognise(tags.split())
    assert scheme is not None
    assert to_iob2(tags.split(), scheme) == tuple(expected.split())


@pytest.mark.parametrize("tags", ["O", "NN O", "DT NN VB", "B C", "S-BAR NN", "I O", "0 1 2"])
def test_tags_that_mark_no_spans(tags: str):
    assert recognise(tags.split()) is None
    assert odd_tag(tags.split()) is None


@pytest.mark.parametrize(
    ("tags", "odd"),
    [
        ("B-x I-x O 0", "0"),
        ("B-x o O", "o"),
        ("tag B-x O", "tag"),
        ("B_x I_x O X", "X"),
        ("B-x I-x O x-B", "x-B"),
        ("* (x* *) (y)", "(x*"),
        ("B-x I-x O B-x|B-y", "B-x|B-y"),  # two layers of tags in one column
        ("B-x I-x O I-x,O", "I-x,O"),
        ("B-x I-x O B-O", "B-O"),
    ],
)
def test_the_tag_that_keeps_others_from_marking_spans(tags: str, odd: str):
    assert recognise(tags.split()) is None
    assert odd_tag(tags.split()) == odd


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["O", "B-x", "I-x", "E-x", "S-x"], "B-x I-x E-x O S-x"),
        (["O", "B-x", "I-x", "L-x", "U-x"], "B-x I-x L-x O U-x"),
        (["O", "B-x", "I-x", "E-x"], "B-x I-x E-x O B-x"),
        (["O", "B-x", "I-x"], "B-x I-x I-x O B-x"),
    ],
)
def test_tags_are_written_like_the_labels_of_the_task(labels: list[str], expected: str):
    row = {"words": list("abcde"), "tags": ["B-x", "I-x", "I-x", "O", "B-x"]}
    span = {"words": "a b c d e", "tags": [[0, 5, "x"], [8, 9, "x"]]}
    for rows in ([row], [span], [{**row, "tags": expected.split()}]):
        task = Task.from_dataset("token_classification", {"test": rows}, text="words", label="tags", labels=labels)
        assert [task.labels[tag] for tag in task.split("test").labels[0]] == expected.split()


def test_lists_of_words_and_tags_that_are_texts(tmp_path: Path):
    """As pandas writes them to a CSV file."""
    path = put(tmp_path / "some.csv", "words,tags\n\"['Ana', 'left']\",\"['B-PER', 'O']\"\n['so'],['O']\n")
    task = Task.from_files("token_classification", train=path, validation=path, text="words", label="tags")
    assert list(task.split("train").texts) == ["Ana left", "so"]
    assert [[task.labels[tag] for tag in tags] for tags in task.split("train").labels] == [["B-PER", "O"], ["O"]]
    path = put(tmp_path / "some.csv", "words,tags\n\"['Ana', 'left']\",['B-PER' 'O']\n")
    with pytest.raises(DataError, match=r"row 2 has .* in column 'tags', which is in brackets but not a list"):
        Task.from_files("token_classification", train=path, validation=path, text="words", label="tags")


@pytest.mark.parametrize("dtype", [object, str])
def test_words_and_tags_that_are_arrays(dtype: type):
    """As pandas reads them from a Parquet file."""
    row = {"words": np.array(["Ana", "left"], dtype), "tags": np.array(["B-PER", "O"], dtype)}
    parts = {"train": [row], "validation": [row]}
    task = Task.from_dataset("token_classification", parts, text="words", label="tags")
    assert (list(task.split("train").texts), task.labels) == (["Ana left"], ("B-PER", "I-PER", "O"))


def test_tags_of_words_outside_spans():
    assert all(has_outside(["x", tag]) for tag in ("O", "o", "0", "_", "-", "OTHER", "O|O", "\uff2f"))
    assert not has_outside(["DT", "NN", "ORG", "0x", "Overt"])


def test_kinds_of_tags():
    assert not is_iob2(["O"])
    assert not is_iob2(["O", "I-x"])
    assert not is_iob2(["S-PER", "B-x"])
    assert is_iob2(["O", "B-x", "I-x"])
    assert marks_spans(["S-PER", "O"])
    assert not marks_spans(["O", "NN"])
    assert both_ends(["O", "I-PER", "B-LOC"]) == {"O", "B-PER", "I-PER", "B-LOC", "I-LOC"}


@pytest.mark.parametrize("row", [{"sentence": [], "label": []}, {"sentence": ["a"], "label": [-100]}])
def test_words_without_any_tag_are_no_task(row: dict[str, list[object]]):
    with pytest.raises(DataError, match="task/train has no tag in any row of column 'label'"):
        Task.from_dataset("token_classification", {"train": [row]})
