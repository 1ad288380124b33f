from dataclasses import replace

import pytest
import torch
from tests.support.tiny import FAMILIES
from torch.nn.utils import prune
from transformers import AutoModel

from lamina.editing.insert import insert_
from lamina.editing.inserted_layer import apply_inserted
from lamina.editing.merge import merge_
from lamina.editing.record import edits
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.roles import ROLES


def built(name="bert"):
    family = FAMILIES[name]
    model = family.known()
    return model, family.inputs(model)


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


def with_biases(model):
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def test_several_layers_fold_in_order_with_their_biases():
    model, inputs = built()
    with_biases(model)
    keys = list(model.state_dict())
    for seed in range(2):
        insert_(model, "both", init="xavier", activation=None, generator=torch.Generator().manual_seed(seed))
    inserted = run(model, inputs)
    parameters = dict(model.named_parameters())
    edit = merge_(model)
    torch.testing.assert_close(run(model, inputs), inserted, rtol=0, atol=1e-5)
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not any(hook is apply_inserted for each in model.modules() for hook in each._forward_hooks.values())
    assert (edit.kind, edit.stack, edit.layers) == ("merge", "main", (1, 2, 3))
    assert set(parameters) - set(keys) < set(edit.parameters)
    assert "encoder.layer.0.attention.self.query.bias" in edit.parameters
    assert "encoder.layer.0.attention.output.dense.weight" not in edit.parameters
    assert [each.kind for each in edits(model)] == ["insert", "insert", "merge"]


def test_an_identity_folds_to_the_same_bits():
    model, _ = built()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    insert_(model, "both", activation=None)
    merge_(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox"])
def test_fused_biases_fold_head_by_head(name):
    model, inputs = built(name)
    with_biases(model)
    insert_(model, "both", init="xavier")
    inserted = run(model, inputs)
    merge_(model)
    torch.testing.assert_close(run(model, inputs), inserted, rtol=0, atol=1e-5)


def test_queries_can_be_merged_if_positions_have_their_own_projections():
    family = FAMILIES["deberta-v2"]
    config = family.config()
    config.share_att_key = False
    model = type(family.known())(config).eval()
    inputs = family.inputs(model)
    insert_(model, init="xavier")
    inserted = run(model, inputs)
    merge_(model)
    torch.testing.assert_close(run(model, inputs), inserted, rtol=0, atol=1e-5)


def refused(model, error, match):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        merge_(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [each.kind for each in edits(model)].count("merge") == 0


def test_an_output_activation_is_refused():
    model, _ = built()
    insert_(model, "ffn", 1, init="xavier")
    insert_(model, "ffn", 3, init="xavier", placement="output", activation="relu")
    refused(model, ConfigError, "'encoder.layer.2.output.dense' has relu on its output")


def test_positions_get_projections_of_their_own_and_plain_transformers_loads_them(tmp_path):
    model, inputs = built("deberta-v2")
    insert_(model, "both", "1-2", init="xavier")  # not in the last block, which is untied too
    inserted, before = run(model, inputs), model.num_parameters()
    drawn = torch.random.get_rng_state()
    edit = merge_(model)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert model.num_parameters() > before  # the positions have maps of their own now
    assert model.config.share_att_key is False
    torch.testing.assert_close(run(model, inputs), inserted, rtol=0, atol=1e-5)
    added = {name for name in edit.parameters if "pos_" in name}
    blocks = len(model.encoder.layer)
    assert len(added) == blocks * 2 * 2  # weight and bias of queries and keys
    assert not any(block.attention.self._forward_pre_hooks for block in model.encoder.layer)
    model.save_pretrained(tmp_path)
    plain, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(run(plain.eval(), inputs), inserted, rtol=0, atol=1e-5)


def test_a_weight_that_is_used_elsewhere_is_refused():
    model, _ = built()
    model.encoder.layer[1].output.dense.weight = model.encoder.layer[0].output.dense.weight
    insert_(model, "ffn", 1, init="xavier")
    refused(model, UnsupportedModelError, "is also used as encoder.layer.1.output.dense.weight")


def test_a_projection_that_was_packed_since_is_refused():
    model, _ = built()
    insert_(model, "ffn", 1)
    packed = torch.zeros(32, 64, dtype=torch.uint8)
    model.encoder.layer[0].output.dense.weight = torch.nn.Parameter(packed, requires_grad=False)
    refused(model, UnsupportedModelError, "'encoder.layer.0.output.dense' is a Linear, not a plain linear map")


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_projection_that_was_pruned_since_is_refused(name: str):
    model, _ = built()
    insert_(model, "ffn", 1)
    prune.l1_unstructured(model.encoder.layer[0].output.dense, name, 0.5)
    refused(model, UnsupportedModelError, f"output.dense.{name}' is computed from other weights")


def test_nothing_to_merge():
    refused(built()[0], ConfigError, "no inserted layers")


def test_layers_after_two_stacks():
    model, _ = built("t5")
    insert_(model, "ffn", "top:1", stack="all")
    edit = merge_(model)
    assert (edit.stack, edit.layers) == ("all", (2, 3))


def test_a_row_with_a_wrong_path_for_positions_leaves_the_model_unchanged(monkeypatch):
    model, _ = built("deberta-v2")
    insert_(model, activation=None)
    row = ROLES["deberta-v2"]
    query, key = row.attention.positions_own
    attention = replace(row.attention, positions_own=(query, replace(key, path="attention.other.pos_key_proj")))
    monkeypatch.setitem(ROLES, "deberta-v2", replace(row, attention=attention))
    refused(model, UnsupportedModelError, "names 'attention.other'")
    assert model.config.share_att_key
    assert all(getattr(module, "share_att_key", True) for module in model.modules())
