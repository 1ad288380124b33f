"""Warnings about blank texts, and about texts that are both trained on and scored."""

from __future__ import annotations

from typing import Any

import pytest

from lamina.tasks.task import Task
from lamina.train.groups import warn_of_texts


def task(name: str, train: list[Any], validation: list[Any], **more: Any) -> Task:
    def rows(texts: list[Any]) -> list[dict[str, Any]]:
        sides = [text if isinstance(text, tuple) else (text,) for text in texts]
        return [{**dict(zip("ab", side, strict=False)), "label": number % 2} for number, side in enumerate(sides)]

    parts = {"train": rows(train), "validation": rows(validation)}
    return Task.from_dataset("sequence_classification", parts, text="a", label="label", name=name, **more)


def test_blank_and_shared_texts_are_counted(caplog: pytest.LogCaptureFixture):
    mixed = task("mood", ["a", "b", " ", "\t", "c"], ["a ", "b", "d", ""])
    warn_of_texts("fit", [mixed, task("topic", ["a", "b", " ", "\t", "c"], ["a ", "b", "d", ""]), mixed])
    blank = "Remove these rows."
    shared = "their scores say little about new texts. Remove them from one of the splits."
    assert caplog.messages == [
        f"fit: 'mood', 'topic': 2 texts of 5 in the train split are blank. {blank}",
        f"fit: 'mood', 'topic': 1 text of 4 in the validation split is blank. {blank}",
        f"fit: 'mood', 'topic': 2 of 4 texts in the validation split (50 %) are in the train split too; {shared}",
    ]


def test_a_pair_is_shared_only_as_a_whole(caplog: pytest.LogCaptureFixture):
    warn_of_texts("fit", [task("pairs", [("a", "b"), ("c", "")], [("a", "c"), ("ab", "")], text_pair="b")])
    assert caplog.messages == []
    warn_of_texts("fit", [task("pairs", [("a", "b"), (" ", "")], [("a", "b"), ("c", "d")], text_pair="b")])
    assert [message.partition(" in the ")[0] for message in caplog.messages] == [
        "fit: 'pairs': 1 text of 2",
        "fit: 'pairs': 1 of 2 texts",
    ]


def test_running_text_repeats_lines_without_a_warning(caplog: pytest.LogCaptureFixture):
    rows = [{"text": "a line"}, {"text": "another"}]
    warn_of_texts("fit", [Task.from_dataset("masked_lm", {"train": rows, "validation": rows})])
    assert caplog.messages == []
