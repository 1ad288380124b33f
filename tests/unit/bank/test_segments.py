from __future__ import annotations

import weakref

import pytest
import torch
from tests.support.formulas import stir_
from tests.support.portions import one_in
from tests.support.stored import tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES

from lamina.bank import Reader, ReaderBank
from lamina.bank.generation_states import Over
from lamina.bank.segments import Separators, segments_of, separators_of
from lamina.errors import ConfigError
from lamina.fusion.paired_layers import PairedLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.prediction.predict import predict


class Joined:
    """A tokenizer, as far as it is looked at: what it makes of two texts."""

    def __init__(
        self, ids: list[int], owners: list[int | None], *, fast: bool = True, types: list[int] | None = None
    ) -> None:
        self._owners, self.is_fast = owners, fast
        self._columns = {"input_ids": ids} | ({} if types is None else {"token_type_ids": types})

    def __call__(self, *_: str) -> Joined:
        return self

    def __getitem__(self, key: str) -> list[int]:
        return self._columns[key]

    def __contains__(self, key: str) -> bool:
        return key in self._columns

    def sequence_ids(self) -> list[int | None]:
        return self._owners


@pytest.mark.parametrize(
    ("joined", "separators", "ids", "segments"),
    [
        # [CLS] a [SEP] b [SEP]
        (
            Joined([2, 7, 3, 8, 3], [None, 0, None, 1, None]),
            Separators((3,), (2, 3)),
            [2, 9, 9, 3, 7, 3, 0],
            [0, 1, 1, 0, 2, 0, 0],
        ),
        # <s> a </s></s> b </s>, padded on the left with another token
        (
            Joined([0, 7, 2, 2, 8, 2], [None, 0, None, None, 1, None]),
            Separators((2, 2), (0, 2)),
            [1, 0, 9, 2, 2, 7, 7, 2],
            [0, 0, 1, 0, 0, 2, 2, 0],
        ),
        # </s> a </s> b </s>, which begins as it separates, padded on the left
        (
            Joined([2, 7, 2, 8, 2], [None, 0, None, 1, None]),
            Separators((2,), (2,)),
            [1, 1, 2, 9, 9, 2, 7, 2],
            [0, 0, 0, 1, 1, 0, 2, 0],
        ),
        # a </s> b </s>
        (Joined([7, 3, 8, 3], [0, None, 1, None]), Separators((3,), (3,)), [9, 3, 8, 8, 3], [1, 0, 2, 2, 0]),
    ],
)
def test_texts_are_told_apart_by_what_is_between_them(
    joined: Joined, separators: Separators, ids: list[int], segments: list[int]
):
    assert separators_of(joined) == separators
    given = torch.tensor([ids])
    assert segments_of(given, separators, given > 1 if ids[0] == 1 else given > 0).tolist() == [segments]


BERT, ROBERTA = Separators((3,), (2, 3)), Separators((2, 2), (0, 2))


@pytest.mark.parametrize(
    ("separators", "ids", "types", "segments"),
    [
        # [CLS] a [SEP] a [SEP] b [SEP] b [SEP]
        (BERT._replace(second_type=1), [2, 9, 3, 9, 3, 7, 3, 7, 3], [0] * 5 + [1] * 4, [0, 1, 0, 1, 0, 2, 0, 2, 0]),
        (BERT._replace(second_type=1), [2, 9, 3, 9, 3], [0] * 5, [0, 1, 0, 1, 0]),  # a single text
        (BERT, [2, 9, 3, 9, 3, 7, 3], None, [0, 1, 0, 1, 0, 2, 0]),
        (BERT, [2, 9, 3, 9, 3, 7, 3], [0] * 7, [0, 1, 0, 1, 0, 2, 0]),  # types that are always 0
        (BERT, [2, 9, 3, 3, 7, 3], None, [0, 1, 0, 0, 2, 0]),
        # <s> a </s> a </s></s> b </s> b </s>
        (ROBERTA, [0, 9, 2, 9, 2, 2, 7, 2, 7, 2], None, [0, 1, 0, 1, 0, 0, 2, 0, 2, 0]),
        (ROBERTA, [0, 9, 2, 2, 9, 2, 2, 7, 2], None, [0, 1, 0, 0, 1, 0, 0, 2, 0]),
        (ROBERTA, [0, 9, 2, 9, 2], None, [0, 1, 0, 1, 0]),  # a single text
        (ROBERTA, [9], None, [1]),
    ],
)
def test_a_text_may_contain_separators(
    separators: Separators, ids: list[int], types: list[int] | None, segments: list[int]
):
    given = torch.tensor([ids])
    mask = torch.ones_like(given).bool()
    found = segments_of(given, separators, mask, None if types is None else torch.tensor([types]))
    assert found.tolist() == [segments]


