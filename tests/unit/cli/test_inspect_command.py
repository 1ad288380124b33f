from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support.stored import tiny_config, tiny_model
from tests.support.tiny import FAMILIES

from lamina.editing.insert import insert_
from lamina.store import fingerprint, load, save


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    tiny_config().save_pretrained(tmp_path)
    return tmp_path


def test_a_config_alone_is_enough(lamina, config_only: Path):
    facts = json.loads(lamina("inspect", config_only, "--json").out)
    model = tiny_model()
    assert facts["architecture"] == "BertModel"
    assert facts["model_type"] == "bert"
    assert facts["parameters"] == model.num_parameters()
    stack = facts["stacks"]["main"]
    assert (stack["layers"], stack["depth"], stack["width"], stack["block"]) == (4, 3, 32, "BertLayer")
    embeddings = sum(parameter.numel() for parameter in model.embeddings.parameters())
    block = sum(parameter.numel() for parameter in model.encoder.layer[0].parameters())
    assert [layer["parameters"] for layer in stack["taps"]] == [embeddings, block, block, block]
    assert [layer["layer"] for layer in stack["taps"]] == [0, 1, 2, 3]
    assert stack["taps"][2]["path"].startswith("encoder.layer.")
    assert "fingerprint" not in stack


def test_with_weights_it_adds_the_fingerprint(lamina, base: Path):
    plain = json.loads(lamina("inspect", base, "--json").out)
    facts = json.loads(lamina("inspect", base, "--weights", "--json").out)
    assert facts["stacks"]["main"].pop("fingerprint") == fingerprint(tiny_model(), "main")
    assert facts == plain


def test_weights_are_those_of_a_model(lamina, bank_folder: Path):
    ran = lamina("inspect", bank_folder, "--weights")
    assert (ran.code, ran.out) == (2, "")
    assert "is a bank; --weights is for models" in ran.err


def test_the_table_shows_the_same(lamina, base: Path):
    ran = lamina("inspect", base, "--weights")
    assert (ran.code, ran.err) == (0, "")
    assert f"{base}: BertModel, family bert, {tiny_model().num_parameters():,} parameters" in ran.out
    assert "main: 4 layers of width 32, 3 x BertLayer" in ran.out
    assert "encoder.layer.2" in ran.out
    assert f"fingerprint {fingerprint(tiny_model(), 'main')}" in ran.out


def test_inserted_layers_are_counted_without_weights_too(lamina, base: Path, tmp_path: Path):
    model, tokenizer = load(base)
    insert_(model, "ffn")
    save(model, tmp_path / "inserted", tokenizer)
    ran = lamina("inspect", tmp_path / "inserted", "--json")
    assert json.loads(ran.out)["parameters"] == model.num_parameters() > tiny_model().num_parameters()


def test_the_folder_of_a_bank_shows_its_readers(lamina, bank_folder: Path, tmp_path: Path):
    folder = shutil.copytree(bank_folder, tmp_path / "bank")
    reader = folder / "readers" / "mood" / "reader.json"
    facts = json.loads(reader.read_text())
    facts["info"] |= {
        "columns": {"text": "ticket", "label": "team"},
        "metric": "accuracy",
        "scores": {"accuracy": 0.75},
    }
    reader.write_text(json.dumps(facts))
    ran = lamina("inspect", folder)
    assert (ran.code, ran.err) == (0, "")
    for shown in ("mood", "who", "text=ticket, label=team", "accuracy 0.750", f"{facts['parameters']:,}"):
        assert shown in ran.out
    assert set(json.loads(lamina("inspect", folder, "--json").out)) == {"mood", "who"}


def test_two_stacks(lamina, tmp_path: Path):
    FAMILIES["bart"].config().save_pretrained(tmp_path)
    assert list(json.loads(lamina("inspect", tmp_path, "--json").out)["stacks"]) == ["encoder", "decoder"]


def test_shared_blocks_and_blocks_without_a_module(lamina, tmp_path: Path):
    for name in ("albert", "xlm"):
        FAMILIES[name].config().save_pretrained(tmp_path / name)
    albert = json.loads(lamina("inspect", tmp_path / "albert", "--json").out)
    model = FAMILIES["albert"].build()
    group = sum(p.numel() for p in model.get_submodule("encoder.albert_layer_groups").parameters())
    assert {layer["parameters"] for layer in albert["stacks"]["main"]["taps"][1:]} == {group}
    assert albert["parameters"] == model.num_parameters()  # what blocks share counts once
    xlm = lamina("inspect", tmp_path / "xlm")
    assert xlm.code == 0
    assert " blocks" in xlm.out


def test_a_family_that_cannot_be_read_is_one_sentence(lamina, tmp_path: Path):
    FAMILIES["funnel"].config().save_pretrained(tmp_path)
    ran = lamina("inspect", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "the family 'funnel' is not supported" in ran.err
    assert "--weights tries again with them" in ran.err


def test_a_model_that_is_not_there_is_one_sentence(lamina, tmp_path: Path):
    for place in (tmp_path / "none", tmp_path, "no/such"):
        ran = lamina("inspect", place)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"error: load: no model '{place}'; ")
        assert ran.err.count("\n") == 1


def test_weights_cut_off_are_one_sentence(lamina, base: Path, tmp_path: Path):
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:999])
    assert lamina("inspect", folder).code == 0
    ran = lamina("inspect", folder, "--weights")
    assert ran.code == 2
    assert "damaged or cut off" in ran.err


@pytest.mark.long
def test_inserted_weights_are_drawn_beside_each_other(lamina, base: Path, tmp_path: Path):
    for init, placement in (("xavier", "output"), ("unit", "weight")):
        options = ("--insert", "both", "--init", init, "--placement", placement, "-o", tmp_path / init)
        assert lamina("edit", base, *options).code == 0
    picture = tmp_path / "weights.png"
    given = ("inspect", tmp_path / "xavier", "--beside", tmp_path / "unit", "--inserted-weights", picture)
    ran = lamina(*given, "--layer", 2, "--projection", "value", "--head", 1)
    assert (ran.code, ran.err) == (0, "")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert f"drawn in {picture}" in ran.out
    rows = json.loads(lamina(*given, "--json").out)
    assert [row["model"] for row in rows] == ["xavier"] * 4 + ["unit"] * 4
    assert [row["trained_diagonal"] for row in rows if row["model"] == "unit"] == [1.0] * 4
    ran = lamina(*given, "--layer", 9)
    assert ran.code == 2
    assert "unknown layer with inserted layers '9'; known: 1, 2, 3" in ran.err


def test_what_is_drawn_needs_a_picture(lamina, base: Path, tmp_path: Path):
    ran = lamina("inspect", base, "--layer", 2)
    assert (ran.code, ran.out) == (2, "")
    assert "an option says what to draw, but there is no file to draw to" in ran.err
    ran = lamina("inspect", base, "--inserted-weights", tmp_path / "a.png")
    assert ran.code == 2
    assert "inserted weights: the model has no inserted layers" in ran.err
