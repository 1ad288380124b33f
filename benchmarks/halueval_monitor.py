"""Measure what `lamina.monitor` is worth on HaluEval, and whether its promised false-positive rate holds.

    python benchmarks/halueval_monitor.py [--data ../shared/data/halueval/general.jsonl] [--splits 0 1 2 3 4]
        [--rows 1700] [--output out/halueval-monitor] [--json]

For each split, `lamina.monitor` trains a monitor of hallucinated replies ("yes" is the positive class) on a frozen
MiniLM with its default options and a rate of 5 %. A split is a seed of its division by prompt: 40 % train, 15 % choose,
25 % calibrate and 20 % test. MiniLM reads in both directions, so finished replies are judged. Each split is saved when
it ends, in a folder for this file and number of rows, and the same command continues an interrupted run. The tables:

1. AUROC on the test parts: the monitor, logistic regression on TF-IDF of prompt and reply, the length of the reply
   (which of long and short is suspect is found on the training part), and logistic regression on the mean of the last
   layer's states. Intervals (95 %) are bootstrap intervals over replies, of the mean over splits.
2. The realised false-positive rate at 1 % and 5 % of the replies, and at 0.2 and 0.5 false alarms per thousand tokens.
   100 times, for the splits in turn, the calibration and test replies of a split are put together and divided anew into
   halves; one half chooses the threshold as `lamina.monitor` does (95 % confidence), the other half is scored. "inside"
   is how often the rate on that half is at most the promised one, "in theory" how often it would be for a monitor whose
   promise is exact (beta-binomial; for a rate per reply). The promise bounds the true rate; the rate of a half scatters
   around it. "not above" is how often its interval does not lie above the promised one. "inside, rest" divides anew
   too, but chooses the threshold on as few tenths as have enough good replies for the rate, and scores the rest, whose
   rate is nearer to the true one.
3. Thresholds of the calibration parts for replies that are diluted 16-fold: each stands at a drawn place among 15 good
   replies. A rate is given both per reply and per thousand tokens, whichever was promised.
4. The AUROC of each candidate on the choosing parts: of the splits that choose, and of those that confirm.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import os
import random
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from common import report
from scipy.stats import betabinom
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import lamina
from lamina.errors import ConfigError
from lamina.monitors.calibration import allowed_positives
from lamina.prediction.calibrate import TextScores, score_texts
from lamina.prediction.evaluate import scoring_groups
from lamina.prediction.reply_file import ReplyColumns, divide, read_labels, replies_of
from lamina.tasks.task import Task
from lamina.train.bank_runner import BankRunner
from lamina.train.options import PassOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lamina.monitors.calibration import Calibration, Unit
    from lamina.prediction.reply_file import LabelledReply
    from lamina.prediction.train_monitor import TrainedMonitor

    Parts = dict[str, list[LabelledReply]]
    Array = np.ndarray[Any, Any]

RATES: tuple[tuple[float, Unit], ...] = ((0.01, "reply"), (0.05, "reply"), (0.2, "1000 tokens"), (0.5, "1000 tokens"))
CONFIDENCE, RESAMPLES, DILUTION = 0.95, 1000, 16
DILUTED = {False: 10, True: 5}  # whether a reply is bad -> diluted replies per split
METHODS = ("monitor", "tf-idf", "length", "last layer, regression")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/halueval/general.jsonl", help="file of replies")
    parser.add_argument("--splits", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="seeds of the divisions")
    parser.add_argument("--choose", type=int, default=3, help="number of splits that choose (default %(default)s)")
    parser.add_argument("--rows", type=int, help="rows, drawn with a fixed seed (default: all)")
    parser.add_argument("--output", type=Path, default=Path("out/halueval-monitor"), help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def folder_of(data: str, rows: int | None, output: Path) -> Path:
    """Return the folder of the results for some rows of a file; another file or number of rows has another folder."""
    digest = hashlib.sha256(Path(data).read_bytes()).hexdigest()[:12]
    folder = output / f"{'all' if rows is None else rows}-rows-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(path: Path, content: bytes) -> None:
    """Write a file that is whole or absent, whenever the run is killed."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_bytes(content)
    temporary.replace(path)


def subset(path: str, rows: int | None, folder: Path) -> str:
    """Return a file with some rows of a JSONL file, drawn with a fixed seed; without `rows`, the file itself."""
    if rows is None:
        return path
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = folder / "replies.jsonl"
    write(chosen, "".join(random.Random(0).sample(lines, rows)).encode())
    return str(chosen)


