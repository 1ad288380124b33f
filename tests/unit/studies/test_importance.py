"""The studies `importance` and `contributions` equal their formulas for every fusion that supports them."""

from __future__ import annotations

import pytest
import torch
from tests.support.stored import TEXTS, tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES
from transformers import BartModel

from lamina import (
    AdaLayers,
    Concat,
    DWAtt,
    Elementwise,
    Gated,
    PooledLayers,
    Reader,
    ReaderBank,
    Routing,
    ScalarMix,
    SequenceClassification,
    SingleLayer,
)
from lamina.bank.layer_amounts import layer_amounts
from lamina.errors import ConfigError, UnknownNameError
from lamina.studies import contributions, importance

HEAD = SequenceClassification(("no", "yes"))


def bank_of(**fusions) -> ReaderBank:
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    for name, fusion in fusions.items():
        torch.manual_seed(len(name))
        reader = bank.add(name, Reader(fusion, HEAD, seed=len(name)))
        with torch.no_grad():
            for parameter in reader.fusion.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return bank.eval()


def test_shares_of_several_runs():
    banks = {
        "first": bank_of(mix=ScalarMix(), top=SingleLayer(3)),
        "second": bank_of(mix=ScalarMix(), ada=AdaLayers(8)),
    }
    study = importance(banks)
    table = study.table
    assert table.groupby(["run", "reader"])["layer"].apply(list).to_dict() == {
        ("first", "mix"): [0, 1, 2, 3],
        ("second", "mix"): [0, 1, 2, 3],
        ("second", "ada"): [1, 2, 3],
    }
    scores = banks["first"]["mix"].fusion.scores.softmax(0).tolist()
    assert table.query("run == 'first'")["score"].tolist() == pytest.approx(scores)
    assert table.query("reader == 'ada'")[["fusion", "seed"]].drop_duplicates().to_numpy().tolist() == [
        ["AdaLayers", 3]
    ]
    assert list(study.figures) == ["first", "second"]
    assert [said.partition(":")[0] for said in study.conclusions] == ["first, mix", "second, mix", "second, ada"]


def test_conclusions_about_readers_of_several_seeds():
    def told(*scores: list[float]) -> tuple[str, ...]:
        bank = ReaderBank(tiny_model(), tiny_tokenizer())
        for seed, own in enumerate(scores):
            reader = bank.add(f"mood-{seed}", Reader(ScalarMix(), HEAD, seed=seed))
            with torch.no_grad():
                reader.fusion.scores.copy_(torch.tensor(own).log())
        return importance(bank).conclusions

    two = told([0.1, 0.1, 0.5, 0.3], [0.1, 0.1, 0.7, 0.1])
    assert two == ("mood: layer 2 has the largest share, 0.600 (2 seeds, no interval).",)
    assert "± 0.000 (95 % over 3 readers)." in told(*[[0.1, 0.1, 0.7, 0.1]] * 3)[0]
    assert told([0.1, 0.1, 0.5, 0.3]) == ("mood: layer 2 has the largest share, 0.500 (one seed).",)
    assert told([0.24, 0.26, 0.22, 0.28]) == ("mood: no layer stands out; shares are from 0.220 to 0.280.",)


def test_readers_with_weights_per_token_need_texts():
    bank = bank_of(gated=Gated(8))
    with pytest.raises(ConfigError, match=r"reader 'gated' weighs layers anew for each token, .* Pass texts"):
        importance(bank)
    found = importance(bank, TEXTS).table["score"].tolist()
    assert found == pytest.approx(bank["gated"].fusion.importance().tolist())
    assert importance(bank, TEXTS, batch_size=1).table["score"].tolist() == pytest.approx(found, abs=1e-6)
    assert len(set(found)) > 1


def test_shares_are_those_of_the_texts_whatever_was_read_before():
    bank = bank_of(gated=Gated(8))
    alone = importance(bank, TEXTS[:1]).table["score"].tolist()
    other = importance(bank, TEXTS[1:]).table["score"].tolist()
    assert importance(bank, TEXTS[:1]).table["score"].tolist() == pytest.approx(alone)
    assert alone != pytest.approx(other)
    pairs = importance(bank, [("the film", "is good"), ("anna", "went to paris")])
    assert pairs.table["score"].sum() == pytest.approx(1)
    assert pairs.table["score"].tolist() != pytest.approx(other)


