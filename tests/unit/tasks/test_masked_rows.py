"""Hidden tokens of rows by themselves: a row is a text, or a pair read as one, and never runs into the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.encoded import features
from tests.support.masked import masked_bank, masked_model, masking_tokenizer, running
from tests.support.recorded import packed

from lamina import evaluate, fit
from lamina.errors import ConfigError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.train.groups import group_tasks

KIND = kind_of("masked_lm")
PAIRS = [{"a": "the film is good", "b": "anna was in paris .", "y": "yes"}, {"a": "a film", "b": " ", "y": "no"}] * 4


def of_pairs(**parts: list[dict[str, str]]) -> Task:
    given: dict[str, Any] = {"text": "a", "text_pair": "b", "label": "y"}
    return Task.from_dataset("sequence_classification", parts or {"train": PAIRS, "validation": PAIRS}, **given)


def test_a_pair_stays_one_row():
    task = of_pairs().masked_lm(rows=True)
    assert (task.kind, task.by_row, task.metrics) == ("masked_lm", True, ("perplexity", "accuracy"))
    assert task.split("train").texts == tuple((row["a"], row["b"]) for row in PAIRS)
    assert not task.split("train").labelled
    blocks = of_pairs().masked_lm()
    assert blocks.by_row is False
    assert blocks.split("train").texts == ("the film is good", "anna was in paris .", "a film") * 4


def test_blank_rows_are_left_out():
    texts = Split.of(["a", " ", "", "b"], [0, 1, 0, 1])
    assert texts.without_labels(rows=True).texts == ("a", "b")
    pairs = Split.of([("a", " "), (" ", ""), ("", "b")], [0, 1, 0])
    assert pairs.without_labels(rows=True).texts == (("a", " "), ("", "b"))


def test_every_row_is_read_by_itself_in_the_tokenizer_s_own_form(words: Any):
    options = EncodeOptions(part="train", max_length=12, by_row=True)
    for texts in (["the film is good", "anna was in paris .", "a"], [("a film", "is good"), ("the film", "was bad")]):
        inputs = KIND.encode(Split.of(texts), words, options)
        given = zip(*texts, strict=True) if isinstance(texts[0], tuple) else [texts]
        expected: Any = words(*map(list, given))
        hidden = inputs.batch(range(len(texts)))
        restored = torch.where(hidden["labels"] != -100, hidden["labels"], hidden["input_ids"])
        for row, ids in enumerate(expected["input_ids"]):
            assert features(inputs.encoded)[row]["input_ids"] == ids == restored[row, : len(ids)].tolist()
            assert hidden["token_type_ids"][row, : len(ids)].tolist() == expected["token_type_ids"][row]
        special = torch.isin(restored, torch.tensor(words.all_special_ids))
        assert (hidden["labels"][special] == -100).all()
        assert (hidden["labels"] != -100).sum(1).tolist() == [1] * len(texts)  # 15 % of up to eight tokens


def test_rows_that_lose_their_end_are_counted(words: Any):
    options = EncodeOptions(part="train", max_length=6, by_row=True)
    inputs = KIND.encode(Split.of(["the film is good and bad", "a film"]), words, options)
    assert (KIND.truncated(inputs), list(inputs.lengths)) == (1, [6, 4])
    assert KIND.truncated(KIND.encode(Split.of(["a film"]), words, replace(options, by_row=False))) == 0


def test_rows_and_blocks_of_the_same_texts_are_encoded_apart():
    blocks = running(train=6)
    rows = blocks.masked_lm(rows=True)
    how = EncodeOptions(part="train", max_length=32)
    first, second = group_tasks({"blocks": blocks, "rows": rows}, how, masking_tokenizer())
    assert (first.names, second.names) == (("blocks",), ("rows",))
    assert len(second.inputs.lengths) == 6
    assert len(first.inputs.lengths) != 6
    assert first.inputs.digest != second.inputs.digest


def test_a_row_s_share_of_the_scores_does_not_depend_on_its_batch():
    """Law 5, of readers and of whole models: rows of unequal length are padded, and neighbours change nothing."""
    task = running(train=4, validation=23).masked_lm(rows=True)
    assert len({len(text.split()) for text in task.split("validation").texts}) > 3
    bank, model = masked_bank("m"), masked_model()
    for target, tasks in ((bank, {"m": task}), (model, task)):
        processor = masking_tokenizer()
        alone, together = (evaluate(target, tasks, processor=processor, batch_size=size) for size in (1, 23))
        for name, scores in alone.items():
            assert together[name]["accuracy"] == scores["accuracy"]
            assert together[name]["perplexity"] == pytest.approx(scores["perplexity"], rel=1e-5)


def test_rows_are_learnt_from():
    task, bank = running(train=60).masked_lm(rows=True), masked_bank("m")
    before = evaluate(bank, {"m": task})["m"]
    result = fit(bank, {"m": task}, epochs=3, learning_rate=1e-2, batch_size=8, progress=False)
    assert result.history[-1]["perplexity"] < 0.8 * before["perplexity"]
    assert result.history[-1]["accuracy"] > max(0.45, before["accuracy"])  # half of the words are the full stop


def test_rows_held_out_are_drawn_while_running_text_ends_with_them():
    texts = Split.of([f"film {number}" for number in range(40)])
    task = replace(running(), splits={"train": texts})
    assert task.held_out().split("validation").texts == tuple(f"film {number}" for number in range(36, 40))
    drawn = task.masked_lm(rows=True).held_out(seed=3).split("validation").texts
    assert len(drawn) == 4
    assert drawn != tuple(f"film {number}" for number in range(36, 40))


def test_images_have_no_rows_of_text():
    from tests.support.finetuned import shades

    with pytest.raises(ConfigError, match="has no texts; masked_lm needs some"):
        shades().masked_lm(rows=True)


def test_recorded_states_have_no_texts_of_their_own(tmp_path: Path):
    labels = [{"label": label} for label in ("no", "yes", "no", "yes")]
    folder = packed(tmp_path / "states", [torch.zeros(1, 2, 8)] * 4, [1, 3])
    task = Task.from_states("sequence_classification", train=(folder, labels), validation=(folder, labels))
    for make in (task.masked_lm, task.causal_lm):
        with pytest.raises(ConfigError, match=r"task states: .* has no texts; (masked|causal)_lm needs some"):
            make()


def test_a_run_over_blocks_does_not_go_on_over_rows(tmp_path: Any):
    blocks, options = running(train=6), {"epochs": 1, "progress": False, "output": tmp_path}
    fit(masked_bank("m"), {"m": blocks}, **options)
    with pytest.raises(ConfigError, match="by_row False in 'm', here True"):
        fit(masked_bank("m"), {"m": blocks.masked_lm(rows=True)}, resume=True, **options)
