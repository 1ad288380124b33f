"""Probes of all layers on a tiny model: scores, controls, codes, baselines, and what may be concluded."""

from __future__ import annotations

import logging
import math
import pickle
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from tests.support.finetuned import image_processor, vit
from tests.support.pictures import picture_folder
from tests.support.stored import tiny_model, tiny_tokenizer

import lamina
from lamina.bank import is_read_by_bank
from lamina.errors import ConfigError, DataError, LayerIndexError, UnknownNameError
from lamina.studies.probing.controls import (
    LabelBits,
    baseline_predictions,
    code_length,
    code_portions,
    control_task,
    only_rows,
)
from lamina.studies.probing.probe import (
    ProbeComparison,
    baseline_rows,
    check_task,
    compare_probes,
    conclusions,
    probe,
)
from lamina.studies.probing.probe_cell import Place, ProbeSettings, ProbeSpec, probe_rows
from lamina.studies.runner import labelled_task
from lamina.studies.statistics import Difference
from lamina.studies.study import Study
from lamina.tasks.split import Split
from lamina.tasks.targets import WordTargets
from lamina.tasks.task import Task
from lamina.tasks.words import divided

RNG = np.random.default_rng(0)
GOOD, BAD, REST = ["good", "fun", "very"], ["bad", "slow", "not"], ["the", "a", "film", "is", "paris", "anna", "to"]
FAST = {"epochs": 2, "batch_size": 16, "progress": False}


def sentence(label: int) -> str:
    words = [*RNG.choice(REST, 4), *RNG.choice(GOOD if label else BAD, 2)]
    return " ".join(RNG.permutation(words))


def texts(count: int) -> list[dict]:
    return [{"sentence": sentence(row % 2), "label": ("bad", "good")[row % 2]} for row in range(count)]


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden_size=16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def mood() -> Task:
    parts = {"train": texts(32), "validation": texts(24)}
    return Task.from_dataset("sequence_classification", parts, name="mood")


@pytest.fixture(scope="module")
def tags() -> Task:
    def rows(count: int) -> list[dict]:
        sentences = [sentence(row % 2).split() for row in range(count)]
        return [{"w": words, "t": ["B-X" if word in GOOD else "O" for word in words]} for words in sentences]

    parts = {"train": rows(20), "validation": rows(10)}
    return Task.from_dataset("token_classification", parts, text="w", label="t", name="tags")


@pytest.fixture(scope="module")
def study(model, tokenizer, mood) -> Study:
    return probe(model, {"mood": mood}, processor=tokenizer, seeds=[0, 1], learning_rate=0.02, **{**FAST, "epochs": 8})


def values(study: Study, measure: str, **where) -> list[float]:
    rows = study.table[study.table["measure"] == measure]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows["score"].tolist()


def test_the_table_has_every_probe_with_its_control_and_code(study):
    assert study.name == "probe"
    probes = study.table[study.table["layer"].notna() & study.table["seed"].notna()]
    assert set(probes["layer"]) == {0, 1, 2}
    assert set(probes["probe"]) == {"linear", "mlp"}
    measures = {"score", "control", "selectivity", "code_length", "compression"}
    counts = probes.groupby("measure").size().to_dict()
    assert counts == dict.fromkeys(measures, 3 * 2 * 2)
    assert set(probes["rows"]) == {24}
    assert set(probes["site"]) == {"output"}
    assert "guesses" not in study.table


def test_probes_learn_the_words_and_controls_do_not(study):
    assert np.mean(values(study, "score", layer=2)) > 0.75
    assert np.mean(values(study, "control")) == pytest.approx(0.5, abs=0.2)
    score, control = values(study, "score", layer=1), values(study, "control", layer=1)
    assert values(study, "selectivity", layer=1) == pytest.approx(np.subtract(score, control).tolist())


@pytest.mark.long
def test_labels_that_are_easy_to_read_have_a_shorter_code(model, tokenizer, study, mood):
    bits, ratio = values(study, "code_length"), values(study, "compression")
    assert ratio == pytest.approx([32 / own for own in bits])
    noise = control_task(mood, ("train", "validation"), seed=0)
    options = {"processor": tokenizer, "seeds": [0], "controls": False, "learning_rate": 0.02, "baselines": False}
    other = probe(model, noise, **options, **{**FAST, "epochs": 8})
    assert np.mean(values(other, "compression")) < np.mean(ratio) - 0.1


