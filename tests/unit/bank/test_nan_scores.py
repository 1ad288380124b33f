"""A score that is NaN is an error, because no threshold would ever be reached again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES
from torch import Tensor

from lamina.bank import Reader, ReaderBank, watching
from lamina.errors import NotFiniteError
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import EMA, Cascade, LastScore, MeanScore, Monitor, MultiMax, RollingMax
from lamina.monitors.cascade import AnyMonitor

TAGS = TokenClassification(("fine", "odd"), encoder_layers=0)
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
FLAG = Monitor("flag", "odd", LastScore(), threshold=0.1)
BROKEN = Monitor("broken", "odd", threshold=0.1)


@pytest.fixture
def bank() -> ReaderBank:
    bank = ReaderBank(FAMILIES["gpt2-CausalLM"].known())
    bank.add("flag", Reader(AdaLayers(dim=8), TAGS))
    bank.add("broken", Reader(AdaLayers(dim=8), TAGS, seed=1))
    torch.nn.init.constant_(bank["broken"].head.output.bias, math.nan)  # pyright: ignore[reportAttributeAccessIssue,reportArgumentType]
    return bank.eval()


def prompt(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(5, 90, (rows, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    ("monitor", "named"),
    [
        *(
            (Monitor("broken", "odd", kind, threshold=0.1), "'broken' of reader 'broken'")
            for kind in (EMA(), MeanScore())
        ),
        (Monitor("broken", "odd", RollingMax(3), scale="log_odds"), "'broken' of reader 'broken'"),
        (Monitor("broken", "odd", MultiMax(), name="sum"), "'sum' of reader 'broken'"),
        (Cascade(BROKEN, FLAG), "'flag' of reader 'broken', 'flag'"),
        (Cascade(BROKEN, FLAG, sure=0.5), "'flag' of reader 'broken', 'flag'"),
        (Cascade(FLAG, BROKEN), "'broken' of reader 'flag', 'broken'"),
    ],
)
def test_a_score_that_is_no_number_ends_the_generation(bank: ReaderBank, monitor: AnyMonitor, named: str):
    message = rf"^bank\.watch: monitor {named} gives NaN for text 0 of the batch, counted from 0; a score is a finite"
    model: Any = bank.model
    with pytest.raises(NotFiniteError, match=message) as raised, bank.watch([monitor]) as watch:
        model.generate(**prompt(), **OPTIONS)
    assert (raised.value.name, raised.value.row) == (str(monitor.name), 0)
    assert watch.steps == []
    with pytest.raises(NotFiniteError, match=message):
        list(bank.stream(model, prompt(), monitors=[monitor], **OPTIONS))
    with pytest.raises(NotFiniteError, match=message.replace("watch", "monitor_scores")):
        bank.monitor_scores(monitor, prompt())
    assert len(list(bank.stream(model, prompt(), monitors=[FLAG], **OPTIONS))) == 6


@pytest.mark.parametrize(("every", "before"), [(1, 2), (2, 2), (4, 0)])
def test_the_text_and_the_token_decide(bank: ReaderBank, monkeypatch: pytest.MonkeyPatch, every: int, before: int):
    """Only tokens that count: not the padding before a prompt, nor a text that has ended."""
    read, given, seen = watching.read_tokens, prompt(3), []
    given["attention_mask"][0, :2] = 0
    bad = {0: (0, 1), 1: (), 2: (7,)}  # row -> positions at which the score is NaN

    def broken(*arguments: Any) -> Mapping[str, Tensor]:
        logits = read(*arguments)
        for row, places in bad.items():
            for place in places:
                if 0 <= (column := place - sum(seen)) < logits["flag"].shape[1]:
                    logits["flag"][row, column] = math.nan
        seen.append(logits["flag"].shape[1])
        return logits

    monkeypatch.setattr(watching, "read_tokens", broken)
    model, steps = bank.model, []
    with (
        pytest.raises(NotFiniteError, match="gives NaN for text 2 of the batch"),
        bank.watch([FLAG], "both", every=every, on_token=steps.append),
    ):
        model.generate(**given, **OPTIONS)  # pyright: ignore[reportCallIssue]
    assert len(steps) == before
    seen.clear()
    bad[2] = ()
    with bank.watch([FLAG], "both", every=every) as watch:
        model.generate(**given, **OPTIONS)  # pyright: ignore[reportCallIssue]
    assert watch.flagged_at["flag"][0] == -3
