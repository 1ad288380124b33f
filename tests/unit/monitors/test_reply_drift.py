from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
import torch

from lamina.errors import ConfigError
from lamina.monitors import DriftSketch, DriftWatcher, Monitor, ReplyFacts, reply_drift


def replies(count: int, seed: int, *, score: float = 0.0, length: float = 1.0, state: float = 0.0) -> list[ReplyFacts]:
    rng = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    return [
        ReplyFacts(
            rng.gauss(score, 1),
            int(length * rng.randint(10, 60)),
            torch.randn(16, generator=numbers) + state,
        )
        for _ in range(count)
    ]


def alarm_after(sketch: DriftSketch, stream: list[ReplyFacts], seed: int = 0) -> tuple[int, str] | None:
    watcher = DriftWatcher(sketch, seed=seed)
    for reply in stream:
        if alarm := watcher.add(reply):
            return alarm.replies, alarm.quantity
    return None


def test_alarms_are_rare_for_replies_of_the_same_kind_even_with_few_in_the_sketch():
    alarms = 0
    for kept in (60, 400):  # each of the 6 runs may raise a false alarm with a probability of 1 %
        sketches = [DriftSketch.of(replies(kept, seed)) for seed in range(3)]
        found = [alarm_after(own, replies(500, 1000 + seed), seed) for seed, own in enumerate(sketches)]
        alarms += sum(alarm is not None for alarm in found)
    assert alarms <= 1


@pytest.mark.parametrize(
    ("moved", "quantity"), [({"score": 1.0}, "score"), ({"length": 2.0}, "length"), ({"state": 0.5}, "state")]
)
def test_what_moves_is_named_within_500_replies(moved: dict[str, float], quantity: str):
    sketch = DriftSketch.of(replies(300, 0))
    same, new = replies(200, 1), replies(500, 2, **moved)
    found = alarm_after(sketch, [*same, *new])
    assert found is not None
    assert 200 < found[0] < 500
    assert found[1].startswith(quantity)


def test_equal_values_raise_no_alarm():
    same = [ReplyFacts(1.0, 20) for _ in range(300)]
    assert alarm_after(DriftSketch.of(same), same + same) is None
    nearly = [ReplyFacts(1.0 - 1e-9, 20) for _ in range(500)]  # saturated: files have five digits of a score
    assert alarm_after(DriftSketch.of(same), nearly) is None


def test_a_sketch_is_small_has_no_text_and_comes_back():
    facts = replies(1000, 0)
    monitor = Monitor("flag", "odd", threshold=0.5, sketch=DriftSketch.of(facts))
    text = json.dumps(monitor.to_dict())
    assert len(text) < 40_000
    back = Monitor.from_dict(json.loads(text))
    assert back == monitor
    stream = replies(200, 1, length=2.0)
    assert monitor.sketch is not None
    assert alarm_after(monitor.sketch, stream) == alarm_after(DriftSketch.of(facts), stream) is not None
    assert "sketch" not in Monitor("flag", "odd").to_dict()


def test_an_alarm_stays_until_the_test_begins_anew():
    watcher = DriftWatcher(DriftSketch.of(replies(300, 0)))
    stream = replies(200, 1, length=3.0)
    alarm = watcher.update([one.score for one in stream], [one.length for one in stream])
    assert alarm is not None
    assert alarm is watcher.alarm is watcher.update(0.0, 20)
    assert watcher.evidence >= 1
    assert alarm.sentence().startswith(f"After {alarm.replies} replies, they differ from those of the calibration: ")
    assert alarm.recent > 2 * alarm.median
    watcher.restart()
    assert (watcher.alarm, watcher.replies) == (None, 0)
    assert 0 < watcher.evidence < 0.01