def test_the_table_has_the_baselines(study):
    baselines = study.table[study.table["layer"].isna()]
    assert baselines["probe"].tolist() == ["majority", "length", "bag_of_words", "tfidf"]
    assert baselines["seed"].isna().all()
    assert values(study, "score", probe="majority") == [0.5]
    assert values(study, "score", probe="bag_of_words") == [1.0]


def test_the_conclusions(study):
    assert "the best score of 6 probes: accuracy 0." in study.conclusions[0]
    assert "n = 24 rows" in study.conclusions[0]
    assert "with 2 seeds no probe can be said to beat the best baseline" in study.conclusions[1]
    ahead = study.table[study.table["measure"] == "ahead"]
    assert len(ahead) == 6
    assert ahead["score"].notna().all()
    assert ahead[["low", "high", "p"]].isna().all(axis=None)  # two seeds are too few for an interval
    assert set(study.figures) == {"score", "selectivity", "compression"}
    assert len(study.rows("score")) == 12 + 4


def test_the_summary_has_a_row_per_layer_and_a_column_per_probe(study):
    summary = study.summary()
    assert list(summary.columns) == ["task", "metric", "layer", "linear", "mlp"]
    assert summary["layer"].tolist() == [0, 1, 2]
    assert summary["mlp"].tolist() == pytest.approx(
        [np.mean(values(study, "score", layer=layer, probe="mlp")) for layer in range(3)]
    )


def test_the_readers_of_a_cell_are_named_by_what_they_read_and_learn():
    place = Place(3, "ffn", "mlp")
    specs = [ProbeSpec(Place(0, "output", "linear")), ProbeSpec(place, "control"), ProbeSpec(place, "code", 2)]
    assert [spec.name for spec in specs] == ["layer0-linear", "ffn3-mlp-control", "ffn3-mlp-code2"]


def test_a_saved_study_loads_as_it_was(study, tmp_path):
    study.save(tmp_path)
    assert Study.load(tmp_path).table.equals(study.table)


def test_probes_of_noise_are_no_better_than_the_text(model, tokenizer, mood):
    task = control_task(mood, ("train", "validation"), seed=0)
    study = probe(model, task, processor=tokenizer, seeds=[0, 1, 2], probes=["linear"], code_length=False, **FAST)
    assert "no probe is shown to beat the best baseline" in study.conclusions[1]


def test_a_metric_that_rows_cannot_be_summed_for_is_refused_before_training(model, tokenizer, monkeypatch):
    monkeypatch.setattr("lamina.studies.probing.probe.run_cells", lambda *_, **__: pytest.fail("a probe was trained"))
    parts = {"train": texts(6), "validation": texts(6)}
    task = Task.from_dataset("sequence_classification", parts, metric="auroc", positive="good")
    with pytest.raises(UnknownNameError, match="metric 'auroc'"):
        probe(model, task, processor=tokenizer)


def test_a_control_task_has_the_shares_of_the_labels():
    rows = [{"sentence": f"film {row}", "label": int(row % 10 == 0)} for row in range(400)]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    drawn = control_task(task, ["validation"], seed=0).split("validation").labels
    assert np.mean(list(drawn)) == pytest.approx(0.1, abs=0.05)


def test_probes_that_beat_the_text_alone():
    """Four of five rows right with either seed, and a baseline that has half of them right."""
    truths = RNG.integers(0, 2, 200)
    parts = {"train": texts(8), "validation": [{"sentence": "a", "label": ("bad", "good")[own]} for own in truths]}
    task = Task.from_dataset("sequence_classification", parts)
    rows = [{"task": "t", "seed": None, "layer": None, "probe": "tfidf", "measure": "score", "guesses": [0] * 200}]
    for layer, share in ((0, 0.5), (1, 0.8), (2, 0.9)):
        for seed in (0, 1, 2):
            guesses = np.where(RNG.random(200) < share, truths, 1 - truths).tolist()
            facts = {"task": "t", "seed": seed, "layer": layer, "probe": "linear", "measure": "score"}
            rows.append({**facts, "guesses": guesses})
    for row in rows:
        row["score"] = float(np.mean(np.array(row["guesses"]) == truths))
    found = compare_probes(rows, task, "validation")  # pyright: ignore
    said = conclusions("t", found)
    assert said[0].startswith("t: layer 2 (linear) has the best score of 3 probes: accuracy 0.")
    assert said[0].endswith(", n = 200 rows.")
    assert said[1].startswith("t: linear probes of layers 1-2 beat the best baseline that reads the text alone, tfidf")
    assert said[2].startswith("t: layer 2 (linear) is ahead of tfidf by 0.")
    assert said[3].startswith("t: layer 2 (linear) is ahead of layer 0 (linear) by 0.")
    assert all("200 rows, 3 seeds, Holm p" in sentence for sentence in said[2:])
    ahead = list(found.rows())
    assert [row["layer"] for row in ahead] == [0, 1, 2]
    assert ahead[2]["low"] > 0.2  # pyright: ignore


