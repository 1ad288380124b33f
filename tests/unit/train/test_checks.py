"""Whether tasks fit the readers they are given to."""

from __future__ import annotations

import dataclasses

import pytest
from tests.support.training import length_of_text, names, reader, tiny_bank, tiny_model, yes_no

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, UnknownNameError
from lamina.tasks.split import Split
from lamina.train.checks import check_processor, check_tasks

TASK = yes_no(train=4, validation=4)


def test_what_fits_passes():
    check_tasks(tiny_bank({"r": reader(TASK)}), {"r": TASK}, parts=("train", "validation"))


def test_a_bank_without_a_tokenizer_cannot_read_texts():
    with pytest.raises(ConfigError, match=r"predict: the bank has no processor.*ReaderBank\(model, processor"):
        check_processor(ReaderBank(tiny_model()), "predict")
    with pytest.raises(ConfigError, match="tasks: the bank has no processor"):
        check_tasks(ReaderBank(tiny_model()), {"r": TASK}, parts=())


def test_no_task_at_all():
    with pytest.raises(ConfigError, match="tasks: none was given; at least one is needed"):
        check_tasks(tiny_bank({"r": reader()}), {}, parts=())


def test_a_task_for_a_reader_there_is_not():
    with pytest.raises(UnknownNameError, match=r"tasks: unknown reader 'mod'; known: mood. Did you mean 'mood'?"):
        check_tasks(tiny_bank({"mood": reader()}), {"mod": TASK}, parts=())


def test_a_part_there_is_not_or_that_is_empty():
    bank = tiny_bank({"r": reader(TASK)})
    with pytest.raises(UnknownNameError, match="unknown split 'test'; known: train, validation"):
        check_tasks(bank, {"r": TASK}, parts=("test",))
    empty = dataclasses.replace(TASK, splits={**TASK.splits, "train": Split((), ())})
    with pytest.raises(ConfigError, match="its train part is empty; it needs a row at least"):
        check_tasks(bank, {"r": empty}, parts=("train",))


@pytest.mark.parametrize(
    ("made_for", "message"),
    [
        (names(), "its kind is sequence_classification, reader 'r' was made for token_classification; they must agree"),
        (length_of_text(), "its problem_type is classification, reader 'r' was made for regression"),
        (
            dataclasses.replace(TASK, labels=("yes", "no")),
            r"its labels is \('no', 'yes'\), reader 'r' was made for \('yes', 'no'\)",
        ),
    ],
    ids=["kind", "problem", "labels"],
)
def test_a_task_that_does_not_fit_its_reader(made_for, message: str):
    with pytest.raises(ConfigError, match=message):
        check_tasks(tiny_bank({"r": reader(made_for)}), {"r": TASK}, parts=())
