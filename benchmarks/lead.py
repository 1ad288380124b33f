"""Lead-3: ROUGE of the first three sentences of each article of CNN/DailyMail, which checks the metric of summaries.

    python benchmarks/lead.py --data ../shared/data [--rows 300] [--json]

A row per metric, in percent: Lamina's score; and where Google's package is installed (`pip install rouge-score`), its
score with a sentence per line, and with each text on one line. Only rougeLsum looks at sentences. The subfolder
cnn_dailymail of the data has articles.csv, with the columns article and highlights.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from common import report

from lamina.tasks.metrics import _SENTENCES, score_texts

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def main() -> None:
    """Score the first sentences of the articles, and print a row per metric."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the subfolder cnn_dailymail")
    parser.add_argument("--rows", type=int, help="number of articles, from the first (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    leads, references = _texts(arguments.data / "cnn_dailymail" / "articles.csv", arguments.rows)
    ours = score_texts(METRICS, ["\n".join(lead) for lead in leads], references)
    google, joined = {}, {}
    if find_spec("rouge_score"):
        google = _google(["\n".join(lead) for lead in leads], references)
        joined = _google([" ".join(lead) for lead in leads], [" ".join(_sentences(text)) for text in references])
    rows = [
        {
            "metric": metric,
            "articles": len(leads),
            "ours": 100 * ours[metric],
            "Google's": 100 * google[metric] if google else "",
            "Google's, one line": 100 * joined[metric] if joined else "",
        }
        for metric in METRICS
    ]
    report(rows, as_json=arguments.json)


def _texts(path: Path, most: int | None) -> tuple[list[list[str]], list[str]]:
    """Return the first three sentences of each article, and the summaries, in which each line is a sentence."""
    csv.field_size_limit(1 << 30)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(islice(csv.DictReader(file), most))
    return [_sentences(row["article"])[:3] for row in rows], [row["highlights"] for row in rows]


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text, as ROUGE-Lsum divides it."""
    return [sentence.strip() for sentence in _SENTENCES.split(text) if sentence and sentence.strip()]


def _google(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Return the mean F-measures by Google's package, which takes each line for a sentence."""
    scorer: Any = import_module("rouge_score.rouge_scorer").RougeScorer(list(METRICS), use_stemmer=True)
    scores = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return {metric: statistics.fmean(score[metric].fmeasure for score in scores) for metric in METRICS}


if __name__ == "__main__":
    main()
