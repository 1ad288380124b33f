"""Readers of any stack, several banks on one model, and which tokens are real."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import Tensor

import lamina
from lamina import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.dwatt import DWAtt
from lamina.fusion.head2toe import Head2Toe
from lamina.fusion.mean import Mean
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.routing import Routing
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification

TWO = ("a", "b")
GPT2, BART = "gpt2-CausalLM", "bart-Seq2SeqLM"
READERS = {
    "tokens": (AdaLayers(dim=8), TokenClassification(TWO, feedforward=16)),
    "text": (AdaLayers(dim=8), SequenceClassification(TWO)),
    "mean": (Mean(), SequenceClassification(TWO, pooling="mean")),
    "first": (DWAtt(), SequenceClassification(TWO, pooling="first")),
    "counted": (AdaLayers(dim=8, positions=True), SequenceClassification(TWO)),
    "pooled": (PooledLayers(dim=8), SequenceClassification(TWO, pooling="first")),
    "routed": (Routing(dim=2, size=8, vectors=4), SequenceClassification(TWO, pooling="first", linear=False)),
    "toe": (Head2Toe(), SequenceClassification(TWO, pooling="first")),
}
SHORT: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def bank_on(model: Any, stack: str | None = None, **readers: Any) -> ReaderBank:
    bank = ReaderBank(model)
    for name, parts in (readers or READERS).items():
        bank.add(name, Reader(*parts, stack))
    return bank.eval()


def ids_of(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))


# Stacks


@pytest.mark.parametrize("name", [BART, "t5-Seq2SeqLM"])
@torch.no_grad()
def test_a_reader_per_stack_in_one_pass(name: str):
    family, passes = FAMILIES[name], []
    model = family.known()
    inputs = family.inputs(model)
    alone = {stack: bank_on(model, stack)(**inputs) for stack in ("encoder", "decoder")}
    bank = ReaderBank(model)
    for stack in alone:
        for key, parts in READERS.items():
            bank.add(f"{stack}-{key}", Reader(*parts, stack))
    model.register_forward_hook(lambda *_: passes.append(1))
    out = bank.eval()(**inputs, main=True)
    with bank.listen() as outputs:
        model(**inputs)
    assert len(passes) == 2
    for stack, expected in alone.items():
        for key in READERS:
            assert torch.equal(out[f"{stack}-{key}"].logits, expected[key].logits)
            assert torch.equal(outputs[f"{stack}-{key}"].logits, expected[key].logits)


@pytest.mark.parametrize("stack", ["both", ["encoder", "decoder"], ("encoder", "decoder")])
def test_one_reader_over_two_stacks_is_refused(stack: Any):
    message = r"reader: stack is .*; a reader reads one stack, .* Add one reader per stack: they share a pass"
    with pytest.raises(ConfigError, match=message):
        Reader(Mean(), SequenceClassification(TWO), stack)


@pytest.mark.parametrize(("fusion", "head"), [("mean", SequenceClassification(TWO)), (Mean(), SequenceClassification)])
def test_a_class_or_a_name_is_no_fusion_and_no_head(fusion: Any, head: Any):
    with pytest.raises(ConfigError, match=r"reader: (fusion is 'mean'|head is Seq\w+); it must be an object, such as"):
        Reader(fusion, head)


@pytest.mark.parametrize("weights", [5, ["fusion.scores"], {"fusion.scores": [1.0]}])
def test_weights_of_another_type_are_refused(weights: Any):
    with pytest.raises(ConfigError, match=r"weights is .*; a mapping of parameters' names to tensors is needed"):
        Reader(Mean(), SequenceClassification(TWO), weights=weights)


# Several banks


@torch.no_grad()
def test_two_banks_take_turns_on_one_model():
    family = FAMILIES[GPT2]
    model = family.known()
    inputs = family.inputs(model)
    one, other = bank_on(model), bank_on(model, low=(AdaLayers(dim=8, layers="bottom:2"), READERS["text"][1]))
    expected = [one(**inputs), other(**inputs)]
    for _ in range(2):
        for bank, out in zip((one, other), expected, strict=True):
            with bank.listen() as outputs:
                model(**inputs)
            assert all(torch.equal(outputs[name].logits, out[name].logits) for name in bank)
            assert all(torch.equal(bank(**inputs)[name].logits, out[name].logits) for name in bank)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
@torch.no_grad()
def test_two_banks_listen_to_one_generation(options: dict[str, Any]):
    family = FAMILIES[BART]
    model = family.known()
    inputs = {"input_ids": ids_of(2, 6)}
    one, other = bank_on(model, "encoder", text=READERS["text"]), bank_on(model, "decoder", text=READERS["text"])
    third = bank_on(model, "decoder", tokens=READERS["tokens"])
    expected = model.generate(**inputs, **SHORT, **options)
    with one.listen(over="output") as a, other.listen(over="output") as b, third.listen(over="both") as c:
        assert torch.equal(model.generate(**inputs, **SHORT, **options), expected)
    for bank, over, outputs in ((one, "output", a), (other, "output", b), (third, "both", c)):
        with bank.listen(over=over) as alone:
            model.generate(**inputs, **SHORT, **options)
        assert all(torch.equal(outputs[name].logits, alone[name].logits) for name in bank)


@pytest.mark.parametrize("over", ["prompt", "both"])
@torch.no_grad()
def test_a_banks_own_pass_is_not_the_main_job(over: Any):
    """Whatever another bank, or the same, reads meanwhile: `listen` hears what the user's own call runs."""
    family = FAMILIES[GPT2]
    model = family.known()
    one, low = bank_on(model), bank_on(model, low=(AdaLayers(dim=8, layers="bottom:2"), READERS["text"][1]))
    main, aside = {"input_ids": ids_of(1, 6)}, {"input_ids": ids_of(1, 9, seed=1)}
    with one.listen(over=over) as expected:
        text = model.generate(**main, **SHORT)
    asked: list[Tensor] = []

    def ask(*_: Any, **__: Any) -> Tensor:
        asked.extend(bank(**aside)[name].logits for bank, name in ((low, "low"), (one, "text")))
        one.record_states({"main": [2]}, aside)
        return torch.zeros(1, dtype=torch.bool)

    with one.listen(over=over) as outputs:
        ask()
        with pytest.raises(ConfigError, match="has no output: only a bank's own pass over the stack 'main' ran"):
            outputs["text"]
        assert torch.equal(model.generate(**main, **SHORT, stopping_criteria=[ask]), text)
    assert all(torch.equal(outputs[name].logits, expected[name].logits) for name in one)
    assert all(torch.equal(value, alone) for value, alone in zip(asked[2:], asked, strict=False))
    with lamina.tap(model, [1]) as states:
        low(**aside)
    assert states[1].shape[1] == 9  # a tap sees any pass


