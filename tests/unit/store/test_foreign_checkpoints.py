"""Folders of models that something else wrote: names with prefixes of wrappers, adapters, indexes, and pipes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.portions import one_in
from tests.support.stored import save_base, tiny_bank, tiny_model, tiny_tokenizer
from tests.support.towers import two_towers

from lamina.bank import ReaderBank
from lamina.errors import ConfigError, LaminaError, ModelNotFoundError, StoreError
from lamina.store import load, load_bank, load_model, save_bank


def checkpoint(folder: Path, rename: Callable[[str], str] = str) -> Path:
    model = tiny_model()
    folder.mkdir()
    model.config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    torch.save({rename(name): value for name, value in model.state_dict().items()}, folder / "pytorch_model.bin")
    return folder


class Place:
    """A path of another library, such as `py.path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def test_a_folder_may_be_any_path(tmp_path: Path):
    folder: Any = Place(checkpoint(tmp_path / "model"))
    assert load(folder)[0].name_or_path == str(tmp_path / "model")


def assert_loaded(folder: Path) -> None:
    """All weights of the folder's model are those of the tiny model."""
    loaded = load(folder)[0].state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in tiny_model().state_dict().items())


RENAMES: dict[str, Callable[[str], str]] = {
    "DataParallel": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "both, the other way": lambda name: f"_orig_mod.module.{name}",
    "DataParallel inside": lambda name: name.replace("encoder.", "encoder.module."),
    "DataParallel inside, with a head": lambda name: "bert." + name.replace("encoder.", "encoder.module."),
    "a compiled block": lambda name: name.replace("layer.1.", "layer.1._orig_mod."),
    "of a model with a head": lambda name: f"module.bert.{name}",
    "a part of another module": lambda name: f"model.{name}",
    "a wrapper around such a part": lambda name: f"module.module.model.bert.{name}",
    "sentence-transformers": lambda name: f"0.auto_model.{name}",
    "checkpointed blocks": lambda name: name.replace("layer.0.", "layer.0._checkpoint_wrapped_module."),
}


@pytest.mark.parametrize("rename", one_in(4, RENAMES.values()), ids=RENAMES)
def test_prefixes_of_wrappers_are_stripped(rename: Callable[[str], str], tmp_path: Path):
    assert_loaded(checkpoint(tmp_path / "model", rename))


@pytest.mark.parametrize("blocks", [2, 0])
def test_blocks_that_the_config_does_not_have_are_named(blocks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": blocks}))
    load(folder)
    message = f"weights of blocks that its config.json does not have ('encoder.layer.{blocks}."
    assert any(message in said for said in caplog.messages)


def test_one_weight_is_named_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    name = "encoder.layer.3.output.dense.bias"
    weights = checkpoint(tmp_path / "model") / "pytorch_model.bin"
    torch.save({**torch.load(weights), name: torch.zeros(16)}, weights)
    load(weights.parent)
    assert any(f"config.json does not have ('{name}'); they are left out" in said for said in caplog.messages)


def told(caplog: pytest.LogCaptureFixture, level: str) -> str:
    return "\n".join(record.message for record in caplog.records if record.levelname == level)


def test_a_block_that_starts_at_random_is_told_and_transformers_prints_no_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    weights = checkpoint(tmp_path / "model") / "pytorch_model.bin"
    saved = {name: value for name, value in torch.load(weights).items() if ".layer.1." not in name}
    saved |= {"extra.weight": torch.zeros(1), "encoder.layer.3.output.dense.bias": torch.zeros(16)}
    torch.save({name: value for name, value in saved.items() if "pooler" not in name}, weights)
    caplog.set_level("INFO")
    logging.getLogger("transformers").addHandler(caplog.handler)
    load(weights.parent, "sequence_classification", labels=("a", "b", "c"))
    logging.getLogger("transformers").removeHandler(caplog.handler)
    warned, noted = told(caplog, "WARNING"), told(caplog, "INFO")
    assert "has no weights for bert.encoder.layer.1." in warned
    assert "does not have ('encoder.layer.3.output.dense.bias'); they are left out" in warned
    assert "classifier" not in warned
    assert "has no weights for bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, cl" in noted
    assert "BertForSequenceClassification does not have ('extra.weight'); they are left out" in noted
    assert "LOAD REPORT" not in caplog.text


def test_only_tables_of_this_thread_and_without_conversion_errors_are_dropped(caplog: pytest.LogCaptureFixture):
    log = logging.getLogger("transformers.modeling_utils")
    log.addHandler(caplog.handler)
    with load_model._without_report():
        for text in ("LOAD REPORT: a", "LOAD REPORT: CONVERSION b", "c"):
            log.warning(text)
        other = Thread(target=log.warning, args=("LOAD REPORT: d",))
        other.start()
        other.join()
    log.warning("LOAD REPORT: e")
    log.removeHandler(caplog.handler)
    assert [text[-1] for text in dict.fromkeys(caplog.messages)] == [*"bcde"]
    assert log.filters == []


@pytest.mark.parametrize(
    ("head", "kind"), [(None, "BertModel"), ("masked_lm", "BertForMaskedLM"), ("token_classification", None)]
)
def test_labels_without_classes_to_name_are_told(
    head: str | None, kind: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    load(checkpoint(tmp_path / "model"), head, labels=("a", "b"))
    is_told = f"labels name the classes of a head, and a {kind} has none" in told(caplog, "WARNING")
    assert is_told == (kind is not None)


@pytest.mark.parametrize("lost", ["encoder.layer.1.", "embeddings.word"])
def test_a_backbone_without_a_part_is_told_beside_labels_too(
    lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    weights = checkpoint(tmp_path / "model") / "pytorch_model.bin"
    torch.save({name: value for name, value in torch.load(weights).items() if lost not in name}, weights)
    load(weights.parent, labels=("a", "b"))
    assert f"has no weights for {lost}" in told(caplog, "WARNING")


def test_a_block_of_a_model_whose_names_have_no_prefix_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    two_towers().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if ".layers.1." not in name and "classifier" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    load(tmp_path, "image_classification", labels=("a", "b"))
    assert "has no weights for vision_model.encoder.layers.1." in told(caplog, "WARNING")
    assert "classifier" not in told(caplog, "WARNING")


def test_a_block_of_another_shape_is_refused_beside_labels_too(tmp_path: Path):
    weights = checkpoint(tmp_path / "model") / "pytorch_model.bin"
    torch.save({**torch.load(weights), "encoder.layer.1.output.dense.bias": torch.zeros(16)}, weights)
    with pytest.raises(StoreError, match=r"'encoder\.layer\.1\.output\.dense\.bias' is \(16,\) instead of \(32,\)"):
        load(weights.parent, labels=("a", "b"))


def test_a_trained_head_that_is_replaced_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save_base(tmp_path)
    caplog.set_level("INFO")
    load(tmp_path, "sequence_classification", labels=("a", "b", "c"))[0].save_pretrained(tmp_path)
    assert told(caplog, "WARNING") == ""
    load(tmp_path, "sequence_classification", labels=("a", "b"))
    assert "has no weights for classifier.bias (saved in another shape), classifier.w" in told(caplog, "WARNING")


@pytest.mark.parametrize("rename", [str.upper, lambda name: name.replace("encoder.", "transformer.")])
def test_weights_of_which_none_fits_in_a_block_are_refused(rename: Callable[[str], str], tmp_path: Path):
    with pytest.raises(StoreError, match=r"fit no part of a BertModel: it holds '.*', the model needs 'encoder\."):
        load(checkpoint(tmp_path / "model", rename))


@pytest.mark.parametrize("end", ["weight_orig", "base_layer.weight", "parametrizations.weight.original0", "qweight"])
def test_a_module_of_another_form_is_refused(end: str, tmp_path: Path):
    folder = checkpoint(
        tmp_path / "model", lambda name: name.replace("layer.1.output.dense.weight", f"layer.1.output.dense.{end}")
    )
    with pytest.raises(
        StoreError, match=rf"hold 'encoder\.layer\.1\.output\.dense\.{end}', for which the model has no"
    ):
        load(folder)


def test_an_adapter_beside_whole_weights_is_refused(tmp_path: Path):
    folder, weights = checkpoint(tmp_path / "model"), tmp_path / "model/pytorch_model.bin"
    adapter = {"encoder.layer.0.attention.self.query.lora_A.weight": torch.zeros(2, 32)}
    torch.save({**torch.load(weights), **adapter}, weights)
    with pytest.raises(StoreError, match=r"hold '.*query\.lora_A\.weight', for which the model has no place"):
        load(folder)


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_integers_as_weights_are_refused(kind: torch.dtype, file: str, tmp_path: Path):
    folder = checkpoint(tmp_path / "model")
    weights = torch.load(folder / "pytorch_model.bin")
    name = "encoder.layer.1.intermediate.dense.weight"
    weights[name] = weights[name].to(kind)
    (folder / "pytorch_model.bin").unlink()
    torch.save(weights, folder / file) if file.endswith("bin") else save_file(weights, folder / file)
    with pytest.raises(
        StoreError, match=rf"{file} has integers as '{name}', and config\.json has no quantization_conf"
    ):
        load(folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_floats_of_8_bits_without_scales_are_named(file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder, name = checkpoint(tmp_path / "model"), "encoder.layer.1.intermediate.dense.weight"
    weights = torch.load(folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").unlink()
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    torch.save(weights, folder / file) if file.endswith("bin") else save_file(weights, folder / file)
    assert torch.equal(load(folder)[0].get_parameter(name), weights[name].float())
    assert f"{file} has 8-bit floats as '{name}', and config.json has no quantization_config" in caplog.text


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda weights: {"epoch": 3, "state_dict": weights}, "has its weights inside 'state_dict'; they must be at"),
        (
            lambda weights: {"step": torch.tensor(3), "state_dict": weights},
            r"save them alone: torch\.save\(torch\.load\('/.*model\.ckpt', 'cpu'\)\['state_dict'\], '/.*_model\.bin'\)",
        ),
        (
            lambda weights: {"optimizer": {"lr": 0.1, "state": {0: weights}}, "model": weights},
            r"weights inside 'model'.*Rename the file to pytorch_model\.ckpt.*\['model'\]",
        ),
        (
            lambda weights: {"scaler": {"scale": torch.ones(2)}, "loops": {}, "net": weights},
            "weights inside 'net'",
        ),
        (lambda weights: {"model": {"net": weights}}, "holds a dict without weights by name at its top level"),
        (
            lambda weights: {"step": torch.tensor(3), "logs": {"loss": torch.ones(())}, "model": {"net": weights}},
            "holds a dict without weights by name",
        ),
        (lambda weights: [*weights.values()], "holds a list without weights by name"),
        (lambda weights: {}, "hold no block of a BertModel, such as 'encoder"),
    ],
)
@pytest.mark.parametrize("as_zip", [True, False])
def test_weights_that_are_not_at_the_top_of_their_file_are_refused(
    wrap: Callable[[dict[str, torch.Tensor]], object], message: str, as_zip: bool, tmp_path: Path
):
    weights = checkpoint(tmp_path / "model") / "pytorch_model.bin"
    torch.save(wrap(torch.load(weights)), weights, _use_new_zipfile_serialization=as_zip)
    with pytest.raises(StoreError, match=message):
        load(weights.parent)


@pytest.mark.parametrize("beside", [{}, {"a": 1}, {"mean": torch.zeros(3)}])
def test_a_dict_beside_the_weights_is_no_error(beside: dict[str, object], tmp_path: Path):
    weights = checkpoint(tmp_path / "model") / "pytorch_model.bin"
    torch.save({**torch.load(weights), "config": beside}, weights)
    assert_loaded(weights.parent)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_masks_and_other_files_may_hold_integers(file: str, tmp_path: Path):
    folder = checkpoint(tmp_path / "model")
    weights = torch.load(folder / "pytorch_model.bin")
    weights["encoder.layer.1.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)  # GPT-2 saved such masks
    (folder / "pytorch_model.bin").unlink()
    torch.save(weights, folder / file) if file.endswith("bin") else save_file(weights, folder / file)
    save_file({"encoder.layer.1.output.dense.weight": torch.ones(2, dtype=torch.int8)}, folder / "int8.safetensors")
    assert_loaded(folder)


@pytest.mark.parametrize("copy", ["ema", "backbone.teacher"])
def test_one_of_two_prefixes_is_stripped(copy: str, tmp_path: Path):
    weights = checkpoint(tmp_path / "model") / "pytorch_model.bin"
    plain = torch.load(weights)
    twice = {f"model.{name}": tensor for name, tensor in plain.items()}
    torch.save({**twice, **{f"{copy}.{name}": tensor + 1 for name, tensor in plain.items()}}, weights)
    assert_loaded(weights.parent)


def test_a_folder_with_an_adapter_alone_names_peft(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"adapter of PEFT and no model.*merge_and_unload"):
        load(tmp_path)


def test_a_key_that_a_config_has_twice_counts_as_in_transformers(tmp_path: Path):
    folder = save_base(tmp_path / "model")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("{", '{"num_hidden_layers": 1,', 1))
    assert load(folder)[0].config.num_hidden_layers == 3  # the last value


@pytest.mark.parametrize("place", ["../outside.safetensors", "/outside.safetensors", "in/../../outside.safetensors"])
def test_an_index_that_leads_out_of_the_folder_is_refused(place: str, tmp_path: Path):
    folder = save_base(tmp_path / "model")
    index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": place}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StoreError, match="outside of the folder"):
        load(folder)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_a_model_folder_is_refused(file: str, tmp_path: Path):
    folder = save_base(tmp_path / "model")
    (folder / file).unlink()
    os.mkfifo(folder / file)
    with pytest.raises(LaminaError):
        load(folder)


@pytest.mark.parametrize(
    "file", one_in(3, ["lamina.json", "readers/mood/reader.json", "readers/mood/model.safetensors"])
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_in_a_bank_is_refused(file: str, kind: str, tmp_path: Path):
    save_bank(tiny_bank(), tmp_path / "bank")
    (path := tmp_path / "bank" / file).unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(StoreError, match=f"{path.name} is no file"):
        load_bank(tmp_path / "bank", tiny_model())


def test_many_readers_in_a_manifest_take_no_time(tmp_path: Path):
    save_bank(tiny_bank(), tmp_path / "bank")
    path = tmp_path / "bank" / "lamina.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"readers": [f"r{n}" for n in range(100_000)]}))
    with pytest.raises(StoreError, match=r"r0.reader\.json is not there"):
        load_bank(tmp_path / "bank", tiny_model())


@pytest.mark.parametrize("value", ["x", [8], 8.5])
def test_a_length_that_is_no_number_is_damage(value: Any, tmp_path: Path):
    bank = tiny_bank()
    bank["mood"].info["max_length"] = value
    save_bank(bank, tmp_path / "bank")
    with pytest.raises(StoreError, match=r"reader\.json has .* as 'max_length' of 'info'; it must be a number"):
        load_bank(tmp_path / "bank", tiny_model())


def test_a_bank_is_no_model():
    bank: Any = tiny_bank()
    with pytest.raises(ConfigError, match=r"got a ReaderBank, which is not a model; .* bank\.model"):
        ReaderBank(bank)