def test_threads_share_a_test():
    watcher = DriftWatcher(DriftSketch.of(replies(100, 0)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(watcher.add, replies(200, 1)))
    assert watcher.replies == 200


def test_what_cannot_be_tested_is_an_error():
    sketch = DriftSketch.of(replies(10, 0))
    with pytest.raises(ConfigError, match=r"drift: there is no reply"):
        DriftSketch.of([])
    with pytest.raises(ConfigError, match=r"drift: replies\[0\] is 3; it must be a ReplyFacts"):
        DriftSketch.of([3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="drift: sketch is a dict; it must be a DriftSketch"):
        DriftWatcher({})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="monitor: sketch is 3; it must be a DriftSketch or None"):
        Monitor("flag", "odd", sketch=3)  # pyright: ignore[reportArgumentType]
    rule = "it must be above 0 and below 1"
    for rate in (0.0, 1.0):
        with pytest.raises(ConfigError, match=rf"drift: false_alarm_rate is {rate}; {rule}, such as 0\.01"):
            DriftWatcher(sketch, false_alarm_rate=rate)
    with pytest.raises(ConfigError, match=r"drift: there are 2 scores, 1 lengths and 2 rows"):
        DriftWatcher(sketch).update([0.1, 0.2], [3])
    monitor = Monitor("flag", "odd")
    with pytest.raises(ConfigError, match=r"drift: monitor 'flag' has no sketch of the replies"):
        monitor.watch_drift()
    assert replace(monitor, sketch=sketch).watch_drift(false_alarm_rate=0.1).replies == 0


def test_a_run_that_ends_takes_no_alarm_away(monkeypatch: pytest.MonkeyPatch):
    stream = replies(80, 1, length=3.0)
    monkeypatch.setattr(reply_drift, "_RUN", 60)
    watcher = DriftWatcher(DriftSketch.of(replies(300, 0)))
    for one in stream:
        watcher.add(one)
    assert watcher.alarm is not None
    assert watcher.alarm.replies < 60
    assert watcher.replies == 80
    assert watcher.evidence >= 1
    without = DriftWatcher(DriftSketch.of(replies(300, 0)))
    for one in replies(80, 1):
        without.add(one)
    assert without.replies == 20


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_are_several_replies(array: Callable[[Any], Any]):
    sketch = DriftSketch.of([ReplyFacts(float(row), row, torch.ones(2)) for row in range(10)])
    watcher, other = DriftWatcher(sketch), DriftWatcher(sketch)
    watcher.update(array([0.5, 1.5, 2.5]), array([3, 4, 5]), array([[1.0, 2.0]] * 3))
    watcher.update(0.5, 3, array([1.0, 2.0]))
    other.update([0.5, 1.5, 2.5, 0.5], [3, 4, 5, 3], torch.tensor([[1.0, 2.0]] * 4))
    assert watcher.replies == 4
    assert watcher.evidence == other.evidence


@pytest.mark.parametrize(
    ("reply", "name"),
    [(ReplyFacts(float("nan"), 3), "score"), (ReplyFacts(0.5, 3, torch.tensor([1.0, float("nan")])), "state 1")],
)
def test_nan_is_an_error(reply: ReplyFacts, name: str):
    with pytest.raises(ConfigError, match=rf"drift: the {name} of a reply is NaN"):
        DriftSketch.of([reply])
    with pytest.raises(ConfigError, match=rf"drift: the {name} of a reply is NaN"):
        DriftWatcher(DriftSketch.of(replies(10, 0))).add(reply)


@pytest.mark.parametrize("length", [float("nan"), float("inf"), -1])
def test_a_length_is_a_finite_number_of_tokens(length: float):
    with pytest.raises(ConfigError, match=f"drift: length is {length}; it must be at least 0 and finite"):
        ReplyFacts(0.5, length)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("width", [1, 8, 17])
def test_features_of_another_width_than_the_calibrations_are_an_error(width: int):
    monitor = Monitor("flag", "odd", sketch=DriftSketch.of(replies(10, 0)))
    watcher = Monitor.from_dict(json.loads(json.dumps(monitor.to_dict()))).watch_drift()
    message = rf"drift: a reply has {width} features, and the replies of the calibration have 16; both must come"
    with pytest.raises(ConfigError, match=message):
        watcher.update(0.5, 3, torch.ones(width))
    with pytest.raises(ConfigError, match=message):
        watcher.update([0.5, 0.6], [3, 4], np.ones((2, width)))
    assert watcher.replies == 0
    watcher.update(0.5, 3)  # without features, score and length are tested
    fields = monitor.to_dict()
    assert fields["sketch_width"] == 16
    assert set(DriftSketch.of(replies(10, 0)).to_dict()) == {"score", "length", *(f"state {n}" for n in range(1, 7))}
    del fields["sketch_width"]  # as an earlier version saved it
    old = Monitor.from_dict(fields)
    assert old.sketch is not None
    assert old.sketch.width is None
    assert "sketch_width" not in old.to_dict()


@pytest.mark.parametrize("width", [[], 0, "8"])
def test_a_width_that_is_no_number_of_features_is_an_error(width: Any):
    with pytest.raises(ConfigError, match=r"drift: width is .*; it must be "):
        DriftSketch.from_dict({"score": [0.5]}, width=width)


@pytest.mark.parametrize("values", [{"score": 3}, {"score": ["a"]}, {"score": [None]}, {}, {"score": [0.5]}])
def test_values_that_are_no_lists_of_numbers_are_an_error(values: Any):
    from_dict: Any = unwrap(DriftSketch.from_dict.__func__)  # pyright: ignore  without the type checks of the tests
    with pytest.raises(ConfigError, match=r"drift: the values of a sketch cannot be read"):
        from_dict(DriftSketch, values)


@pytest.mark.parametrize(
    ("widths", "message"), [([16, 8], "8 and 16"), ([3, None], "no and 3"), ([2, 1, 2], "1 and 2")]
)
def test_a_sketch_is_of_replies_with_as_many_features(widths: list[int | None], message: str):
    facts = [ReplyFacts(0.5, 3, None if width is None else torch.ones(width)) for width in widths]
    with pytest.raises(
        ConfigError, match=f"drift: the replies have {message} features; all must have as many"
    ) as caught:
        DriftSketch.of(facts)
    hint = " Give features for every reply or for none."
    assert str(caught.value).endswith(hint if None in widths else "of the same reader.")


@pytest.mark.parametrize(
    "features",
    [np.ones((2, 3, 4)), np.array(1.0), np.array(["text", "other"]), [None, 1.0], {"a": 1}, [[1.0, 2.0], [3.0]]],
)
def test_features_that_are_no_row_of_numbers_are_an_error(features: Any):
    watcher = DriftWatcher(DriftSketch.of(replies(10, 0)))
    with pytest.raises(ConfigError, match="drift: "):
        unwrap(DriftWatcher.update)(watcher, [0.5] * 2, [3] * 2, features)  # without the type checks of the tests
    with pytest.raises(ConfigError, match=r"drift: .*features"):
        ReplyFacts(0.5, 3, features)
    assert ReplyFacts(0.5, 3, np.ones(4, dtype=np.float32)).width == 4


@pytest.mark.parametrize("features", [torch.empty(0), np.empty(0, dtype=">f4")])
def test_features_without_a_number_say_what_to_do(features: Any):
    with pytest.raises(
        ConfigError, match=r"features of a reply have the shape \[0\]; .* Leave features out if there are"
    ):
        ReplyFacts(0.5, 3, features)


@pytest.mark.parametrize(
    "features", [np.array([2.0, 1.0])[::-1], np.array([1, 2], dtype=">i4"), np.array([[1.0, 9.0], [2.0, 9.0]])[:, 0]]
)
def test_arrays_of_every_memory_order_are_read(features: np.ndarray):
    assert torch.equal(
        torch.as_tensor(ReplyFacts(0.5, 3, features).features).double(), torch.tensor([1.0, 2.0]).double()
    )
    sketch = DriftSketch.of([ReplyFacts(float(row), row, torch.ones(2)) for row in range(10)])
    watcher, other = DriftWatcher(sketch), DriftWatcher(sketch)
    watcher.update([0.5, 0.6], [3, 4], np.stack([features, features])[::-1])
    other.update([0.5, 0.6], [3, 4], torch.tensor([[1.0, 2.0]] * 2))
    assert watcher.evidence == other.evidence


@pytest.mark.parametrize(("score", "length", "name"), [("a", 5, "score"), (None, 5, "score"), (0.3, [5], "length")])
def test_a_score_or_length_that_is_no_number_is_an_error(score: Any, length: Any, name: str):
    with pytest.raises(ConfigError, match=f"drift: {name} is .*; it must be a number"):
        ReplyFacts(score, length)


def test_numbers_of_arrays_are_numbers():
    assert ReplyFacts(np.float32(0.5), np.int64(3)) == ReplyFacts(0.5, 3)  # pyright: ignore[reportArgumentType]
