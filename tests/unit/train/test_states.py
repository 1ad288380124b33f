"""A run and the cache: what is read is what the model gives, and when the cache is left alone."""

from __future__ import annotations

import logging
import shutil
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.support.training import reader, sentences, tiny_bank, tiny_model, tiny_tokenizer
from transformers import BartConfig, BartModel

from lamina.bank import Reader, ReaderBank
from lamina.data.batches import collate
from lamina.data.cache import StateReader
from lamina.data.encode import encode
from lamina.data.windows import Encoded
from lamina.errors import CacheError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.store import fingerprint
from lamina.train import states as states_module
from lamina.train.states import CacheSettings, States, layers_of, open_states

Usage = namedtuple("Usage", "total used free")
TEXTS = [" ".join(row) for row in sentences(12, seed=3, high=12)]


def bank_of(**readers: Reader) -> ReaderBank:
    return tiny_bank(readers or {"a": reader(), "b": Reader(Mean(layers=(0, 2)), SequenceClassification(2, 2))})


def encoded_of(texts: list[str] = TEXTS, **options: Any) -> Encoded:
    return encode(texts, tiny_tokenizer(), **{"max_length": 32, **options})


def settings_of(folder: Path, **changes: Any) -> CacheSettings:
    return CacheSettings(**{"mode": "on", "dtype": "float32", "folder": folder, "batch_size": 4, **changes})


def prints(bank: ReaderBank) -> dict[str, str]:
    return {stack: fingerprint(bank.model, stack) for stack in bank.stacks}


def states_of(bank: ReaderBank, encoded: Encoded, folder: Path, **changes: Any) -> States:
    settings = settings_of(folder, **changes)
    return States(bank, encoded, layers_of(bank, list(bank)), fingerprints=prints(bank), settings=settings)


def opened(bank: ReaderBank, folder: Path, encoded: Encoded | None = None, **changes: Any) -> States | None:
    given = encoded or encoded_of()
    return open_states(bank, given, list(bank), fingerprints=prints(bank), settings=settings_of(folder, **changes))


def outputs(bank: ReaderBank, encoded: Encoded, rows: list[int], states: States | None) -> dict[str, torch.Tensor]:
    inputs = collate([encoded.features[row] for row in rows], bank.processor)
    with torch.no_grad():
        bank.eval()
        out = bank(**inputs) if states is None else bank.read_states(states.batch(rows), inputs)
    return {name: out[name].logits for name in out}


# What is read


def test_layers_of_all_readers():
    assert layers_of(bank_of(), ["a", "b"]) == {"main": (0, 1, 2, 3)}
    assert layers_of(bank_of(), ["b"]) == {"main": (0, 2)}


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-6), ("float16", 5e-3)])
def test_readers_say_the_same_off_the_cache_as_off_the_model(tmp_path: Path, dtype: str, within: float):
    bank, encoded = bank_of(), encoded_of()
    states = opened(bank, tmp_path, dtype=dtype)
    assert states is not None
    for rows in ([0, 1, 2, 3], [7, 2, 11], [5]):
        plain, cached = outputs(bank, encoded, rows, None), outputs(bank, encoded, rows, states)
        for name in plain:
            assert (plain[name] - cached[name]).abs().max() <= within
            assert not torch.equal(plain[name], torch.zeros_like(plain[name]))


def test_filling_runs_each_window_once_and_a_later_run_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    model = tiny_model()
    model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True)
    bank = tiny_bank({"a": reader()}, model)
    assert bank.stacks
    seen.clear()
    assert opened(bank, tmp_path) is not None
    assert sum(seen) == len(TEXTS)
    seen.clear()
    again = opened(bank, tmp_path)
    assert again is not None
    assert again.ready
    again.batch([0, 1])
    assert seen == []


def test_a_base_in_bfloat16_comes_back_bit_for_bit(tmp_path: Path):
    bank = tiny_bank({"a": reader()}, tiny_model().to(torch.bfloat16))
    states = opened(bank, tmp_path, dtype="float16")
    assert states is not None
    feature = encoded_of().features[3]
    with torch.no_grad():
        hidden = bank.model(**collate([feature], bank.processor), output_hidden_states=True).hidden_states
    for layer in (1, 2, 3):
        assert torch.equal(states.batch([3])["main"][layer], hidden[layer])


def test_mixed_precision_is_kept_apart_and_computed_so(tmp_path: Path):
    bank, encoded = bank_of(), encoded_of()
    states = opened(bank, tmp_path, precision="bfloat16")
    assert states is not None
    assert not states_of(bank, encoded, tmp_path).ready
    inputs = collate([encoded.features[3]], bank.processor)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = bank.model(**inputs, output_hidden_states=True).hidden_states
    exact = bank.model(**inputs, output_hidden_states=True).hidden_states[2]
    error = (states.batch([3])["main"][2].float() - hidden[2].float()).abs().max()
    assert error < (hidden[2].float() - exact).abs().max() / 2


