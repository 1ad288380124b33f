"""The choice of the jobs of a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lamina.data.batches import Budget
from lamina.serve.queue import Job, JobQueue, next_batch
from lamina.serve.uploads import Upload

WORK: Any = object()
BUDGET = Budget(1000, 10)


def job(*texts: Any, work: Any = WORK) -> Job:
    return Job(texts, work, truncate=True)


def words(count: int) -> str:
    return "abc " * count


def test_the_oldest_job_runs_with_jobs_of_its_length():
    old, short, alike, long = job(words(20)), job(words(2)), job(words(19)), job(words(90))
    assert next_batch([old, short, alike, long], BUDGET) == [old, alike]
    assert next_batch([short, long], BUDGET) == [short]


def test_a_few_short_texts_run_with_longer_ones_if_another_pass_costs_more():
    waiting = [job(words(20)), job(words(15)), job(words(2))]
    assert next_batch(waiting, Budget(1000, 100)) == waiting


@pytest.mark.parametrize("other", [job(words(5), work=object()), job((words(2), words(2)))])
def test_jobs_of_another_worker_or_of_pairs_wait(other: Job):
    first, second = job(words(5)), job(words(5))
    assert next_batch([first, other, second], BUDGET) == [first, second]


def test_a_job_of_several_texts_is_not_divided():
    mixed, short, long, between = job(words(40), words(2)), job(words(2)), job(words(40)), job(words(20), words(40))
    assert next_batch([mixed, short, long, between], BUDGET) == [mixed, short, long]
    assert next_batch([short, mixed, long], BUDGET) == [short]


def test_a_batch_stays_within_the_budget():
    waiting = [job(words(20)) for _ in range(9)]  # of 22 tokens each
    assert next_batch(waiting, Budget(100, 10)) == waiting[:4]
    large = job(words(200))
    assert next_batch([large, *waiting], Budget(100, 10)) == [large]
    files = [job(Upload("image", b"", 1 << 26)) for _ in range(2)]
    assert next_batch(files, BUDGET) == files[:1]


def queue_of(*jobs: Job) -> JobQueue:
    queue = JobQueue()
    for one in jobs:
        queue.add(one)
    return queue


def test_short_texts_overtake_long_ones():
    long, short, alike = job(words(90)), job(words(2)), job(words(3))
    queue = queue_of(long, short, alike)
    assert queue.tokens == sum(one.size for one in (long, short, alike))
    assert queue.take(BUDGET) == [short, alike]
    assert (queue.take(BUDGET), len(queue), queue.tokens) == ([long], 0, 0)
    little_longer = job(words(45))
    assert queue_of(little_longer, job(words(20))).take(BUDGET) == [little_longer]


@pytest.mark.parametrize("texts", [1, 5])
def test_a_long_request_is_not_starved_by_short_ones(texts: int):
    """A new short text comes before every pass. Those that go first cost little more than the long request itself."""
    long = job(*[words(90)] * texts)
    queue, spent = queue_of(long), 0
    while True:
        queue.add(job(words(2)))
        if long in (batch := queue.take(BUDGET)):
            break
        spent += BUDGET.overhead + sum(one.size for one in batch)
    assert long.size < spent <= long.size + 2 * BUDGET.overhead + job(words(2)).size


def test_a_request_that_is_larger_than_a_piece_is_a_batch_by_itself():
    large, short = job(*[words(40)] * 3), job(words(40))
    assert queue_of(large, short).take(BUDGET, 100) == [large]
    assert queue_of(short, large).take(BUDGET, 100) == [short]
    assert queue_of(large, short).take(BUDGET) == [large, short]


def test_requests_of_equal_length_are_answered_in_their_order():
    jobs = [job(words(20)) for _ in range(9)]
    queue = queue_of(*jobs)
    batches = [queue.take(Budget(50, 10)) for _ in range(5)]
    assert [one for batch in batches for one in batch] == jobs


def test_all_jobs_are_answered_oldest_first():
    rng = random.Random(0)
    waiting = [job(*(words(rng.randint(1, 60)) for _ in range(rng.choice([1, 1, 1, 5])))) for _ in range(300)]
    while waiting:
        batch = next_batch(waiting, BUDGET)
        assert batch[0] is waiting[0]
        assert [one for one in waiting if one in batch] == batch
        waiting = [one for one in waiting if one not in batch]


def test_a_condition_is_asked_once_per_request():
    one, other = job("a"), job("b c")
    queue, answers = queue_of(one, other), iter([True, False])
    assert queue.remove(lambda _: next(answers)) == [one]
    assert (len(queue), queue.tokens) == (1, other.size)