@pytest.mark.parametrize(("types", "second"), [([0, 0, 0, 1, 1], 1), ([0, 0, 0, 0, 0], None), (None, None)])
def test_the_token_type_of_the_second_text(types: list[int] | None, second: int | None):
    joined = Joined([2, 7, 3, 8, 3], [None, 0, None, 1, None], types=types)
    assert separators_of(joined) == Separators((3,), (2, 3), second)


@torch.no_grad()
@pytest.mark.parametrize("text", [("the film [SEP] is good", "bad [SEP] fun"), "the film [SEP] is good"])
def test_a_literal_separator_in_a_text_does_not_begin_the_second_text(text: str | tuple[str, str]):
    bank = pair_bank()
    tokenizer = bank.processor
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    batch, reader = tokenizer([text], return_tensors="pt"), bank["same"]
    owners = torch.tensor([[0 if owner is None else owner + 1 for owner in batch.sequence_ids(0)]])
    segments = owners.masked_fill(batch["input_ids"] == tokenizer.sep_token_id, 0)
    mask = batch["attention_mask"].bool()
    states = torch.stack(bank.model(**batch, output_hidden_states=True).hidden_states)
    expected = reader.head(reader.fusion(states, mask, segments), mask)
    torch.testing.assert_close(bank(**batch)["same"].logits, expected)
    with bank.listen() as outputs:
        bank.model(**batch)
    assert torch.equal(outputs["same"].logits, bank(**batch)["same"].logits)
    recorded = bank.record_states({"main": reader.layers}, batch)
    assert torch.equal(bank.read_states(recorded, batch)["same"].logits, bank(**batch)["same"].logits)
    (answer,) = predict(bank, [text])
    assert answer["same"]["probabilities"] == pytest.approx(
        dict(zip(("no", "yes"), expected[0].softmax(-1).tolist(), strict=True)), abs=1e-5
    )


def test_a_single_text_is_all_segment_1():
    ids = torch.tensor([[2, 9, 8, 3]])
    assert segments_of(ids, Separators((3,), (2, 3)), ids > 0).tolist() == [[0, 1, 1, 0]]


def test_the_cache_of_separators_does_not_keep_a_tokenizer_alive():
    tokenizer = Joined([7, 3, 8, 3], [0, None, 1, None])
    held = weakref.ref(tokenizer)
    assert separators_of(tokenizer) == separators_of(tokenizer) == Separators((3,), (3,))
    del tokenizer
    assert held() is None


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (None, "reader of pairs: the bank has no tokenizer, which is needed to tell two texts apart. Use ReaderBank"),
        (Joined([7, 8], [0, 1]), "Joined puts no token between two texts, so they cannot be told apart. Use Pooled"),
        (Joined([7], [0]), "Joined does not encode pairs of texts"),
        (
            Joined([7, 8], [0, 1], fast=False),
            "Joined does not tell the tokens of two texts apart. Use a fast tokenizer",
        ),
    ],
)
def test_a_tokenizer_without_separators_is_refused(processor: Joined | None, reason: str):
    with pytest.raises(ConfigError, match=reason):
        separators_of(processor)


