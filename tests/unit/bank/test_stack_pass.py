"""One pass over one stack: where its mask comes from, and what happens if a state never comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import nn

from lamina.bank import Reader, ReaderBank
from lamina.bank.stack_pass import StackPass
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.dwatt import DWAtt
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers import stacks
from lamina.layers.hooks import token_mask

TWO = SequenceClassification(("a", "b"))


def bank_of(
    name: str, stack: str | None = None, fusion: Any = None, model: Any = None
) -> tuple[ReaderBank, dict[str, torch.Tensor]]:
    model = model or FAMILIES[name].known()
    bank = ReaderBank(model)
    bank.add("r", Reader(fusion or AdaLayers(dim=8), TWO, stack))
    return bank.eval(), FAMILIES[name].inputs(model, batch=2, tokens=7)


def test_without_a_mask_every_token_is_real():
    bank, batch = bank_of("bert")
    out = bank(input_ids=batch["input_ids"])
    assert bool(out["r"].mask.all())


def test_the_mask_of_the_batch_is_the_mask_of_the_readers():
    bank, batch = bank_of("bert")
    assert torch.equal(bank(**batch)["r"].mask, batch["attention_mask"].bool())


def test_a_row_without_a_real_token_keeps_its_first():
    bank, batch = bank_of("bert")
    batch["attention_mask"][0] = 0
    mask = bank(**batch)["r"].mask
    assert mask[0].tolist() == [True] + [False] * 6
    assert torch.equal(mask[1], batch["attention_mask"][1].bool())
    assert not batch["attention_mask"][0].any()  # the batch itself is left as it was


@pytest.mark.parametrize("shape", [(2, 6), (1, 7), (3, 7)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int]):
    bank, _ = bank_of("bert")
    one = bank.passes(bank.select(["r"], "test"), grad=False)[0]
    one.mask = torch.ones(shape)
    with pytest.raises(ConfigError, match=r"bank: the attention mask is .*; the states have batch and tokens \(2, 7\)"):
        one.on_state(one.layers[0], torch.randn(2, 7, 32))


def test_the_mask_of_sound_is_that_of_its_frames():
    bank, batch = bank_of("wav2vec2")
    out = bank(**batch)["r"]
    frames = bank.model._get_feature_vector_attention_mask(out.mask.shape[1], batch["attention_mask"])
    assert torch.equal(out.mask, frames.bool())
    assert not out.mask.all()
    assert batch["attention_mask"].shape[1] > out.mask.shape[1]


def test_a_pass_that_never_reached_its_layers_says_so():
    bank, batch = bank_of("bart-Seq2SeqLM", "encoder")
    encoded = bank.model.get_encoder()(batch["input_ids"], attention_mask=batch["attention_mask"])
    with pytest.raises(ConfigError, match="bank: layer 1 of the stack 'encoder' did not run in order"):
        bank(
            encoder_outputs=encoded, attention_mask=batch["attention_mask"], decoder_input_ids=torch.tensor([[3], [3]])
        )


def with_order(model: Any) -> list[int]:
    """Make the model run its blocks in the order that the returned list has; as long as it is empty, in their own."""
    layers, order = model.layers, list[int]()

    class Ordered(type(layers)):
        def __getitem__(self, which: Any) -> Any:
            return [layers._modules[str(block)] for block in order] or super().__getitem__(which)

    layers.__class__ = Ordered
    return order


@pytest.mark.parametrize(("blocks", "layer"), [([0, 2], 2), ([1, 0, 2], 1)])
@pytest.mark.parametrize("fusion", [AdaLayers(dim=8), AdaLayers(dim=8, layers=[1, 2]), DWAtt()])
def test_a_layer_that_did_not_run_is_named(blocks: list[int], layer: int, fusion: Any):
    model = FAMILIES["llama"].known()
    order = with_order(model)
    bank, batch = bank_of("llama", fusion=fusion, model=model)
    message = f"layer {layer} of the stack 'main' did not run in order; it is needed"
    with torch.no_grad(), bank.listen() as outputs:
        order += blocks
        with pytest.raises(ConfigError, match=f"bank: {message}"):
            bank.model(**batch)
        assert len(outputs) == 0
    with pytest.raises(ConfigError, match=f"bank: {message}"):
        bank(**batch)
    with pytest.raises(ConfigError, match=f"bank: {message}"):
        bank(**batch, main=True)
    with pytest.raises(ConfigError, match=rf"bank\.record_states: {message}"):
        bank.record_states({"main": [1, 2, 3]}, batch)


def test_a_decoder_has_the_decoders_mask():
    bank, batch = bank_of("bart-Seq2SeqLM", "decoder")
    length = batch["decoder_input_ids"].shape[1]
    assert bool(bank(**batch)["r"].mask.all())
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, -2:] = 0
    assert torch.equal(bank(**batch, decoder_attention_mask=mask)["r"].mask, mask.bool())


def test_where_a_mask_is_found():
    stack = stacks(FAMILIES["bert"].known())["main"]
    mask, other = torch.ones(2, 3), torch.zeros(2, 3)
    assert token_mask(stack, {"attention_mask": mask}, (), {"attention_mask": other}) is mask
    assert token_mask(stack, {}, (), {"attention_mask": other}) is other
    assert token_mask(stack, {}, (torch.ones(2, 3, dtype=torch.long), other), {}) is other  # after input_ids
    assert token_mask(stack, {}, (), {}) is None
    square = torch.ones(2, 1, 3, 3)
    assert token_mask(stack, {"input_ids": mask}, (), {"attention_mask": square}) is None  # made by the model
    assert token_mask(stack, {"attention_mask": mask}, (), {"attention_mask": square}) is mask


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (torch.ones(2, 1, 3, 3), r"torch\.float32 \[2, 1, 3, 3\]"),
        (torch.tensor([[0.0, -1e9]]), r"torch\.float32 \[1, 2\] with other values than 0 and 1"),
        (torch.tensor([[1, 2, 0]]), r"torch\.int64 \[1, 3\] with other values than 0 and 1"),
        (torch.tensor([[2, 2, 2]]), r"torch\.int64 \[1, 3\] with other values than 0 and 1"),
        (torch.tensor([[1, -1]]), r"torch\.int64 \[1, 2\] with other values than 0 and 1"),
        (torch.tensor([[1.0, 0.5]]), r"torch\.float32 \[1, 2\] with other values than 0 and 1"),
        (torch.tensor([[1.0, float("nan")]]), r"torch\.float32 \[1, 2\] with other values than 0 and 1"),
        ({"full_attention": None}, "dict"),
    ],
    ids=["4-D", "additive", "packed", "twos", "negative", "soft", "nan", "mapping"],
)
def test_a_mask_that_cannot_be_understood_is_refused(mask: Any, form: str):
    stack = stacks(FAMILIES["bert"].known())["main"]
    for batch, kwargs in (({"attention_mask": mask}, {}), ({}, {"attention_mask": mask})):
        with pytest.raises(ConfigError, match=f"mask: the attention mask is {form}; it must be \\[batch, tokens\\]"):
            token_mask(stack, batch, (), kwargs)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.float16])
def test_masks_of_zeros_and_ones_are_read_in_any_dtype(dtype: torch.dtype):
    stack, mask = stacks(FAMILIES["bert"].known())["main"], torch.tensor([[1, 1, 0]]).to(dtype)
    assert token_mask(stack, {"attention_mask": mask}) is mask
    assert token_mask(stack, {"attention_mask": mask[:0]}) is not None


class Tuner(nn.Module):
    """As PEFT's: takes anything, and calls the model's `forward`, so that no hook of the model itself runs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class Peft(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.config, self.main_input_name = Tuner(model), model.config, model.main_input_name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


@pytest.mark.parametrize(
    "family", one_in(3, ["bert", "distilbert", "bert-SequenceClassification", "gpt2-CausalLM", "xlnet"])
)
@torch.no_grad()
def test_the_true_mask_is_found_inside_a_wrapper(family: str):
    inner, alone = FAMILIES[family].known(), ReaderBank(FAMILIES[family].known())
    batch = FAMILIES[family].inputs(inner, batch=2, tokens=7)
    bank = ReaderBank(Peft(inner))  # pyright: ignore[reportArgumentType]
    for each in (alone, bank):
        each.add("r", Reader(AdaLayers(dim=8), TWO)).eval()
    expected = alone.eval()(**batch)["r"]
    assert not expected.mask.all()
    assert torch.equal(bank.eval()(**batch)["r"].logits, expected.logits)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    calls: list[Any] = [bank.model, bank.model.forward, bank.model.base_model]
    start = (ids, None) if family == "gpt2-CausalLM" else (ids,)  # its second argument is a cache
    for call in calls:
        for args, kwargs in (((), batch), ((*start, mask), {}), ((ids,), {"attention_mask": mask})):
            with bank.listen() as outputs:
                call(*args, **kwargs)
            assert torch.equal(outputs["r"].mask, expected.mask)
            assert torch.equal(outputs["r"].logits, expected.logits)
    for wide in (mask[:, None, None, :].bool(), mask[:, None, None, :].expand(-1, -1, 7, -1).float()):
        for call in calls:
            refused = pytest.raises(ConfigError, match=r"mask: the attention mask is .*; it must be")
            with bank.listen(), refused:
                call(*start, wide)


def test_a_mask_of_another_name_is_not_passed_over():
    bank, batch = bank_of("xlnet")
    batch["input_mask"] = 1 - batch.pop("attention_mask")
    message = "mask: the batch has a 'input_mask'; readers use only an 'attention_mask'"
    with pytest.raises(ConfigError, match=message):
        bank(**batch)
    with pytest.raises(ConfigError, match=message), bank.listen():
        bank.model(**batch)


def test_only_active_layers_are_needed():
    bank, _ = bank_of("bert", fusion=AdaLayers(dim=8, alpha=1.0, cutoff=0.2))
    with torch.no_grad():
        bank["r"].fusion.scores.copy_(torch.tensor([0.0, 9.0, 0.0]))
    assert bank.passes(bank.select(["r"], "test"), grad=False)[0].layers == [2]


def test_readers_are_grouped_by_shape_and_layers():
    model = FAMILIES["bert"].known()
    bank = ReaderBank(model)
    fusions = {
        "a": AdaLayers(dim=8),
        "b": AdaLayers(dim=8, entropy=1.0),
        "c": AdaLayers(dim=16),
        "d": AdaLayers(dim=8, layers="2-"),
        "e": SingleLayer(layer=1, dim=8),
        "f": SingleLayer(layer=1, dim=8),
        "g": SingleLayer(layer=2, dim=8),
    }
    for name, fusion in fusions.items():
        bank.add(name, Reader(fusion, TWO))
    one = StackPass(model, stacks(model)["main"], {name: bank[name] for name in bank}, grad=False)
    assert [names for names, _ in one._streams] == [["a", "b"], ["c"], ["d"], ["e", "f"], ["g"]]
    assert one.layers == [1, 2, 3]


@pytest.mark.parametrize("tokens", [3, 150])  # few tokens are projected for all layers at once
def test_a_renewed_pass_gives_what_a_new_one_gives(tokens: int):
    bank = ReaderBank(FAMILIES["llama"].build())
    head = SequenceClassification(("no", "yes"), pooling="mean")
    fusions = [AdaLayers(dim=4), AdaLayers(dim=4), AdaLayers(dim=6, layers="1-2"), SingleLayer(layer=1, dim=4)]
    for number, fusion in enumerate([*fusions, ScalarMix(), AdaLayers(dim=4, cutoff=0.3)]):
        bank.add(f"r{number}", Reader(fusion, head, seed=number))
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    stack = bank.stacks["main"]
    template = StackPass(bank.eval().model, stack, {name: bank[name] for name in bank}, grad=False)
    for _ in range(2):
        passes = [template.restart(), template.renewed()]
        states = torch.randn(stack.layers, 1, tokens, stack.width)
        for stack_pass in passes:
            for layer in stack_pass.layers:
                stack_pass.on_state(layer, states[layer])
        new, renewed = (stack_pass.features() for stack_pass in passes)
        for name, features in new.items():
            torch.testing.assert_close(renewed[name], features, rtol=0, atol=1e-5)
