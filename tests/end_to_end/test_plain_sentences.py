"""Sixty plain sentences, as a new user would type them, and what the demo's readers say: `-m full` trains these."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import lamina
from lamina.demo.run import run_demo

SENTENCES = Path(__file__).resolve().parents[1] / "support" / "plain_sentences.jsonl"
WRITTEN = Path(__file__).resolve().parents[2] / "examples" / "data" / "demo-sentences.tsv"
ROWS = [json.loads(line) for line in SENTENCES.read_text(encoding="utf-8").splitlines()]
logger = logging.getLogger(__name__)
ENOUGH = 0.92


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> list[dict[str, Any]]:
    folder = run_demo(tmp_path_factory.mktemp("demo"), full=True, sentences=WRITTEN, progress=False).folder
    return lamina.predict(lamina.ReaderBank.from_pretrained(folder / "bank"), [row["text"] for row in ROWS])


def is_right(row: dict[str, Any], answer: dict[str, Any], task: str) -> bool:
    if task == "entities":
        return sorted([span["text"], span["label"]] for span in answer["entities"]) == sorted(row["entities"])
    return answer[task]["label"] == row[task]


def test_the_list_is_of_sixty_sentences_and_has_the_suggested_one():
    assert len({row["text"] for row in ROWS}) == len(ROWS) == 60
    assert ROWS[0]["text"] == "The pasta at Luigi's was cold."


@pytest.mark.full
@pytest.mark.parametrize("task", ["sentiment", "acceptability", "entities"])
def test_most_are_read_right(answers, task):
    right = sum(is_right(row, answer, task) for row, answer in zip(ROWS, answers, strict=True))
    logger.info("%s: %d of %d right", task, right, len(ROWS))  # pytest --log-cli-level INFO shows it
    assert right >= ENOUGH * len(ROWS)


@pytest.mark.full
def test_the_suggested_sentence_is_called_negative_and_acceptable(answers):
    assert is_right(ROWS[0], answers[0], "sentiment")
    assert is_right(ROWS[0], answers[0], "acceptability")
