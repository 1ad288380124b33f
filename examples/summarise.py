"""One pass of BART gives three answers: the summary, the sentiment of the article and the names in it.

    python examples/summarise.py [ARTICLE.txt] [--model facebook/bart-large-cnn] [--output out/summarise]

Two readers on the encoder of the frozen model are trained here on the demo's sentences. Then they listen while the
model generates its summary as usual: there is no second pass, and the summary is exactly the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import lamina
from lamina.demo.corpus import SENTIMENTS, TAGS, write

ARTICLE = (
    "Maria Lopez flew to Lisbon on Monday . She praised the new phone from Nokia , which had been late for a year . "
    "The hotel in Porto was cold and dirty , and the waiter was rude to her brother Peter ."
)


def main() -> None:
    """Train the readers, then summarise and listen."""
    args = options()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model).eval()
    files = write(args.output / "corpus", rows=args.rows)
    parts: dict[str, Any] = {part: files[part] for part in ("train", "validation")}
    tasks = {
        "mood": lamina.Task.from_files(
            "sequence_classification", **parts, text="text", label="sentiment", labels=SENTIMENTS
        ),
        "names": lamina.Task.from_files("token_classification", **parts, text="words", label="tags", labels=TAGS),
    }
    bank = lamina.ReaderBank(model, tokenizer)
    for name, task in tasks.items():
        bank.add(name, lamina.Reader.default(task))
    lamina.fit(bank, tasks, epochs=args.epochs, batch_size=16, learning_rate=2e-3, add_prefix_space=True)
    bank.save_pretrained(args.output / "bank")

    article = ARTICLE if args.article is None else args.article.read_text(encoding="utf-8")
    batch = tokenizer(article, truncation=True, max_length=1024, return_tensors="pt")
    alone = model.generate(**batch, max_new_tokens=args.tokens)
    with bank.listen() as heard:
        summary = model.generate(**batch, max_new_tokens=args.tokens)
    print("summary:", tokenizer.decode(summary[0], skip_special_tokens=True))
    print("the same without readers:", torch.equal(alone, summary))
    mood = heard["mood"].logits[0].softmax(-1)
    print("mood:", ", ".join(f"{label} {share:.2f}" for label, share in zip(SENTIMENTS, mood.tolist(), strict=True)))
    tags = [TAGS[best] for best in heard["names"].logits[0].argmax(-1).tolist()]
    tokens = tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    print("names:", " ".join(f"{token}/{tag}" for token, tag in zip(tokens, tags, strict=True) if tag != "O") or "none")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("article", type=Path, nargs="?", help="text to summarise; a short one is built in")
    parser.add_argument(
        "--model", default="facebook/bart-large-cnn", help="hub id or folder of a BART (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/summarise"), help="folder of the bank (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=4500, help="sentences to learn from (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="of training (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=60, help="of the summary, at most (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
