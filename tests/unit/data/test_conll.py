"""Lines of CoNLL files that are no words: comments, headers, marks of documents, repeated words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.files import put

from lamina.data.read import read_table
from lamina.errors import DataError
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

WORDS = "Ana B-PER\nleft O\n\nLima B-LOC\n\n"
SENTENCES = [["Ana", "left"], ["Lima"]]


@pytest.mark.parametrize(
    "text",
    [
        "# sent_id = 1\n# text = Ana left\n" + WORDS,
        "#id=1\n" + WORDS.replace("\n\nLima", "\n\n# doc2\nLima"),
        "# doc1\n\n" + WORDS,
        "#\thttp://example.org\t[2009]\n" + WORDS,
        "-DOCSTART- -X-\n\n" + WORDS,
        "-DOCSTART-\tO\n\n" + WORDS,
        "-DOCSTART- (1 EU)\tO\n\n" + WORDS,
        "token tag\n" + WORDS,
        "Word NER-Tag\n" + WORDS,
        "# the words of two documents\nWord\tTag\n" + WORDS.replace(" ", "\t"),
        "\ufeff# doc 1\r\n" + WORDS.replace("\n", "\r\n"),
    ],
)
def test_comments_and_headers_are_no_words(tmp_path: Path, text: str):
    assert read_table(put(tmp_path / "some.conll", text)).column("0") == SENTENCES


def test_a_sign_that_is_a_word_stays_one(tmp_path: Path):
    path = put(tmp_path / "some.conll", "# O\nAna B-PER\n\n#NLP O\nAna B-PER\n\n#\tO\n")
    assert read_table(path).column("0") == [["#", "Ana"], ["#NLP", "Ana"], ["#"]]


def test_the_lines_of_conllu_that_repeat_words_are_left_out(tmp_path: Path):
    rest = "\t_" * 8
    lines = [f"1-2\tdel{rest}", f"1\tde{rest}", f"2\tel{rest}", f"2.1\tnada{rest}", f"3\tmar{rest}"]
    path = put(tmp_path / "some.conll", "# text = del mar\n" + "\n".join(lines) + "\n")
    assert read_table(path).column("1") == [["de", "el", "mar"]]


def test_a_comment_inside_a_sentence_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="row 2 has 4 columns; the file has 2"):
        read_table(put(tmp_path / "some.conll", "Ana B-PER\n# not a comment\n"))


def test_the_numbers_of_words_are_not_read_as_words(tmp_path: Path):
    for numbers in ((5, 6, 7), (1, 1, 2)):  # of words, of sentences
        lines = "{} Ana B-PER\n{}\t left \tO\n\n{} Lima B-LOC\n".format(*numbers)
        path = put(tmp_path / "some.conll", lines)
        with pytest.raises(DataError, match=r"has numbers, such as those of words or .* in column '0'.* text=1"):
            Task.from_files("token_classification", train=path, validation=path)
    assert list(Task.from_files("token_classification", train=path, validation=path, text=1).split("train").texts) == [
        "Ana left",
        "Lima",
    ]


def test_tags_are_not_read_as_words(tmp_path: Path):
    path = put(tmp_path / "some.conll", "B-PER Ana\nO left\n\nB-LOC Lima\n")
    with pytest.raises(DataError, match=r"has tags in column '0', not the words.* text=1"):
        Task.from_files("token_classification", train=path, validation=path)


def test_tags_as_numbers_in_a_file(tmp_path: Path):
    path = put(tmp_path / "some.conll", "Ana 1\nleft 0\nhere -100\n")
    task = Task.from_files("token_classification", train=path, validation=path, labels=["O", "B-PER"])
    assert task.split("train").labels == ((1, 0, -100),)
    path = put(tmp_path / "odd.conll", "Ana B-PER\nleft 0\n")
    with pytest.raises(DataError, match="has label '0'; the labels are: O, B-PER"):
        Task.from_files("token_classification", train=path, validation=path, labels=["O", "B-PER"])
    rows = [{"text": ("Ana", "left"), "label": ("B-PER", "0")}]  # tuples, as lists
    with pytest.raises(DataError, match="has label '0'; the labels are: O, B-PER"):
        Task.from_dataset(
            "token_classification", {"train": rows, "validation": rows}, text="text", labels=["O", "B-PER"]
        )


def test_blank_lines_in_a_table_may_divide_sentences(tmp_path: Path):
    with pytest.raises(DataError, match=r"row 3 is blank\. Remove it\. If blank lines divide .* end in \.conll"):
        read_table(put(tmp_path / "some.tsv", WORDS.replace(" ", "\t")))
