import copy
import dataclasses
import inspect
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from lamina.editing.insert import insert_, replay_insert
from lamina.editing.inserted_layer import InsertedLayer, layers_after
from lamina.editing.record import Edit, edits
from lamina.errors import ConfigError, LayerIndexError, UnknownNameError, UnsupportedModelError
from lamina.layers.discovery import same_stacks
from lamina.layers.roles import ROLES

DEBERTA_V3_LARGE = {
    "vocab_size": 128100,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "pooler_hidden_size": 1024,
}
T5_BASE = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}


def built(name="bert"):
    family = FAMILIES[name]
    model = family.known()
    return model, family.inputs(model)


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("auto", "model_type", "settings", "before", "attention", "ffn"),
    one_in(
        3,
        [
            (AutoModelForSequenceClassification, "deberta-v2", DEBERTA_V3_LARGE, 435_063_810, 4_718_592, 25_165_824),
            (AutoModelForSequenceClassification, "t5", T5_BASE, 223_495_682, 5_308_416, 14_155_776),
            (
                AutoModelForImageClassification,
                "vit",
                {"image_size": 384, "num_labels": 100},
                86_167_396,
                1_769_472,
                7_077_888,
            ),
        ],
        2,
    ),
)
def test_table_8_from_the_config_alone(auto, model_type, settings, before, attention, ffn):
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(model_type, **settings))
    assert count(model) == before
    other = copy.deepcopy(model)
    same_stacks(model, other)  # to look for its layers again is most of the work
    insert_(model, "attention", stack="all")
    assert count(model) - before == attention
    insert_(other, "ffn", stack="all", init="he")
    assert count(other) - before == ffn


def test_names_stay_and_the_record_says_what_came():
    model, _ = built()
    before = dict(model.named_parameters())
    edit = insert_(model, "both", [1, -1])
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert set(edit.parameters) == set(after) - set(before)
    assert edit.parameters[0] == "encoder.layer.0.attention.self.query.inserted_0.weight"
    assert (edit.kind, edit.stack, edit.layers, edit.seed) == ("insert", "main", (1, 3), None)
    assert edits(model) == [edit]
    assert Edit.from_dict(json.loads(json.dumps(edit.to_dict()))) == edit
    assert after["encoder.layer.0.attention.self.query.inserted_0.weight"].shape == (4, 8, 8)
    assert after["encoder.layer.2.output.dense.inserted_0.weight"].shape == (32, 32)


def test_grouped_key_and_value_heads_have_a_matrix_each():
    model, _ = built("llama")
    insert_(model)
    attention = model.layers[0].self_attn
    assert [
        layers_after(each)[0].weight.shape[0] for each in (attention.q_proj, attention.k_proj, attention.v_proj)
    ] == [
        4,
        2,
        2,
    ]


def test_cross_attention_is_included_and_the_encoder_is_the_default_stack():
    model, _ = built("bart")
    assert insert_(model).stack == "encoder"
    edit = insert_(model, stack="decoder", layers=1)
    assert [name.removeprefix("decoder.layers.0.") for name in edit.parameters] == [
        f"{attention}.{role}_proj.inserted_0.weight" for attention in ("self_attn", "encoder_attn") for role in "qkv"
    ]


