"""What states depend on beside weights: settings of the config and of modules, and none that cannot change a state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.stored import tiny_config, tiny_model
from tests.support.tiny import FAMILIES
from torch import nn
from transformers import BertForMaskedLM, BertModel, EsmModel, LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model

from lamina.layers import module_guard, stacks
from lamina.layers.base_facts import StackSettings, hash_settings
from lamina.layers.module_guard import ModuleGuard


def facts(model: Any, name: str = "main") -> StackSettings:
    return StackSettings.of(model, stacks(model)[name])


def llama(**changes: Any) -> LlamaModel:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    torch.manual_seed(0)
    return LlamaModel(LlamaConfig(vocab_size=20, **shape, **changes)).eval()


@pytest.mark.parametrize(
    "change", [{"hidden_act": "relu"}, {"layer_norm_eps": 0.5}, {"is_decoder": True}, {"num_attention_heads": 2}]
)
def test_a_setting_that_changes_states_counts(change: dict[str, Any]):
    assert facts(BertModel(tiny_config(**change)).eval()).config != facts(tiny_model()).config


def test_the_base_of_rotary_positions_counts():
    other = llama(rope_parameters={"rope_type": "default", "rope_theta": 100.0})
    assert facts(other).config != facts(llama()).config


def test_dropout_of_tokens_counts_because_it_scales_states_in_eval_mode():
    """ESM multiplies embeddings by 0.88 where masked tokens were dropped in training."""
    config = FAMILIES["esm"].config()
    on, off = (EsmModel(copy.deepcopy(config)).eval() for _ in range(2))
    off.config.token_dropout, on.config.token_dropout = False, True
    assert facts(on).config != facts(off).config
    before = facts(off)
    off.embeddings.token_dropout = True  # as the model itself uses it
    assert facts(off).modules != before.modules


@pytest.mark.parametrize(
    "change",
    one_in(2, [{"hidden_dropout_prob": 0.5}, {"id2label": {0: "no"}}, {"pad_token_id": 3}, {"use_cache": False}]),
    ids=lambda change: next(iter(change)),
)
def test_a_setting_that_cannot_change_states_does_not_count(change: dict[str, Any]):
    assert facts(BertModel(tiny_config(**change)).eval()).config == facts(tiny_model()).config


def relu(model: Any) -> None:
    model.encoder.layer[1].intermediate.intermediate_act_fn = nn.ReLU()


def eps(model: Any) -> None:
    model.encoder.layer[2].output.LayerNorm.eps = 1.0


def scale(model: Any) -> None:
    model.encoder.layer[0].attention.self.scaling = 1.0


@pytest.mark.parametrize("change", [relu, eps, scale])
def test_a_module_that_was_changed_by_hand_counts(change: Callable[[Any], None]):
    before = facts(model := tiny_model())
    change(model)
    after = StackSettings.of(model, stacks(model)["main"])
    assert after.config == before.config
    assert len(set(after.modules.items()) ^ set(before.modules.items())) == 2


def test_dropout_mode_and_a_head_do_not_count():
    model = tiny_model()
    before = facts(model)
    headed = BertForMaskedLM(tiny_config()).eval()
    model.train()
    model.embeddings.dropout.p = 0.9
    assert StackSettings.of(model, stacks(model)["main"]) == before == facts(headed)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_pass_leaves_the_settings_of_inner_modules(name: str):
    model = FAMILIES[name].build()
    before, guard = facts(model), ModuleGuard(model, stacks(model)["main"])
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    assert guard.is_same()
    assert facts(copy.deepcopy(model)) == before


def longer_answers(model: Any) -> None:
    model.generation_config.max_new_tokens = 7


def more_dropout(model: Any) -> None:
    model.config.attn_pdrop = 0.5  # which changes what training learns


def other_norm(model: Any) -> None:
    model.transformer.h[1].ln_1.eps = 0.5


def scaled_head(model: Any) -> None:
    model.lm_head.scale = 2.0


@pytest.mark.parametrize("change", [longer_answers, more_dropout, other_norm, scaled_head])
def test_a_run_goes_on_only_with_a_model_of_the_same_settings(change: Callable[[Any], None]):
    before = hash_settings(model := FAMILIES["gpt2-CausalLM"].build())
    change(model)
    assert hash_settings(model) != before


@pytest.mark.parametrize(
    "name", ["big_bird", "rwkv", *one_in(12, [n for n, own in FAMILIES.items() if not own.refused])]
)
def test_passes_training_and_notes_are_no_change_of_settings(name: str):
    model = FAMILIES[name].build()
    before = hash_settings(model)
    with torch.no_grad():
        model(**FAMILIES[name].inputs(model))
    model.train()
    if model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.config.use_cache, model.config.name_or_path, model.config.id2label = False, "elsewhere", {0: "no", 1: "yes"}
    assert hash_settings(model) == hash_settings(copy.deepcopy(model)) == before


def test_a_setting_of_attention_that_was_none_is_guarded():
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16}
    model = Qwen2Model(Qwen2Config(vocab_size=20, intermediate_size=16, **shape)).eval()
    attention = model.layers[1].self_attn
    assert attention.sliding_window is None
    guard = ModuleGuard(model, stacks(model)["main"])
    attention.sliding_window = 2
    assert guard.find_change() == "sliding_window of 'layers.1.self_attn' is 2, not None"


def test_a_change_is_named_rightly_after_passes_removed_a_module(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    monkeypatch.setattr(module_guard, "changed_by_passes", lambda _: {"dropout"})
    guard = ModuleGuard(model, stacks(model)["main"])
    del model.embeddings.dropout
    norm = model.encoder.layer[0].output.LayerNorm
    known, norm.eps = norm.eps, 0.5
    assert "eps" in (guard.find_change() or "")
    assert "eps" in (guard.find_change() or "")
    norm.eps = known
    assert guard.find_change() is None
    assert guard.is_same()


def test_a_module_that_passes_remove_may_be_forgotten_by_two_threads(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    monkeypatch.setattr(module_guard, "changed_by_passes", lambda _: {"dropout"})
    guard = ModuleGuard(model, stacks(model)["main"])
    del model.embeddings.dropout
    find, others = guard._outer, [guard.find_change]

    def outer(path: str) -> nn.Module | None:
        module = find(path)
        if module is None and others:
            assert others.pop()() is None  # another thread's pass, in the middle of this one
        return module

    monkeypatch.setattr(guard, "_outer", outer)
    assert guard.find_change() is None
    assert not others
