import pytest
import torch
from tests.support.tiny import FAMILIES
from torch import nn

from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.roles import (
    CONVOLUTIONS,
    ROLES,
    Attention,
    Convolutions,
    add,
    convolution_weight,
    convolutions_of,
    has_path,
    head_width_at,
    linear_weight,
    modules_at,
    roles_of,
)


def block():
    parts = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 4)]), "wi_0": nn.Linear(2, 5)})
    parts.head_width = 7
    return nn.ModuleDict({"attention": parts})


def test_a_path_may_count_from_the_end_and_name_several():
    parts = block()["attention"]
    assert modules_at(block(), "attention.list.-1", family="toy", op="t")[0].out_features == 4
    assert modules_at(parts, "list.0", family="toy", op="t") == [parts["list"][0]]
    assert modules_at(parts, "list.*", family="toy", op="t") == list(parts["list"])
    assert modules_at(parts, "wi*", family="toy", op="t") == [parts["wi_0"]]
    assert has_path(parts, "list.5")
    assert not has_path(parts, "cross.query")
    assert has_path(parts, "query")  # of the block itself


def test_a_missing_path_is_named_with_what_there_is():
    with pytest.raises(UnsupportedModelError, match=r"'attention.query', but ModuleDict has no 'query' \(it has list"):
        modules_at(block(), "attention.query", family="toy", op="insert_")


def test_the_width_of_a_head():
    assert head_width_at(block(), "attention.head_width", family="toy", op="t") == 7
    assert head_width_at(block()["attention"], "head_width", family="toy", op="t") == 7
    with pytest.raises(UnsupportedModelError, match="ModuleDict has no number 'head_dim'"):
        head_width_at(block(), "attention.head_dim", family="toy", op="t")


def test_the_error_for_a_family_without_a_row_says_how_to_add_one():
    with pytest.raises(UnsupportedModelError, match=r"'fnet'.*no row.*rows: albert.*roles\.add.*need no row"):
        roles_of(FAMILIES["fnet"].build(), op="insert_")


def test_a_row_can_be_added_once(monkeypatch):
    monkeypatch.delitem(ROLES, "ernie")
    add("ernie", ROLES["bert"])
    assert ROLES["ernie"] is ROLES["bert"]
    with pytest.raises(ConfigError, match=r"'ernie' has a row.*from ROLES first"):
        add("ernie", ROLES["bert"])


def test_a_family_may_have_a_row_of_each_kind(monkeypatch):
    model = FAMILIES["wav2vec2"].build()
    monkeypatch.delitem(CONVOLUTIONS, "wav2vec2")
    with pytest.raises(UnsupportedModelError, match=r"'wav2vec2'.*no row says where.*rows: convnext,.*roles\.add"):
        convolutions_of(model, op="insert_")
    row = Convolutions("feature_extractor.conv_layers.*", "conv", stack="feature_encoder")
    add("wav2vec2", row)
    assert convolutions_of(model, op="insert_") is row
    with pytest.raises(ConfigError, match=r"'wav2vec2' has a row.*from CONVOLUTIONS first"):
        add("wav2vec2", row)


def test_a_fused_projection_is_listed_once():
    fused = Attention("qkv", "qkv", "qkv", "out", "width", fused="heads")
    assert fused.projections() == {"qkv": ("query", "key", "value")}
    assert list(ROLES["gpt2"].cross.projections().values()) == [("query",), ("key", "value")]


def test_weights_are_returned_as_out_by_in():
    gpt2 = FAMILIES["gpt2"].build()
    assert linear_weight(gpt2.h[0].attn.c_attn).shape == (96, 32)
    assert linear_weight(nn.Linear(2, 3)).shape == (3, 2)
    assert linear_weight(nn.Embedding(2, 3)) is None
    assert linear_weight(nn.LayerNorm(2)) is None
    packed = nn.Linear(2, 3)
    packed.weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.uint8), requires_grad=False)
    assert linear_weight(packed) is None


def test_weights_of_plain_convolutions_alone():
    for plain in (nn.Conv1d(4, 6, 3, groups=2), nn.Conv2d(4, 6, 3)):
        assert convolution_weight(plain) is plain.weight
    packed = nn.Conv1d(4, 6, 3)
    packed.weight = nn.Parameter(torch.zeros(6, 4, 3, dtype=torch.uint8), requires_grad=False)
    transposed, computed = nn.ConvTranspose1d(4, 6, 3), nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
    odd = nn.Conv1d(4, 6, 3)
    odd.weight = None
    for other in (packed, transposed, computed, odd, nn.Linear(2, 3), nn.Identity()):
        assert convolution_weight(other) is None
    assert linear_weight(nn.Conv1d(4, 6, 3)) is None