def test_where_only_the_most_frequent_class_was_scored_the_sentences_name_it():
    truths = [0] * 30 + [1] * 30
    parts = {"train": texts(8), "validation": [{"sentence": "a", "label": ("bad", "good")[own]} for own in truths]}
    task = Task.from_dataset("sequence_classification", parts)
    facts = {"task": "t", "layer": None, "probe": "majority", "measure": "score", "score": 0.5, "guesses": [0] * 60}
    rows = [{**facts, "seed": None}]
    for layer, right in ((0, 30), (1, 60)):
        guesses = [0] * right + [1] * (60 - right) if right < 60 else truths
        own = {"layer": layer, "probe": "linear", "score": right / 60, "guesses": guesses}
        rows += [{**facts, **own, "seed": seed} for seed in (0, 1, 2)]
    for row in rows[1:4]:
        row["guesses"] = [0] * 60
    said = conclusions("t", compare_probes(rows, task, "validation"))  # pyright: ignore
    assert said[1].startswith(
        "t: linear probes of layer 1 beat the most frequent class (accuracy 0.500), by 0.500; the"
    )
    assert said[1].endswith("the others are not shown to be better than it.")
    assert said[2].startswith("t: layer 1 (linear) is ahead of the most frequent class by 0.500")
    none = conclusions("t", compare_probes(rows[:4], task, "validation"))  # pyright: ignore
    assert none[1] == "t: no probe is shown to beat the most frequent class (accuracy 0.500)."


def test_the_sentence_fits_how_many_probes_beat_the_text():
    def said(*ahead: float) -> str:
        places = [Place(layer, "output", "linear") for layer in range(len(ahead))]
        own = [Difference("probe", "tfidf", by, by - 0.05, by + 0.05, 0.01, 200, 90, 3) for by in ahead]
        scores = {place: [0.7] * 3 for place in places}
        found = ProbeComparison("accuracy", 200, scores, ("tfidf", 0.5), dict(zip(places, own, strict=True)), None)
        return conclusions("t", found)[1].replace("the best baseline that reads the text alone, ", "")

    beaten = "tfidf (accuracy 0.500), by"
    others = "the others are not shown to be better than the text alone"
    assert said(0.01, 0.3) == f"t: linear probes of layer 1 beat {beaten} 0.300; {others}."
    assert said(0.01, 0.0) == f"t: no probe is shown to beat {beaten.removesuffix(', by')}."
    assert said(0.2, 0.3) == f"t: linear probes of layers 0-1 beat {beaten} 0.200 to 0.300."


def test_one_seed_claims_no_interval(model, tokenizer, mood):
    study = probe(model, mood, processor=tokenizer, seeds=[3], code_length=False, controls=False, **FAST)
    assert "(one seed)" in study.conclusions[0]
    assert all("95 %" not in sentence for sentence in study.conclusions)
    assert "with one seed no probe can be said to beat" in study.conclusions[1]
    ahead = study.table[study.table["measure"] == "ahead"]
    assert ahead["low"].isna().all()  # pyright: ignore
    assert set(study.table["measure"]) == {"score", "ahead"}


def test_cutting_the_model_gives_the_same_numbers(model, tokenizer, mood, tags):
    """Truncate, freeze and train the same head on the last layer (partial re-initialisation, Algorithm 2)."""
    for task, layer in ((mood, 1), (tags, 2)):
        options = {"processor": tokenizer, "seeds": [0], "controls": False, "baselines": False, **FAST}
        options |= {"code_length": True, "probes": ["linear"]} if task is mood else {"code_length": False}
        whole = probe(model, task, **options)
        cut = deepcopy(model)
        lamina.truncate_(cut, layer)
        own = probe(cut, task, layers=-1, **options)
        expected = whole.table[whole.table["layer"] == layer]["score"].tolist()
        assert own.table["score"].tolist() == pytest.approx(expected, rel=1e-4), (task.name, layer)


