from __future__ import annotations

import copy
from inspect import unwrap
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from tests.support.stored import tiny_model
from tests.support.tiny import FAMILIES, Passing
from torch.nn.utils import prune

from lamina.editing.insert import insert_
from lamina.editing.merge import merge_
from lamina.editing.record import edits
from lamina.editing.reinit import reinit_
from lamina.errors import ConfigError, LaminaError, LayerIndexError, UnknownNameError, UnsupportedModelError

MAPS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def differing(one, other) -> set[str]:
    theirs = other.state_dict()
    return {name for name, value in one.state_dict().items() if not torch.equal(value, theirs[name])}


def test_the_weights_are_those_of_the_paper():
    model = tiny_model(hidden_size=256, num_attention_heads=4, intermediate_size=512)
    edit = reinit_(model, "all", generator=rng())
    assert set(edit.parameters) == {f"encoder.layer.{n}.{path}.weight" for n in range(3) for path in MAPS}
    named = dict(model.named_parameters())
    weights = torch.cat([named[name].detach().flatten() for name in edit.parameters])
    assert len(weights) > 1_000_000
    assert weights.std() == pytest.approx(0.0175925, rel=3e-3)
    assert weights.mean() == pytest.approx(0, abs=1e-4)
    assert 0.0399 < weights.abs().max() <= 0.04


def test_std_and_bound_are_settings():
    model = tiny_model()
    edit = reinit_(model, 2, std=0.5, bound=0.1, generator=rng())
    assert edit.settings["std"] == 0.5
    assert edit.settings["bound"] == 0.1
    weight = model.encoder.layer[1].output.dense.weight
    assert 0.045 < weight.abs().max() <= 0.05


def test_embeddings_in_a_block_are_no_linear_maps():
    model = tiny_model()
    for name in ("embed_places", "experts"):
        model.encoder.layer[0].register_parameter(name, torch.nn.Parameter(torch.ones(1, 3, 4)))
    edit = reinit_(model, 1)
    assert [name for name in edit.parameters if "." not in name.removeprefix("encoder.layer.0.")] == [
        "encoder.layer.0.experts"
    ]
    assert bool((model.encoder.layer[0].embed_places == 1).all())


@pytest.mark.parametrize("scope", ["linear", "block"])
def test_the_recorded_seed_gives_the_same_weights(scope):
    model, other, third = (tiny_model() for _ in range(3))
    edit = reinit_(model, [2, 3], scope=scope, generator=rng(7))
    assert reinit_(other, [2, 3], scope=scope, generator=rng(7)) == edit
    assert differing(model, other) == set()
    assert reinit_(third, [2, 3], scope=scope, generator=rng(8)).seed != edit.seed
    assert differing(model, third)
    assert edits(model) == [edit]
    assert edit.layers == (2, 3)


def test_torchs_own_generator_gives_one_number_and_no_more():
    torch.manual_seed(3)
    model, other = tiny_model(), tiny_model()
    reinit_(model, 1)
    after = torch.rand(())
    torch.manual_seed(3)
    edit = reinit_(other, 1, scope="block")
    assert torch.equal(after, torch.rand(()))
    torch.manual_seed(3)
    assert edit.seed == int(torch.randint(2**63 - 1, ()))


def test_biases_and_norms_stay_by_default():
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3
    before, block = copy.deepcopy(model), model.encoder.layer[1]
    reinit_(model, 2)
    assert all(name.endswith(".weight") and "LayerNorm" not in name for name in differing(model, before))
    edit = reinit_(model, 2, biases="zero")
    assert all(not block.get_submodule(path).bias.any() for path in MAPS)
    assert "LayerNorm" not in " ".join(edit.parameters)
    edit = reinit_(model, 2, norms="reset")
    for norm in (block.attention.output.LayerNorm, block.output.LayerNorm):
        assert torch.equal(norm.weight, torch.ones(32))
        assert not norm.bias.any()
    assert sum("LayerNorm" in name for name in edit.parameters) == 4
    assert {name.split(".")[2] for name in differing(model, before)} == {"1"}


