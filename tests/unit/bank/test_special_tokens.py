"""Special tokens are not scored, live or in one pass, because calibration leaves them out."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from tests.support.causal import VOCABULARY, causal_model, starting_tokenizer
from torch import Tensor

from lamina.bank import Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.heads.token_classification import TokenClassification
from lamina.layers.types import special_ids
from lamina.monitors import EMA, Cascade, DriftSketch, LastScore, MeanScore, Monitor, ReplyFacts, RollingMax
from lamina.monitors.base import Aggregation

TAGS = TokenClassification(("fine", "odd"), encoder_layers=0)
PROMPT = "the film is good"
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
OPTIONS |= {"repetition_penalty": 3.0}


def written(bank: ReaderBank, prompts: Tensor) -> Tensor:
    return cast("Any", bank.model).generate(prompts, attention_mask=torch.ones_like(prompts), **OPTIONS)


@pytest.fixture
def bank() -> ReaderBank:
    """A bank whose tokenizer has a start token, and as special tokens the first and third one of the reply."""
    bank = ReaderBank(causal_model(), starting_tokenizer())
    bank.add("odd", Reader(AdaLayers(dim=8), TAGS))
    bank.add("more", Reader(Mean(), TAGS))
    prompts = prompt(bank)
    reply = written(bank, prompts)[0, prompts.shape[1] :].tolist()
    tokens: list[Any] = [VOCABULARY[reply[0]], VOCABULARY[reply[2]]]
    cast("Any", bank.processor).add_special_tokens({"additional_special_tokens": tokens})
    return bank.eval()


def prompt(bank: ReaderBank) -> Tensor:
    return cast("Any", bank.processor)(PROMPT, return_tensors="pt")["input_ids"]


def counted(bank: ReaderBank, ids: Tensor) -> Tensor:
    return ~torch.isin(ids, special_ids(bank.processor))


@pytest.mark.parametrize("over", ["output", "both"])
@pytest.mark.parametrize("aggregate", [LastScore(), MeanScore(), EMA(3), RollingMax(2)])
def test_special_tokens_repeat_the_score_before_and_raise_no_flag(bank: ReaderBank, over: Any, aggregate: Aggregation):
    monitor, prompts = Monitor("odd", "odd", aggregate), prompt(bank)
    with bank.watch([monitor], over) as watch:
        ids = written(bank, prompts)
    mask, width = counted(bank, ids), prompts.shape[1]
    assert mask[0].tolist()[: width + 3] == [False, True, True, True, True, False, True, False]
    if over == "output":
        mask[:, :width] = False
    expected = bank.monitor_scores(monitor, {"input_ids": ids}, mask)[0, width:-1]
    scores = torch.stack([step.scores["odd"][0] for step in watch.steps[:-1]])
    torch.testing.assert_close(scores, expected, equal_nan=True)
    assert [bool(score.isnan()) for score in scores[:2]] == [over == "output", False]
    assert len(watch.steps) == 8
    assert scores[2] == scores[1]


def test_a_whole_text_is_scored_as_it_is_live(bank: ReaderBank):
    monitor, ids = Monitor("odd", "odd", MeanScore()), written(bank, prompt(bank))
    scores = bank.monitor_scores(monitor, {"input_ids": ids})
    torch.testing.assert_close(
        scores, bank.monitor_scores(monitor, {"input_ids": ids}, counted(bank, ids)), equal_nan=True
    )
    everything = bank.monitor_scores(monitor, {"input_ids": ids}, torch.ones_like(ids))
    assert bool(everything[0, 0].isfinite())  # who gives a mask decides alone
    assert scores[0, -1] != everything[0, -1]


def test_a_special_token_with_the_highest_score_stops_nothing(bank: ReaderBank):
    tokenizer: Any = bank.processor
    prompts = torch.cat([prompt(bank), prompt(bank).flip(1)])
    ids = written(bank, prompts)
    scores = bank.monitor_scores(Monitor("odd", "odd", LastScore()), {"input_ids": ids})[:, :-1].nan_to_num(0)
    monitor = Monitor("odd", "odd", LastScore(), threshold=float(scores.max()) - 1e-5)
    flags, text = list[bool](), ids
    for _ in range(2):
        with bank.watch([monitor], "both") as watch:
            model: Any = bank.model
            stops = {"stopping_criteria": [watch.stopping], "attention_mask": torch.ones_like(prompts)}
            text = model.generate(prompts, **OPTIONS, **stops)
        flags.append(any(place is not None for place in watch.flagged_at["odd"]))
        word = VOCABULARY[int(ids[:, :-1].flatten()[scores.argmax()])]
        tokenizer.add_special_tokens({"additional_special_tokens": [word]}, replace_extra_special_tokens=False)
    assert flags == [True, False]
    assert torch.equal(text, ids)


def test_special_tokens_count_neither_for_a_cascade_nor_for_drift(bank: ReaderBank):
    cheap = Monitor("odd", "odd", LastScore(), threshold=0.0, name="cheap")
    both = Cascade(cheap, Monitor("more", "odd", MeanScore(), name="both"))
    with bank.watch([both]) as watch:
        ids = written(bank, prompt(bank))
    assert watch.asked == {"both": 1.0}
    places = counted(bank, ids)[0, 5:-1]
    scores = [step.score["both"] for step in watch.steps[:-1]]
    assert [score == -math.inf for score in scores] == (~places).tolist()
    sketch = DriftSketch.of([ReplyFacts(score / 99, 3, torch.zeros(8)) for score in range(99)])
    monitor = Monitor("odd", "odd", LastScore(), sketch=sketch)
    watcher, lengths = monitor.watch_drift(), []
    watcher.add = lambda reply: lengths.append(reply.length)  # pyright: ignore[reportAttributeAccessIssue]
    with bank.watch([monitor], drift={"odd": watcher}):
        written(bank, prompt(bank))
    assert lengths == [int(places.sum())]


def test_without_a_tokenizer_every_token_counts_and_the_unknown_token_always_does(bank: ReaderBank):
    ids, monitor = written(bank, prompt(bank)), Monitor("odd", "odd", LastScore())
    assert VOCABULARY.index("[UNK]") not in special_ids(bank.processor).tolist()
    bank.processor = None
    assert special_ids(None).tolist() == []
    assert bool(bank.monitor_scores(monitor, {"input_ids": ids}).isfinite().all())
    embedded = bank.model.get_input_embeddings()(ids)
    bank.processor = starting_tokenizer()  # embeddings have no ids
    assert bool(bank.monitor_scores(monitor, {"inputs_embeds": embedded}).isfinite().all())