def test_a_fused_cross_attention():
    config = FAMILIES["gpt2"].config()
    config.add_cross_attention = True
    model = type(built("gpt2")[0])(config)
    names = insert_(model, layers=1).parameters
    assert [name.split(".inserted")[0] for name in names] == [
        f"h.0.{path}" for path in ("attn.c_attn", "crossattention.q_attn", "crossattention.c_attn")
    ]
    assert model.h[0].crossattention.c_attn.inserted_0.weight.shape == (8, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
def test_every_precision_keeps_its_output(dtype, activation):
    model, inputs = built()
    model.to(dtype)
    expected = run(model, inputs)
    insert_(model, "both", activation=activation)
    tolerance = 1e-5 if (dtype, activation) == (torch.float32, "gelu") else 0
    torch.testing.assert_close(run(model, inputs), expected, rtol=0, atol=tolerance)


def test_a_later_cast_keeps_the_weight_wide_so_that_its_gelu_is_one():
    model, inputs = built()
    narrow = run(copy.deepcopy(model).bfloat16(), inputs)
    insert_(model, "both")
    model.bfloat16()
    weight = model.encoder.layer[0].output.dense.inserted_0.weight
    assert weight.dtype == torch.float32
    assert torch.equal(run(model, inputs), narrow)
    assert model.double().encoder.layer[0].output.dense.inserted_0.weight.dtype == torch.float64


def test_unit_with_gelu_is_the_papers_scale():
    model, _ = built()
    insert_(model, "ffn", init="unit")
    layer = model.encoder.layer[0].output.dense.inserted_0
    assert torch.equal(layer.weight, torch.eye(32))
    torch.testing.assert_close(layer.applied_weight(), 0.8413447461 * torch.eye(32))


def test_starts():
    model, _ = built()
    insert_(model, "ffn", init="xavier", activation=None, generator=seeded())
    insert_(model, "ffn", init="he", activation=None, generator=seeded())
    insert_(model, "ffn", init="zero", activation=None)
    xavier, he, zero = layers_after(model.encoder.layer[0].output.dense)
    assert xavier.weight.std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert he.weight.std().item() == pytest.approx((2 / 32) ** 0.5, rel=0.1)
    assert not zero.weight.any()
    assert "InsertedLayer([32, 32], activation=None, placement=weight)" in str(model)


def test_per_head_starts_differ_from_head_to_head():
    model, _ = built()
    insert_(model, init="xavier")
    first, second, *_ = model.encoder.layer[0].attention.self.query.inserted_0.weight
    assert first.std().item() == pytest.approx(8**-0.5, rel=0.3)
    assert not torch.equal(first, second)


def test_twice_at_one_place_is_applied_in_order():
    model, inputs = built()
    insert_(model, "ffn", init="xavier", activation=None, generator=seeded(1))
    once = copy.deepcopy(model)
    insert_(model, "ffn", init="unit", activation="relu", placement="output")
    dense = model.encoder.layer[0].output.dense
    states = torch.randn(2, 64)
    expected = (once.encoder.layer[0].output.dense(states)).relu()
    assert torch.equal(dense(states), expected)
    assert len(dense._forward_hooks) == 1
    assert len(edits(model)) == 2
    assert not torch.equal(run(model, inputs), run(once, inputs))


def test_the_seed_is_recorded_and_replays():
    model, _ = built()
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    edit = insert_(model, "both", "2-", init="he")
    assert edit.seed is not None
    again = replay_insert(twin, edit)
    assert again == edit
    other = model.state_dict()
    assert all(torch.equal(value, other[name]) for name, value in twin.state_dict().items())
    assert (
        insert_(built()[0], init="he", generator=seeded(1)).seed
        == insert_(built()[0], init="he", generator=seeded(1)).seed
    )


def test_the_global_generator_is_left_alone_where_nothing_is_drawn():
    model, _ = built()
    before = torch.get_rng_state()
    insert_(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_and_pickles_work_alone():
    model, inputs = built("deberta-v2")
    insert_(model, "both", init="xavier", generator=seeded())
    expected = run(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(twin, inputs), expected)
        assert edits(twin) == edits(model)
        with torch.no_grad():
            twin.encoder.layer[0].output.dense.inserted_0.weight.zero_()
    assert torch.equal(run(model, inputs), expected)


def test_the_state_dict_goes_into_a_model_with_the_same_edit():
    model, inputs = built()
    edit = insert_(model, "both", init="xavier")
    other, _ = built()
    replay_insert(other, edit)
    with torch.no_grad():
        other.encoder.layer[0].output.dense.inserted_0.weight.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other, inputs), run(model, inputs))


def test_every_inserted_weight_gets_a_gradient():
    model, inputs = built("deberta-v2")
    insert_(model, "both")
    model(**inputs)[0].square().sum().backward()
    layers = [each for each in model.modules() if isinstance(each, InsertedLayer)]
    assert len(layers) == 12
    assert all(layer.weight.grad.any() for layer in layers)


