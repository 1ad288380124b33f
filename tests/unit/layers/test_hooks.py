import gc
import weakref

import pytest
import torch
from tests.support.tiny import FAMILIES
from torch import Tensor, nn

from lamina.errors import ConfigError, LayerIndexError, UnknownNameError
from lamina.layers import stacks, tap, watch
from lamina.layers.hooks import StopForward, arguments, run_until_stopped


class StopError(Exception):
    pass


@pytest.fixture(scope="module")
def bert():
    return FAMILIES["bert"].build()


@pytest.fixture(scope="module")
def albert():
    return FAMILIES["albert"].build()


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_states_come_in_ascending_order_after_the_start(bert):
    heard = []
    with watch(stacks(bert)["main"], [3, 1, 0], lambda layer, _: heard.append(layer), lambda *_: heard.append("start")):
        bert(**FAMILIES["bert"].inputs(bert))
        bert(**FAMILIES["bert"].inputs(bert))
    assert heard == ["start", 0, 1, 3, "start", 0, 1, 3]


def test_only_what_is_needed_is_hooked(bert):
    before = count_hooks(bert)
    with watch(stacks(bert)["main"], [2], lambda *_: None):
        assert count_hooks(bert) == before + 2  # the start of a pass, and layer 2
    assert count_hooks(bert) == before


def test_blocks_that_run_outside_a_pass_are_ignored(bert):
    heard = []
    with watch(stacks(bert)["main"], [1], lambda layer, _: heard.append(layer)):
        for _ in range(3):
            stacks(bert)["main"].blocks[0](torch.zeros(1, 2, 32))
    assert heard == []


def test_no_layers_is_no_hook_but_the_start(bert):
    starts = []
    with watch(stacks(bert)["main"], [], lambda *_: None, lambda args, kwargs: starts.append(kwargs)):
        bert(**FAMILIES["bert"].inputs(bert))
    assert len(starts) == 1


def test_the_start_shows_the_mask():
    model = FAMILIES["roberta-MaskedLM"].build()
    inputs = FAMILIES["roberta"].inputs(model)
    starts = []
    with watch(stacks(model)["main"], [0], lambda *_: None, lambda args, kwargs: starts.append(kwargs)):
        model(**inputs)
    assert torch.equal(starts[0]["attention_mask"], inputs["attention_mask"])


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_a_stopped_pass_leaves_nothing_behind(name, request):
    model = request.getfixturevalue(name)
    inputs, before = FAMILIES[name].inputs(model), count_hooks(model)
    heard = []

    def listen(layer, _state):
        heard.append(layer)
        if layer == 2 and len(heard) == 3:
            raise StopError

    with watch(stacks(model)["main"], [0, 1, 2, 3], listen):
        with pytest.raises(StopError):
            model(**inputs)
        model(**inputs)
    assert heard == [0, 1, 2, 0, 1, 2, 3]
    assert count_hooks(model) == before


def test_a_shared_block_gives_each_layer_its_own_state(albert):
    inputs = FAMILIES["albert"].inputs(albert)
    with torch.no_grad(), tap(albert, layers=[2]) as states:
        expected = albert(**inputs, output_hidden_states=True).hidden_states
    assert list(states) == [2]
    assert torch.equal(states[2], expected[2])
    assert not torch.equal(states[2], expected[1])


def test_recomputation_is_ignored(bert):
    model = FAMILIES["bert"].build().train()
    model.gradient_checkpointing_enable()
    heard = []
    with watch(stacks(model)["main"], [0, 1, 2, 3], lambda layer, _: heard.append(layer)):
        model(**FAMILIES["bert"].inputs(model)).last_hidden_state.sum().backward()
    assert heard == [0, 1, 2, 3]


def test_gradients_flow_through_a_tap(bert):
    bert.zero_grad()
    with tap(bert, layers=2) as states:
        bert(**FAMILIES["bert"].inputs(bert))
    states[2].sum().backward()
    assert bert.encoder.layer[1].output.dense.weight.grad is not None
    assert bert.encoder.layer[2].output.dense.weight.grad is None


