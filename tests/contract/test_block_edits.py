"""Blocks that are kept, dropped, moved or repeated compute what they would by hand, in every family, and reload."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.portions import one_in
from tests.support.tiny import BOTH, FAMILIES, READABLE, Family
from transformers import AutoModel, AutoModelForCausalLM

import lamina
from lamina.editing.block_order import rearrange
from lamina.editing.duplicate import duplicate_
from lamina.editing.editable import movable_stack
from lamina.editing.keep import drop_, keep_
from lamina.errors import ConfigError
from lamina.layers import stacks

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

EDITABLE = [name for name, family in READABLE.items() if family.blocks]
CAUSAL = [name for name in EDITABLE if READABLE[name].causal and READABLE[name].base is None]
CLOSE = 1e-6
# Families that cannot have every order, and a part of the reason.
FIXED = {
    "modernbert": "there 'attn_norm' is ",  # the first block has no norm before its attention
    "esm": "shape of contact_head",  # a part whose shape depends on the depth
}
# Families with a norm after the residual sum: zeroing their branches leaves norm(x).
NORM_LAST = {
    *("bert", "roberta", "xlm-roberta", "electra", "camembert", "mpnet", "roformer", "fnet", "convbert", "ibert"),
    *("nystromformer", "rembert", "ernie", "big_bird", "data2vec-text", "deberta", "deberta-v2", "mobilebert"),
    *("distilbert", "xlnet", "openai-gpt", "bart", "marian", "blenderbot-small", "plbart", "mvp"),
    *("wav2vec2", "hubert", "wavlm", "data2vec-audio", "sew", "unispeech"),
}


def block_outputs(model: Any, stack: str, inputs: Any) -> tuple[list[Tensor], list[tuple[Any, Any]]]:
    """What each block returns in one pass, bottom first, and the arguments that it gets."""
    outputs, arguments = [], []

    def note(_block: Any, args: Any, kwargs: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])
        arguments.append((args, kwargs))

    handles = [
        block.register_forward_hook(note, with_kwargs=True) for block in dict.fromkeys(stacks(model)[stack].blocks)
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return outputs, arguments


def by_hand(model: Any, stack: str, inputs: Any, order: list[int]) -> list[Tensor]:
    """What the blocks `order` of an unedited model return, if they are called one after the other."""
    blocks, (_, arguments) = stacks(model)[stack].blocks, block_outputs(model, stack, inputs)
    state, states = None, []
    for layer in order:
        args, kwargs = arguments[layer - 1]
        kwargs = {key: None if hasattr(value, "get_seq_length") else value for key, value in kwargs.items()}
        args = [None if hasattr(value, "get_seq_length") else value for value in args]
        place = next(key for key, value in (*enumerate(args), *kwargs.items()) if is_state(value))
        holder: Any = args if isinstance(place, int) else kwargs
        first = arguments[0][0][place] if isinstance(place, int) else arguments[0][1][place]
        holder[place] = first.clone() if state is None else state
        with torch.no_grad():
            output = blocks[layer - 1](*args, **kwargs)
        state = output if isinstance(output, torch.Tensor) else output[0]
        states.append(state.clone())
    return states


def is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point()


def check_order(name: str, stack: str, order: list[int]) -> Any:
    """Give a family's stack an order, and compare with the blocks called by hand; None if it was refused by name."""
    family, model = READABLE[name], READABLE[name].known()
    inputs, plain = family.inputs(model), READABLE[name].known()
    try:
        rearrange(model, movable_stack(model, stack, "keep_"), order, "keep_")
    except ConfigError as error:
        assert FIXED[family.model_type] in str(error), error  # noqa: PT017 most orders are not refused
        before = block_outputs(plain, stack, inputs)[0]
        assert all(map(torch.equal, block_outputs(model, stack, inputs)[0], before))
        return None
    outputs = block_outputs(model, stack, inputs)[0]
    expected = by_hand(plain, stack, inputs, order)
    assert len(outputs) == len(expected) == stacks(model)[stack].depth == len(order)
    for output, state in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, state, rtol=CLOSE, atol=CLOSE)
    return model


def some_order(name: str, stack: str) -> list[int]:
    rng = random.Random(f"{name} {stack}")
    depth = stacks(FAMILIES[name].known())[stack].depth
    return rng.choices(range(1, depth + 1), k=rng.randint(1, depth + 2))


@pytest.mark.parametrize("name", one_in(96, EDITABLE, 2, ("albert", "t5")))
def test_any_order_computes_what_its_blocks_do_and_reloads(name, tmp_path: Path):
    family = READABLE[name]
    for stack in family.stacks:
        model = check_order(name, stack, some_order(name, stack))
        if model is None:
            continue
        inputs = family.inputs(model)
        lamina.save(model, tmp_path / stack)
        for again in (type(model).from_pretrained(tmp_path / stack), lamina.load(tmp_path / stack, type(model))[0]):
            assert {key: tuple(value.shape) for key, value in again.state_dict().items()} == {
                key: tuple(value.shape) for key, value in model.state_dict().items()
            }
            with torch.no_grad():
                assert torch.equal(model(**inputs)[0], again.eval()(**inputs)[0])


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_random_edits_of_random_families(data):
    check_random(data)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_many_random_edits(data):
    check_random(data)


