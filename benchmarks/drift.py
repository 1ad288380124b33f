"""How often the test of drift raises a false alarm within 500 replies, and how often it notices three shifts.

    python benchmarks/drift.py [--data ../shared/data/halueval/general.jsonl] [--model MODEL] [--runs 200] [--json]

`lamina.monitor` makes a monitor on MiniLM (or MODEL) from 1,000 of HaluEval's 4,507 chat replies (Li et al. 2023,
arXiv:2305.11747), drawn at random. The other 3,507 are divided by the topic of their prompt (two clusters of the 50
largest components of tf-idf). Each run draws a new sketch of 400 replies of the larger topic, and then a stream of 500:

- the same topic, and none that is in the sketch: every alarm is a false one; five times as many runs;
- the other topic;
- 16-fold dilution: each reply stands within 15 good replies of the same topic;
- other lengths: each reply is cut to half its words.

The diluted and the cut replies are made from replies of the larger topic, some of which are in the sketch. Rates have
95 % intervals (Clopper and Pearson) as if runs were independent; they share replies. "first" counts the quantity that
raised the alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import lamina
from lamina.monitors import DriftSketch, DriftWatcher, ReplyFacts
from lamina.monitors.calibration import interval
from lamina.prediction.calibrate import score_texts
from lamina.prediction.evaluate import scoring_groups
from lamina.tasks.task import Task
from lamina.train.bank_runner import BankRunner
from lamina.train.options import PassOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.prediction.train_monitor import TrainedMonitor

    Rows = Sequence[dict[str, Any]]

TRAINED, SKETCH, STREAM, FOLD = 1000, 400, 500, 16
NEEDED = TRAINED + 2 * (SKETCH + STREAM)  # the larger of two topics has at least half of the replies
COLUMNS = {"prompt": "user_query", "reply": "chatgpt_response", "label": "hallucination"}


def options() -> tuple[argparse.Namespace, Rows]:
    """Parse the command line, and return the options and the replies, in random order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default="../shared/data/halueval/general.jsonl", help="the file of replies (default %(default)s)"
    )
    parser.add_argument("--model", default="minilm", help="whose states are read (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4507, help="replies to read, at most (default %(default)s)")
    parser.add_argument("--runs", type=int, default=200, help="streams of each shift (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    rows = [json.loads(line) for line in Path(args.data).read_text(encoding="utf-8").splitlines()]
    random.Random(args.seed).shuffle(rows)
    rows = rows[: args.rows]
    if len(rows) < NEEDED:
        parser.error(f"there are {len(rows)} replies; at least {NEEDED} are needed (--rows, --data)")
    return args, rows


def trained(rows: Rows, model: str, seed: int) -> TrainedMonitor:
    """Return a monitor that `lamina.monitor` makes from some rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "replies.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        how: dict[str, Any] = {"positive": "yes", "rate": 0.05, "epochs": 2, "seed": seed, "anyway": True}
        return lamina.monitor(path, model=model, **COLUMNS, **how)


def facts(monitor: TrainedMonitor, rows: Rows) -> list[ReplyFacts]:
    """Return what the test of drift knows about each reply."""
    texts = [{"prompt": row[COLUMNS["prompt"]], "reply": row[COLUMNS["reply"]], "spans": []} for row in rows]
    columns: dict[str, Any] = {"text": "prompt", "text_pair": "reply", "label": "spans", "metric": "accuracy"}
    labels = monitor.bank[monitor.reader].config.head.labels
    parts = {"train": texts, "validation": texts[:1]}
    task = Task.from_dataset("token_classification", parts, labels=labels, name="replies", **columns)
    runner = BankRunner(monitor.bank, "benchmark", None)
    how = PassOptions.checked("benchmark", batch_size=32, progress=False)
    (group,) = scoring_groups(runner, {monitor.reader: task}, "train", how)
    scores = score_texts(runner, group, task, [monitor], how, finished=not monitor.live, features=True)
    scored = scores[str(monitor.name)]
    pairs = zip(scored.highest(), scored.running, scored.features or (), strict=True)
    return [ReplyFacts(score, len(own), features) for score, own, features in pairs if len(own)]


def topics(rows: Rows, seed: int) -> tuple[Rows, Rows]:
    """Return the rows of the larger and of the smaller of two clusters of prompts."""
    words = TfidfVectorizer(stop_words="english", min_df=3, sublinear_tf=True)
    # clusters of the words themselves are lopsided: one of them had 86 of 3,507 replies
    clusters: Any = KMeans(2, random_state=seed, n_init=3)  # pyright: ignore[reportArgumentType]  an int is allowed
    by_topic: Any = make_pipeline(words, TruncatedSVD(50, random_state=seed), Normalizer(), clusters)
    found = by_topic.fit_predict([row["user_query"] for row in rows])
    parts = [[row for row, cluster in zip(rows, found, strict=True) if cluster == own] for own in (0, 1)]
    larger, smaller = sorted(parts, key=len, reverse=True)
    return larger, smaller


def diluted(rows: Rows, rng: random.Random) -> Rows:
    """Return rows whose reply stands at a random place within 15 good replies."""
    good, texts = [row for row in rows if row["hallucination"] == "no"], []
    for row in rows:
        replies = [other["chatgpt_response"] for other in rng.sample(good, FOLD - 1)]
        replies.insert(rng.randrange(FOLD), row["chatgpt_response"])
        texts.append({**row, "chatgpt_response": "\n".join(replies)})
    return texts


def halved(rows: Rows) -> Rows:
    """Return rows whose reply is cut to half its words."""
    words = [row["chatgpt_response"].split() for row in rows]
    return [
        {**row, "chatgpt_response": " ".join(own[: max(1, len(own) // 2)])}
        for row, own in zip(rows, words, strict=True)
    ]


def measured(known: Sequence[ReplyFacts], new: Sequence[ReplyFacts] | None, runs: int, seed: int) -> dict[str, Any]:
    """Return how many of some runs raise an alarm; `new` None: the stream has replies of the sketch's own kind."""
    after: list[int] = []
    first: Counter[str] = Counter()
    for run in range(runs):
        rng = random.Random(1000 * seed + run)
        drawn = rng.sample(list(known), SKETCH + (STREAM if new is None else 0))
        watcher = DriftWatcher(DriftSketch.of(drawn[:SKETCH]), seed=run)
        stream = drawn[SKETCH:] if new is None else rng.sample(list(new), min(STREAM, len(new)))
        alarm = next((found for reply in stream if (found := watcher.add(reply))), None)
        if alarm is not None:
            after.append(alarm.replies)
            first[alarm.quantity.split()[0]] += 1
    low, high = interval(len(after), runs)
    mean = float(np.mean(after)) if after else None
    return {"runs": runs, "alarms": len(after) / runs, "low": low, "high": high, "after": mean, "first": dict(first)}


def main() -> None:
    """Measure the test, and print the rates."""
    args, rows = options()
    rng = random.Random(args.seed + 1)
    monitor = trained(rows[:TRAINED], args.model, args.seed)
    own, other = topics(rows[TRAINED:], args.seed)
    few = rng.sample(list(own), min(len(own), 520))
    kinds: dict[str, Rows | None] = {
        "same": None,
        "other topics": rng.sample(list(other), min(len(other), 1000)),
        "16-fold dilution": diluted(few, rng),
        "other lengths": halved(own),
    }
    known = facts(monitor, own)
    found: dict[str, Any] = {}
    for name, shifted in kinds.items():
        runs = 5 * args.runs if shifted is None else args.runs
        found[name] = measured(known, None if shifted is None else facts(monitor, shifted), runs, args.seed)
    if args.json:
        print(json.dumps({"model": args.model, "topics": [len(own), len(other)], **found}, indent=1))
        return
    print(f"replies of the two topics: {len(own)} and {len(other)}")
    for name, one in found.items():
        when = "" if one["after"] is None else f", on average after {one['after']:.0f} replies"
        rate = f"{100 * one['alarms']:.1f} % ({100 * one['low']:.1f} to {100 * one['high']:.1f})"
        print(f"{name:18} {rate} of {one['runs']} streams raise an alarm{when}; first: {one['first']}")


if __name__ == "__main__":
    main()