# Which tokens are real


def padded(texts: list[Tensor], side: str, pad: int, positions: bool) -> dict[str, Tensor]:
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        own = slice(0, len(text)) if side == "right" else slice(longest - len(text), longest)
        ids[row, own], mask[row, own] = text, 1
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | ({"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {})


PADDED = [(GPT2, True), ("llama-CausalLM", True), ("llama-CausalLM", False), ("bert", True), ("roberta", False)]


@pytest.mark.parametrize(("name", "positions"), one_in(3, PADDED))
@torch.no_grad()
def test_padding_on_either_side_gives_the_same_logits(name: str, positions: bool):
    """With positions that are counted over real tokens: as `generate` gives them, or as the model counts itself."""
    model = FAMILIES[name].known()
    texts = [ids_of(1, tokens, seed=tokens)[0] for tokens in (9, 6, 4)]
    bank = bank_on(model)
    right, left = (padded(texts, side, model.config.pad_token_id or 0, positions) for side in ("right", "left"))
    out, other = bank(**right), bank(**left)
    with bank.listen() as outputs:
        model(**left)
    for key in READERS:
        assert torch.equal(outputs[key].logits, other[key].logits)
        for row, text in enumerate(texts):
            alone = bank(input_ids=text[None])[key].logits[0]
            for said, batch in ((out[key].logits[row], right), (other[key].logits[row], left)):
                own = said[batch["attention_mask"][row].bool()] if said.ndim == 2 else said
                torch.testing.assert_close(own, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2"])
@torch.no_grad()
def test_class_tokens_and_patches_are_all_real(name: str):
    model = FAMILIES[name].known()
    inputs = FAMILIES[name].inputs(model)
    parts = {pooling: (Mean(), SequenceClassification(TWO, pooling=pooling)) for pooling in ("first", "mean")}
    bank = bank_on(model, **parts)
    out = bank(**inputs)
    hidden = torch.stack(model(**inputs, output_hidden_states=True).hidden_states).mean(0)
    assert out["first"].mask.shape == hidden.shape[:2]
    assert out["first"].mask.all()
    for pooling, seen in (("first", hidden[:, 0]), ("mean", hidden.mean(1))):  # the first is the class token
        torch.testing.assert_close(out[pooling].logits, bank[pooling].head.output(seen), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", GPT2])
@torch.no_grad()
def test_without_a_mask_every_token_counts_as_it_does_for_the_model(name: str):
    model = FAMILIES[name].known()
    bank, ids = bank_on(model), ids_of(2, 7)
    ids[1, 4:] = 0  # the pad token
    out, ones = bank(input_ids=ids), bank(input_ids=ids, attention_mask=torch.ones_like(ids))
    for key in READERS:
        torch.testing.assert_close(out[key].logits, ones[key].logits, rtol=0, atol=1e-6)
    assert out["text"].mask.all()


@pytest.mark.parametrize("name", ["bert", GPT2])
@torch.no_grad()
def test_a_mask_of_four_axes_is_refused(name: str):
    model = FAMILIES[name].known()
    bank, ids = bank_on(model), ids_of(2, 4)
    message = r"the attention mask is torch\.bool \[2, 1, 4, 4\]; it must be \[batch, tokens\]"
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    with pytest.raises(ConfigError, match=message):
        bank(input_ids=ids, attention_mask=mask)
    with pytest.raises(ConfigError, match=message), bank.listen():
        model(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("masked", [True, False])
@torch.no_grad()
def test_a_pass_that_goes_on_from_a_cache_reads_its_own_tokens(masked: bool):
    model = FAMILIES[GPT2].known()
    bank, ids = bank_on(model, tokens=(AdaLayers(dim=8), TokenClassification(TWO, encoder_layers=0))), ids_of(2, 8)
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[1, -1] = 0
    mask = mask if masked else torch.ones_like(ids)
    place = (mask.cumsum(1) - 1).clamp(min=0)
    whole = bank(input_ids=ids, attention_mask=mask, position_ids=place)["tokens"]
    start = {"input_ids": ids[:, :5], "attention_mask": mask[:, :5], "position_ids": place[:, :5]}
    cache = model(**start, use_cache=True).past_key_values
    rest = {"input_ids": ids[:, 5:], "position_ids": place[:, 5:]} | ({"attention_mask": mask} if masked else {})
    with bank.listen() as outputs:
        model(**rest, past_key_values=copy.deepcopy(cache))
    for out in (outputs["tokens"], bank(**rest, past_key_values=copy.deepcopy(cache))["tokens"]):
        assert torch.equal(out.mask, mask[:, 5:].bool())
        seen = mask[:, 5:].bool()
        torch.testing.assert_close(out.logits[seen], whole.logits[:, 5:][seen], rtol=0, atol=1e-5)
    decoder = bank_on(FAMILIES[BART].known(), "encoder", text=READERS["text"])
    pair = FAMILIES[BART].inputs(decoder.model)
    again = decoder.model(**pair, use_cache=True).past_key_values
    step = {key: value for key, value in pair.items() if not key.startswith("decoder")}
    output = decoder(**step, decoder_input_ids=ids[:, :1], past_key_values=again)  # an encoder has no cache
    torch.testing.assert_close(output["text"].logits, decoder(**pair)["text"].logits, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_batch_without_a_cache_stops_early_even_if_it_names_one():
    model, ids = FAMILIES[GPT2].known(), ids_of(1, 6)
    bank = bank_on(model, low=(SingleLayer(1), TokenClassification(TWO, encoder_layers=0)))
    ran: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda *_: ran.append(1))
    bank(input_ids=ids, past_key_values=None)
    bank.record_states({"main": [1]}, {"input_ids": ids, "past_key_values": None})
    hook.remove()
    assert ran == []


@pytest.mark.parametrize("way", ["bank", "record_states", "monitor_scores", "study"])
@torch.no_grad()
def test_a_cache_is_complete_after_a_pass_for_low_layers(way: str):
    model, ids = FAMILIES[GPT2].known(), ids_of(1, 9)
    bank = bank_on(model, low=(SingleLayer(1), TokenClassification(TWO, encoder_layers=0)))
    whole, cache = model(ids).logits, model(ids[:, :3]).past_key_values
    batch = {"input_ids": ids[:, 3:6], "past_key_values": cache}
    if way == "bank":
        assert bank(**batch).main is None
    elif way == "record_states":
        assert list(bank.record_states({"main": [1]}, batch)["main"]) == [1]
    elif way == "monitor_scores":
        bank.monitor_scores(lamina.Monitor("low", "a"), batch)
    else:
        pytest.importorskip("scipy")  # studies need it
        from lamina.studies.passes import LayerReader

        LayerReader(model, [1]).read(batch, lambda *_: None)
    torch.testing.assert_close(model(ids[:, 6:], past_key_values=cache).logits, whole[:, 6:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_pass_of_the_backbone_alone_that_goes_on_from_a_cache_reads_its_own_tokens():
    model, ids = FAMILIES[GPT2].known(), ids_of(2, 8)
    bank = bank_on(model, tokens=(AdaLayers(dim=8), TokenClassification(TWO, encoder_layers=0)))
    mask = torch.ones_like(ids)
    mask[1, -1] = 0
    cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
    with bank.listen() as outputs:
        model.transformer(input_ids=ids[:, 5:], attention_mask=mask, past_key_values=cache)
    assert torch.equal(outputs["tokens"].mask, mask[:, 5:].bool())
