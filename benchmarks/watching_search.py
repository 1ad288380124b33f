"""Compare readers for watching, to decide whether the default one, `Reader.default(task, watch=True)`, should change.

    python benchmarks/watching_search.py [--data ../shared/data/halueval/general.jsonl] [--sae FOLDER]
        [--stories ../shared/data/stories260k] [--rows 600] [--seeds 0 1 2] [--output out/watching-search] [--json]

Data: HaluEval's chat replies, and three of the 113 public probing sets whose texts are judged (FOLDER holds the package
sae-probes 0.4.2), read by MiniLM as finished texts; and stories that a tiny Llama writes, watched as they are
written: does somebody speak, and is somebody happy (labels by rule, as in examples/stories.py). Rows are drawn by a
fixed seed; 40 % train, the rest is scored. All readers and seeds of a data set are trained in one pass, as
`lamina.monitor` trains its candidates. Each text's score is the highest running score, aggregated in four ways. A data
set is saved when it ends, and the same command continues an interrupted run.

The rule, fixed before the first run: another reader becomes the default if its AUROC (mean of the four aggregations,
seeds, and then data sets) is more than .005 above the default's, and if it is ahead by more than .005 in more data sets
than it is behind by as much. "best" is the mean over data sets of the reader's best aggregation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from common import report
from sklearn.metrics import roc_auc_score

import lamina
from lamina import AdaLayers, Concat, Reader, ReaderBank, ScalarMix, SingleLayer
from lamina.monitors import Monitor
from lamina.prediction.calibrate import score_texts
from lamina.prediction.evaluate import scoring_groups
from lamina.prediction.reply_file import LabelledReply, ReplyColumns, divide, read_labels, replies_of
from lamina.prediction.train_monitor import AGGREGATES
from lamina.studies.benchmarking.probing_sets import find_data, read_set
from lamina.tasks.task import Task
from lamina.train.bank_runner import BankRunner
from lamina.train.options import PassOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SETS = ("50_deon_isvalid", "106_hate_hate", "110_aimade_humangpt3")
START = "Once upon a time,"
LABELS = ("O", "B-yes", "I-yes")
LEVEL = 0.005


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/halueval/general.jsonl", help="file of HaluEval's replies")
    parser.add_argument("--sae", type=Path, help="folder of the package sae-probes (default: its sets are left out)")
    parser.add_argument("--stories", default="../shared/data/stories260k", help="folder of a model that tells stories")
    parser.add_argument("--rows", type=int, default=600, help="texts of a data set (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the readers (default 0 1 2)")
    parser.add_argument("--max-length", type=int, default=128, help="tokens per window (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("out/watching-search"), help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def halueval(args: argparse.Namespace, tokenizer: Any) -> list[LabelledReply]:
    """Return some of HaluEval's replies; bad ones are bad as a whole."""
    replies, _ = replies_of(read_labels(args.data, ReplyColumns(), "yes"), tokenizer)
    return random.Random(0).sample(replies, args.rows)


def judged(args: argparse.Namespace, name: str) -> list[LabelledReply]:
    """Return some texts of a probing set, each as a reply to a prompt of its own."""
    data = read_set(find_data(args.sae), name).without_repeats()
    rows = random.Random(0).sample(range(len(data.texts)), min(args.rows, len(data.texts)))
    texts = [(data.texts[row].strip() or "-", bool(data.labels[row])) for row in rows]
    return [reply(f"text {number}", text, bad) for number, (text, bad) in enumerate(texts)]


def reply(prompt: str, text: str, bad: bool) -> LabelledReply:
    """Return a reply that is bad as a whole, or good."""
    return LabelledReply(prompt, text, bad, ((0, len(text)),) if bad else ())