def test_the_models_own_initialiser_sets_a_whole_block():
    model = tiny_model(hidden_size=128, num_attention_heads=4, initializer_range=0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    reinit_(model, 2, scope="block")
    block = model.encoder.layer[1]
    assert block.intermediate.dense.weight.std().item() == pytest.approx(0.3, rel=0.05)
    assert torch.equal(block.output.LayerNorm.weight, torch.ones(128))
    assert not any(parameter.any() for parameter in model.encoder.layer[0].parameters())
    reinit_(model, 2, scope="block")  # what is initialised already is initialised again
    assert len(edits(model)) == 2


def test_norms_that_start_at_zero_are_reset_to_zero():
    model = FAMILIES["gemma"].known()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5
    reinit_(model, 1, norms="reset")
    assert not model.layers[0].input_layernorm.weight.any()
    assert model.layers[1].input_layernorm.weight.all()


def test_experts_and_their_router_are_linear_maps():
    edit = reinit_(FAMILIES["mixtral"].known(), 1)
    assert {name.removeprefix("layers.0.mlp.") for name in edit.parameters if ".mlp." in name} == {
        "gate.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
    }


def test_inserted_layers_stay():
    model = tiny_model()
    inserted = insert_(model, "both", [2]).parameters
    for scope in ("linear", "block"):
        before = copy.deepcopy(model)
        edit = reinit_(model, 2, scope=scope)
        assert not set(inserted) & (differing(model, before) | set(edit.parameters))


def test_modes_flags_and_gradients_are_left():
    model = tiny_model().train()
    model.encoder.layer[1].requires_grad_(False)
    for scope in ("linear", "block"):
        reinit_(model, 2, scope=scope)
    assert all(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.encoder.layer[1].parameters())
    assert all(parameter.requires_grad for parameter in model.encoder.layer[0].parameters())


def test_blocks_that_share_weights():
    model = FAMILIES["albert"].known()
    with pytest.raises(ConfigError, match=r"layer 1 is not named.*share weights\. Name all of them"):
        reinit_(model, [2, 3])
    assert reinit_(model, "1-").layers == (1, 2, 3)


def test_weights_tied_to_something_outside():
    model = tiny_model()
    model.encoder.layer[0].output.dense.weight = model.encoder.layer[1].output.dense.weight
    with pytest.raises(ConfigError, match=r"share weights with 'encoder\.layer\.1\.output\.dense\.weight'"):
        reinit_(model, 1)
    assert reinit_(model, [1, 2]).layers == (1, 2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"scope": "all"}, "unknown scope 'all'; known: linear, block"),
        ({"biases": "ones"}, "unknown biases 'ones'; known: keep, zero"),
        ({"norms": None}, "unknown norms 'None'; known: keep, reset"),
        ({"std": 0}, "std is 0; it must be positive and finite"),
        ({"std": float("nan")}, "std is nan"),
        ({"bound": -1.0}, "bound is -1.0; it must be positive"),
    ],
)
def test_options_that_cannot_be(settings, told):
    model = tiny_model()
    with pytest.raises(LaminaError, match=told):
        unwrap(reinit_)(model, 1, **settings)  # without the type checks of the tests
    assert differing(model, tiny_model()) == set()


def test_layers_and_stacks_that_are_not_there():
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"got layer 0; it is the embeddings.*Use 1\.\.3"):
        reinit_(model, "0-2")
    with pytest.raises(LayerIndexError, match="layer 4 does not exist"):
        reinit_(model, 4)
    with pytest.raises(UnknownNameError, match="reinit_: unknown stack 'decoder'"):
        reinit_(model, 1, stack="decoder")
    with pytest.raises(ConfigError, match="the main stack of the family 'xlm' has no module per block"):
        reinit_(FAMILIES["xlm"].known(), 1)
    assert differing(model, tiny_model()) == set()
    assert edits(model) == []