def test_a_plain_trainer_trains_and_saves_it(tmp_path):
    model = FAMILIES["bert-SequenceClassification"].known()
    insert_(model, "both")
    before = {name: value.clone() for name, value in model.named_parameters() if "inserted" in name}
    rows = [{"input_ids": torch.arange(5, 12), "labels": label} for label in (0, 1, 0, 1)]
    options = TrainingArguments(tmp_path, max_steps=2, learning_rate=0.1, report_to=[], use_cpu=True, disable_tqdm=True)
    Trainer(model, options, train_dataset=rows).train()
    after = dict(model.named_parameters())
    assert all(not torch.equal(value, after[name]) for name, value in before.items())
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(saved[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["gpt2-CausalLM", "llama-CausalLM", "t5-Seq2SeqLM"])
def test_generation_with_its_cache_goes_through_the_layers(name):
    model, inputs = built(name)
    prompt = {key: inputs[key][:1] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    insert_(model, "both", init="xavier", stack="all", generator=seeded())
    cached, uncached = (model.generate(**prompt, **options, use_cache=use) for use in (True, False))
    torch.testing.assert_close(cached.logits, uncached.logits, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [9, 16])  # 16: as many as there are positions, one text
def test_position_calls_of_shared_projections_are_left_alone(tokens):
    family = FAMILIES["deberta-v2"]
    model = family.known()
    inputs = family.inputs(model, batch=1, tokens=tokens)
    seen = []
    projection = model.encoder.layer[0].attention.self.key_proj
    projection.register_forward_hook(lambda module, args, output: seen.append((module, args[0], output)))
    insert_(model, init="zero", activation=None, layers=1)
    seen.clear()  # finding the blocks ran the model
    model(**inputs)
    assert [bool(output.any()) for _, _, output in seen] == [False, True]


def test_shared_blocks_are_all_or_none():
    model, _ = built("albert")
    assert len(insert_(model).parameters) == 3
    with pytest.raises(ConfigError, match="share weights"):
        insert_(model, layers=[1, 2])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"position": "fnn"},
            UnknownNameError,
            "unknown position 'fnn'; known: attention, ffn, both, ffn_input, both_input, convolution.*'ffn'",
        ),
        ({"init": "zeros"}, UnknownNameError, "unknown init 'zeros'.*'zero'"),
        ({"activation": "silu"}, UnknownNameError, "unknown activation 'silu'; known: gelu, relu, None"),
        ({"placement": "input"}, UnknownNameError, "unknown placement 'input'"),
        ({"placement": "output"}, ConfigError, "no weight undoes an activation"),
        ({"kernel": 5}, ConfigError, "kernel is 5 and position is 'attention'; only layers after convolutions"),
        ({"stack": "decoder"}, UnknownNameError, "unknown stack 'decoder'; known: main"),
        ({"layers": 4}, LayerIndexError, r"layer 4 does not exist.*0\.\.3"),
        ({"layers": "bottom:2"}, ConfigError, "got layer 0; it is the embeddings"),
    ],
)
def test_bad_options_touch_nothing(options, error, match):
    model, _ = built()
    keys = list(model.state_dict())
    call = inspect.unwrap(insert_)  # as outside these tests: no type checker
    with pytest.raises(error, match=match):
        call(model, **options)
    assert list(model.state_dict()) == keys
    assert edits(model) == []


def test_what_is_not_linear_or_no_whole_heads_is_refused_before_anything_is_touched(monkeypatch):
    model, _ = built()
    model.encoder.layer[2].attention.self.value = nn.Identity()
    with pytest.raises(UnsupportedModelError, match=r"'encoder\.layer\.2\.attention\.self\.value' is a Identity"):
        insert_(model)
    assert not any("inserted" in name for name in model.state_dict())
    model, _ = built()
    row = ROLES["bert"]
    odd = dataclasses.replace(row.attention, head_width="attention.self.odd")
    monkeypatch.setitem(ROLES, "bert", dataclasses.replace(row, attention=odd))
    for layer in model.encoder.layer:
        layer.attention.self.odd = 5
    with pytest.raises(UnsupportedModelError, match="does not give whole heads of width 5"):
        insert_(model)


def test_compiled_and_unlisted_models_are_refused(monkeypatch):
    model, _ = built()
    monkeypatch.delitem(ROLES, "bert")
    with pytest.raises(UnsupportedModelError, match="no row of projection roles"):
        insert_(model)
    model.compile()
    with pytest.raises(ConfigError, match="insert_: the model is compiled"):
        insert_(model)
