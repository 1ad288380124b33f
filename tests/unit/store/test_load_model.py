from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from tests.support.stored import WORDS, save_base, tiny_config, tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES
from transformers import (
    BertForMaskedLM,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    ViTImageProcessorPil,
    Wav2Vec2FeatureExtractor,
)

from lamina.editing.insert import insert_
from lamina.errors import ConfigError, ModelNotFoundError, StoreError, UnknownNameError, UnsupportedModelError
from lamina.registry import KINDS
from lamina.store import load, load_config
from lamina.store import models as module
from lamina.store.save_model import RECORD, save

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

    @pytest.mark.parametrize("dtype", ["float99", "int8", torch.int8, 16])
    def test_dtype_that_is_not_a_float_type(self, base: Path, dtype: Any):
        with pytest.raises(ConfigError, match=r"load: dtype is .*; it must be 'auto' or a float type"):
            load(base, dtype=dtype)

    @pytest.mark.parametrize("labels", [[], ["a", "a"], "ab"])
    def test_labels_that_name_no_classes(self, base: Path, labels: Any):
        with pytest.raises(ConfigError, match="load: labels are"):
            load(base, head="sequence_classification", labels=labels)

    def test_damaged_files_are_reported_before_labels_without_a_head(
        self, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ):
        load(base, labels=["a", "b"])
        assert "labels name the classes of a head" in caplog.text
        caplog.clear()
        shutil.copytree(base, tmp_path / "damaged")
        os.mkfifo(tmp_path / "damaged" / "pipe")
        with pytest.raises(StoreError, match="is neither a file nor a folder"):
            load(tmp_path / "damaged", labels=["a", "b"])
        assert "labels name" not in caplog.text

    def test_a_head_of_another_family(self, base: Path):
        with pytest.raises(
            UnsupportedModelError, match="'bert' is not supported; GPT2LMHeadModel is built from a GPT2"
        ):
            load(base, head="GPT2LMHeadModel")

    def test_dtype(self, base: Path):
        assert load(base, dtype="bfloat16")[0].dtype == torch.bfloat16

    def test_without_a_tokenizer(self, tmp_path: Path):
        tiny_model().save_pretrained(tmp_path)
        assert load(tmp_path)[1] is None

    def test_image_model(self, tmp_path: Path):
        FAMILIES["vit"].build().save_pretrained(tmp_path)
        assert load(tmp_path)[1] is None
        ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
        assert "pixel_values" in load(tmp_path)[1].model_input_names

    @pytest.mark.parametrize("kind", ["wav2vec2", "clip"])
    def test_processors_of_several_parts(self, kind: str, tmp_path: Path):
        """A feature extractor without its tokenizer, and an image processor joined with a tokenizer."""
        if kind == "wav2vec2":
            FAMILIES["wav2vec2"].build().save_pretrained(tmp_path)
            Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
            assert isinstance(load(tmp_path)[1], Wav2Vec2FeatureExtractor)
            return
        text, vision = (
            {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2},
            {"image_size": 8, "patch_size": 4},
        )
        config = CLIPConfig(text_config={**text, "vocab_size": 49}, vision_config={**text, **vision}, projection_dim=4)
        CLIPModel(config).save_pretrained(tmp_path)
        images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        CLIPProcessor(images, tiny_tokenizer()).save_pretrained(tmp_path)
        processor = load(tmp_path)[1]
        assert {"input_ids", "pixel_values"} <= set(processor.model_input_names)

    def test_damaged_image_processor(self, tmp_path: Path):
        FAMILIES["vit"].build().save_pretrained(tmp_path)
        (tmp_path / "preprocessor_config.json").write_text("{")
        with pytest.raises(StoreError, match=r"the processor in .* cannot be read"):
            load(tmp_path)

    def test_kind_of_task_as_head(self, base: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(KINDS._rows, "toy", f"{__name__}:ToyKind")
        monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(ToyKind=ToyKind))
        model, _ = load(base, "toy", ["bad", "good", "fine"])
        assert type(model).__name__ == "BertForTokenClassification"
        assert model.config.id2label == {0: "bad", 1: "good", 2: "fine"}

    def test_class_of_a_model_as_head(self, base: Path):
        assert isinstance(load(base, head="BertForMaskedLM")[0], BertForMaskedLM)
        assert isinstance(load(base, head=BertForMaskedLM)[0], BertForMaskedLM)
        with pytest.raises(UnknownNameError, match="unknown head 'BertTokenizer'"):
            load(base, head="BertTokenizer")

    def test_new_classes_keep_the_weights_of_a_head_with_as_many(self, base: Path, tmp_path: Path):
        model, _ = load(base, "AutoModelForSequenceClassification", ["a", "b", "c"])
        model.save_pretrained(tmp_path / "headed")
        same, _ = load(tmp_path / "headed", "AutoModelForSequenceClassification", ["x", "y", "z"])
        assert torch.equal(same.classifier.weight, model.classifier.weight)
        other, _ = load(tmp_path / "headed", "AutoModelForSequenceClassification", ["x", "y"])
        assert other.classifier.weight.shape[0] == other.config.num_labels == 2

    def test_new_classes_do_not_excuse_a_body_of_another_size(self, base: Path):
        tiny_config(intermediate_size=40).save_pretrained(base)
        with pytest.raises(StoreError, match=r"'bert.*dense\.bias' is \(48,\) instead of \(40,\)"):
            load(base, "AutoModelForSequenceClassification", ["a", "b", "c"])

    def test_unknown_head(self, base: Path):
        with pytest.raises(
            UnknownNameError, match=r"unknown head 'AutoModelForMaskedML'.*Did you mean 'AutoModelForMaskedLM'"
        ):
            load(base, head="AutoModelForMaskedML")

    def test_head_that_the_family_does_not_have(self, base: Path):
        with pytest.raises(UnsupportedModelError, match="family 'bert' is not supported; Unrecognized configuration"):
            load(base, head="AutoModelForSpeechSeq2Seq")

    def test_without_config(self, tmp_path: Path):
        (tmp_path / "checkpoint-5").mkdir()
        (tmp_path / "checkpoint-5" / "config.json").touch()
        with pytest.raises(
            ModelNotFoundError, match=r"the folder has no config.json; its folder 'checkpoint-5' has one"
        ):
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


