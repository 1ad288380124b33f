import copy
import random

import numpy as np
import pytest
import torch
from tests.support import toys
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import nn

from lamina.errors import UnknownNameError, UnsupportedModelError
from lamina.layers import default_stack, stacks, tap
from lamina.layers.discovery import same_stacks
from lamina.layers.preserve import preserve_model

SEEN_WITHOUT_WEIGHTS = ["bert", "roberta-MaskedLM", "deberta-v2", "albert", "xlm", "gpt2", "llama"]
SEEN_WITHOUT_WEIGHTS += ["bart", "t5", "vit", "wav2vec2"]


def seen_at(stack):
    return [(point.path, point.side, point.index, point.call, point.swap) for point in stack.points]


def states_are_right(model):
    ids = torch.randint(1, 50, (3, 6))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, output_hidden_states=True).hidden_states
        with tap(model) as states:
            model(input_ids=ids, attention_mask=mask)
    return all(torch.equal(states[layer], state) for layer, state in enumerate(expected))


@pytest.mark.parametrize("kind", [toys.Toy, toys.Copied, toys.TokensFirst, toys.ChangedInPlace, toys.Catching])
def test_hard_to_read_but_right(kind):
    assert states_are_right(kind())


def test_a_block_whose_result_is_changed_in_place_is_not_read():
    stack = stacks(toys.ChangedInPlace())["main"]
    assert [(point.path, point.side) for point in stack.points[1:]] == [("blocks.1", "input"), ("norm", "input")]
    assert stack.blocks == ()


def test_swapped_axes_are_recorded():
    assert {point.swap for point in stacks(toys.TokensFirst())["main"].points} == {(0, 1)}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (toys.Doubled, "layer 2 of its main stack cannot be matched to a module: no module gets or returns it"),
        (toys.ChangedInPlaceUnseen, "layer 2 of its main stack cannot be matched"),
        (toys.ChangedInPlaceByLength, "layer 2 of its main stack .*another input shows a different value"),
        (toys.ByLength, "layer 2 of its main stack cannot be matched .*another input shows a different value"),
        (toys.CountByLength, "its main stack returns a different number of hidden states for another input"),
        (toys.OtherwisePlain, "layer 0 of its main stack .*a plain pass shows a different value"),
        (toys.ShorterPlain, r"a plain pass shows layers \[0, 1\] of its main stack"),
        (toys.OneState, "its main stack returns 1 hidden states; there must be 2 at least"),
        (toys.Tuples, "layer 0 of its main stack .*it is a tuple, not one tensor"),
        (toys.Silent, "it returns no hidden_states of its own"),
        (toys.Breaking, r"does not run on a small input \(ValueError: needs a bounding box\)\. Check its config"),
    ],
)
def test_refused_not_read_wrongly(kind, reason):
    with pytest.raises(UnsupportedModelError, match=f"stacks: the family 'toy' is not supported; .*{reason}"):
        stacks(kind())


def test_nan_is_refused():
    model = toys.Toy()
    nn.init.constant_(model.blocks[0].linear.bias, float("nan"))
    with pytest.raises(UnsupportedModelError, match=r"layer 1 of its main stack .*NaN.*Check the weights"):
        stacks(model)


def test_an_input_that_is_not_known():
    model = toys.Toy()
    model.main_input_name = "point_clouds"
    with pytest.raises(UnsupportedModelError, match="it reads 'point_clouds', and inputs are known for input_ids"):
        stacks(model)


def test_no_transformers_model():
    with pytest.raises(UnsupportedModelError, match=r"'Linear' is not supported; .*no config\. Load it with AutoModel"):
        stacks(nn.Linear(2, 2))


def test_unknown_stack_names_the_operation():
    model = FAMILIES["bart"].build()
    assert default_stack(model).name == "encoder"
    assert default_stack(model, "decoder").name == "decoder"
    with pytest.raises(UnknownNameError, match=r"reader: unknown stack 'deocder'; known: encoder, decoder\. Did"):
        default_stack(model, "deocder", op="reader")