def test_a_probe_does_not_depend_on_its_neighbours(model, tokenizer, mood):
    options = {"processor": tokenizer, "seeds": [0], "baselines": False, **FAST}
    beside = probe(model, mood, **options).table
    alone = probe(model, mood, layers=1, probes=["mlp"], **options).table
    both = beside[(beside["layer"] == 1) & (beside["probe"] == "mlp")]
    assert alone["measure"].tolist() == both["measure"].tolist()
    assert alone["score"].tolist() == pytest.approx(both["score"].tolist(), rel=1e-4)


def test_the_model_is_not_changed(tokenizer, mood):
    model = tiny_model(hidden_size=16, num_hidden_layers=2).train()
    next(model.parameters()).requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    probe(model, mood, processor=tokenizer, seeds=[0], controls=False, code_length=False, **FAST)
    assert model.training
    assert not is_read_by_bank(model)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_tags(model, tokenizer, tags):
    options = {"seeds": [0], "probes": ["linear"], "learning_rate": 0.1, **FAST, "epochs": 4}
    study = probe(model, tags, processor=tokenizer, **options)
    assert {"score", "accuracy", "control", "selectivity", "compression"} <= set(study.table["measure"])
    assert set(study.table.query("measure == 'score'")["metric"]) == {"span_f1"}
    assert set(study.table.query("measure == 'selectivity'")["metric"]) == {"accuracy"}
    assert values(study, "score", probe="bag_of_words")[0] > 0.5
    assert values(study, "score", probe="majority") == [0.0]
    assert max(values(study, "accuracy")) > values(study, "accuracy", probe="majority")[0] + 0.05
    assert not any("no row to learn from" in sentence for sentence in study.conclusions)  # of I-X, which nothing has


