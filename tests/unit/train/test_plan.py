"""Which texts a step sees, in what order, and who learns from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.support.masked import MASK, masking_tokenizer, running
from tests.support.training import LENGTH, length_of_text, names, tiny_tokenizer, yes_no

from lamina.errors import ConfigError
from lamina.tasks.task import Task
from lamina.train.plan import Group, Plan, group_tasks


def plan_of(tasks: dict[str, Task], epochs: int | dict[str, int] = 1, seed: int = 0) -> Plan:
    groups = group_tasks(tasks, "train", tiny_tokenizer(), max_length=LENGTH)
    return Plan(groups, epochs if isinstance(epochs, dict) else dict.fromkeys(tasks, epochs), 4, seed)


SAME = {"a": yes_no(train=10), "b": length_of_text(train=10)}
OTHER = {"c": names(train=18, seed=5)}


def test_tasks_over_the_same_texts_are_one_group():
    groups = group_tasks({**SAME, **OTHER}, "train", tiny_tokenizer(), max_length=LENGTH)
    assert [group.names for group in groups] == [("a", "b"), ("c",)]
    assert [group.part for group in groups] == ["train", "train"]
    assert len(groups[0].encoded.features) == 10


def test_a_batch_holds_the_labels_of_every_reader():
    group = group_tasks({**SAME}, "train", tiny_tokenizer(), max_length=LENGTH)[0]
    batch = group.batch([3, 1], ["b", "a"], tiny_tokenizer())
    assert batch["readers"] == ["b", "a"]
    for name in ("a", "b"):
        labels = SAME[name].split("train").labels
        assert batch["labels"][name].tolist() == pytest.approx([labels[3], labels[1]])
    assert batch["labels"]["a"].dtype == torch.long
    assert batch["labels"]["b"].dtype == torch.float32
    assert batch["input_ids"].shape == batch["attention_mask"].shape


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
    assert len(plan) == 3 * 3 + 2 * 5
    assert len(list(plan.walk())) == len(plan)
    ends = [step.epoch for step, last in plan.walk() if last]
    assert ends == [0, 1, 2]


def test_a_reader_that_stops_gets_no_more():
    plan = plan_of({**SAME, **OTHER}, 4)
    seen = []
    for step, ends in plan.walk():
        seen.append((step.epoch, step.group, plan.active(step.group, step.epoch)))
        if ends and step.epoch == 0:
            plan.stopped["a"] = 0
        if ends and step.epoch == 1:
            plan.stopped |= {"b": 1, "c": 1}
    assert {names for epoch, group, names in seen if (epoch, group) == (0, 0)} == {("a", "b")}
    assert {names for epoch, group, names in seen if (epoch, group) == (1, 0)} == {("b",)}
    assert max(epoch for epoch, *_ in seen) == 1


@pytest.mark.parametrize("done", range(20))
def test_a_walk_goes_on_where_another_ended(done: int):
    tasks = {**SAME, **OTHER}
    plan = plan_of(tasks, {"a": 1, "b": 3, "c": 2})
    plan.stopped["b"] = 1
    whole = list(plan.walk())
    assert len(whole) == 16
    assert list(plan.walk(done)) == whole[done:]


def test_a_batch_has_a_row_at_least():
    with pytest.raises(ConfigError, match="fit: batch_size is 0; it must be at least 1"):
        Plan([], {}, 0, 0)


# Masked language modelling


def hidden_group(part: str = "train", *, seed: int = 0, **more: Task) -> Group:
    groups = group_tasks({"m": running(), **more}, part, masking_tokenizer(), max_length=16)
    groups = Plan(groups, dict.fromkeys(("m", *more), 3), 4, seed).groups if part == "train" else groups
    return next(group for group in groups if "m" in group.names)


def read(group: Group, rows: list[int], epoch: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    batch = group.batch(rows, group.names, masking_tokenizer(), epoch=epoch)
    return batch["input_ids"].tolist(), batch["labels"][group.names[0]].tolist()


def test_a_hidden_text_is_the_text_with_some_tokens_hidden():
    group = hidden_group()
    batch = group.batch([2, 0], ["m"], masking_tokenizer())
    assert batch["readers"] == ["m"]
    for at, row in enumerate((2, 0)):
        ids = torch.tensor(group.encoded.features[row]["input_ids"])
        labels, seen = batch["labels"]["m"][at, : len(ids)], batch["input_ids"][at, : len(ids)]
        chosen = labels != -100
        assert int(chosen.sum()) >= 1
        assert torch.equal(labels[chosen], ids[chosen])
        assert torch.equal(seen[~chosen], ids[~chosen])
    assert MASK in batch["input_ids"]
    assert batch["attention_mask"].shape == batch["input_ids"].shape == batch["labels"]["m"].shape
    assert bool((batch["labels"]["m"][batch["attention_mask"] == 0] == -100).all())


def test_every_epoch_hides_other_tokens():
    group = hidden_group()
    seen = [read(group, [0, 1, 2, 3], epoch) for epoch in range(3)]
    assert len({str(one) for one in seen}) == 3
    assert seen == [read(group, [0, 1, 2, 3], epoch) for epoch in range(3)]
    assert not group.fixed


def test_validation_hides_the_same_tokens_always():
    one = hidden_group("validation")
    other = replace(one, seed=7)
    assert read(one, [0, 1, 2], 0) == read(other, [0, 1, 2], 5)
    assert one.fixed
    assert read(one, [0])[1] != read(hidden_group(), [0])[1]


def test_what_is_hidden_depends_on_neither_batch_nor_neighbours():
    """So a run that resumes, or trains one reader more, goes on with the same texts."""
    alone, beside = hidden_group(), hidden_group(other=running(), tagged=names(seed=3), z=yes_no(seed=4))
    assert beside.names == ("m", "other")
    whole = [row[:16] for row in read(alone, list(range(6)))[0]]
    for row in range(6):
        assert read(beside, [row])[0] == [whole[row]]


def test_the_plans_seed_decides_what_is_hidden():
    assert read(hidden_group(seed=0), [0, 1, 2]) == read(hidden_group(seed=0), [0, 1, 2])
    assert read(hidden_group(seed=0), [0, 1, 2]) != read(hidden_group(seed=1), [0, 1, 2])


def test_hidden_texts_are_a_group_of_their_own():
    """What its readers read is not what a reader of the same texts would have to read."""
    task = running()
    same = replace(
        yes_no(), splits={part: replace(split, labels=(0,) * len(split)) for part, split in task.splits.items()}
    )
    groups = group_tasks({"m": task, "s": same, "n": task}, "train", masking_tokenizer(), max_length=LENGTH)
    assert [group.names for group in groups] == [("m", "n"), ("s",)]
    assert [group.masking is None for group in groups] == [False, True]
    assert groups[0].cut("m") == 0
    assert all(group.fixed is (group.masking is None) for group in groups)


def test_steps_are_counted_in_blocks():
    groups = group_tasks({"m": running()}, "train", masking_tokenizer(), max_length=16)
    plan = Plan(groups, {"m": 2}, 4, 0)
    blocks = len(groups[0].encoded.features)
    assert plan.steps_of("m") == len(list(plan.walk())) == 2 * -(-blocks // 4)


def test_hiding_needs_a_mask_token():
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        group_tasks({"m": running()}, "train", tiny_tokenizer(), max_length=LENGTH)
