"""A model tells stories, and two monitors score every token as it is generated.

    python examples/stories.py MODEL [--output out/stories]

MODEL is a causal language model (a folder, or a name on the hub such as Xenova/llama2.c-stories15M). It writes stories,
and simple rules label each word of them: is the word spoken by somebody, and is somebody happy in its sentence? Two
readers of the frozen model's layers learn these labels in the same passes. Their thresholds are chosen on other
stories. Then the model writes a new story, which ends at its first happy moment.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lamina
from lamina.monitors import LastScore

LABELS = ("no", "yes")
Told = tuple[str, dict[str, float]]  # a token, and what each monitor says there
GOOD = {"happy", "smiled", "fun", "laughed", "love", "loved", "glad", "proud", "excited", "hugged", "hug"}


def main() -> None:
    """Write stories, train readers on them, and watch a new story."""
    args = options()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    torch.manual_seed(args.seed)
    start = torch.tensor([[tokenizer.bos_token_id]])
    stories = write(model, tokenizer, start, args.stories, args.tokens)
    print(f"{len(stories)} stories, the first: {stories[0][:100]} ...")

    bank = lamina.ReaderBank(model, tokenizer)
    tasks = {"speech": task_of("speech", stories, is_said), "joy": task_of("joy", stories, is_happy)}
    for name in tasks:
        bank.add(name, lamina.Reader(lamina.AdaLayers(dim=32), lamina.TokenClassification(LABELS, encoder_layers=0)))
    lamina.fit(
        bank, tasks, epochs=args.epochs, batch_size=8, learning_rate=3e-3, max_length=args.tokens, seed=args.seed
    )
    for name, task in tasks.items():
        monitor = lamina.Monitor(name, "yes", aggregate=LastScore())
        rates: Any = lamina.monitors.calibrate(bank, monitor, task, false_positive_rate=args.rate).calibration
        low, high = rates.recall_interval
        recall = f"{rates.recall:.2f} ({low:.2f} to {high:.2f}) of the {rates.positives} with"
        print(f"{name}: flags {rates.false_positive_rate:.2f} of {rates.negatives} stories without, {recall}")

    args.output.mkdir(parents=True, exist_ok=True)
    bank.save_pretrained(args.output / "bank")
    for number in range(1, args.tell + 1):
        told = tell(bank, start, args.tokens)
        (args.output / f"story-{number}.svg").write_text(drawn(told, list(tasks)), encoding="utf-8")
    print(f"the bank and the stories are in {args.output}")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id or folder of a model that tells stories")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("out/stories"),
        help="folder of the bank and the drawings (default: %(default)s)",
    )
    parser.add_argument(
        "--stories", type=int, default=512, help="that the model writes to learn from (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=192, help="of a story, at most (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="of training (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.05, help="of false alarms, by story (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the stories and the readers (default: %(default)s)")
    parser.add_argument("--tell", type=int, default=3, help="stories in the end (default: %(default)s)")
    return parser.parse_args()


def write(model: Any, tokenizer: Any, start: torch.Tensor, stories: int, tokens: int) -> list[str]:
    """Return stories that the model has written."""
    texts: list[str] = []
    while len(texts) < stories:
        prompts = start.repeat(min(64, stories - len(texts)), 1)
        pad = tokenizer.eos_token_id
        ids = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=tokens, pad_token_id=pad
        )
        texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [text for text in texts if text.strip()]


def tell(bank: lamina.ReaderBank, start: torch.Tensor, tokens: int) -> list[Told]:
    """Write a new story, which stops when somebody is happy; return its tokens, with the monitors' scores at each."""
    told: list[Told] = []
    happy = False
    prompt = {"input_ids": start, "attention_mask": torch.ones_like(start)}
    for step in bank.stream(bank.model, prompt, stop=["joy"], do_sample=True, max_new_tokens=tokens):
        told.append((step.text, step.score))
        print(f"{step.text!r:>12}  " + "  ".join(f"{name} {score:.2f}" for name, score in step.score.items()))
        happy = "joy" in step.flags
    print("stopped: it is happy" if happy else "told to its end")
    return told


def is_said(words: list[str]) -> list[bool]:
    """Return whether each word is between quotation marks."""
    quotes, said = 0, []
    for word in words:
        before, quotes = quotes, quotes + word.count('"')
        said.append(before % 2 == 1 or quotes > before)
    return said


def is_happy(words: list[str]) -> list[bool]:
    """Return whether each word is a happy one, or follows one in its sentence."""
    found, joy = False, []
    for word in words:
        found = found or word.lower().strip('.,!?"') in GOOD
        joy.append(found)
        found = found and not word.strip('"').endswith((".", "!", "?"))
    return joy


def task_of(name: str, stories: list[str], rule: Callable[[list[str]], list[bool]]) -> lamina.Task:
    """Return a task of words with labels; every third story is for choosing the threshold."""
    rows: list[dict[str, list[str]]] = []
    for story in stories:
        words = story.split()
        rows.append({"words": words, "tags": [LABELS[here] for here in rule(words)]})
    parts = {"train": [row for at, row in enumerate(rows) if at % 3], "validation": rows[::3]}
    columns: dict[str, Any] = {"text": "words", "label": "tags", "labels": LABELS, "metric": "accuracy", "name": name}
    return lamina.Task.from_dataset("token_classification", parts, **columns, label_all_tokens=True)


def drawn(scores: list[Told], names: list[str], width: int = 760) -> str:
    """Return the story as an animated SVG, with a coloured stripe under each token for each monitor."""
    colours, parts, x, y = ("#0072b2", "#d55e00"), [], 20.0, 60
    for at, (token, values) in enumerate(scores):
        wide, indent = 8.4 * len(token), 8.4 * (len(token) - len(token.lstrip()))
        if x + wide > width - 20 or "\n" in token:
            x, y = 20.0, y + 40
        stripes = "".join(
            f'<rect x="{x:.1f}" y="{y + 5 + 6 * row}" width="{wide:.1f}" height="5" fill="{colour}" '
            f'fill-opacity="{0.0 if values[name] != values[name] else values[name]:.2f}"/>'
            for row, (name, colour) in enumerate(zip(names, colours, strict=True))
        )
        shown = f'<set attributeName="visibility" to="visible" begin="{0.12 * at:.2f}s"/>'
        text = f'<text x="{x + indent:.1f}" y="{y}">{escape(token.strip())}</text>'
        parts.append(f'<g visibility="hidden">{text}{stripes}{shown}</g>')
        x += wide
    legend = "".join(
        f'<rect x="{20 + 120 * row}" y="18" width="14" height="8" fill="{colour}"/>'
        f'<text x="{40 + 120 * row}" y="27">{name}</text>'
        for row, (name, colour) in enumerate(zip(names, colours, strict=True))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 30}" font-family="monospace" '
        f'font-size="14"><rect width="100%" height="100%" fill="#fff"/>{legend}{"".join(parts)}</svg>'
    )


if __name__ == "__main__":
    main()
