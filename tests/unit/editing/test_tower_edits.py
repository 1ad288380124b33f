"""Blocks of one tower of a model with several: dropped, moved and repeated, and saved as plain checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.portions import one_in
from tests.support.towers import texts_and_images, two_towers

import lamina
from lamina.errors import ConfigError
from lamina.layers.stack import by_path

OUTPUTS = ("text_embeds", "image_embeds", "logits_per_image")


def run(model) -> list[torch.Tensor]:
    with torch.no_grad():
        output = model.eval()(**texts_and_images())
    return [output[name] for name in OUTPUTS]


def by_hand(model, stack: str, order: list[int]):
    """The model with a new list of its own blocks in the tower."""
    blocks = lamina.stacks(model)[stack].blocks
    path = next(path for path, part in by_path(model).items() if tuple(part.children()) == blocks)
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, torch.nn.ModuleList([blocks[layer - 1] for layer in order]))
    return model


@pytest.mark.parametrize("stack", ["text", "vision"])
@pytest.mark.parametrize("kind", one_in(3, ["clip", "siglip", "dual"]))
def test_a_named_tower_gets_new_blocks_and_reloads(kind: str, stack: str, tmp_path: Path):
    model, depths = two_towers(kind), {name: found.depth for name, found in lamina.stacks(two_towers(kind)).items()}
    rest = range(2, depths[stack] + 1)
    lamina.drop_(model, 1, stack=stack)
    lamina.duplicate_(model, "all", identity=False, stack=stack)
    lamina.keep_(model, [*range(2 * len(rest), 0, -1)], stack=stack)
    expected = run(by_hand(two_towers(kind), stack, [*rest, *rest][::-1]))
    for value, other in zip(run(model), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6)
    lamina.save(model, tmp_path)
    for again in (type(model).from_pretrained(tmp_path), lamina.load(tmp_path, type(model))[0]):
        assert all(map(torch.equal, run(again), run(model)))
        after = {name: found.depth for name, found in lamina.stacks(again).items()}
        assert after == depths | {stack: 2 * len(rest)}
    assert [edit.kind for edit in lamina.edits(again)] == ["drop", "duplicate", "keep"]


@pytest.mark.long
@pytest.mark.parametrize("kind", one_in(2, ["clip", "siglip"]))
def test_identity_copies_in_both_towers_change_nothing(kind: str):
    model = two_towers(kind)
    before = run(model)
    for stack in ("text", "vision"):
        lamina.duplicate_(model, "all", stack=stack)
    for value, other in zip(run(model), before, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-6, atol=1e-6)


def test_a_permutation_changes_the_config_of_its_own_tower():
    """Both towers have two blocks here, so that their numbers do not tell which config to change."""
    model = two_towers()
    lamina.drop_(model, 1, stack="vision")
    text, vision = model.config.text_config, model.config.vision_config
    text.layer_rope_theta, vision.layer_rope_theta = [1.0, 2.0], [3.0, 4.0]
    lamina.keep_(model, [2, 1], stack="vision")
    assert (text.layer_rope_theta, vision.layer_rope_theta) == ([1.0, 2.0], [4.0, 3.0])


def test_readers_of_the_other_tower_follow():
    model = two_towers()
    bank = lamina.ReaderBank(model)
    bank.add("image", lamina.Reader(lamina.SingleLayer(2), lamina.ImageClassification(("a", "b")), stack="vision"))
    lamina.drop_(model, 1, stack="text")
    assert bank.remap_() == {"image": (2,)}
    lamina.drop_(model, 1, stack="vision")
    with pytest.raises(ConfigError, match=r"the reader 'image' reads layers 2 of the vision stack; layer 2 is gone or"):
        bank.remap_()
