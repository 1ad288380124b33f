import copy
import pickle
from pathlib import Path

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import nn
from transformers import AutoModel, AutoModelForImageClassification

from lamina.editing.editable import convolution_blocks
from lamina.editing.freeze import freeze_
from lamina.editing.insert import GELU_IS_ONE, Options, insert_, replay_insert
from lamina.editing.inserted_layer import InsertedLayer, layers_after
from lamina.editing.keep import truncate_
from lamina.editing.merge import merge_
from lamina.editing.record import edits
from lamina.errors import ConfigError, LayerIndexError, UnknownNameError, UnsupportedModelError
from lamina.layers.roles import CONVOLUTIONS, Convolutions
from lamina.store import load, outline, save

FIRST = "feature_extractor.conv_layers.0.conv"


def built(name="wav2vec2"):
    family = FAMILIES[name]
    model = family.build()
    for key, parameter in model.named_parameters():
        if "layer_scale" in key:  # a ConvNeXt begins with almost nothing of its blocks
            nn.init.ones_(parameter)
    return model, family.inputs(model)


@torch.no_grad()
def run(model, inputs):
    return model(**inputs)[0]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def first(model):
    return model.get_submodule(FIRST)


def test_layers_are_the_convolutions_of_a_feature_encoder():
    model, _ = built()
    before = dict(model.named_parameters())
    edit = insert_(model, "convolution", 2)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert set(after) - set(before) == set(edit.parameters)
    assert edit.parameters == ("feature_extractor.conv_layers.1.conv.inserted_0.weight",)
    assert (edit.kind, edit.stack, edit.layers, edit.seed) == ("insert", "feature_encoder", (2,), None)
    assert after[edit.parameters[0]].shape == (16, 16, 3)
    assert insert_(model, "convolution", stack="feature_encoder").layers == (1, 2)
    assert insert_(model, "convolution", -1, stack="all").layers == (2,)


def test_layers_are_the_stages_of_a_convolutional_network():
    model, inputs = built("convnext")
    assert len(model(**inputs, output_hidden_states=True).hidden_states) - 1 == 2
    edit = insert_(model, "convolution", "2-", kernel=5)
    assert edit.parameters == ("encoder.stages.1.layers.0.dwconv.inserted_0.weight",)
    assert (edit.stack, edit.layers) == ("main", (2,))
    assert dict(model.named_parameters())[edit.parameters[0]].shape == (16, 16, 5, 5)


def test_a_head_changes_nothing():
    model = FAMILIES["wav2vec2-CTC"].build()
    assert convolution_blocks(model, "t")[1] == list(model.wav2vec2.feature_extractor.conv_layers)
    assert insert_(model, "convolution", 1).parameters == (f"wav2vec2.{FIRST}.inserted_0.weight",)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_starts(axes, kernel):
    model, _ = built("wav2vec2" if axes == 1 else "convnext")
    module = first(model) if axes == 1 else model.encoder.stages[1].layers[0].dwconv
    for init in ("identity", "unit", "zero"):
        insert_(model, "convolution", init=init, kernel=kernel)
    insert_(model, "convolution", init="identity", activation="relu", kernel=kernel)
    identity, unit, zero, relu = layers_after(module)
    dirac = nn.init.dirac_(torch.empty(16, 16, *[kernel] * axes))
    torch.testing.assert_close(identity.weight, GELU_IS_ONE * dirac)
    torch.testing.assert_close(identity.applied_weight(), dirac, rtol=0, atol=2e-7)
    assert not identity.applied_weight()[dirac == 0].any()
    assert torch.equal(unit.weight, dirac)
    assert torch.equal(relu.applied_weight(), dirac)
    assert not zero.weight.any()


def test_random_starts_are_normal_over_the_whole_kernel():
    model, _ = built()
    xavier = insert_(model, "convolution", init="xavier", generator=seeded())
    he = insert_(model, "convolution", init="he", generator=seeded())
    assert xavier.seed == he.seed
    one, other = layers_after(first(model))
    assert one.weight.std().item() == pytest.approx((16 * 3) ** -0.5, rel=0.1)
    assert other.weight.std().item() == pytest.approx((2 / (16 * 3)) ** 0.5, rel=0.1)


