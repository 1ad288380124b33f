"""Re-initialised and inserted blocks, fine-tuned cell by cell."""

from __future__ import annotations

import copy
import re
import sys

import pytest
import torch
from tests.support.masked import masked_model, masking_tokenizer
from tests.support.sounds import TONES, tone
from tests.support.stored import save_base, tiny_model, tiny_tokenizer
from transformers import BertForSequenceClassification

import lamina
from lamina import Task
from lamina.errors import ConfigError, UnknownNameError
from lamina.report.study_section import drawing_of
from lamina.studies import advise, insertion, reinit, removal
from lamina.studies.cutting.finetuned import comparison_sentence, finetuned_rows
from lamina.studies.runner import CellInputs

ROWS = [
    {"sentence": f"the {noun} is {word}", "label": int(word in ("good", "fun"))}
    for noun in ("film", "paris", "anna", "zebra")
    for word in ("good", "bad", "fun", "slow")
]
QUICK = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3}


def task() -> Task:
    return Task.from_dataset("sequence_classification", {"train": ROWS, "validation": ROWS})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    save_base(folder := tmp_path_factory.mktemp("base"))
    return str(folder)


@pytest.mark.long
def test_every_count_fraction_and_seed_is_a_cell(base):
    study = reinit(base, {"mood": task()}, counts={0, 3}, fractions=[1, 0.5, 1.0], seeds=[0, 1], **QUICK)
    rows = study.rows("accuracy")
    assert len(rows) == 2 * 2 * 2
    assert rows[["fraction", "reinitialised", "seed"]].drop_duplicates().shape[0] == 8
    assert set(study.table["measure"]) == set(task().metrics)
    assert rows["score"].between(0, 1).all()
    assert len(study.conclusions) == 2
    assert study.conclusions[0].startswith("mood, 100% of the rows: accuracy with the top 3 blocks re-initialised")


