"""The study `advise`: proposals from scores by layer, the cut model, and the conclusions."""

from __future__ import annotations

import json
import sys

import pandas as pd
import pytest
import torch
from tests.support.masked import masked_model, masking_tokenizer
from tests.support.stored import save_base, tiny_model, tiny_tokenizer
from tests.support.training import PEOPLE, PLACES, PLAIN

import lamina
from lamina import Task
from lamina.errors import ConfigError
from lamina.studies import advise
from lamina.studies.cutting.advise import Proposal, proposals, sentence

QUICK = {"epochs": 2, "batch_size": 8, "learning_rate": 1e-2}
WORDS = [*PEOPLE, *PLACES]
ROWS = [{"sentence": f"{word} {other}", "label": int(word in PEOPLE)} for word in WORDS for other in list(PLAIN)[:3]]
TEXTS = [row["sentence"] for row in ROWS]


def task(rows=ROWS) -> Task:
    return Task.from_dataset("sequence_classification", {"train": rows, "validation": rows})


def scores(values: dict[int, list[float]], metric: str = "accuracy") -> pd.DataFrame:
    return pd.DataFrame(
        {"task": "a", "layer": layer, "seed": seed, "stack": "main", "measure": metric, "score": score}
        for layer, own in values.items()
        for seed, score in enumerate(own)
    )


@pytest.mark.parametrize(
    ("values", "metric", "tolerance", "keep", "read"),
    [
        ({0: [0.5], 1: [0.7], 2: [0.895], 3: [0.9], 4: [0.89]}, "accuracy", 0.01, 2, (2,)),
        ({0: [0.5], 1: [0.7], 2: [0.895], 3: [0.9], 4: [0.89]}, "accuracy", 0.0, 3, (3,)),
        ({0: [0.5], 1: [0.88], 2: [0.89], 3: [0.90], 4: [0.909]}, "accuracy", 0.01, 3, (2, 3)),
        ({0: [0.9], 1: [0.9], 2: [0.9]}, "accuracy", 0.0, 1, (0, 1)),  # one block stays
        ({0: [9.0], 1: [4.0], 2: [3.0], 3: [3.5]}, "perplexity", 0.1, 2, (2,)),  # less is better
        ({0: [0.1, 0.1], 1: [0.9, 0.5], 2: [0.8, 0.8]}, "accuracy", 0.05, 2, (2,)),  # by the mean over seeds
    ],
)
def test_the_fewest_blocks_within_the_tolerance_are_proposed(values, metric, tolerance, keep, read):
    assert proposals(scores(values, metric), {"a": metric}, tolerance) == {"a": Proposal(keep, read, "main")}


def tried(whole: list[float], cut: list[float], metric: str = "accuracy", **costs: float) -> pd.DataFrame:
    rows = [
        {"task": "a", "phase": phase, "seed": seed, "measure": metric, "score": score}
        for phase, own in (("whole", whole), ("cut", cut))
        for seed, score in enumerate(own)
    ]
    rows += [{"task": "a", "phase": "cut", "measure": key, "score": value} for key, value in costs.items()]
    rows.append({"task": "a", "phase": "whole", "measure": "parameters", "score": 100})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("whole", "cut", "told"),
    [
        ([0.9, 0.9, 0.9], [0.9, 0.899, 0.898], r"accuracy -0.001 ± 0.002.* No more than 0.01 is lost"),
        ([0.87] * 3, [0.86] * 3, r"accuracy -0.010 ± 0.000.* No more than 0.01 is lost"),  # 0.86 - 0.87 is below -0.01
        ([0.9, 0.9, 0.9], [0.7, 0.71, 0.69], "More than 0.01 is lost .*3 seeds.*: do not cut there"),
        ([0.9, 0.9, 0.9], [0.88, 0.91, 0.9], "The interval does not allow to conclude that no more than 0.01 is lost"),
        ([0.9], [0.9], r"accuracy \+0.000. One seed allows no interval, and no conclusion"),
        ([0.9, 0.9], [0.7, 0.7], r"accuracy -0.200. Two seeds allow no interval, and no conclusion"),
    ],
)
def test_the_verdict_follows_from_the_interval(whole, cut, told):
    said = sentence("a", Proposal(2, (1, 2), "main"), 3, tried(whole, cut), "accuracy", 0.01)
    assert said.startswith("a: read at 1 and 2; keep 2 of 3 blocks: accuracy ")
    pd.testing.assert_series_equal(pd.Series([said]).str.contains(told), pd.Series([True]))


def test_the_sentence_lists_costs_and_a_lower_perplexity_is_better():
    table = tried([3.0, 3.1, 3.0], [2.9, 3.0, 2.9], "perplexity", speedup=1.5, parameters=69)
    said = sentence("a", Proposal(2, (2,), "main"), 3, table, "perplexity", 0.01)
    assert "1.50 x as fast, 31% fewer parameters" in said
    assert "No more than 0.01 is lost" in said
    assert "keep all 3 blocks" in sentence("a", Proposal(3, (3,), "main"), 3, table, "perplexity", 0.01)
    assert "could not be measured" in sentence("a", Proposal(2, (2,), "main"), 3, table[:0], "perplexity", 0.01)