def check_random(data: Any) -> None:
    name = data.draw(st.sampled_from(EDITABLE))
    stack = data.draw(st.sampled_from(READABLE[name].stacks))
    depth = stacks(READABLE[name].known())[stack].depth
    check_order(name, stack, data.draw(st.lists(st.integers(1, depth), min_size=1, max_size=depth + 3)))


@pytest.mark.parametrize("name", one_in(96, EDITABLE, 1, ("t5", "mixtral")))
@torch.no_grad()
def test_identity_copies_change_nothing_or_are_refused_by_name(name):
    family = READABLE[name]
    for stack in family.stacks:
        model = family.known()
        inputs, depth = family.inputs(model), stacks(model)[stack].depth
        before = model(**inputs)[0]
        if family.model_type in {*NORM_LAST, *FIXED, "albert"}:
            reason = "share one block" if family.model_type == "albert" else "block 1"
            with pytest.raises(ConfigError, match=FIXED.get(family.model_type, reason)):
                duplicate_(model, [1, 2], stack=stack)
            assert torch.equal(model(**inputs)[0], before)
            continue
        edit = duplicate_(model, [1, depth], stack=stack)
        edited = stacks(model)[stack]
        assert (edited.depth, len(set(edited.blocks))) == (depth + 2, depth + 2)
        torch.testing.assert_close(model(**inputs)[0], before, rtol=CLOSE, atol=CLOSE)
        copies = [dict(model.named_parameters())[key] for key in edit.parameters]
        assert sum(bool(copy.any()) for copy in copies) > len(copies) / 4  # biases begin at zero anyway
        with torch.enable_grad():
            model(**inputs)[0].square().sum().backward()
        assert any(copy.grad is not None and copy.grad.any() for copy in copies)  # so that they can be trained


SEQ2SEQ = [name for name, family in READABLE.items() if (family.stacks, family.modality) == (BOTH, "text")]


@pytest.mark.parametrize("name", one_in(24, [*CAUSAL, *SEQ2SEQ], 2, ("t5-Seq2SeqLM", "gemma2")))
@torch.no_grad()
def test_generation_with_a_cache_equals_that_without(name, tmp_path: Path):
    """Transformers makes the cache of a T5 with an entry per block of the encoder, unless the config says more."""
    family: Family = READABLE[name]
    auto = "AutoModelForSeq2SeqLM" if name in SEQ2SEQ else "AutoModelForCausalLM"
    model = replace(family, auto=auto).build()
    if name in SEQ2SEQ:
        drop_(model, "2-", stack="encoder")
        check_cache(model)
    drop_(model, 2, stack=family.stacks[-1])
    duplicate_(model, "all", identity=False, stack=family.stacks[-1])
    duplicate_(model, "all", identity=False, stack=family.stacks[-1])
    tokens = check_cache(model)
    lamina.save(model, tmp_path)
    assert torch.equal(check_cache(type(model).from_pretrained(tmp_path)), tokens)


def check_cache(model: Any) -> Tensor:
    """The tokens that a model writes, with a cache as without."""
    ids = torch.randint(5, 99, (1, 6), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 8, "do_sample": False, "min_new_tokens": 8}
    cached, plain = (model.generate(ids, **options, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    assert cached.shape[1] >= 8
    return cached


@pytest.mark.parametrize(("name", "order"), [("modernbert", [1, 3]), ("esm", [2, 1, 3])])
def test_families_that_refuse_many_orders_take_these(name: str, order: list[int]):
    assert check_order(name, "main", order) is not None


def test_a_list_in_a_string_is_refused():
    with pytest.raises(ConfigError, match="which is not a layer selector"):
        keep_(FAMILIES["llama"].known(), "1,3")


@pytest.mark.parametrize("layers", [[0, 1, 3], [1, 3], (1, -1)])
def test_keep_counts_as_hidden_states_do(layers):
    model = FAMILIES["llama"].known()
    wanted = [model.layers[0], model.layers[2]]
    edit = keep_(model, layers)
    assert list(model.layers) == wanted
    assert (edit.kind, edit.layers, edit.settings["order"]) == ("keep", (2,), [1, 3])
    assert [layer.self_attn.layer_idx for layer in model.layers] == [0, 1]
    assert len(AutoModelForCausalLM.from_config(model.config).model.layers) == 2
    assert AutoModel.from_config(model.config).config.num_hidden_layers == 2