def embeddings(replies: Sequence[LabelledReply], folder: Path) -> dict[tuple[str, str], Array]:
    """Return (prompt, reply) -> the mean of the last layer's states, computed once and kept in a file."""
    path = folder / "embeddings.npy"
    if not path.exists():
        model, tokenizer = lamina.load("minilm")
        order = sorted(range(len(replies)), key=lambda at: -len(replies[at].prompt + replies[at].reply))
        vectors = np.zeros((len(replies), model.config.hidden_size), np.float32)
        for at in range(0, len(order), 32):
            rows = order[at : at + 32]
            texts = [[getattr(replies[row], side) for row in rows] for side in ("prompt", "reply")]
            batch = tokenizer(*texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
            with torch.inference_mode():
                states = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            vectors[rows] = ((states * mask).sum(1) / mask.sum(1)).numpy()
        buffer = io.BytesIO()
        np.save(buffer, vectors)
        write(path, buffer.getvalue())
    return {(one.prompt, one.reply): own for one, own in zip(replies, np.load(path), strict=True)}


def rivals(parts: Parts, vectors: dict[tuple[str, str], Array]) -> dict[str, list[float]]:
    """Return method -> scores of the test part, for the methods that are not a monitor."""
    bad = [one.positive for one in parts["train"]]
    texts = {part: [f"{one.prompt}\n{one.reply}" for one in own] for part, own in parts.items()}
    words = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True),
        LogisticRegression(class_weight="balanced", max_iter=1000),
    ).fit(texts["train"], bad)
    lengths = {part: [len(one.reply.split()) for one in own] for part, own in parts.items()}
    sign = 1 if roc_auc_score(bad, lengths["train"]) >= 0.5 else -1
    means = {part: np.stack([vectors[one.prompt, one.reply] for one in own]) for part, own in parts.items()}
    regression: Any = None
    best = -1.0
    for strength in (0.001, 0.01, 0.1, 1.0):
        fitted = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000)).fit(means["train"], bad)
        score = roc_auc_score([one.positive for one in parts["choosing"]], fitted.decision_function(means["choosing"]))
        if score > best:
            best, regression = score, fitted
    return {
        "tf-idf": words.decision_function(texts["test"]).tolist(),
        "length": [float(sign * length) for length in lengths["test"]],
        "last layer, regression": regression.decision_function(means["test"]).tolist(),
    }


def diluted(parts: Parts, seed: int) -> tuple[list[tuple[str, str]], list[bool]]:
    """Return replies of the test part among 15 good ones each, with their prompts, and whether each is bad."""
    rng = random.Random(seed)
    good = [one for one in parts["test"] if not one.positive]
    texts, flags = list[tuple[str, str]](), list[bool]()
    for bad, count in DILUTED.items():
        for one in rng.sample([one for one in parts["test"] if one.positive == bad], count):
            others = [other.reply for other in rng.sample(good, DILUTION - 1)]
            others.insert(rng.randrange(DILUTION), one.reply)
            texts.append((one.prompt, "\n\n".join(others)))
            flags.append(bad)
    return texts, flags


def running_scores(monitor: TrainedMonitor, texts: Sequence[tuple[str, str]]) -> TextScores:
    """Return the running scores of replies, given with their prompts."""
    rows = [{"prompt": prompt, "reply": reply, "spans": []} for prompt, reply in texts]
    columns: dict[str, Any] = {"text": "prompt", "text_pair": "reply", "label": "spans", "metric": "accuracy"}
    labels = monitor.bank[monitor.reader].config.head.labels
    parts = {"train": rows, "validation": rows[:1]}
    task = Task.from_dataset("token_classification", parts, labels=labels, name="replies", **columns)
    how = PassOptions.checked("benchmark", batch_size=8, progress=True)
    runner = BankRunner(monitor.bank, "benchmark", None)
    (group,) = scoring_groups(runner, {monitor.reader: task}, "train", how)
    return score_texts(runner, group, task, [monitor], how, finished=not monitor.live)[str(monitor.name)]


def steps(running: Array) -> tuple[int, list[int], list[float]]:
    """Return the number of tokens of a reply, and where its highest score so far rises, and to which value."""
    highest = np.maximum.accumulate(running)
    at = np.flatnonzero(np.diff(highest, prepend=-np.inf) > 0)
    return len(running), at.tolist(), highest[at].tolist()


def joined(rows: Sequence[Any]) -> TextScores:
    """Return the highest scores so far of replies, from what `steps` returned."""
    return TextScores([np.repeat(values, np.diff([*at, tokens])) for tokens, at, values in rows])


