"""Probes of what attention and feed-forward networks add: their formula, one pass for all, their rows, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.stored import TEXTS, tiny_model, tiny_tokenizer
from tests.support.tiny import model_of
from torch.nn import functional as F

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, LaminaError, UnknownNameError, UnsupportedModelError
from lamina.layers import tap
from lamina.studies.probing.probe import compare_probes, probe
from lamina.studies.probing.probe_cell import ProbeHead, ProbeLayer
from lamina.studies.run_study import load_study_recipe
from lamina.tasks.task import Task

SITES = ("output", "attention", "ffn")
FAST = {"epochs": 2, "batch_size": 16, "progress": False}
PLAIN = {"controls": False, "code_length": False, "baselines": False, "probes": ["linear"], **FAST}


@pytest.fixture(scope="module")
def model():
    return tiny_model(hidden_size=16, num_hidden_layers=2)


@pytest.fixture(scope="module")
def mood() -> Task:
    rows = [
        {"sentence": f"the film is {'good' if n % 2 else 'bad'} {'very ' * (n % 3)}", "label": n % 2} for n in range(32)
    ]
    return Task.from_dataset("sequence_classification", {"train": rows, "validation": rows[:24]}, name="mood")


@pytest.fixture(scope="module")
def tags() -> Task:
    rows = [{"w": ["the", "film", ("bad", "good")[n % 2]], "t": ["O", "O", "B-X" if n % 2 else "O"]} for n in range(20)]
    return Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="w", label="t")


@pytest.mark.parametrize("pooled", [False, True])
def test_a_probe_reads_its_site_in_the_pass_of_all(model, pooled: bool):
    bank = ReaderBank(model, tiny_tokenizer())
    head = ProbeHead(("a", "b"), "token_classification", tags=not pooled)
    places = {f"{site}{layer}": (layer, site) for site in SITES for layer in (1, 2)}
    for name, (layer, site) in places.items():
        bank.add(name, Reader(ProbeLayer(layer, pooled=pooled, site=site), head))
    given = dict(tiny_tokenizer()(TEXTS, padding=True, return_tensors="pt"))
    real = given["attention_mask"].bool()
    bank.eval()(**given)  # finds the sites, with passes of its own
    passes: list[object] = []
    handle = model.register_forward_pre_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        found = bank(**given)
        assert len(passes) == 1
        handle.remove()
        read = {}
        for site in SITES:
            with tap(model, "1-", site=site) as states:
                model(**given)
            read[site] = dict(states)
    for name, (layer, site) in places.items():
        state = F.layer_norm(read[site][layer], (16,))
        if pooled:
            state = torch.stack([row[mask].mean(0) for row, mask in zip(state, real, strict=True)])
        output = bank[name].head.output
        expected = F.linear(state, output.weight, output.bias)
        kept = slice(None) if pooled else real
        torch.testing.assert_close(found[name].logits[kept], expected[kept], rtol=1e-5, atol=1e-5)


def test_the_table_has_a_row_for_each_site_and_those_of_the_output_are_as_without(model, mood: Task):
    options = {"processor": tiny_tokenizer(), "seeds": [0, 1], **PLAIN, "baselines": True}
    study = probe(model, {"mood": mood}, sites=SITES, **options)
    rows = study.table[study.table["seed"].notna()]
    counts = rows.groupby(["site", "layer"]).size().to_dict()
    places = [("output", 0), *((site, layer) for site in SITES for layer in (1, 2))]
    assert counts == dict.fromkeys(places, 2)
    alone = probe(model, {"mood": mood}, **options).table
    same = rows[rows["site"] == "output"]["score"].tolist()
    assert same == pytest.approx(alone[alone["seed"].notna()]["score"].tolist(), rel=1e-4)
    assert (study.table["measure"] == "ahead").sum() == 7
    assert list(study.figures) == ["score, linear"]
    figure = study.figures["score, linear"]
    assert (figure.colour, figure.where) == ("site", {"measure": "score", "probe": "linear"})
    assert study.settings["sites"] == list(SITES)


@pytest.mark.long
def test_a_site_alone_beside_the_embeddings(model, tags: Task):
    study = probe(
        model,
        {"tags": tags},
        processor=tiny_tokenizer(),
        sites=["attention"],
        seeds=[0],
        **{**FAST, "probes": ["mlp"], "baselines": True},
    )
    probes = study.table[study.table["layer"].notna()]
    assert set(zip(probes["site"], probes["layer"], strict=True)) == {("output", 0), ("attention", 1), ("attention", 2)}
    assert {"score", "control", "selectivity", "compression"} <= set(probes["measure"])
    assert study.conclusions[0].startswith(("tags: attention of layer ", "tags: layer 0 "))


def test_the_conclusions_about_sites():
    from lamina.studies.probing.probe import title
    from lamina.studies.probing.probe_cell import Place

    assert [title(Place(3, site, "linear")) for site in SITES] == [
        "layer 3 (linear)",
        "attention of layer 3 (linear)",
        "ffn of layer 3 (linear)",
    ]


def test_conclusions_are_corrected_for_the_number_of_probes(mood: Task):
    truth = list(mood.split("validation").labels)
    wrong = [1 - label for label in truth[:6]] + truth[6:]
    text = {"measure": "score", "seed": None, "probe": "words", "score": 0.5, "guesses": wrong}
    common = {"measure": "score", "probe": "linear", "score": 1.0, "guesses": truth}
    rows = [text, *({**common, "layer": layer, "seed": seed} for layer in range(4) for seed in range(3))]
    found = compare_probes(rows, mood, "validation")
    alone = [own.p for own in found.ahead.values()]
    assert [row["p"] for row in found.rows()] == pytest.approx([4 * p for p in alone])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sites": ["mlp"]}, UnknownNameError, "probe: unknown site 'mlp'; known: output, attention, ffn"),
        ({"sites": []}, ConfigError, r"sites are \[\]; at least one is needed, none twice"),
        ({"sites": ["ffn", "ffn"]}, ConfigError, r"sites are \['ffn', 'ffn'\]; at least one"),
        ({"sites": ["output", "ffn"], "layers": 0}, ConfigError, "layer 0 is the embeddings; they have no ffn"),
        (
            {"sites": ["ffn"], "cache": "on", "seeds": [0]},
            LaminaError,
            "needs more of the model's pass than its states",
        ),
    ],
)
def test_sites_that_cannot_be_probed(model, mood: Task, options, error, match):
    with pytest.raises(error, match=match):
        probe(model, mood, processor=tiny_tokenizer(), **{**PLAIN, **options})


def test_a_model_whose_sites_cannot_be_read_is_refused_with_the_reason(mood: Task):
    reason = "what its blocks add to the states is not the output of modules in them"
    with pytest.raises(UnsupportedModelError, match=rf"^probe: .*{reason}\. Use sites=\['output'\]"):
        probe(model_of("mobilebert"), mood, processor=tiny_tokenizer(), sites=["output", "attention"], **PLAIN)


def test_a_recipe_names_sites(tmp_path: Path):
    text = "model: minilm\ntasks: {{t: {{preset: sst2}}}}\nstudies:\n  probe: {{sites: [{}]}}\n"
    (path := tmp_path / "probe.yaml").write_text(text.format("output, attention"))
    assert load_study_recipe(path).options("probe") == {"sites": ["output", "attention"]}
    path.write_text(text.format("mlp"))
    with pytest.raises(LaminaError, match=r"line 4, .*unknown sites 'mlp'; known: output, attention, ffn"):
        load_study_recipe(path)