def test_states_recorded_by_hand_in_any_order(tmp_path: Path):
    bank, encoded = bank_of(), encoded_of()
    states = states_of(bank, encoded, tmp_path)
    assert not states.ready
    with pytest.raises(CacheError, match="not written yet"):
        states.batch([0])
    assert states.begin()
    for rows in ([3, 0, 11, 6], [9, 1, 8, 2], [4, 7, 10, 5]):
        inputs = collate([encoded.features[row] for row in rows], bank.processor)
        states.record(rows, bank.record_states(states.layout.layers, inputs))
    assert states.finish()
    assert states.ready
    cached = outputs(bank, encoded, [2, 9], states)
    assert all(
        torch.allclose(one, cached[name], atol=1e-6) for name, one in outputs(bank, encoded, [2, 9], None).items()
    )


def test_what_is_not_whole_is_not_published(tmp_path: Path):
    bank, encoded = bank_of(), encoded_of()
    states = states_of(bank, encoded, tmp_path)
    assert states.begin()
    inputs = collate(encoded.features[:3], bank.processor)
    states.record([0, 1, 2], bank.record_states(states.layout.layers, inputs))
    assert not states.finish()
    assert not states.ready
    assert not states_of(bank, encoded, tmp_path).ready


def test_recording_comes_between_begin_and_finish(tmp_path: Path):
    states = states_of(bank_of(), encoded_of(), tmp_path)
    with pytest.raises(CacheError, match="nothing is being written"):
        states.record([0], {})
    assert states.begin()
    with pytest.raises(CacheError, match="written by this very process"):
        states_of(bank_of(), encoded_of(), tmp_path).begin()
    states.abandon()
    assert states_of(bank_of(), encoded_of(), tmp_path).begin()


def test_an_entry_that_appears_meanwhile_is_taken(tmp_path: Path):
    states = states_of(bank_of(), encoded_of(), tmp_path)
    assert opened(bank_of(), tmp_path) is not None
    assert not states.ready
    assert not states.begin()
    assert states.ready


def test_an_interrupted_filling_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bank = bank_of()
    states = states_of(bank, encoded_of(), tmp_path)
    compute, calls = states._compute, []

    def interrupted(rows: list[int]) -> Any:
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compute(rows)

    monkeypatch.setattr(states, "_compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        states.fill()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


# Keys


def keys(tmp_path: Path, bank: ReaderBank, encoded: Encoded | None = None, **changes: Any) -> str:
    return states_of(bank, encoded or encoded_of(), tmp_path, **changes).key


def test_whatever_changes_the_states_changes_the_key(tmp_path: Path):
    bank = bank_of()
    found = [
        keys(tmp_path, bank),
        keys(tmp_path, bank, encoded_of([*TEXTS[:-1], "a film"])),
        keys(tmp_path, bank, encoded_of(TEXTS[::-1])),
        keys(tmp_path, bank, encoded_of(max_length=6)),
        keys(tmp_path, bank, dtype="float16"),
        keys(tmp_path, bank, precision="bfloat16"),
        keys(tmp_path, bank_of(a=reader())),
    ]
    other = bank_of()
    other.processor.add_tokens(["brandnew"])
    found.append(keys(tmp_path, other))
    other = bank_of()
    other.model.config.hidden_act = "relu"
    found.append(keys(tmp_path, other))
    assert len(set(found)) == len(found)


def test_a_model_that_was_edited_in_place_gets_other_states(tmp_path: Path):
    bank, encoded = bank_of(), encoded_of()
    assert opened(bank, tmp_path) is not None
    with torch.no_grad():
        bank.model.get_parameter("encoder.layer.0.output.dense.weight").add_(0.3)
    assert not states_of(bank, encoded, tmp_path).ready
    states = opened(bank, tmp_path)
    assert states is not None
    plain = outputs(bank, encoded, [0, 5], None)
    assert all(
        torch.allclose(one, plain[name], atol=1e-6) for name, one in outputs(bank, encoded, [0, 5], states).items()
    )


def test_what_does_not_change_the_states_does_not_change_the_key(tmp_path: Path):
    bank = bank_of()
    other = tiny_bank({"c": reader(seed=4), "d": Reader(Mean(layers="all"), SequenceClassification(5, 2))})
    other.model.config.name_or_path = "elsewhere"
    other.model.config.id2label = {0: "x"}
    assert keys(tmp_path, bank) == keys(tmp_path, other)


# When it is left alone


@dataclass(frozen=True)
class Following(Mean):
    """A fusion that needs more of a pass than its states."""

    needs_block_inputs: ClassVar[bool] = True


def test_obstacles():
    bank = bank_of()
    assert States.obstacle(bank, ["a", "b"], encoded_of()) is None
    plain = encoded_of()
    no_mask = replace(plain, features=[{"input_ids": [1, 2]}])
    assert "the inputs are input_ids; only texts" in str(States.obstacle(bank, ["a"], no_mask))
    pixels = replace(plain, features=[{**plain.features[0], "pixel_values": [1]}])
    assert "pixel_values" in str(States.obstacle(bank, ["a"], pixels))
    object.__setattr__(bank["b"].config, "fusion", Following())
    assert States.obstacle(bank, ["a"]) is None
    assert States.obstacle(bank, ["a", "b"]) == "reader 'b' needs more of the model's pass than its states"
    bank["a"].config.head.__dict__["kind"] = "masked_lm"
    assert "reader 'a' has its texts masked anew" in str(States.obstacle(bank, ["a"]))


def test_a_trained_base_and_a_decoder_are_obstacles():
    assert "the model is trained too" in str(States.obstacle(ReaderBank(tiny_model(), train_base=True), []))
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1)
    bart = BartModel(BartConfig(vocab_size=40, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes))
    bank = ReaderBank(bart)
    bank.add("up", Reader(Mean(), SequenceClassification(2, 2)))
    bank.add("down", Reader(Mean(), SequenceClassification(2, 2), stack="decoder"))
    assert States.obstacle(bank, ["up"]) is None
    assert "reader 'down' reads the decoder" in str(States.obstacle(bank, ["up", "down"]))


