from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.stored import tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    BertModel,
    RwkvConfig,
    RwkvModel,
)

from lamina.bank import Reader, ReaderBank
from lamina.editing.freeze import freeze_
from lamina.editing.insert import insert_
from lamina.editing.keep import truncate_
from lamina.editing.merge import merge_
from lamina.editing.record import edits, location_of
from lamina.editing.reinit import reinit_
from lamina.errors import ModelNotFoundError, StoreError, UnknownNameError, UnsupportedModelError
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers import stacks
from lamina.store import load, outline, save, save_model
from lamina.store.bank_folder import claimed_output
from lamina.store.save_model import RECORD, move


@torch.no_grad()
def output(model: Any, name: str) -> torch.Tensor:
    return model.eval()(**FAMILIES[name].inputs(model))[0]


def shake(model: Any) -> None:
    """Move every weight, so that none is what a fresh insertion or a fresh model would have."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter += (0.02 * noise).to(parameter.dtype)


def comes_back(model: Any, folder: Path, name: str, auto: Any) -> Any:
    save(model, folder)
    again = load(folder, auto)[0]
    assert type(again) is type(model)
    assert torch.equal(output(again, name), output(model, name))
    assert edits(again) == edits(model)
    mine, theirs = model.state_dict(), again.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    ignored = {"_name_or_path", "dtype"}
    kept, got = ({k: v for k, v in each.config.to_dict().items() if k not in ignored} for each in (model, again))
    assert kept == got
    assert not again.training
    return again


@pytest.mark.parametrize(
    "name", one_in(5, ["bert-SequenceClassification", "gpt2-CausalLM", "bart-Seq2SeqLM", "deberta-v2", "vit"])
)
def test_every_edit_comes_back(name, tmp_path: Path):
    model = FAMILIES[name].known()
    insert_(model, "both", [1, 2])
    reinit_(model, 1)
    insert_(model, "attention", 1, init="xavier", placement="output", activation="relu")
    truncate_(model, 2)
    freeze_(model, train="inserted")
    shake(model)
    comes_back(model, tmp_path, name, FAMILIES[name].auto)


@pytest.mark.long
def test_parts_that_train_come_back(tmp_path: Path):
    model = FAMILIES["bert-SequenceClassification"].known()
    insert_(model, "both", [1, 2])
    freeze_(model)
    freeze_(model, train=["inserted", "classifier", "bert.embeddings"])
    shake(model)
    comes_back(model, tmp_path, "bert-SequenceClassification", FAMILIES["bert-SequenceClassification"].auto)
    backbone, _ = load(tmp_path, AutoModel)
    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in backbone.named_parameters() if "inserted" in name or "embeddings" in name}


def test_a_frozen_pooler_is_not_missed_where_there_is_none(tmp_path: Path):
    """As in DeBERTa, whose pooler is a part of the head."""
    model = FAMILIES["deberta-v2-SequenceClassification"].known()
    insert_(model, "attention")
    freeze_(model, train=["inserted", "classifier"])
    save(model, tmp_path)
    again, _ = load(tmp_path, "sequence_classification")
    frozen = {name for name, parameter in again.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert "pooler.dense.weight" in frozen
    backbone, _ = load(tmp_path, AutoModel)
    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in backbone.named_parameters() if "inserted" in name}


def test_half_precision_keeps_wide_inserted_layers(tmp_path: Path):
    model = FAMILIES["bert"].known().to(torch.bfloat16)
    insert_(model, "ffn")
    again = comes_back(model, tmp_path, "bert", AutoModel)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16, torch.float32}


@pytest.mark.long
@pytest.mark.parametrize("layers", one_in(5, ["all", "top:2", "2-", [3], [1, -1]]))
def test_what_was_inserted_before_a_cut_comes_back(layers, tmp_path: Path):
    model = FAMILIES["bart"].known()
    insert_(model, "ffn", layers, stack="encoder")
    if layers == "all":
        insert_(model, "attention", "all", stack="all")
    truncate_(model, 2, stack="encoder")
    shake(model)
    comes_back(model, tmp_path, "bart", AutoModel)


def test_a_merged_model_is_plain(tmp_path: Path):
    model = FAMILIES["bert"].known()
    insert_(model, "both")
    freeze_(model, train="inserted")
    merge_(model)
    insert_(model, "ffn", 3)
    merge_(model)
    again = comes_back(model, tmp_path, "bert", AutoModel)
    plain, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(output(plain, "bert"), output(again, "bert"))


def test_layers_inserted_after_a_merge_come_back(tmp_path: Path):
    model = FAMILIES["bert"].known()
    insert_(model, "both", [1, 2])
    merge_(model)
    insert_(model, "ffn", 3)
    shake(model)
    comes_back(model, tmp_path, "bert", AutoModel)


def test_a_model_without_edits_is_loaded_as_transformers_does(tmp_path: Path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "plain")
    save(model, tmp_path / "saved")
    for folder in ("plain", "saved"):
        for auto in (AutoModel, "AutoModel", BertModel):
            again = load(tmp_path / folder, auto)[0]
            assert edits(again) == []
            assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_models_own_class_loads_it(tmp_path: Path):
    model = FAMILIES["bert"].known()
    insert_(model, "ffn", 1)
    shake(model)
    comes_back(model, tmp_path, "bert", BertModel)


def test_a_family_whose_layers_cannot_be_read_is_saved_and_loaded(tmp_path: Path):
    model = FAMILIES["swin"].known()
    save(model, tmp_path)
    again = load(tmp_path, "AutoModelForImageClassification")[0]
    assert all(torch.equal(value, again.swin.state_dict()[key]) for key, value in model.state_dict().items())


def test_a_head_that_the_family_does_not_have(tmp_path: Path):
    model = tiny_model()
    truncate_(model, 1)
    save(model, tmp_path)
    with pytest.raises(UnsupportedModelError, match="the family 'bert' is not supported; Unrecognized configuration"):
        load(tmp_path, "AutoModelForImageClassification")


@pytest.mark.long
def test_the_backbone_and_another_head_can_be_loaded(tmp_path: Path, caplog):
    model = FAMILIES["bert-SequenceClassification"].known()
    insert_(model, "ffn", 1)
    freeze_(model, "0-1")
    shake(model)
    save(model, tmp_path)
    backbone = load(tmp_path)[0]
    assert [each.name for each in caplog.records if each.name.startswith("lamina")] == []
    assert torch.equal(output(backbone, "bert"), output(model.bert, "bert"))
    names = set(dict(backbone.named_parameters()))
    assert all(name in names for edit in edits(backbone) for name in edit.parameters)
    assert not backbone.embeddings.word_embeddings.weight.requires_grad
    headed = load(tmp_path, "AutoModelForTokenClassification")[0]
    assert torch.equal(output(headed.bert, "bert"), output(model.bert, "bert"))
    save(headed, tmp_path / "without pooler")
    assert load(tmp_path / "without pooler")[0].pooler is not None
    assert "has no weights for pooler.dense.bias, pooler.dense.weight; they start at random" in caplog.text
    save(backbone, tmp_path / "backbone")
    headed = load(tmp_path / "backbone", AutoModelForSequenceClassification)[0]
    assert "has no weights for classifier.bias, classifier.weight; they start at random" in caplog.text
    assert torch.equal(output(headed.bert, "bert"), output(model.bert, "bert"))


def test_an_outline_has_the_inserted_layers_and_no_weights(tmp_path: Path):
    model = FAMILIES["gpt2-CausalLM"].known()
    insert_(model, "both")
    save(model, tmp_path)
    for path in (tmp_path / "model.safetensors",):
        path.unlink()
    drawn = outline(tmp_path, "AutoModelForCausalLM")
    assert {p.device.type for p in drawn.parameters()} == {"meta"}
    assert {n: p.shape for n, p in drawn.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert edits(drawn) == edits(model)


def test_a_model_whose_config_has_settings_of_single_blocks_is_saved(tmp_path: Path):
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "vocab_size": 99, "layer_types": kinds}
    config = AutoConfig.for_model(
        "gemma4_text", **sizes, **more, num_key_value_heads=1, head_dim=8, global_head_dim=16, pad_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    assert [config.per_layer_config[block].head_dim for block in range(2)] == [8, 16]
    save(model, tmp_path)
    again, _ = load(tmp_path, "AutoModelForCausalLM")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_saving_again_replaces_and_leaves_other_files(tmp_path: Path):
    model = tiny_model()
    save(model, tmp_path, tiny_tokenizer())
    (tmp_path / "notes.txt").write_text("mine")
    truncate_(model, 1)
    save(model, tmp_path)
    assert stacks(load(tmp_path)[0])["main"].depth == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == len(tiny_tokenizer())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_processor_of_an_earlier_save_is_still_a_part_of_the_model(tmp_path: Path):
    save(tiny_model(), tmp_path / "one", tiny_tokenizer())
    save(tiny_model(), tmp_path / "one")
    move(tmp_path / "one", tmp_path / "other")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "other")) == len(tiny_tokenizer())
    assert not (tmp_path / "one").exists()


def test_a_model_that_something_else_saved_is_not_overwritten(tmp_path: Path):
    tiny_model().save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoreError, match=f"holds config.json, .* but no {RECORD}; it was made by something else"):
        save(tiny_model(seed=1), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["gpt2-SequenceClassification", "bert-SequenceClassification", "t5-Seq2SeqLM"])
def test_a_backbone_does_not_replace_the_model_with_a_head_that_it_came_from(name, tmp_path: Path):
    folder = tmp_path / "model"
    save(FAMILIES[name].known(), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    backbone, _ = load(folder)
    architecture = type(FAMILIES[name].known()).__name__
    loaded = rf"this {type(backbone).__name__} was loaded from there without its head"
    with pytest.raises(StoreError, match=rf"holds a {architecture}, and {loaded}.* Load it with head='{architecture}'"):
        save(backbone, tmp_path / "." / "model")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save(load(folder, architecture)[0], folder)
    save(backbone, tmp_path / "backbone")
    save(load(folder)[0], folder, force=True)
    save(load(folder)[0], folder)  # the head is gone, so nothing more can be lost


def test_a_model_with_another_head_does_not_replace_the_model_that_it_came_from(tmp_path: Path):
    save(FAMILIES["gpt2-CausalLM"].known(), tmp_path / "model")
    classifier, _ = load(tmp_path / "model", "sequence_classification", labels=["no", "yes"])
    with pytest.raises(StoreError, match="holds a GPT2LMHeadModel, and this GPT2ForSequenceClassification was loaded"):
        save(classifier, tmp_path / "model")
    with pytest.raises(StoreError, match=r"^finetune: .* or give another folder\.$"):  # before the training
        claimed_output(classifier, tmp_path / "model", op="finetune")
    save(classifier, tmp_path / "classifier")
    save(load(tmp_path / "model")[0], tmp_path / "backbone")
    save(load(tmp_path / "backbone", "causal_lm")[0], tmp_path / "backbone")  # no head is there


def test_a_backbone_does_not_replace_a_model_of_a_class_that_transformers_does_not_have(tmp_path: Path):
    class Mine(BertForSequenceClassification):
        pass

    save(Mine(tiny_model().config), tmp_path)
    with pytest.raises(StoreError, match=r"^save: .*holds a Mine, .*Load it with head=Mine, .*; force=True gives the"):
        save(load(tmp_path)[0], tmp_path)
    save(load(tmp_path, Mine)[0], tmp_path)
    save(load(tmp_path)[0], tmp_path, force=True)


def test_a_class_with_the_head_of_the_folders_model_may_replace_it(tmp_path: Path):
    class Mine(BertForSequenceClassification):
        pass

    save(FAMILIES["bert-SequenceClassification"].known(), tmp_path)
    save(load(tmp_path, Mine)[0], tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Mine"]


def test_a_folder_is_known_after_the_working_directory_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    save(FAMILIES["bert-SequenceClassification"].known(), "model")
    backbone, _ = load("model")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    assert location_of(backbone) == str(tmp_path / "model")
    with pytest.raises(StoreError, match="was loaded from there without its head"):
        save(backbone, tmp_path / "model")
    assert backbone.name_or_path == "model"


def test_a_save_that_fails_changes_nothing(tmp_path: Path, monkeypatch):
    model = tiny_model()
    save(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(model), "save_pretrained", fail)
    with pytest.raises(StoreError, match="No space left on device"):
        save(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    model = tiny_model()
    insert_(model, "ffn", [1, 3])
    reinit_(model, 2)
    save(model, tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    fields = json.loads((folder / RECORD).read_text())
    change(fields)
    (folder / RECORD).write_text(json.dumps(fields))


def swap_weights(folder: Path, model: Any) -> None:
    """Put the weights of another model beside this record."""
    model.save_pretrained(folder / "other")
    (folder / "other" / "model.safetensors").replace(folder / "model.safetensors")
    (folder / "other" / "config.json").replace(folder / "config.json")


def test_inserted_weights_that_are_missing(edited: Path):
    swap_weights(edited, tiny_model())
    with pytest.raises(StoreError, match=r"no weight 'encoder\.layer\.0\.output\.dense\.inserted_0\.weight'"):
        load(edited)


def test_inserted_weights_without_a_record_of_them(edited: Path):
    rewrite(edited, lambda fields: fields.update(edits=fields["edits"][1:]))
    with pytest.raises(StoreError, match=r"'encoder\.layer\.0\.output\.dense\.inserted_0\.weight' has no place"):
        load(edited)


def test_inserted_weights_of_another_shape(edited: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(edited / "model.safetensors")
    tensors["encoder.layer.0.output.dense.inserted_0.weight"] = torch.eye(16)
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        StoreError, match=r"'encoder\.layer\.0\.output\.dense\.inserted_0\.weight' is \(16, 16\) instead of"
    ):
        load(edited)


def test_weights_that_are_missing_or_too_many(edited: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(edited / "model.safetensors")
    lost = tensors.pop("encoder.layer.1.output.dense.weight")
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match=r"there is no weight 'encoder\.layer\.1\.output\.dense\.weight'"):
        load(edited)
    tensors |= {"encoder.layer.1.output.dense.weight": lost, "encoder.layer.3.output.dense.weight": lost.clone()}
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match=r"the weight 'encoder\.layer\.3\.output\.dense\.weight' has no place"):
        load(edited)


def test_weights_of_another_shape_or_damaged(edited: Path):
    config = json.loads((edited / "config.json").read_text())
    (edited / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(StoreError, match=r"do not fit its config.json: '.*' is \(.*\) instead of \(.*40.*\)"):
        load(edited)
    (edited / "config.json").write_text(json.dumps(config))
    weights = edited / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:999])
    with pytest.raises(StoreError, match=r"cannot be read .*damaged or cut off"):
        load(edited)


def test_a_record_that_names_what_is_not_there(edited: Path):
    rewrite(edited, lambda fields: fields["edits"][1].update(parameters=["encoder.layer.9.weight"]))
    with pytest.raises(StoreError, match=r"the record names 'encoder\.layer\.9\.weight', which is not there"):
        load(edited)


def test_weights_of_layers_that_are_missing_under_another_head(edited: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(edited / "model.safetensors")
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, edited / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match=r"no weight 'bert\.encoder\.layer\.1\.output\.dense\.weight'"):
        load(edited, AutoModelForSequenceClassification)


def test_a_cut_block_that_is_back(tmp_path: Path):
    model = tiny_model()
    truncate_(model, 2)
    save(model, tmp_path)
    swap_weights(tmp_path, tiny_model())
    with pytest.raises(StoreError, match=r"'encoder\.layer\.2\..*' was removed by an edit, but it is there"):
        load(tmp_path)


def test_a_record_of_another_format(edited: Path):
    rewrite(edited, lambda fields: fields.update(format=99))
    with pytest.raises(StoreError, match="has format 99; this version of lamina reads format 1"):
        load(edited)


def test_a_sharded_checkpoint_that_lacks_a_shard(edited: Path):
    model = load(edited)[0]
    model.save_pretrained(edited, max_shard_size="20KB")
    (edited / "model.safetensors").unlink(missing_ok=True)
    again = load(edited)[0]
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
    index = json.loads((edited / "model.safetensors.index.json").read_text())
    (edited / index["weight_map"]["encoder.layer.0.output.dense.inserted_0.weight"]).unlink()
    with pytest.raises(StoreError, match="is incomplete"):
        load(edited)


def test_a_model_that_is_not_there(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match="no model"):
        load(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match="no model"):
        load("no/such")
    save(tiny_model(), tmp_path)
    with pytest.raises(UnknownNameError, match="unknown head 'AutoModelForNothing'"):
        load(tmp_path, "AutoModelForNothing")


def test_an_edited_model_generates_the_same(tmp_path: Path):
    model = FAMILIES["gpt2-CausalLM"].known()
    insert_(model, "both")
    shake(model)
    save(model, tmp_path)
    inputs = FAMILIES["gpt2"].inputs(model, batch=1)
    one, other = (
        m.generate(**inputs, max_new_tokens=5, do_sample=False)
        for m in (model, load(tmp_path, AutoModelForCausalLM)[0])
    )
    assert torch.equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize("edited", [False, True])
def test_a_head_for_other_classes(edited, tmp_path: Path):
    model = FAMILIES["bert-SequenceClassification"].known()
    if edited:
        insert_(model, layers=1)
    save(model, tmp_path)
    again: Any = load(tmp_path, "AutoModelForSequenceClassification", labels=["a", "b", "c", "d", "e"])[0]
    assert again.config.id2label == dict(enumerate("abcde"))
    assert again(**FAMILIES["bert-SequenceClassification"].inputs(model)).logits.shape[-1] == 5
    body, mine = (each.base_model.state_dict() for each in (again, model))
    assert body.keys() == mine.keys()
    assert all(torch.equal(body[key], mine[key]) for key in mine)
    own = BertForSequenceClassification
    assert load(tmp_path, own, labels=["no", "yes", "so"])[0].config.num_labels == 3


def test_a_model_whose_blocks_were_taken_out_by_hand_is_not_loaded_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(save_model, "check_reloads", lambda *_: None)  # as a program that does not check
    model = tiny_model()
    del model.encoder.layer[-1]
    save(model, tmp_path)
    with pytest.raises(StoreError, match=r"are not those .* there is no weight 'encoder\.layer"):
        load(tmp_path)


@torch.no_grad()
def test_a_model_that_rescales_its_weights_is_read_and_saved_as_it_is(tmp_path: Path):
    """RWKV divides weights at its first pass in eval mode; a second division would give another model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 4, "rescale_every": 1}
    model = RwkvModel(RwkvConfig(vocab_size=60, **sizes)).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = deepcopy(model)(ids).last_hidden_state
    bank = ReaderBank(model)
    bank.add("r", Reader(AdaLayers(dim=8), SequenceClassification(["a", "b"])))
    for _ in range(2):
        assert torch.equal(bank.eval()(input_ids=ids, main=True).main.last_hidden_state, expected)
    save(model, tmp_path)
    assert torch.equal(model(ids).last_hidden_state, expected)
    assert torch.equal(load(tmp_path)[0](ids).last_hidden_state, expected)
    assert torch.equal(bank(input_ids=ids, main=True).main.last_hidden_state, expected)