@pytest.mark.parametrize("name", ["bert-MultipleChoice", "gpt2-SequenceClassification"])
def test_a_head_that_refuses_the_input_is_left_out(name):
    """Multiple choice wants three axes; GPT-2's classifier wants a padding token."""
    auto = "AutoModelFor" + name.partition("-")[2]
    family = FAMILIES[name.partition("-")[0]]
    settings = {key: value for key, value in family.settings.items() if key != "pad_token_id"}
    model = type(family)(name, family.model_type, settings, auto=auto).build()
    stack = stacks(model)["main"]
    assert stack.depth == 3
    assert stack.scope is model.base_model


class TestKept:
    def runs(self, model):
        calls = []
        model.register_forward_pre_hook(lambda *_: calls.append(1))
        return calls

    def test_the_second_time_nothing_runs(self):
        model = toys.Toy()
        calls = self.runs(model)
        first = stacks(model)
        looked = len(calls)
        assert looked > 0
        assert seen_at(stacks(model)["main"]) == seen_at(first["main"])
        assert len(calls) == looked

    def test_a_new_module_is_looked_at_again(self):
        model = toys.Toy()
        stacks(model)
        model.blocks[0] = toys.Block(8)
        assert stacks(model)["main"].blocks[0] is model.blocks[0]
        model.blocks.append(toys.Block(8))
        assert stacks(model)["main"].depth == 3
        del model.blocks[0]
        assert stacks(model)["main"].blocks == tuple(model.blocks)

    def test_another_count_of_blocks_in_the_config_too(self):
        model = FAMILIES["llama"].build()
        assert stacks(model)["main"].depth == 3
        model.config.num_hidden_layers = 2  # Llama runs as many as the config says
        assert stacks(model)["main"].depth == 2

    def test_a_copy_is_looked_at_by_itself(self):
        model = toys.Toy()
        stacks(model)
        twin = copy.deepcopy(model)
        assert stacks(twin)["main"].blocks[0] is twin.blocks[0]


class TestUndisturbed:
    def test_a_model_that_changes_itself_is_put_back(self):
        model = toys.Restless().train()
        stacks(model)
        assert model.training
        assert model.calls.item() == 0
        assert model.seen == []
        assert model.last is None
        assert not hasattr(model.blocks[1], "extra")
        assert not model.blocks[0]._forward_hooks

    def test_also_after_an_error(self):
        model = toys.Breaking().train()
        with pytest.raises(UnsupportedModelError, match="bounding box"):
            stacks(model)
        assert all(module.training for module in model.modules())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_random_numbers_go_on_as_if_nothing_had_run(self):
        def draw():
            return random.random(), float(np.random.rand()), torch.rand(1).item()

        def seed():
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)

        model = toys.Toy()
        seed()
        expected = draw()
        seed()
        with preserve_model(model):
            draw()
        assert draw() == expected

    def test_hooks_stay_removable(self):
        model = toys.Toy()
        handle = model.blocks[0].register_forward_hook(lambda *_: None)
        stacks(model)
        handle.remove()
        assert not model.blocks[0]._forward_hooks

    def test_in_inference_mode_too(self):
        model = toys.Toy()
        with torch.inference_mode():
            assert stacks(model)["main"].depth == 2
        model.train()
        model.blocks[0](torch.zeros(1, 2, 8)).sum().backward()

    def test_big_bird_keeps_its_attention(self):
        model = FAMILIES["big_bird"].build()
        model.set_attention_type("block_sparse")
        attention = model.encoder.layer[0].attention.self
        stacks(model)
        assert model.attention_type == "block_sparse"
        assert model.encoder.layer[0].attention.self is attention


