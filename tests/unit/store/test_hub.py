"""Banks on the hub: huggingface_hub's own client against a server on this machine that speaks the hub's API."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tests.support.hub import Hub, Repo, hub
from tests.support.portions import one_in
from tests.support.stored import logits, save_base, tiny_bank, tiny_model, tiny_tokenizer

import lamina
from lamina.bank import Reader, ReaderBank
from lamina.editing.record import edits, location_of
from lamina.errors import BaseMismatchError, StoreError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.store import load, load_bank, push_bank
from lamina.store.manifest import RECORD
from lamina.store.replay import read_record

TOKENIZER = ("processor/tokenizer.json", "processor/tokenizer_config.json")
FILES = {f"readers/{name}/{file}" for name in ("mood", "who") for file in ("reader.json", "model.safetensors")}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub(monkeypatch, tmp_path / "cache") as running:
        yield running


def signed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")


def moved() -> ReaderBank:
    bank = tiny_bank()
    bank["mood"].head.output.bias.data += 1
    return bank


def test_what_is_pushed_comes_back(server: Hub):
    address = tiny_bank().push_to_hub("me/bank", message="More readers")
    assert address.startswith(f"{server.endpoint}/me/bank/commit/")
    assert server.paths("me/bank") == {".gitattributes", "lamina.json", "README.md", *FILES, *TOKENIZER}
    assert len(server.large) == 2
    bank = ReaderBank.from_pretrained("me/bank", tiny_model())
    for name, said in logits(tiny_bank()).items():
        assert torch.equal(logits(bank)[name], said)


@pytest.mark.long
def test_its_base_is_found_by_what_the_manifest_says(server: Hub, tmp_path: Path):
    save_base(tmp_path / "base")
    push_bank(tiny_bank(load(tmp_path / "base")[0]), "me/bank")
    assert torch.equal(logits(load_bank("me/bank"))["mood"], logits(tiny_bank())["mood"])


def test_scores_are_metadata_by_reader(server: Hub):
    """Each metric names its reader, also where two have one task; what is no number is left out."""
    bank = tiny_bank()
    bank.add("again", Reader(Mean(), SequenceClassification(("bad", "good"), attention_heads=4)))
    bank["mood"].info = {"task": "sst2", "metric": "mcc", "scores": {"accuracy": 0.75, "mcc": 0.5}}
    bank["who"].info = {"task": "conll", "metric": "f1", "scores": {"f1": 0.25}}
    bank["again"].info = {"task": "sst2", "metric": "accuracy", "scores": {"accuracy": 0.5, "mcc": float("nan")}}
    push_bank(bank, "me/bank")
    card = ModelCard(server.read("me/bank", "README.md").decode())
    assert card.data.tags == ["lamina", "frozen-base", "text-classification", "token-classification"]
    index = card.data.to_dict()["model-index"]
    assert [own["name"] for own in index] == ["me/bank"]
    films, names = index[0]["results"]
    assert films["task"]["type"] == "text-classification"
    assert films["dataset"] == {"name": "sst2", "type": "sst2", "split": "validation"}
    assert [(own["type"], own["name"], own["value"]) for own in films["metrics"]] == [
        ("matthews_correlation", "mcc of mood", 0.5),
        ("accuracy", "accuracy of mood", 0.75),
        ("accuracy", "accuracy of again", 0.5),
    ]
    assert names["task"] == {"type": "token-classification", "name": "conll"}
    assert names["metrics"] == [{"type": "f1", "value": 0.25, "name": "f1 of who"}]
    assert 'ReaderBank.from_pretrained("me/bank")' in card.content
    for name in bank:
        bank[name].info = {}
    assert "model" not in str(bank.generate_model_card("me/bank")).split("---")[1]


@pytest.mark.long
def test_scores_are_those_of_the_training(server: Hub):
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    bank.add("mood", Reader(Mean(), SequenceClassification(("bad", "good"), attention_heads=4)))
    rows = [{"text": "bad film", "label": "bad"}, {"text": "good film", "label": "good"}] * 4
    given = {"train": rows, "validation": rows}
    task = lamina.Task.from_dataset("sequence_classification", given, text="text", label="label", name="films")
    best = lamina.fit(bank, {"mood": task}, epochs=1, batch_size=4, progress=False).best["mood"]
    push_bank(bank, "me/bank")
    result, *_ = ModelCard(server.read("me/bank", "README.md").decode()).data.eval_results
    said = (result.dataset_name, result.metric_name, result.metric_value)
    assert said == ("films", f"{task.metric} of mood", best[task.metric])


def test_a_second_push_replaces_the_readers_and_leaves_the_rest(server: Hub):
    push_bank(tiny_bank(), "me/bank")
    files = server.repos["me/bank"].commits[server.repos["me/bank"].refs["main"]]
    files["notes.txt"] = b"mine"
    bank = moved()
    bank.remove("who")
    push_bank(bank, "me/bank")
    assert server.paths("me/bank") == {
        ".gitattributes",
        "notes.txt",
        "lamina.json",
        "README.md",
        *(name for name in FILES if "mood" in name),
        *TOKENIZER,
    }
    assert torch.equal(logits(load_bank("me/bank", tiny_model()))["mood"], logits(moved())["mood"])


@pytest.mark.long
def test_a_second_push_takes_away_the_base_of_the_first(server: Hub):
    bank = ReaderBank(tiny_model(), train_base=True)
    bank.add("own", Reader(Mean(), SequenceClassification(("a", "b"), attention_heads=4)))
    push_bank(bank.eval(), "me/bank")
    assert any(path.startswith("base/") for path in server.paths("me/bank"))
    push_bank(tiny_bank(), "me/bank")
    assert server.paths("me/bank") == {".gitattributes", "lamina.json", "README.md", *FILES, *TOKENIZER}


def test_branches_tags_and_commits_are_revisions(server: Hub):
    push_bank(tiny_bank(), "me/bank")
    first = server.repos["me/bank"].refs["main"]
    HfApi().create_tag("me/bank", tag="v1")
    push_bank(moved(), "me/bank", branch="next")
    push_bank(moved(), "me/bank", branch="next")
    assert server.repos["me/bank"].refs["main"] == server.repos["me/bank"].refs["v1"] == first
    before, after = logits(tiny_bank())["mood"], logits(moved())["mood"]
    for revision, said in ((None, before), ("v1", before), (first, before), ("next", after)):
        bank = ReaderBank.from_pretrained("me/bank", tiny_model(), revision=revision)
        assert torch.equal(logits(bank)["mood"], said)


@pytest.mark.long
def test_a_pull_request_leaves_the_branch(server: Hub):
    push_bank(tiny_bank(), "me/bank")
    push_bank(moved(), "me/bank", create_pr=True)
    assert torch.equal(logits(load_bank("me/bank", tiny_model()))["mood"], logits(tiny_bank())["mood"])
    opened = load_bank("me/bank", tiny_model(), revision="refs/pr/1")
    assert torch.equal(logits(opened)["mood"], logits(moved())["mood"])


# One reader of another repository


def test_one_reader_is_taken_into_a_bank_and_no_other_is_fetched(server: Hub):
    theirs = tiny_bank()
    theirs.saves_base = False
    push_bank(theirs, "me/bank")
    mine = ReaderBank(tiny_model(), theirs.processor)
    mine.add("own", Reader(Mean(), SequenceClassification(("a", "b"), attention_heads=4)))
    server.asked.clear()
    mine.update(ReaderBank.from_pretrained("me/bank", mine.model, mine.processor, readers=["who"]))
    assert list(mine) == ["own", "who"]
    assert torch.equal(logits(mine.eval())["who"], logits(theirs)["who"])
    asked = {line.rpartition("readers/")[2] for line in server.asked if "/resolve/" in line and "readers/" in line}
    assert asked == {"who/reader.json", "who/model.safetensors"}
    assert sum("GET /large/" in line for line in server.asked) == 1


def test_a_base_that_readers_carry_is_fetched_for_them_alone(server: Hub):
    bank = ReaderBank(tiny_model(), train_base=True)
    bank.add("own", Reader(Mean(), SequenceClassification(("a", "b"), attention_heads=4)))
    location = location_of(bank.model)
    push_bank(bank.eval(), "me/bank")
    assert location_of(bank.model) == location  # not the folder from which it was pushed, which is deleted
    server.asked.clear()
    load_bank("me/bank", tiny_model(), readers=["own"])
    assert not any("base/" in line for line in server.asked)
    assert list(load_bank("me/bank")) == ["own"]
    assert any("base/model.safetensors" in line for line in server.asked)


def test_a_reader_of_another_base_is_refused(server: Hub):
    push_bank(tiny_bank(), "me/bank")
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained("me/bank", tiny_model(seed=1), readers=["who"])


@pytest.mark.parametrize("name", one_in(3, ["whom", "../who", "*"]))
def test_a_reader_that_is_not_there_is_named(server: Hub, name: str):
    push_bank(tiny_bank(), "me/bank")
    with pytest.raises(UnknownNameError, match="known: mood, who"):
        ReaderBank.from_pretrained("me/bank", tiny_model(), readers=[name])
    assert not any("who/model" in line for line in server.asked if line.startswith("GET"))


@pytest.mark.long
def test_the_lines_of_the_docs(server: Hub, tmp_path: Path):
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text(encoding="utf-8")
    block = next(part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "push_to_hub" in part)
    save_base(tmp_path / "base")
    films, names = (tiny_bank(load(tmp_path / "base")[0]) for _ in range(2))
    films.remove("who")
    names.rename("who", "ner")
    push_bank(films, "me/films", private=True)
    push_bank(names, "me/names")
    HfApi().create_tag("me/films", tag="v1")
    given: dict[str, Any] = {"bank": films, "ReaderBank": ReaderBank}
    exec(compile(block.replace("user/", "me/"), "export.md", "exec"), given)
    assert list(given["bank"]) == ["mood", "ner"]
    assert torch.equal(logits(given["bank"])["ner"], logits(names)["ner"])


# What the hub refuses


def test_a_private_repository_is_not_shown_to_others(server: Hub, monkeypatch: pytest.MonkeyPatch):
    push_bank(tiny_bank(), "me/bank", private=True)
    assert server.repos["me/bank"].private
    assert list(load_bank("me/bank", tiny_model())) == ["mood", "who"]
    signed_out(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(Path("nowhere").absolute()))
    with pytest.raises(StoreError, match=r"has no such repository, or it is private\. .* HF_TOKEN"):
        load_bank("me/bank", tiny_model())


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    one_in(
        3,
        [
            ("me/none", None, "the hub has no such repository"),
            ("me/bank", "v9", "the repository has no revision 'v9'"),
            ("me/bank/readers", None, r"it is not the id of a repository, such as user/name"),
            ("me bank", None, r"it is not the id of a repository, such as user/name"),
        ],
    ),
)
def test_a_missing_repository_or_revision_is_named(server: Hub, name: str, revision: str | None, message: str):
    push_bank(tiny_bank(), "me/bank")
    with pytest.raises(StoreError, match=f"no bank '{name}'; there is no such folder, .*{message}") as caught:
        load_bank(name, tiny_model(), revision=revision)
    assert "\n" not in str(caught.value)


def test_a_push_that_is_not_allowed_is_an_error(server: Hub, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StoreError, match=r"'you/bank' was not saved.*token does not allow it. .* write access\)\.$"):
        push_bank(tiny_bank(), "you/bank")
    with pytest.raises(StoreError, match=r"'me/bank' was not saved .*the hub did not accept the login.*HF_TOKEN\)\.$"):
        push_bank(tiny_bank(), "me/bank", token="hf_wrong")
    with pytest.raises(StoreError, match="it is not the id of a repository"):
        push_bank(tiny_bank(), "me/bank/more")
    signed_out(monkeypatch)
    with pytest.raises(StoreError, match="'me/bank' was not saved"):
        push_bank(tiny_bank(), "me/bank")
    with pytest.raises(TypeError, match="unexpected keyword argument 'privat'"):
        push_bank(tiny_bank(), "me/bank", privat=True)  # type: ignore[call-arg]
    assert server.repos == {}


def test_a_download_that_is_not_allowed_needs_no_write_access(monkeypatch: pytest.MonkeyPatch):
    class RefusedError(OSError):
        response = SimpleNamespace(status_code=403)

    def refuse(*_: object, **__: object):
        raise RefusedError

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(StoreError, match=r"no bank 'you/bank'.*the token does not allow it\. .* read access\)\.$"):
        load_bank("you/bank", tiny_model())


# Connections that end half-way


@pytest.mark.parametrize("cut", one_in(3, ["PUT /large/", "commit before", "preupload"], 1))
def test_a_push_that_breaks_off_leaves_the_repository(server: Hub, cut: str):
    push_bank(tiny_bank(), "me/bank")
    before = server.repos["me/bank"].refs["main"]
    server.large.clear()
    server.cut = cut
    with pytest.raises(StoreError, match="'me/bank' was not saved"):
        push_bank(moved(), "me/bank")
    assert server.repos["me/bank"].refs["main"] == before
    server.cut = None
    push_bank(moved(), "me/bank")
    assert torch.equal(logits(load_bank("me/bank", tiny_model()))["mood"], logits(moved())["mood"])


@pytest.mark.parametrize("cut", one_in(3, ["GET /large/", "readers/mood/reader.json", "lamina.json"]))
def test_a_download_that_breaks_off_is_told_and_can_be_repeated(server: Hub, cut: str, tmp_path: Path):
    push_bank(tiny_bank(), "me/bank")
    server.cut = cut
    with pytest.raises(StoreError, match="no bank 'me/bank'"):
        load_bank("me/bank", tiny_model())
    whole = [server.read("me/bank", name) for name in server.paths("me/bank")]
    kept = [path for path in (tmp_path / "cache").rglob("snapshots/*/**/*") if path.is_file()]
    assert all(path.read_bytes() in whole for path in kept)
    server.cut = None
    assert torch.equal(logits(load_bank("me/bank", tiny_model()))["mood"], logits(tiny_bank())["mood"])


def test_offline_is_an_error_in_one_sentence():
    with pytest.raises(StoreError, match="no bank 'no/such'; there is no such folder, and it cannot be") as caught:
        load_bank("no/such", tiny_model())
    assert isinstance(caught.value.__cause__, LocalEntryNotFoundError)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_offline_a_copy_that_was_fetched_is_loaded(server: Hub, monkeypatch: pytest.MonkeyPatch):
    push_bank(tiny_bank(), "me/bank")
    load_bank("me/bank", tiny_model())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert list(load_bank("me/bank", tiny_model())) == ["mood", "who"]
    assert server.asked == []


def test_without_the_hub_the_record_of_edits_is_that_of_the_copy(server: Hub, tmp_path: Path):
    model, _ = load(save_base(tmp_path / "base"))
    lamina.truncate_(model, keep=1)
    lamina.save(model, tmp_path / "edited")
    server.repos["me/edited"] = Repo()
    server.repos["me/edited"].commit("main", {RECORD: (tmp_path / "edited" / RECORD).read_bytes()})
    architecture, found = read_record("me/edited")
    assert (architecture, found) == (type(model).__name__, edits(model))
    server.cut = "resolve"
    assert read_record("me/edited") == (architecture, found)


def test_without_the_hub_nobody_waits_for_a_record_that_the_copy_lacks(server: Hub, monkeypatch: pytest.MonkeyPatch):
    """The hub's own download waits five times for the hub to come back."""
    server.repos["me/plain"] = Repo()
    server.repos["me/plain"].commit("main", {"config.json": b"{}"})
    assert read_record("me/plain") == ("", [])
    hf_hub_download("me/plain", "config.json")
    waits: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waits.append)
    for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
        there = getattr(constants, name)
        monkeypatch.setattr(constants, name, there.replace(server.endpoint, "http://127.0.0.1:9"))
    assert read_record("me/plain") == ("", [])
    assert waits == []
