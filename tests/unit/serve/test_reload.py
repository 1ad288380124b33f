from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.stored import tiny_bank, tiny_model

from lamina import predict
from lamina.bank import Reader, ReaderBank
from lamina.errors import StoreError
from lamina.fusion.extra_layers import ExtraLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers.fingerprints import fingerprint_of_tensors
from lamina.monitors import Cascade, Monitor
from lamina.serve import Scheduler, Settings, application, create_app
from lamina.serve.reload import Reloader

KEY = {"authorization": "Bearer sesame"}
TEXT = "the film is good ."


def other_bank(bank: ReaderBank, shift: float = 3.0) -> ReaderBank:
    """Return a bank on the same model whose readers answer differently."""
    other = tiny_bank(bank.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += shift * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return other


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "readers"


@pytest.fixture
def bank(tmp_path: Path, root: Path) -> ReaderBank:
    bank = tiny_bank()
    bank.save_pretrained(tmp_path / "bank")
    other_bank(bank).save_pretrained(root / "v2")
    added = other_bank(bank)
    added.rename("mood", "tone")
    added.remove("who")
    added.save_pretrained(root / "tone")
    return bank


@pytest.fixture
def client(bank: ReaderBank, tmp_path: Path, root: Path) -> Iterator[TestClient]:
    settings = Settings.of(admin_key="sesame")
    app = create_app(bank, settings, source=str(tmp_path / "bank"), readers_root=root)
    with TestClient(app) as client:
        yield client


def changed(client: TestClient, folder: str, status: int = 200, **more: Any) -> Any:
    response = client.post("/readers", json={"folder": folder, **more}, headers=KEY)
    assert response.status_code == status, response.text
    return response.json()


def scores(client: TestClient, task: str = "mood") -> dict[str, float]:
    found = client.post("/predict", json={"inputs": TEXT, "tasks": [task]}).json()[task]
    return {one["label"]: one["score"] for one in found}


def expected(bank: ReaderBank, task: str = "mood") -> Any:
    return pytest.approx(predict(bank, [TEXT])[0][task]["probabilities"], abs=1e-5)


def test_a_reader_is_added_replaced_and_removed(client: TestClient, bank: ReaderBank, root: Path):
    before, second = expected(bank), ReaderBank.from_pretrained(root / "v2", bank.model, bank.processor)
    assert scores(client) == before
    assert changed(client, "tone") == {"bank_version": 2, "readers": {"mood": 1, "who": 1, "tone": 1}}
    assert scores(client) == before
    assert scores(client, "tone") == expected(second)
    assert changed(client, "v2", readers=["mood"])["readers"] == {"mood": 2, "who": 1, "tone": 1}
    assert scores(client) == expected(second)
    assert scores(client) != before
    info = client.get("/info").json()
    assert (info["bank_version"], info["tasks"]["mood"]["version"]) == (3, 2)
    gone = client.delete("/readers/tone", headers=KEY).json()
    assert gone["readers"] == {"mood": 2, "who": 1}
    assert client.post("/predict", json={"inputs": TEXT, "tasks": ["tone"]}).status_code == 422
    assert changed(client, "tone")["readers"]["tone"] == 2  # never the number of another reader of that name
    assert client.get("/readers", headers=KEY).json()["bank_version"] == 5


@pytest.mark.long
def test_loading_a_reader_that_runs_the_model_disturbs_no_answer(bank: ReaderBank, root: Path):
    deep = ReaderBank(bank.model, bank.processor)
    deep.add("deep", Reader(ExtraLayers(n=1), SequenceClassification(("a", "b"))))
    deep.save_pretrained(root / "deep")
    scheduler = Scheduler(bank.eval(), Settings.of())
    live, expected, answers = Reloader(scheduler, None, root), predict(bank, [TEXT])[0]["mood"]["score"], list[float]()
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(scheduler.ask([TEXT], ["mood"]).result(20)[0]["mood"]["score"])

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(5):
        live.put("deep")
    over.set()
    asking.join()
    scheduler.close()
    assert answers == pytest.approx([expected] * len(answers), abs=1e-5)
    assert {*scheduler.bank} == {"mood", "who", "deep"}


def test_weights_are_hashed_once_per_bank(client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch):
    hashed: list[int] = []

    def counted(tensors: Any) -> str:
        hashed.append(1)
        return fingerprint_of_tensors(tensors)

    monkeypatch.setattr(application, "fingerprint_of_tensors", counted)

    def told() -> dict[str, str]:
        return {task: one["weights"] for task, one in client.get("/info").json()["tasks"].items()}

    first = told()
    assert told() == first
    assert len(hashed) == len(first)
    changed(client, "v2", readers=["mood"])
    second = told()
    assert second["mood"] != first["mood"]
    assert len(hashed) == len(first) + len(second)


def cascade(bank: ReaderBank) -> ReaderBank:
    """Store a cascade of 'mood' and 'who' with the reader 'who'."""
    both = Cascade(Monitor("mood", "good", threshold=0.4), Monitor("who", "B-PER"), name="both")
    bank["who"].info["monitors"] = {"both": both.to_dict()}
    return bank


@pytest.mark.parametrize("gone", [False, True])
def test_a_cascade_is_removed_when_its_first_reader_is_replaced(client: TestClient, bank: ReaderBank, gone: bool):
    cascade(bank)
    if gone:
        client.delete("/readers/mood", headers=KEY)
    assert changed(client, "v2", readers=["mood"])["removed_monitors"] == ["both"]
    assert "both" not in client.get("/info").json()["monitors"]
    assert [*bank.monitors] == ["both"]  # requests that were accepted before are answered by it


def test_a_cascade_that_is_added_without_its_first_reader_is_removed(client: TestClient, bank: ReaderBank, root: Path):
    cascade(other_bank(bank)).save_pretrained(root / "v3")
    assert changed(client, "v3", readers=["who"])["removed_monitors"] == ["both"]
    assert "removed_monitors" not in changed(client, "v3")
    assert "both" in client.get("/info").json()["monitors"]
    assert "removed_monitors" not in changed(client, "v3", readers=["mood"])  # its weights are the same
    assert "both" in client.get("/info").json()["monitors"]


def test_readers_that_stay_are_not_hashed(client: TestClient, bank: ReaderBank, monkeypatch: pytest.MonkeyPatch):
    cascade(bank)
    monkeypatch.setattr("lamina.bank.cascades.fingerprint_of_tensors", Mock(side_effect=AssertionError("hashed")))
    assert "removed_monitors" not in changed(client, "tone")
    assert "both" in client.get("/info").json()["monitors"]


def test_reload_serves_the_readers_in_the_folder(client: TestClient, bank: ReaderBank, tmp_path: Path):
    changed(client, "tone")
    third = other_bank(bank, 1.0)
    third.remove("who")
    third.save_pretrained(tmp_path / "bank")
    assert client.post("/readers/reload", headers=KEY).json() == {"bank_version": 3, "readers": {"mood": 2}}
    assert scores(client) == expected(third)


def twins(bank: ReaderBank, shift: float) -> ReaderBank:
    """Return a bank with the same reader under two names, so that an answer by two banks can be noticed."""
    twins = ReaderBank(bank.model, bank.processor)
    for name in ("a", "b"):
        one = other_bank(bank, shift)
        one.rename("mood", name)
        twins.update(one, [name])
    return twins


def test_a_request_is_answered_by_a_single_bank(client: TestClient, bank: ReaderBank, root: Path):
    banks = {"old": twins(bank, 0.0), "new": twins(bank, 3.0)}
    for name, one in banks.items():
        one.save_pretrained(root / name)
    changed(client, "old")
    found: list[tuple[float, ...]] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            said = client.post("/predict", json={"inputs": TEXT, "tasks": ["a", "b"]}).json()
            found.append(tuple({one["label"]: one["score"] for one in said[task]}["good"] for task in ("a", "b")))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(12):
        changed(client, ("new", "old")[turn % 2])
    done.set()
    for thread in threads:
        thread.join()
    right = {round(predict(one, [TEXT])[0]["a"]["probabilities"]["good"], 4) for one in banks.values()}
    assert {round(a, 4) for a, _ in found} == right
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in found)


