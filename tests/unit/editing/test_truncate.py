from __future__ import annotations

from inspect import unwrap
from pathlib import Path

import pytest
import torch
from tests.support.portions import one_in
from tests.support.stored import tiny_config, tiny_model
from tests.support.tiny import FAMILIES
from transformers import AutoModel, AutoModelForSeq2SeqLM, BertModel

from lamina.editing.insert import insert_
from lamina.editing.keep import truncate_
from lamina.editing.record import edits
from lamina.errors import ConfigError, UnknownNameError
from lamina.layers import stacks


@pytest.mark.parametrize("keep", [1, 2])
@torch.no_grad()
def test_the_pooler_is_kept_and_reads_the_new_top(keep):
    model, full = tiny_model(), tiny_model()
    inputs = {"input_ids": torch.arange(2, 12)[None]}
    edit = truncate_(model, keep)
    output, before = model(**inputs), full(**inputs, output_hidden_states=True)
    assert torch.equal(output.last_hidden_state, before.hidden_states[keep])
    assert torch.equal(output.pooler_output, full.pooler(before.hidden_states[keep]))
    assert edit.layers == tuple(range(keep + 1, 4))
    assert set(edit.parameters) == {n for n, _ in full.named_parameters()} - {n for n, _ in model.named_parameters()}
    assert edit.settings == {"keep": keep, "stack": "main"}
    assert (model.config.num_hidden_layers, stacks(model)["main"].depth) == (keep, keep)


@torch.no_grad()
def test_the_final_norm_stays():
    model, full = FAMILIES["llama"].known(), FAMILIES["llama"].known()
    inputs = FAMILIES["llama"].inputs(model)
    truncate_(model, 1)
    state = full(**inputs, output_hidden_states=True).hidden_states[1]
    assert torch.equal(model(**inputs).last_hidden_state, full.norm(state))


def test_of_tied_weights_those_that_are_gone_are_forgotten():
    model = tiny_model()
    gone = {"encoder.layer.2.output.dense.bias": "encoder.layer.0.output.dense.bias"}
    kept = {"encoder.layer.1.output.dense.bias": "encoder.layer.0.output.dense.bias"}
    model.all_tied_weights_keys = {**gone, **kept}
    truncate_(model, 2)
    assert model.all_tied_weights_keys == kept


@pytest.mark.parametrize("name", one_in(3, ["bart-Seq2SeqLM", "t5-Seq2SeqLM", "whisper-SpeechSeq2Seq"]))
def test_both_stacks_are_cut_and_it_generates(name, tmp_path: Path):
    model = FAMILIES[name].known()
    truncate_(model, 2, stack="encoder")
    truncate_(model, 1, stack="decoder")
    assert {stack: found.depth for stack, found in stacks(model).items()} == {"encoder": 2, "decoder": 1}
    inputs = FAMILIES[name].inputs(model)
    del inputs["decoder_input_ids"]
    inputs = {key: value[:1] for key, value in inputs.items()}
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    one, other = (each.generate(**inputs, max_new_tokens=4, num_beams=2) for each in (model, again))
    assert torch.equal(one, other)


def test_the_encoder_is_the_default():
    model = FAMILIES["bart"].known()
    assert truncate_(model, 1).stack == "encoder"
    assert (model.config.encoder_layers, model.config.decoder_layers) == (1, 2)


def test_lists_with_an_entry_per_layer_are_cut():
    model = FAMILIES["gemma2"].known()
    truncate_(model, 1)
    assert model.config.layer_types == ["sliding_attention"]
    model = FAMILIES["gpt_neo"].known()
    truncate_(model, 1)
    assert model.config.attention_layers == ["global"]
    model = FAMILIES["dinov2"].known()
    truncate_(model, 1)
    assert (model.config.stage_names, model.config.out_features) == (["stem", "stage1"], ["stage1"])


def test_configs_and_counters_inside_the_model_follow():
    model = FAMILIES["t5"].known()
    truncate_(model, 1, stack="decoder")
    assert (model.config.num_layers, model.config.num_decoder_layers) == (3, 1)
    assert (model.encoder.config.num_layers, model.decoder.config.num_layers) == (3, 1)
    model = FAMILIES["distilbert"].known()
    truncate_(model, 2)
    assert (model.config.n_layers, model.transformer.n_layers) == (2, 2)


