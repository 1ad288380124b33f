from __future__ import annotations

from inspect import unwrap
from typing import Any

import pytest
import torch
import transformers
from tests.support.stored import tiny_model
from tests.support.tiny import FAMILIES, Passing

from lamina.editing.freeze import freeze_
from lamina.editing.insert import insert_
from lamina.editing.record import edits
from lamina.errors import ConfigError, LayerIndexError, UnknownNameError
from lamina.layers import stacks


def frozen(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def starts(model, *prefixes: str) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}


def test_all_is_the_stack_without_pooler_and_head():
    model = FAMILIES["bert-SequenceClassification"].known()
    edit = freeze_(model)
    assert frozen(model) == starts(model, "bert.embeddings", "bert.encoder") == set(edit.parameters)
    assert edit.layers == (0, 1, 2, 3)
    assert edit.settings == {"layers": "all", "stack": "main", "train": None}
    assert edits(model) == [edit]


def test_layer_0_is_the_embeddings():
    model = tiny_model()
    edit = freeze_(model, [0, 2])
    assert frozen(model) == starts(model, "embeddings", "encoder.layer.1.") == set(edit.parameters)
    assert edit.layers == (0, 2)


def test_embeddings_that_both_stacks_read_are_layer_0_of_the_decoder_too():
    model = FAMILIES["bart"].build()
    model.decoder.embed_tokens = model.encoder.embed_tokens
    freeze_(model, 0, stack="decoder")
    assert frozen(model) >= {"shared.weight", "decoder.embed_positions.weight"}


def test_the_norm_after_the_blocks_goes_with_the_last_layer():
    model = FAMILIES["llama"].known()
    freeze_(model, 0)
    assert frozen(model) == starts(model, "embed_tokens")
    freeze_(model, -1)
    assert frozen(model) == starts(model, "embed_tokens", "layers.2.", "norm")
    model = FAMILIES["roberta-prelayernorm"].known()
    freeze_(model, "0-2")
    assert frozen(model) == starts(model, "embeddings", "encoder.layer.0.", "encoder.layer.1.")


def test_weights_that_blocks_use_from_outside_are_layer_0():
    model = FAMILIES["deberta-v2"].known()
    freeze_(model, 0)
    assert frozen(model) == starts(model, "embeddings", "encoder.rel_embeddings", "encoder.LayerNorm")


@pytest.mark.parametrize("name", ["bart-Seq2SeqLM", "t5-Seq2SeqLM"])
def test_a_decoder_leaves_the_encoder_alone(name):
    model = FAMILIES[name].known()
    freeze_(model, stack="decoder")
    blocks = [p for block in stacks(model)["encoder"].blocks for p in block.parameters()]
    assert all(parameter.requires_grad for parameter in blocks)
    assert not any(p.requires_grad for block in stacks(model)["decoder"].blocks for p in block.parameters())
    assert not model.get_input_embeddings().weight.requires_grad  # shared: the decoder reads it too
    model = FAMILIES[name].known()
    freeze_(model, stack="encoder")
    assert all(p.requires_grad for block in stacks(model)["decoder"].blocks for p in block.parameters())


def test_it_runs_without_weights():
    from transformers import AutoModel

    for name in ("bert", "bart", "wav2vec2"):
        with torch.device("meta"):
            model = AutoModel.from_config(FAMILIES[name].config())
        assert {0} == set(freeze_(model, 0).layers)
        assert 0 < len(frozen(model)) < len(list(model.parameters()))


def test_only_the_inserted_layers_and_the_head_train():
    model = FAMILIES["bert-SequenceClassification"].known()
    model.requires_grad_(False)
    for part in (model.classifier, model.bert.pooler):
        part.requires_grad_(True)
    inserted = insert_(model, "both", [1, 2]).parameters
    model.get_parameter(inserted[0]).requires_grad_(False)
    edit = freeze_(model, train="inserted")
    free = {name for name, _ in model.named_parameters()} - frozen(model)
    assert free == {*inserted, *starts(model, "classifier", "bert.pooler")}
    assert not set(inserted) & set(edit.parameters)
    model(**FAMILIES["bert"].inputs(model), labels=torch.tensor([0, 1])).loss.backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == free


def test_only_the_inserted_layers_of_both_stacks_train():
    model = FAMILIES["bart-Seq2SeqLM"].known()
    inserted = insert_(model, "ffn", stack="all").parameters
    edit = freeze_(model, train="inserted")
    assert {name for name, _ in model.named_parameters()} - frozen(model) == set(inserted)
    assert (edit.stack, edit.settings["stack"]) == ("all", None)


def free(model) -> set[str]:
    return {name for name, _ in model.named_parameters()} - frozen(model)


def test_a_list_trains_its_parts_and_freezes_all_else():
    model = FAMILIES["bert-SequenceClassification"].known()
    inserted = insert_(model, "both", [1, 2]).parameters
    model.classifier.requires_grad_(False)
    edit = freeze_(model, train=["inserted", "classifier"])
    assert free(model) == {*inserted, *starts(model, "classifier.")}
    assert set(edit.parameters) == frozen(model) >= starts(model, "bert.pooler", "bert.embeddings")
    assert edit.settings == {"layers": "all", "stack": None, "train": ["inserted", "classifier"]}
    assert edits(model)[-1] == edit
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(**FAMILIES["bert"].inputs(model), labels=torch.tensor([0, 1])).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.grad is not None], lr=1.0).step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == free(model)


