"""Sites: the modules that return what attention and feed-forward network add, in families of many architectures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES, model_of

from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers import at_site, stacks, tap

# the modules of the first block whose outputs they are, by reading the code of transformers
WHERE = {
    ("bert", "main"): ("encoder.layer.0.attention.output.dense", "encoder.layer.0.output.dense"),
    ("distilbert", "main"): ("transformer.layer.0.attention", "transformer.layer.0.ffn"),
    ("gpt2", "main"): ("h.0.attn", "h.0.mlp"),
    ("gptj", "main"): ("h.0.attn", "h.0.mlp"),  # side by side, added at once
    ("gpt_neox", "main"): ("layers.0.attention", "layers.0.mlp"),
    ("bloom", "main"): ("h.0.self_attention.dense", "h.0.mlp.dense_4h_to_h"),  # each adds by itself
    ("llama", "main"): ("layers.0.self_attn", "layers.0.mlp"),
    ("qwen2", "main"): ("layers.0.self_attn", "layers.0.mlp"),
    ("gemma2", "main"): ("layers.0.post_attention_layernorm", "layers.0.post_feedforward_layernorm"),
    ("bart", "encoder"): ("encoder.layers.0.self_attn", "encoder.layers.0.fc2"),
    ("bart", "decoder"): ("decoder.layers.0.self_attn", "decoder.layers.0.fc2"),
    ("t5", "encoder"): ("encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.1.DenseReluDense"),
    ("t5", "decoder"): ("decoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.2.DenseReluDense"),
    ("whisper", "decoder"): ("decoder.layers.0.self_attn", "decoder.layers.0.fc2"),
    ("vit", "main"): ("layers.0.attention", "layers.0.mlp"),
    ("wav2vec2", "main"): ("encoder.layers.0.attention", "encoder.layers.0.feed_forward"),
    ("albert", "main"): (
        "encoder.albert_layer_groups.0.albert_layers.0.attention.dense",
        "encoder.albert_layer_groups.0.albert_layers.0.ffn_output",
    ),
}


@pytest.mark.parametrize(("name", "stack"), one_in(6, WHERE))
@torch.no_grad()
def test_a_site_is_what_its_module_returned(name: str, stack: str):
    model = model_of(name)
    inputs = FAMILIES[name].inputs(model, batch=2, tokens=9, seed=1)
    heard: dict[str, list[torch.Tensor]] = {path: [] for path in WHERE[name, stack]}

    def note(path: str) -> Any:
        return lambda _module, _args, out: heard[path].append(out if isinstance(out, torch.Tensor) else out[0])

    handles = [model.get_submodule(path).register_forward_hook(note(path)) for path in heard]
    for site, path in zip(("attention", "ffn"), heard, strict=True):
        with tap(model, stack=stack, site=site) as states:
            heard[path].clear()
            model(**inputs)
        assert list(states) == list(range(1, stacks(model)[stack].layers))
        assert torch.equal(states[1], heard[path][0])
        with tap(model, -1, stack, site) as last:
            model(**inputs)
        assert list(last) == [max(states)]
        assert torch.equal(last[max(states)], states[max(states)])
    for handle in handles:
        handle.remove()


@torch.no_grad()
def test_what_is_added_adds_up():
    model = model_of("llama")
    inputs = FAMILIES["llama"].inputs(model)
    with tap(model) as states, tap(model, site="attention") as attention, tap(model, site="ffn") as ffn:
        model(**inputs)
    for layer in (1, 2):  # the last state is normed
        assert torch.equal((states[layer - 1] + attention[layer]) + ffn[layer], states[layer])


@torch.no_grad()
def test_a_site_in_generation_and_with_a_head():
    model = FAMILIES["llama-CausalLM"].build()
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    ids = torch.tensor([[5, 6, 7]])
    with tap(model, site="ffn") as states:
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert {tuple(state.shape) for state in states.values()} == {(1, 1, 32)}
    with tap(model, site="ffn") as whole:
        model(text[:, :-1])
    torch.testing.assert_close(states[3][0, 0], whole[3][0, -1], rtol=0, atol=1e-5)
    left = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert left == hooks
    assert at_site(model, stacks(model)["main"], "ffn").points[1].path == "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xlm", "it has no module per block"),
        ("xlnet", "its blocks have no attention, or nothing beside it"),
        ("mobilebert", "what its blocks add to the states is not the output of modules in them"),
    ],
)
def test_blocks_of_another_build_are_refused(name: str, reason: str):
    with pytest.raises(UnsupportedModelError, match=reason), tap(model_of(name), site="attention"):
        pass


def test_bad_input():
    model: Any = model_of("llama")
    with (
        pytest.raises(UnknownNameError, match="unknown site 'mlp'; known: output, attention, ffn"),
        tap(model, site="mlp"),
    ):  # type: ignore[arg-type]
        pass
    with pytest.raises(ConfigError, match="layer 0 is the embeddings; they have no ffn"), tap(model, "0-1", site="ffn"):
        pass
    with torch.device("meta"):
        empty = FAMILIES["llama"].build()
    with pytest.raises(UnsupportedModelError, match="it has no weights"), tap(empty, site="ffn"):
        pass