def test_off_looks_at_nothing(tmp_path: Path):
    assert opened(bank_of(), tmp_path / "cache", mode="off") is None
    assert not (tmp_path / "cache").exists()


def test_on_says_what_is_in_the_way_and_auto_goes_without(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "lamina")
    bank = ReaderBank(tiny_model(), tiny_tokenizer(), train_base=True)
    bank.add("a", reader())
    with pytest.raises(CacheError, match=r"the model is trained too.*cache='auto' or 'off'"):
        opened(bank, tmp_path)
    assert opened(bank, tmp_path, mode="auto") is None
    assert "not used, the model is run for every batch: the model is trained too" in caplog.text


def test_no_room_is_an_error_when_on_and_a_warning_when_auto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 0, 600))
    with pytest.raises(CacheError, match=r"are needed.*are free"):
        opened(bank_of(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert opened(bank_of(), tmp_path, mode="auto") is None
    assert "are needed" in caplog.text


def test_what_is_there_is_read_even_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert opened(bank_of(), tmp_path) is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 0, 0))
    assert opened(bank_of(), tmp_path) is not None


def test_auto_fills_only_what_is_read_again_and_reads_what_is_there(tmp_path: Path):
    assert opened(bank_of(), tmp_path, mode="auto", passes=1) is None
    assert not (tmp_path / ".lock").exists()
    assert opened(bank_of(), tmp_path, mode="on", passes=1) is not None
    assert opened(bank_of(), tmp_path, mode="auto", passes=1) is not None


class Clock:
    """A clock that only moves where it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("computing", "reading", "used"), [(1.0, 0.9, True), (1.0, 1.1, False)])
def test_auto_compares_the_time_of_computing_and_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computing: float, reading: float, used: bool
):
    clock = Clock()
    monkeypatch.setattr(states_module, "time", clock)
    compute, batch = States._compute, StateReader.batch

    def slow_compute(self: States, rows: list[int]) -> Any:
        clock.now += computing
        return compute(self, rows)

    def slow_batch(self: StateReader, rows: list[int], **options: Any) -> Any:
        clock.now += reading
        return batch(self, rows, **options)

    monkeypatch.setattr(States, "_compute", slow_compute)
    monkeypatch.setattr(StateReader, "batch", slow_batch)
    states = opened(bank_of(), tmp_path, mode="auto", batch_size=1)
    assert (states is not None) is used
    assert {path.name for path in tmp_path.iterdir()} == ({".lock", states.key} if states is not None else {".lock"})
    assert opened(bank_of(), tmp_path, mode="on", batch_size=1) is not None  # which asks for no time


def test_auto_with_one_batch_has_nothing_to_compare(tmp_path: Path):
    assert opened(bank_of(), tmp_path, mode="auto", batch_size=100) is not None


def test_unknown_mode(tmp_path: Path):
    with pytest.raises(UnknownNameError, match="unknown mode 'always'"):
        settings_of(tmp_path, mode="always")


def test_progress_is_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    opened(bank_of(), tmp_path, progress=True)
    assert "writing states" in capsys.readouterr().err


def test_all_processes_take_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def another_has_none(answer: torch.Tensor, how: Any) -> None:
        asked.append(int(answer))
        answer.fill_(min(int(answer), 0))

    monkeypatch.setattr(states_module, "world_size", lambda: 2)
    monkeypatch.setattr(states_module.distributed, "all_reduce", another_has_none)
    assert opened(bank_of(), tmp_path) is None
    assert asked == [1]
