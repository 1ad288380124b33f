"""Tasks over the same rows: they share every pass, and rows without a label of a task stay in it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.portions import one_in
from tests.support.training import reader, tiny_bank, train

from lamina.bank import ReaderBank
from lamina.errors import DataError
from lamina.prediction import evaluate
from lamina.tasks.task import Task


def bank_for(**tasks: Task) -> ReaderBank:
    return tiny_bank({name: reader(task, seed=at) for at, (name, task) in enumerate(tasks.items())})


COLUMNS = ("mood", "topic", "stars")


def three_columns(rows: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    moods, topics = ("good", "bad", "fun"), ("paris", "rome", "oslo")
    return [
        {
            "text": f"the film {rng.choice(moods)} {row}",
            "mood": rng.choice(moods),
            "topic": rng.choice(topics),
            "stars": 1 + row % 3,
        }
        for row in range(rows)
    ]


@pytest.mark.parametrize("pair", one_in(2, [{}, {"text_pair": "topic"}]))
def test_tasks_over_one_file_share_every_pass(tmp_path: Path, pair: dict[str, Any], caplog: pytest.LogCaptureFixture):
    path = tmp_path / "train.csv"
    rows = three_columns(200)
    path.write_text("text,mood,topic,stars\n" + "".join(",".join(map(str, row.values())) + "\n" for row in rows))
    tasks = {
        name: Task.from_files("sequence_classification", train=path, text="text", label=name, **pair)
        for name in COLUMNS
    }
    bank = bank_for(**tasks)
    result = train(bank, tasks, epochs=2, batch_size=8)
    assert result.steps == 2 * math.ceil(180 / 8)
    assert "validation parts" not in caplog.text
    assert {name: bank[name].info["rows"] for name in tasks} == dict.fromkeys(COLUMNS, 180)


@pytest.mark.parametrize("pair", one_in(2, [{}, {"text_pair": "other"}]))
def test_tasks_that_hold_out_other_rows_of_the_same_are_named(pair: dict[str, Any], caplog: pytest.LogCaptureFixture):
    rows = [{"text": f"alpha {number}", "other": "beta", "a": "xy"[number % 2]} for number in range(90)]
    tasks = {
        name: Task.from_dataset(
            "sequence_classification", {"train": rows}, text="text", label="a", name="train", seed=seed, **pair
        )
        for name, seed in (("a", 0), ("b", 1), ("c", 0))
    }
    train(bank_for(**tasks), tasks, epochs=1)
    wanted = "fit: 'a', 'b', 'c' have the same rows but different validation parts, so they cannot all share a pass."
    assert sum(wanted in message for message in caplog.messages) == 1


def test_rows_without_a_label_are_masked_where_another_task_shares_them(caplog: pytest.LogCaptureFixture):
    rows = three_columns(60)
    for at in range(0, 60, 3):
        rows[at]["mood"] = None if at < 48 else "NONE" if at < 54 else "NA"
    parts = {"train": rows[:48], "validation": rows[48:]}
    tasks = {
        name: Task.from_dataset("sequence_classification", parts, text="text", label=name) for name in ("mood", "topic")
    }
    assert sorted(caplog.messages) == [
        "task: task/train: 16 of 48 rows have no label in column 'mood' and give no loss and no score "
        "(rows 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, ...)",
        "task: task/validation: 4 of 12 rows give no loss and no score, because their label in column 'mood' is "
        "'NONE', 'NA' (rows 1, 4, 7, 10). If one of these texts is a class, name all classes in labels",
    ]
    bank = bank_for(**tasks)
    result = train(bank, tasks, epochs=2, batch_size=8)
    assert (result.steps, result.unlabelled, bank["mood"].info["rows"]) == (12, {"mood": 16}, 32)
    with pytest.raises(DataError, match=r"fit: 16 of 48 training rows of 'mood' have no label, and no other task"):
        train(bank_for(mood=tasks["mood"]), {"mood": tasks["mood"]}, epochs=1)


@pytest.mark.parametrize(
    ("column", "gap", "more"),
    one_in(
        3,
        [
            ("stars", None, {"problem_type": "regression"}),
            ("stars", None, {"problem_type": "classification"}),
            ("lists", None, {}),
            ("tags", None, {"kind": "token_classification", "text": "words"}),
            ("spans", None, {"kind": "token_classification"}),
        ],
    ),
)
def test_masked_rows_have_no_score_and_no_loss(column: str, gap: Any, more: dict[str, Any]):
    """Scores are those of the task without these rows, whatever stands in their texts."""
    rows = [
        row | {"lists": [row["mood"]], "words": row["text"].split(), "tags": ["O", "B-x", "O", "O"], "spans": ["film"]}
        for row in three_columns(24)
    ]
    gaps = [row | {column: gap} if at % 4 == 1 else row for at, row in enumerate(rows)]
    how: dict[str, Any] = {"kind": "sequence_classification", "text": "text", "label": column, **more}
    masked, dropped = (
        Task.from_dataset(dataset={"train": gaps, "validation": gaps}, missing_labels=missing, **how)
        for missing in ("mask", "drop")
    )
    assert [masked.split(part).unlabelled for part in masked.splits] == [6, 6]
    assert [len(task.split("train")) for task in (masked, dropped)] == [24, 18]
    bank = bank_for(a=masked)
    train(bank, {"a": masked}, epochs=1)
    # one text per pass: in a batch of another shape, rounding would decide the ranks of equal predictions
    how = {"per_class": True, "errors": 24, "batch_size": 1}
    scores = [evaluate(bank, {"a": task}, **how)["a"] for task in (masked, dropped)]
    texts = [[row["text"] for row in score.pop("errors")] for score in scores]
    assert sorted(map(str, texts[0])) == sorted(map(str, texts[1]))
    assert {key: score for key, score in scores[0].items() if key != "per_class"} == pytest.approx(
        {key: score for key, score in scores[1].items() if key != "per_class"}, abs=1e-6
    )
    assert scores[0]["per_class"] == scores[1]["per_class"]
