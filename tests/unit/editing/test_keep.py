from __future__ import annotations

import weakref
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.small_configs import small_config
from tests.support.stored import tiny_config, tiny_model
from tests.support.tiny import FAMILIES
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertModel,
    PretrainedConfig,
    ProphetNetModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lamina
from lamina.editing import duplicate
from lamina.editing.block_config import cut_configs
from lamina.editing.block_order import _differing, _parts, _Plan
from lamina.editing.keep import truncate_
from lamina.editing.record import edits
from lamina.errors import ConfigError, LayerIndexError, UnknownNameError
from lamina.layers import stacks
from lamina.layers.block_moves import name_then


def same(one, other, inputs) -> bool:
    with torch.no_grad():
        return torch.equal(one(**inputs)[0], other(**inputs)[0])


def test_dropping_and_keeping_are_one():
    kept, dropped = tiny_model(), tiny_model()
    keep, drop = lamina.keep_(kept, [0, 1, 3]), lamina.drop_(dropped, "2")
    assert (keep.kind, drop.kind) == ("keep", "drop")
    assert keep.layers == drop.layers == (2,)
    assert keep.parameters == drop.parameters
    assert {name.split(".")[2] for name in drop.parameters} == {"1"}  # under their old names
    assert same(kept, dropped, {"input_ids": torch.arange(2, 12)[None]})


def test_an_order_is_undone_by_its_inverse():
    model, whole = FAMILIES["gemma2"].known(), FAMILIES["gemma2"].known()
    inputs = FAMILIES["gemma2"].inputs(model)
    lamina.keep_(model, [3, 1, 2])
    assert model.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert not same(model, whole, inputs)
    lamina.keep_(model, [2, 3, 1])
    assert same(model, whole, inputs)
    assert model.config.to_dict() == whole.config.to_dict()


def test_a_number_of_a_block_that_is_none_at_its_new_place_is_no_setting():
    class Windowed(BertModel):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for place, block in enumerate(self.encoder.layer):
                block.window = 4 if place < 2 else None

    with pytest.raises(ConfigError, match=r"there 'window' is None, not 4"):
        lamina.duplicate_(Windowed(tiny_config()), [1], identity=False)


def test_copies_that_are_dropped_leave_what_was():
    model, whole = FAMILIES["t5"].known(), FAMILIES["t5"].known()
    lamina.duplicate_(model, "1-2", stack="encoder")
    lamina.drop_(model, [3, 4], stack="encoder")
    assert same(model, whole, FAMILIES["t5"].inputs(model))
    assert list(model.state_dict()) == list(whole.state_dict())


def test_the_table_of_positions_goes_to_the_new_first_block(tmp_path: Path):
    model = FAMILIES["t5-Seq2SeqLM"].known()
    table = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    lamina.keep_(model, [2, 1], stack="encoder")
    attentions = [block.layer[0].SelfAttention for block in model.encoder.block]
    assert attentions[0].relative_attention_bias is table
    assert [attention.has_relative_attention_bias for attention in attentions] == [True, False]
    assert not hasattr(attentions[1], "relative_attention_bias")
    lamina.save(model, tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert same(model, again.eval(), FAMILIES["t5"].inputs(model))


@pytest.mark.parametrize(
    ("edit", "message"),
    one_in(
        2,
        [
            (lambda model: lamina.keep_(model, [0]), r"keep_: no block would stay; the main stack has 3 blocks"),
            (lambda model: lamina.drop_(model, "all"), r"drop_: no block would stay"),
            (lambda model: lamina.drop_(model, [0]), r"drop_: got layer 0; it is the embeddings, .* always stays"),
            (lambda model: lamina.duplicate_(model, "bottom:2"), r"duplicate_: got layer 0; it is the embeddings"),
            (lambda model: lamina.keep_(model, [1, 1]), r"names layer 1 twice"),
            (
                lambda model: lamina.duplicate_(model, [2]),
                r"block 2 of the family 'bert' ends in a norm, so that it returns",
            ),
            (lambda model: lamina.keep_(torch.compile(model), 1), "the model is compiled"),
        ],
    ),
)
def test_what_cannot_be_is_refused_and_nothing_changes(edit, message):
    model, whole = tiny_model(), tiny_model()
    with pytest.raises(ConfigError, match=message):
        edit(model)
    assert list(model.state_dict()) == list(whole.state_dict())
    assert lamina.edits(model) == []


def test_blocks_and_stacks_that_do_not_exist():
    with pytest.raises(LayerIndexError, match="layer 4 does not exist"):
        lamina.drop_(tiny_model(), 4)
    with pytest.raises(UnknownNameError, match="unknown stack 'decoder'"):
        lamina.keep_(tiny_model(), 1, stack="decoder")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
def test_a_quantised_model_is_refused():
    model = tiny_model()
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ConfigError, match="the model is quantised"):
        lamina.drop_(model, 1)
    with pytest.raises(ConfigError, match="the model is quantised"):
        lamina.drop_(torch.ao.quantization.quantize_dynamic(tiny_model(), {torch.nn.Linear}), 1)


