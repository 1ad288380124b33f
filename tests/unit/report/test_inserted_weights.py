"""Inserted weights before and after training: what they were, their means, and the picture."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from transformers import ResNetConfig, ResNetForImageClassification

from lamina.editing.insert import insert_, inserted_at_start
from lamina.editing.keep import truncate_
from lamina.editing.merge import merge_
from lamina.editing.record import edits
from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.report.inserted_weights import STATES, chosen_weight, diagonals, inserted_weights, weight_maps
from lamina.store import load, save


def moved(model: Any, by: float = 0.5) -> Any:
    """As if trained: every inserted weight has changed by the same."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "inserted" in name:
                parameter += by
    return model


@pytest.mark.parametrize(
    ("init", "position"),
    one_in(10, itertools.product(["identity", "unit", "xavier", "he", "zero"], ["attention", "ffn"])),
)
def test_the_starts_are_made_again_from_the_record(init: Any, position: Any, tmp_path: Path):
    model = FAMILIES["bert"].known()
    insert_(model, position, [1, 3], init=init, placement="weight")
    starts = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "inserted" in name}
    save(moved(model), tmp_path)
    again, _ = load(tmp_path)
    (edit,) = edits(again)
    found = inserted_at_start(again, edit)
    assert found.keys() == starts.keys()
    assert all(torch.equal(found[name], start) for name, start in starts.items())
    for weight in inserted_weights(again):
        assert torch.allclose(weight.states()["change"], torch.tensor(0.5))


def test_every_insertion_has_its_own_start():
    model = FAMILIES["bert"].known()
    insert_(model, "ffn", 1, init="xavier", placement="output")
    insert_(model, "ffn", 1, init="unit")
    first, second = inserted_weights(moved(model))
    assert (first.projection, second.projection) == ("output.dense", "output.dense (inserted_1)")
    assert torch.equal(second.start[0], torch.eye(len(second.start[0])))
    assert not torch.equal(first.start, second.start)


def test_weights_that_were_cut_off_do_not_shift_the_others(tmp_path: Path):
    model = FAMILIES["bart"].known()
    insert_(model, "both", stack="all", init="xavier", placement="output")
    starts = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "inserted" in name}
    truncate_(model, 1, stack="encoder")  # whose layers were drawn before those of the decoder
    save(model, tmp_path)
    again, _ = load(tmp_path)
    found = inserted_at_start(again, edits(again)[0])
    assert found.keys() == {name for name, _ in again.named_parameters() if "inserted" in name}
    assert all(torch.equal(start, starts[name]) for name, start in found.items())


def test_layers_are_named_by_stack_block_and_projection():
    model = FAMILIES["bart"].known()
    insert_(model, "both", 2, stack="all")
    names = [(weight.stack, weight.layer, weight.projection) for weight in inserted_weights(model)]
    heads = [*(f"self_attn.{part}_proj" for part in "kvq"), "fc2"]
    cross = [f"encoder_attn.{part}_proj" for part in "kvq"]
    assert set(names) == {("encoder", 2, name) for name in heads} | {("decoder", 2, name) for name in (*heads, *cross)}
    shape = inserted_weights(model)[0].trained.shape
    assert shape == (model.config.encoder_attention_heads, *[model.config.d_model // shape[0]] * 2)


def test_the_middle_of_a_kernel_stands_for_a_convolution():
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], num_labels=2, layer_type="basic")
    model = ResNetForImageClassification(config)
    insert_(model, "convolution", init="unit")
    weights = inserted_weights(model)
    assert {weight.layer for weight in weights} == {1, 2}
    assert all(torch.equal(weight.start[0], torch.eye(weight.start.shape[-1])) for weight in weights)


def test_another_model_gives_the_start(tmp_path: Path):
    start, model = (FAMILIES["bert"].known() for _ in range(2))
    for each in (start, model):
        insert_(each, "ffn", 1, init="xavier", placement="output")
    (weight,) = inserted_weights(model, start)
    assert torch.equal(
        weight.start[0], dict(start.named_parameters())["encoder.layer.0.output.dense.inserted_0.weight"]
    )
    with pytest.raises(ConfigError, match=r"there is no initial weight for '.*'; the two models have different layers"):
        inserted_weights(model, FAMILIES["bert"].known())


def test_training_on_does_not_change_weights_that_were_read():
    start, model = (FAMILIES["bert"].known() for _ in range(2))
    for each in (start, model):
        insert_(each, "both", init="unit")
    weights = inserted_weights(model, start)
    for each in (start, model):
        moved(each, 0.5)
    assert all(
        torch.equal(part, torch.eye(part.shape[-1]).expand_as(part))
        for weight in weights
        for part in (weight.start, weight.trained)
    )


def test_models_without_inserted_layers():
    model = FAMILIES["bert"].known()
    with pytest.raises(ConfigError, match="inserted weights: the model has no inserted layers"):
        inserted_weights(model)
    edit = insert_(model, "ffn", init="unit")
    merge_(model)
    with pytest.raises(ConfigError, match="none of the layers that were inserted is in the model; they are merged"):
        inserted_at_start(model, edit)
    insert_(model, "ffn", init="unit")
    assert len(inserted_weights(model)) == 3  # the merged ones are no matter


