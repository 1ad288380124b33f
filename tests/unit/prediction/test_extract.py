"""States in files are the model's own, a killed run goes on, and a folder of another run is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.recorded import states_of
from tests.support.training import smoothed, tiny_bank, tiny_model, tiny_tokenizer

from lamina.data.read import read_table
from lamina.data.recorded_states import RecordedStates
from lamina.errors import ConfigError, DataError, StoreError, UnknownNameError
from lamina.prediction.extract import _Plan, extract
from lamina.store import fingerprint
from lamina.tasks.task import Task

TEXTS = ["anna is good", "the film was very slow", "ben", "it is not bad and not good", "we"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [f"{text}\t{'yes' if 'good' in text else 'no'}" for text in TEXTS]
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join(["sentence\tlabel", *rows, ""]), encoding="utf-8")
    return path


def write(source: Path, folder: Path, **options: Any) -> Any:
    return extract(tiny_model(), source, folder, processor=tiny_tokenizer(), **options)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("float16", 5e-3)])
def test_the_states_of_all_tokens_are_the_models(source: Path, tmp_path: Path, dtype: Any, within: float):
    manifest = write(source, tmp_path / "states", layers=[1, 3], dtype=dtype, batch_size=2)
    assert manifest.layers == [1, 3]
    assert manifest.depth == 3
    assert manifest.fingerprint == fingerprint(tiny_model(), "main")
    recorded = RecordedStates.open(tmp_path / "states")
    for row, expected in enumerate(states_of(tiny_bank({}), TEXTS, [1, 3])):
        found = torch.stack(list(recorded.batch([row])["main"].values()), dim=2)[0]
        torch.testing.assert_close(found, expected, atol=within, rtol=within)


def test_what_is_no_model_pooling_or_path_is_named(source: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"^extract: got a int, which is not a model"):
        extract(3, source, tmp_path / "states")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownNameError, match=r"^extract: unknown pooling ''"):
        write(source, tmp_path / "states", pooling="")
    with pytest.raises(ConfigError, match=r"^extract: output is 3; it must be a text or a path"):
        write(source, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^extract: max_length is 1; the special tokens alone are 2"):
        write(source, tmp_path / "states", max_length=1)


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_pooled_states_are_one_per_row(source: Path, tmp_path: Path, pooling: Any):
    write(source, tmp_path / "states", layers=[2], dtype="float32", pooling=pooling)
    states = RecordedStates.open(tmp_path / "states").batch(range(len(TEXTS)))["main"][2]
    rows = states_of(tiny_bank({}), TEXTS, [2])
    expected = [{"first": row[0, 0], "last": row[-1, 0], "mean": row[:, 0].mean(0)}[pooling] for row in rows]
    torch.testing.assert_close(states[:, 0], torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_both_texts_of_a_pair_are_recorded(tmp_path: Path):
    path, bank = tmp_path / "pairs.csv", tiny_bank({})
    path.write_text("a,b\nanna is good,very bad\nben,we\n", encoding="utf-8")
    manifest = write(path, tmp_path / "states", layers=[2], dtype="float32", text="a", text_pair="b")
    assert manifest.pairs is True
    found = RecordedStates.open(tmp_path / "states").batch([0])["main"][2]
    pair = dict(tiny_tokenizer()("anna is good", "very bad", return_tensors="pt"))
    torch.testing.assert_close(found, bank.record_states({"main": [2]}, pair)["main"][2], atol=1e-5, rtol=1e-5)


def test_labels_go_with_the_states(source: Path, tmp_path: Path):
    write(source, tmp_path / "states", layers=[2])
    task = Task.from_states("sequence_classification", train=tmp_path / "states", validation=tmp_path / "states")
    assert task.labels == ("no", "yes")
    assert list(task.split("train").labels) == [1, 0, 0, 1, 0]


def test_half_an_emoji_in_another_column_is_kept(tmp_path: Path):
    rows = [
        r'{"text": "ben", "label": "yes", "a\ud83d": "cut \ud83d"}',
        r'{"text": "we", "label": "no", "a\ud83d": ""}',
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(rows), encoding="utf-8")
    write(tmp_path / "x.jsonl", tmp_path / "states", layers=[2])
    assert read_table(tmp_path / "states" / "rows.jsonl").column("a\ud83d")[0] == "cut \ud83d"


def test_a_killed_run_goes_on_with_the_file_that_is_missing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.modules[_Plan.__module__], "_FILE_BYTES", 1)  # one row per file
    whole = write(source, tmp_path / "whole", layers=[2])
    assert len(whole.arrays) == len(TEXTS)
    compute, seen = _Plan._compute, []

    def dies(self: Any, rows: range, batch_size: int) -> Any:
        seen.append(rows.start)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return compute(self, rows, batch_size)

    monkeypatch.setattr(_Plan, "_compute", dies)
    with pytest.raises(KeyboardInterrupt):
        write(source, tmp_path / "states", layers=[2])
    assert not (tmp_path / "states" / "states.json").exists()
    (half := tmp_path / "states" / ".states-00002.npy.123").touch()  # as a process that was killed leaves it
    write(source, tmp_path / "states", layers=[2])
    assert not half.exists()
    assert seen == [0, 1, 2, 2, 3, 4]
    for path in (tmp_path / "whole").glob("*.npy"):
        np.testing.assert_array_equal(np.load(path), np.load(tmp_path / "states" / path.name))


def test_a_folder_of_another_run_is_refused(source: Path, tmp_path: Path):
    write(source, tmp_path / "states", layers=[2])
    with pytest.raises(StoreError, match="states with other layers; a run only continues its own"):
        write(source, tmp_path / "states", layers=[1])


def test_a_folder_of_a_base_with_another_setting_is_refused(source: Path, tmp_path: Path):
    write(source, tmp_path / "states", layers=[2])
    with pytest.raises(StoreError, match="states with other settings; a run only continues its own"):
        extract(smoothed(), source, tmp_path / "states", layers=[2], processor=tiny_tokenizer())


def test_the_lines_of_a_text_file_are_texts(tmp_path: Path):
    (tmp_path / "x.txt").write_text("anna is good\nben\n", encoding="utf-8")
    manifest = write(tmp_path / "x.txt", tmp_path / "states", layers=[2])
    assert (manifest.rows, manifest.pairs) == (2, False)


def test_an_error_of_the_model_is_not_one_of_the_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(_Plan, "_compute", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        write(source, tmp_path / "states", layers=[2])


def test_files_of_another_model_are_not_used(source: Path, tmp_path: Path):
    write(source, tmp_path / "states", layers=[2])
    for name in ("extract.json", "states.json", "lengths.npy", "rows.jsonl"):
        (tmp_path / "states" / name).unlink()
    with pytest.raises(StoreError, match=r"holds states-00000.npy but no extract.json"):
        write(source, tmp_path / "states", layers=[1])


def test_the_model_stays_as_it_was(source: Path, tmp_path: Path):
    model = tiny_model().train()
    first, *others = model.parameters()
    first.requires_grad_(False)
    extract(model, source, tmp_path / "states", processor=tiny_tokenizer(), layers=[0])
    assert all(module.training for module in model.modules())
    assert not first.requires_grad
    assert all(parameter.requires_grad for parameter in others)


def test_a_batch_size_of_0_is_refused_before_anything_is_written(source: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="extract: batch_size is 0; it must be at least 1"):
        write(source, tmp_path / "states", layers=[2], batch_size=0)
    assert not (tmp_path / "states").exists()


def test_a_full_disk_is_told_before_the_model_runs(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.store.files.shutil.disk_usage", lambda _: type("", (), {"free": 10})())
    with pytest.raises(StoreError, match="free"):
        write(source, tmp_path / "states")
    assert not list((tmp_path / "states").glob("states-*"))


def test_states_beyond_float16_are_refused_with_their_row(source: Path, tmp_path: Path):
    model = tiny_model()
    model.embeddings.LayerNorm.weight.data[:] = 1e6  # pyright: ignore
    with pytest.raises(DataError, match=r"row \d \(from 0\) has a state that is NaN or infinite, or beyond float16"):
        extract(model, source, tmp_path / "states", processor=tiny_tokenizer(), layers=[0])