def test_nothing_outside_the_root_is_read(client: TestClient, root: Path, tmp_path: Path):
    (root / "link").symlink_to(tmp_path / "bank")
    outside = ("../bank", "/etc", "v2/../../bank", "nothing", "", ".", "link", "v2\0", "a" * 200, "v2/readers")
    for folder in outside:
        assert "--readers-root" in changed(client, folder, 422)["error"], folder
        now = client.get("/readers", headers=KEY).json()
        assert now == {"bank_version": 1, "readers": {"mood": 1, "who": 1}}, folder


def test_readers_that_do_not_fit_change_nothing(client: TestClient, bank: ReaderBank, root: Path):
    tiny_bank(tiny_model(7)).save_pretrained(root / "foreign")
    tiny_bank(bank.model).save_pretrained(root / "torn")
    (weights,) = (root / "torn").rglob("mood/*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-40])
    before = scores(client)
    assert "fingerprint" in changed(client, "foreign", 422)["error"]
    assert "mood" in changed(client, "torn", 422)["error"]
    assert "nobody" in changed(client, "v2", 422, readers=["nobody"])["error"]
    assert client.delete("/readers/nobody", headers=KEY).status_code == 422
    client.delete("/readers/who", headers=KEY)
    assert "at least one" in client.delete("/readers/mood", headers=KEY).json()["error"]
    assert scores(client) == before


def test_weights_that_are_not_finite_are_refused(client: TestClient, bank: ReaderBank, monkeypatch: pytest.MonkeyPatch):
    broken, before = other_bank(bank), scores(client)
    torch.nn.init.constant_(broken["mood"].head.output.bias, torch.nan)
    monkeypatch.setattr(ReaderBank, "from_pretrained", lambda *_: broken)
    assert "'head.output.bias' of reader 'mood' is not finite" in changed(client, "v2", 424)["error"]
    assert scores(client) == before


@pytest.mark.parametrize("error", [StoreError("the bank is gone"), OSError("the bank is gone")])
def test_an_error_after_a_signal_is_logged(bank: ReaderBank, monkeypatch: pytest.MonkeyPatch, caplog: Any, error: Any):
    reloader = Reloader(scheduler := Scheduler(bank.eval(), Settings.of()), "x", None)
    monkeypatch.setattr(ReaderBank, "from_pretrained", Mock(side_effect=error))
    reloader.try_reload()
    scheduler.close()
    assert "the bank is gone" in caplog.text
    assert "The server keeps its present readers" in caplog.text
    assert ("Traceback" in caplog.text) == (type(error) is OSError)


def test_changes_need_the_admin_key(client: TestClient, bank: ReaderBank):
    wrong = {"authorization": "Bearer sesam"}
    for method, path in (("GET", "/readers"), ("POST", "/readers"), ("DELETE", "/readers/mood")):
        assert client.request(method, path).status_code == 401
        assert client.request(method, path, headers=wrong).status_code == 401
    with TestClient(create_app(bank, Settings.of(api_key="sesame"))) as without:
        told = without.get("/readers", headers=KEY)
        assert (told.status_code, "--admin-key" in told.json()["error"]) == (403, True)
    with TestClient(create_app(bank, Settings.of(api_key="one", admin_key="sesame"))) as no_root:
        assert "--readers-root" in changed(no_root, "v2", 422)["error"]
        assert no_root.post("/readers/reload", headers=KEY).status_code == 422
        assert no_root.get("/info", headers=KEY).status_code == 401


def test_kserve_returns_the_version_that_answers(client: TestClient):
    changed(client, "v2", readers=["mood"])
    assert client.get("/v2/models/mood").json()["versions"] == ["2"]
    tensor = {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [TEXT]}]}
    assert client.post("/v2/models/mood/versions/2/infer", json=tensor).json()["model_version"] == "2"
    assert client.post("/v2/models/mood/versions/1/infer", json=tensor).status_code == 404
    assert client.get("/v2/models/who/versions/1/ready").json()["ready"]
