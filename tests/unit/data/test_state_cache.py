"""A run and the cache: what is read is what the model gives, and when the cache is left alone."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jaxtyping
import pytest
import torch
from tests.support.cached import TEXTS, Rows, cached_bank, cached_rows
from tests.support.cached import opened as opened_for
from tests.support.deaths import forked
from tests.support.training import reader, tiny_model, tiny_tokenizer
from transformers import (
    BartConfig,
    BartModel,
    ViTImageProcessor,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
)

from lamina import utils
from lamina.bank import Reader, ReaderBank
from lamina.data import disk_cache
from lamina.data import state_cache as cache_module
from lamina.data.state_cache import CachedStates, hash_processor, obstacle
from lamina.errors import CacheError
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def on_disk(monkeypatch: pytest.MonkeyPatch):
    """No states are kept in memory, so that mode "auto" uses the disk."""
    monkeypatch.setattr(cache_module, "_SHARE", 0.0)


def opened(bank: ReaderBank, folder: Path, inputs: Rows | None = None, **changes: Any) -> CachedStates | None:
    return opened_for(bank, folder, inputs or cached_rows(), **changes)


def difference(bank: ReaderBank, states: CachedStates | None, rows: list[int], inputs: Rows | None = None) -> float:
    """The largest difference between cached states and those of the model, where there are tokens."""
    assert states is not None
    given, cached = inputs or cached_rows(), states.batch(rows)["main"]
    found = [0.0]
    for at, row in enumerate(rows):
        with torch.no_grad():
            hidden = bank.model.eval()(**given.batch([row]), output_hidden_states=True).hidden_states
        for layer, state in cached.items():
            assert not state[at, given.lengths[row] :].any()
            found.append(float((state[at, : given.lengths[row]].float() - hidden[layer][0].float()).abs().max()))
    return max(found)


def runs(bank: ReaderBank) -> list[int]:
    """How many rows each run of the model sees."""
    assert bank.stacks  # what finds them runs the model too
    seen: list[int] = []
    bank.model.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(len(kwargs["input_ids"])), with_kwargs=True)
    return seen


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != ".locks"}


# Layers that are read


def test_layers_of_all_readers(tmp_path: Path):
    for names, layers in ((["a", "b"], [0, 1, 2, 3]), (["b"], [0, 2])):
        filler = cache_module._Filler(cached_bank(), cached_rows(), names, cache_module.CacheSettings())
        assert filler.layout.layers == {"main": layers}
    states = opened(cached_bank(b=Reader(Mean(layers=(0, 2)), SequenceClassification(2, 2))), tmp_path)
    assert states is not None
    assert set(states.batch([0])["main"]) == {0, 2}


@pytest.mark.parametrize(
    ("dtype", "batch_size", "within"),
    [("float32", 1, 0.0), ("float32", 4, 5e-6), ("float16", 4, 5e-3)],  # rounding differs from batch to batch
)
def test_cached_states_are_those_of_the_model(tmp_path: Path, dtype: str, batch_size: int, within: float):
    bank = cached_bank()
    states = opened(bank, tmp_path, dtype=dtype, batch_size=batch_size)
    for rows in ([0, 1, 2, 3], [7, 2, 11], [5]):
        assert difference(bank, states, rows) <= within


def test_filling_runs_each_row_once_and_a_later_run_none(tmp_path: Path):
    bank = cached_bank()
    seen = runs(bank)
    assert opened(bank, tmp_path) is not None
    assert sum(seen) == len(TEXTS)
    seen.clear()
    states = opened(bank, tmp_path)
    assert states is not None
    assert len(states.batch([0, 1])["main"][0]) == 2
    assert seen == []


def test_a_base_in_bfloat16_comes_back_bit_for_bit(tmp_path: Path):
    bank = cached_bank(tiny_model().to(torch.bfloat16))
    states = opened(bank, tmp_path, dtype="float16")
    assert states is not None
    assert states.batch([3])["main"][2].dtype == torch.bfloat16
    assert difference(bank, states, [3]) == 0


def test_mixed_precision_is_kept_apart_and_computed_so(tmp_path: Path):
    bank, inputs = cached_bank(), cached_rows()
    states = opened(bank, tmp_path, precision="bfloat16")
    assert opened(bank, tmp_path) is not None
    assert len(contents(tmp_path)) == 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden = bank.model(**inputs.batch([3]), output_hidden_states=True).hidden_states
    exact = bank.model(**inputs.batch([3]), output_hidden_states=True).hidden_states[2]
    assert states is not None
    error = (states.batch([3])["main"][2].float() - hidden[2].float()).abs().max()
    assert error < (hidden[2].float() - exact).abs().max() / 2


def test_clearing_does_not_disturb_who_reads(tmp_path: Path):
    bank = cached_bank()
    states = opened(bank, tmp_path)
    disk_cache.clear(tmp_path, "all")
    assert difference(bank, states, [0, 4]) == 0


def test_an_interrupted_filling_leaves_nothing(tmp_path: Path):
    bank = cached_bank()
    seen = runs(bank)

    def interrupt(*_: object) -> None:
        if len(seen) == 2:
            raise KeyboardInterrupt

    bank.model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(bank, tmp_path)
    assert contents(tmp_path) == set()


def test_states_that_half_precision_cannot_hold_leave_nothing(tmp_path: Path):
    model = tiny_model()
    with torch.no_grad():
        model.get_parameter("encoder.layer.0.output.LayerNorm.weight").mul_(1e6)
    with pytest.raises(CacheError, match="beyond the range of float16"):
        opened(cached_bank(model), tmp_path, dtype="float16")
    assert contents(tmp_path) == set()
    assert opened(cached_bank(model), tmp_path) is not None


# Keys


def test_whatever_changes_the_states_makes_another_entry(tmp_path: Path):
    bank = cached_bank()
    other, normed, retokenized = tiny_model(), tiny_model(), cached_bank()
    normed.encoder.layer[0].output.LayerNorm.eps = 0.5
    with torch.no_grad():
        other.get_parameter("encoder.layer.0.output.dense.weight").add_(0.3)
    retrained = cached_bank(other)
    retokenized.processor.add_tokens(["brandnew"])
    found = [
        opened(bank, tmp_path),
        opened(bank, tmp_path, cached_rows([*TEXTS[:-1], "a film"])),
        opened(bank, tmp_path, cached_rows(TEXTS[::-1])),
        opened(bank, tmp_path, cached_rows(max_length=6, truncation=True)),
        opened(bank, tmp_path, dtype="float16"),
        opened(bank, tmp_path, precision="bfloat16"),
        opened(cached_bank(a=reader()), tmp_path),
        opened(cached_bank(b=Reader(Mean(layers=(0, 2)), SequenceClassification(2, 2))), tmp_path),
        opened(retrained, tmp_path),
        opened(retokenized, tmp_path),
        opened(cached_bank(normed), tmp_path),
    ]
    assert difference(retrained, found[8], [0, 5]) == 0
    assert len({states.folder for states in found if states is not None}) == len(found)


def test_another_format_makes_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = opened(cached_bank(), tmp_path)
    monkeypatch.setattr(cache_module, "FORMAT", 99)
    monkeypatch.setattr(disk_cache, "FORMAT", 99)
    second = opened(cached_bank(), tmp_path)
    assert first is not None
    assert second is not None
    assert first.folder != second.folder


def test_what_does_not_change_the_states_finds_the_same_entry(tmp_path: Path):
    other = cached_bank(c=reader(seed=4), d=Reader(Mean(layers="all"), SequenceClassification(5, 2)))
    other.model.config.name_or_path = "elsewhere"
    other.model.config.id2label = {0: "x"}
    assert opened(cached_bank(), tmp_path) is not None
    assert opened(other, tmp_path, batch_size=5) is not None
    assert len(contents(tmp_path)) == 1


def test_tokenizers_differ_by_class_and_vocabulary_not_by_the_last_call(byte_level: Any, metaspace: Any):
    before = hash_processor(byte_level)
    byte_level("the cat", truncation=True, max_length=1)
    assert hash_processor(byte_level) == before != hash_processor(metaspace)


def test_a_slow_tokenizer_has_a_hash_too():
    class Slow:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: at for at, word in enumerate(self.words)}

    assert hash_processor(Slow("a", "b")) == hash_processor(Slow("a", "b")) != hash_processor(Slow("b", "a"))


def lowering(folder: Path, *, lowers: bool) -> Wav2Vec2CTCTokenizer:
    folder.mkdir()
    words = ["<pad>", "<s>", "</s>", "<unk>", "|", "a"]
    (folder / "vocab.json").write_text(json.dumps({word: at for at, word in enumerate(words)}))
    return Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), do_lower_case=lowers)


def test_slow_tokenizers_differ_by_their_settings_not_by_their_folder(tmp_path: Path):
    known, moved = (lowering(tmp_path / name, lowers=True) for name in "ab")
    assert hash_processor(known) == hash_processor(moved) != hash_processor(lowering(tmp_path / "c", lowers=False))
    known.save_pretrained(tmp_path / "saved")
    assert hash_processor(Wav2Vec2CTCTokenizer.from_pretrained(tmp_path / "saved")) == hash_processor(known)


@pytest.mark.parametrize(
    ("part", "make"),
    [
        ("feature_extractor", lambda on: Wav2Vec2FeatureExtractor(do_normalize=on)),
        ("image_processor", lambda on: ViTImageProcessor(do_rescale=on)),
    ],
)
def test_joint_processors_differ_by_each_part(byte_level: Any, part: str, make: Callable[[bool], object]):
    first, same, other = (SimpleNamespace(tokenizer=byte_level, **{part: make(on)}) for on in (True, True, False))
    assert hash_processor(first) == hash_processor(same) != hash_processor(other)


@pytest.mark.parametrize("damage", ["short", "other layers", "other version"])
def test_an_entry_that_cannot_be_used_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str):
    bank = cached_bank()
    first = opened(bank, tmp_path)
    assert first is not None
    index = first.folder / disk_cache.INDEX
    facts = json.loads(index.read_text())
    if damage == "short":
        (first.folder / "main.bin").write_bytes(b"")
    else:
        changed = {"layers": {"main": [1]}} if damage == "other layers" else {"format": 0}
        index.write_text(json.dumps({**facts, **changed}))
    states = opened(bank, tmp_path)
    assert difference(bank, states, [0, 5]) == 0
    assert "is not used" in caplog.text
    assert json.loads(index.read_text())["layers"] == facts["layers"]


def test_entries_of_another_version_are_spoken_of_when_nothing_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / ("b" * 32)).mkdir()
    (tmp_path / ("b" * 32) / disk_cache.INDEX).write_text('{"format": 0}')
    assert opened(cached_bank(), tmp_path) is not None
    assert f"1 entries in {tmp_path} were written by another version" in caplog.text


def test_an_entry_that_vanishes_while_it_is_opened_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bank = cached_bank()
    first = opened(bank, tmp_path)
    assert first is not None
    entry = disk_cache.read_entry(first.folder)
    shutil.rmtree(first.folder)
    answers = [entry]
    monkeypatch.setattr(
        cache_module, "read_entry", lambda *given: answers.pop() if answers else disk_cache.read_entry(*given)
    )
    assert difference(bank, opened(bank, tmp_path), [0, 5]) == 0


def test_an_entry_that_is_cleared_as_soon_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_module, "read_entry", lambda *_: None)
    with pytest.raises(CacheError, match="is gone; it was removed as soon as it was written"):
        opened(cached_bank(), tmp_path)
    assert opened(cached_bank(), tmp_path, mode="auto") is None


# When it is left alone


def test_obstacles():
    bank = cached_bank()
    assert obstacle(bank, ["a", "b"], cached_rows()) is None
    assert obstacle(bank, ["a"], Rows([[1]], uncacheable="these are images")) == "these are images"
    bank.add("c", Reader(ExtraLayers(), SequenceClassification(2, 2)))
    assert obstacle(bank, ["a"]) is None
    assert obstacle(bank, ["a", "c"]) == "reader 'c' needs more of the model's pass than its states"


def test_a_trained_base_and_a_decoder_are_obstacles():
    assert "the model is trained too" in str(obstacle(ReaderBank(tiny_model(), train_base=True), []))
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 1)
    bart = BartModel(BartConfig(vocab_size=40, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes))
    bank = ReaderBank(bart)
    bank.add("up", Reader(Mean(), SequenceClassification(2, 2)))
    bank.add("down", Reader(Mean(), SequenceClassification(2, 2), stack="decoder"))
    assert obstacle(bank, ["up"]) is None
    assert "reader 'down' reads the decoder" in str(obstacle(bank, ["up", "down"]))


def test_off_looks_at_nothing(tmp_path: Path):
    assert opened(cached_bank(), tmp_path / "cache", mode="off") is None
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
        opened(cached_bank(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert opened(cached_bank(), tmp_path, mode="auto") is None
    assert "are needed" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_when_on_and_a_warning_when_auto(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"file/cache cannot be written \(Not a directory\)"):
        opened(cached_bank(), tmp_path / "file" / "cache")
    assert opened(cached_bank(), tmp_path / "file" / "cache", mode="auto") is None
    assert "cannot be written" in caplog.text


def test_what_is_there_is_read_even_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert opened(cached_bank(), tmp_path) is not None
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10_000, 0, 0))
    assert opened(cached_bank(), tmp_path) is not None


def test_auto_caches_nothing_that_is_read_only_once(tmp_path: Path):
    assert opened(cached_bank(), tmp_path, mode="auto", passes=1) is None
    assert list(tmp_path.iterdir()) == []
    assert opened(cached_bank(), tmp_path, mode="on", passes=1) is not None
    seen = runs(bank := cached_bank())
    assert opened(bank, tmp_path, mode="auto") is not None
    assert seen == []  # the states were on disk


def test_auto_keeps_states_in_memory_while_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bank, size = cached_bank(), sum(cached_rows().lengths) * 4 * cached_bank().stacks["main"].width * 4
    seen = runs(bank)
    free = namedtuple("Memory", "available")
    monkeypatch.setattr(cache_module, "_SHARE", 0.25)
    monkeypatch.setattr(cache_module.psutil, "virtual_memory", lambda: free(4 * size))
    states = opened(bank, tmp_path, mode="auto", dtype="float16")
    assert states is not None
    assert states.folder is None
    assert list(tmp_path.iterdir()) == []
    for rows in ([0, 1, 2, 3], [7, 2, 11]):
        assert difference(bank, states, rows) == 0
    assert sum(seen[: len(TEXTS)]) == len(TEXTS)
    monkeypatch.setattr(cache_module.psutil, "virtual_memory", lambda: free(4 * size - 4))
    states = opened(bank, tmp_path, mode="auto")
    assert states is not None
    assert states.folder is not None


@pytest.mark.parametrize(("local", "share"), [("2", 2), ("8", 8), ("", 16), (None, 16)])
def test_only_the_processes_of_this_machine_share_its_memory(
    monkeypatch: pytest.MonkeyPatch, local: str | None, share: int
):
    bank, rows = cached_bank(), cached_rows()
    filler = cache_module._Filler(bank, rows, list(bank), cache_module.CacheSettings())
    size = 2 * filler.layout.size  # as float32
    monkeypatch.setattr(cache_module, "_SHARE", 0.25)
    monkeypatch.setattr(utils, "world_size", lambda: 16)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    free = namedtuple("Memory", "available")
    for available, fits in ((4 * share * size, True), (4 * share * size - 4, False)):
        monkeypatch.setattr(cache_module.psutil, "virtual_memory", lambda available=available: free(available))
        assert filler.fits_in_memory() is fits


class Clock:
    """A clock that only moves where it is told to."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("computing", "reading", "used"), [(1.0, 0.9, True), (1.0, 1.1, False)])
