"""A tiny model with a bank, an engine that serves both, and what the bank itself answers."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lamina import (
    AdaLayers,
    Monitor,
    PooledLayers,
    Reader,
    ReaderBank,
    ScalarMix,
    SequenceClassification,
    SingleLayer,
    TokenClassification,
    load,
)
from lamina.monitors import RollingMax

VOCABULARY = 300
END = VOCABULARY - 1
READERS = {
    "query": Reader(AdaLayers(dim=32), SequenceClassification(("no", "yes"), pooling="query")),
    "mean": Reader(ScalarMix(), SequenceClassification(("a", "b", "c"), pooling="mean"), seed=1),
    "last": Reader(SingleLayer(layer=4, dim=16), SequenceClassification(("a", "b"), pooling="mean"), seed=2),
    "tags": Reader(AdaLayers(dim=16), TokenClassification(("O", "X"), encoder_layers=0), seed=3),
    "whole": Reader(PooledLayers(dim=32), SequenceClassification(("a", "b", "c"), pooling="first"), seed=4),
    "cut": Reader(
        PooledLayers(dim=8, heads=4, queries=2, layers="1-3"),
        SequenceClassification(("a", "b"), pooling="first"),
        seed=5,
    ),
}


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **WINDOWS, query_pre_attn_scalar=64)),
}


def make_model(folder: Path, family: str = "llama") -> None:
    """Save a random model of 4 blocks with a tokenizer; `family` is one of `MODELS`."""
    torch.manual_seed(0)
    kind, config = MODELS[family]
    kind(config).eval().save_pretrained(folder)
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose words are w3, w4, ..."""
    # no special token may be the beginning of a word, or it would be found in the word
    words = {"[PAD]": 0, "[UNK]": 2} | {f"w{number}": number for number in range(VOCABULARY) if number not in (0, 2)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=f"w{END}", pad_token="[PAD]", unk_token="[UNK]"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)


def make_bank(model: Path, folder: Path, monitor: Monitor | None = None) -> None:
    """Save a bank with every sort of reader that an engine runs, with weights far from their initial ones."""
    bank = ReaderBank(*load(model))
    for name, reader in READERS.items():
        bank.add(name, reader)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) / 3)
    if monitor is not None:
        bank.keep_monitor(monitor)
    bank.eval().save_pretrained(folder)


def watchdog(threshold: float) -> Monitor:
    """Return a monitor on single tokens of the reader "query"."""
    return Monitor("query", flag="yes", aggregate=RollingMax(1), threshold=threshold, name="watchdog")