def test_a_bank_without_weights():
    with pytest.raises(ConfigError, match="importance: no reader weighs layers"):
        importance(bank_of(top=SingleLayer(3)))


@torch.no_grad()
def test_contributions_are_the_norms_of_the_terms():
    bank = bank_of(mix=ScalarMix(layers=[1, 3]), each=Elementwise())
    study = contributions(bank, TEXTS[0])
    states = bank.model(**bank.processor(TEXTS[0], return_tensors="pt"), output_hidden_states=True).hidden_states
    weights = bank["mix"].fusion.scores.softmax(0)
    terms = torch.stack([weight * states[layer][0].norm(dim=-1) for weight, layer in zip(weights, (1, 3), strict=True)])
    expected = (terms / terms.sum(0)).flatten().tolist()
    table = study.table[study.table["reader"] == "mix"]
    assert table["score"].tolist() == pytest.approx(expected, abs=1e-5)
    assert table["layer"].unique().tolist() == [1, 3]
    assert table["token"].tolist()[:3] == ["[CLS]", "the", "film"]
    sums = study.table.groupby(["reader", "position"])["score"].sum()
    assert sums.to_numpy().tolist() == pytest.approx([1.0] * len(sums))


def test_contributions_of_a_decoder_name_the_tokens_that_it_reads():
    bank = ReaderBank(FAMILIES["bart"].known(), tiny_tokenizer())
    for stack in ("encoder", "decoder"):
        bank.add(stack, Reader(ScalarMix(), HEAD, stack))
    table = contributions(bank, "the film").table.query("layer == 0").groupby("reader")["token"].apply(list)
    assert table["encoder"] == ["[CLS]", "the", "film", "[SEP]"]
    assert table["decoder"] == ["[SEP]", "[CLS]", "the", "film"]  # 3, the model's start token, is [SEP] here


def test_contributions_of_a_decoder_that_shifts_the_text_by_itself_name_the_tokens_that_it_reads():
    model = FAMILIES["mbart"].known()
    model.config.decoder_start_token_id = None  # as in mBART: the last token, the language's code, comes first
    bank = ReaderBank(model, tiny_tokenizer())
    bank.add("decoder", Reader(ScalarMix(), HEAD, "decoder"))
    table = contributions(bank, "good film").table.query("layer == 0")
    assert [*table["token"]] == ["[SEP]", "[CLS]", "good", "film"]


class _Embedding(BartModel):
    """A model that makes the decoder's input itself, and gives it embeddings."""

    def forward(self, input_ids, attention_mask=None, decoder_input_ids=None, **options):
        made = self.decoder.embed_tokens(input_ids if decoder_input_ids is None else decoder_input_ids)
        return super().forward(input_ids, attention_mask, decoder_inputs_embeds=made, **options)


@pytest.mark.parametrize(("start", "tokens"), [(None, [""] * 4), (3, ["[SEP]", "[CLS]", "the", "film"])])
def test_contributions_of_a_decoder_have_no_tokens_if_only_the_model_knows_them(start, tokens):
    config = FAMILIES["bart"].known().config
    config.decoder_start_token_id = start
    bank = ReaderBank(_Embedding(config), tiny_tokenizer())
    for stack in ("encoder", "decoder"):
        bank.add(stack, Reader(ScalarMix(), HEAD, stack))
    table = contributions(bank, "the film").table.query("layer == 0").groupby("reader")["token"].apply(list)
    assert table["encoder"] == ["[CLS]", "the", "film", "[SEP]"]
    assert table["decoder"] == tokens


def test_contributions_are_the_weights_of_fusions_with_weights_per_token():
    bank = bank_of(gated=Gated(8), dwatt=DWAtt())
    importance(bank, TEXTS)
    before = {name: bank[name].fusion.importance().tolist() for name in bank}
    table = contributions(bank, TEXTS[0]).table
    assert {name: bank[name].fusion.importance().tolist() for name in bank} == before
    for name in bank:
        alone = bank_of(gated=Gated(8), dwatt=DWAtt())
        importance(alone, [TEXTS[0]])
        mean = table[table["reader"] == name].groupby("layer")["score"].mean().tolist()
        assert len(mean) == len(before[name])
        if name == "dwatt":  # its weights sum to 1 at each token, so shares are their means
            assert mean == pytest.approx(alone[name].fusion.importance().tolist(), abs=1e-5)