def test_auto_compares_the_time_of_computing_and_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computing: float, reading: float, used: bool
):
    clock, bank, batch = Clock(), cached_bank(), CachedStates.batch
    assert bank.stacks
    monkeypatch.setattr(cache_module, "time", clock)
    bank.model.register_forward_pre_hook(lambda *_: setattr(clock, "now", clock.now + computing))

    def slow_batch(self: CachedStates, rows: list[int]) -> Any:
        clock.now += reading
        return batch(self, rows)

    monkeypatch.setattr(CachedStates, "batch", slow_batch)
    states = opened(bank, tmp_path, mode="auto")
    assert (states is not None) is used
    assert contents(tmp_path) == ({states.folder.name} if states is not None else set())
    assert opened(bank, tmp_path, mode="on") is not None  # which asks for no time


def test_auto_with_one_batch_has_nothing_to_compare(tmp_path: Path):
    assert opened(cached_bank(), tmp_path, mode="auto", batch_size=100) is not None


def test_progress_is_shown_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    opened(cached_bank(), tmp_path, progress=True)
    assert "writing states" in capsys.readouterr().err


def test_all_processes_take_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def another_has_none(answer: torch.Tensor, how: Any) -> None:
        asked.append(int(answer))
        answer.fill_(min(int(answer), 0))

    monkeypatch.setattr(utils, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", another_has_none)
    assert opened(cached_bank(), tmp_path) is None
    # in one batch, so that no times are compared
    assert opened(cached_bank(), tmp_path, cached_rows(TEXTS[:3]), mode="auto", batch_size=100) is None
    assert asked == [1, 0, 1]  # on disk; then whether memory has room, which it has not, and on disk


# Systems without POSIX


def train_without_posix(folder: Path) -> None:
    """Import Lamina anew where these parts of Python are missing, and train with a cache on disk and in memory."""
    jaxtyping.config.update("jaxtyping_disable", True)  # it remembers the classes of before
    for name in [name for name in sys.modules if f"{name}.".startswith(("lamina.", "tests."))]:
        del sys.modules[name]
    sys.modules["fcntl"] = None  # type: ignore[assignment]
    for name in ("fdatasync", "posix_fadvise", "posix_fallocate", "pwrite", "pread"):
        if hasattr(os, name):
            delattr(os, name)
    from tests.support.training import reader, tiny_bank, train, yes_no

    import lamina.cli  # noqa: F401

    task = yes_no(train=12, validation=8)
    for cache in ("on", "auto"):
        result = train(tiny_bank({"one": reader(task)}), {"one": task}, epochs=2, cache=cache, cache_dir=str(folder))
        assert [*result.best] == ["one"]


@pytest.mark.long
def test_training_with_a_cache_works_without_posix(tmp_path: Path):
    ran = forked(lambda: train_without_posix(tmp_path))
    assert ran.code == 0, ran.err

    assert all(entry.problem is None for entry in disk_cache.entries(tmp_path))
    assert len(disk_cache.entries(tmp_path)) == 2
