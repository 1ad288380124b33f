"""Other ways to train the default reader, all from the same start and in the same passes of a frozen MiniLM.

    python benchmarks/losses.py --data ../shared/data [--tasks sst2 cola] [--seeds 0 1 2] [--rows 2000] [--json]

    plain            cross entropy with the labels
    label smoothing  a tenth of each label is spread over all classes
    mixup            the logits of two rows are mixed, with a weight from Beta(.2, .2), and their losses too (the head
                     is linear, so this is the same as mixing the features)
    teacher          half of the loss is the distance to the predictions of a fine-tuned model for the row, both
                     softened (temperature 2)
    3 readers        the predictions of the plain readers of all seeds, averaged: one reader of three times the size

The rows are those of `frontier.py`. Each way's epoch is chosen on held-out rows, and its score is that on the published
validation or test part. "ahead" is the mean over seeds of the score minus the score of "plain", with half its 95 %
interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from common import report
from frontier import limited
from sklearn.metrics import accuracy_score, matthews_corrcoef
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

import lamina
from lamina.data.batches import length_batches
from lamina.train.results import summarise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from lamina import Task

LENGTH, EPOCHS, BATCH, RATE = 96, 8, 32, 1e-3
TEACHER = {"epochs": 3, "batch_size": 16, "learning_rate": 1e-4, "warmup_ratio": 0.1}
HEAT, SMOOTHED, MIXED = 2.0, 0.1, 0.2


def _plain(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


def _smoothed(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return cross_entropy(logits, labels, label_smoothing=SMOOTHED)


def _mixed(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    share = float(torch.distributions.Beta(MIXED, MIXED).sample())
    order = torch.randperm(len(logits))
    both = share * logits + (1 - share) * logits[order]
    return share * cross_entropy(both, labels) + (1 - share) * cross_entropy(both, labels[order])


def _taught(logits: Tensor, labels: Tensor, said: Tensor) -> Tensor:
    soft = kl_div(log_softmax(logits / HEAT, -1), softmax(said / HEAT, -1), reduction="batchmean")
    return (cross_entropy(logits, labels) + HEAT**2 * soft) / 2


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": _plain,
    "label smoothing": _smoothed,
    "mixup": _mixed,
    "teacher": _taught,
}


def main() -> None:
    """Train, score and print."""
    asked = _options()
    rows = []
    for name in asked.tasks:
        task = limited(asked.data, name, rows=asked.rows, scored=asked.scored)
        said, teacher = _teacher(task)
        runs = [_trained(task, seed, said) for seed in asked.seeds]
        scores = {way: [run[way][0] for run in runs] for way in WAYS}
        for way, own in scores.items():
            ahead = summarise([one - other for one, other in zip(own, scores["plain"], strict=True)])
            facts: dict[str, Any] = {"task": name, "way": way, "metric": task.metric, "seeds": len(own)}
            facts |= {"score": summarise(own).mean, "±": summarise(own).interval or ""}
            if way != "plain":
                facts |= {"ahead": ahead.mean, "ahead ±": ahead.interval or ""}
            rows.append(facts)
        averaged = torch.stack([run["plain"][1] for run in runs]).mean(0)
        for way, score in ((f"{len(runs)} readers", _score(task, averaged)), ("the teacher", teacher)):
            rows.append({"task": name, "way": way, "metric": task.metric, "seeds": 1, "score": score})
    blank = dict.fromkeys(rows[1], "")
    report([{**blank, **row} for row in rows], as_json=asked.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks' folders, as of `lamina train`")
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=["cola", "sst2", "mrpc", "rte", "qnli"],
        default=["cola", "sst2"],
        help="which of them (default %(default)s)",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the runs (default %(default)s)")
    parser.add_argument("--rows", type=int, default=2000, help="rows to learn from, at most")
    parser.add_argument("--scored", type=int, default=1000, help="rows of the published part to score by, at most")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def _teacher(task: Task) -> tuple[Tensor, float]:
    """Return the logits of a fine-tuned model for the training rows, and the model's own score."""
    torch.manual_seed(0)
    model, tokenizer = lamina.load("minilm", head="sequence_classification", labels=task.labels)
    options: dict[str, Any] = {**TEACHER, "max_length": LENGTH, "progress": False}
    result = lamina.finetune(model, task, processor=tokenizer, test=True, **options)
    [test] = result.test.values()
    rows = _Rows(task, "train", tokenizer)
    with torch.no_grad():
        said = rows.gather(lambda batch: model.eval()(**batch).logits)
    return said, test[task.metric]