def test_an_initialiser_that_leaves_weights():
    model = FAMILIES["openai-gpt"].known()
    before = copy.deepcopy(model)
    with pytest.raises(
        ConfigError, match=r"initialiser of the family 'openai-gpt' leaves h\.0\..* nothing was changed"
    ):
        reinit_(model, 1, scope="block")
    assert differing(model, before) == set()
    assert reinit_(model, 1, norms="reset").layers == (1,)


def quantised(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def weight_normed(model: Any) -> Any:
    torch.nn.utils.parametrizations.weight_norm(model.encoder.layer[1].intermediate.dense)
    return model


def pruned(model: Any) -> Any:
    prune.l1_unstructured(model.encoder.layer[1].output.dense, "weight", 0.5)
    return model


def integers(model: Any) -> Any:
    query = model.encoder.layer[1].attention.self.query
    query.weight = torch.nn.Parameter((query.weight * 100).to(torch.int8), requires_grad=False)
    query.forward = lambda states: torch.nn.functional.linear(states, query.weight / 100, query.bias)
    return model


def buffers(model: Any) -> Any:
    query = model.encoder.layer[1].attention.self.query
    query.register_buffer("qweight", torch.ones(4, 32, dtype=torch.int32))
    return model


class Halved(torch.nn.Linear):
    """Computes its weight in a property; the parameter has another name."""

    @property
    def weight(self) -> torch.Tensor:
        return self.stored / 2


def a_property(model: Any) -> Any:
    query = model.encoder.layer[1].attention.self.query
    query.register_parameter("stored", query._parameters.pop("weight"))
    query.__class__ = Halved
    return model


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("scope", ["linear", "block"])
@pytest.mark.parametrize("pack", [quantised, weight_normed, pruned, integers, buffers, a_property])
def test_weights_that_are_no_plain_parameters_are_refused(pack: Any, scope: Any):
    model = pack(tiny_model())
    before = {key: value for key, value in copy.deepcopy(model.state_dict()).items() if isinstance(value, torch.Tensor)}
    with pytest.raises(UnsupportedModelError, match=r"'encoder\.layer\..*has weights that are packed or computed"):
        reinit_(model, [1, 2], scope=scope)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in before)
    assert edits(model) == []
    if pack is not quantised:
        assert reinit_(model, [1], scope=scope).parameters


@pytest.mark.parametrize("scope", ["linear", "block"])
def test_blocks_without_weights_are_refused(scope: Any):
    model: Any = tiny_model()
    model.encoder.layer[0] = Passing()
    with pytest.raises(ConfigError, match=f"reinit_: the named blocks have no weights that scope='{scope}' sets"):
        reinit_(model, [1], scope=scope)
    assert edits(model) == []


def test_compiled_models_are_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match="the model is compiled"):
        reinit_(torch.compile(model), 1)
    model.encoder.compile()
    with pytest.raises(ConfigError, match="the model is compiled"):
        reinit_(model, 1)


def test_quantised_models_are_refused():
    model = tiny_model()
    model.is_quantized = True
    with pytest.raises(ConfigError, match="the model is quantised"):
        reinit_(model, 1)


def test_offloaded_models_and_wrappers_are_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match="got a DataParallel"):
        reinit_(torch.nn.DataParallel(model), 1)
    model.hf_device_map = {"": "cpu"}
    model.encoder.layer[2].to("meta")
    with pytest.raises(ConfigError, match="parts of the model are offloaded"):
        reinit_(model, 1)


@pytest.mark.parametrize("edit", [lambda model: reinit_(model, layers="all"), merge_])
def test_weights_that_accelerate_has_offloaded_by_hooks_are_not_edited(edit: Any):
    model = FAMILIES["bert"].build()
    insert_(model, position="ffn")
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="parts of the model are offloaded"):
        edit(model)