def pair_bank(*, processor: bool = True) -> ReaderBank:
    bank = ReaderBank(tiny_model(), tiny_tokenizer() if processor else None)
    bank.add("same", Reader(PairedLayers(dim=4, heads=2), SequenceClassification(["no", "yes"], pooling="first")))
    with torch.no_grad():
        for parameter in bank["same"].parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return bank.eval()


@torch.no_grad()
def test_every_way_to_run_a_bank_tells_the_two_texts_apart():
    bank, tokenizer = pair_bank(), tiny_tokenizer()
    pair = tokenizer(["the cat sat"], ["a dog ran home"], return_tensors="pt")
    one = tokenizer(["the cat sat a dog ran home"], return_tensors="pt")
    assert bank(**pair)["same"].logits.shape == (1, 2)
    segments = segments_of(pair["input_ids"], separators_of(tokenizer), pair["attention_mask"].bool())
    assert {1, 2} <= set(segments[0].tolist())
    states = torch.stack(bank.model(**pair, output_hidden_states=True).hidden_states)
    reader = bank["same"]
    mask = pair["attention_mask"].bool()
    expected = reader.head(reader.fusion(states, mask, segments), mask)
    torch.testing.assert_close(bank(**pair)["same"].logits, expected)
    blind = reader.head(reader.fusion(states, mask), mask)
    assert not torch.allclose(blind, expected)
    with bank.listen() as outputs:
        bank.model(**pair)
    assert torch.equal(outputs["same"].logits, bank(**pair)["same"].logits)
    recorded = bank.record_states({"main": reader.layers}, pair)
    assert torch.equal(bank.read_states(recorded, pair)["same"].logits, bank(**pair)["same"].logits)
    assert bank(**one)["same"].logits.isfinite().all()  # a single text


def test_a_bank_without_a_tokenizer_says_so():
    with pytest.raises(ConfigError, match="the bank has no tokenizer, which is needed to tell two texts apart"):
        pair_bank(processor=False)(input_ids=torch.tensor([[5, 6]]))


def test_a_batch_without_ids_says_so():
    bank = pair_bank()
    with pytest.raises(ConfigError, match="reader 'same' compares two texts, and the batch has no input_ids"):
        bank(inputs_embeds=torch.zeros(1, 3, bank.model.config.hidden_size))


@torch.no_grad()
def test_padding_on_the_left_is_segment_0():
    """The separator comes first, and the padding is no token that the tokenizer adds to a pair."""
    bank = ReaderBank(FAMILIES["llama"].build(), Joined([2, 7, 2, 8, 2], [None, 0, None, 1, None]))
    reader = bank.add("same", Reader(PairedLayers(dim=4, heads=2), SequenceClassification(["a", "b"], pooling="first")))
    stir_(reader, 1)
    pair = torch.tensor([[2, 20, 21, 2, 30, 31, 2]])
    padded = torch.cat([torch.tensor([[1, 1, 1]]), pair], dim=1)
    mask = padded > 1
    alone = bank.eval()(input_ids=pair)["same"].logits
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    torch.testing.assert_close(
        bank(input_ids=padded, attention_mask=mask.long(), **places)["same"].logits, alone, rtol=0, atol=1e-5
    )


@torch.no_grad()
@pytest.mark.parametrize("over", one_in(2, ["prompt", "both"]))
def test_a_prompt_of_embeddings_is_refused_while_it_is_read(over: Over):
    bank = ReaderBank(FAMILIES["llama-CausalLM"].build(), Joined([2, 7, 2, 8, 2], [None, 0, None, 1, None]))
    bank.add("same", Reader(PairedLayers(dim=4, heads=2), SequenceClassification(["a", "b"], pooling="first")))
    embedded = bank.model.get_input_embeddings()(torch.tensor([[2, 20, 21, 2, 30, 31, 2]]))
    message = "reader 'same' compares two texts, and the batch has no input_ids to tell them apart"
    with pytest.raises(ConfigError, match=message), bank.eval().listen(over=over):
        bank.model.generate(inputs_embeds=embedded, max_new_tokens=3, do_sample=False, pad_token_id=0)
