from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.stored import save_base, tiny_bank, tiny_model, tiny_tokenizer
from transformers import BertForSequenceClassification

from lamina.bank import ReaderBank
from lamina.cli import command_line as app
from lamina.cli import main
from lamina.store import load, save, save_bank

built_once = functools.cache(app.build)  # building all commands takes longer than running most of them


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def lamina(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ran]]:
    """Run the command line in this process."""
    from transformers.utils import logging

    monkeypatch.setattr(app, "quiet", lambda: None)  # what it changes would outlast the test
    monkeypatch.setattr(app, "build", built_once)

    def run(*arguments: object, stdin: bytes | None = None) -> Ran:
        if stdin is not None:
            given = SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False)
            monkeypatch.setattr("sys.stdin", given)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return Ran(int(ended.value.code or 0), *capsys.readouterr())

    logging.disable_progress_bar()
    yield run
    logging.enable_progress_bar()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="session")
def bank_folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved bank with a reader of texts and one of words; its manifest names a base on disk."""
    bank: ReaderBank = tiny_bank(load(base)[0])
    folder = tmp_path_factory.mktemp("banks") / "bank"
    save_bank(bank, folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model with a head for moods, as `lamina.save` writes it."""
    labels: Any = {"id2label": {0: "bad", 1: "good"}}
    folder = tmp_path_factory.mktemp("models") / "moods"
    save(tiny_model(3, BertForSequenceClassification, **labels), folder, tiny_tokenizer())
    return folder