def test_a_tap_holds_the_latest_pass_alone(bert):
    family = FAMILIES["bert"]
    with torch.no_grad(), tap(bert) as states:
        bert(**family.inputs(bert, tokens=12))
        bert(**family.inputs(bert, tokens=5))
    assert {state.shape[1] for state in states.values()} == {5}


def test_a_stopped_pass_does_not_mix_with_the_one_before(bert):
    def stop(*_):
        raise StopError

    inputs = FAMILIES["bert"].inputs(bert)
    with torch.no_grad(), tap(bert) as states:
        bert(**inputs)
        hook = bert.encoder.layer[2].register_forward_pre_hook(stop)
        with pytest.raises(StopError):
            bert(**inputs)
        hook.remove()
    assert list(states) == [0, 1, 2]


def test_the_encoder_is_the_default():
    model = FAMILIES["bart"].build()
    inputs = FAMILIES["bart"].inputs(model)
    with torch.no_grad(), tap(model) as states, tap(model, stack="decoder") as decoder:
        model(**inputs)
    assert states[0].shape[1] == inputs["input_ids"].shape[1]
    assert decoder[0].shape[1] == inputs["decoder_input_ids"].shape[1]


def test_unknown_stack(bert):
    with pytest.raises(UnknownNameError, match="tap: unknown stack 'encodr'; known: main"), tap(bert, stack="encodr"):
        pass


def test_unknown_layer(bert):
    with pytest.raises(LayerIndexError, match="tap: layer 4 does not exist"), tap(bert, layers=4):
        pass
    with pytest.raises(LayerIndexError, match="watch: layer 9 does not exist"):
        watch(stacks(bert)["main"], [9], lambda *_: None).__enter__()


def test_no_selector(bert):
    with pytest.raises(ConfigError, match="tap: layers is 'some'"), tap(bert, layers="some"):
        pass


def test_nothing_holds_on_to_the_model():
    model = FAMILIES["bert"].build()
    with tap(model) as states:
        model(**FAMILIES["bert"].inputs(model))
    del states
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_run_is_stopped_by_its_own_exception_only():
    model, stop = nn.Linear(2, 2), StopForward()
    batch = {"input": torch.zeros(1, 2)}
    assert run_until_stopped(model, batch, stop).shape == (1, 2)
    raised: list[BaseException] = [stop]

    def end(*_: object) -> None:
        raise raised[0]

    model.register_forward_hook(end)
    assert run_until_stopped(model, batch, stop) is None
    assert stop.__traceback__ is None  # it would hold what the run made, and itself
    raised[0] = StopForward("of another run")
    with pytest.raises(StopForward, match="of another run"):
        run_until_stopped(model, batch, stop)
    raised[0] = ZeroDivisionError("a failure")
    with pytest.raises(ZeroDivisionError, match="a failure"):
        run_until_stopped(model, batch, stop)


def test_arguments_have_the_names_of_the_forward_that_the_module_itself_has():
    class Block(nn.Module):
        def forward(self, states: Tensor, attention_mask: Tensor) -> Tensor:
            return states * attention_mask

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Tensor) -> Tensor:
            return self.inner(*args)

    one, other = Block(), Block()
    other.forward = lambda attention_mask, states: states * attention_mask  # pyright: ignore
    for _ in range(2):
        for module in (one, Wrapper(one)):
            assert list(arguments(module, (1, 2), {})) == ["states", "attention_mask"]
        assert list(arguments(other, (1, 2), {"more": 3})) == ["attention_mask", "states", "more"]
    assert arguments(Wrapper(nn.Module()), (1,), {"more": 3}) == {"more": 3}


def test_a_decoder_may_run_from_the_outputs_of_its_encoder_and_from_labels():
    model = FAMILIES["bart-Seq2SeqLM"].build()
    states, labels = torch.zeros(1, 3, model.config.d_model), torch.ones(1, 2, dtype=torch.long)
    output = run_until_stopped(model, {"encoder_outputs": (states,), "labels": labels}, StopForward())
    assert output.logits.shape[:2] == (1, 2)