def test_contributions_of_routing_are_its_credit():
    bank = bank_of(routing=Routing(8, vectors=4))
    table = contributions(bank, TEXTS[0]).table
    batch = bank.processor(TEXTS[0], return_tensors="pt")
    states = bank.record_states({"main": bank["routing"].layers}, batch)["main"]
    with torch.no_grad():
        credit = bank["routing"].fusion.credit(torch.stack(list(states.values())), batch["attention_mask"].bool())
    amounts = credit.abs().sum(-1)[0]  # [layers, tokens]
    shares = table.pivot_table(index="layer", columns="position", values="score").to_numpy(copy=True)
    assert torch.allclose(torch.from_numpy(shares).float(), amounts / amounts.sum(0), atol=1e-5)


@torch.no_grad()
def test_contributions_of_concat_are_the_norms_of_the_terms():
    bank = bank_of(side=Concat(dim=8, bias=True))
    table = contributions(bank, TEXTS[0]).table
    states = bank.model(**bank.processor(TEXTS[0], return_tensors="pt"), output_hidden_states=True).hidden_states
    maps = bank["side"].fusion.projection
    terms = torch.stack([(states[layer][0] @ maps[layer - 1].T).norm(dim=-1) for layer in (1, 2, 3)])
    assert table["score"].tolist() == pytest.approx((terms / terms.sum(0)).flatten().tolist(), abs=1e-5)


@torch.no_grad()
def test_contributions_of_pooled_layers_are_shares_of_the_pooling():
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    head = SequenceClassification(("no", "yes"), pooling="first")
    fusion = bank.add("pooled", Reader(PooledLayers(8, heads=2, queries=3), head)).fusion
    fusion.queries.normal_(generator=torch.Generator().manual_seed(1))
    fusion.scores.normal_(generator=torch.Generator().manual_seed(2))
    batch = bank.processor(TEXTS[0], return_tensors="pt")
    states = torch.stack(bank.model(**batch, output_hidden_states=True).hidden_states)[:, 0]
    normed = torch.nn.functional.layer_norm(states, states.shape[-1:])
    taken = torch.einsum("ltw,lhw->lth", normed, fusion.queries).softmax(1).mean(-1)
    amounts = taken * fusion.scores.softmax(0).unsqueeze(1)
    (found,) = layer_amounts(bank, ["pooled"], batch).values()
    assert found is not None
    assert torch.allclose(found, amounts, atol=1e-5)
    shares = contributions(bank, TEXTS[0]).table["score"].tolist()
    assert shares == pytest.approx((amounts / amounts.sum(0)).flatten().tolist(), abs=1e-5)


def test_fusions_without_contributions_are_left_out_or_refused():
    bank = bank_of(ada=AdaLayers(dim=8), mix=ScalarMix())
    assert contributions(bank, TEXTS[0]).settings["left_out"] == ["'ada' (AdaLayers)"]
    with pytest.raises(ConfigError, match=r"contributions: 'ada' \(AdaLayers\) cannot say what a layer adds"):
        contributions(bank, TEXTS[0], readers=["ada"])
    with pytest.raises(ConfigError, match="contributions: readers is empty; give at least one"):
        contributions(bank, TEXTS[0], readers=[])
    with pytest.raises(ConfigError, match=r"contributions: the bank has no readers. Train one"):
        contributions(ReaderBank(bank.model, bank.processor), TEXTS[0])
    with pytest.raises(ConfigError, match="contributions: bank is a OptimizedModule; it must be a ReaderBank"):
        contributions(torch.compile(bank), TEXTS[0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownNameError, match="unknown reader 'mixed'"):
        contributions(bank, TEXTS[0], readers=["mixed"])


def test_a_token_to_which_no_layer_adds_has_shares_of_zero(monkeypatch):
    bank = bank_of(mix=ScalarMix(layers=[1, 2]))
    amounts = torch.tensor([[0.0] * 9 + [1.0], [0.0] * 9 + [3.0]])
    monkeypatch.setattr("lamina.studies.states.importance.layer_amounts", lambda *_: {"mix": amounts})
    monkeypatch.setattr(type(bank.processor), "convert_ids_to_tokens", lambda *_: ["x"] * 10)
    assert contributions(bank, TEXTS[0]).table["score"].tolist() == [*[0.0] * 9, 0.25, *[0.0] * 9, 0.75]
