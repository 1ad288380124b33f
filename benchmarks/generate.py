"""What readers add to generation: new tokens with 4 readers of the encoder and 4 of the decoder, over without.

    python benchmarks/generate.py [--small] [--tokens 64] [--json]

BART-large's shape with random weights, greedy; `--small` is a narrow BART that takes a minute. Budget: 1.05. In the
same turns: `output_hidden_states=True`, which hands over every state of every step and computes nothing with them.
`MiB` is what is held when `generate` ends: features and answers, or states.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from common import report, synchronise
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedModel

from lamina import AdaLayers, Reader, ReaderBank, SequenceClassification, TokenClassification
from lamina.demo.timing import in_turn, ratio

BUDGET = 1.05
LABELS = ("no", "yes")


def options() -> argparse.Namespace:
    """What the command takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=5, help="counted runs of each (default 5)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens (default 64)")
    parser.add_argument("--small", action="store_true", help="4 + 4 blocks of width 256 in place of 12 + 12 of 1024")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def summariser(*, small: bool) -> PreTrainedModel:
    """BART-large's shape, or a small one, with random weights."""
    depth, width, heads, vocabulary = (4, 256, 4, 8000) if small else (12, 1024, 16, 50265)
    torch.manual_seed(0)
    shared: dict[str, Any] = {"vocab_size": vocabulary, "d_model": width, "forced_eos_token_id": None}
    layers: dict[str, Any] = {f"{part}_layers": depth for part in ("encoder", "decoder")}
    sizes: dict[str, Any] = {f"{part}_attention_heads": heads for part in ("encoder", "decoder")}
    inner: dict[str, Any] = {f"{part}_ffn_dim": 4 * width for part in ("encoder", "decoder")}
    return BartForConditionalGeneration(BartConfig(**shared, **layers, **sizes, **inner)).eval()


def bank_of(model: PreTrainedModel) -> ReaderBank:
    """Four readers of whole texts on the encoder, four of tokens on the decoder, k = 64."""
    bank = ReaderBank(model)
    for number in range(4):
        bank.add(f"text{number}", Reader(AdaLayers(dim=64), SequenceClassification(LABELS), "encoder", seed=number))
        head = TokenClassification(LABELS, encoder_layers=0)
        bank.add(f"token{number}", Reader(AdaLayers(dim=64), head, "decoder", seed=number))
    return bank.eval()


def held(output: Any) -> float:
    """MiB of the states or answers that an output holds."""
    if isinstance(output, torch.Tensor):
        return output.numel() * output.element_size() / 2**20
    return sum(map(held, output), 0.0) if isinstance(output, tuple | list) else 0.0


def rows_of(asked: argparse.Namespace, model: Any, batch: int) -> list[dict[str, Any]]:
    """Measure one size of batch."""
    bank = bank_of(model)
    ids = torch.randint(5, model.config.vocab_size, (batch, 128), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids.to(asked.device), "attention_mask": torch.ones_like(ids).to(asked.device)}
    given = {**inputs, "max_new_tokens": asked.tokens, "min_new_tokens": asked.tokens, "do_sample": False}
    memory: dict[str, float] = {}

    def plain() -> None:
        model.generate(**given)

    def states() -> None:
        out = model.generate(**given, output_hidden_states=True, return_dict_in_generate=True)
        memory["output_hidden_states"] = held([out.encoder_hidden_states, out.decoder_hidden_states])

    def readers() -> None:
        with bank.listen(over="both") as heard:
            model.generate(**given)
        memory["8 readers"] = held([[out.logits, out.mask] for out in heard.readers.values()])

    ways: dict[str, Callable[[], None]] = {"plain": plain, "8 readers": readers, "output_hidden_states": states}
    runs = {name: lambda run=run: (run(), synchronise()) for name, run in ways.items()}
    with torch.no_grad():
        taken = in_turn(runs, repeats=asked.repeats)
    return [
        {
            "batch": batch,
            "way": name,
            "s": statistics.median(taken[name]),
            "ratio": ratio(taken, name, to="plain"),
            "MiB": memory.get(name, 0.0),
            "budget": BUDGET if name == "8 readers" else "",
        }
        for name in ways
    ]


def main() -> None:
    """Measure and print."""
    asked = options()
    model = summariser(small=asked.small).to(asked.device)
    report([row for batch in (1, 4) for row in rows_of(asked, model, batch)], as_json=asked.json)


if __name__ == "__main__":
    main()
