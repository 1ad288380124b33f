from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tests.support.stored import logits, tiny_bank, tiny_model

from lamina.bank import ReaderBank
from lamina.errors import StoreError
from lamina.store import load_bank, push_bank, save_bank
from lamina.store.bank import PATTERNS


class Hub:
    """Stands in for the hub: keeps what is uploaded in a folder."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.calls = folder, error, {}

    def __call__(self, **options: Any) -> Hub:
        self.calls["api"] = options
        return self

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        if self.error:
            raise self.error
        self.calls["create"] = options
        address = type("Address", (str,), {"repo_id": repo_id})
        return address(f"https://hub.example/{repo_id}")

    def upload_folder(self, *, folder_path: Path, **options: Any) -> str:
        self.calls["upload"] = options
        self.files = {path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file()}
        self.card = (folder_path / "README.md").read_text(encoding="utf-8")
        return "https://hub.example/commit/1"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", made)
    return made


def test_push_uploads_the_bank_and_gives_its_address(hub: Hub):
    address = push_bank(tiny_bank(), "me/bank", private=True, token="secret", branch="v1")
    assert address == "https://hub.example/commit/1"
    assert hub.calls["api"]["token"] == "secret"
    assert hub.calls["create"] == {"private": True, "exist_ok": True}
    upload = hub.calls["upload"]
    assert (upload["repo_id"], upload["revision"], upload["delete_patterns"]) == (
        "me/bank",
        "v1",
        ["readers/*", "base/*"],
    )
    assert hub.files == {
        "lamina.json",
        "README.md",
        *(f"readers/{name}/{file}" for name in ("mood", "who") for file in ("reader.json", "model.safetensors")),
    }


def test_push_by_the_method_of_the_bank(hub: Hub):
    assert tiny_bank().push_to_hub("me/bank", message="More readers") == "https://hub.example/commit/1"
    assert hub.calls["create"]["private"] is None
    assert hub.calls["upload"]["commit_message"] == "More readers"
    assert 'ReaderBank.from_pretrained("me/bank")' in hub.card


def test_push_refuses_an_unknown_option(hub: Hub):
    with pytest.raises(TypeError, match="unexpected keyword argument 'privat'"):
        push_bank(tiny_bank(), "me/bank", privat=True)
    assert hub.calls == {}


def test_push_that_the_hub_refuses_is_one_sentence(hub: Hub):
    hub.error = ConnectionError("no route\nto the hub")
    with pytest.raises(StoreError, match=r"'me/bank' was not saved \(no route\)\. Check the id, your token"):
        push_bank(tiny_bank(), "me/bank")


def test_a_bank_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_bank(tiny_bank(), tmp_path / "copy")
    asked = SimpleNamespace()

    def download(repo: str, **options: Any) -> str:
        asked.repo, asked.options = repo, options
        return str(tmp_path / "copy")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    bank = ReaderBank.from_pretrained("me/bank", tiny_model(), revision="v1")
    assert (asked.repo, asked.options["revision"]) == ("me/bank", "v1")
    assert torch.equal(logits(bank)["mood"], logits(tiny_bank())["mood"])


def test_only_the_files_of_a_bank_are_fetched():
    wanted = huggingface_hub.utils.filter_repo_objects(
        ["lamina.json", "README.md", "readers/a/reader.json", "readers/a/model.safetensors", "x.bin", "readers/a.py"],
        allow_patterns=PATTERNS,
    )
    assert list(wanted) == ["lamina.json", "README.md", "readers/a/reader.json", "readers/a/model.safetensors"]


def test_offline_is_one_sentence():
    with pytest.raises(StoreError, match="no bank 'no/such'; there is no such folder, and the hub gave none") as caught:
        load_bank("no/such", tiny_model())
    assert isinstance(caught.value.__cause__, LocalEntryNotFoundError)
    assert "\n" not in str(caught.value)
