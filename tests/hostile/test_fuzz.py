"""Every format that Lamina reads, mutated: one error of ours, or a result that works; never anything else, never long.

A few mutations of each in every run, the same ones each time; HYPOTHESIS_PROFILE=long tries thousands of new ones.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.portions import one_in
from tests.support.stored import logits, tiny_bank, tiny_model, tiny_tokenizer
from transformers.utils import logging as transformers_logging

import lamina
from lamina.cli.cache_command import _facts, _row
from lamina.data.disk_cache import entries, publish
from lamina.data.read import read_chunks, read_table
from lamina.errors import LaminaError
from lamina.prediction.bulk import Partial
from lamina.recipes.schema import load_recipe
from lamina.store import load, load_bank, save, save_bank
from lamina.train.checkpoint import PROGRESS, TENSORS, Checkpoints

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
LIMIT_S = 20  # of processor time, for one file
RUN: dict[str, Any] = {"epochs": {"mood": 1}, "seed": 0}
RECIPE: dict[str, Any] = {
    "model": "minilm",
    "seeds": [0, 1],
    "fit": {"epochs": 2, "learning_rate": 0.001, "schedule": "linear"},
    "tasks": {
        "film": {
            "files": {"train": "train.tsv", "validation": ["a.tsv"]},
            "text": "sentence",
            "labels": ["a", "b"],
            "readers": {"a": {"fusion": {"name": "ada_layers", "dim": 8}, "grid": {"alpha": [1, 2]}}},
        }
    },
}
ROWS: dict[str, Any] = {"text": ["the film", "bad", "ü"], "label": ["a", "b", "a"]}


def make(folder: Path) -> None:
    """A file of every format."""
    save_bank(tiny_bank(), folder / "bank")
    lamina.insert_(model := tiny_model(), "ffn")
    lamina.freeze_(model, [1])
    save(model, folder / "inserted", tiny_tokenizer())
    progress = {"steps": 1, "history": [{"epoch": 1}], "learners": {"mood": {"best": 0.5}}}
    Checkpoints(folder / "checkpoints", "fit", RUN).save(1, {"weights": torch.zeros(3)}, progress)
    (entry := folder / "cache" / f".{'0' * 32}.new").mkdir(parents=True)
    (entry / "main.bin").write_bytes(b"\0" * 64)
    publish(entry, {"model": "base", "rows": 2, "tokens": 8, "layers": {"main": [0, 1]}, "dtype": "float16"})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "a.csv").write_text('text,label\n"the film, ""good""",a\nbad,b\n')
    (folder / "a.tsv").write_text("text\tlabel\nthe film\ta\nbad\tb\n")
    (folder / "a.jsonl").write_text('{"text": "the film", "label": "a"}\n{"text": "bad", "label": {"x": [1]}}\n')
    (folder / "a.conll").write_text("the O\nParis B-LOC\n\nAnna B-PER\n")
    pq.write_table(pa.table(ROWS), folder / "a.parquet")
    with Partial.open(folder / "answers.jsonl", {"source": "a.csv"}, resume=True) as partial:
        partial.add([{"row": 1}], read=1)


def open_bank(folder: Path) -> None:
    bank = load_bank(folder / "bank", tiny_model(), tiny_tokenizer())
    assert all(scores.isfinite().all() for scores in logits(bank).values())


def open_model(folder: Path) -> None:
    model, _ = load(folder / "inserted")
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def open_checkpoint(folder: Path) -> None:
    state = Checkpoints(folder / "checkpoints", "fit", RUN).begin(resume=True)
    assert state is not None
    assert isinstance(state[1], dict)


def open_cache(folder: Path) -> None:
    assert all(isinstance(_row(entry), tuple) and _facts(entry) for entry in entries(folder / "cache"))


def open_table(name: str) -> Callable[[Path], None]:
    def opened(folder: Path) -> None:
        table = read_table(folder / name)
        assert {len(cells) for cells in table.columns.values()} <= {len(table)}
        assert sum(len(chunk) for chunk in read_chunks(folder / name, rows=1)) == len(table)

    return opened


READER = "bank/readers/mood"


def open_partial(folder: Path) -> None:
    with Partial.open(folder / "answers.jsonl", {"source": "a.csv"}, resume=True) as partial:
        assert partial.rows >= 0


