"""The parts of a task as rows that a model is called with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.finetuned import (
    bert,
    copies,
    image_processor,
    masking_tokenizer,
    pairs,
    running_text,
    shades,
    t5,
    t5_tokenizer,
    vit,
)
from tests.support.training import LENGTH, length_of_text, names, several, tiny_tokenizer, yes_no

from lamina.tasks.pictures import Pictures
from lamina.tasks.seq2seq import Pairs
from lamina.train.options import TuneOptions
from lamina.train.rows import Rows, TextRows, open_rows


def opened(task: Any, part: str = "train", model: Any = None, processor: Any = None, **options: Any) -> Rows:
    return open_rows(task, part, model or bert(), processor or tiny_tokenizer(), TuneOptions(**options))


@pytest.mark.parametrize(
    ("make", "dtype", "shape"),
    [
        (yes_no, torch.long, (3,)),
        (pairs, torch.long, (3,)),
        (length_of_text, torch.float32, (3,)),
        (several, torch.float32, (3, 3)),
    ],
)
def test_labels_have_the_type_that_the_loss_takes(make: Any, dtype: torch.dtype, shape: tuple[int, ...]):
    task = make()
    rows = opened(task)
    batch = rows.batch([4, 0, 2])
    assert batch["labels"].dtype == dtype
    assert batch["labels"].shape == shape
    expected = [task.split("train").labels[row] for row in (4, 0, 2)]
    torch.testing.assert_close(batch["labels"], torch.tensor(expected, dtype=dtype))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["attention_mask"].sum(1).tolist() == [rows.lengths[row] for row in (4, 0, 2)]


def test_a_word_counts_once_in_the_windows_of_a_text():
    task = names(train=4, low=60, high=90)
    rows = opened(task)
    assert len(rows.lengths) > 4
    assert max(rows.lengths) <= LENGTH
    labels = rows.batch(range(len(rows.lengths)))["labels"]
    assert int((labels != -100).sum()) == sum(map(len, task.split("train").labels))
    assert rows.truncated == 0


def test_long_texts_lose_their_end_where_they_are_read_whole():
    rows = opened(yes_no(train=10), max_length=5)
    assert max(rows.lengths) == 5
    assert 0 < rows.truncated <= 10


def test_hidden_tokens_differ_from_epoch_to_epoch_in_training_alone():
    task, model = running_text(), bert("AutoModelForMaskedLM")
    rows = opened(task, model=model, processor=masking_tokenizer())
    first, again, second = (rows.batch([0, 1], epoch=epoch)["labels"] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    other = opened(task, model=model, processor=masking_tokenizer(), seed=1)
    assert not torch.equal(first, other.batch([0, 1])["labels"])
    held = opened(task, "validation", model, masking_tokenizer())
    assert torch.equal(held.batch([0, 1])["labels"], held.batch([0, 1], epoch=1)["labels"])


def test_texts_that_are_written():
    rows = opened(copies(), model=t5(), processor=t5_tokenizer(), max_length=6, max_target_length=3, prefix="the ")
    assert isinstance(rows, Pairs)
    batch = rows.batch([0])
    assert batch["input_ids"][0].tolist()[0] == 4
    assert (batch["input_ids"].shape[1], batch["labels"].shape[1]) == (6, 3)
    assert rows.truncated == rows.truncated_targets == 60


def test_pictures_are_cropped_in_training_alone():
    task = shades()
    rows = {
        (part, augment): opened(task, part, vit(), image_processor(), augment=augment)
        for part in ("train", "validation")
        for augment in (True, False)
    }
    assert all(isinstance(one, Pictures) for one in rows.values())

    def moved(part: str, augment: bool) -> bool:
        first, second = (rows[part, augment].batch([0], epoch=epoch)["pixel_values"] for epoch in (0, 1))
        return not torch.equal(first, second)

    assert moved("train", True)
    assert not any(moved(*key) for key in rows if key != ("train", True))


def test_every_kind_of_rows_has_what_the_trainer_needs():
    assert isinstance(opened(yes_no()), TextRows)
    for rows in (opened(copies(), model=t5(), processor=t5_tokenizer()), opened(yes_no())):
        assert isinstance(rows, Rows)