def test_layers_that_are_one_block():
    model = FAMILIES["albert"].known()
    count = model.num_parameters()
    edit = truncate_(model, 2)
    assert edit.parameters == ()
    assert edit.layers == (3,)
    assert (model.num_parameters(), stacks(model)["main"].depth, model.config.num_hidden_layers) == (count, 2, 2)


def test_keeping_all_changes_nothing():
    model = tiny_model()
    edit = truncate_(model, 3)
    assert (edit.layers, edit.parameters) == ((), ())
    assert model.config.num_hidden_layers == len(model.encoder.layer) == 3
    assert edits(model) == []


def test_a_model_without_its_pooler_or_with_inserted_layers_is_fine():
    bare = BertModel(tiny_config(), add_pooling_layer=False)
    assert truncate_(bare, 1).layers == (2, 3)
    model = tiny_model()
    names = insert_(model, "ffn").parameters
    assert set(names[1:]) < set(truncate_(model, 1).parameters)
    assert names[0] in dict(model.named_parameters())


@pytest.mark.parametrize("keep", [0, -1, 4, True, 1.5, "2"])
def test_invalid_values_of_keep(keep):
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"the main stack has 3 blocks, and one at least must stay\. Use 1\.\.3"):
        unwrap(truncate_)(model, keep)  # without the type checks of the tests
    assert len(model.encoder.layer) == 3


def test_unknown_stacks_and_models_without_blocks():
    with pytest.raises(UnknownNameError, match="unknown stack 'decoder'"):
        truncate_(tiny_model(), 1, stack="decoder")
    with pytest.raises(ConfigError, match="'xlm' has no module per block"):
        truncate_(FAMILIES["xlm"].known(), 1)


def test_shapes_that_follow_from_the_depth():
    model = FAMILIES["esm"].known()
    with pytest.raises(ConfigError, match=r"shape of contact_head\..* depends on the number of blocks"):
        truncate_(model, 1)
    assert model.config.num_hidden_layers == len(model.encoder.layer) == 3


def test_a_config_that_does_not_say_the_depth():
    model = tiny_model()
    model.config.num_hidden_layers = 7
    with pytest.raises(ConfigError, match="no entry of the config says that the main stack has 3 blocks"):
        truncate_(model, 1)
    assert len(model.encoder.layer) == 3


def test_a_config_that_does_not_hold_together(monkeypatch):
    model = tiny_model()

    from_dict, refused = type(model.config).from_dict, [1]

    def refuse(fields, **options):
        if fields["num_hidden_layers"] in refused:
            raise ValueError("1 does not fit")
        return from_dict(fields, **options)

    monkeypatch.setattr(type(model.config), "from_dict", refuse)
    with pytest.raises(
        ConfigError, match=r"with 1 blocks the config does not hold together \(ValueError: 1 d"
    ) as error:
        truncate_(model, 1)
    assert isinstance(error.value.__cause__, ValueError)
    refused.append(3)
    with pytest.raises(ConfigError, match=r"no model can be built from the config \(ValueError: 1 d.* load it anew"):
        truncate_(model, 1)
    assert model.config.num_hidden_layers == len(model.encoder.layer) == 3


def test_blocks_in_no_list():
    model = tiny_model()
    model.encoder.layer = torch.nn.ModuleList([*model.encoder.layer, torch.nn.Identity()])
    del model.encoder.layer[-1]
    assert truncate_(model, 2)
    model = tiny_model()
    blocks = list(model.encoder.layer)
    del model.encoder.layer

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = blocks

        def __iter__(self):
            return iter((self.one, self.two, self.three))

        def __getitem__(self, which):
            return list(self)[which]

    model.encoder.layer = Twice()
    with pytest.raises(ConfigError, match="the blocks of the main stack are in no list of their own"):
        truncate_(model, 1)


def test_plain_auto_classes_load_it(tmp_path: Path):
    model = FAMILIES["t5-Seq2SeqLM"].known()
    truncate_(model, 1)
    model.save_pretrained(tmp_path)
    for auto in (AutoModel, AutoModelForSeq2SeqLM):
        again = auto.from_pretrained(tmp_path)
        assert (len(again.encoder.block), len(again.decoder.block)) == (1, 2)
