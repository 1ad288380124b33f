"""Every command with every kind of bad file ends with one sentence and 2; with --json it prints nothing but JSON."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.stored import save_base, tiny_bank, tiny_model, tiny_tokenizer
from transformers import BertForSequenceClassification
from transformers.utils import logging as transformers_logging

import lamina
from lamina.cli import command_line
from lamina.data.disk_cache import publish
from lamina.store import load, save, save_bank

TRAIN = ("train", "--overwrite", "films.yaml", "--data", ".", "-o", "out")
METHOD = ("train", "--overwrite", "method.yaml", "--data", ".", "-o", "tuned")
FILE = ("predict", "bank", "--file", "texts.jsonl", "-o", "answers.jsonl")
SERVE = ("serve", "bank", "--port", "0")
EXPORT = ("export", "bank", "alone", "--format", "torch", "--reader", "mood")
GRAPH = ("export", "bank", "graph")
MONITOR = ("monitor", "train.tsv", "--model", "base", "--positive", "bad", "--reply", "sentence", "--label", "label")
EDIT = ("edit", "base", "--freeze", "1", "-o", "edited")
PLAN = ("edit", "base", "--plan", "plan.yaml", "-o", "edited")
LEAST = ("edit", "moods", "--drop", "auto:1", "--task", "film.yaml", "--data", ".", "-o", "edited")
EXTRACT = ("extract", "base", "texts.txt", "-o", "states")
PROBES = ("bench", "probes", "--model", "base", "--data", "sets", "--no-progress")
EVALUATE = ("evaluate", "bank", "--task", "mood=train.tsv")
SCORE = ("evaluate", "bank", "train.tsv", "--text", "sentence", "--label", "label")
STUDY = ("study", "--overwrite", "similarity", "study.yaml", "--data", ".", "--no-progress", "-o", "seen")
CELLS = ("study", "removal", "study.yaml", "--data", ".", "--no-progress", "-o", "cells")
REPORT = ("report", "out")
PAGE = ("report", "out", "seen", "-o", "page.html")
DEMO = ("demo", "-o", "demo", "--rows", "48", "--epochs", "1")
ENTRY = f"cache/{'0' * 32}"
ROWS = "sentence\tlabel\n" + "the film is bad .\tbad\nthe film is good .\tgood\n" * 2
build = functools.cache(command_line.build)  # building all commands takes longer than running most of them
CELL = hashlib.blake2b(json.dumps({"seed": 0, "task": "film"}).encode(), digest_size=16).hexdigest()
RECIPE = "model: base\nfit: {epochs: 1, batch_size: 8, progress: false}\ntasks:\n  film:\n    text: sentence\n"
RECIPE += "    files: {train: train.tsv, validation: train.tsv}\n"


def make(folder: Path) -> None:
    """Something of everything that a command reads."""
    save_base(folder / "base")
    save_bank(tiny_bank(load(folder / "base")[0]), folder / "bank")
    manifest = folder / "bank" / "lamina.json"
    manifest.write_text(manifest.read_text().replace(str(folder / "base"), "base"))
    labels: Any = {"id2label": {0: "bad", 1: "good"}}
    save(tiny_model(3, BertForSequenceClassification, **labels), folder / "moods", tiny_tokenizer())
    model, tokenizer = load(folder / "base")
    lamina.insert_(model, "ffn")
    save(model, folder / "inserted", tokenizer)
    (folder / "train.tsv").write_text(ROWS)
    (folder / "learnt.tsv").write_text(ROWS)
    figure = "figure: {x: epoch}\n"
    (folder / "films.yaml").write_text(
        f"{figure}{RECIPE}    readers: {{a: {{fusion: last_layer, head: {{pooling: mean}}}}}}\n"
    )
    (folder / "method.yaml").write_text(f"{RECIPE}methods: {{plain: {{}}}}\n")
    tasks = RECIPE.partition("\n")[2].partition("\n")[2]
    options = "studies: {similarity: {minibatch: 4}, removal: {seeds: [0], epochs: 1}}\n"
    (folder / "study.yaml").write_text(f"model: base\ntexts: {{task: film}}\n{options}{tasks}")
    (folder / "plan.yaml").write_text("edits: [{drop: {layers: 1}}]\n")
    (folder / "film.yaml").write_text("text: sentence\nfiles: {train: train.tsv, validation: train.tsv}\n")
    (folder / "texts.txt").write_text("the film\nbad\n")
    (folder / "texts.csv").write_text('text\n"the film"\n')
    (folder / "texts.jsonl").write_text('{"text": "the film"}\n{"text": "bad"}\n')
    pq.write_table(pa.table({"text": ["the film", "bad"]}), folder / "texts.parquet")
    entry = folder / "cache" / f".{'0' * 32}.new"
    entry.mkdir(parents=True)
    (entry / "main.bin").write_bytes(b"\0" * 64)
    publish(entry, {"model": "base", "rows": 2, "tokens": 8, "layers": {"main": [0, 1]}, "dtype": "float16"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of `make`, where a recipe of each kind was run and a prediction was ended early."""
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    transformers_logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for arguments in (TRAIN, METHOD, FILE, STUDY, CELLS):
            assert run(*arguments).code == 0
        run(*FILE[:-1], "bad.jsonl", "--file", "ended.jsonl")
    yield folder
    transformers_logging.enable_progress_bar()


