"""The cost that readers and monitors add to generation, relative to generation without them.

    python benchmarks/generate.py [--part readers|monitors] [--small] [--tokens 64] [--batch N] [--json]

Readers: 4 on the encoder and 4 on the decoder of a model with BART-large's shape, budget 1.05. Monitors: 8 on a model
with the shape of Llama 3.2 1B, which score each new token, budget 1.02; `scalar_mix` reads a mix of all layers,
`ada_layers` 16 features of each layer, and "in eights" scores eight tokens at a time. Weights are random and decoding
is greedy; `--small` takes narrow models and about a minute.

Two other methods are measured in turn with them: `output_hidden_states=True`, which returns every state of every step
and computes nothing with it; and, if it is installed (`pip install nnsight`), nnsight, which saves the output of every
block at every step. `MiB` is the memory that a method still holds when `generate` ends: features and answers, scores,
or states.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Callable
from typing import Any, cast

import torch
from common import report, synchronise
from tokenizers import Tokenizer, models
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lamina import AdaLayers, Monitor, Reader, ReaderBank, ScalarMix, SequenceClassification, TokenClassification
from lamina.demo.timing import in_turn, ratio

BUDGETS = {"8 readers": 1.05} | {f"8 monitors, {name}": 1.02 for name in ("scalar_mix", "ada_layers", "in eights")}
LABELS = ("no", "yes")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each (default 5)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default 64)")
    parser.add_argument("--part", choices=("readers", "monitors"), help="one of both (default: both)")
    parser.add_argument("--batch", type=int, help="one size (default: 1 and 4 of readers, 1 and 8 of monitors)")
    parser.add_argument("--small", action="store_true", help="4 blocks of width 256 a stack")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it runs (default %(default)s)"
    )
    return parser.parse_args()


def summariser(*, small: bool) -> PreTrainedModel:
    """Return a model with BART-large's shape, or a small one, with random weights."""
    depth, width, heads, vocabulary = (4, 256, 4, 8000) if small else (12, 1024, 16, 50265)
    torch.manual_seed(0)
    shared: dict[str, Any] = {"vocab_size": vocabulary, "d_model": width, "forced_eos_token_id": None}
    layers: dict[str, Any] = {f"{part}_layers": depth for part in ("encoder", "decoder")}
    sizes: dict[str, Any] = {f"{part}_attention_heads": heads for part in ("encoder", "decoder")}
    inner: dict[str, Any] = {f"{part}_ffn_dim": 4 * width for part in ("encoder", "decoder")}
    return BartForConditionalGeneration(BartConfig(**shared, **layers, **sizes, **inner)).eval()


def bank_of(model: PreTrainedModel) -> ReaderBank:
    """Return a bank with four readers of whole texts on the encoder and four of tokens on the decoder, k = 64."""
    bank = ReaderBank(model)
    for number in range(4):
        bank.add(f"text{number}", Reader(AdaLayers(dim=64), SequenceClassification(LABELS), "encoder", seed=number))
        head = TokenClassification(LABELS, encoder_layers=0)
        bank.add(f"token{number}", Reader(AdaLayers(dim=64), head, "decoder", seed=number))
    return bank.eval()


def llama(*, small: bool) -> PreTrainedModel:
    """Return a model with the shape of Llama 3.2 1B, or a small one, with random weights."""
    depth, width, heads, vocabulary = (4, 256, 4, 8000) if small else (16, 2048, 32, 128256)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4,
            tie_word_embeddings=True,
        )
    ).eval()


def watched(model: PreTrainedModel) -> tuple[ReaderBank, dict[str, list[Monitor]]]:
    """Return a bank with 8 token readers per fusion, and kind of monitor -> 8 monitors."""
    bank, head = ReaderBank(model), TokenClassification(LABELS, encoder_layers=0)
    fusions = {"scalar_mix": ScalarMix(), "ada_layers": AdaLayers(dim=16)}
    names = {kind: [f"{kind}{number}" for number in range(8)] for kind in fusions}
    for kind, fusion in fusions.items():
        for number, name in enumerate(names[kind]):
            bank.add(name, Reader(fusion, head, seed=number))
    return bank.eval(), {kind: [Monitor(name, "yes", threshold=0.99) for name in own] for kind, own in names.items()}


def held(output: Any) -> float:
    """Return the size in MiB of the states or answers in an output."""
    if isinstance(output, torch.Tensor):
        return output.numel() * output.element_size() / 2**20
    return sum(map(held, output), 0.0) if isinstance(output, tuple | list) else 0.0