def measured(rows: Sequence[Any], bad: Sequence[bool], rate: float, per: Unit, threshold: float | None = None) -> Any:
    """Return the calibration on some replies: with the threshold that guarantees a rate, or with a given one."""
    return joined(rows).calibration(
        bad, rate=rate, per=per, threshold=threshold, confidence=CONFIDENCE, guarantee=threshold is None
    )


def run(data: str, replies: list[LabelledReply], split: int, folder: Path) -> dict[str, Any]:
    """Train a monitor on a split, and return its scores and those of its rivals."""
    parts: Parts = {part: list(own) for part, own in divide(replies, split).items()}
    load, start = os.getloadavg()[0], time.perf_counter()
    cpu = time.process_time()
    found = lamina.monitor(data, model="minilm", positive="yes", rate=0.05, seed=split, anyway=True, progress=True)
    seconds = {"seconds": time.perf_counter() - start, "processor s": time.process_time() - cpu, "load": load}
    texts, flags = diluted(parts, split)
    long = running_scores(found, texts)
    return {
        **seconds,
        "sentences": found.sentences(),
        "candidates": dict(found.candidates),
        "scores": {part: list(own) for part, own in found.scores.items()},
        "running": {part: [steps(own) for own in running] for part, running in found.running.items()},
        "diluted": [[steps(own) for own in long.running], flags],
        "rivals": rivals(parts, embeddings(replies, folder)),
    }


