"""Scoring every reader of a bank on one file, and whether the scores mean anything."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import tiny_bank, train

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.prediction import evaluate
from lamina.store import save_bank
from lamina.tasks.class_results import compare, compare_tags
from lamina.tasks.task import Task
from lamina.train import fit

KIND = "sequence_classification"
COLUMNS = {"mood": "feeling", "urgent": "urgent", "stars": "stars"}  # reader -> column


def write(path: Path, rows: int, *, seed: int = 0, names: tuple[str, ...] = ("message", *COLUMNS.values())) -> Path:
    rng = random.Random(seed)
    lines = [",".join(names)]
    for row in range(rows):
        mood = rng.choice(["good", "bad"])
        values = [f"the film was {mood} {row}", mood, rng.choice(["no", "no", "yes"]), f"{1 + rng.random() * 4:.1f}"]
        lines.append(",".join(values))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ReaderBank:
    path = write(tmp_path_factory.mktemp("trained") / "train.csv", 60)
    tasks = {
        reader: Task.from_files(KIND, train=path, text="message", label=column, positive=positive)
        for (reader, column), positive in zip(COLUMNS.items(), ("bad", None, None), strict=True)
    }
    how: list[dict[str, Any]] = [{"problem_type": task.problem_type} for task in tasks.values()]
    heads = [SequenceClassification(task.labels, 2, **more) for task, more in zip(tasks.values(), how, strict=True)]
    bank = tiny_bank({name: Reader(Mean(), head) for name, head in zip(tasks, heads, strict=True)})
    train(bank, tasks, epochs=12, learning_rate=0.02)
    return bank


@pytest.fixture
def bank(trained: ReaderBank) -> ReaderBank:
    """A bank that a test may change."""
    return copy.deepcopy(trained)


def test_a_bank_remembers_the_columns_of_its_tasks(bank: ReaderBank, tmp_path: Path):
    save_bank(bank, tmp_path / "bank")
    loaded = ReaderBank.from_pretrained(tmp_path / "bank", bank.model, bank.processor)
    assert loaded["mood"].info["columns"] == {"text": "message", "label": "feeling"}
    assert loaded["mood"].info["positive"] == "bad"
    scores = evaluate(loaded, write(tmp_path / "test.csv", 80, seed=1), compare=True)
    assert list(scores) == list(COLUMNS)
    mood, urgent, stars = scores.values()
    assert mood["rows"] == urgent["rows"] == stars["rows"] == 80
    assert mood["accuracy"] > 0.9
    assert mood["f1"] > 0.9
    assert mood["verdict"] is None
    assert mood["interval"]["accuracy"][0] > mood["baseline"]["accuracy"]
    assert (urgent["always"], urgent["verdict"]) == ("no", "not better than always answering 'no'")
    assert urgent["baseline"]["accuracy"] == pytest.approx(1 - urgent["baseline"]["f1"] - 0.3, abs=0.12)
    assert stars["baseline"] == {"pearson": 0.0, "spearman": 0.0}


def test_other_columns_can_be_named(bank: ReaderBank, tmp_path: Path):
    path = write(tmp_path / "test.csv", 20, names=("text", "mood", "urgent", "stars"))
    with pytest.raises(DataError, match=r"has no column 'message'.* Name the columns of reader 'mood', as in --label"):
        evaluate(bank, path, labels={"mood": "mood"})
    with pytest.raises(DataError, match=r"has no column 'feeling'.* Name the columns of reader 'mood'"):
        evaluate(bank, path, text="text")
    named = evaluate(bank, path, text="text", labels={"mood": "mood"})
    assert named == evaluate(bank, write(tmp_path / "same.csv", 20))
    with pytest.raises(UnknownNameError, match="unknown reader 'moods'"):
        evaluate(bank, path, text="text", labels={"moods": "mood"})
    with pytest.raises(ConfigError, match="are for a file, not for tasks"):
        evaluate(bank, {}, text="text")
    for reader in bank:
        del bank[reader].info["columns"]
    with pytest.raises(ConfigError, match=r"reader 'mood' does not say which columns .* --label mood=COLUMN"):
        evaluate(bank, path)


def test_rows_without_a_label_are_not_scored(bank: ReaderBank, tmp_path: Path):
    path = write(tmp_path / "test.csv", 40)
    path.write_text(path.read_text() + "the film was bad,,yes,2.0\n" * 5)
    scores = evaluate(bank, path, compare=True)
    assert [scores[name]["rows"] for name in COLUMNS] == [40, 45, 45]


def test_another_class_can_be_positive(bank: ReaderBank, tmp_path: Path):
    path = write(tmp_path / "test.csv", 40)
    scores = [evaluate(bank, path, positive=positive)["urgent"]["f1"] for positive in (None, {"urgent": "no"})]
    assert scores[0] != scores[1]


def test_tfidf_learns_from_the_train_part_or_a_file(bank: ReaderBank, tmp_path: Path):
    path, learnt = write(tmp_path / "test.csv", 60, seed=3), write(tmp_path / "more.csv", 60)
    scores = evaluate(bank, path, tfidf=learnt)
    assert scores["mood"]["tfidf"]["accuracy"] > 0.9
    assert scores["stars"]["tfidf"].keys() == {"pearson", "spearman"}
    task = Task.from_files(KIND, train=learnt, validation=path, text="message", label="feeling", positive="bad")
    assert evaluate(bank, {"mood": task}, tfidf=True)["mood"]["tfidf"] == scores["mood"]["tfidf"]
    with pytest.raises(ConfigError, match="tfidf is set, and task test has no train part"):
        evaluate(bank, path, tfidf=True)


def test_a_test_part_that_fit_does_not_score_is_named(bank: ReaderBank, caplog: pytest.LogCaptureFixture):
    rows = [{"text": f"the film {row}", "label": "xy"[row % 2]} for row in range(60)]
    task = Task.from_dataset(KIND, {"train": rows[:20], "validation": rows[20:40], "test": rows[40:]}, text="text")
    bank.add("more", Reader(Mean(), SequenceClassification(task.labels, 2)))
    assert fit(bank, {"more": task}, positive="x", epochs=1, test=True, progress=False).test["more"].keys() >= {"f1"}
    assert bank["more"].info["positive"] == "x"
    result = fit(bank, {"more": task}, epochs=1, progress=False)
    assert caplog.messages == [
        "fit: the test part of 'more' was not scored. Give test=True, or call lamina.evaluate with split='test'."
    ]
    assert result.baselines["more"] == {"always": "x", "accuracy": 0.5, "mcc": 0.0, "macro_f1": pytest.approx(1 / 3)}
    caplog.clear()
    assert fit(bank, {"more": task}, epochs=1, test=True, progress=False).test["more"].keys() >= {"accuracy"}
    assert not caplog.messages


# The comparison itself


def share(values: torch.Tensor) -> Any:
    """The score is the share of ones; always answering has a fixed share of ones of its own."""
    return lambda rows, constant: {"accuracy": float(values[int(constant)][rows].double().mean())}


@pytest.mark.parametrize(("right", "verdict"), [(90, True), (60, False), (40, False)])
def test_the_interval_and_the_verdict(right: int, verdict: bool):
    own = (torch.arange(100) < right).long()
    other = (torch.arange(100) >= 45).long()
    found = compare(["accuracy"], 100, "x", share(torch.stack([own, other])))
    low, high = found["interval"]["accuracy"]
    spread = (right * (100 - right) / 100**3) ** 0.5
    assert low == pytest.approx(right / 100 - 1.96 * spread, abs=0.02)
    assert high == pytest.approx(right / 100 + 1.96 * spread, abs=0.02)
    assert (found["verdict"] is None) == verdict
    assert found["baseline"] == {"accuracy": 0.55}


def test_tags_are_compared_by_texts():
    labels, truths = ("O", "B-x", "I-x"), [[0, 1, 2, 0]] * 30
    right = compare_tags(["span_f1", "accuracy", "f1"], truths, truths, labels)
    assert (right["always"], right["baseline"]) == ("O", {"span_f1": 0.0, "accuracy": 0.5})
    assert right["interval"] == {"span_f1": (1.0, 1.0), "accuracy": (1.0, 1.0)}
    assert right["verdict"] is None
    wrong = compare_tags(["span_f1", "accuracy"], [[0, 0, 0, 0]] * 30, truths, labels)
    assert wrong["verdict"] == "not better than always answering 'O'"


def test_a_tagger_is_compared(tmp_path: Path):
    rows = [{"words": ["anna", "is", "good"], "tags": ["B-PER", "O", "O"]}] * 12
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="words", label="tags")
    bank = tiny_bank({"who": Reader(Mean(), TokenClassification(task.labels, 0, 2, 8))})
    result = train(bank, {"who": task}, epochs=1)
    assert result.baselines["who"]["always"] == "O"
    assert bank["who"].info["columns"] == {"text": "words", "label": "tags"}
    assert evaluate(bank, {"who": task}, compare=True)["who"].keys() >= {"interval", "baseline", "verdict"}
