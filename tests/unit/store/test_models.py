from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.stored import WORDS, save_base, tiny_config, tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES
from transformers import BertForMaskedLM, ViTImageProcessorPil

from lamina.editing.insert import insert_
from lamina.errors import ModelNotFoundError, StoreError, UnknownNameError, UnsupportedModelError
from lamina.layers import stacks
from lamina.store import empty_model, load, load_config
from lamina.store import models as module
from lamina.store.edited import RECORD, save

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base", seed=2)


class TestFolder:
    def test_gives_the_model_and_its_tokenizer(self, base: Path):
        model, tokenizer = load(base)
        expected = tiny_model(2).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
        assert not model.training
        assert model.name_or_path == model.config._name_or_path == tokenizer.name_or_path == str(base)
        assert tokenizer("good film")["input_ids"] == tiny_tokenizer()("good film")["input_ids"]

    def test_with_a_head(self, base: Path):
        model, _ = load(str(base), head="AutoModelForMaskedLM")
        assert isinstance(model, BertForMaskedLM)

    def test_says_which_weights_are_missing(self, base: Path, caplog: pytest.LogCaptureFixture):
        load(base, head="AutoModelForSequenceClassification")
        assert "has no weights for classifier.bias, classifier.weight" in caplog.text

    def test_of_a_precision(self, base: Path):
        assert load(base, dtype="bfloat16")[0].dtype == torch.bfloat16

    def test_without_a_tokenizer(self, tmp_path: Path):
        tiny_model().save_pretrained(tmp_path)
        assert load(tmp_path)[1] is None

    def test_of_a_model_of_images(self, tmp_path: Path):
        FAMILIES["vit"].build().save_pretrained(tmp_path)
        assert load(tmp_path)[1] is None
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
        assert "pixel_values" in load(tmp_path)[1].model_input_names

    def test_unknown_head(self, base: Path):
        with pytest.raises(
            UnknownNameError, match=r"unknown head 'AutoModelForMaskedML'.*Did you mean 'AutoModelForMaskedLM'"
        ):
            load(base, head="AutoModelForMaskedML")

    def test_head_that_the_family_does_not_have(self, base: Path):
        with pytest.raises(UnsupportedModelError, match="family 'bert' is not supported; Unrecognized configuration"):
            load(base, head="AutoModelForSpeechSeq2Seq")

    def test_without_config(self, tmp_path: Path):
        with pytest.raises(ModelNotFoundError, match=r"the folder has no config.json"):
            load(tmp_path)

    def test_without_weights(self, base: Path):
        (base / "model.safetensors").unlink()
        with pytest.raises(ModelNotFoundError, match=r"no file named model.safetensors"):
            load(base)

    def test_with_weights_cut_off(self, base: Path):
        path = base / "model.safetensors"
        path.write_bytes(path.read_bytes()[:2000])
        with pytest.raises(StoreError, match=r"weights of .* cannot be read .*; they are damaged or cut off"):
            load(base)

    def test_with_weights_of_another_config(self, base: Path):
        tiny_config(hidden_size=64).save_pretrained(base)
        with pytest.raises(StoreError, match=r"weights of .* do not fit its config.json"):
            load(base)

    def test_with_a_damaged_tokenizer(self, base: Path):
        path = base / "tokenizer.json"
        path.write_text(path.read_text()[:100])
        with pytest.raises(StoreError, match=r"the tokenizer in .* cannot be read"):
            load(base)

    @pytest.mark.parametrize(
        ("config", "kind", "message"),
        [
            ('{"model_type": "no-such"}', UnsupportedModelError, "model type `no-such`"),
            ('{"model_type": ', ModelNotFoundError, "not a valid JSON file"),
            ("{}", UnsupportedModelError, "Unrecognized model"),
            ('{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}', UnsupportedModelError, "custom code"),
        ],
    )
    def test_with_a_config_that_cannot_be_used(self, base: Path, config: str, kind: type[Exception], message: str):
        (base / "config.json").write_text(config)
        with pytest.raises(kind, match=message) as caught:
            load_config(base)
        assert "\n" not in str(caught.value)


class TestHub:
    def test_offline_is_one_sentence(self):
        with pytest.raises(
            ModelNotFoundError, match="no model 'no/such'; there is no such folder, the hub cannot"
        ) as caught:
            load("no/such")
        assert "\n" not in str(caught.value)

    def test_what_can_be_no_id(self):
        with pytest.raises(ModelNotFoundError, match="no model 'no such thing'"):
            load_config("no such thing")


class TestMiniLm:
    def package(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand in for the installed package."""
        spec = importlib.machinery.ModuleSpec(module.MINILM_PACKAGE, None, is_package=True)
        spec.submodule_search_locations = [str(root)]
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == module.MINILM_PACKAGE else None)

    @pytest.mark.parametrize("name", ["minilm", MINILM])
    def test_comes_from_its_package_under_its_own_name(
        self, name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        shutil.copytree(base, tmp_path / "package" / "model")
        content = (base / "model.safetensors").read_bytes()
        monkeypatch.setattr(module, "MINILM_SHA256", hashlib.sha256(content).hexdigest())
        self.package(tmp_path / "package", monkeypatch)
        model, tokenizer = load(name)
        assert model.name_or_path == model.config._name_or_path == tokenizer.name_or_path == MINILM
        assert len(tokenizer) == len(WORDS)
        assert load_config(name).hidden_size == 32
        with pytest.raises(ModelNotFoundError, match="the hub cannot be reached"):
            load(name, revision="v1")  # the package has one revision alone

    def test_with_other_weights_is_refused(self, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        shutil.copytree(base, tmp_path / "package" / "model")
        self.package(tmp_path / "package", monkeypatch)
        with pytest.raises(StoreError, match=r"has the sha256 .*; the known model has 53aa51172d142c89"):
            load("minilm")

    def test_without_the_package_is_asked_of_the_hub(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
        with pytest.raises(ModelNotFoundError, match="no model 'minilm'"):
            load("minilm")

    def test_the_real_one_has_the_known_weights(self):
        folder = module._minilm_folder()
        assert folder is not None
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 6


def test_inserted_layers_without_a_record_are_refused(tmp_path: Path):
    model = tiny_model()
    insert_(model, layers=1)
    save(model, tmp_path)
    (tmp_path / RECORD).unlink()
    with pytest.raises(StoreError, match=r"has inserted layers \('.*inserted_0.*'\), but no lamina_edits\.json"):
        load(tmp_path)


class TestEmpty:
    def test_has_the_architecture_and_no_memory(self):
        model = empty_model(tiny_config())
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert stacks(model)["main"].layers == 4

    def test_of_a_family_without_backbone(self):
        class Odd(type(tiny_config())):
            model_type = "odd"

        with pytest.raises(UnsupportedModelError, match="the family 'odd' is not supported"):
            empty_model(Odd())
