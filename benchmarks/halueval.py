"""How well readers find hallucinated chat replies, and the hallucinated spans in them, compared with the text alone.

    python benchmarks/halueval.py [--data ../shared/data/halueval/general.jsonl] [--seeds 1] [--epochs 6] [--json]

HaluEval's 4,507 chat replies (Li et al. 2023, arXiv:2305.11747) are split once: 60 % for training, 10 % for the choice
of the epoch, 30 % for scores. Three readers of a frozen MiniLM are trained in the same passes. Two predict whether a
reply has a hallucination: one reads the tokens of the reply only, the other compares prompt and reply. The third
predicts the spans. The baselines are trained on the same rows: a logistic regression on word counts (tf-idf of words
and pairs of words), and the length of the reply. Recall is measured at the lowest threshold that at most 1 % or 5 % of
the replies without a hallucination reach. Its intervals are those of Clopper and Pearson; the intervals of AUROC and
span F1 are bootstrap intervals over rows (95 %). A second table compares each reader's AUROC, the mean over seeds, with
that of each baseline on the same rows; a row that is drawn is drawn for both, so the intervals are paired.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline

import lamina
from lamina import PooledLayers, Reader, SequenceClassification, Task
from lamina.data.read import read_table
from lamina.monitors import Calibration
from lamina.tasks.metrics import score_tags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Rows = list[dict[str, Any]]
    Scores = Sequence[float]

RATES = (0.01, 0.05)  # of false positives
SHARES = (0.6, 0.1)  # of the rows: to learn from, to choose the epoch by; the rest is scored
RESAMPLES = 1000


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", default="../shared/data/halueval/general.jsonl", help="the file of replies (default %(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs of the readers (default 1)")
    parser.add_argument("--epochs", type=int, default=6, help="of the readers (default 6)")
    parser.add_argument("--limit", type=int, help="rows, to try it out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


def split(path: str, limit: int | None) -> dict[str, Rows]:
    """Return part -> rows, the same in every run."""
    table = read_table(path)
    rows = [{name: cells[at] for name, cells in table.columns.items()} for at in range(len(table))]
    random.Random(0).shuffle(rows)
    rows = rows[:limit]
    first, second = (round(len(rows) * share) for share in np.cumsum(SHARES))
    return {"train": rows[:first], "validation": rows[first:second], "test": rows[second:]}


def resampled(measure: Callable[[np.ndarray[Any, Any]], float], rows: int) -> np.ndarray[Any, Any]:
    """Return `measure`, a function of the indices of drawn rows, for each resample; every call draws the same rows."""
    rng = np.random.default_rng(0)
    return np.array([measure(rng.integers(rows, size=rows)) for _ in range(RESAMPLES)])


def interval(values: np.ndarray[Any, Any]) -> list[float]:
    """Return the bootstrap interval of a measure from its values in the resamples."""
    return np.quantile(values, [0.025, 0.975]).tolist()


def ranking(scores: Scores, rows: Rows) -> dict[str, Any]:
    """Return how well scores separate replies with a hallucination from the others: AUROC and recalls."""
    made_up, values = np.array([row["hallucination"] == "yes" for row in rows]), np.array(scores)
    drawn = resampled(lambda at: float(roc_auc_score(made_up[at], values[at])), len(rows))
    found: dict[str, Any] = {"auroc": float(roc_auc_score(made_up, values)), "auroc_interval": interval(drawn)}
    found["resamples"] = drawn  # for `compared`
    for rate in RATES:
        chosen = Calibration.of(values.tolist(), made_up.tolist(), false_positive_rate=rate)
        name = f"recall_at_{rate:.0%}".rstrip("%")
        found |= {name: chosen.recall, f"{name}_interval": list(chosen.recall_interval)}
    return found


def compared(table: Rows) -> Rows:
    """Return a row per reader and baseline: by how much the reader's AUROC, the mean over seeds, is ahead."""
    runs: dict[str, Rows] = {}
    for row in table:
        if "resamples" in row:
            runs.setdefault(row["method"], []).append(row)
    found = []
    for reader, own in runs.items():
        for baseline, (other, *_) in runs.items():
            if own[0]["seed"] is not None and other["seed"] is None:
                ahead = np.mean([row["auroc"] for row in own]) - other["auroc"]
                drawn = np.mean([row["resamples"] for row in own], axis=0) - other["resamples"]
                values = {"ahead": float(ahead), "ahead_interval": interval(drawn)}
                found.append({"reader": reader, "seeds": len(own), "baseline": baseline, **values})
    return found