@pytest.fixture
def world(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the working folder as `made` is."""

    def reset() -> None:
        monkeypatch.chdir("/")
        shutil.rmtree(tmp_path)
        shutil.copytree(made, tmp_path)
        monkeypatch.chdir(tmp_path)

    return reset


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def is_one_sentence(self) -> bool:
        lines = self.err.splitlines()
        return self.code == 2 and self.out == "" and len(lines) == 1 and lines[0].startswith("error: ")


def run(*arguments: str) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        build().main(args=list(arguments), prog_name="lamina")
    return Ran(int(ended.value.code or 0), out.getvalue(), err.getvalue())


# What may be wrong with a file


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def put(path: Path, content: bytes) -> None:
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def link(path: Path, target: str) -> None:
    put(path, b"")
    path.unlink()
    path.symlink_to(target)


def folder(path: Path) -> None:
    put(path / "a file", b"x")


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": remove,
    "folder": lambda path: (remove(path), folder(path))[0],
    "empty": lambda path: put(path, b""),
    "half": lambda path: put(path, path.read_bytes()[: path.stat().st_size // 2]),
    "noise": lambda path: put(path, random.Random(0).randbytes(300)),
    "latin": lambda path: put(path, "text\td\xe9j\xe0\n".encode("latin-1")),
    "null": lambda path: put(path, b"null"),
    "list": lambda path: put(path, b"[[1]]\n"),
    "object": lambda path: put(path, b'{"a": [1, {"b": null}]}\n'),
    "deep": lambda path: put(path, b"[" * 5000),
    "deep object": lambda path: put(path, b'{"a":' * 5000),
    "huge number": lambda path: put(path, b'{"format": ' + b"9" * 5000 + b"}"),
    "zeros": lambda path: put(path, b"\0" * 64),
    "dangling": lambda path: link(path, "/nowhere/none"),
    "loop": lambda path: link(path, path.name),
    "cannot be read": lambda path: link(path, "/proc/self/mem"),  # even by root
    "pipe": lambda path: (put(path, b""), path.unlink(), os.mkfifo(path))[2],  # to which nobody writes
}
LINKS = {"dangling", "loop", "cannot be read"}
NOTHING = {"missing", "dangling", "loop"}  # as if there were no file
AFRESH = {*DAMAGE} - {"folder"}  # what a run writes anew whatever was there
PLAIN_TEXT = {"half", "list", "null", "object", "deep", "deep object", "huge number", "zeros"}


class Case(NamedTuple):
    arguments: tuple[str, ...]
    path: str  # what is damaged
    passes: frozenset[str] | set[str] = frozenset()  # damage that does not hinder the command


def of(arguments: tuple[str, ...], *paths: str, passes: set[str] | frozenset[str] = frozenset()) -> list[Case]:
    return [Case(arguments, path, passes) for path in paths]


DRAW = ("inspect", "inserted", "--inserted-weights")
BANK_FILES = ("bank/lamina.json", "bank/readers/mood/reader.json", "bank/readers/mood/model.safetensors")
# Command -> parameter -> cases. A parameter that names no file has None.
CASES: dict[str, dict[str, list[Case] | None]] = {
    "inspect": {
        "model": [
            *of(("inspect", "base"), "base/config.json"),
            *of(("inspect", "inserted", "--weights"), "inserted/model.safetensors", "inserted/lamina_edits.json"),
            *of(("inspect", "base", "--weights"), "base/tokenizer.json"),
            *of(("inspect", "base"), "base", passes={"half"}),
        ],
        "inserted_weights": of((*DRAW, "weights.png"), "weights.png", passes=AFRESH),
        "beside": of(("inspect", "inserted", "--beside", "base", *DRAW[2:], "w.svg"), "base/config.json", passes=set()),
        **dict.fromkeys(("weights", "layer", "projection", "head", "stack")),
    },
    "train": {
        "recipe": of(TRAIN, "films.yaml"),
        "data": of(TRAIN, "train.tsv"),
        "output": [
            *of(TRAIN, "out", passes={"missing", "folder"}),
            *of(TRAIN[:1] + TRAIN[2:], "out", passes={"missing"}),
            *of(("train", "--resume", *TRAIN[2:]), "out/checkpoints/checkpoint-1/progress.json"),
            *of(("train", "--resume", *TRAIN[2:]), "out/checkpoints/checkpoint-1/tensors.safetensors"),
            *of(TRAIN, "out/table.json", "out/history.json", passes=AFRESH),
            *of(("train", "--resume", *METHOD[2:]), "tuned/separate/film-plain-0.json", passes=NOTHING),
            *of(METHOD, "tuned/separate", "tuned/models", passes={"missing", "folder"}),
        ],
        **dict.fromkeys(("sweep", "dry_run", "resume", "ray", "progress", "only", "seeds", "fit_memory", "memory")),
        "overwrite": None,
    },
    "evaluate": {
        "bank_or_model": of(EVALUATE, *BANK_FILES),
        "file": of(SCORE, "train.tsv"),
        "task": of(EVALUATE, "train.tsv"),
        "tfidf": of((*SCORE, "--tfidf", "learnt.tsv"), "learnt.tsv"),
        "data": of(("evaluate", "bank", "--task", "mood=glue/sst2", "--data", "data"), "data"),
        "model": of((*EVALUATE, "--model", "moods"), "moods/config.json"),
        **dict.fromkeys(("split", "text", "pair", "label", "positive", "per_class", "errors", "device")),
        **dict.fromkeys(("batch_size", "backend")),
    },
    "predict": {
        "bank_or_model": [
            *of(("predict", "bank", "a film"), "bank", *BANK_FILES, "base/config.json", "base/model.safetensors"),
            *of(("predict", "moods", "a film"), "moods/config.json", "moods/tokenizer.json"),
            *of(("predict", "moods", "a film"), "moods/lamina_edits.json"),
        ],
        "file": [
            *of(("predict", "bank", "--file", "texts.txt"), "texts.txt", passes=PLAIN_TEXT),
            *of(("predict", "bank", "--file", "texts.csv"), "texts.csv"),
            *of(("predict", "bank", "--file", "texts.jsonl"), "texts.jsonl"),
            *of(("predict", "bank", "--file", "texts.parquet"), "texts.parquet"),
        ],
        "output": [
            *of(FILE, "answers.jsonl", passes=AFRESH),
            *of((*FILE[:-1], "new/answers.csv"), "new", passes={"missing", "folder"}),
            *of((*FILE[:-1], "begun.jsonl"), ".begun.jsonl.partial", passes=AFRESH - LINKS),
        ],
        "model": of(("predict", "bank", "a film", "--model", "moods"), "moods/config.json"),
        **dict.fromkeys(("texts", "text", "pair", "readers", "skip_bad", "resume", "device", "batch_size")),
        **dict.fromkeys(("ray", "workers", "backend")),
    },
    "monitor": {
        "train": of(MONITOR, "train.tsv"),
        "model": of(MONITOR, "base/config.json", "base/model.safetensors"),
        "output": None,  # a bank's folder, which is written like that of `train`
        **dict.fromkeys(("positive", "rate", "confidence", "messages", "prompt", "reply", "label", "spans", "anyway")),
        **dict.fromkeys(("epochs", "batch_size", "max_length", "seed", "progress", "overwrite", "per")),
    },
    "serve": {
        "bank": of(SERVE, "bank", *BANK_FILES, "base/config.json", "base/model.safetensors"),
        "model": of((*SERVE, "--model", "moods"), "moods/config.json"),
        **dict.fromkeys(("host", "port", "device", "api_key", "cors_allow_origin", "payload_limit", "request_timeout")),
        **dict.fromkeys(("max_batch_tokens", "max_concurrent_requests", "max_client_batch_size", "page")),
        **dict.fromkeys(("max_concurrent_passes", "max_request_tokens", "header_timeout", "title", "example")),
        **dict.fromkeys(("max_concurrent_generations", "max_total_tokens", "admin_key", "readers_root", "ray")),
        **dict.fromkeys(("replicas", "max_replicas", "replica_cpus", "replica_gpus", "backend")),
    },
    "export": {
        "bank_or_model": [
            *of(GRAPH, "bank", *BANK_FILES, "base/model.safetensors"),
            *of(("export", "moods", "graph"), "moods/config.json", "moods/tokenizer.json"),
        ],
        "out": [
            *of(EXPORT, "alone", passes={"missing"}),
            *of((*EXPORT, "--overwrite"), "alone", passes={"missing", "folder"}),
            *of((*EXPORT[:2], "new/alone", *EXPORT[3:]), "new", passes={"missing", "folder"}),
        ],
        "model": of((*EXPORT, "--model", "moods"), "moods/config.json"),
        "validation": of((*GRAPH, "--int8", "--validation", "train.tsv", "--label", "mood=label"), "train.tsv"),
        **dict.fromkeys(("form", "readers", "main", "int8", "label", "max_loss", "output", "overwrite", "progress")),
    },
    "edit": {
        "model": of(EDIT, "base/config.json", "base/model.safetensors"),
        "out": [
            *of(EDIT, "edited", passes={"missing"}),
            *of(("edit", "base", "--freeze", "1", "-o", "moods", "--overwrite"), "moods/config.json"),
        ],
        "plan": of(PLAN, "plan.yaml"),
        "task": of(LEAST, "film.yaml"),
        "data": of(LEAST, "train.tsv"),
        **dict.fromkeys(
            ("truncate", "reinit", "scope", "insert", "layers", "init", "activation", "placement", "train")
        ),
        **dict.fromkeys(("keep", "drop", "duplicate", "repeat", "by", "heal", "progress", "overwrite")),
        **dict.fromkeys(
            ("kernel", "freeze", "train_inserted", "merge", "stack", "seed", "head", "new_weights", "dry_run")
        ),
    },
    "extract": {
        "model": of(EXTRACT, "base/config.json", "base/model.safetensors"),
        "file": of(EXTRACT, "texts.txt", passes=PLAIN_TEXT),
        "output": of(EXTRACT, "states", passes={"missing", "folder"}),
        **dict.fromkeys(("layers", "pooling", "dtype", "stack", "text", "pair", "max_length", "batch_size", "device")),
    },
    "bench": {
        "data": of(PROBES, "sets"),
        "model": of(PROBES, "base/config.json"),
        "output": None,  # a study's folder, which is written like that of `study`
        **dict.fromkeys(("suite", "setting", "sets", "methods", "seeds", "points", "scored", "unique", "max_length")),
        **dict.fromkeys(("resume", "ray", "progress", "overwrite")),
    },
    "study": {
        "recipe": of(STUDY, "study.yaml"),
        "data": of(STUDY, "train.tsv", "base/config.json"),
        "output": [
            *of(STUDY, "seen", passes={"missing", "folder"}),
            *of(STUDY, "seen/table.csv", passes=AFRESH),
            *of((*CELLS, "--resume"), f"cells/cells/{CELL}.json", passes=NOTHING),
        ],
        **dict.fromkeys(("name", "resume", "ray", "dry_run", "progress", "overwrite")),
    },
    "report": {
        "runs": [
            *of(REPORT, "out/report.json"),
            *of(REPORT, "out", passes={"half"}),
            *of(REPORT, "out/report.md", "out/figure-1.png", passes=AFRESH),
            *of(PAGE, "seen/lamina_study.json", "seen/table.parquet", "out/report.json"),
        ],
        "output": of(PAGE, "page.html", passes=AFRESH),
        "files": of((*PAGE, "--files"), "page_files", passes={"missing", "folder"}),
        "title": None,
        "beside": of((*REPORT, "--beside", "tuned"), "tuned/report.json"),
        "image_format": None,
    },
    "cache": {
        "cache_dir": [
            *of(("cache", "--cache-dir", "cache"), "cache", passes={"missing", "folder"}),
            *of(("cache", "--cache-dir", "cache"), f"{ENTRY}/index.json", passes={*DAMAGE}),
        ],
        "clear": of(("cache", "--cache-dir", "cache", "--clear", "all"), f"{ENTRY}/index.json", passes={*DAMAGE}),
    },
    "demo": {
        "output": of(DEMO, "demo"),
        **dict.fromkeys(("rows", "epochs", "seed", "full", "sentences", "progress", "overwrite")),
    },
}


def test_every_parameter_of_every_command_is_here():
    parameters = {name: {p.name for p in command.params} for name, command in build().commands.items()}
    shared = {"as_json", "help"}
    assert {name: names - shared for name, names in parameters.items()} == {n: set(p) for n, p in CASES.items()}


ALL = [case for parameters in CASES.values() for cases in parameters.values() for case in cases or ()]
STEP = len(ALL) // len(DAMAGE)  # every so many cases, one for each kind of damage at least
NAMES = [f"{' '.join(case.arguments[:2])}: {case.path}" for case in ALL]


def check(case: Case, names: Sequence[str], world: Callable[[], None]) -> None:
    wrong = {}
    for name in names:
        world()
        path = Path(case.path)
        runs_for_seconds = case.arguments == DEMO and name in ("missing", "folder")
        if runs_for_seconds or (name == "half" and not path.is_file()):
            continue
        DAMAGE[name](path)
        ran = run(*case.arguments)
        if not (ran.code == 0 if name in case.passes else ran.is_one_sentence):
            wrong[name] = ran
    assert wrong == {}


@pytest.mark.parametrize("number", range(0, len(ALL), STEP), ids=NAMES[::STEP])
def test_a_bad_file_is_one_sentence(number: int, world: Callable[[], None]):
    """One kind of damage per case; the cases try every kind. With `-m full` each case meets all kinds."""
    check(ALL[number], [list(DAMAGE)[number // STEP % len(DAMAGE)]], world)


def test_the_cases_of_every_run_try_every_kind_of_damage():
    assert len(range(0, len(ALL), STEP)) >= len(DAMAGE)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=NAMES)
def test_every_bad_file_is_one_sentence(case: Case, world: Callable[[], None]):
    check(case, list(DAMAGE), world)


# Output

GOOD = {  # all but serve, which ends when it is told to
    "inspect": ("inspect", "base", "--weights"),
    "train": (*TRAIN[:-1], "json", "--progress"),
    "evaluate": EVALUATE,
    "predict": (*FILE[:-1], "json.csv"),
    "export": EXPORT,
    "edit": EDIT,
    "study": STUDY,
    "report": REPORT,
    "cache": ("cache", "--cache-dir", "cache"),
    "demo": DEMO,
}


@pytest.mark.parametrize("command", [c if c != "demo" else pytest.param(c, marks=pytest.mark.full) for c in GOOD])
def test_with_json_nothing_else_is_printed(command: str, world: Callable[[], None]):
    world()
    ran = run(*GOOD[command], "--json")
    assert ran.code == 0
    assert json.loads(ran.out)


@pytest.mark.long
def test_without_progress_a_recipe_shows_no_bar_at_all(world: Callable[[], None]):
    world()
    transformers_logging.enable_progress_bar()
    try:
        assert run(*METHOD[:-1], "bars").err == ""
        assert "Loading weights" in run(*METHOD[:-1], "bars", "--progress").err
    finally:
        transformers_logging.disable_progress_bar()


PROGRAM = "import sys; from lamina.cli import main; main()"


def in_shell(line: str, **environment: str) -> Ran:
    """Run a line of a shell in which `lamina` is the command."""
    command = f'lamina() {{ {shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} "$@"; }}\n{line}'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, encoding="utf-8", env={**os.environ, **environment}, timeout=60
    )
    return Ran(done.returncode, done.stdout, done.stderr)


CANNOT = "error: output: standard output cannot be written (No space left on device).\n"
CLOSED = "error: output: standard output is closed; results are printed there. Use > FILE or > /dev/null.\n"


@pytest.mark.parametrize(
    ("line", "ran"),
    [
        ("lamina cache --json > /dev/full", (2, CANNOT)),
        pytest.param("lamina --help > /dev/full", (2, CANNOT), marks=pytest.mark.full),
        ("lamina cache >&-", (2, CLOSED)),
        ("lamina cache --cache-dir /dev/null 2> /dev/full", (2, "")),
        pytest.param("lamina cache --cache-dir /dev/null 2>&-", (2, ""), marks=pytest.mark.full),
        pytest.param("lamina --help 2>&- > /dev/null", (0, ""), marks=pytest.mark.long),
        pytest.param("lamina --help | head -0; exit ${PIPESTATUS[0]}", (141, ""), marks=pytest.mark.long),
        pytest.param("lamina cache 2>&- > /dev/null", (0, ""), marks=pytest.mark.full),  # imports torch
        pytest.param("lamina cache | head -0; exit ${PIPESTATUS[0]}", (141, ""), marks=pytest.mark.full),
        ("lamina predict bank <&-", (2, "error: predict: there is no text. Give texts as arguments, with --file or")),
    ],
)
def test_streams_that_are_closed_or_full(line: str, ran: tuple[int, str]):
    done = in_shell(line)
    assert (done.code, done.out, done.err[: len(ran[1])]) == (ran[0], "", ran[1])
    assert done.err.count("\n") == bool(ran[1])


@pytest.mark.long
def test_streams_that_are_not_utf_8():
    line = "lamina cache --json --cache-dir $'\\xc3\\xbc\\xff'; lamina cache --cache-dir $'\\xc3\\xbc\\xff'"
    done = in_shell(line, LC_ALL="C", PYTHONIOENCODING="ascii")
    found, rest = json.JSONDecoder().raw_decode(done.out)
    assert (done.code, found["folder"], done.out[rest:], done.err) == (
        0,
        "\u00fc\udcff",
        "\n\\xfc\\udcff: no entries\n",
        "",
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "x" * 300),
        ("predict", "x" * 300, "a text"),
        ("predict", "bank", "--file", "x" * 300 + ".txt"),
        ("predict", "bank", "--file", "texts.txt", "-o", "x" * 300 + ".jsonl"),
        ("evaluate", "bank", "--task", "mood=" + "x" * 300),
        (*EVALUATE[:-1], "mood=glue/sst2", "--data", "x" * 300),
        ("train", "x" * 300),
        (*TRAIN[:-1], "x" * 300),
        (*TRAIN[:-1], "x" * 300, "--dry-run"),
        (*EDIT[:-1], "x" * 300),
        ("study", "similarity", "x" * 300),
        ("study", "x" * 300, "study.yaml"),
        (*STUDY[:-1], "x" * 300),
        ("report", "x" * 300),
        ("cache", "--cache-dir", "train.tsv"),
        (*DEMO[:2], "x" * 300),
        ("bench", "probes", "--data", "x" * 300),
        (*SERVE, "--readers-root", "x" * 300),
        (*EXTRACT, "--layers", "9" * 5000),
        (*EDIT[:-1], ""),
        ("report", "out", "--output="),
    ],
    ids=lambda arguments: " ".join(arguments).replace("x" * 300, "xxx").replace("9" * 5000, "999"),
)
def test_names_that_cannot_be(arguments: tuple[str, ...], made: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(made)
    ran = run(*arguments)
    assert ran.is_one_sentence, ran


def test_lone_surrogates_are_read_and_printed(made: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(made)
    for arguments in (("predict", "bank", "a \udcff film", "--json"), ("predict", "moods", "\ud800")):
        assert run(*arguments).code == 0
