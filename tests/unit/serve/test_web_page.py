from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.finetuned import image_processor, vit
from tests.support.stored import tiny_bank, tiny_tokenizer
from tests.support.tiny import FAMILIES, model_of

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.gated import Gated
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.causal_lm import CausalLM
from lamina.heads.sequence_classification import ImageClassification, SequenceClassification
from lamina.serve import Settings, create_app
from lamina.serve.web_page import default_examples
from lamina.store import load
from lamina.studies import contributions

TEXT = "the film is good ."
GOLDEN = Path(__file__).parents[2] / "golden" / "files"


@pytest.fixture(scope="module")
def bank() -> ReaderBank:
    bank = tiny_bank()
    for name, fusion, pooling in (("pooled", PooledLayers(8), "first"), ("gated", Gated(8), "attention")):
        reader = bank.add(name, Reader(fusion, SequenceClassification(("no", "yes"), pooling=pooling)))
        with torch.no_grad():
            for parameter in reader.fusion.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return bank.eval()


@pytest.fixture(scope="module")
def client(bank: ReaderBank) -> Iterator[TestClient]:
    with TestClient(create_app(bank)) as client:
        yield client


def test_an_answer_that_nothing_contributed_to_has_no_shares(client: TestClient, monkeypatch):
    zeros = {name: torch.zeros(2, 3) for name in ("mood", "who", "pooled", "gated")}
    monkeypatch.setattr("lamina.serve.explain.layer_amounts", lambda *_: zeros)
    found = client.post("/explain", json={"inputs": TEXT}).json()
    assert [part["contributions"] for part in found["tasks"].values()] == [None] * 4


def test_an_explanation_equals_the_study_of_contributions(client: TestClient, bank: ReaderBank):
    found = client.post("/explain", json={"inputs": TEXT}).json()
    assert list(found["tasks"]) == ["mood", "who", "pooled", "gated"]
    table = contributions(bank, TEXT).table
    for name in ("who", "pooled", "gated"):
        own = found["tasks"][name]
        shares = torch.tensor(own["contributions"])
        assert shares.sum() == pytest.approx(1, abs=1e-4)
        rows = table[table["reader"] == name]
        assert own["layers"] == list(bank[name].layers) == rows["layer"].unique().tolist()
        assert own["tokens"] == rows["token"].tolist()[: len(own["tokens"])]
        assert (shares / shares.sum(0)).flatten().tolist() == pytest.approx(rows["score"].tolist(), abs=1e-4)
    assert found["tasks"]["mood"]["contributions"] is None
    for name in ("mood", "pooled"):
        assert found["tasks"][name]["importance"] == pytest.approx([*bank[name].importance().values()], abs=1e-5)
    assert found["tasks"]["gated"]["importance"] is None  # it weighs each text anew


def test_an_explanation_has_the_time_of_a_pass(client: TestClient):
    found = client.post("/explain", json={"inputs": TEXT, "tasks": ["pooled"]}).json()
    assert list(found["tasks"]) == ["pooled"]
    assert 0 < found["seconds"]["without_readers"] < 5
    assert 0 < found["seconds"]["with_readers"] < 5


def test_explanations_have_the_limits_of_predictions(client: TestClient):
    long = client.post("/explain", json={"inputs": "film " * 40})
    assert (long.status_code, long.json()["error_type"]) == (413, "Validation")
    assert client.post("/explain", json={"inputs": "film " * 40, "truncate": True}).status_code == 200
    assert client.post("/explain", json={"inputs": TEXT, "tasks": ["mod"]}).status_code == 422
    assert client.post("/explain", json={"inputs": [["a"], ["b"]]}).status_code == 422
    pair = client.post("/explain", json={"inputs": [TEXT, "bad"], "tasks": ["mood"]})
    assert len(pair.json()["tasks"]["mood"]["tokens"]) == 9


