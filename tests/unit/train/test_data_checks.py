"""Warnings about blank texts, and about texts that are both trained on and scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.training import length_of_text, reader, tiny_bank, yes_no

from lamina import fit
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


def test_a_run_of_few_steps_says_so_unless_their_number_was_chosen(caplog: pytest.LogCaptureFixture):
    few = yes_no(train=8, validation=8)
    bank = tiny_bank({"mood": reader(few)})
    fit(bank, {"mood": few}, progress=False)
    told = "fit: 'mood' took 3 optimizer steps, perhaps too few to learn from. Raise epochs, for instance to 200"
    assert told in caplog.text
    caplog.clear()
    names = [f"r{number:02}" for number in range(12)]
    fit(tiny_bank({name: reader(few) for name in names}), dict.fromkeys(names, few), progress=False)
    told = [message for message in caplog.messages if "optimizer step" in message]
    assert len(told) == 1
    assert told[0].startswith("fit: 'r00', 'r01', ")
    assert "'r09' and 2 others took 3 optimizer steps, perhaps" in told[0]
    caplog.clear()
    longer = yes_no(train=64, validation=8)
    fit(tiny_bank({"a": reader(few), "b": reader(longer)}), {"a": few, "b": longer}, progress=False)
    assert (
        "fit: 'a', 'b' took at most 6 optimizer steps, perhaps too few to learn from. Raise epochs, for" in caplog.text
    )
    caplog.clear()
    for chosen in ({"epochs": 2}, {"batch_size": 8}, {"max_steps": 3}):
        fit(bank, {"mood": few}, progress=False, **chosen)
    many = yes_no(train=320, validation=8)  # ten steps per epoch
    fit(bank, {"mood": many}, progress=False)
    assert "optimizer step" not in caplog.text


def test_readers_that_are_no_better_than_one_answer_are_named(caplog: pytest.LogCaptureFixture):
    mood = yes_no(train=40, validation=20)
    bank = tiny_bank({"mood": reader(mood), "good": reader(mood)})
    result = fit(bank, {"good": mood}, epochs=20, batch_size=4, learning_rate=0.03, progress=False)
    assert result.best["good"]["accuracy"] > result.baselines["good"]["accuracy"]
    assert "not better" not in caplog.text
    bank["mood"].head.output.bias.data[0] = 99.0
    fit(bank, {"mood": mood}, learning_rate=1e-9, progress=False)  # the warning of few steps has named it
    small = yes_no(train=40, validation=19)  # too few rows to tell
    fit(bank, {"mood": small}, epochs=1, learning_rate=1e-9, progress=False)
    assert "not better" not in caplog.text
    always = fit(bank, {"mood": mood}, epochs=1, learning_rate=1e-9, progress=False)
    assert always.best["mood"]["accuracy"] <= always.baselines["mood"]["accuracy"]
    assert "fit: not better on validation than one and the same answer: 'mood' (accuracy 0." in caplog.text
    caplog.clear()
    far = replace(length_of_text(), metrics=("pearson", "mae"))  # a correlation ignores the scale
    bank = tiny_bank({f"far{number}": reader(far) for number in range(11)})
    for name in bank:
        bank[name].head.output.bias.data[0] = 99.0
    fit(bank, dict.fromkeys(bank, far), epochs=1, learning_rate=1e-9, progress=False)
    assert "'far0' (mae 9" in caplog.text
    assert " and 1 other" in caplog.text
    assert "'far10'" not in caplog.text


@pytest.mark.parametrize(
    ("third", "hint"),
    [("neutral", "metric='macro_f1' or 'f1'"), (None, "metric='macro_f1' or 'auroc'")],
)
def test_where_one_class_has_nearly_all_rows_other_metrics_are_suggested(
    third: str | None, hint: str, caplog: pytest.LogCaptureFixture
):
    rows = [{"sentence": "the film", "label": "ja" if at == 0 else "nein"} for at in range(22)]
    labels = ("nein", "ja") if third is None else ("nein", "ja", third)
    rare = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, labels=labels, name="m")
    fit(tiny_bank({"mood": reader(rare)}), {"mood": rare}, epochs=1, learning_rate=1e-9, progress=False)
    assert f"Over 90 % of the rows have one answer: choose {hint} when you make the task" in caplog.text


def test_training_texts_that_are_cut_are_counted_once(caplog: pytest.LogCaptureFixture):
    rows = [{"sentence": "the film is good and very bad" if at % 3 else "film", "label": at % 2} for at in range(12)]
    long = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows[:8]}, name="m")
    bank = tiny_bank({"a": reader(long), "b": reader(long)})
    fit(bank, {"a": long, "b": long}, epochs=2, max_length=4, progress=False)
    told = (
        "fit: too long to be read whole, and cut off: 8 of 12 training examples of 'a', 'b'. Raise max_length, if the"
    )
    assert [message for message in caplog.messages if "max_length" in message] == [f"{told} model reads more."]
    caplog.clear()
    fit(bank, {"a": long, "b": long}, epochs=2, progress=False)
    assert "max_length" not in caplog.text


def test_running_text_repeats_lines_without_a_warning(caplog: pytest.LogCaptureFixture):
    rows = [{"text": "a line"}, {"text": "another"}]
    warn_of_texts("fit", [Task.from_dataset("masked_lm", {"train": rows, "validation": rows})])
    assert caplog.messages == []