def test_complex_weights_are_not_quantised():
    model = tiny_model()
    phases = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    model.encoder.layer[1].register_parameter("phases", phases)
    assert lamina.drop_(model, 1).layers == (1,)
    assert model.encoder.layer[0].phases is phases


def test_keeping_all_in_order_is_no_edit():
    model = tiny_model()
    assert lamina.keep_(model, "all").layers == ()
    assert lamina.edits(model) == []


@pytest.mark.parametrize(
    ("settings", "order", "expected"),
    [
        ({"mlp_only_layers": [0, 3]}, [4, 1, 1], {"mlp_only_layers": [0, 1, 2], "num_hidden_layers": 3}),
        ({"fullatt_block_indexes": (1, 3)}, [1, 2, 4], {"fullatt_block_indexes": [1, 2]}),
        ({"max_window_layers": 2}, [1, 3, 4], {"max_window_layers": 1}),
        ({"layer_rope_theta": [1.0, 2.0, 3.0, 4.0]}, [4, 2], {"layer_rope_theta": [4.0, 2.0]}),
        (
            {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
            [2, 4],
            {"decoder_sparse_step": 1, "mlp_only_layers": [1]},
        ),
        ({"num_kv_shared_layers": 2}, [1, 2, 4], {"num_kv_shared_layers": 1}),
        ({"block_types": ["linear", "full"]}, [2, 3], {"block_types": ["full", "linear"]}),
    ],
)
def test_settings_of_single_blocks_follow(settings, order, expected):
    config = PretrainedConfig(num_hidden_layers=4, **settings)
    first = next(cut_configs(config, "main", 4, order, "keep_"))
    assert {name: getattr(first, name) for name in expected} == expected
    assert config.num_hidden_layers == 4


def test_a_name_for_the_depth_of_the_decoder_is_not_that_of_the_encoder():
    config = AutoConfig.for_model("moonshine", encoder_num_hidden_layers=3, decoder_num_hidden_layers=3)
    first = next(cut_configs(config, "encoder", 3, [1, 3], "keep_"))
    assert (first.encoder_num_hidden_layers, first.decoder_num_hidden_layers) == (2, 3)


def test_a_setting_that_cannot_be_set_follows_from_another(tmp_path: Path):
    config = small_config(CONFIG_MAPPING["prophetnet"])  # its `num_hidden_layers` is that of the encoder, and read only
    model = ProphetNetModel(config).eval()
    batch = {"input_ids": torch.arange(5, 11)[None], "decoder_input_ids": torch.arange(7, 11)[None]}
    lamina.drop_(model, 2, stack="decoder")
    model.save_pretrained(tmp_path)
    again = ProphetNetModel.from_pretrained(tmp_path).eval()
    assert (again.config.num_encoder_layers, again.config.num_decoder_layers) == (4, 3)
    assert torch.equal(again(**batch).last_hidden_state, model(**batch).last_hidden_state)


def test_the_decoder_of_a_bart_is_edited_by_itself():
    model = AutoModelForCausalLM.from_config(FAMILIES["bart"].config()).eval()
    lamina.duplicate_(model, "all", identity=False)
    assert (model.config.decoder_layers, model.config.num_hidden_layers) == (4, 4)  # the latter counts the cache
    ids = torch.arange(5, 11)[None]
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    cached, plain = (model.generate(ids, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


def test_a_setting_for_the_cache_goes_with_the_blocks_that_need_it():
    model, whole = FAMILIES["t5"].known(), FAMILIES["t5"].known()
    lamina.duplicate_(model, "all", identity=False, stack="decoder")
    assert model.config.decoder_layers == model.decoder.config.decoder_layers == 4
    lamina.keep_(model, "bottom:3", stack="decoder")
    assert model.config.to_dict() == whole.config.to_dict()


def test_a_table_with_a_part_per_block_follows():
    settings = {**FAMILIES["llama"].settings, "num_hidden_layers": 3, "hidden_size_per_layer_input": 4}
    config = AutoConfig.for_model("gemma4_text", **settings, layer_types=["full_attention"] * 3)
    model, whole = (AutoModel.from_config(config).eval() for _ in range(2))
    whole.load_state_dict(model.state_dict())
    lamina.keep_(model, [3, 1])
    assert torch.equal(model.embed_tokens_per_layer.weight[:, :4], whole.embed_tokens_per_layer.weight[:, 8:])
    assert torch.equal(model.per_layer_model_projection.weight[4:], whole.per_layer_model_projection.weight[:4])
    again = AutoModel.from_config(model.config).eval()
    again.load_state_dict(model.state_dict())
    assert same(model, again, {"input_ids": torch.arange(5, 11)[None]})


def test_a_mapping_with_an_entry_per_block_follows():
    config = PretrainedConfig(num_hidden_layers=4, per_layer_config={3: {"intermediate_size": 8}}, intermediate_size=4)
    first = next(cut_configs(config, "main", 4, [4, 1, 4], "keep_"))
    assert [block.intermediate_size for block in first.per_layer_config] == [8, 4, 8]


def test_a_model_of_several_kinds_of_blocks_keeps_one_with_attention():
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = PretrainedConfig(num_hidden_layers=3, layer_types=kinds)
    with pytest.raises(ConfigError, match=r"no block with attention would stay, .* Keep one of the blocks 2\."):
        next(cut_configs(config, "main", 3, [1, 3], "keep_"))


def test_a_block_that_uses_the_choice_of_an_earlier_one_is_not_the_first():
    config = PretrainedConfig(num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    with pytest.raises(ConfigError, match=r"block 2 cannot be the first; .* Put one of the blocks 1, 3 first\."):
        next(cut_configs(config, "main", 3, [2, 3], "keep_"))
    assert next(cut_configs(config, "main", 3, [3, 2], "keep_")).indexer_types == ["full", "shared"]


def test_settings_that_contradict_each_other_are_no_traceback():
    config = AutoConfig.for_model("gemma3n_text", num_hidden_layers=4, num_kv_shared_layers=2, vocab_size=99)
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(ConfigError, match=r"drop_: with these blocks the config is not consistent \(The set of"):
        next(cut_configs(config, "main", 4, [1, 3, 4], "drop_"))


def test_a_list_of_an_unknown_name_is_tried_second():
    config = PretrainedConfig(num_hidden_layers=3, widths=[1, 2, 3])
    first, second = cut_configs(config, "main", 3, [3, 1], "keep_")
    assert (first.widths, second.widths) == ([1, 2, 3], [3, 1])


def test_a_scale_that_follows_from_the_number_of_a_block_is_refused():
    config = AutoConfig.for_model("gpt2", **FAMILIES["gpt2"].settings, scale_attn_by_inverse_layer_idx=True)
    model = AutoModel.from_config(config)
    with pytest.raises(ConfigError, match=r"block 3 cannot become block 2: there 'attn.scaling' is .*, not"):
        lamina.drop_(model, 2)
    assert lamina.truncate_(model, 2).layers == (3,)


def test_one_block_for_all_layers_runs_more_or_less_often():
    model = FAMILIES["albert"].known()
    count = model.num_parameters()
    with pytest.raises(ConfigError, match="the layers of this model share one block"):
        lamina.duplicate_(model, "all")
    lamina.duplicate_(model, "1-2", identity=False)
    assert (model.num_parameters(), stacks(model)["main"].depth) == (count, 5)
    lamina.drop_(model, 1)
    assert model.config.num_hidden_layers == 4


def test_frozen_parameters_are_found_again_after_blocks_moved(tmp_path: Path):
    model = tiny_model()
    lamina.freeze_(model, layers=1)
    lamina.freeze_(model, train=["encoder.layer.2"])
    lamina.keep_(model, [3, 1])
    frozen = {name: not parameter.requires_grad for name, parameter in model.named_parameters()}
    assert not frozen["encoder.layer.0.output.dense.weight"]
    assert frozen["encoder.layer.1.output.dense.weight"]
    lamina.save(model, tmp_path)
    again, _ = lamina.load(tmp_path)
    assert {name: not parameter.requires_grad for name, parameter in again.named_parameters()} == frozen
    made = lamina.edits(again)
    assert name_then(made, 1, "encoder.layer.0.output.dense.weight") == "encoder.layer.2.output.dense.weight"


def test_edits_in_any_order_are_replayed_to_the_same_model(tmp_path: Path):
    def edited() -> BertModel:
        model = tiny_model()
        rng = torch.Generator().manual_seed(3)
        lamina.insert_(model, "attention", layers=[1, 3], init="xavier", generator=rng)
        lamina.duplicate_(model, [3], identity=False)
        lamina.drop_(model, 2)
        lamina.reinit_(model, 2, generator=rng)
        lamina.insert_(model, "ffn", layers=[1, 2], init="he", generator=rng)
        lamina.keep_(model, [3, 1, 2])
        return model

    model, twin = edited(), edited()
    inputs = {"input_ids": torch.arange(2, 12)[None]}
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))
    lamina.save(model, tmp_path / "one")
    again, _ = lamina.load(tmp_path / "one", BertModel)
    assert same(model, again, inputs)
    assert [edit.kind for edit in lamina.edits(again)] == [edit.kind for edit in lamina.edits(model)]
    lamina.merge_(again)
    lamina.drop_(again, 1)
    lamina.save(again, tmp_path / "two")
    plain = BertModel.from_pretrained(tmp_path / "two").eval()
    assert same(again, plain, inputs)
    assert same(again, lamina.load(tmp_path / "two", BertModel)[0], inputs)


def test_inserted_layers_have_their_initial_weights_wherever_they_are_now():
    from lamina.report.inserted_weights import inserted_weights

    model = tiny_model()
    lamina.insert_(model, "ffn", init="xavier", generator=torch.Generator().manual_seed(0))
    lamina.keep_(model, [3, 1])
    lamina.duplicate_(model, 1, identity=False)
    weights = inserted_weights(model)
    assert [weight.layer for weight in weights] == [1, 2, 3]
    assert all(torch.equal(weight.start, weight.trained) for weight in weights)


def test_identity_copies_are_tried_one_after_the_other(monkeypatch: pytest.MonkeyPatch):
    tried: list[weakref.ref[Any]] = []
    search = duplicate._zeros

    def zeros(block: torch.nn.Module, *call: Any, **where: Any) -> dict[str, float]:
        assert not any(earlier() for earlier in tried)  # a copy of all blocks may be as large as the model
        tried.append(weakref.ref(block))
        return search(block, *call, **where)

    monkeypatch.setattr(duplicate, "_zeros", zeros)
    lamina.duplicate_(FAMILIES["llama"].known(), "all")
    assert len(tried) > 1


# truncate_


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
    names = lamina.insert_(model, "ffn").parameters
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
    with pytest.raises(ConfigError, match=r"with 1 blocks the config is not consistent \(ValueError: 1 d") as error:
        truncate_(model, 1)
    assert isinstance(error.value.__cause__, ValueError)
    refused.append(3)
    with pytest.raises(ConfigError, match=r"no model can be built from the config \(ValueError: 1 d.* load it again"):
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


@pytest.mark.parametrize(
    "parts", [(torch.nn.Dropout(0.5), torch.nn.Identity()), (torch.nn.Identity(), torch.nn.Dropout(0.5))]
)
def test_an_identity_inside_a_dropout_is_a_dropout(parts: tuple[torch.nn.Module, torch.nn.Module]):
    was, now = (torch.nn.ModuleDict({"drop_path": torch.nn.Sequential(part)}) for part in parts)
    assert [*_parts(was, ())] == [*_parts(now, ())] == ["", "drop_path"]
    plan = _Plan(tiny_model(), tiny_model(), [1], None)
    changes = _differing(was["drop_path"], now["drop_path"], "drop_path", (0, 1), "here", plan)
    assert changes == {"0": parts[1]}