# The file that is mutated -> what opens it
FORMATS: dict[str, Callable[[Path], None]] = {
    **dict.fromkeys(("bank/lamina.json", f"{READER}/reader.json", f"{READER}/model.safetensors"), open_bank),
    **dict.fromkeys(("inserted/lamina_edits.json", "inserted/config.json", "inserted/model.safetensors"), open_model),
    **dict.fromkeys(("inserted/tokenizer.json", "inserted/tokenizer_config.json"), open_model),
    **dict.fromkeys((f"checkpoints/checkpoint-1/{PROGRESS}", f"checkpoints/checkpoint-1/{TENSORS}"), open_checkpoint),
    f"cache/{'0' * 32}/index.json": open_cache,
    "recipe.yaml": lambda folder: load_recipe(folder / "recipe.yaml"),
    **{name: open_table(name) for name in ("a.csv", "a.tsv", "a.jsonl", "a.conll", "a.parquet")},
    ".answers.jsonl.partial.json": open_partial,
}


# Mutations

PLAIN = [None, True, -1, 0, 7, 0.5, "", "x", "O", "1", [], {}, [[]], {"a": 1}, ["x"], "ü\n\t\0"]
LARGE = [2**63, -(2**70), 1e308, float("nan"), float("inf"), "x" * 5000, "\ud800", [0] * 1000]  # config.json is spared


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values of a JSON document are."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def mutated(document: Any, random: random.Random, values: list[Any]) -> Any:
    """A document with one value replaced, removed, doubled or added."""
    *parents, key = random.choice([place for place in places(document) if place] or [("",)])
    holder = document
    for parent in parents:
        holder = holder[parent]
    if not isinstance(holder, dict | list):
        return random.choice(values)
    how = random.choice(("replace", "replace", "replace", "remove", "double", "whole"))
    if how == "replace":
        holder[key] = random.choice(values)
    elif how == "remove":
        del holder[key]
    elif how == "double" and isinstance(holder, dict):
        holder[f"{key}_"] = holder[key]
    elif how == "double":
        holder.append(holder[key])
    return random.choice(values) if how == "whole" and random.random() < 0.2 else document


def cut(content: bytes, random: random.Random) -> bytes:
    """Content with bytes changed, cut out, doubled or put in."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((1, 4, 40)))
        data[at:end] = random.choice(
            (b"", bytes(data[at:end]) * 2, random.randbytes(end - at), b"\xff", b'"', b"{[" * 20)
        )
    return bytes(data)


def with_header(content: bytes, random: random.Random) -> bytes:
    """A safetensors file whose header is another."""
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(mutated(json.loads(content[8 : 8 + size]), random, PLAIN + LARGE)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def mutate(name: str, content: bytes, random: random.Random) -> bytes:
    values = PLAIN if name.endswith("config.json") else PLAIN + LARGE
    if random.random() < 0.25 or name.endswith((".csv", ".tsv", ".conll", ".parquet")):
        return cut(content, random)
    if name.endswith(".safetensors"):
        return with_header(content, random)
    if name.endswith(".yaml"):
        return yaml.dump(mutated(yaml.safe_load(content), random, values)).encode("utf-8", "surrogatepass")
    if name.endswith(".jsonl"):
        lines = [json.dumps(mutated(json.loads(line), random, values)) for line in content.splitlines()]
        return "\n".join(lines).encode()
    document = json.loads(content)
    for _ in range(random.choice((1, 1, 2))):
        document = mutated(document, random, values) if isinstance(document, dict | list) else document
    return json.dumps(document).encode()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    transformers_logging.disable_progress_bar()
    make(folder := tmp_path_factory.mktemp("made"))
    yield folder
    transformers_logging.enable_progress_bar()


def test_what_is_not_mutated_opens(made: Path, tmp_path: Path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for opened in FORMATS.values():
        opened(tmp_path)


@pytest.mark.parametrize("name", one_in(2, FORMATS))
@settings(
    max_examples=2000 if LONG else 2,
    derandomize=not LONG,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(seed=st.integers(0, 2**64))
def test_a_mutated_file_is_refused_or_works(name: str, made: Path, tmp_path: Path, seed: int):
    shutil.rmtree(tmp_path)
    shutil.copytree(made, tmp_path)
    (tmp_path / name).write_bytes(mutate(name, (made / name).read_bytes(), random.Random(seed)))
    start = time.process_time()
    with suppress(LaminaError):
        FORMATS[name](tmp_path)
    assert time.process_time() - start < LIMIT_S
