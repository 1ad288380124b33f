"""Monitors and cascades: scores of tokens, refusals, and the tokens at which a cascade runs its second reader."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.formulas import stir_
from torch import Tensor

from lamina.errors import ConfigError, UnknownNameError
from lamina.heads.base import HeadConfig
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import EMA, AttentionMean, Calibration, Cascade, LastScore, MeanScore, Monitor, MultiMax
from lamina.monitors.cascade import start_monitors

TAGS = TokenClassification(("O", "B-x", "I-x"), encoder_layers=0)
SEVERAL = SequenceClassification(("a", "b", "c"), pooling="mean", problem_type="multi_label")
NUMBER = SequenceClassification(("value",), pooling="mean", problem_type="regression")
LOGITS = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))


def test_a_token_s_score_is_the_probability_of_its_labels():
    p = LOGITS.double().softmax(-1)
    got = Monitor("r", ("B-x", "I-x")).token_scores(LOGITS, TAGS)
    torch.testing.assert_close(got, (p[..., 1] + p[..., 2]).unsqueeze(-1))
    odds = Monitor("r", ("B-x", "I-x"), scale="log_odds").token_scores(LOGITS, TAGS)
    torch.testing.assert_close(odds.sigmoid(), got)
    apart = Monitor("r", ("B-x", "I-x"), MultiMax()).token_scores(LOGITS, TAGS)
    torch.testing.assert_close(apart, p[..., 1:])


def test_heads_that_weigh_tokens_do_not_group_with_those_that_do_not():
    heads = {pooling: SequenceClassification(("a", "b"), pooling=pooling) for pooling in ("mean", "query")}
    same, *others = (Monitor(name, "a").group(heads) for name in ("mean", "mean", "query"))
    assert [same == other for other in others] == [True, False]


def test_heads_whose_labels_are_in_another_order_do_not_group():
    heads = {name: SequenceClassification(tuple(name), pooling="mean") for name in ("ab", "ba")}
    one, other = (Monitor(name, "a").group(heads) for name in heads)
    assert one != other


def test_a_label_is_flagged_once():
    with pytest.raises(ConfigError, match="monitor: 'r' flags 'a' twice"):
        Monitor("r", ("a", "a"))


def test_independent_labels_and_numbers_have_scores_of_their_own():
    got = Monitor("r", ("a", "c")).token_scores(LOGITS, SEVERAL)
    torch.testing.assert_close(got[..., 0], LOGITS.double()[..., [0, 2]].amax(-1).sigmoid())
    odds = Monitor("r", ("a", "c"), scale="log_odds").token_scores(LOGITS, SEVERAL)
    torch.testing.assert_close(odds.sigmoid(), got)
    assert torch.equal(Monitor("r", "value").token_scores(LOGITS[..., :1], NUMBER), LOGITS[..., :1].double())


@pytest.mark.parametrize(("pooling", "aggregate"), [("mean", MeanScore()), ("query", AttentionMean())])
@torch.no_grad()
def test_the_mean_of_a_reader_of_whole_texts_is_what_it_says_of_the_text(pooling: Any, aggregate: Any):
    head = SequenceClassification(("a", "b"), pooling=pooling).build(8).eval()
    stir_(head)
    features, mask = torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool)
    each = head(features.flatten(0, 1).unsqueeze(1), mask.flatten().unsqueeze(1)).view(2, 6, 2)
    if pooling == "query":
        token_map = head.token_map()
        each = torch.nn.functional.linear(features, token_map.weight, token_map.bias)
    monitor = Monitor("r", "b", aggregate, scale="log_odds")
    running = monitor.aggregate.running(monitor.token_scores(each, head.config), mask)
    for count in range(1, 7):
        whole = head(features[:, :count], mask[:, :count]).double()
        torch.testing.assert_close(running[:, count - 1], whole[:, 1] - whole[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Monitor("r", ()), ConfigError, "monitor: 'r' flags no label"),
        (lambda: Monitor("r", 5), ConfigError, "monitor: flag is 5; it must be a text or a list"),  # type: ignore[arg-type]
        (lambda: Monitor("r", ["a", 5]), ConfigError, r"monitor: flag\[1\] is 5; it must be a text"),  # type: ignore[list-item]
        (lambda: Monitor("r", "a", "ema"), ConfigError, "aggregate is 'ema'; it must be an object"),  # type: ignore[arg-type]
        (lambda: Monitor("r", "a", scale="odds"), UnknownNameError, "unknown scale 'odds'"),  # type: ignore[arg-type]
        (
            lambda: Monitor("r", "B-x", AttentionMean()).check({"r": TAGS}),
            ConfigError,
            r"AttentionMean needs the head of reader 'r' to weigh tokens, which it does not.*pooling='query'",
        ),
        (lambda: Monitor("r", "B-y").check({"r": TAGS}), UnknownNameError, "monitor 'r': unknown label 'B-y'"),
        (lambda: Monitor("r", TAGS.labels).check({"r": TAGS}), ConfigError, "it flags every label of reader 'r'"),
        (lambda: Cascade(5, Monitor("s", "b")), ConfigError, "cascade: first is 5; it must be a Monitor"),  # type: ignore[arg-type]
        (lambda: Cascade(Monitor("r", "a"), Monitor("s", "b")), ConfigError, "cascade 's': its first monitor has no"),
        (
            lambda: Cascade(Monitor("r", "a", threshold=0.5), Monitor("s", "b"), sure=0.5),
            ConfigError,
            "sure is 0.5, and the first monitor's threshold 0.5; sure must be above it",
        ),
    ],
)
def test_monitors_that_do_not_fit_are_refused(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


def test_a_regression_may_have_one_label_only():
    Monitor("r", "value").check({"r": NUMBER})


HEADS: dict[str, HeadConfig] = {"cheap": TAGS, "large": TAGS}


def cascade(sure: float | None = None) -> Cascade:
    cheap = Monitor("cheap", "B-x", LastScore(), threshold=0.3)
    return Cascade(cheap, Monitor("large", "B-x", EMA(2.0), threshold=0.6, name="both"), sure=sure)


@pytest.mark.parametrize("sure", [None, 0.6])
@pytest.mark.parametrize("sizes", [[5], [1] * 5, [2, 3]])
def test_the_second_sees_the_tokens_at_which_the_first_is_unsure(sure: float | None, sizes: list[int]):
    logits = {name: torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(n)) for n, name in enumerate(HEADS)}
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1, :2] = False
    how, asked, parts = cascade(sure), [], []
    ((names, working),), at = start_monitors({"both": how}, HEADS), 0
    assert names == ("both",)
    for size in sizes:

        def ask(name: str, rows: Tensor, at: int = at, size: int = size) -> Tensor:
            asked.append((name, int(rows.sum())))
            return logits[name][rows, at : at + size]

        parts.append(working.add(ask, mask[:, at : at + size]))
        at += size
    (got,) = torch.cat(parts, dim=2)
    first = logits["cheap"].double().softmax(-1)[..., 1]
    certain = mask & (first >= sure) if sure else torch.zeros_like(mask)
    unsure = mask & (first >= 0.3) & ~certain
    second = EMA(2.0).running(how.second.token_scores(logits["large"], TAGS), unsure)
    torch.testing.assert_close(got[unsure], second[unsure])
    assert bool((got[certain] == torch.inf).all())
    assert bool((got[mask & ~unsure & ~certain] == -torch.inf).all())
    if sizes == [1] * 5:
        assert sum(rows for name, rows in asked if name == "large") == int(unsure.sum()) < int(mask.sum())
        assert all(rows for _, rows in asked)


def test_a_score_of_just_what_is_sure_flags_without_the_second():
    cheap, large = (Monitor(name, "value", LastScore(), threshold=0.0) for name in HEADS)
    ((_, working),) = start_monitors({"both": Cascade(cheap, large, sure=2.0)}, dict.fromkeys(HEADS, NUMBER))
    got = working.add(lambda _, rows: torch.tensor([[[1.0], [2.0]]])[rows], torch.ones(1, 2, dtype=torch.bool))
    assert got.tolist() == [[[1.0, torch.inf]]]


def test_a_group_of_monitors_gives_what_each_gives_alone():
    heads: dict[str, HeadConfig] = dict.fromkeys("abc", TAGS)
    logits = {name: torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(n)) for n, name in enumerate("abc")}
    monitors: Any = {name: Monitor(name, "B-x", EMA(2.0)) for name in "abc"}
    monitors |= {"other": Monitor("a", "B-x", EMA(3.0)), "odds": Monitor("b", "B-x", EMA(2.0), scale="log_odds")}
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False
    working = start_monitors(monitors, heads)
    assert [names for names, _ in working] == [("a", "b", "c"), ("other",), ("odds",)]
    for names, together in working:
        got = together.add(lambda name, rows: logits[name][rows], mask)
        for name, values in zip(names, got, strict=True):
            own = monitors[name]
            expected = own.aggregate.running(own.token_scores(logits[own.reader], TAGS), mask)
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-9)


def test_monitors_and_cascades_survive_json():
    facts = Calibration.of([0.1] * 10 + [0.9], [False] * 10 + [True], false_positive_rate=0.1)
    monitor = Monitor("r", ("B-x", "I-x"), MultiMax(), threshold=0.25, scale="log_odds", name="m", calibration=facts)
    assert Monitor.from_dict(json.loads(json.dumps(monitor.to_dict()))) == monitor
    both = Cascade(monitor, replace(monitor, reader="s", aggregate=EMA(3.0)), sure=0.9, name="c")
    assert Cascade.from_dict(json.loads(json.dumps(both.to_dict()))) == both
    assert (both.threshold, both.calibration, both.reader, both.readers) == (0.25, facts, "s", ("r", "s"))


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), -float("inf")])
def test_a_threshold_is_a_finite_number(threshold: float):
    with pytest.raises(ConfigError, match="it must be a finite number"):
        Monitor("mood", "odd", threshold=threshold)


def test_a_threshold_that_no_probability_reaches_is_refused():
    heads = {"mood": SequenceClassification(("plain", "odd"), pooling="mean")}
    with pytest.raises(ConfigError, match="a score is at most 1, so nothing would be flagged"):
        Monitor("mood", "odd", threshold=95.0).check(heads)
    Monitor("mood", "odd", threshold=95.0, scale="log_odds").check(heads)


def test_a_sum_over_labels_may_be_above_1():
    heads = {"mood": SequenceClassification(("rude", "odd", "long"), pooling="mean", problem_type="multi_label")}
    Monitor("mood", ("rude", "odd"), MultiMax(), threshold=1.3).check(heads)
    with pytest.raises(ConfigError, match="a score is at most 2, so nothing would be flagged"):
        Monitor("mood", ("rude", "odd"), MultiMax(), threshold=2.1).check(heads)
