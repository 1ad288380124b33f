"""What the benchmark and the tests of vLLM share: engines, prompts, banks, and what a bank itself answers."""

# vLLM is not installed where types are checked: it needs another transformers.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from lamina import Monitor, PooledLayers, ReaderBank, TokenClassification, load
from lamina.monitors import RollingMax

CLOSE = 1e-4  # largest difference that is allowed between a probability of the engine and the bank's own
BLOCK = 32  # tokens of a block of the cache; engines for CPUs take multiples of 32
Ids = list[int]


def save_tokenizer(folder: Path, words: int) -> None:
    """Save a tokenizer whose words are w1, w3, w4, ... The number of a word is its id; the last one ends a text."""
    # no special token may be the beginning of a word, or it would be found in the word
    vocabulary = {"[PAD]": 0, "[UNK]": 2} | {f"w{number}": number for number in range(words) if number not in (0, 2)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": f"w{words - 1}", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def scatter(bank: ReaderBank, scale: float) -> None:
    """Add random numbers to the readers' weights. With their initial weights, all scores are alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in bank.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def watchdog(reader: str, threshold: float) -> Monitor:
    """Return a monitor that flags a text at the first token with a high score of the label "yes"."""
    return Monitor(reader, flag="yes", aggregate=RollingMax(1), threshold=threshold, name="watchdog")


def dividing(highest: Sequence[float], above: range) -> float:
    """Return a threshold in the widest gap between the texts' highest scores.

    Args:
        highest: Highest score of each text.
        above: How many texts may reach the threshold.
    """
    ordered = sorted(highest, reverse=True)
    count = max(above, key=lambda number: ordered[number - 1] - ordered[number])
    return (ordered[count - 1] + ordered[count]) / 2


def mixed_prompts(count: int, words: range, *, seed: int = 0, longest: int = 100, tail: int = 30) -> list[Ids]:
    """Return prompts of different lengths, many of which share a beginning.

    Args:
        count: Number of prompts.
        words: The token ids.
        seed: Seed of the random numbers.
        longest: Maximum number of shared tokens, exclusive.
        tail: Maximum number of tokens that follow them, exclusive.
    """
    draw = random.Random(seed)
    shared = [draw.randrange(words.start, words.stop) for _ in range(longest)]
    lengths = [(draw.randrange(longest), draw.randrange(1, tail)) for _ in range(count)]
    return [shared[:begin] + [draw.randrange(words.start, words.stop) for _ in range(end)] for begin, end in lengths]


def as_inputs(prompts: Sequence[Sequence[int]]) -> list[dict[str, Ids]]:
    """Return prompts as vLLM takes token ids."""
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


@contextmanager
def engine(
    model: Path, bank: Path | None, *, in_process: bool = False, on_flag: str = "end", **settings: Any
) -> Iterator[Any]:
    """Start an engine of vLLM, with the readers of a bank if one is given, and stop it at the end.

    With `in_process` the engine runs in this process, which starts faster, otherwise in one of its own. `settings` are
    those of `vllm.LLM`.
    """
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm import LLM

    if bank is not None:
        settings["additional_config"] = {"lamina": {"bank": str(bank), "on_flag": on_flag}}
    defaults = {"dtype": "float32", "max_model_len": 320, "max_num_seqs": 16, "block_size": BLOCK, "seed": 0}
    with patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))}):
        llm = LLM(str(model), **{**defaults, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        if in_process:
            cleanup_dist_env_and_memory()


class Reference:
    """What a bank itself answers, by a plain pass of transformers over each text.

    Args:
        model: Folder of the model.
        bank: Folder of the bank.
    """

    def __init__(self, model: Path, bank: Path) -> None:
        self.bank = ReaderBank.from_pretrained(bank, load(model)[0])
        self._kept: dict[tuple[int, ...], dict[tuple[str, str], Tensor]] = {}

    def answers(self, prompt: Sequence[int], output: Sequence[int]) -> dict[tuple[str, str], Tensor]:
        """Return (reader, part) -> probabilities, where the parts are "prompt", "output", "both" and "tokens".

        Readers have the parts that they have in the engine. The last token of the output is in no part, and a part
        without tokens is left out.
        """
        key = (len(prompt), *prompt, *output)
        if key not in self._kept:
            ids, length = torch.tensor([[*prompt, *output[:-1]]]), len(prompt)
            states = self.bank.record_states({"main": range(self.bank.stacks["main"].layers)}, {"input_ids": ids})
            parts = {"prompt": (0, length), "output": (length, ids.shape[1]), "both": (0, ids.shape[1])}
            self._kept[key] = {}
            for part, (first, last) in parts.items():
                if first == last:
                    continue
                kept = {"main": {layer: state[:, first:last] for layer, state in states["main"].items()}}
                batch = {"input_ids": ids[:, first:last], "attention_mask": torch.ones(1, last - first).long()}
                with torch.no_grad():
                    read = self.bank.read_states(kept, batch)
                for name in self.bank:
                    if (engine_part := self._engine_part(name, part)) is not None:
                        self._kept[key][name, engine_part] = read[name].logits[0].softmax(-1)
        return self._kept[key]

    def _engine_part(self, name: str, part: str) -> str | None:
        """Return under which key the engine has a reader's answer over a part of the text; None: it has none."""
        config = self.bank[name].config
        if isinstance(config.head, TokenClassification):
            return "tokens" if part == "both" else None
        return part if part == "prompt" or not isinstance(config.fusion, PooledLayers) else None

    def compare(self, prompt: Sequence[int], completion: Any) -> tuple[float, int]:
        """Compare the answers of a `CompletionOutput` with the bank's own.

        Returns:
            The largest difference between two probabilities, and the number of wrong answers: those that are missing,
            have another shape, or differ by more than `CLOSE`.
        """
        worst, wrong = 0.0, 0
        for (name, part), want in self.answers(prompt, list(completion.token_ids)).items():
            answer = completion.lamina[name][part]
            rows = answer if part == "tokens" or answer is None else list(answer["probabilities"].values())
            got = torch.tensor([] if rows is None else rows)
            if got.shape != want.shape or not torch.isfinite(got).all():
                wrong += 1
                continue
            difference = float((got - want).abs().max())
            worst, wrong = max(worst, difference), wrong + (difference > CLOSE)
        if len(completion.token_ids) == 1:  # the engine has not read it
            wrong += sum(completion.lamina[name].get("output") is not None for name in self.bank)
        return worst, wrong