def inputs_of(asked: argparse.Namespace, model: Any, batch: int, prompt: int) -> dict[str, Any]:
    """Return the arguments of `generate` for prompts with `prompt` tokens."""
    ids = torch.randint(5, model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids.to(asked.device), "attention_mask": torch.ones_like(ids).to(asked.device)}
    return {**inputs, "max_new_tokens": asked.tokens, "min_new_tokens": asked.tokens, "do_sample": False}


def reader_rows(asked: argparse.Namespace, model: Any, batch: int) -> list[dict[str, Any]]:
    """Return the table rows of readers for one batch size."""
    bank, given, memory = bank_of(model), inputs_of(asked, model, batch, 128), dict[str, float]()

    def readers() -> None:
        with bank.listen(over="both") as heard:
            model.generate(**given)
        memory["8 readers"] = held([[out.logits, out.mask] for out in heard.readers.values()])

    return measured(asked, model, given, {"8 readers": readers} | by_nnsight(model, given, memory), memory)


def monitor_rows(asked: argparse.Namespace, model: Any, batch: int) -> list[dict[str, Any]]:
    """Return the table rows of monitors for one batch size."""
    (bank, monitors), given, memory = watched(model), inputs_of(asked, model, batch, 16), dict[str, float]()

    def watch(name: str, kind: str, every: int) -> None:
        with bank.watch(monitors[kind], every=every) as seen:
            model.generate(**given)
        memory[name] = held([list(step.scores.values()) for step in seen.steps])

    ways = {"scalar_mix": ("scalar_mix", 1), "ada_layers": ("ada_layers", 1), "in eights": ("ada_layers", 8)}
    named = {f"8 monitors, {name}": how for name, how in ways.items()}
    runs = {name: lambda name=name, how=how: watch(name, *how) for name, how in named.items()}
    return measured(asked, model, given, runs | by_nnsight(model, given, memory), memory)


def by_nnsight(model: Any, given: dict[str, Any], memory: dict[str, float]) -> dict[str, Callable[[], None]]:
    """Return a function that saves every block's output at every step with nnsight; {} if it is not installed."""
    try:
        from nnsight import TransformersModel  # pyright: ignore[reportMissingImports]  optional, and not an extra
    except ImportError:
        return {}
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))  # it wants one; the prompts are ids
    logging.getLogger("transformers").setLevel(logging.CRITICAL)  # its pipeline says what it is not for
    wrapped = TransformersModel(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a"))
    ids, options = given["input_ids"], {key: value for key, value in given.items() if key != "input_ids"}
    both = model.config.is_encoder_decoder
    once, blocks = (wrapped.model.encoder.layers, wrapped.model.decoder.layers) if both else ([], wrapped.model.layers)

    def run() -> None:
        with wrapped.generate(ids, **options) as tracer:
            states = cast("Any", []).save()
            for block in once:
                states.append(block.output)
            for _ in tracer.iter[0 : given["max_new_tokens"]]:
                for block in blocks:
                    states.append(block.output)
        memory["nnsight"] = held(states)

    return {"nnsight": run}


def measured(
    asked: argparse.Namespace,
    model: Any,
    given: dict[str, Any],
    ways: dict[str, Callable[[], None]],
    memory: dict[str, float],
) -> list[dict[str, Any]]:
    """Return a table row for each method, plain generation and `output_hidden_states`, which take turns."""

    def plain() -> None:
        model.generate(**given)

    def states() -> None:
        out = model.generate(**given, output_hidden_states=True, return_dict_in_generate=True)
        kinds = ("encoder_hidden_states", "decoder_hidden_states", "hidden_states")
        memory["output_hidden_states"] = held([out.get(kind) for kind in kinds])

    ways = {"plain": plain, **ways, "output_hidden_states": states}
    runs = {name: lambda run=run: (run(), synchronise()) for name, run in ways.items()}
    with torch.no_grad():
        taken = in_turn(runs, repeats=asked.repeats)
    return [
        {
            "model": model.config.model_type,
            "batch": len(given["input_ids"]),
            "way": name,
            "s": statistics.median(taken[name]),
            "ratio": ratio(taken, name, to="plain"),
            "MiB": memory.get(name, 0.0),
            "budget": BUDGETS.get(name, ""),
        }
        for name in ways
    ]


def sizes(asked: argparse.Namespace, many: int) -> tuple[int, ...]:
    """Return the batch sizes that are measured."""
    return (1, many) if asked.batch is None else (asked.batch,)


def main() -> None:
    """Measure and print."""
    asked = options()
    rows: list[dict[str, Any]] = []
    if asked.part != "monitors":
        model = summariser(small=asked.small).to(asked.device)
        rows += [row for batch in sizes(asked, 4) for row in reader_rows(asked, model, batch)]
        del model
    if asked.part != "readers":
        model = llama(small=asked.small).to(asked.device)
        rows += [row for batch in sizes(asked, 8) for row in monitor_rows(asked, model, batch)]
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