def stories(args: argparse.Namespace, model: Any, tokenizer: Any) -> dict[str, list[LabelledReply]]:
    """Return kind of label -> stories that the model has written, with the words that have the label."""
    path = Path(__file__).parents[1] / "examples" / "stories.py"
    spec: Any = importlib.util.spec_from_file_location("stories", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    ids = tokenizer(START, return_tensors="pt").input_ids
    texts = [text.strip().removeprefix(START).strip() for text in example.write(model, tokenizer, ids, args.rows, 64)]
    texts = [text for text in dict.fromkeys(texts) if text]
    rules = {"speech": example.is_said, "joy": example.is_happy}
    return {name: [labelled(number, text, rule) for number, text in enumerate(texts)] for name, rule in rules.items()}


def labelled(number: int, text: str, rule: Callable[[list[str]], list[bool]]) -> LabelledReply:
    """Return a story as a reply; each word that the rule marks is a span."""
    words, spans, at = text.split(), list[tuple[int, int]](), 0
    for word, marked in zip(words, rule(words), strict=True):
        start = text.index(word, at)
        at = start + len(word)
        if marked:
            spans.append((start, at))
    return LabelledReply(f"{START} {number}", text, bool(spans), tuple(spans))


def task_of(replies: Sequence[LabelledReply], prompt: str | None) -> Task:
    """Return a task over the words of replies. `prompt` is that of all replies; None: each has its own."""
    rows = [
        {"prompt": prompt or one.prompt, "reply": one.reply, "spans": [[*span, "yes"] for span in one.spans]}
        for one in replies
    ]
    columns: dict[str, Any] = {"text": "prompt", "text_pair": "reply", "label": "spans", "metric": "accuracy"}
    parts = {"train": rows, "validation": rows[:1]}
    return Task.from_dataset(
        "token_classification", parts, labels=LABELS, label_all_tokens=True, name="watching", **columns
    )


def compared(
    model: Any, tokenizer: Any, replies: Sequence[LabelledReply], args: argparse.Namespace, *, live: bool
) -> list[dict[str, Any]]:
    """Return a row per reader, seed and aggregation, with the AUROC on the replies that did not train."""
    parts = divide(replies, 0)
    prompt = START if live else None
    train = task_of(parts["train"], prompt)
    rest = [one for part in ("choosing", "calibration", "test") for one in parts[part]]
    default = Reader.default(train, watch=True)
    depth = next(iter(lamina.stacks(model).values())).depth
    fusions: dict[str, Any] = {
        "default": default.fusion,
        "Concat(dim=32)": Concat(dim=32, layers="all"),
        "AdaLayers(dim=64)": AdaLayers(dim=64),
        "ScalarMix()": ScalarMix(),
        "SingleLayer(middle)": SingleLayer(layer=depth // 2),
        "SingleLayer(last)": SingleLayer(layer=depth),
    }
    bank = ReaderBank(model, processor=tokenizer)
    keys = {f"r{number}s{seed}": (name, seed) for number, name in enumerate(fusions) for seed in args.seeds}
    for key, (name, seed) in keys.items():
        bank.add(key, Reader(fusions[name], default.head, seed=seed), watch=live)
    how: dict[str, Any] = {"epochs": 4, "batch_size": 32, "learning_rate": 1e-3, "max_length": args.max_length}
    lamina.fit(bank, dict.fromkeys(bank, train), keep="last", cache="auto", seed=0, progress=False, **how)
    monitors = {
        (key, type(way).__name__): Monitor(key, LABELS[1:], way, scale="log_odds", name=f"{key} {type(way).__name__}")
        for key in keys
        for way in AGGREGATES
    }
    passed = PassOptions.checked("benchmark", batch_size=32, progress=False)
    runner, scored = BankRunner(bank, "benchmark", None), task_of(rest, prompt)
    (group,) = scoring_groups(runner, {next(iter(keys)): scored}, "train", passed)
    scores = score_texts(runner, group, scored, list(monitors.values()), passed, finished=not live)
    truth = [one.positive for one in rest]
    return [
        {
            "reader": keys[key][0],
            "seed": keys[key][1],
            "aggregation": way,
            "auroc": float(roc_auc_score(truth, scores[str(monitor.name)].highest())),
            "scored": len(rest),
            "positive": sum(truth),
        }
        for (key, way), monitor in monitors.items()
    ]


def tables(results: dict[str, list[dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a row per reader, compared with the default over data sets; and a row per data set and reader."""

    def mean(rows: Sequence[dict[str, Any]], **wanted: Any) -> float:
        return statistics.fmean(row["auroc"] for row in rows if wanted.items() <= row.items())

    ways = [type(way).__name__ for way in AGGREGATES]
    readers = list(dict.fromkeys(row["reader"] for rows in results.values() for row in rows))
    summary, details = list[dict[str, Any]](), list[dict[str, Any]]()
    for reader in readers:
        ahead = [mean(rows, reader=reader) - mean(rows, reader="default") for rows in results.values()]
        best = [max(mean(rows, reader=reader, aggregation=way) for way in ways) for rows in results.values()]
        summary.append(
            {
                "reader": reader,
                "AUROC": statistics.fmean(mean(rows, reader=reader) for rows in results.values()),
                "above default": statistics.fmean(ahead),
                "wins": sum(one > LEVEL for one in ahead),
                "losses": sum(one < -LEVEL for one in ahead),
                "best": statistics.fmean(best),
            }
        )
        for name, rows in results.items():
            seeds = [mean(rows, reader=reader, seed=seed) for seed in sorted({row["seed"] for row in rows})]
            by_way = {way: mean(rows, reader=reader, aggregation=way) for way in ways}
            details.append({"data": name, "reader": reader, **by_way, "over seeds": float(np.std(seeds))})
    return sorted(summary, key=lambda row: -row["AUROC"]), sorted(details, key=lambda row: row["data"])


def main() -> None:
    """Run the data sets that are missing, and print the tables."""
    args = options()
    args.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {}

    def done(name: str, compare: Callable[[], list[dict[str, Any]]]) -> None:
        """Take the rows of a data set from its file; if there is none, compute and save them."""
        path = args.output / f"{name}-{args.rows}-{'-'.join(map(str, args.seeds))}.json"
        if not path.exists():
            rows = compare()
            path.write_text(json.dumps(rows))
        results[name] = json.loads(path.read_text())

    model, tokenizer = lamina.load("minilm")
    done("HaluEval", lambda: compared(model, tokenizer, halueval(args, tokenizer), args, live=False))
    for name in SETS if args.sae else ():
        done(name, lambda name=name: compared(model, tokenizer, judged(args, name), args, live=False))
    writer, own_tokenizer = lamina.load(args.stories, "causal_lm")
    written = stories(args, writer, own_tokenizer)
    for name, replies in written.items():
        done(f"stories, {name}", lambda own=replies: compared(writer, own_tokenizer, own, args, live=True))
    summary, details = tables(results)
    if args.json:
        print(json.dumps({"summary": summary, "details": details}, indent=1))
        return
    report(summary, as_json=False)
    print()
    report(details, as_json=False)


if __name__ == "__main__":
    main()
