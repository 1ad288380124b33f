"""The study `drift`: distances of weights equal their formulas, and models of different shapes are refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tests.support.stored import tiny_model, tiny_tokenizer
from tests.support.tiny import Passing, model_of

import lamina
from lamina.errors import ConfigError, LayerIndexError, UnknownNameError, UnsupportedModelError
from lamina.layers.roles import ROLES
from lamina.studies import drift
from lamina.studies.states.drift import spectral_norm

ONLY_ZEROS = "1: only weights changed that are all 0 in the base; see the measure l2."


@pytest.fixture
def model():
    return tiny_model()


def changed(model, layer: int = 2, amount: float = 0.1):
    other = copy.deepcopy(model)
    with torch.no_grad():
        weight = other.encoder.layer[layer - 1].output.dense.weight
        weight += amount * torch.randn_like(weight)
    return other


def test_distances_equal_their_formulas(model):
    other = changed(model)
    study = drift(model, {"run": other})
    table = study.table.set_index(["layer", "role", "measure"])["score"]
    before, after = (side.encoder.layer[1].output.dense.weight.detach().double() for side in (model, other))
    assert table[2, "ffn_out", "l2"] == pytest.approx(float((after - before).norm()))
    assert table[2, "ffn_out", "relative"] == pytest.approx(float((after - before).norm() / before.norm()))
    assert table[2, "ffn_out", "spectral"] == pytest.approx(float(torch.linalg.svdvals(after - before)[0]))
    others = table.drop(index=[(2, "ffn_out", measure) for measure in ("l2", "relative", "spectral")])
    assert (others == 0).all()
    assert set(study.table["role"]) == {"query", "key", "value", "attention_output", "ffn_in", "ffn_out"}
    assert set(study.table["layer"]) == {1, 2, 3}
    assert study.settings["spectral_by"] == "svd"
    assert study.rows("l2")["measure"].unique().tolist() == ["l2"]
    assert (study.figures["l2"].colour, study.figures["l2"].facet) == ("role", None)


def test_several_runs_from_folders(model, tmp_path: Path):
    lamina.save(model, tmp_path / "base", tiny_tokenizer())
    lamina.save(changed(model), tmp_path / "a", tiny_tokenizer())
    study = drift(tmp_path / "base", [tmp_path / "a", changed(model, 1)], roles="ffn_out", layers=[1, 2])
    moved = study.table[(study.table["score"] > 0) & (study.table["measure"] == "l2")]
    assert moved[["run", "layer"]].to_numpy().tolist() == [["1", 2], ["2", 1]]
    assert set(study.table["role"]) == {"ffn_out"}
    assert list(study.settings["models"]) == ["base", "1", "2"]


def test_checkpoints_of_one_name_are_seeds_of_one_curve(model):
    runs = {"few": [changed(model, amount=0.1), changed(model, amount=0.3)], "many": changed(model)}
    study = drift(model, runs, roles="ffn_out")
    assert list(study.settings["models"]) == ["base", "few 0", "few 1", "many"]
    assert study.rows("l2").groupby("run", sort=False)["seed"].unique().map(list).to_dict() == {
        "few": [0, 1],
        "many": [0],
    }
    assert (study.figures["l2"].colour, study.figures["l2"].facet) == ("run", "role")
    moved = study.table.query("measure == 'relative' and layer == 2").set_index("run")["score"]
    shown = study.summary().query("layer == 2").set_index("run")["relative"]
    assert shown["few"] == pytest.approx(moved["few"].mean())
    assert f"by {shown['few']:.2g} times" in study.conclusions[0]  # two seeds have no interval
    study = drift(model, {**runs, "few": [*runs["few"], changed(model, amount=0.2)]}, roles="ffn_out")
    moved = study.table.query("measure == 'relative' and layer == 2").set_index("run")["score"]
    shown = study.summary().query("layer == 2").set_index("run")["relative"]
    half = 4.303 * moved["few"].std() / 3**0.5  # the t value of two degrees of freedom
    few, many = study.conclusions
    assert few.startswith(
        f"few: block 2 moved most (by {shown['few']:.2g} ± {half:.2g} times the norm of the base's weights"
    )
    assert many.startswith(f"many: block 2 moved most (by {moved['many']:.2g} times the norm of the base's weights")


def test_one_projection_of_several_roles():
    model = model_of("gpt2")
    assert set(drift(model, model).table["role"]) == {"query+key+value", "attention_output", "ffn_in", "ffn_out"}


def test_a_head_does_not_matter():
    assert (drift(model_of("roberta"), model_of("roberta-MaskedLM").roberta).table["score"] >= 0).all()


def test_a_family_without_a_row_has_all_its_linear_maps(monkeypatch: pytest.MonkeyPatch, model):
    monkeypatch.delitem(ROLES, "bert")
    other = changed(model)
    table = drift(model, other).table.set_index(["layer", "role", "measure"])["score"]
    expected = drift_of_all(model, other)
    assert table[2, "linear", "l2"] == pytest.approx(expected)
    assert set(table.index.get_level_values("role")) == {"linear"}


def test_the_spectral_distance_is_the_largest_over_all_matrices(monkeypatch: pytest.MonkeyPatch, model):
    monkeypatch.delitem(ROLES, "bert")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.encoder.layer[1].attention.self.query.weight[0, 0] += 1.0
    table = drift(model, other).table.set_index(["layer", "measure"])["score"]
    assert table[2, "spectral"] == pytest.approx(1.0)


def test_blocks_without_linear_maps(monkeypatch: pytest.MonkeyPatch, model):
    monkeypatch.delitem(ROLES, "bert")
    model.encoder.layer = torch.nn.ModuleList(Passing() for _ in range(3))
    with pytest.raises(UnsupportedModelError, match="its blocks have no linear maps with weights"):
        drift(model, model)


def drift_of_all(model, other) -> float:
    pairs = zip(model.encoder.layer[1].parameters(), other.encoder.layer[1].parameters(), strict=True)
    return float(torch.cat([(a - b).detach().flatten() for a, b in pairs]).double().norm())


def test_the_power_iteration_finds_the_largest_singular_value():
    matrix = torch.randn(60, 40, dtype=torch.float64)
    exact = float(torch.linalg.svdvals(matrix)[0])
    assert spectral_norm(matrix, largest_svd=8) == pytest.approx(exact, rel=1e-4)
    assert spectral_norm(torch.zeros(60, 40), largest_svd=8) == 0


def test_different_shapes_are_refused_with_what_differs(model):
    with pytest.raises(ConfigError, match=r"depth is 3 in the base and 2 in '1'; .*only models of the same shape"):
        drift(model, tiny_model(num_hidden_layers=2), layers=[1, 2])
    with pytest.raises(ConfigError, match="drift: depth is 3 in the base and 2 in 'cut'; only models of the same"):
        drift(model, {"cut": tiny_model(num_hidden_layers=2)})
    with pytest.raises(
        ConfigError,
        match=r"layer 1 ffn_in intermediate.dense\[0\]\.weight is \(48, 32\) in the base and \(64, 32\) in 'wide'",
    ):
        drift(model, {"wide": tiny_model(intermediate_size=64)})
    with pytest.raises(ConfigError, match="family is bert in the base and roberta in '1'"):
        drift(model, model_of("roberta"))


def test_invalid_options_are_refused(model):
    with pytest.raises(ConfigError, match="layer 0, the embeddings, is selected"):
        drift(model, model, layers="all")
    with pytest.raises(LayerIndexError, match="drift: layer 7"):
        drift(model, model, layers=7)
    with pytest.raises(UnknownNameError, match="unknown role 'ffn'; known: query"):
        drift(model, model, roles=["ffn"])
    for nothing in ([], {"run": []}):
        with pytest.raises(ConfigError, match="there is no other checkpoint"):
            drift(model, nothing)
    with pytest.raises(ConfigError, match="one of the others is named 'base'"):
        drift(model, {"base": model})
    with pytest.raises(UnsupportedModelError, match="it has no module per block"):
        drift(model_of("xlm"), model_of("xlm"))


def test_weights_that_are_zero_have_no_relative_distance(model):
    empty = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    moved, sentence = drift(empty, model).conclusions
    assert moved == ONLY_ZEROS
    assert sentence.startswith("18 of 54 scores are not defined (NaN or infinite): 18 of relative.")


def test_changes_of_weights_that_were_zero_are_changes(model):
    base = copy.deepcopy(model)
    with torch.no_grad():
        base.encoder.layer[1].output.dense.weight.zero_()
    for roles in ("all", "ffn_out"):
        assert drift(base, model, layers=[1, 2], roles=roles).conclusions[0] == ONLY_ZEROS
    assert drift(base, model, layers=2, roles="ffn_out").conclusions[0] == ONLY_ZEROS
    assert drift(base, changed(model, 1)).conclusions[0].startswith("1: block 1 moved most (by ")
    assert drift(base, base).conclusions == ("1: no weight that was compared changed.",)
