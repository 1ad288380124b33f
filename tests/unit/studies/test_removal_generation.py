"""The study `removal`: text that a causal model generates without some blocks, compared with the whole model."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from tests.support.masked import masked_model, masking_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from lamina import truncate_
from lamina.errors import ConfigError, DataError, LaminaError
from lamina.studies import removal
from lamina.studies.passes import continuations, prompt_ids, same_share
from lamina.studies.run_study import load_study_recipe

TEXTS = ["the film is good .", "anna was very slow", "ben and anna", "a bad film and a good film in paris"]


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes, max_position_embeddings=32, **ends)).eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.3)
        for block in model.model.layers:
            block.mlp.down_proj.weight.normal_(std=0.3)
    return model


def greedy(model, prompt: torch.Tensor, count: int) -> list[int]:
    ids = prompt.unsqueeze(0)
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def test_generated_text_is_compared_with_that_of_the_whole_model(llama, words):
    study = removal(llama, texts=TEXTS, processor=words, new_tokens=6)
    rows = study.table[study.table["measure"] == "same_tokens"].set_index("layer")
    assert set(rows["task"]) == {"generation"}
    assert (rows.loc[0, "score"], rows.loc[0, "blocks"]) == (1.0, 0)
    cut = copy.deepcopy(llama)
    truncate_(cut, 2)
    prompts = prompt_ids(llama, TEXTS, words, tokens=8, op="removal")
    assert len({len(prompt) for prompt in prompts}) > 1
    whole, without = ([greedy(model, prompt, 6) for prompt in prompts] for model in (llama, cut))
    shares = [same_share(own, other) for own, other in zip(whole, without, strict=True)]
    assert 0 < sum(shares) < len(shares)
    assert rows.loc[3, "score"] == pytest.approx(sum(shares) / len(shares))
    assert rows.loc[3, "text"] == words.decode([*prompts[0].tolist(), *without[0]], skip_special_tokens=True)
    drops = study.table[(study.table["measure"] == "drop") & (study.table["task"] == "generation")]
    assert set(drops["proxy"]) == {"block_influence", "cka_distance"}
    assert drops[drops["layer"] == 3]["score"].tolist() == pytest.approx([1 - sum(shares) / len(shares)] * 2)
    assert drops["text"].isna().all()
    assert any("generation: least is lost without block" in said for said in study.conclusions)
    assert any("a drop of the share of same tokens of 0." in said for said in study.conclusions)


def test_a_continuation_ends_with_its_end_token(llama, words):
    prompts = prompt_ids(llama, ["the film", "the film is"], words, tokens=None, op="removal")
    plain = continuations(llama, prompts, words, new_tokens=6, op="removal")
    llama.generation_config.eos_token_id = [plain[0][1], 19]
    ended = continuations(llama, prompts, words, new_tokens=6, op="removal")
    llama.generation_config.eos_token_id = None
    assert ended[0] == plain[0][: plain[0].index(plain[0][1]) + 1]


@pytest.mark.parametrize(
    ("own", "other", "share"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1),
        ([1, 2, 3, 4], [1, 2, 4, 4], 0.5),
        ([1, 2], [3], 0),
        ([1, 2, 3, 4], [1, 9], 0.25),
    ],
)
def test_the_share_of_same_tokens(own, other, share):
    assert same_share(own, other) == share


@pytest.mark.long
def test_given_prompts_and_no_generation(llama, words):
    study = removal(llama, texts=TEXTS, processor=words, prompts=["anna was"], new_tokens=3)
    texts = study.table[study.table["measure"] == "same_tokens"]["text"]
    assert all(text.startswith("anna was") for text in texts)
    assert study.settings["prompts"] == ["anna was"]
    without = removal(llama, texts=TEXTS, processor=words, new_tokens=0)
    assert set(without.table["task"]) == {"language model"}
    assert "text" not in without.table


def test_a_masked_model_generates_nothing():
    study = removal(masked_model(), texts=TEXTS, processor=masking_tokenizer())
    assert set(study.table["task"]) == {"language model"}
    assert study.settings["failures"] == []


def test_what_cannot_be_generated(llama, words):
    with pytest.raises(ConfigError, match="removal: new_tokens is -1; it must be at least 0"):
        removal(llama, texts=TEXTS, processor=words, new_tokens=-1)
    study = removal(llama, texts=TEXTS, processor=words, new_tokens=99)
    (failure,) = study.settings["failures"]
    assert failure["error"].startswith("removal: new_tokens is 99; it must be at least 1 and at most 2")
    with pytest.raises(ConfigError, match=r"a prompt has 32 tokens, and the model allows 32, .* Use shorter prompts"):
        continuations(llama, [torch.full((32,), 5)], words, new_tokens=1, op="removal")
    with pytest.raises(DataError, match="removal: no prompt has a token to continue"):
        prompt_ids(llama, [""], words, tokens=None, op="removal")


def test_a_recipe_names_prompts(tmp_path: Path):
    text = "model: minilm\ntexts: [a, b]\nstudies:\n  removal: {{prompts: {}, new_tokens: 5}}\n"
    (path := tmp_path / "cut.yaml").write_text(text.format("[Once upon a time]"))
    assert load_study_recipe(path).options("removal") == {"prompts": ["Once upon a time"], "new_tokens": 5}
    path.write_text(text.format("[1]"))
    with pytest.raises(LaminaError, match=r"line 4, studies\.removal\.prompts"):
        load_study_recipe(path)


@pytest.mark.parametrize("prompts", [None, ["anna was"]])
def test_generated_text_of_other_texts_does_not_resume(llama, words, tmp_path, prompts):
    """The texts are the prompts, or the proxies are measured on them."""
    options = {"prompts": prompts, "processor": words, "new_tokens": 3, "output": tmp_path}
    removal(llama, texts=TEXTS, **options)
    for place in (tmp_path / "cells").iterdir():
        if json.loads(place.read_text())["content"][1]["key"]["task"] != "generation":
            place.unlink()
    with pytest.raises(ConfigError, match="belongs to a study with other texts"):
        removal(llama, texts=["a film", *TEXTS[1:]], resume=True, **options)
