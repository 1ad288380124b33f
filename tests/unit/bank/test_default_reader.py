from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import unwrap
from typing import Any

import pytest
from tests.support.finetuned import copies, pairs, running_text
from tests.support.portions import one_in
from tests.support.training import length_of_text, names, several, tiny_bank, train, yes_no

from lamina.bank import Reader
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.paired_layers import PairedLayers
from lamina.fusion.pooled_layers import PooledLayers
from lamina.tasks.task import Task


@pytest.mark.parametrize(
    ("make", "fusion"),
    [(yes_no, PooledLayers), (length_of_text, PooledLayers), (several, PooledLayers), (pairs, PairedLayers)],
)
def test_a_whole_text_has_its_layers_pooled_and_a_pair_has_its_texts_compared(
    make: Callable[[], Task], fusion: type[Any]
):
    task = make()
    reader = Reader.default(task)
    assert type(reader.fusion) is fusion
    assert (reader.head.labels, reader.head.problem_type) == (task.labels, task.problem_type)


@pytest.mark.parametrize("make", one_in(3, [yes_no, length_of_text, several, names, pairs]))
def test_a_task_in_place_of_a_reader_learns(make: Callable[[], Task]):
    if make is names:
        pytest.importorskip("seqeval", reason="the environment of vLLM has no metrics of names")
    task, bank = make(), tiny_bank({})
    module = bank.add("it", task)
    assert module is bank["it"]
    assert module.config == Reader.default(task)
    [row] = train(bank, {"it": task}, epochs=1).table
    assert (row["parameters"], row["metric"]) == (module.size(), task.metric)
    assert -1 <= row["score"] <= 1


def test_pairs_joined_into_one_text_are_read_as_texts():
    assert type(Reader.default(pairs().join_pairs(" and ")).fusion) is PooledLayers


def test_a_task_without_a_default_reader_is_refused():
    with pytest.raises(
        ConfigError, match=r"got str; a lamina.Reader is needed, or a lamina.Task for its default reader"
    ):
        tiny_bank({}).add("it", "cola")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^reader: got str; a lamina\.Task is needed"):
        unwrap(Reader.default.__func__)(Reader, "cola")  # without the type checks of the tests
    with pytest.raises(ConfigError, match=r"bank\.add: watch is 'no'; it must be True or False"):
        tiny_bank({}).add("it", copies(), watch="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"'summarization' have no readers; those of .*lamina.finetune"):
        Reader.default(copies())
    with pytest.raises(ConfigError, match=r"no default reader was chosen for tasks of kind masked_lm.*MaskedLM"):
        Reader.default(running_text())
    with pytest.raises(UnknownNameError, match="nothing_else"):
        Reader.default(replace(yes_no(), kind="nothing_else"))
