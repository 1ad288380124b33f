"""The readers that take part in a generated text, and their scores by type of problem."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.causal import causal_model, causal_tokenizer

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.mean import Mean
from lamina.fusion.paired_layers import PairedLayers
from lamina.heads.causal_lm import CausalLM
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import Cascade, LastScore, Monitor
from lamina.serve.generation.token_scores import TokenScores

IDS = torch.tensor([[4, 6, 7]])


def bank_of(**readers: Any) -> ReaderBank:
    bank = ReaderBank(causal_model(), causal_tokenizer())
    for name, (fusion, head) in readers.items():
        bank.add(name, Reader(fusion, head))
    return bank.eval()


def test_a_reader_of_many_labels_is_left_out_or_refused_by_name():
    many = bank_of(many=(Mean(), whole([f"l{number}" for number in range(33)])))
    assert not TokenScores(many, each=False).monitors
    with pytest.raises(
        ConfigError, match="serve: task 'many' has 33 labels; scores token by token are given for at most 32"
    ):
        TokenScores(many, ["many"], each=True)


def whole(labels: Any, **options: Any) -> SequenceClassification:
    return SequenceClassification(labels, pooling="mean", **options)


def followed(bank: ReaderBank, **options: Any) -> tuple[TokenScores, Any, Any, torch.Tensor]:
    """Generate a text; return its `TokenScores`, the steps, the outputs of `bank.listen`, and all ids but the last."""
    said = TokenScores(bank, each=False, **options)
    model: Any = bank.model
    with bank.watch(said.monitors or [Monitor("each", "odd")]) as watch, bank.listen(said.late, over="both") as heard:
        ids = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, pad_token_id=0)
    return said, watch.steps, heard, ids[:, :-1]


def test_scores_by_type_of_problem():
    bank = bank_of(
        each=(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)),
        several=(Mean(), whole(("war", "art"), problem_type="multi_label")),
        amount=(Mean(), whole(("stars",), problem_type="regression")),
    )
    said, steps, _, ids = followed(bank)
    with torch.no_grad():
        states = bank.model(ids, output_hidden_states=True).hidden_states
        features = torch.stack(states).mean(0)[0, 3]  # of the first token that was written
        logits = {
            name: bank[name].head(features.view(1, 1, -1), torch.ones(1, 1).bool())[0]
            for name in bank
            if name != "each"
        }
    told = said.at(steps[0])
    assert told["several"] == pytest.approx(
        dict(zip(("war", "art"), logits["several"].sigmoid().tolist(), strict=True)), abs=1e-5
    )
    assert told["amount"] == pytest.approx({"stars": float(logits["amount"])}, abs=1e-5)
    assert sum(told["each"].values()) == pytest.approx(1)


def test_readers_that_need_the_whole_text_answer_at_the_end():
    bank = bank_of(
        each=(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)),
        tags=(AdaLayers(dim=8), TokenClassification(("O", "B-x", "B-y"), encoder_layers=1)),
        several=(Mean(), SequenceClassification(("war", "art"), problem_type="multi_label", pooling="first")),
        amount=(Mean(), SequenceClassification(("stars",), problem_type="regression", pooling="first")),
    )
    said, _, heard, ids = followed(bank)
    assert said.late == ["tags", "several", "amount"]
    answers = said.answers(heard)
    with torch.no_grad():
        plain = bank(input_ids=ids)
    best = plain["tags"].logits[0].softmax(-1).max(-1)
    assert [one["id"] for one in answers["tags"]] == ids[0].tolist()
    assert [("O", "B-x", "B-y").index(one["label"]) for one in answers["tags"]] == best.indices.tolist()
    assert [one["score"] for one in answers["tags"]] == pytest.approx(best.values.tolist(), abs=1e-5)
    scores = {one["label"]: one["score"] for one in answers["several"]}
    several = plain["several"].logits[0].sigmoid().tolist()
    assert scores == pytest.approx(dict(zip(("war", "art"), several, strict=True)), abs=1e-5)
    assert answers["amount"] == pytest.approx({"value": float(plain["amount"].logits)}, abs=1e-5)


def test_the_score_of_a_cascade_that_stops_early_is_null():
    bank = bank_of(
        each=(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)),
        more=(Mean(), TokenClassification(("fine", "odd"), encoder_layers=0)),
    )
    cheap = Monitor("each", "odd", LastScore(), threshold=0.99, name="cheap")
    bank.keep_monitor(Cascade(cheap, Monitor("more", "odd", LastScore(), threshold=0.5), name="both"))
    said, steps, _, _ = followed(bank)
    assert said.so_far(steps[0]) == {"both": None}
    assert TokenScores(bank, ["each"], each=True).saved == ()  # the second's reader takes no part


@pytest.mark.long
def test_readers_of_many_labels_give_no_scores_but_feed_monitors():
    bank = bank_of(
        many=(AdaLayers(dim=8), TokenClassification(tuple(map(str, range(33))), encoder_layers=0)),
        each=(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)),
    )
    bank.keep_monitor(Monitor("many", "7", LastScore(), name="seven"))
    said, steps, _, _ = followed(bank)
    assert (list(said.at(steps[0])), list(said.so_far(steps[0]))) == (["each"], ["seven"])


@pytest.mark.parametrize(
    ("reader", "told"),
    [
        ((LastLayer(), CausalLM()), "task 'other' cannot follow a generated text: it has no labels"),
        ((PairedLayers(), whole(("a", "b"))), "task 'other' cannot follow .*: it compares two texts"),
        ((ExtraLayers(), whole(("a", "b"))), "task 'other' cannot follow a generated text: .* own blocks"),
    ],
)
def test_readers_that_cannot_take_part_are_left_out_or_refused_by_name(reader: Any, told: str):
    bank = bank_of(each=(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)), other=reader)
    said = TokenScores(bank, each=True)
    assert (said.late, {monitor.readers for monitor in said.monitors}) == ([], {("each",)})
    with pytest.raises(ConfigError, match=told):
        TokenScores(bank, ["other"], each=False)
