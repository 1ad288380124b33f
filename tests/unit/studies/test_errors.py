"""The study `errors`: wrong answers, agreement and scores by length, on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.stored import tiny_model, tiny_tokenizer

from lamina.errors import ConfigError, LayerIndexError, UnknownNameError
from lamina.studies.probing.error_analysis import errors, without_span
from lamina.studies.study import Study
from lamina.tasks.task import Task

RNG = np.random.default_rng(0)
WORDS = ["the", "a", "film", "is", "paris", "anna", "to", "and", "very"]
FAST = {"epochs": 3, "batch_size": 16}


def texts(count: int) -> list[dict]:
    rows = []
    for row in range(count):
        words = [*RNG.choice(WORDS, 1 + row % 7), "good" if row % 2 else "bad"]
        rows.append({"sentence": " ".join(RNG.permutation(words)), "label": ("bad", "good")[row % 2]})
    return rows


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden_size=16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def mood() -> Task:
    return Task.from_dataset("sequence_classification", {"train": texts(40), "validation": texts(28)}, name="mood")


@pytest.fixture(scope="module")
def tags() -> Task:
    def rows(count: int) -> list[dict]:
        words = [row["sentence"].split() for row in texts(count)]
        return [{"w": own, "t": ["B-X" if word in ("good", "bad") else "O" for word in own]} for own in words]

    parts = {"train": rows(20), "validation": rows(12)}
    return Task.from_dataset("token_classification", parts, text="w", label="t", name="tags")


@pytest.fixture(scope="module")
def study(model, tokenizer, mood) -> Study:
    return errors(model, {"mood": mood}, processor=tokenizer, count=5, **FAST)


def rows(study: Study, measure: str):
    return study.table[study.table["measure"] == measure]


def test_wrong_answers_come_most_confident_first(study, mood):
    wrong = rows(study, "error")
    assert wrong.groupby("layer").size().max() <= 5
    assert (wrong["true"] != wrong["predicted"]).all()
    split = mood.split("validation")
    for layer in set(wrong["layer"]):
        own = wrong[wrong["layer"] == layer]
        assert own["score"].is_monotonic_decreasing
        for row, text, true in own[["row", "text", "true"]].itertuples(index=False):
            assert (split.texts[row], mood.labels[split.labels[row]]) == (text, true)


def test_rows_without_a_label_are_left_out(model, tokenizer):
    parts = {"train": texts(12), "validation": [{"sentence": "film", "label": None}, *texts(8)]}
    parts["train"][0]["label"] = None
    masked, dropped = (
        Task.from_dataset("sequence_classification", parts, missing_labels=how) for how in ("mask", "drop")
    )
    options = {"processor": tokenizer, "layers": [1], "epochs": 1, "deleted": [0.5]}
    study, other = (errors(model, task, **options) for task in (masked, dropped))
    assert study.conclusions == other.conclusions
    assert study.table.drop(columns="row").equals(other.table.drop(columns="row"))
    wrong = rows(study, "error")
    assert len(wrong)
    assert wrong["row"].tolist() == [row + 1 for row in rows(other, "error")["row"]]  # counted in the whole split


def test_layers_agree_with_themselves_and_others_as_much(study):
    table = rows(study, "agreement").pivot(index="layer", columns="other_layer", values="score").to_numpy()
    assert table.shape == (3, 3)
    assert np.diag(table).tolist() == [1, 1, 1]
    assert table == pytest.approx(table.T)
    assert (table <= 1).all()


def test_scores_by_length_and_without_words_are_of_all_rows(study):
    by_length = rows(study, "by_length")
    assert by_length.groupby("layer")["rows"].sum().tolist() == [28, 28, 28]
    assert by_length["length"].max() == 8
    deleted = rows(study, "deleted")
    assert sorted(set(deleted["deleted"])) == [0, 0.1, 0.25, 0.5]
    whole = deleted[deleted["deleted"] == 0].set_index("layer")["score"]
    shares = by_length.assign(right=by_length["score"] * by_length["rows"]).groupby("layer")["right"].sum() / 28
    assert whole.tolist() == pytest.approx(shares.tolist())
    assert " of 28" in study.conclusions[0]
    assert set(study.figures) == {"agreement", "by_length", "deleted"}


def test_texts_of_one_length_are_scored_over_their_own_classes(model, tokenizer):
    train = [{"sentence": f"{word} film", "label": word} for word in ("good", "bad")] * 8
    short = [{"sentence": "good", "label": "good"}] * 16
    parts = {"train": train, "validation": short + train}
    task = Task.from_dataset("sequence_classification", parts, metric="macro_f1")
    options = {"layers": [0], "epochs": 10, "learning_rate": 0.1, "batch_size": 4, "deleted": []}
    study = errors(model, task, processor=tokenizer, **options)
    assert rows(study, "by_length")["score"].tolist() == [1, 1]  # all answers are right; no short text is "bad"


def test_a_share_that_is_named_twice_is_measured_once(model, tokenizer, mood):
    table = errors(model, mood, processor=tokenizer, layers=[1], deleted=[0.5, 0.0, 0.5], epochs=1).table
    assert table.query("measure == 'deleted'")["deleted"].tolist() == [0, 0.5]


def test_a_saved_study_loads_as_it_was(study, tmp_path):
    study.save(tmp_path)
    assert Study.load(tmp_path).table.equals(study.table)


def test_tags(model, tokenizer, tags):
    study = errors(model, tags, processor=tokenizer, layers=[0, 2], probe="mlp", **FAST)
    assert set(rows(study, "deleted")["metric"]) == {"span_f1"}
    assert set(rows(study, "agreement")["metric"]) == {"kappa"}


def test_numbers(model, tokenizer, mood):
    some = [{"sentence": text, "y": 0.5 + len(text)} for text in mood.split("train").texts]
    task = Task.from_dataset("sequence_classification", {"train": some, "validation": some}, label="y")
    study = errors(model, task, processor=tokenizer, layers=[1, 2], deleted=(), **FAST)
    assert set(rows(study, "agreement")["metric"]) == {"pearson"}
    assert set(rows(study, "error")["metric"]) == {"error"}
    assert rows(study, "deleted").empty


def test_ranks_are_those_within_a_bin_of_lengths(model, tokenizer, mood):
    some = [{"sentence": text, "y": 0.5 + len(text)} for text in mood.split("train").texts]
    parts = {"train": some, "validation": some}
    task = Task.from_dataset("sequence_classification", parts, label="y", metric="spearman")
    study = errors(model, task, processor=tokenizer, layers=[1], deleted=(), count=len(some), **FAST)
    bins, answers = rows(study, "by_length"), rows(study, "error")
    lengths = answers["text"].str.split().str.len()
    shortest = answers[lengths <= bins["length"].min()][["true", "predicted"]].astype(float)
    assert len(shortest) == bins["rows"].iloc[0] < len(answers)
    expected = shortest.corr("spearman").loc["true", "predicted"]
    assert bins["score"].iloc[0] == pytest.approx(expected)
    assert study.conclusions == ()


def test_one_span_of_words_is_removed(mood, tags):
    split = mood.split("validation")
    half = without_span(mood, "validation", 0.5, seed=0)
    for text, left, row in zip(split.texts, half.texts, range(len(split)), strict=True):
        words, kept = text.split(), left.split()
        size = len(words) - len(kept)
        assert size == min(round(0.5 * len(words)), len(words) - 1)
        assert any(kept == words[:at] + words[at + size :] for at in range(len(words))), row
    assert list(half.labels) == list(split.labels)
    assert without_span(mood, "validation", 0.0, seed=0) == split
    assert without_span(mood, "validation", 0.5, seed=1) != half
    cut = without_span(tags, "validation", 0.4, seed=0)
    for text, words, labels in zip(cut.texts, cut.words, cut.labels, strict=True):
        found = [text[start:end] in ("good", "bad") for start, end in words]
        assert found == [tags.labels[label] == "B-X" for label in labels]
    pairs = Task.from_dataset(
        "sequence_classification",
        {"train": [{"a": "the film is", "b": "a b c d", "y": row % 2} for row in range(4)]},
        text="a",
        text_pair="b",
        label="y",
    )
    assert [len(side.split()) for side in without_span(pairs, "train", 0.5, seed=0).texts[0]] == [1, 2]


def test_names_that_do_not_exist_are_refused(model, tokenizer, mood):
    with pytest.raises(ConfigError, match=r"deleted is 1\.0; it must be at least 0 and below 1"):
        errors(model, mood, processor=tokenizer, deleted=[1.0])
    with pytest.raises(ConfigError, match="deleted is 2; it must be at least 0 and below 1"):
        errors(model, mood, processor=tokenizer, deleted=(share for share in [2]))
    with pytest.raises(ConfigError, match="errors: count is -1; it must be at least 0"):
        errors(model, mood, processor=tokenizer, count=-1)
    with pytest.raises(ConfigError, match="errors: hidden is 0; it must be at least 1"):
        errors(model, mood, processor=tokenizer, hidden=0)
    with pytest.raises(ConfigError, match="errors: tasks is empty"):
        errors(model, {}, processor=tokenizer)
    with pytest.raises(UnknownNameError, match="errors: unknown probe 'foo'"):
        errors(model, mood, processor=tokenizer, probe="foo")
    with pytest.raises(LayerIndexError, match="errors: layer 9 does not exist"):
        errors(model, mood, processor=tokenizer, layers=[9])