@contextmanager
def engine(model: Path, bank: Path | None, *, in_process: bool = False, **settings: Any) -> Iterator[Any]:
    """Start an engine of vLLM, with a bank if one is given, and stop it at the end.

    With `in_process` the engine runs in this process, which starts faster, otherwise in one of its own.
    """
    from vllm import LLM

    config = {} if bank is None else {"additional_config": {"lamina": {"bank": str(bank)}}}
    defaults = {"dtype": "float32", "max_model_len": 320, "max_num_seqs": 16, "block_size": 32, "seed": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(not in_process)))
        llm = LLM(str(model), **{**defaults, **config, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        if in_process:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


@contextmanager
def server(model: Path, bank: Path, log: Path, *options: str) -> Iterator[Any]:
    """Start the server of vLLM with a bank, and stop it at the end; yields an `httpx.Client` for it."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` starts this module; in the package vllm-cpu the command itself looks for a package called vllm
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", *options]
    command += ["--additional-config", json.dumps({"lamina": {"bank": str(bank)}})]
    with log.open("w") as output, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 300
            while not _is_up(client):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < end, log.read_text()[-4000:]
                time.sleep(0.5)
            yield client
        finally:
            process.terminate()
            process.wait(60)


def _is_up(client: Any) -> bool:
    import httpx

    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def prompts_of(count: int, longest: int = 150) -> list[list[int]]:
    """Return prompts of different lengths, many of which share a beginning; two of them are equal."""
    draw = random.Random(0)
    shared = [draw.randrange(3, END) for _ in range(longest)]
    prompts: list[list[int]] = []
    for _ in range(count):
        tail = [draw.randrange(3, END) for _ in range(draw.randrange(1, 40))]
        prompts.append(shared[: draw.randrange(longest)] + tail)
    return [*prompts[:-1], list(prompts[0])]


def as_inputs(prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    """Return prompts as vLLM takes token ids."""
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def greedy_texts(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return the `count` tokens with which transformers continues each prompt, greedily and past the end token."""
    language_model = load(model, head="causal_lm")[0]
    language_model.generation_config.eos_token_id = None
    texts: list[list[int]] = []
    for prompt in prompts:
        output = language_model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False)
        texts.append(output[0, len(prompt) :].tolist())
    return texts


def bank_scores(
    model: Path, folder: Path, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return the score that `watchdog` gives each token of the texts that follow the prompts, except the last token."""
    bank = ReaderBank.from_pretrained(folder, load(model)[0])
    scores: list[list[float]] = []
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.tensor([[*prompt, *text[:-1]]])
        states = bank.record_states({"main": range(bank.stacks["main"].layers)}, {"input_ids": tokens})
        row: list[float] = []
        for place in range(len(prompt), tokens.shape[1]):  # each token alone
            one = {"main": {layer: state[:, place : place + 1] for layer, state in states["main"].items()}}
            batch = {"input_ids": tokens[:, place : place + 1], "attention_mask": torch.ones(1, 1, dtype=torch.long)}
            with torch.no_grad():
                row.append(float(bank.read_states(one, batch)["query"].logits[0].softmax(-1)[1]))
        scores.append(row)
    return scores


def dividing(scores: Sequence[Sequence[float]]) -> float:
    """Return a threshold that some texts reach and others do not, in the widest gap between the texts' maxima.

    At least two texts lie on each side. Texts that end in the same repeated token have nearly equal maxima.
    """
    highest = sorted(max(row) for row in scores)
    gaps = [(highest[place + 1] - highest[place], place) for place in range(1, len(highest) - 2)]
    place = max(gaps)[1]
    return (highest[place] + highest[place + 1]) / 2


def largest_difference(
    model: Path, folder: Path, prompts: Sequence[Sequence[int]], completions: Sequence[Any]
) -> float:
    """Return the largest difference between a probability in an engine's answers and the bank's own.

    Args:
        model: Folder of the model.
        folder: Folder of the bank.
        prompts: The prompts.
        completions: The `CompletionOutput` of each prompt.
    """
    bank = ReaderBank.from_pretrained(folder, load(model)[0])
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        text = [*prompt, *completion.token_ids[:-1]]
        parts = {"prompt": prompt, "both": text}
        if len(text) > len(prompt):
            parts["output"] = text
        else:
            assert completion.lamina["mean"]["output"] is None
        for part, ids in parts.items():
            expected = _bank_answers(bank, list(ids), len(prompt) if part == "output" else 0)
            for name, want in expected.items():
                if name == "tags":
                    if part == "both":
                        got = torch.tensor(completion.lamina[name]["tokens"])
                        assert got.shape == want.shape
                        worst = max(worst, float((got - want).abs().max()))
                elif name not in ("whole", "cut") or part == "prompt":
                    got = torch.tensor(list(completion.lamina[name][part]["probabilities"].values()))
                    worst = max(worst, float((got - want).abs().max()))
    return worst


def _bank_answers(bank: ReaderBank, ids: list[int], skipped: int) -> dict[str, torch.Tensor]:
    """Return reader name -> probabilities over the tokens from `skipped` on, by a plain pass of the bank."""
    tokens = torch.tensor([ids])
    states = bank.record_states({"main": range(bank.stacks["main"].layers)}, {"input_ids": tokens})
    kept = {"main": {layer: state[:, skipped:] for layer, state in states["main"].items()}}
    batch = {"input_ids": tokens[:, skipped:], "attention_mask": torch.ones_like(tokens[:, skipped:])}
    with torch.no_grad():
        output = bank.read_states(kept, batch)
    return {name: output[name].logits[0].softmax(-1) for name in bank}