@torch.no_grad()
def test_it_is_a_convolution_that_keeps_the_size():
    model, _ = built()
    projection, plain = first(model), copy.deepcopy(first(model))
    insert_(model, "convolution", 1, init="he", generator=seeded(1))
    (layer,) = layers_after(projection)
    sound = torch.randn(2, 1, 40, generator=seeded(2))
    expected = nn.functional.conv1d(plain(sound), nn.functional.gelu(layer.weight), padding=1)
    assert torch.equal(projection(sound), expected)
    layer.placement = "output"
    expected = nn.functional.gelu(nn.functional.conv1d(plain(sound), layer.weight, padding=1))
    assert torch.equal(projection(sound), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["wav2vec2", "convnext"])
def test_every_precision_keeps_its_output(name, dtype):
    model, inputs = built(name)
    model.to(dtype)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    expected = run(model, inputs)
    for activation in (None, "relu", "gelu"):
        insert_(model, "convolution", activation=activation)
        tolerance = 1e-5 if (dtype, activation) == (torch.float32, "gelu") else 0
        torch.testing.assert_close(run(model, inputs), expected, rtol=0, atol=tolerance)
    assert {each.weight.dtype for each in model.modules() if isinstance(each, InsertedLayer)} == {torch.float32}


@pytest.mark.parametrize("name", ["wav2vec2", "convnext"])
def test_every_inserted_weight_gets_a_gradient(name):
    model, inputs = built(name)
    insert_(model, "convolution")
    model(**inputs)[0].square().sum().backward()
    layers = [each for each in model.modules() if isinstance(each, InsertedLayer)]
    assert len(layers) == 2
    assert all(layer.weight.grad.any() for layer in layers)


def test_copies_pickles_and_replays():
    model, inputs = built("convnext")  # torch refuses to pickle what has weight norm
    twin = copy.deepcopy(model)
    edit = insert_(model, "convolution", init="xavier", kernel=5)
    expected = run(model, inputs)
    assert replay_insert(twin, edit) == edit
    for other in (twin, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, inputs), expected)
        assert edits(other) == [edit]


def test_records_without_a_kernel_are_read():
    model, _ = built()
    edit = insert_(model, "ffn", 1)
    assert "kernel" not in edit.settings
    assert replay_insert(built()[0], edit) == edit
    assert Options(**edit.settings).kernel == 3


@pytest.mark.parametrize("name", one_in(3, ["wav2vec2-CTC", "hubert", "convnext"]))
def test_it_comes_back_from_disk(name, tmp_path: Path):
    model, inputs = built(name)
    insert_(model, "convolution", activation="relu", kernel=5)
    insert_(model, "convolution", 1, init="xavier", placement="output")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=seeded(parameter.numel()))
    save(model, tmp_path)
    again = load(tmp_path, type(model))[0]
    assert torch.equal(run(again, inputs), run(model, inputs))
    assert edits(again) == edits(model)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    drawn = outline(tmp_path, FAMILIES[name].auto)
    assert {n: p.shape for n, p in drawn.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_only_the_inserted_layers_train():
    model, _ = built()
    insert_(model, "convolution")
    freeze_(model, train="inserted")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"feature_extractor.conv_layers.{layer}.conv.inserted_0.weight" for layer in (0, 1)}


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForImageClassification])
def test_only_the_inserted_layers_of_a_convolutional_network_train(auto, tmp_path: Path):
    model = AutoModelForImageClassification.from_config(FAMILIES["convnext"].config()).eval()
    edit = insert_(model, "convolution", activation=None)
    frozen = freeze_(model, train="inserted")
    assert (frozen.stack, frozen.layers) == ("all", ())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {*edit.parameters, "classifier.weight", "classifier.bias"}
    save(model, tmp_path)
    again = load(tmp_path, auto)[0]
    names = {name.removeprefix("convnext.") for name, each in again.named_parameters() if not each.requires_grad}
    assert names == {name.removeprefix("convnext.") for name in frozen.parameters}
    with pytest.raises(UnsupportedModelError, match="'convnext' is not supported"):
        freeze_(model, 1, train="inserted")


def test_cutting_blocks_leaves_the_feature_encoder(tmp_path: Path):
    model, inputs = built()
    cut = copy.deepcopy(model)
    truncate_(cut, 1)
    insert_(model, "convolution", activation=None)
    truncate_(model, 1)
    assert torch.equal(run(model, inputs), run(cut, inputs))
    assert [edit.kind for edit in edits(model)] == ["insert", "truncate"]
    save(model, tmp_path)
    assert torch.equal(run(load(tmp_path)[0], inputs), run(cut, inputs))