class ToyKind:
    """A kind of task that someone else registered."""

    auto_class = "AutoModelForTokenClassification"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network: nothing answers where the hub should be, and nobody waits to try again."""
    constants: Any = huggingface_hub.constants
    address = "http://127.0.0.1:9"  # the port of a service that throws everything away, which nobody runs
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda _: pytest.fail("it waits to try again"))


class TestHub:
    def test_offline_is_an_error_in_one_sentence(self):
        with pytest.raises(
            ModelNotFoundError, match="no model 'no/such'; there is no such folder, the hub cannot"
        ) as caught:
            load("no/such")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["/no/such/folder", "./no/such", "runs/1/model", "~/model", "my model"])
    def test_a_missing_folder_is_no_id_of_the_hub(self, name: str):
        message = f"load: no model '{name}'; there is no such folder, and it is not the id of a repository, such as "
        with pytest.raises(ModelNotFoundError, match=re.escape(message)) as caught:
            load(name)
        assert "repo_type" not in str(caught.value)

    def test_a_folder_with_a_close_name_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "out" / "probe").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelNotFoundError, match=r"no model 'out/prob'; .*\. Did you mean 'out/probe'\?$"):
            load("out/prob")

    def test_a_folder_with_a_close_name_beside_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
    ):
        (tmp_path / "my-model").mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelNotFoundError, match=r"no model 'my-modle'; .*\. Did you mean 'my-model'\?$"):
            load("my-modle")

    @pytest.mark.parametrize("name", ["minilmm", "MiniLM", "mini-lm"])
    def test_a_name_close_to_that_of_a_packaged_model_is_told_without_the_hub(self, name: str, no_hub: None):
        with pytest.raises(ModelNotFoundError, match=f"no model '{name}'; .*no such folder. Did you mean 'minilm'"):
            load(name)

    @pytest.mark.parametrize("name", ["no/such", "gpt3"])
    def test_a_hub_that_cannot_be_reached_is_asked_once(self, name: str, no_hub: None):
        with pytest.raises(ModelNotFoundError, match="the hub cannot be reached and its cache has no copy"):
            load(name)

    def test_the_small_model_has_an_extra(self, no_hub: None):
        with pytest.raises(ModelNotFoundError, match=r"cannot be reached .* pip install 'lamina\[demo\]'"):
            load(MINILM, revision="v1")  # the package has one revision alone

    def test_name_that_cannot_be_an_id(self):
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
