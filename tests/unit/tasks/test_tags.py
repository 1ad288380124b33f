from __future__ import annotations

import pytest

from lamina.tasks.metrics import marks_spans
from lamina.tasks.token_classification import both_ends, is_iob, to_iob2


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


def test_kinds_of_tags():
    assert is_iob(["O", "I-PER", "B-PER"])
    assert not is_iob(["O"])
    assert not is_iob(["NN", "O"])
    assert not is_iob(["S-PER", "O"])
    assert marks_spans(["S-PER", "O"])
    assert not marks_spans(["O", "NN"])
    assert both_ends(["O", "I-PER", "B-LOC"]) == {"O", "B-PER", "I-PER", "B-LOC", "I-LOC"}