def baselines(parts: dict[str, Rows]) -> dict[str, dict[str, Any]]:
    """Return name -> scores of the baselines, which see the text alone."""
    reads = {
        "tf-idf of the reply": lambda row: row["chatgpt_response"],
        "tf-idf of query and reply": lambda row: f"{row['user_query']} {row['chatgpt_response']}",
    }
    made_up = [row["hallucination"] == "yes" for row in parts["train"]]
    found: dict[str, dict[str, Any]] = {}
    for name, read in reads.items():
        model = make_pipeline(
            TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True),
            LogisticRegression(class_weight="balanced", max_iter=1000),
        )
        model.fit([read(row) for row in parts["train"]], made_up)
        found[name] = ranking(model.decision_function([read(row) for row in parts["test"]]), parts["test"])
    lengths = {part: [len(row["chatgpt_response"].split()) for row in rows] for part, rows in parts.items()}
    sign = 1 if roc_auc_score(made_up, lengths["train"]) >= 0.5 else -1  # which of long and short is suspect
    found["length of the reply"] = ranking([sign * length for length in lengths["test"]], parts["test"])
    return found


def readers(parts: dict[str, Rows], seed: int, epochs: int) -> dict[str, dict[str, Any]]:
    """Train three readers in the same passes, and return name -> their scores on the test rows."""
    columns: dict[str, Any] = {"text": "user_query", "text_pair": "chatgpt_response"}
    whether = Task.from_dataset(
        "sequence_classification", parts, label="hallucination", labels=["no", "yes"], metric="auroc", **columns
    )
    where = Task.from_dataset(
        "token_classification", parts, label="hallucination_spans", missing_labels="ignore", **columns
    )
    model, tokenizer = lamina.load("minilm")
    bank = lamina.ReaderBank(model, processor=tokenizer)
    head = SequenceClassification(whether.labels, pooling="first")
    bank.add("reply", Reader(PooledLayers(over="second"), head, seed=seed))
    bank.add("pair", Reader(Reader.default(whether).fusion, head, seed=seed))
    default = Reader.default(where)
    bank.add("where", Reader(default.fusion, default.head, seed=seed))
    tasks = {"reply": whether, "pair": whether, "where": where}
    how: dict[str, Any] = {"learning_rate": 1e-3, "schedule": "linear", "max_length": 256, "cache": "on", "seed": seed}
    lamina.fit(bank, tasks, epochs=epochs, batch_size=32, progress=True, **how)
    answers = lamina.predict(bank, [(row["user_query"], row["chatgpt_response"]) for row in parts["test"]])
    found: dict[str, dict[str, Any]] = {
        f"reader of the {name}": ranking([answer[name]["probabilities"]["yes"] for answer in answers], parts["test"])
        for name in ("reply", "pair")
    }
    found["reader of spans"] = spans([answer["where"] for answer in answers], where)
    return found


def spans(answers: list[list[dict[str, Any]]], task: Task) -> dict[str, Any]:
    """Return the span F1 over the replies whose labelled spans all occur in their text."""
    test = task.split("test")
    number = {label: at for at, label in enumerate(task.labels)}
    tags = []
    for words, own in zip(test.words or (), answers, strict=True):
        inside = {
            word: ("I" if word[0] > span["start"] else "B") + f"-{span['label']}"
            for span in own
            for word in words
            if span["start"] <= word[0] < span["end"]
        }
        tags.append([number[inside.get(word, "O")] for word in words])
    both = [(guess, truth) for guess, truth in zip(tags, test.labels, strict=True) if -100 not in truth]

    def f1(at: Sequence[int] | np.ndarray[Any, Any]) -> float:
        drawn = [both[row] for row in at]
        return score_tags(["span_f1"], [one for one, _ in drawn], [one for _, one in drawn], task.labels)["span_f1"]

    rng = np.random.default_rng(0)
    drawn = [f1(rng.integers(len(both), size=len(both))) for _ in range(RESAMPLES // 10)]
    return {"span_f1": f1(range(len(both))), "span_f1_interval": interval(np.array(drawn))}


def main() -> None:
    """Train, score and print."""
    given = options()
    parts = split(given.data, given.limit)
    counts = {
        part: f"{len(rows)} ({sum(r['hallucination'] == 'yes' for r in rows)} yes)" for part, rows in parts.items()
    }
    table = [{"method": name, "seed": None, **scores} for name, scores in baselines(parts).items()]
    for seed in range(given.seeds):
        found = readers(parts, seed, given.epochs)
        table += [{"method": name, "seed": seed, **scores} for name, scores in found.items()]
    ahead = compared(table)
    for row in table:
        row.pop("resamples", None)
    if given.json:
        print(json.dumps({"rows": counts, "table": table, "ahead": ahead}))
        return
    print(", ".join(f"{part}: {count}" for part, count in counts.items()))
    columns = ("auroc", "recall_at_1", "recall_at_5", "span_f1")
    print(f"| method | seed | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for row in table:
        cells = [_cell(row, name) for name in columns]
        print(f"| {row['method']} | {'' if row['seed'] is None else row['seed']} | {' | '.join(cells)} |")
    print("\n| reader | seeds | baseline | the reader is ahead by |\n|---|---|---|---|")
    for row in ahead:
        low, high = row["ahead_interval"]
        by = f"{row['ahead']:+.3f} ({low:+.3f} to {high:+.3f})"
        print(f"| {row['reader']} | {row['seeds']} | {row['baseline']} | {by} |")


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return ""
    low, high = row[f"{name}_interval"]
    return f"{row[name]:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