def test_a_kernel_of_one_folds_with_its_bias(tmp_path: Path):
    family = FAMILIES["wav2vec2"]
    config = family.config()
    config.conv_bias, config.feat_extract_norm = True, "layer"
    model = type(family.build())(config).eval()
    nn.init.normal_(first(model).bias)
    keys, inputs = list(model.state_dict()), family.inputs(model)
    for seed in range(2):
        insert_(model, "convolution", init="xavier", kernel=1, generator=seeded(seed))
    inserted = run(model, inputs)
    edit = merge_(model)
    torch.testing.assert_close(run(model, inputs), inserted, rtol=0, atol=1e-5)
    assert list(model.state_dict()) == keys
    assert (edit.stack, edit.layers) == ("feature_encoder", (1, 2))
    assert edit.parameters[:3] == (f"{FIRST}.weight", f"{FIRST}.bias", f"{FIRST}.inserted_0.weight")
    save(model, tmp_path)
    plain, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    torch.testing.assert_close(run(plain.eval(), inputs), inserted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_weights_of_any_layout_fold():
    plain = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    model, _ = built()
    layer = model.feature_extractor.conv_layers[0]
    layer.conv = plain
    insert_(model, "convolution", 1, init="he", kernel=1)
    pictures = torch.randn(2, 3, 9, 9)
    expected = plain(pictures)
    merge_(model)
    torch.testing.assert_close(plain(pictures), expected, rtol=0, atol=1e-5)


def refused(model, error, match):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=match):
        merge_(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [each.kind for each in edits(model)].count("merge") == 0


def test_a_larger_kernel_is_not_folded():
    model, _ = built()
    insert_(model, "convolution", 1, kernel=1)
    insert_(model, "convolution", 2)
    refused(model, ConfigError, r"after 'feature_extractor\.conv_layers\.1\.conv' is a convolution of kernel 3; folded")


def test_what_a_convolution_keeps_apart_is_not_mixed():
    model, _ = built("convnext")
    insert_(model, "convolution", kernel=1)
    refused(model, UnsupportedModelError, r"'encoder\.stages\.0\.layers\.0\.dwconv' keeps 8 groups of channels apart")


def test_an_output_activation_is_not_folded():
    model, _ = built()
    insert_(model, "convolution", 1, init="he", kernel=1, placement="output")
    refused(model, ConfigError, f"'{FIRST}' has gelu on its output")


def test_a_convolution_that_computes_its_weight_since_is_not_folded():
    model, _ = built()
    insert_(model, "convolution", kernel=1)
    nn.utils.parametrizations.weight_norm(first(model))
    refused(model, UnsupportedModelError, f"'{FIRST}.weight' is computed from other weights")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"layers": 3}, LayerIndexError, "layer 3 does not exist"),
        ({"layers": [0, 1]}, ConfigError, r"got layer 0; the convolutions of the feature_encoder.* Use 1\.\.2"),
        ({"stack": "main"}, UnknownNameError, "unknown stack of convolutions 'main'; known: feature_encoder"),
        ({"kernel": 4}, ConfigError, "kernel is 4; it must be odd"),
        ({"kernel": -1}, ConfigError, "kernel is -1; it must be odd"),
        ({"kernel": True}, ConfigError, "kernel is True; it must be a whole number"),
        ({"placement": "output"}, ConfigError, "no weight undoes an activation"),
    ],
)
def test_bad_options_touch_nothing(options, error, match):
    model, _ = built()
    keys = list(model.state_dict())
    with pytest.raises(error, match=match):
        insert_(model, "convolution", **options)
    assert list(model.state_dict()) == keys
    assert edits(model) == []


def test_a_family_without_a_row_or_with_a_wrong_one_is_refused(monkeypatch):
    model, _ = built("bert")
    with pytest.raises(UnsupportedModelError, match=r"'bert'.*no row says where its convolutions are.*roles\.add"):
        insert_(model, "convolution")
    model, _ = built()
    row = Convolutions("feature_extractor.layers.*", "conv", stack="feature_encoder")
    monkeypatch.setitem(CONVOLUTIONS, "wav2vec2", row)
    with pytest.raises(UnsupportedModelError, match=r"Wav2Vec2FeatureEncoder has no 'layers' \(it has conv_layers\)"):
        insert_(model, "convolution")


def test_a_convolution_with_weight_norm_is_refused_before_anything_is_touched(monkeypatch):
    model, _ = built()
    row = Convolutions("encoder.pos_conv_embed", "conv", stack="positions")
    monkeypatch.setitem(CONVOLUTIONS, "wav2vec2", row)
    keys = list(model.state_dict())
    with pytest.raises(UnsupportedModelError, match=r"'encoder\.pos_conv_embed\.conv\.weight' is computed"):
        insert_(model, "convolution")
    assert list(model.state_dict()) == keys