@pytest.mark.parametrize(
    ("parts", "prefixes"),
    [
        (["pooler"], ("bert.pooler.",)),
        (["classifier.bias"], ("classifier.bias",)),
        (["layer.0"], ("bert.encoder.layer.0.",)),
        (["bert.encoder.layer.1.output", "classifier"], ("bert.encoder.layer.1.output.", "classifier.")),
        (["embed*"], ("bert.embeddings.",)),
    ],
)
def test_parts_are_named_by_what_stands_between_dots(parts: list[str], prefixes: tuple[str, ...]):
    model = FAMILIES["bert-SequenceClassification"].known()
    freeze_(model, train=parts)
    assert free(model) == starts(model, *prefixes) != set()


def test_a_pattern_stands_for_every_block():
    model = FAMILIES["bert"].known()
    freeze_(model, train=["layer.*.output.LayerNorm"])
    norms = {f"encoder.layer.{block}.output.LayerNorm.{name}" for block in range(3) for name in ("weight", "bias")}
    assert free(model) == norms


def test_tied_weights_train_under_either_name():
    model = FAMILIES["bart-Seq2SeqLM"].known()
    freeze_(model, train=["lm_head"])  # which is the embeddings
    assert free(model) == {"model.shared.weight"}


def test_parts_of_a_convolutional_network_train():
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=2)
    model = transformers.ResNetForImageClassification(config)
    freeze_(model, train=["classifier"])
    assert free(model) == starts(model, "classifier.")


def test_lists_that_cannot_be():
    model = FAMILIES["bert-SequenceClassification"].known()
    with pytest.raises(
        UnknownNameError, match=r"unknown part to train 'clasifier'; known: .*Did you mean 'classifier'"
    ):
        freeze_(model, train=["pooler", "clasifier"])
    with pytest.raises(UnknownNameError, match=r"unknown part to train 'layer\.9'; known: layer.* others"):
        freeze_(model, train=["layer.9"])
    insert_(model, "ffn")
    with pytest.raises(UnknownNameError, match=r"'adapter'; known: layer .* such as inserted, classifier, "):
        freeze_(model, train=["adapter"])
    model = FAMILIES["bert-SequenceClassification"].known()
    with pytest.raises(ConfigError, match=r"train is \['inserted', 'pooler'\], and the model has no inserted layers"):
        freeze_(model, train=["inserted", "pooler"])
    with pytest.raises(ConfigError, match=r"train is \[\]; it is 'inserted', or a list of parts of the model"):
        freeze_(model, train=[])
    for more in ({"layers": [1]}, {"stack": "main"}):
        with pytest.raises(
            ConfigError, match=r"layers or stack is set beside train=\['pooler'\]; a list freezes all that"
        ):
            freeze_(model, train=["pooler"], **more)
    assert frozen(model) == set()
    assert edits(model) == []


def test_without_train_inserted_layers_freeze_with_their_block():
    model = tiny_model()
    inserted = insert_(model, "ffn").parameters
    freeze_(model, 1)
    assert set(inserted) & frozen(model) == {inserted[0]}


def test_freezing_twice_adds_up():
    model = tiny_model()
    freeze_(model, 1)
    freeze_(model, 2)
    assert frozen(model) == starts(model, "encoder.layer.0.", "encoder.layer.1.")


def test_a_model_without_blocks_is_frozen_as_a_whole():
    model = FAMILIES["xlm"].known()
    with pytest.raises(ConfigError, match="got single layers of the main stack; it has no module per block"):
        freeze_(model, 1)
    assert frozen(model) == set()
    freeze_(model)
    assert frozen(model) == {name for name, _ in model.named_parameters()}


def test_layers_without_parameters_are_refused():
    model: Any = FAMILIES["bert"].known()
    model.encoder.layer[0].requires_grad_(False)
    freeze_(model, 1)  # says again what holds already, for a reload to know it
    model.encoder.layer[0] = Passing()
    with pytest.raises(ConfigError, match="freeze_: the named layers have no parameters"):
        freeze_(model, 1)
    assert len(edits(model)) == 1


def test_what_is_refused():
    model = tiny_model()
    with pytest.raises(UnknownNameError, match="unknown train 'heads'; known: inserted, a list of parts of the model"):
        unwrap(freeze_)(model, train="heads")  # without the type checks of the tests
    with pytest.raises(ConfigError, match=r"the model has no inserted layers\. Call insert_ first"):
        freeze_(model, train="inserted")
    with pytest.raises(LayerIndexError, match="freeze_: layer 9 does not exist"):
        freeze_(model, 9)
    with pytest.raises(UnknownNameError, match="freeze_: unknown stack 'top'"):
        freeze_(model, stack="top")
    with pytest.raises(ConfigError, match="layer 2 is not named"):
        freeze_(FAMILIES["albert"].known(), 1)
    assert frozen(model) == set()
    assert edits(model) == []
