"""Saved models that are moved onto another or removed: as a whole, without touching other files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer

from lamina.errors import StoreError
from lamina.store import load, save
from lamina.store.save_model import discard, move


def same(folder: Path, seed: int) -> bool:
    own, other = load(str(folder))[0].state_dict(), tiny_model(seed).state_dict()
    return all(torch.equal(value, other[name]) for name, value in own.items())


def test_a_model_takes_the_place_of_another(tmp_path: Path):
    save(tiny_model(0), tmp_path / "kept", tiny_tokenizer())
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    save(tiny_model(1), tmp_path / "new", tiny_tokenizer())
    files = {path.name for path in (tmp_path / "new").iterdir()}
    move(tmp_path / "new", tmp_path / "kept")
    assert same(tmp_path / "kept", 1)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == files | {"notes.txt"}
    assert not (tmp_path / "new").exists()


def test_a_model_of_something_else_is_not_replaced(tmp_path: Path):
    save(tiny_model(1), tmp_path / "new")
    tiny_model(0).save_pretrained(tmp_path / "kept")
    with pytest.raises(StoreError, match=r"kept holds config\.json, .* made by something else"):
        move(tmp_path / "new", tmp_path / "kept")
    assert same(tmp_path / "new", 1)
    assert same(tmp_path / "kept", 0)


def test_a_model_that_cannot_be_moved_stays_where_it_was(tmp_path: Path):
    save(tiny_model(1), tmp_path / "new", tiny_tokenizer())
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.json").write_text("{}")
    with pytest.raises(StoreError, match=r"kept holds tokenizer\.json .* made by something else"):
        move(tmp_path / "new", tmp_path / "kept")
    assert same(tmp_path / "new", 1)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("source", ["missing", "empty", "plain", "file"])
def test_a_folder_without_a_saved_model_replaces_none(tmp_path: Path, source: str):
    save(tiny_model(0), tmp_path / "kept", tiny_tokenizer())
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    tiny_model(1).save_pretrained(tmp_path / "plain")
    with pytest.raises(StoreError, match=rf"{source} has no lamina_edits\.json, so no saved model can be moved"):
        move(tmp_path / source, tmp_path / "kept")
    assert same(tmp_path / "kept", 0)
    assert (tmp_path / "plain" / "config.json").is_file()


def test_a_model_is_moved_to_another_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_links(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    save(tiny_model(1), tmp_path / "new", tiny_tokenizer())
    move(tmp_path / "new", tmp_path / "kept")
    assert same(tmp_path / "kept", 1)
    assert not (tmp_path / "new").exists()


def test_a_model_is_removed_and_nothing_beside_it(tmp_path: Path):
    for name in ("alone", "beside"):
        save(tiny_model(0), tmp_path / name, tiny_tokenizer())
    (tmp_path / "beside" / "notes.txt").write_text("mine")
    for name in ("alone", "beside", "nowhere"):
        discard(tmp_path / name)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["beside", "beside/notes.txt"]
    tiny_model(0).save_pretrained(tmp_path / "other")
    with pytest.raises(StoreError, match=r"other holds config\.json, .* made by something else"):
        discard(tmp_path / "other")