@pytest.mark.parametrize("start", [3, None])
def test_an_answer_of_a_decoder_is_explained_with_the_tokens_that_it_reads(start: int | None):
    model = FAMILIES["mbart"].known()
    model.config.decoder_start_token_id = start  # None: the model moves the last token to the front, [SEP] too
    bank = ReaderBank(model, tiny_tokenizer())
    for stack in ("encoder", "decoder"):
        bank.add(stack, Reader(ScalarMix(), SequenceClassification(("no", "yes")), stack))
    with TestClient(create_app(bank.eval())) as client:
        tasks = client.post("/explain", json={"inputs": "the film"}).json()["tasks"]
    assert tasks["encoder"]["tokens"] == ["[CLS]", "the", "film", "[SEP]"]
    assert tasks["decoder"]["tokens"] == ["[SEP]", "[CLS]", "the", "film"]
    assert {len(row) for row in tasks["decoder"]["contributions"]} == {4}


def test_the_page_allows_only_its_own_scripts_and_holds_no_data_of_the_bank(bank: ReaderBank):
    with TestClient(create_app(bank, Settings.of(api_key="s3cret"), name="private")) as client:
        response = client.get("/")
        assert client.get("/info").status_code == client.post("/explain", json={"inputs": TEXT}).status_code == 401
    policy = response.headers["content-security-policy"]
    assert response.headers["content-type"].startswith("text/html")
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    assert "unsafe" not in policy
    assert len(re.findall(r"sha256-", policy)) == 3
    assert "http://" not in response.text.replace("http://www.w3.org", "")
    assert "https://" not in response.text
    for word in ("private", "s3cret", "mood", "Lopez", "{{"):
        assert word not in response.text


def test_the_page_can_be_turned_off(bank: ReaderBank):
    with TestClient(create_app(bank, page=False)) as client:
        assert client.get("/").status_code == 404
        assert client.post("/explain", json={"inputs": TEXT}).status_code == 200


def test_title_and_examples_can_be_set_and_have_defaults_that_fit_the_bank(bank: ReaderBank):
    with TestClient(create_app(bank, name="films")) as client:
        info = client.get("/info").json()
    assert info["title"] == "films on bert"
    assert len(info["examples"]) == 3
    assert all(isinstance(example, str) for example in info["examples"])
    chosen = {"title": "Films", "examples": ["a film", ("a film", "the film")]}
    with TestClient(create_app(bank, Settings.of(**chosen))) as client:
        info = client.get("/info").json()
    assert info["title"] == "Films"
    assert info["examples"] == ["a film", ["a film", "the film"]]


def test_examples_are_pairs_where_tasks_learnt_pairs_and_absent_without_texts():
    bank = tiny_bank()
    bank["mood"].info["pair"] = True
    first, second, third = default_examples(bank)
    assert isinstance(first, str)
    assert isinstance(second, str)
    assert isinstance(third, tuple)
    bank["who"].info["pair"] = True
    assert all(isinstance(example, tuple) for example in default_examples(bank))
    images = ReaderBank(vit(), image_processor())
    images.add("animal", Reader(ScalarMix(), ImageClassification(("bird", "cat"))))
    assert default_examples(images) == ()


def test_masked_language_modelling_has_an_example_with_a_mask():
    model, tokenizer = load(GOLDEN / "base")
    bank = ReaderBank.from_pretrained(GOLDEN / "bank", model, tokenizer)
    assert any("[MASK]" in example for example in default_examples(bank))


def test_causal_language_modelling_has_no_example_with_a_mask():
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "[MASK]"
    bank = ReaderBank(model_of("gpt2-CausalLM"), tokenizer)
    bank.add("next", Reader(ScalarMix(), CausalLM()))
    assert not any("[MASK]" in example for example in default_examples(bank))


@pytest.mark.parametrize("values", [{"title": ""}, {"examples": [""]}, {"examples": [("a", "b", "c")]}])
def test_a_bad_title_or_example_is_refused(values: dict[str, object]):
    with pytest.raises(ConfigError, match=f"serve: {next(iter(values))}"):
        Settings.of(**values)
