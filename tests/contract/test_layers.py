"""Law 2, layer i is layer i, and the tap's part of law 1, for every family."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES, HEADED, READABLE, REFUSED, model_of
from torch import Tensor, nn

from lamina.errors import UnsupportedModelError
from lamina.layers import LayerStack, stacks, tap, watch

KEYS = {"main": "hidden_states", "encoder": "encoder_hidden_states", "decoder": "decoder_hidden_states"}


def families(count: int, start: int) -> pytest.MarkDecorator:
    """Try one family in `count`, and all of them with `-m full`."""
    return pytest.mark.parametrize("family", one_in(count, READABLE.values(), start), ids=list(READABLE))


def test_enough_families_are_covered():
    assert len({family.model_type for family in READABLE.values()}) >= 45


@families(4, 0)
@torch.no_grad()
def test_tapped_states_are_the_hidden_states(family):
    model = model_of(family.name)
    inputs = family.inputs(model, batch=3, tokens=10, seed=4)
    plain = model(**inputs, output_hidden_states=True)
    for name in family.stacks:
        with tap(model, stack=name) as states:
            model(**inputs)
        expected = getattr(plain, KEYS[name])
        assert list(states) == list(range(len(expected)))
        wrong = [layer for layer, state in enumerate(expected) if not torch.equal(states[layer], state)]
        assert not wrong, f"{name}: layers {wrong} differ"


@families(8, 0)
@torch.no_grad()
def test_a_tap_changes_no_output(family):
    model = model_of(family.name)
    inputs = family.inputs(model, batch=2, tokens=8, seed=5)
    plain = tensors(model(**inputs))
    with tap(model):
        tapped = tensors(model(**inputs))
    assert len(plain) == len(tapped) > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, tapped, strict=True))
    assert not any(hooks(model))


@families(8, 4)
def test_stacks_have_the_expected_shape(family):
    model = model_of(family.name)
    found = stacks(model)
    assert tuple(found) == family.stacks
    with torch.no_grad():
        output = model(**family.inputs(model), output_hidden_states=True)
    for name, stack in found.items():
        states = getattr(output, KEYS[name])
        assert stack.layers == stack.depth + 1 == len(states)
        assert stack.width == states[0].shape[-1]
        assert len(stack.blocks) == (stack.depth if family.blocks else 0)
        assert model.get_submodule(stack.scope_path) is stack.scope
        assert all(model.get_submodule(point.path) is point.module for point in stack.points)
        assert set(stack.run) <= set(model.modules())
        assert len(stack.run) == len(set(stack.run))


@families(16, 0)
def test_finding_leaves_no_trace(family):
    model = copy.deepcopy(model_of(family.name)).train()
    for number, module in enumerate(model.modules()):
        module.training = number % 2 == 0
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad = number % 3 == 0
    before = portrait(model)
    values = {name: tensor.clone() for name, tensor in everything(model)}
    stacks(model)
    assert portrait(model) == before
    assert not any(hooks(model))
    assert all(torch.equal(tensor, values[name]) for name, tensor in everything(model))


@pytest.mark.parametrize("name", one_in(4, HEADED))
def test_a_head_does_not_change_what_is_fingerprinted(name):
    headed, headless = model_of(name), copy.deepcopy(model_of(str(HEADED[name].base)))
    prefix = headed.base_model_prefix + "."
    weights = {key.removeprefix(prefix): value for key, value in headed.state_dict().items()}
    headless.load_state_dict(weights, strict=False)
    for stack in HEADED[name].stacks:
        twin = stacks(headless)["encoder" if stack == "main" and "encoder" in stacks(headless) else stack]
        one, other = fingerprinted(stacks(headed)[stack]), fingerprinted(twin)
        assert [key for key, _ in one] == [key for key, _ in other]
        assert all(torch.equal(value, copy) for (_, value), (_, copy) in zip(one, other, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=f"'{REFUSED[name].model_type}'.*{REFUSED[name].refused}"):
        stacks(REFUSED[name].build())


@torch.no_grad()
def test_the_encoder_is_read_while_generating():
    model = model_of("bart-Seq2SeqLM")
    inputs = FAMILIES["bart"].inputs(model, batch=2, tokens=9, seed=6)
    del inputs["decoder_input_ids"]
    expected = model(**inputs, decoder_input_ids=torch.tensor([[3], [3]]), output_hidden_states=True)
    plain = model.generate(**inputs, max_new_tokens=5, num_beams=2)
    with tap(model, stack="encoder") as states:
        tapped = model.generate(**inputs, max_new_tokens=5, num_beams=2)
    assert torch.equal(plain, tapped)
    assert len(states) == len(expected.encoder_hidden_states)
    assert all(torch.equal(states[layer], state) for layer, state in enumerate(expected.encoder_hidden_states))


@torch.no_grad()
def test_each_pass_is_read_while_generating():
    model = model_of("gpt2-CausalLM")
    ids = torch.randint(5, 99, (2, 6))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model(**inputs, output_hidden_states=True).hidden_states
    plain = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    passes: list[dict[int, Tensor]] = []
    stack = stacks(model)["main"]
    with watch(
        stack,
        range(stack.layers),
        lambda layer, state: passes[-1].update({layer: state}),
        lambda _args, _kwargs: passes.append({}),
    ):
        tapped = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(plain, tapped)
    assert len(passes) == 4
    assert all(list(states) == list(range(stack.layers)) for states in passes)
    assert all(torch.equal(passes[0][layer], state) for layer, state in enumerate(expected))


@pytest.mark.parametrize(
    "name",
    [
        "bert",
        "bart",
        "t5",
        "gpt2",
        "llama",
        "gpt2-SequenceClassification",
        "t5-TokenClassification",
        "xlm-TokenClassification",
    ],
)
def test_states_are_right_with_dropout_too(name):
    """Dropout is invisible in eval mode, and a tap on the wrong side of it would go unseen there."""
    family, model = FAMILIES[name], FAMILIES[name].build()
    found = stacks(model)
    inputs = family.inputs(model)
    model.train()
    for stack in found:
        with tap(model, stack=stack) as states:
            output = model(**inputs, output_hidden_states=True)
        wrong = [
            layer for layer, state in enumerate(getattr(output, KEYS[stack])) if not torch.equal(states[layer], state)
        ]
        assert not wrong, f"{stack}: layers {wrong} differ"


def tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for part in output for tensor in tensors(part)] if isinstance(output, (list, tuple)) else []


def hooks(model: nn.Module) -> list[Any]:
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if getattr(hook, "__module__", "").startswith("lamina") or type(hook).__name__ == "partial"
    ]


def everything(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def portrait(model: nn.Module) -> list[Any]:
    """All that a run may change, apart from the values of tensors."""
    modules = [
        (
            path,
            id(module),
            module.training,
            sorted(vars(module)),
            list(map(id, module._forward_hooks.values())),
            list(map(id, module._forward_pre_hooks.values())),
            [(name, id(value)) for name, value in vars(module).items() if isinstance(value, (str, int, Tensor))],
        )
        for path, module in model.named_modules()
    ]
    leaves = [(name, id(tensor), tensor.requires_grad, tensor.grad is None) for name, tensor in everything(model)]
    numpy_state = np.random.get_state()[1].tobytes()
    return [modules, leaves, torch.get_rng_state().tolist(), numpy_state, model.config.to_dict()]


def fingerprinted(stack: LayerStack) -> list[tuple[str, Tensor]]:
    """The tensors of `run`, in order: parameters, then saved buffers."""
    return [
        (f"{type(module).__name__}.{name}", tensor)
        for module in stack.run
        for name, tensor in module.state_dict(keep_vars=True).items()
        if "." not in name
    ]
