"""Which rows are held out: one choice per table, every class at its share, and no class without a training row."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from datasets import Dataset
from tests.support.portions import one_in

from lamina.data.read import Table
from lamina.errors import DataError
from lamina.tasks.stratify import choose, label_columns, strata_of
from lamina.tasks.task import Task

KIND = "sequence_classification"


def task(rows: list[dict[str, Any]], label: str, kind: str = KIND, **more: Any) -> Task:
    return Task.from_dataset(kind, {"train": rows}, text="text", label=label, name=label, **more)


def three_columns(count: int = 300) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {
            "text": f"text {row}",
            "mood": rng.choice(["good", "bad", "bad"]),
            "topic": rng.choice("abcde"),
            "stars": rng.randint(1, 5),
            "score": rng.random(),
        }
        for row in range(count)
    ]


def test_tasks_over_one_table_hold_out_the_same_rows():
    rows = three_columns()
    tasks = [task(rows, label) for label in ("mood", "topic", "stars", "score")]
    keys = {tuple(split.key for split in one.splits.values()) for one in tasks}
    assert len(keys) == 1
    for one in tasks[:3]:
        counts = {part: Counter(split.labels) for part, split in one.splits.items()}
        for label, total in (counts["train"] + counts["validation"]).items():
            assert counts["validation"][label] == pytest.approx(total / 10, abs=2)


@pytest.mark.parametrize("in_memory", [True, False])
def test_so_do_tasks_over_fields_of_one_column(in_memory: bool):
    rows = [{"text": row["text"], "of": {"mood": row["mood"], "topic": row["topic"]}} for row in three_columns(60)]
    for row in rows[::7]:
        row["of"] = {"topic": row["of"]["topic"]}
    dataset: Any = rows if in_memory else Dataset.from_list(rows)
    mood, topic = (task(dataset, f"of.{field}") for field in ("mood", "topic"))
    assert mood.split("validation").key == topic.split("validation").key
    assert sum(split.unlabelled for split in mood.splits.values()) == 9


@pytest.mark.parametrize("missing", [None, "drop"])
def test_so_do_tasks_that_leave_out_the_same_rows(missing: str | None):
    """Rows that were rejected in Prodigy, or all rows without a label; a label that lacks beside them is masked."""
    rows = three_columns(60)
    rows = [{**row, "_view_id": "x", "answer": "accept" if at % 7 else "reject"} for at, row in enumerate(rows)]
    if missing is None:
        rows = [{**row, "mood": row["mood"] if at % 5 else None} for at, row in enumerate(rows)]
    mood, topic = (task(rows, label, missing_labels=missing) for label in ("mood", "topic"))
    assert [len(split) for split in mood.splits.values()] == [46, 5]
    assert {part: split.key for part, split in mood.splits.items()} == {
        part: split.key for part, split in topic.splits.items()
    }
    assert sum(split.unlabelled for split in mood.splits.values()) == (10 if missing is None else 0)


@pytest.mark.parametrize("kind", one_in(2, ["token_classification", "masked_lm"]))
def test_so_do_tasks_of_other_kinds(kind: str):
    rows = [row | {"spans": [{"start": 0, "end": 4, "label": "AB"[at % 2]}]} for at, row in enumerate(three_columns())]
    other = task(rows, "spans", kind, **({"by_row": True} if kind == "masked_lm" else {}))
    assert other.split("validation").key == task(rows, "mood").split("validation").key


def test_a_file_and_rows_in_memory_are_held_out_alike(tmp_path: Any):
    rows = three_columns()
    path = tmp_path / "some.csv"
    path.write_text("text,mood,topic\n" + "".join(f"{row['text']},{row['mood']},{row['topic']}\n" for row in rows))
    tasks = [Task.from_files(KIND, train=path, text="text", label=label) for label in ("mood", "topic")]
    assert tasks[0].split("validation").key == tasks[1].split("validation").key


@pytest.mark.parametrize(
    ("counts", "held"),
    one_in(
        3,
        [
            ({f"big{at}": 10 for at in range(9)} | {f"one{at}": 1 for at in range(10)}, 10),
            ({"a": 19, "b": 1}, 2),
            ({"a": 2, "b": 1}, 1),
            ({"a": 3} | {f"one{at}": 1 for at in range(27)}, 2),
            ({f"c{at}": 1 for at in range(10)}, 0),
        ],
    ),
)
def test_a_class_keeps_its_last_row(counts: dict[str, int], held: int, caplog: pytest.LogCaptureFixture):
    rows = [{"text": f"{name} {at}", "label": name} for name, count in counts.items() for at in range(count)]
    for made in [task(rows, "label", seed=seed) for seed in range(10)]:
        assert set(made.split("train").labels) == set(range(len(counts)))
        assert len(made.splits.get("validation", ())) == held
    assert ("every row of the train split is the only one of a class" in caplog.text) == (not held)
    if not held:
        with pytest.raises(DataError, match=r"task label: every row .* none can be held out"):
            task(rows, "label").held_out()


@pytest.mark.parametrize("stratify", one_in(2, [True, False]))
def test_a_tag_or_one_of_several_labels_keeps_its_last_row(stratify: bool):
    tags = [{"text": ["x", "y"], "label": ["O", "O"]}] * 9 + [{"text": ["Ana", "ran"], "label": ["B-PER", "O"]}]
    lists = [{"text": f"t{at}", "label": ["a"] if at else ["a", "rare"]} for at in range(10)]
    for seed in range(20):
        person = task(tags, "label", "token_classification", seed=seed, stratify=stratify)
        assert any(person.labels.index("B-PER") in row for row in person.split("train").labels)
        rare = task(lists, "label", seed=seed, stratify=stratify)
        assert any(row[rare.labels.index("rare")] for row in rare.split("train").labels)
        assert [len(split) for split in (*person.splits.values(), *rare.splits.values())] == [9, 1, 9, 1]


def test_a_second_cut_is_the_same_for_all_tasks():
    tasks = [task(three_columns(), label).held_out() for label in ("mood", "topic")]
    assert [split.key for split in tasks[0].splits.values()] == [split.key for split in tasks[1].splits.values()]
    assert list(tasks[0].splits) == ["train", "validation", "test"]


def test_columns_of_labels_are_told_from_others():
    columns: dict[str, list[Any]] = {
        "text": ["a", "b", "a", "b"],
        "class": ["x", "y", " x", "y"],
        "id": [1, 2, 3, 4],
        "constant": [1, 1, 1, 1],
        "gaps": ["x", None, "", "y"],
        "list": [["a"], [], ["a", "b"], ["b"]],
        "spans": [[{"start": 0, "label": "A"}], [{"start": 1, "label": "B"}], [], []],
        "object": [{"a": 1}, {"a": 2}, {"a": 1}, {"a": 1}],
        "long": ["x" * 300, "y" * 300] * 2,
    }
    table = Table("some", columns, range(1, 5))
    assert list(label_columns(table, {"text"}, "object.a")) == ["class", "gaps", "list", "spans"]
    assert label_columns(table, {"text"}, "class")["gaps"] == [["x"], [], [], ["y"]]
    assert strata_of(Table("some", {"text": ["a"] * 4}, range(4)), {"text"}, "object.a") is None


class CountedReads(list[Any]):
    reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("own", [0, 60])
def test_fields_of_labels_are_found_in_one_pass_unless_each_row_has_its_own(own: int):
    """Objects such as {"worker17": 1}, with a key per annotator, have no fields of labels, nor have other columns."""
    cells = [{"mood": "ab"[at % 2], "id": at, "long": "x" * 300} for at in range(70)]
    cells = CountedReads([{}, None, *cells, *({f"worker{at}": at % 2} for at in range(own))])
    table = Table(
        "some", {"of": cells, "meta": [{"source": "ab"[at % 2]} for at in range(len(cells))]}, range(len(cells))
    )
    expected = {} if own else {"of.mood": [[], [], *([["a"], ["b"]] * 35)]}
    assert label_columns(table, {"text"}, "of.mood") == expected
    assert label_columns(table, {"text"}, "label") == {}
    assert (
        cells.reads == 3
    )  # one of `_fields`, and one each in which the first cell shows that it is no column of labels


@pytest.mark.parametrize("meta", [{"source": "web"}, {"source": "book", "votes": [1, 0]}])
def test_objects_beside_the_labels_change_nothing(meta: dict[str, Any]):
    rows = [{"text": row["text"], "mood": row["mood"]} for row in three_columns(60)]
    both = [{**row, "meta": meta if at % 3 else {"source": "radio"}} for at, row in enumerate(rows)]
    assert task(both, "mood").split("validation").key == task(rows, "mood").split("validation").key
    both[5]["mood"] = None
    with pytest.raises(DataError, match="row 6 has no label in column 'mood'"):
        task(both, "mood")


def test_rows_with_many_classes_keep_their_shares():
    rng = random.Random(1)
    strata = [tuple({rng.randrange(8), 8 + rng.randrange(3), 11 + (rng.random() < 0.05)}) for _ in range(1000)]
    chosen = choose(strata, 100, seed=0)
    assert len(chosen) == 100
    totals = Counter(label for row in strata for label in row)
    taken = Counter(label for row in chosen for label in strata[row])
    assert all(abs(taken[label] - total / 10) <= 2 for label, total in totals.items())


def test_a_class_that_comes_twice_in_a_row_counts_twice():
    assert len(choose([(0, 0), (1,), (0,), (1, 1)] * 10, 8, 0)) == 8