def test_pairs_and_numbers(model, tokenizer):
    rows = [{"a": sentence(n % 2), "b": sentence(n // 2 % 2), "y": float(n % 2) + 0.5} for n in range(32)]
    parts = {"train": rows, "validation": rows}
    task = Task.from_dataset("sequence_classification", parts, text="a", text_pair="b", label="y")
    study = probe(model, task, processor=tokenizer, seeds=[0], layers=[1], **FAST)
    assert set(study.table["metric"]) == {"pearson"}
    assert set(study.table["measure"]) == {"score", "control", "selectivity", "ahead"}  # numbers have no code
    assert set(study.table["layer"].dropna()) == {0, 1}
    assert values(study, "score", probe="majority") == [0.0]
    assert values(study, "score", probe="tfidf")[0] > 0.5


def test_several_labels_of_a_text(model, tokenizer):
    rows = [{"sentence": sentence(n % 2), "label": (["x"] if n % 2 else []) + ["y"]} for n in range(24)]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, problem_type="multi_label")
    study = probe(model, task, processor=tokenizer, seeds=[0], probes=["linear"], layers=[2], **FAST)
    assert values(study, "score", probe="bag_of_words") == [1.0]
    assert "code_length" not in set(study.table["measure"])


@pytest.mark.long
def test_images(tmp_path):
    folder = picture_folder(tmp_path / "pets", rows=6)
    task = Task.from_files("image_classification", train=folder, validation=folder)
    options = {"seeds": [0], "controls": False, "probes": ["linear"], "learning_rate": 0.01, **FAST, "epochs": 8}
    study = probe(vit(8), task, processor=image_processor(8), **options)
    baselines = study.table[study.table["layer"].isna()]
    assert baselines["probe"].tolist() == ["majority"]
    assert max(values(study, "score", probe="linear")) > 0.6
    assert "compression" in set(study.table["measure"])


def test_a_study_of_other_data_is_not_resumed(model, tokenizer, mood, tmp_path):
    options = {"controls": False, "code_length": False, "probes": ["linear"], "seeds": [0], "output": tmp_path, **FAST}
    probe(model, {"mood": mood}, processor=tokenizer, **options)

    def changed(part: str, texts: list[str] | None = None, labels: list[int] | None = None) -> Task:
        split = mood.split(part)
        return replace(mood, splits={**mood.splits, part: Split.of(texts or split.texts, labels or split.labels)})

    labels = [1 - label for label in mood.split("validation").labels]
    texts = [f"{text} again" for text in mood.split("train").texts]
    other = deepcopy(tokenizer)
    other.add_tokens(["an added word"])
    cases = [
        (changed("validation", labels=labels), tokenizer, "other labels in the validation part of 'mood'"),
        (changed("train", texts=texts), tokenizer, "other texts in the train part of 'mood'"),
        (mood.subsample(rows=8, seed=0), tokenizer, "other texts in the train part of 'mood'"),
        (replace(mood, labels=("x", "y")), tokenizer, "labels .*, here "),
        (replace(mood, positive="good"), tokenizer, "positive None, here good"),
        (mood, other, "other tokenizer or processor"),
    ]
    for task, processor, told in cases:
        with pytest.raises(ConfigError, match=told):
            probe(model, {"mood": task}, processor=processor, resume=True, **options)
    probe(model, {"mood": mood}, processor=tokenizer, resume=True, **options)


def test_an_interrupted_study_resumes(model, tokenizer, mood, tmp_path, monkeypatch):
    options = {"processor": tokenizer, "controls": False, "code_length": False, "probes": ["linear"], **FAST}
    first = probe(model, {"mood": mood}, seeds=[0], output=tmp_path, **options)
    ran: list[int] = []

    def counted(*given):
        ran.append(given[-1])
        return probe_rows(*given)

    monkeypatch.setattr(import_module("lamina.studies.probing.probe"), "probe_rows", counted)
    both = probe(model, {"mood": mood}, seeds=[0, 1], output=tmp_path, resume=True, **options)
    assert ran == [1]
    assert values(both, "score", seed=0) == values(first, "score", seed=0)
    assert Study.load(tmp_path).table.equals(both.table)


def test_a_cell_that_fails_is_recorded(model, tokenizer, mood, monkeypatch):
    def failing(*given):
        if given[-1] == 1:
            raise RuntimeError("no room")
        return probe_rows(*given)

    monkeypatch.setattr(import_module("lamina.studies.probing.probe"), "probe_rows", failing)
    options = {"controls": False, "code_length": False, "baselines": False, **FAST}
    study = probe(model, {"mood": mood}, processor=tokenizer, seeds=[0, 1], **options)
    assert set(study.table["seed"].dropna()) == {0}
    assert study.settings["failures"] == [{"key": {"task": "mood", "seed": 1}, "error": "RuntimeError: no room"}]
    for baselines in (False, True):  # a study of baselines alone is none of probes
        with pytest.raises(
            ConfigError, match="no probe could be trained; the first failed with: RuntimeError: no room"
        ):
            probe(model, {"mood": mood}, processor=tokenizer, seeds=[1], **{**options, "baselines": baselines})


LABELS = {
    "classes": lambda row: ("bad", "good")[row % 2],
    "several labels": lambda row: [("bad", "good")[row % 2], "any"][: 1 + row % 3],
    "numbers": lambda row: row % 5 + 0.25,
}


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_rows_without_a_label_are_left_out(model, tokenizer, label):
    rows = [{"sentence": sentence(row % 2), "label": None if row % 4 == 0 else label(row)} for row in range(12)]
    masked, dropped = (
        Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, missing_labels=how)
        for how in ("mask", "drop")
    )
    options = {"processor": tokenizer, "layers": [1], "seeds": [0], "probes": ["linear"], **FAST, "epochs": 1}
    study, other = (probe(model, task, **options) for task in (masked, dropped))
    assert study.settings["failures"] == []
    assert set(study.table["rows"]) == {9}
    assert study.table.equals(other.table)


@pytest.mark.parametrize(("gap", "label"), [(-100, 0), ((-1, -1), (0, 1))])
def test_one_class_beside_rows_without_a_label_is_not_enough(model, tokenizer, mood, gap, label):
    several = isinstance(gap, tuple)
    labels = [gap, *[label] * (len(mood.split("train")) - 1)]
    task = replace(
        mood,
        splits={**mood.splits, "train": mood.split("train").with_labels(labels)},
        problem_type="multi_label" if several else "classification",
    )
    if several:
        assert check_task("mood", labelled_task("probe", task, "train"), "validation") == ["bad"]
        return
    with pytest.raises(DataError, match=r"of one class only \('bad'\)"):
        probe(model, task, processor=tokenizer)


def test_a_split_without_any_label_is_refused(model, tokenizer, mood):
    empty = mood.split("train").with_labels([-100] * 32)
    with pytest.raises(DataError, match=r"probe: no row of task 'mood' \(train\) has a label; at least one needs one"):
        probe(model, replace(mood, splits={**mood.splits, "train": empty}), processor=tokenizer)


@pytest.mark.long
def test_a_cell_can_be_pickled_and_loads_its_model_itself(model, tokenizer, mood, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"seeds": [0], "layers": [1], "controls": False, "baselines": False, **FAST}
    here = probe(model, mood, processor=tokenizer, **options)
    found = probe(tmp_path, mood, **options)
    assert found.table["score"].tolist() == here.table["score"].tolist()
    rates = dict.fromkeys(("linear", "mlp"), 1e-3)
    training = {"epochs": 1, "progress": False}
    how = ProbeSettings((1,), "main", ("linear",), "validation", 8, rates, True, True, training)  # pyright: ignore
    cell = partial(probe_rows, str(tmp_path), tokenizer, mood, how, 0)
    sent = pickle.loads(pickle.dumps(cell))()
    assert sent == probe_rows(model, tokenizer, mood, how, 0)
    assert {row["measure"] for row in sent} == {"score", "control", "selectivity", "code_length", "compression"}


# What cannot be probed


def test_one_class_is_not_enough(model, tokenizer):
    rows = [{"sentence": "good", "label": "yes"}] * 4
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, labels=["no", "yes"])
    with pytest.raises(DataError, match=r"rows of task 'task' \(train\) are of one class only \('yes'\); 2 are needed"):
        probe(model, task, processor=tokenizer)