def auroc(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per method: mean AUROC over splits, its spread and its bootstrap interval over replies."""
    rng, rows = np.random.default_rng(0), list[dict[str, Any]]()
    drawn = [
        [rng.integers(len(own["scores"]["test"]), size=len(own["scores"]["test"])) for own in results]
        for _ in range(RESAMPLES)
    ]
    means: dict[str, Array] = {}
    for method in METHODS:
        labels = [np.array([bad for _, bad in own["scores"]["test"]]) for own in results]
        scores = [
            np.array([score for score, _ in own["scores"]["test"]] if method == "monitor" else own["rivals"][method])
            for own in results
        ]
        values = [roc_auc_score(*pair) for pair in zip(labels, scores, strict=True)]
        means[method] = np.array(
            [
                np.mean([roc_auc_score(a[at], b[at]) for a, b, at in zip(labels, scores, rows_of, strict=True)])
                for rows_of in drawn
            ]
        )
        low, high = np.quantile(means[method], [0.025, 0.975])
        ahead = np.quantile(means["monitor"] - means[method], [0.025, 0.975])
        rows.append(
            {
                "method": method,
                "AUROC": statistics.fmean(values),
                "over splits": statistics.stdev(values) if len(values) > 1 else 0.0,
                "interval": f"{low:.3f} to {high:.3f}",
                "monitor ahead by": "" if method == "monitor" else f"{ahead[0]:+.3f} to {ahead[1]:+.3f}",
            }
        )
    return rows


def resampled(
    results: Sequence[dict[str, Any]], rate: float, per: Unit, *, tenths: int
) -> Iterator[tuple[Calibration, Calibration]]:
    """Divide the calibration and test replies anew, 100 times for the splits in turn, and calibrate on some tenths.

    Yields:
        The calibration on these tenths, and the rates on the others with the same threshold.
    """
    rng = np.random.default_rng(0)
    for time_ in range(100 // len(results) * len(results)):
        own = results[time_ % len(results)]
        rows = [row for part in ("calibration", "test") for row in own["running"][part]]
        bad = [flag for part in ("calibration", "test") for _, flag in own["scores"][part]]
        both = np.split(rng.permutation(len(rows)), [math.ceil(len(rows) * tenths / 10)])
        first, second = (([rows[at] for at in part], [bad[at] for at in part]) for part in both)
        chosen = measured(*first, rate, per)
        yield chosen, measured(*second, rate, per, chosen.threshold)


def realised(found: Calibration, per: Unit) -> tuple[float, float]:
    """Return the rate of false alarms in its unit, and the lower end of its interval."""
    if per == "1000 tokens":
        return found.alarms_per_thousand or 0.0, (found.alarms_interval or (0.0, 0.0))[0]
    return found.false_positive_rate, found.false_positive_interval[0]


def promised(results: Sequence[dict[str, Any]], rate: float, per: Unit) -> dict[str, Any]:
    """Return how often the promised rate holds when calibration and test replies are divided anew, 100 times."""
    halves = list(resampled(results, rate, per, tenths=5))
    rates = [realised(found, per)[0] for _, found in halves]
    expected = [  # the rate of the other half, given how many the first half may flag
        betabinom.cdf(
            math.floor(rate * found.negatives + 1e-9), found.negatives, allowed + 1, chosen.negatives - allowed
        )
        for chosen, found in halves
        for allowed in [allowed_positives(chosen.negatives, rate, CONFIDENCE)]
    ]
    rest = list[bool]()
    for tenths in range(1, 5):  # the fewest with enough good replies
        with suppress(ConfigError):
            rest = [realised(found, per)[0] <= rate for _, found in resampled(results, rate, per, tenths=tenths)]
            break
    return {
        "promised": f"{rate:g} per {per}",
        "realised, mean": statistics.fmean(rates),
        "highest": max(rates),
        "inside": f"{sum(value <= rate for value in rates)} of {len(rates)}",
        "in theory": f"{100 * statistics.fmean(expected):.1f} %" if per == "reply" else "",
        "not above": f"{sum(realised(found, per)[1] <= rate for _, found in halves)} of {len(rates)}",
        "inside, rest": f"{sum(rest)} of {len(rest)}",
        "recall, mean": statistics.fmean(found.recall for _, found in halves),
    }


def dilution(results: Sequence[dict[str, Any]], rate: float, per: Unit) -> dict[str, Any]:
    """Return the rates on diluted replies, with the thresholds of the calibration parts."""
    # every split has a threshold of its own, so scores are shifted to a common one of 0
    shifted, bads = list[Any](), list[bool]()
    for own in results:
        bad = [flag for _, flag in own["scores"]["calibration"]]
        threshold = measured(own["running"]["calibration"], bad, rate, per).threshold
        rows, flags = own["diluted"]
        shifted += [(tokens, at, [value - threshold for value in values]) for tokens, at, values in rows]
        bads += flags
    found = measured(shifted, bads, rate, per, 0.0)
    (low, high), (least, most) = found.false_positive_interval, found.recall_interval
    few, many = found.alarms_interval
    return {
        "promised": f"{rate:g} per {per}",
        "flagged of diluted good replies": f"{found.false_positive_rate:.3f} ({low:.3f} to {high:.3f})",
        "good": found.negatives,
        "false alarms per 1000 tokens": f"{found.alarms_per_thousand:.3f} ({few:.3f} to {many:.3f})",
        "flagged of diluted bad ones": f"{found.recall:.3f} ({least:.3f} to {most:.3f})",
        "bad": found.positives,
    }


def candidates(results: Sequence[dict[str, Any]], choose: int) -> list[dict[str, Any]]:
    """Return a row per candidate, best first: mean AUROC on the splits that choose, and on those that confirm."""
    rows = []
    for name in results[0]["candidates"]:
        values = [own["candidates"][name] for own in results]
        spread = statistics.stdev(values[:choose]) if len(values[:choose]) > 1 else 0.0
        confirmed = statistics.fmean(values[choose:]) if values[choose:] else float("nan")
        chosen = {"choosing": statistics.fmean(values[:choose]), "over splits": spread}
        rows.append({"candidate": name, **chosen, "confirming": confirmed})
    return sorted(rows, key=lambda row: -row["choosing"])


def main() -> None:
    """Run the splits that are missing, and print the tables."""
    given = options()
    _, tokenizer = lamina.load("minilm")
    folder = folder_of(given.data, given.rows, given.output)
    data = subset(given.data, given.rows, folder)
    replies, _ = replies_of(read_labels(data, ReplyColumns(), "yes"), tokenizer)
    results = []
    for split in given.splits:
        path = folder / f"split-{split}.json"
        if not path.exists():
            write(path, json.dumps(run(data, replies, split, folder)).encode())
        results.append(json.loads(path.read_text()))
    times = [
        {"split": split, **{name: own[name] for name in ("seconds", "processor s", "load")}}
        for split, own in zip(given.splits, results, strict=True)
    ]
    tables: dict[str, list[dict[str, Any]]] = {
        "auroc": auroc(results),
        "promised": [promised(results, *rate) for rate in RATES],
        "dilution": [dilution(results, *rate) for rate in RATES],
        "candidates": candidates(results, given.choose),
        "times": times,
    }
    sentences = {f"split {split}": own["sentences"] for split, own in zip(given.splits, results, strict=True)}
    if given.json:
        print(json.dumps({**tables, "sentences": sentences}, indent=1))
        return
    for rows in tables.values():
        report(rows, as_json=False)
        print()
    for split, own in sentences.items():
        print(f"{split}: {own}")


if __name__ == "__main__":
    main()