def test_a_cell_equals_editing_and_fine_tuning_by_hand():
    model = tiny_model(3, BertForSequenceClassification)
    before = copy.deepcopy(model.state_dict())
    edits = [("truncate", {"keep": 2})]
    inputs = CellInputs(model, tiny_tokenizer(), None, {**QUICK, "max_length": 8})
    rows = finetuned_rows(inputs, task(), edits, 5, score_start=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    mine = copy.deepcopy(model)
    lamina.truncate_(mine, 2)
    start = lamina.evaluate(mine, {"a": task()}, processor=tiny_tokenizer(), max_length=8)["a"]
    end = lamina.finetune(
        mine, task(), processor=tiny_tokenizer(), max_length=8, seed=5, keep="last", progress=False, **QUICK
    ).best
    scores = {(row["stage"], row["measure"]): row["score"] for row in rows}
    assert scores["start", "accuracy"] == start["accuracy"]
    assert scores["trained", "accuracy"] == next(iter(end.values()))["accuracy"]


@pytest.mark.long
def test_the_identity_start_changes_nothing_and_the_other_does():
    hidden = task().masked_lm(rows=True)
    model, tokenizer = masked_model(), masking_tokenizer()
    study = insertion(model, {"words": hidden}, processor=tokenizer, counts=[0, 2], position="ffn", seeds=[0], **QUICK)
    table = study.table[study.table["measure"] == "perplexity"]
    start = table[table["stage"] == "start"].set_index(["end", "start"])["score"]
    assert len(start) == 5  # none, and two ends with two starts
    for end in ("top", "bottom"):
        assert start[end, "identity"] == pytest.approx(start["none", "none"], rel=1e-4)
        assert start[end, "xavier"] != pytest.approx(start["none", "none"], rel=1e-2)
    assert set(table["stage"]) == {"start", "trained"}
    assert {"perplexity", "accuracy"} <= set(study.table["measure"])
    assert len(study.conclusions) == 4
    assert "one seed; no interval is claimed" in study.conclusions[0]


@pytest.mark.parametrize(
    ("masked", "ends", "verb"),
    [(True, ["top"], "rises"), (False, ["bottom"], "falls"), (False, ["top", "bottom"], "falls")],
)
def test_the_charts_of_insertion_show_the_model_without_layers(masked: bool, ends: list[str], verb: str, monkeypatch):
    scores = {"none": 5.0, "identity": 5.0, "xavier": 4.0}
    monkeypatch.setattr(
        sys.modules["lamina.studies.cutting.finetuned"],
        "finetuned_rows",
        lambda _, task, edits, *__, **___: [
            {"stage": "trained", "measure": task.metric, "score": scores[_start_of(edits)]}
        ],
    )
    model, tokenizer = (masked_model(), masking_tokenizer()) if masked else (masked_model(), tiny_tokenizer())
    subject = task().masked_lm(rows=True) if masked else task()
    study = insertion(model, {"t": subject}, processor=tokenizer, counts=[0, 1, 2], ends=ends, seeds=[0], **QUICK)
    assert list(study.figures) == [f"{subject.metric} {end}" for end in ends]
    for name, figure in study.figures.items():
        points = [(mark["colour"], mark["x"]) for mark in drawing_of(study, name).rows]
        assert points == [("none", 0), *((start, count) for count in (1, 2) for start in ("identity", "xavier"))]
        assert f"A line that {verb} shows" in figure.note


def _start_of(edits) -> str:
    if not edits:
        return "none"
    return "xavier" if edits[0][1]["init"] == "xavier" else "identity"


@pytest.mark.parametrize(("run", "options"), [(reinit, {"fractions": [1]}), (insertion, {"starts": ["identity"]})])
def test_cells_of_another_head_do_not_resume(tmp_path, run, options):
    model, other = tiny_model(3, BertForSequenceClassification), tiny_model(3, BertForSequenceClassification)
    with torch.no_grad():
        other.classifier.weight.mul_(-1)
    options = {"processor": tiny_tokenizer(), "counts": [0], "seeds": [0], "output": tmp_path, **options, **QUICK}
    first = run(model, {"mood": task()}, **options)
    assert run(copy.deepcopy(model), {"mood": task()}, resume=True, **options).table.equals(first.table)
    with pytest.raises(ConfigError, match="belongs to a study with other weights outside the layers"):
        run(other, {"mood": task()}, resume=True, **options)


def test_weights_that_the_files_lack_are_the_same_when_a_study_resumes(tmp_path):
    """A pooler that is missing starts at random; it must not differ from itself."""
    model = tiny_model()
    lacking = {name: value for name, value in model.state_dict().items() if not name.startswith("pooler")}
    model.save_pretrained(tmp_path, state_dict=lacking)
    tiny_tokenizer().save_pretrained(tmp_path)
    inputs, checked = CellInputs(str(tmp_path), None, None, {**QUICK, "max_length": 8}), list[object]()
    for seed in range(2):
        torch.manual_seed(seed)
        _, settings, head = inputs.check("reinit", {"mood": task()}, [0])
        checked.append((settings, head))
        assert torch.initial_seed() == seed
    assert checked[0] == checked[1]


@pytest.mark.parametrize(
    ("run", "options", "kind", "told"),
    [
        (reinit, {"counts": [4]}, ConfigError, "reinit: counts is 4; it must be at least 0 and at most 3"),
        (reinit, {"counts": "some"}, UnknownNameError, "reinit: unknown text of counts 'some'; known: all"),
        (reinit, {"fractions": [1, 0]}, ConfigError, "reinit: fractions has 0; each must be above 0 and at most 1"),
        (reinit, {"seeds": []}, ConfigError, "reinit: seeds is empty; give at least one"),
        (insertion, {"counts": [4]}, ConfigError, "insertion: counts is 4; it must be at least 0 and at most 3"),
        (insertion, {"seeds": []}, ConfigError, "insertion: seeds is empty; give at least one"),
        (insertion, {"ends": ["middle"]}, UnknownNameError, "insertion: unknown end 'middle'; known: top, bottom"),
        (insertion, {"starts": ["zero"]}, UnknownNameError, "insertion: unknown start 'zero'"),
        (insertion, {"position": "top"}, UnknownNameError, "insertion: unknown position 'top'"),
        (insertion, {"ends": []}, ConfigError, "insertion: ends is empty; give at least one"),
        (insertion, {"tasks": {}}, ConfigError, "insertion: tasks is empty; give at least one"),
        (reinit, {"scope": "all"}, UnknownNameError, "reinit: unknown scope 'all'"),
        (reinit, {"fractions": ()}, ConfigError, "reinit: fractions is empty; give at least one"),
    ],
)
def test_options_out_of_range_are_refused(run, options, kind, told):
    with pytest.raises(kind, match=told):
        run(
            tiny_model(3, BertForSequenceClassification),
            **{"tasks": {"mood": task()}, "processor": tiny_tokenizer(), **options},
        )


@pytest.mark.parametrize("run", [advise, insertion, reinit, removal])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": "x"}, "epochs is 'x'; it must be a whole number"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ({"learning_rate": -1e-3}, "learning_rate is -0.001; it must be above 0"),
        ({"max_length": 0}, "max_length is 0; it must be at least 1"),
        ({"max_length": 9999}, "max_length is 9999; model and tokenizer take 1 to"),
        ({"seeds": [0, -1]}, "seed is -1; it must be at least 0"),
    ],
)
def test_training_options_are_checked_before_any_cell_runs(run, options, told, monkeypatch):
    for module in ("advise", "finetuned", "removal"):
        monkeypatch.setattr(sys.modules[f"lamina.studies.cutting.{module}"], "run_cells", None)
    with pytest.raises(ConfigError, match=f"^{run.__name__}: {re.escape(told)}"):
        run(tiny_model(3, BertForSequenceClassification), {"mood": task()}, processor=tiny_tokenizer(), **options)


