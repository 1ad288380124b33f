"""A bank on a tiny model that writes, requests to it, and the events of its responses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.support.causal import TEMPLATE, causal_model, causal_tokenizer

from lamina.bank import Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.fusion.pooled_layers import PooledLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import EMA, Monitor

PROMPT = "the film is good"
CHAT = [{"role": "user", "content": PROMPT}]
TAGS = TokenClassification(("fine", "odd"), encoder_layers=0)
READERS = {
    "odd": Reader(AdaLayers(dim=8), TAGS),
    "mood": Reader(Mean(), SequenceClassification(("bad", "good", "so"), pooling="mean")),
    "topic": Reader(PooledLayers(), SequenceClassification(("war", "art"))),
}
MONITORS = (Monitor("odd", "odd", EMA(2), threshold=0.46, name="smooth"), Monitor("mood", "bad", EMA(3), name="quiet"))


def writing_bank(
    template: str | None = TEMPLATE, readers: Sequence[str] = tuple(READERS), monitors: Sequence[Monitor] = MONITORS
) -> ReaderBank:
    """Return a bank with some of `READERS` and with monitors."""
    bank = ReaderBank(causal_model(), causal_tokenizer(template))
    for name in readers:
        bank.add(name, READERS[name])
    for monitor in monitors:
        bank.keep_monitor(monitor)
    return bank.eval()


def events(body: bytes | str) -> list[Any]:
    """Return the events of a stream: each is one line that begins with `data: `, followed by an empty line."""
    text = body.decode() if isinstance(body, bytes) else body
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text
    return [block if block == "[DONE]" else json.loads(block) for block in (b.removeprefix("data: ") for b in blocks)]


class Gate:
    """Stands before the language model head, which predictions do not reach: counts, delays, holds or breaks passes."""

    def __init__(self, bank: ReaderBank) -> None:
        self.passes, self.pause, self.holds_at, self.breaks_at = 0, 0.0, 10**9, 10**9
        self.go, self.error = threading.Event(), RuntimeError("broken")
        bank.model.get_output_embeddings().register_forward_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.passes += 1
        time.sleep(self.pause)
        if self.passes >= self.breaks_at:
            raise self.error
        if self.passes >= self.holds_at:
            assert self.go.wait(20)
