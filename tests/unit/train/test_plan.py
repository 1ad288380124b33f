"""Which rows a step sees, in what order, and who learns from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.masked import masking_tokenizer, running
from tests.support.training import LENGTH, length_of_text, names, tiny_tokenizer, yes_no

from lamina.errors import DataError
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.train.base import batches
from lamina.train.groups import group_tasks
from lamina.train.plan import Group, Plan, parts_of


def groups_of(tasks: dict[str, Task], encodings: Any = None, **options: Any) -> list[Group]:
    how = EncodeOptions(**{"part": "train", "max_length": LENGTH, **options})
    return list(group_tasks(tasks, how, masking_tokenizer(), encodings))


def plan_of(tasks: dict[str, Task], epochs: int | dict[str, int] = 1, seed: int = 0, **options: Any) -> Plan:
    rounds = epochs if isinstance(epochs, dict) else dict.fromkeys(tasks, epochs)
    return Plan(groups_of(tasks), rounds, 4, seed, **options)


SAME = {"a": yes_no(train=10), "b": length_of_text(train=10)}
OTHER = {"c": names(train=18, seed=5)}


def test_tasks_over_the_same_texts_are_one_group():
    groups = groups_of({**SAME, **OTHER})
    assert [group.names for group in groups] == [("a", "b"), ("c",)]
    assert [group.part for group in groups] == ["train", "train"]
    assert len(groups[0].inputs.lengths) == 10


def test_examples_are_encoded_once():
    kept: dict[Any, Any] = {}
    first, again = groups_of(SAME, kept), groups_of({"z": SAME["a"]}, kept)
    assert first[0].inputs is again[0].inputs
    assert groups_of(SAME, kept, max_length=7)[0].inputs is not first[0].inputs


def test_a_batch_has_the_labels_of_every_reader():
    group = groups_of({**SAME})[0]
    labels = group.labels([3, 1], None, ["b", "a"])
    assert list(labels) == ["b", "a"]
    for name in ("a", "b"):
        expected = SAME[name].split("train").labels
        assert labels[name].tolist() == pytest.approx([expected[3], expected[1]])
    assert labels["a"].dtype == torch.long
    assert labels["b"].dtype == torch.float32


def test_an_epoch_sees_every_text_once():
    plan = plan_of({**SAME, **OTHER}, 3)
    for epoch in range(3):
        steps = plan.epoch(epoch)
        for group, count in ((0, 10), (1, 18)):
            rows = [row for step in steps if step.group == group for row in step.rows]
            assert Counter(rows) == Counter(range(count))
    orders = [[step.rows for step in plan.epoch(epoch)] for epoch in range(3)]
    assert orders[0] != orders[1]
    assert [step.rows for step in plan_of({**SAME, **OTHER}, 3, seed=1).epoch(0)] != orders[0]


def test_groups_take_turns_in_proportion():
    steps = [step.group for step in plan_of({**SAME, **OTHER}).epoch(0)]
    assert steps == [1, 0, 1, 0, 1, 1, 0, 1]  # three batches among five


def test_the_order_of_a_group_does_not_depend_on_the_others():
    alone, beside = plan_of(SAME, 2), plan_of({**OTHER, **SAME}, 2)
    for epoch in range(2):
        assert [s.rows for s in alone.epoch(epoch)] == [s.rows for s in beside.epoch(epoch) if s.group == 1]


def test_each_reader_has_its_own_epochs():
    plan = plan_of({**SAME, **OTHER}, {"a": 1, "b": 3, "c": 2})
    assert plan.last_epoch() == 3
    assert [plan.active(0, epoch) for epoch in range(3)] == [("a", "b"), ("b",), ("b",)]
    assert [plan.active(1, epoch) for epoch in range(3)] == [("c",), ("c",), ()]
    assert [plan.steps_of(name) for name in "abc"] == [3, 9, 10]
    assert len(plan) == 3 * 3 + 2 * 5 == sum(len(plan.epoch(epoch)) for epoch in range(3))


def test_a_reader_that_stops_gets_no_more():
    plan = plan_of({**SAME, **OTHER}, 4)
    plan.stopped |= {"a": 0, "b": 1, "c": 1}
    assert [plan.active(0, epoch) for epoch in range(3)] == [("a", "b"), ("b",), ()]
    assert [len(plan.epoch(epoch)) for epoch in range(4)] == [8, 8, 0, 0]


@pytest.mark.parametrize(("most", "steps"), [(1, {"a": 1, "c": 1}), (4, {"a": 4, "c": 4}), (5, {"a": 5, "c": 5})])
def test_a_limit_of_steps_is_each_learners_own(most: int, steps: dict[str, int]):
    plan = plan_of({**SAME, **OTHER}, 1, max_steps=most)
    assert {name: plan.steps_of(name) for name in steps} == steps
    every = [step for epoch in range(plan.last_epoch()) for step in plan.epoch(epoch)]
    assert Counter(step.group for step in every) == {0: most, 1: most}
    assert len(plan) == len(every)


# Parts of a step


@pytest.mark.parametrize("batch_count", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_and_batches_share_a_step(batch_count: int, processes: int):
    seen: list[int] = []
    for rank in range(processes):
        parts = parts_of(range(1, 9), batch_count * processes, rank, processes)
        assert len(parts) <= batch_count
        assert all(counts for _, counts in parts)
        seen += [row for rows, _ in parts for row in rows]
    assert sorted(seen) == list(range(1, 9))


def test_a_process_without_a_row_counts_for_nothing():
    assert parts_of([4, 5], 6, 2, 3) == [([4], False)]
    assert parts_of([4, 5], 6, 1, 3) == [([5], True)]


class Odd:
    """Inputs of which one row cannot be read."""

    lengths = (1,) * 6

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def batch(self, rows: Sequence[int], *, epoch: int = 0) -> dict[str, torch.Tensor]:
        if self.bad in rows:
            raise DataError("row 3 is broken", path="x", row=3)
        return {"x": torch.tensor(rows) + 10 * epoch}


def test_batches_are_the_same_whatever_the_number_of_workers():
    jobs: Any = [(Odd(), [0, 2], 0), (Odd(), [1], 1), (Odd(), [3, 4, 5], 2)]
    before = torch.get_rng_state()
    plain, worked = ([batch["x"].tolist() for batch in batches(jobs, count)] for count in (0, 2))
    assert plain == worked == [[0, 2], [11], [23, 24, 25]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_cannot_be_read_is_named(workers: int):
    jobs: Any = [(Odd(), [0], 0), (Odd(3), [3], 0)]
    made = batches(jobs, workers)
    next(made)
    with pytest.raises(DataError, match=r"^row 3 is broken$") as told:
        next(made)
    assert (told.value.path, told.value.row) == ("x", 3)


# Masked language modelling


def test_hidden_texts_are_a_group_of_their_own():
    """What its readers read is not what a reader of the same texts would have to read."""
    task = running()
    splits = {part: Split.of(list(task.split(part).texts), [0] * len(task.split(part))) for part in task.splits}
    groups = groups_of({"m": task, "s": replace(yes_no(), splits=splits), "n": task})
    assert [group.names for group in groups] == [("m", "n"), ("s",)]
    assert groups[0].truncated("m") == 0
    assert groups[0].inputs.uncacheable is not None
    made = groups[0].inputs.batch([0, 1])
    assert groups[0].labels([0, 1], made["labels"], ["n"])["n"] is made["labels"]


def test_what_is_hidden_depends_on_neither_batch_nor_neighbours():
    """So a run that resumes, or trains one reader more, goes on with the same texts."""
    alone = groups_of({"m": running()}, max_length=16)[0].inputs
    beside = groups_of({"m": running(), "other": running(), "z": yes_no(seed=4)}, max_length=16)[0].inputs
    whole = alone.batch(range(6))
    for row in range(6):
        for key, value in beside.batch([row]).items():
            assert torch.equal(value[0], whole[key][row])
    assert not torch.equal(alone.batch([0, 1, 2])["input_ids"], alone.batch([0, 1, 2], epoch=1)["input_ids"])


def test_steps_are_counted_in_blocks():
    groups = groups_of({"m": running()}, max_length=16)
    plan = Plan(groups, {"m": 2}, 4, 0)
    assert plan.steps_of("m") == len(plan) == 2 * -(-len(groups[0].inputs.lengths) // 4)


def test_hiding_needs_a_mask_token():
    from lamina.errors import ConfigError

    how = EncodeOptions(part="train", max_length=LENGTH)
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        list(group_tasks({"m": running()}, how, tiny_tokenizer()))


def test_what_is_encoded_does_not_depend_on_the_seed_unless_it_is_drawn():
    task, made = yes_no(), {}
    for seed in (0, 1):
        list(group_tasks({"it": task}, EncodeOptions(part="train", max_length=16, seed=seed), tiny_tokenizer(), made))
    assert len(made) == 1