def test_a_class_that_no_row_has(model, tokenizer, caplog):
    parts = {"train": texts(12), "validation": texts(6)}
    task = Task.from_dataset("sequence_classification", parts, labels=["bad", "good", "odd"])
    options = {"controls": False, "code_length": False, "baselines": False, "probes": ["linear"]}
    with caplog.at_level(logging.WARNING):
        study = probe(model, task, processor=tokenizer, seeds=[0], **options, **FAST)
    assert "no row of task 'task' (train) is of class 'odd'" in caplog.text
    assert "no row to learn from is of class odd, which no probe can find" in study.conclusions[-1]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"layers": [7]}, LayerIndexError, "probe: layer 7 does not exist"),
        ({"probes": ["linaer"]}, UnknownNameError, "unknown probe 'linaer'"),
        ({"probes": []}, ConfigError, "probes is empty; give at least one"),
        ({"seeds": [1, 1]}, ConfigError, "none twice"),
        ({"split": "test"}, UnknownNameError, "unknown split 'test'"),
        ({"stack": "decoder"}, UnknownNameError, "unknown stack 'decoder'"),
        ({"hidden": 0}, ConfigError, "hidden is 0"),
        ({"max_length": 0}, ConfigError, "^probe: max_length is 0; it must be at least 1"),
        ({"batch_size": 0}, ConfigError, "^probe: batch_size is 0; it must be at least 1"),
        ({"learning_rate": -1.0}, ConfigError, "^probe: learning_rate is -1.0; it must be above 0"),
        ({"tasks": {}}, ConfigError, "probe: tasks is empty; give at least one"),
    ],
)
def test_names_that_do_not_exist_are_refused(model, tokenizer, mood, options, error, match):
    with pytest.raises(error, match=match):
        probe(model, **{"tasks": mood, "processor": tokenizer, **options})


def test_a_task_without_labels(model, tokenizer, mood):
    with pytest.raises(ConfigError, match="is of kind masked_lm, which has no labels to probe for"):
        probe(model, mood.masked_lm(), processor=tokenizer)


# Controls, codes, baselines


def test_a_control_has_one_label_per_word_type(tags):
    control = control_task(tags, ("train", "validation"), seed=1)
    seen: dict[str, set[int]] = {}
    for part in ("train", "validation"):
        split = control.split(part)
        for text, words, labels in zip(split.texts, split.words, split.labels, strict=True):  # pyright: ignore
            for (start, end), label in zip(words, labels, strict=True):
                seen.setdefault(text[start:end], set()).add(label)
    assert len(seen) > 8
    assert all(len(labels) == 1 for labels in seen.values())
    assert set.union(*seen.values()) <= {tag for row in tags.split("train").labels for tag in row}
    other = control_task(tags, ("train",), seed=2)
    assert list(other.split("train").labels) != list(control.split("train").labels)


