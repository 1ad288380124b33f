"""Eight answers about one text, from the string to the labels: Lamina and what else people use, on MiniLM, one thread.

    python benchmarks/latency_rivals.py [--json] [--repeats 31] [--words 6 30 126]

All rows read the same text, tokenise it and return eight labels. `ratio` is the time over that of the bare model on the
tokenised text, measured in turn.

    lamina               `lamina.predict` with 8 readers of whole texts, in PyTorch
    lamina, onnx         the same with `backend="onnx"`
    embedding + sklearn  one embedding of sentence-transformers, and 8 logistic regressions of scikit-learn
    setfit               8 SetFit models, as SetFit trains one per task: 8 embeddings, each with a regression
    pipelines            8 pipelines of transformers, one model per task
    pipelines, onnx      8 exports of these models in onnxruntime, with their tokenizer

The rivals' eight models share their weights in memory here, which is kinder to them than eight trained models would be.
SetFit's row is computed with sentence-transformers and scikit-learn, which are what its models consist of.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import torch
from common import bank_of, report
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from transformers import pipeline

import lamina
from lamina.demo.timing import in_turn, ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

TASKS = 8
LABELS = ["no", "yes"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=31, help="number of measured runs (default %(default)s)")
    parser.add_argument("--words", type=int, nargs="+", default=[6, 30, 126], help="words of the text, one token each")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = lamina.load("minilm")
    ways = {**_lamina(model, tokenizer), **_embeddings(model, tokenizer), **_pipelines(tokenizer)}
    rows: list[dict[str, Any]] = []
    for words in asked.words:
        text = " ".join(["film"] * words)
        inputs = tokenizer([text], return_tensors="pt")
        runs: dict[str, Callable[[], object]] = {"base": lambda inputs=inputs: model(**inputs)}
        runs.update({name: lambda way=way, text=text: way(text) for name, way in ways.items()})
        with torch.inference_mode():
            taken = in_turn(runs, repeats=asked.repeats)
        rows += [
            {
                "tokens": inputs["input_ids"].shape[1],
                "way": name,
                "ms": 1000 * statistics.median(taken[name]),
                "ratio": ratio(taken, name, to="base"),
            }
            for name in runs
        ]
    report(rows, as_json=asked.json)


def _lamina(model: PreTrainedModel, tokenizer: Any) -> dict[str, Callable[[str], object]]:
    """Return the two rows of a bank with eight readers."""
    bank = bank_of(model, TASKS, "pooled_layers", tokenizer)
    return {
        "lamina": lambda text: lamina.predict(bank, [text], backend="torch"),
        "lamina, onnx": lambda text: lamina.predict(bank, [text], backend="onnx"),
    }


def _embeddings(model: PreTrainedModel, tokenizer: Any) -> dict[str, Callable[[str], object]]:
    """Return the rows that compute an embedding: one for all tasks, and one for each task as SetFit does."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        encoder = SentenceTransformer(folder, device="cpu")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, model.config.hidden_size))
    heads = [LogisticRegression().fit(rows, rng.integers(0, 2, 64)) for _ in range(TASKS)]

    def once(text: str) -> list[Any]:
        embedding = encoder.encode([text], show_progress_bar=False)
        return [head.predict(embedding)[0] for head in heads]

    def for_each(text: str) -> list[Any]:
        return [head.predict(encoder.encode([text], show_progress_bar=False))[0] for head in heads]

    return {"embedding + sklearn": once, "setfit": for_each}


def _pipelines(tokenizer: Any) -> dict[str, Callable[[str], object]]:
    """Return the rows of one whole model per task, in PyTorch and in onnxruntime."""
    whole = lamina.load("minilm", head="sequence_classification", labels=LABELS)[0].eval()
    classifier: Any = pipeline("text-classification", model=whole, tokenizer=tokenizer, device="cpu")
    session = _exported(whole, dict(tokenizer(["a text"], return_tensors="pt")))

    def in_onnx(text: str) -> str:
        inputs = dict(tokenizer([text], return_tensors="np"))
        return LABELS[int(session.run(None, inputs)[0].argmax())]

    return {
        "pipelines": lambda text: [classifier([text]) for _ in range(TASKS)],
        "pipelines, onnx": lambda text: [in_onnx(text) for _ in range(TASKS)],
    }


def _exported(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Any:
    """Return a session of onnxruntime, with one thread, that runs a classifier on texts of any length."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(inputs, values, strict=True))).logits

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    with TemporaryDirectory() as folder:
        file = Path(folder, "model.onnx")
        torch.onnx.export(
            Logits(),
            tuple(inputs.values()),
            file,
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_axes={name: {0: "batch", 1: "tokens"} for name in inputs},
            dynamo=False,
        )
        return onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
