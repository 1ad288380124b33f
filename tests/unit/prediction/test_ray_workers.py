from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tests.support.stored import TEXTS, tiny_bank

import lamina
from lamina.errors import ConfigError, DataError, LaminaError
from lamina.prediction import ray_workers
from lamina.prediction.ray_workers import in_order


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 27)
    yield
    ray.shutdown()


def half(item: int) -> float:
    return item / 2


def dies(mark: Path, always: bool, item: int) -> int:
    if item == 3 and (always or not mark.exists()):
        mark.touch()
        os._exit(1)
    return item


def test_answers_come_in_order_and_items_are_taken_as_they_are_needed():
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(40):
            taken.append(item)
            yield item

    answers = in_order(half, "local", 2, "test", items())
    assert next(answers) == 0.0
    assert len(taken) <= 5
    assert list(answers) == [item / 2 for item in range(1, 40)]


def test_what_a_worker_that_dies_had_in_hand_is_done_again(tmp_path: Path):
    work = functools.partial(dies, tmp_path / "mark", False)
    assert list(in_order(work, "local", 2, "test", range(8))) == list(range(8))
    assert (tmp_path / "mark").exists()


@pytest.mark.full
def test_a_worker_that_dies_again_and_again_is_told_after_the_answers_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_workers, "RETRIES", 1)
    answers = in_order(functools.partial(dies, tmp_path / "mark", True), "local", 1, "test", range(8))
    assert [next(answers) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LaminaError, match=r"test: a worker of Ray died .* start again to go on"):
        next(answers)


@pytest.mark.full
def test_what_the_items_raise_comes_after_the_answers_before():
    def items() -> Iterator[int]:
        yield 1
        raise DataError("row 2")

    answers = in_order(half, "local", 1, "test", items())
    assert next(answers) == 0.5
    with pytest.raises(DataError, match="row 2"):
        next(answers)


def test_more_workers_than_there_are_cores_are_refused():
    with pytest.raises(ConfigError, match=r"test: 3 workers were asked for; the cluster has 2 cores and 0 GPUs"):
        next(in_order(half, "local", 3, "test", range(2)))


def test_a_file_is_answered_as_in_one_process(tmp_path: Path):
    bank, source = tiny_bank(), tmp_path / "texts.jsonl"
    texts = [f"{TEXTS[at % 3]}" + " film" * (at % 7) for at in range(60)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[30] = json.dumps({"text": 5})
    source.write_text("\n".join(lines))
    options = {"chunk_rows": 8, "skip_bad": True, "progress": False}
    alone = lamina.predict_file(bank, source, tmp_path / "alone.jsonl", **options)
    found = lamina.predict_file(bank, source, tmp_path / "ray.jsonl", ray="local", workers=2, **options)
    assert (found.rows, found.skipped) == (alone.rows, alone.skipped) == (59, 1)
    rows = [[json.loads(line) for line in path.output.read_text().splitlines()] for path in (alone, found)]
    for one, other in zip(*rows, strict=True):
        assert (one["row"], one["text"]) == (other["row"], other["text"])
        mood = one["readers"]["mood"]["probabilities"]
        assert other["readers"]["mood"]["probabilities"] == pytest.approx(mood, abs=1e-5)
    with pytest.raises(DataError, match="row 31"):
        lamina.predict_file(bank, source, tmp_path / "strict.jsonl", ray="local", chunk_rows=8, progress=False)
    again = lamina.predict_file(bank, source, tmp_path / "strict.jsonl", **options)
    assert again.rows == 59


def test_workers_without_ray_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"predict: workers is 2, but ray was not given"):
        lamina.predict_file(tiny_bank(), tmp_path / "a.txt", tmp_path / "b.jsonl", workers=2)