def _trained(task: Task, seed: int, said: Tensor) -> dict[str, tuple[float, Tensor]]:
    """Return way -> (score, logits) on the published part, at the epoch that the held-out rows choose."""
    torch.manual_seed(seed)
    bank = lamina.ReaderBank(*lamina.load("minilm"))
    readers = {f"way{number}": way for number, way in enumerate(WAYS)}
    for name in readers:
        reader = lamina.Reader.default(task)
        bank.add(name, lamina.Reader(reader.fusion, reader.head, seed=seed))
    parts = {part: _Rows(task, part, bank.processor) for part in ("train", "validation", "test")}
    optimizer = torch.optim.AdamW(bank.parameters(), lr=RATE, weight_decay=0.0)
    steps = EPOCHS * len(parts["train"].batches(0))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    best: dict[str, tuple[float, float, Tensor]] = {}
    for epoch in range(EPOCHS):
        bank.train()
        for rows in parts["train"].batches(seed + 1000 * epoch):
            logits = bank(**parts["train"].batch(rows))
            labels = parts["train"].labels[rows]
            for name, way in readers.items():
                WAYS[way](logits[name].logits, labels, said[rows]).backward(retain_graph=True)
                torch.nn.utils.clip_grad_norm_(bank[name].parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        bank.eval()
        with torch.no_grad():
            held, published = (parts[part].say(bank, readers) for part in ("validation", "test"))
        for name, way in readers.items():
            score = _score(task, held[name], "validation")
            if way not in best or score > best[way][0]:
                best[way] = score, _score(task, published[name]), published[name]
    return {way: (score, logits) for way, (_, score, logits) in best.items()}


class _Rows:
    """One part of a task as batches of rows of similar length."""

    def __init__(self, task: Task, part: str, tokenizer: Any) -> None:
        split = task.split(part)
        self._texts, self._tokenizer = list(split.texts), tokenizer
        self.labels = torch.tensor(list(split.labels))
        self._lengths = [sum(map(len, [text] if isinstance(text, str) else text)) for text in self._texts]

    def batches(self, seed: int | None, size: int = BATCH) -> list[list[int]]:
        return length_batches(self._lengths, size, seed=seed)

    def batch(self, rows: list[int]) -> Any:
        texts = [self._texts[row] for row in rows]
        given = [texts] if isinstance(texts[0], str) else [[pair[side] for pair in texts] for side in (0, 1)]
        return self._tokenizer(*given, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")

    def gather(self, read: Callable[[Any], Tensor]) -> Tensor:
        batches = self.batches(None, 64)
        said = torch.cat([read(self.batch(rows)) for rows in batches])
        return said[torch.tensor([row for rows in batches for row in rows]).argsort()]

    def say(self, bank: Any, names: Any) -> dict[str, Tensor]:
        def both(batch: Any) -> Tensor:
            heard = bank(**batch)
            return torch.stack([heard[name].logits for name in names], 1)

        return dict(zip(names, self.gather(both).unbind(1), strict=True))


def _score(task: Task, logits: Tensor, part: str = "test") -> float:
    metric = matthews_corrcoef if task.metric == "mcc" else accuracy_score
    return float(metric(list(task.split(part).labels), logits.argmax(-1).tolist()))


if __name__ == "__main__":
    main()