# The table


def test_means_of_the_diagonal_and_of_the_rest():
    model = FAMILIES["bert"].known()
    insert_(model, "both", [1, 2], init="unit")
    moved(model, 0.25)
    rows = diagonals(inserted_weights(model))
    assert [(row["stack"], row["projection"].rpartition(".")[2], row["layers"]) for row in rows] == [
        ("main", part, 2) for part in ("query", "key", "value", "dense")
    ]
    for row in rows:
        assert (row["start_diagonal"], row["start_rest"]) == (1.0, 0.0)
        assert (row["trained_diagonal"], row["trained_rest"]) == (1.25, 0.25)
        assert (row["change_diagonal"], row["change_rest"]) == (0.25, 0.25)


def test_changes_to_both_sides_do_not_cancel():
    model = FAMILIES["bert"].known()
    insert_(model, "ffn", 1, init="zero")
    with torch.no_grad():
        weight = dict(model.named_parameters())["encoder.layer.0.output.dense.inserted_0.weight"]
        weight.copy_(torch.ones_like(weight).triu(1) - torch.ones_like(weight).tril(-1))
    (row,) = diagonals(inserted_weights(model))
    assert (row["trained_rest"], row["change_rest"], row["change_diagonal"]) == (0.0, 1.0, 0.0)


# The picture


@pytest.fixture
def two() -> dict[str, list[Any]]:
    found = {}
    for name in ("xavier", "unit"):
        model = FAMILIES["bert"].known()
        insert_(model, "both", init=name, placement="output" if name == "xavier" else "weight")
        found[name] = inserted_weights(moved(model, 0.25))
    return found


def test_which_layer_is_drawn(two: dict[str, list[Any]]):
    weights = two["unit"]
    assert (chosen_weight(weights).layer, chosen_weight(weights).projection) == (1, "attention.self.query")
    chosen = chosen_weight(weights, 3, "value", "main")
    assert (chosen.layer, chosen.projection) == (3, "attention.self.value")
    assert chosen_weight(weights, projection="attention.self.key").projection == "attention.self.key"
    with pytest.raises(UnknownNameError, match="unknown layer with inserted layers '9'; known: 1, 2, 3"):
        chosen_weight(weights, 9)
    with pytest.raises(UnknownNameError, match=r"unknown projection with inserted layers 'querry'; known: attention\."):
        chosen_weight(weights, projection="querry")


def test_a_row_per_model_with_start_trained_and_change(two: dict[str, list[Any]], tmp_path: Path):
    shown = {name: chosen_weight(weights, projection="output.dense") for name, weights in two.items()}
    svg = weight_maps(shown, tmp_path / "weights.svg").read_text("utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"xavier", "unit", *STATES, "Weights of an inserted layer"} <= set(texts)
    assert texts.count("1.00") == 7  # the diagonal at the start,
    assert texts.count("1.25") >= 7  # and trained
    assert texts.count("0.25") >= 2 * 49 + 42  # the changes, and the rest of the unit matrix
    cells = re.findall(r'<path aria-label="[^"]*"[^>]*aria-roledescription="rect mark"[^>]*fill="([^"]*)"', svg)
    assert len(cells) == 2 * 3 * 49
    assert cells.count("rgb(255, 255, 255)") == 42  # the zeros of the unit matrix, in plain white
    assert (
        "Inserted after output.dense of main block 1. The first 7 rows and columns of each matrix are drawn." in texts
    )


@pytest.mark.long
def test_large_weights_are_drawn_without_numbers(two: dict[str, list[Any]], tmp_path: Path):
    shown = {"unit": chosen_weight(two["unit"], projection="output.dense")}
    svg = weight_maps(shown, tmp_path / "weights.svg", most=20).read_text("utf-8")
    assert len(re.findall(r'aria-roledescription="rect mark"', svg)) == 3 * 400
    assert "1.25" not in re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_an_untrained_model_has_no_change(tmp_path: Path):
    model = FAMILIES["bert"].known()
    insert_(model, "attention", init="unit")
    path = weight_maps({"start": chosen_weight(inserted_weights(model))}, tmp_path / "weights.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_pictures_that_cannot_be(two: dict[str, list[Any]], tmp_path: Path):
    weight = chosen_weight(two["unit"])
    with pytest.raises(
        ConfigError, match=r"weight figure: head is 9; the layer after attention\.self\.query has \d+\. Use"
    ):
        weight_maps({"unit": weight}, tmp_path / "a.png", head=9)
    with pytest.raises(ConfigError, match=r"the path ends in '\.jpg'"):
        weight_maps({"unit": weight}, tmp_path / "a.jpg")
    for most in (0, -1):
        with pytest.raises(ConfigError, match=f"weight figure: most is {most}; it must be at least 1"):
            weight_maps({"unit": weight}, tmp_path / "a.png", most=most)
    with pytest.raises(DataError, match="weight figure: there are no rows to draw"):
        weight_maps({}, tmp_path / "a.png")
