"""`lamina export`: a bank, a reader or a whole model for programs that do not have Lamina."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from lamina.cli import shared_options as options
from lamina.cli.output import print_json, print_table
from lamina.errors import ConfigError, check_known
from lamina.utils import is_file

if TYPE_CHECKING:
    from lamina.bank import ReaderBank

_SAVED = "Folder or hub id of a saved bank, or folder of a whole model, edited or not."
_FORMAT = (
    "onnx: one graph of the model and all readers, with the tokenizer beside it. torch: one reader in plain PyTorch."
)
_READER = "Name of a reader to export; may be repeated. Default: all readers."
_MAIN = "With --format onnx: also export the model's own output. A whole model always exports it."
_COLUMNS = ("output", "of", "axes", "labels")


class Format(StrEnum):
    """The format of the exported files."""

    ONNX = "onnx"
    TORCH = "torch"


def export(
    bank_or_model: Annotated[str, Argument(metavar="BANK|MODEL", help=_SAVED)],
    out: Annotated[Path, Argument(metavar="OUT", help="Folder to write to; it is created if it does not exist.")],
    form: Annotated[Format, Option("--format", help=_FORMAT)] = Format.ONNX,
    reader: Annotated[list[str] | None, Option(metavar="NAME", help=_READER)] = None,
    main: Annotated[bool, Option("--main", help=_MAIN)] = False,
    model: options.ModelOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Export a bank or a model as an ONNX graph, or one reader as plain PyTorch.

    The graph is run in ONNX Runtime and compared to PyTorch before it is kept. docs/export.md shows how to use it.
    """
    if form is Format.TORCH and (main or len(reader or ()) != 1):
        came = "--main was given" if main else f"{len(reader or ()) or 'no'} readers were named"
        raise ConfigError(f"export: {came}; --format torch writes one reader of a bank. Give --reader NAME once.")
    from lamina.bank import ReaderBank

    target, processor = _opened(bank_or_model, model)
    if isinstance(target, ReaderBank):
        check_known("export", reader or (), target, "reader")
    elif reader:
        raise ConfigError(f"export: a reader was named, but {bank_or_model} is a whole model, which has none.")
    facts: dict[str, Any]
    if form is Format.TORCH:
        facts = _write_reader(target, (reader or [""])[0], out)
    else:
        from lamina.store.onnx import export_onnx

        facts = export_onnx(target, out, processor, readers=reader or None, main=main).model_dump()
    if as_json:
        print_json({"folder": str(out), **facts})
    elif form is Format.TORCH:
        print(f"{out}: reader '{facts['name']}' of the layers {', '.join(map(str, facts['layers']))}")
    else:
        rows = [_row(name, own) for name, own in facts["outputs"].items()]
        print_table(f"{out}: within {facts['max_difference']:.0e} of PyTorch", _COLUMNS, rows)


def _opened(saved: str, base: str | None) -> tuple[Any, Any]:
    """Load a bank or a whole model on the CPU and return it with its tokenizer."""
    from lamina.store import load, saved_class
    from lamina.store.manifest import MANIFEST
    from lamina.store.models import source_of

    source = Path(source_of(saved, None))
    if base is None and is_file(source / "config.json") and not is_file(source / MANIFEST):
        return load(saved, saved_class(saved))
    target: Any = options.open_on(saved, base=base, device="cpu")
    return target, getattr(target, "processor", None)


def _write_reader(bank: ReaderBank, name: str, out: Path) -> dict[str, Any]:
    """Export one reader as plain PyTorch and return the facts that were written about it."""
    from lamina.store.export import export_reader
    from lamina.store.files import read_json
    from lamina.store.manifest import READER

    export_reader(bank, name, out)
    return read_json(out / READER)


def _row(name: str, facts: dict[str, Any]) -> tuple[object, ...]:
    """Return an output of the graph as a row of the printed table."""
    kind = (facts["kind"] or "the model").replace("_", " ")
    return name, kind, " x ".join(facts["axes"]), ", ".join(facts["labels"])