def test_a_task_that_cannot_be_read_fails_its_cells_only():
    model, sounds = (
        tiny_model(3, BertForSequenceClassification),
        [{"audio": tone(word), "label": word} for word in TONES],
    )
    audio = Task.from_dataset("audio_classification", {"train": sounds, "validation": sounds})
    how = {"counts": [0], "seeds": [0], "processor": tiny_tokenizer(), **QUICK}
    study = insertion(model, {"mood": task(), "tone": audio}, **how)
    assert set(study.table["task"]) == {"mood"}
    assert [failure["key"]["task"] for failure in study.settings["failures"]] == ["tone"]
    with pytest.raises(ConfigError, match="audio needs the model's feature extractor") as caught:
        insertion(model, {"tone": audio, "other": audio}, **how)
    assert caught.value.__notes__ == ["task 'tone'"]


def test_a_fraction_without_rows_fails_its_cells_only(base):
    study = reinit(base, {"mood": task()}, counts=[0], fractions=[1.0, 0.001], seeds=[0], **QUICK)
    (failure,) = study.settings["failures"]
    assert failure["key"]["fraction"] == 0.001
    assert set(study.table["fraction"]) == {1.0}
    assert "nothing to compare it with: no score without the edit" in study.conclusions[1]


def test_the_sentence_about_paired_seeds():
    assert comparison_sentence("a", {0: 0.5}, {0: 0.4}) == "a: 0.500, +0.100 (one seed; no interval is claimed)."
    pair = comparison_sentence("a", {0: 0.5, 1: 0.6}, {0: 0.4, 1: 0.5})
    assert pair == "a: 0.550, +0.100 (2 seeds; no interval is claimed)."
    same = comparison_sentence("a", {0: 0.5, 1: 0.4, 2: 0.5}, {0: 0.4, 1: 0.5, 2: 0.5})
    assert same.endswith("3 seeds): no difference can be concluded.")
    ahead = comparison_sentence("a", {0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.4, 1: 0.5, 2: 0.61})
    assert ahead.startswith("a: 0.600, +0.097 (95 % +0.082 to +0.111, 3 seeds)")
    assert ahead.endswith("a difference.")
