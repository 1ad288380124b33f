"""How far one text travels: the files and functions that `lamina.predict` enters, beside other libraries, and its time.

    python benchmarks/call_depth.py [--list] [--json]

Each row is one call that predicts for one short text with MiniLM, after a first call: the number of source files and
of functions of the named library that the call enters, counted with `sys.setprofile`, and the median processor time of
a call. Lamina's reader is trained on two rows first, because `predict` checks more for a trained reader. The call of
sentence-transformers is left out if the library is not installed. `--list` prints the functions of Lamina by file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from common import bank_of, report
from transformers import pipeline

import lamina

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

TEXT = "A film that is as good as its actors."
WARM_UPS = 20


def entered(call: Callable[[], object], package: str) -> dict[str, set[tuple[str, int]]]:
    """Return the functions of a package that `call` enters: file -> their qualified names and first lines.

    Functions that other threads enter count too, and so do comprehensions up to Python 3.11.
    """
    folder = str(Path(sys.modules[package].__file__ or "").parent) + "/"
    functions: dict[str, set[tuple[str, int]]] = {}

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            functions.setdefault(code.co_filename.removeprefix(folder), set()).add(
                (code.co_qualname, code.co_firstlineno)
            )

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return functions


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median processor time of a call in milliseconds; it depends little on other work of the machine."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(1000 * (time.process_time() - start))
    return statistics.median(times)


def calls() -> dict[tuple[str, str], Callable[[], object]]:
    """Return (what is called, package whose functions count) -> the call."""
    model, tokenizer = lamina.load("minilm")
    bank = bank_of(model, 1, "pooled_layers", tokenizer)
    rows = [{"text": TEXT, "label": "yes"}, {"text": "A film that is too long.", "label": "no"}]
    task = lamina.Task.from_dataset("sequence_classification", {"train": rows}, text="text", label="label")
    lamina.fit(bank, {"r0": task}, epochs=1, keep="last", progress=False)
    bank.eval()
    whole = lamina.load("minilm", head="sequence_classification", labels=["no", "yes"])[0].eval()
    classifier: Any = pipeline("text-classification", model=whole, tokenizer=tokenizer, device="cpu")
    made: dict[tuple[str, str], Callable[[], object]] = {
        ("lamina.predict, one reader", "lamina"): lambda: lamina.predict(bank, [TEXT]),
        ("transformers' pipeline", "transformers"): lambda: classifier([TEXT]),
    }
    if find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            encoder = SentenceTransformer(folder, device="cpu")
        made["sentence-transformers' encode", "sentence_transformers"] = lambda: encoder.encode([TEXT])
    return made


def main() -> None:
    """Count, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--list", action="store_true", help="print the functions of Lamina that one text enters")
    parser.add_argument("--repeats", type=int, default=200, help="number of measured calls (default %(default)s)")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for (what, package), call in calls().items():
        for _ in range(WARM_UPS):
            call()
        functions = entered(call, package)
        if asked.list and package == "lamina":
            for file, names in sorted(functions.items()):
                print(f"{file} ({len(names)})", *sorted(name for name, _ in names), sep="\n    ")
        count = sum(map(len, functions.values()))
        rows.append(
            {"call": what, "files": len(functions), "functions": count, "CPU ms": milliseconds(call, asked.repeats)}
        )
    report(rows, as_json=asked.json)


if __name__ == "__main__":
    main()