class TestWithoutWeights:
    @pytest.mark.parametrize(
        "name",
        one_in(
            4,
            [
                "bert",
                "roberta-MaskedLM",
                "deberta-v2",
                "albert",
                "xlm",
                "gpt2",
                "llama",
                "bart",
                "t5",
                "vit",
                "wav2vec2",
            ],
        ),
    )
    def test_the_same_places_are_found(self, name):
        family = FAMILIES[name]
        with torch.device("meta"):
            empty = family.build()
        found, expected = stacks(empty), stacks(family.build())
        assert list(found) == list(expected)
        for one, other in zip(found.values(), expected.values(), strict=True):
            assert seen_at(one) == seen_at(other)
            assert (one.width, len(one.blocks), len(one.run)) == (other.width, len(other.blocks), len(other.run))

    def test_refused_with_what_to_do(self):
        with torch.device("meta"):
            empty = FAMILIES["squeezebert"].build()
        with pytest.raises(UnsupportedModelError, match=r"'squeezebert'.*Load its weights first"):
            stacks(empty)

    def test_looked_at_again_once_there_are_weights(self):
        with torch.device("meta"):
            model = FAMILIES["bert"].build()
        stacks(model)
        full = FAMILIES["bert"].build()
        model.load_state_dict(full.state_dict(), assign=True)
        model.embeddings = full.embeddings  # its position table is no saved buffer
        inputs = FAMILIES["bert"].inputs(model)
        with torch.no_grad(), tap(model) as states:
            model(**inputs)
        assert torch.equal(states[3], full(**inputs).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_dtype(dtype):
    model = FAMILIES["roberta"].build().to(dtype)
    inputs = FAMILIES["roberta"].inputs(model)
    with torch.no_grad(), tap(model) as states:
        model(**inputs)
        expected = model(**inputs, output_hidden_states=True).hidden_states
    assert states[3].dtype == dtype
    assert all(torch.equal(states[layer], state) for layer, state in enumerate(expected))


def test_flags_in_the_config_do_not_matter():
    model = FAMILIES["bert"].build()
    model.config.output_hidden_states = True
    model.config.use_cache = True
    assert stacks(model)["main"].depth == 3


def test_blocks_that_pass_their_input_on_are_told_apart():
    """Three states of one value: each is still read where it arises."""
    model = FAMILIES["llama"].build()
    for block in model.layers[:2]:
        nn.init.zeros_(block.self_attn.o_proj.weight)
        nn.init.zeros_(block.mlp.down_proj.weight)
    stack = stacks(model)["main"]
    assert stack.blocks == tuple(model.layers)
    assert [point.path for point in stack.points] == ["layers.0", "layers.0", "layers.1", "norm"]


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_a_single_block_is_found(name):
    family = FAMILIES[name]
    model = family.build()
    config = family.config()
    config.num_hidden_layers = 1
    model = type(model)(config).eval()
    stack = default_stack(model)
    assert stack.depth == 1
    assert type(stack.blocks[0]).__name__ in ("BertLayer", "LlamaDecoderLayer", "T5Block")


def test_a_single_layer_without_a_block_has_none():
    config = FAMILIES["xlm"].config()
    config.n_layers = 1
    model = type(FAMILIES["xlm"].build())(config).eval()
    stack = stacks(model)["main"]
    assert (stack.depth, stack.blocks) == (1, ())


def test_weights_that_are_used_from_outside_are_in_the_run():
    model = FAMILIES["deberta-v2"].build()
    assert model.encoder.rel_embeddings in stacks(model)["main"].run
    wavlm = FAMILIES["wavlm"].build()
    assert wavlm.encoder.layers[0].attention.q_proj in stacks(wavlm)["main"].run


def test_an_encoder_does_not_count_its_decoder():
    model = FAMILIES["bart-Seq2SeqLM"].build()
    found = stacks(model)
    assert not set(found["encoder"].run) & set(model.model.decoder.modules())
    assert set(found["encoder"].run) < set(found["decoder"].run)
    assert model.lm_head not in found["decoder"].run


def test_a_stack_is_printed_in_a_line():
    assert repr(stacks(FAMILIES["bart"].known())) == (
        "{'encoder': LayerStack('encoder', depth=3, width=32), 'decoder': LayerStack('decoder', depth=2, width=32)}"
    )


def test_a_copy_in_a_wrapper_has_the_stacks_of_the_model():
    model = FAMILIES["bert"].known()
    own = copy.deepcopy(model)
    same_stacks(nn.DataParallel(model), nn.DataParallel(own))
    assert stacks(own)["main"].blocks == tuple(own.encoder.layer)
