"""A server that answers with ONNX Runtime, and its readers while they change."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.support.stored import TEXTS, tiny_bank

from lamina.bank import ReaderBank
from lamina.editing.record import location_of
from lamina.errors import ConfigError, StoreError
from lamina.prediction.backends import ChosenEngine
from lamina.prediction.predict import predict
from lamina.serve import served_engine
from lamina.serve.reload import Reloader
from lamina.serve.scheduler import Scheduler
from lamina.serve.served_engine import ServedEngine
from lamina.serve.settings import Settings
from lamina.store.onnx_engine import OnnxEngine


class FakeEngine:
    """Answers for the readers of a bank as PyTorch does, and counts its batches."""

    class Facts:
        int8 = None

    facts = Facts()

    def __init__(self, bank: ReaderBank) -> None:
        self.names, self.batches = frozenset(bank), 0
        self._modules = {name: bank[name] for name in bank}

    def answers_for(self, bank: ReaderBank, names: Any) -> bool:
        return all(self._modules.get(name) is bank[name] for name in names)

    def obstacle(self, bank: ReaderBank, batch: Any, names: Any) -> str | None:
        return None if self.answers_for(bank, names) else "a reader is new"

    def run(self, bank: ReaderBank, batch: Any, names: Any) -> Any:
        if self.obstacle(bank, batch, names):
            return None
        self.batches += 1
        return {name: bank(**batch, readers=[name])[name].logits for name in names}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Scheduler, Reloader, FakeEngine]:
    bank = tiny_bank()
    fake: Any = FakeEngine(bank)
    monkeypatch.setattr(served_engine, "engine_of", lambda _bank, backend: ChosenEngine(fake, strict=True))
    bank.rename("mood", "tone")
    bank.save_pretrained(tmp_path / "tones")
    bank.rename("tone", "mood")
    scheduler = Scheduler(bank.eval(), Settings.of(backend="onnx"))
    return scheduler, Reloader(scheduler, None, tmp_path), fake


def test_pytorch_answers_for_new_readers_until_their_graph_is_there(
    served: tuple[Scheduler, Reloader, FakeEngine], monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    scheduler, live, first = served
    ready, opened = Event(), list[FakeEngine]()

    def late(_self: ServedEngine, bank: ReaderBank) -> Any:
        assert ready.wait(20)
        opened.append(FakeEngine(bank))
        return opened[-1]

    monkeypatch.setattr(ServedEngine, "_opened", late)
    expected = predict(scheduler.bank, TEXTS, backend="torch")
    assert scheduler.ask(TEXTS).result(20) == expected
    assert first.batches > 0
    with caplog.at_level(logging.WARNING):
        live.put("tones", ["tone"])
        before = first.batches
        answers = scheduler.ask(TEXTS).result(20)
    assert [row["tone"] for row in answers] == [row["mood"] for row in expected]
    assert first.batches == before
    assert "PyTorch answers some requests: a reader is new" in caplog.text
    scheduler.ask(TEXTS, ["mood"]).result(20)
    assert first.batches > before  # the graph still answers for the readers that stayed
    ready.set()
    thread = scheduler.engine._thread
    assert thread is None or thread.join(20) is None
    assert scheduler.ask(TEXTS).result(20) == answers
    assert opened[-1].batches > 0
    live.remove("tone")  # needs no other graph
    before = opened[-1].batches
    assert scheduler.ask(TEXTS).result(20) == expected
    assert opened[-1].batches > before
    assert len(opened) == 1


@pytest.mark.parametrize("error", [StoreError("serve: the export failed (odd)."), OSError("odd"), RuntimeError("odd")])
def test_an_export_that_fails_leaves_pytorch(
    served: tuple[Scheduler, Reloader, FakeEngine], monkeypatch: pytest.MonkeyPatch, caplog: Any, error: Exception
):
    def fail(_self: ServedEngine, _bank: ReaderBank) -> OnnxEngine:
        raise error

    monkeypatch.setattr(ServedEngine, "_opened", fail)
    scheduler, live, _ = served
    with caplog.at_level(logging.WARNING):
        live.put("tones", ["tone"])
        thread = scheduler.engine._thread
        assert thread is None or thread.join(20) is None
    assert "PyTorch answers for new readers: serve: the export failed (odd)" in caplog.text
    assert ("Traceback" in caplog.text) == (not isinstance(error, StoreError))
    assert scheduler.engine._thread is None  # so that the next change is exported
    assert scheduler.ask(TEXTS, ["tone"]).result(20) == [
        {"tone": row["mood"]} for row in predict(scheduler.bank, TEXTS, readers=["mood"])
    ]


def test_the_backend_int8_without_an_export_is_refused():
    with pytest.raises(ConfigError, match="has no int8 export"):
        Scheduler(tiny_bank(), Settings.of(backend="int8"))
    with pytest.raises(ConfigError, match="backend is 'onx'"):
        Settings.of(backend="onx")


@pytest.mark.full
def test_another_process_exports_a_changed_bank():
    bank = tiny_bank().eval()
    before = location_of(bank.model)
    engine = ServedEngine("torch", bank)._opened(bank)
    assert engine.answers_for(bank, bank)
    assert location_of(bank.model) == before
