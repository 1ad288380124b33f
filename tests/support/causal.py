"""A tiny causal language model, its tokenizer, and running text that follows a rule."""

from __future__ import annotations

import random
from typing import Any

import torch
from tests.support.training import LENGTH, PEOPLE, PLACES, PLAIN, WORDS
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lamina.tasks.task import Task

VOCABULARY = [*WORDS, "<end>", "<user>", "<reply>"]
END = VOCABULARY.index("<end>")
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user> ' if message.role == 'user' else '<reply> ' }}{{ message.content }}"
    "{{ ' <end> ' if message.role == 'assistant' else ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<reply> ' }}{% endif %}"
)


def causal_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Without a padding or start token, as GPT-2's."""
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", eos_token="<end>", model_max_length=LENGTH
    )
    tokenizer.chat_template = template
    return tokenizer


def starting_tokenizer() -> PreTrainedTokenizerFast:
    """With a start token before every text and, as Llama's, before both texts of a pair."""
    tokenizer = causal_tokenizer()
    start = ("<user>", VOCABULARY.index("<user>"))
    tokenizer.bos_token = start[0]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<user> $A", pair="<user> $A <user> $B", special_tokens=[start]
    )
    return tokenizer


def causal_model(seed: int = 0) -> GPT2LMHeadModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings: dict[str, Any] = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 3, "n_head": 2}
        config = GPT2Config(
            vocab_size=len(VOCABULARY), bos_token_id=END, eos_token_id=END, initializer_range=0.3, **settings
        )
        return GPT2LMHeadModel(config).eval()


def lines(*, train: int = 60, validation: int = 20, seed: int = 0, by_row: bool = False) -> Task:
    """Every other word is the full stop, so that there is something to learn."""
    rng = random.Random(seed)
    words = [*PLAIN, *PEOPLE, *PLACES]
    parts = {
        part: [
            {"text": " ".join(word for _ in range(rng.randint(3, 9)) for word in (rng.choice(words), "."))}
            for _ in range(count)
        ]
        for part, count in (("train", train), ("validation", validation))
    }
    return Task.from_dataset("causal_lm", parts, text="text", name="lines", by_row=by_row)