@pytest.mark.long
def test_the_proposed_cut_is_made_measured_and_saved(tmp_path, monkeypatch):
    save_folder, model, tokenizer = tmp_path / "out", masked_model(), masking_tokenizer()
    options = {"processor": tokenizer, "tolerance": 1.0, "seeds": [0, 1], "output": save_folder, **QUICK}
    study = advise(model, {"who": task()}, TEXTS, **options)
    assert study.settings["proposals"] == {"who": {"keep": 1, "read": [0, 1]}}
    table = study.table
    assert len(table[table["phase"] == "layers"]) == 4 * 2
    for phase, blocks in (("whole", 3), ("cut", 1)):
        own = table[(table["phase"] == phase) & (table["measure"] == "accuracy")]
        assert own["blocks"].tolist() == [blocks] * 2
        assert own["seed"].tolist() == [0, 1]
        spoken = table[(table["phase"] == phase) & (table["measure"] == "perplexity")]
        assert len(spoken) == 1
    sizes = table[table["measure"] == "parameters"].set_index("phase")["score"]
    cut, _ = lamina.load(save_folder / "models" / "who", "AutoModelForMaskedLM")
    assert (cut.config.num_hidden_layers, cut.num_parameters()) == (1, sizes["cut"])
    assert sizes["cut"] < sizes["whole"] == model.num_parameters()
    bank = lamina.ReaderBank.from_pretrained(save_folder / "readers" / "who")
    score = lamina.evaluate(bank, {"task": task()})["task"]["accuracy"]
    first = table[(table["phase"] == "cut") & (table["measure"] == "accuracy") & (table["seed"] == 0)]
    assert first["score"].iloc[0] == pytest.approx(score)
    assert study.conclusions[0].startswith("who: read at 0 and 1; keep 1 of 3 blocks: accuracy ")
    before = {path: path.stat().st_mtime_ns for path in save_folder.glob("*/cells/*.json")}
    assert len(before) == 2 + 3
    monkeypatch.setattr(sys.modules["lamina.studies.cutting.advise"], "fit", None)  # no reader is trained again
    again = advise(model, {"who": task()}, TEXTS, resume=True, **options)
    pd.testing.assert_frame_equal(again.table, table)
    assert {path: path.stat().st_mtime_ns for path in save_folder.glob("*/cells/*.json")} == before
    assert json.loads(json.dumps(again.settings)) == again.settings
    with pytest.raises(ConfigError, match=r"cut/cells/.* belongs to a study with other texts"):
        advise(model, {"who": task()}, [f"{text} slow" for text in TEXTS], resume=True, **options)
    with torch.no_grad():
        model.cls.predictions.bias.add_(torch.arange(len(model.cls.predictions.bias)))
    with pytest.raises(ConfigError, match=r"cut/cells/.* belongs to a study with other weights outside the layers"):
        advise(model, {"who": task()}, TEXTS, resume=True, **options)


def test_validation_rows_play_no_part_in_the_choice():
    """Validation labels that are all wrong change what is measured, and nothing of what is proposed."""
    wrong = [{**row, "label": 1 - row["label"]} for row in ROWS]
    sides = [
        advise(
            masked_model(),
            {
                "who": Task.from_dataset(
                    "sequence_classification", {"train": ROWS, "validation": rows}, metric="accuracy"
                )
            },
            processor=masking_tokenizer(),
            tolerance=1.0,
            seeds=[0],
            **QUICK,
        )
        for rows in (ROWS, wrong)
    ]
    chosen = [study.table[study.table["phase"] == "layers"] for study in sides]
    pd.testing.assert_frame_equal(*chosen)
    assert sides[0].settings["proposals"] == sides[1].settings["proposals"]
    right, flipped = (
        study.table.query("measure == 'accuracy' and phase != 'layers'")["score"].to_numpy() for study in sides
    )
    assert right + flipped == pytest.approx(1)


def test_nothing_is_cut_where_every_block_counts(tmp_path, monkeypatch):
    module = sys.modules["lamina.studies.cutting.advise"]  # the name in the package is the function
    monkeypatch.setattr(module, "proposals", lambda *_: {"who": Proposal(3, (3,), "main")})
    study = advise(
        masked_model(), {"who": task()}, processor=masking_tokenizer(), seeds=[0], output=str(tmp_path), **QUICK
    )
    assert study.conclusions == ("who: keep all 3 blocks; no lower layer comes within 0.01 of the best accuracy.",)
    assert not (tmp_path / "models").exists()
    assert set(study.table["phase"]) == {"layers", "whole"}


def test_invalid_options_are_refused(tmp_path):
    model, tokenizer = tiny_model(3), tiny_tokenizer()
    with pytest.raises(ConfigError, match="advise: tolerance is -1; it must be at least 0"):
        advise(model, {"who": task()}, processor=tokenizer, tolerance=-1)
    with pytest.raises(ConfigError, match="advise: tasks is empty"):
        advise(model, {}, processor=tokenizer)
    with pytest.raises(ConfigError, match="advise: seeds is empty"):
        advise(model, {"who": task()}, processor=tokenizer, seeds=[])
    with pytest.raises(ConfigError, match="the tasks 'topic 1' and 'topic-1' would be saved in one folder, 'topic-1'"):
        advise(model, {"topic 1": task(), "topic-1": task()}, processor=tokenizer, output=tmp_path)
    assert torch.is_grad_enabled()


def test_cells_that_all_fail_are_an_error_with_the_first_reason(tmp_path, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise ConfigError("no rows")

    monkeypatch.setattr(sys.modules["lamina.studies.cutting.advise"], "fit", fails)
    save_base(tmp_path)
    with pytest.raises(ConfigError, match=r"advise: all 1 cells failed; the first, .*: no rows$"):
        advise(str(tmp_path), {"who": task()}, seeds=[0])
    assert torch.is_grad_enabled()
