"""Models with a tower for each kind of input: one stack per tower, run by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.finetuned import t5, t5_tokenizer
from tests.support.tiny import FAMILIES
from tests.support.towers import texts_and_images, two_towers
from tests.support.training import yes_no

import lamina
from lamina.data.encode import length_limit
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers.causality import is_causal
from lamina.layers.hooks import decoder_inputs
from lamina.layers.stack import towers_of


@pytest.mark.parametrize("kind", ["clip", "siglip", "dual"])
def test_each_tower_is_a_stack_that_shows_its_states(kind: str):
    """Law 2, of both towers in one pass of the whole model."""
    model, batch = two_towers(kind), texts_and_images()
    found = lamina.stacks(model)
    assert {name: stack.depth for name, stack in found.items()} == {"text": 3 if kind == "dual" else 2, "vision": 3}
    with lamina.tap(model, stack="text") as text, lamina.tap(model, stack="vision") as vision:
        out = model(**batch, output_hidden_states=True)
    for states, own in ((text, out.text_model_output), (vision, out.vision_model_output)):
        assert [*states] == [*range(len(own.hidden_states))]
        assert all(torch.equal(states[layer], state) for layer, state in enumerate(own.hidden_states))
    modules = dict(model.named_modules())
    for name, stack in found.items():
        assert stack.tower is modules[f"{name}_model"]
        assert modules[stack.scope_path] is stack.scope
        assert all(modules[point.path] is point.module for point in stack.points)


def test_a_copy_has_towers_of_its_own():
    model = two_towers()
    lamina.stacks(model)
    other = copy.deepcopy(model)
    assert lamina.stacks(other)["text"].tower is other.text_model
    assert lamina.stacks(other)["text"].points[1].module is not lamina.stacks(model)["text"].points[1].module


def test_a_stack_must_be_named():
    model = two_towers()
    with (
        pytest.raises(
            ConfigError, match=r"tap: the model has a stack for each of text, vision, and none is named. Give"
        ),
        lamina.tap(model),
    ):
        pass
    with (
        pytest.raises(UnknownNameError, match="tap: unknown stack 'main'; known: text, vision"),
        lamina.tap(model, stack="main"),
    ):
        pass


def test_other_models_have_no_towers():
    for name in ("bert", "bart", "vit", "whisper", "wav2vec2"):
        assert towers_of(FAMILIES[name].build()) == {}


def test_sites_and_causality_are_those_of_the_tower():
    model, batch = two_towers(), texts_and_images()
    with (
        lamina.tap(model, stack="vision", site="attention") as added,
        lamina.tap(model.vision_model, site="attention") as own,
    ):
        model(**batch)
    assert [*added] == [*own] == [1, 2, 3]
    assert all(torch.equal(added[layer], own[layer]) for layer in own)
    found = lamina.stacks(model)
    assert is_causal(model, found["text"])
    assert not is_causal(model, found["vision"])


def test_texts_are_as_long_as_their_tower_reads():
    """Not as many tokens as the other tower has patches, five."""
    assert length_limit(two_towers(), None) == 40


def test_edits_of_a_tower():
    model = two_towers()
    edit = lamina.freeze_(model, "bottom:1", stack="text")
    assert all(name.startswith("text_model.embeddings") for name in edit.parameters)
    assert edit.parameters
    edit = lamina.reinit_(model, "top:1", stack="vision")
    assert all(name.startswith("vision_model.encoder.layers.2") for name in edit.parameters)
    with pytest.raises(ConfigError, match="truncate_: the model has a stack for each of text, vision"):
        lamina.truncate_(model, 1)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_a_decoder_without_a_text_of_its_own_reads_that_of_the_encoder_shifted_right(family: str):
    model = FAMILIES[family].known()
    model.config.decoder_start_token_id = 2
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]])
    bank = lamina.ReaderBank(model)
    for name in ("decoder", "encoder"):
        bank.add(name, lamina.Reader(Mean(), SequenceClassification(("a", "b")), stack=name))
    shifted = torch.tensor([[2, 5, 6, 7], [2, 9, 5, 6]])
    with torch.no_grad():
        found, told = bank.eval()(input_ids=ids), bank(input_ids=ids, decoder_input_ids=shifted)
    assert torch.equal(found["decoder"].logits, told["decoder"].logits)
    assert torch.equal(found["encoder"].logits, told["encoder"].logits)
    assert bank.record_states({"decoder": [1]}, {"input_ids": ids})["decoder"][1].shape[:2] == ids.shape


@torch.no_grad()
def test_a_padded_row_of_a_decoder_answers_as_alone():
    """On either side, and beside a row that is all padding."""
    model = FAMILIES["t5"].known()
    model.config.decoder_start_token_id = 2
    bank = lamina.ReaderBank(model)
    bank.add("tags", lamina.Reader(Mean(), TokenClassification(("a", "b")), stack="decoder"))
    ids = torch.tensor([[0, 0, 7, 8, 9], [5, 6, 7, 8, 0], [5, 5, 6, 7, 8], [0, 0, 0, 0, 0]])
    mask = (ids > 0).long()
    padded = bank.eval()(input_ids=ids, attention_mask=mask)["tags"]
    for row, real, logits in zip(ids[:3], mask[:3].bool(), padded.logits, strict=False):
        torch.testing.assert_close(logits[real], bank(input_ids=row[real][None])["tags"].logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "ids"),
    [
        ([0, 0, 1, 1], [2, 2, 2, 7]),  # the start token stands before the first token
        ([1, 0, 1, 1], [2, 5, 5, 7]),  # padding between tokens is passed over
        ([1, 1, 0, 0], None),  # no token attends to padding behind it, so no mask is needed
    ],
)
def test_a_decoder_reads_at_each_token_the_one_before_it(mask: list[int], ids: list[int] | None):
    model = FAMILIES["t5"].known()
    model.config.decoder_start_token_id = 2
    given = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.tensor([mask])}
    read = decoder_inputs(model, {**given, "decoder_input_ids": None})
    if ids is None:
        assert list(read) == ["decoder_input_ids"]
        assert read["decoder_input_ids"].tolist() == [[2, 5, 6, 7]]
    else:
        assert read["decoder_input_ids"].tolist() == [ids]
        assert torch.equal(read["decoder_attention_mask"], given["attention_mask"])


def test_readers_of_a_decoder_learn_and_answer():
    bank = lamina.ReaderBank(t5(), t5_tokenizer())
    task = yes_no()
    reader = lamina.Reader.default(task)
    bank.add("mood", lamina.Reader(reader.fusion, reader.head, stack="decoder"))
    lamina.fit(bank, {"mood": task}, epochs=1, progress=False)
    answers = lamina.predict(bank, ["good", "the film is good and fun"])
    (alone,) = lamina.predict(bank, ["the film is good and fun"])
    assert answers[1]["mood"]["probabilities"] == pytest.approx(alone["mood"]["probabilities"], abs=1e-5)
    assert answers[1]["mood"]["score"] != pytest.approx(answers[0]["mood"]["score"], abs=1e-4)