def test_words_without_a_label_do_not_count(tags):
    gaps = {part: split.with_labels([(-100, *row[1:]) for row in split.labels]) for part, split in tags.splits.items()}
    task = replace(tags, splits=gaps)
    labels = list(control_task(task, ("train",), seed=0).split("train").labels)
    assert [[tag == -100 for tag in row] for row in labels] == [[True, *[False] * 5]] * 20
    tags_of = {tag for _, texts in baseline_predictions(task, "validation") for row in texts for tag in row}
    assert -100 not in tags_of
    rows = [row["score"] for row in baseline_rows(task, "validation") if row["measure"] == "accuracy"]
    true = [tag for row in gaps["validation"].labels for tag in row[1:]]
    assert rows[0] == pytest.approx(true.count(task.labels.index("O")) / len(true))


def test_a_control_has_one_label_per_distinct_text(mood):
    rows = [{"sentence": f"text {row % 30}", "label": ("a", "b")[row % 2]} for row in range(120)]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    labels = list(control_task(task, ("train",), seed=0).split("train").labels)
    assert labels[:30] == labels[30:60] == labels[90:]
    assert set(labels) == {0, 1}


def test_the_blocks_of_a_code_share_all_rows(mood):
    blocks = code_portions(1000, seed=0)
    assert [len(block) for block in blocks] == [1, 1, 2, 4, 8, 16, 31, 62, 125, 250, 500]
    assert sorted(row for block in blocks for row in block) == list(range(1000))
    assert all(code_portions(5, seed=0))
    labels = list(only_rows(mood, [1, 3]).labels)
    assert [row for row, label in enumerate(labels) if label != -100] == [1, 3]


def sent(labels: list[list[int]], classes: int, logit: float = 0.0) -> LabelBits:
    """The bits of labels of tokens (-100 for none) if each true class has a logit, and all others 0."""
    bits, targets = LabelBits(WordTargets(labels)), WordTargets(labels).tensor(range(len(labels)))
    outputs = torch.nn.functional.one_hot(targets.clamp(min=0), classes) * logit
    bits.add(range(len(labels)), outputs)
    return bits


def test_the_length_of_a_code():
    portions = [sent([[0, -100, 1], [2]], 4), sent([[-100], [3, 3, 3, 3]], 4)]
    assert [portion.count for portion in portions] == [3, 4]
    assert code_length(2, portions, 4) == pytest.approx((2 * 9, 1.0))  # two bits per label
    total, compression = code_length(2, [sent([[0] * 30], 4, logit=100.0)], 4)
    assert (total, compression) == pytest.approx((4, 16))
    assert math.isnan(code_length(0, [sent([[-100]], 4)], 4)[1])


@pytest.mark.parametrize("word", ["C++", "film", "x-1/(y)!"])
def test_a_probe_that_guesses_does_not_compress_words_of_several_parts(model, tokenizer, monkeypatch, word: str):
    add = LabelBits.add
    monkeypatch.setattr(LabelBits, "add", lambda own, rows, outputs, _=None: add(own, rows, torch.zeros_like(outputs)))
    rows = [{"w": [word, "is", word], "t": ["B-X", "O", "B-X"]}] * 12
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="w", label="t")
    options = {"seeds": [0], "layers": [1], "probes": ["linear"], "controls": False, "baselines": False, **FAST}
    study = probe(model, task, processor=tokenizer, **options)
    assert values(study, "compression") == pytest.approx([1.0])
    parts = 2 * len(divided(word, [(0, len(word))])[0]) + 1
    assert values(study, "code_length") == pytest.approx([12 * parts * math.log2(len(task.labels))])


def test_baselines_of_texts_without_words(tokenizer):
    rows = [{"sentence": "", "label": row % 2} for row in range(6)]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})
    assert {name: len(predictions) for name, predictions in baseline_predictions(task, "validation")} == dict.fromkeys(
        ("majority", "length", "bag_of_words", "tfidf"), 6
    )


def test_settings_are_plain_data():
    settings = ProbeSettings((0,), "main", ("linear",), "validation", 8, {"linear": 1.0}, True, True, {"epochs": 1})
    assert pickle.loads(pickle.dumps(settings)) == settings
