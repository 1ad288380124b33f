"""`lamina export`: write a bank, a reader or a whole model for programs that do not have Lamina."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from typer import Argument, Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import print_json, print_table
from lamina.errors import ConfigError, check_known
from lamina.utils import is_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank
    from lamina.layers.types import Processor

_SAVED = "Folder or hub id of a saved bank, or folder of a whole model, edited or not."
_FORMAT = (
    "onnx: one graph of the model and its readers, with the tokenizer beside it. torch: one reader in plain PyTorch."
)
_OUT = "Folder to write to; it is created if it does not exist. May also be given as -o OUT."
_MAIN = "With --format onnx: also export the model's own output. A whole model always exports it."
_INT8 = (
    "Quantise the base to 8-bit integers; the readers stay in float32. Needs --validation. If OUT is BANK/onnx-int8, "
    "--backend int8 finds it."
)
_VALIDATION = "With --int8: labelled file, as for `lamina evaluate`, on which every reader is scored before and after."
_LABEL = "With --int8: column of a reader's label, as READER=COLUMN; may be repeated. Default: the one it learnt from."
_MAX_LOSS = "With --int8: largest loss of a reader's metric that is accepted."
_COLUMNS = ("output", "of", "axes", "labels")


class Format(StrEnum):
    """The format of the exported files."""

    ONNX = "onnx"
    TORCH = "torch"


def export(  # noqa: PLR0913
    bank_or_model: Annotated[str, Argument(metavar="BANK|MODEL", help=_SAVED)],
    out: Annotated[Path | None, Argument(metavar="OUT", help=_OUT, show_default=False)] = None,
    output: Annotated[Path | None, Option("--output", "-o", metavar="OUT", help="Folder to write to.")] = None,
    form: Annotated[Format, Option("--format", help=_FORMAT)] = Format.ONNX,
    readers: options.ReadersOption = None,
    main: Annotated[bool, Option("--main", help=_MAIN)] = False,
    int8: Annotated[bool, Option("--int8", help=_INT8)] = False,
    validation: Annotated[Path | None, Option(metavar="FILE", help=_VALIDATION)] = None,
    label: Annotated[list[str] | None, Option(metavar="READER=COLUMN", help=_LABEL)] = None,
    max_loss: Annotated[float, Option(min=0, help=_MAX_LOSS)] = 0.01,
    model: options.ModelOption = None,
    overwrite: options.OverwriteOption = False,
    progress: options.ProgressOption = True,
    as_json: options.JsonOption = False,
) -> None:
    """Export a bank or a model as an ONNX graph, or one reader as plain PyTorch.

    Before the graph is saved, it is run in ONNX Runtime and its outputs are compared to PyTorch's. docs/export.md shows
    how to use the files. Wrong input ends with one sentence and exit code 2.

    Example: lamina export out/bank -o out/bank/onnx
    """
    if (out is None) == (output is None):
        came = "no output folder was given" if out is None else f"two output folders were given, {out} and {output}"
        raise ConfigError(f"export: {came}; exactly one is needed. Use -o OUT.")
    folder, names = cast("Path", out or output), options.names_of("--readers", readers) or []
    if form is Format.TORCH and (main or len(names) != 1):
        problem = "--main was given" if main else f"{len(names) or 'no'} readers were named"
        raise ConfigError(f"export: {problem}; --format torch writes one reader of a bank. Give --reader NAME once.")
    if int8 and (form is not Format.ONNX or main or names or validation is None):
        raise ConfigError("export: --int8 writes a graph of all readers. Give --validation FILE, and no --reader.")
    if not int8 and (validation is not None or label or max_loss != 0.01):
        raise ConfigError("export: --validation, --label and --max-loss are for --int8, which was not given.")
    options.check_output("export", folder, overwrite=overwrite)
    from lamina.bank import ReaderBank

    target, processor = _opened(bank_or_model, model)
    if int8 and validation is not None:
        if not isinstance(target, ReaderBank):
            raise ConfigError(f"export: {bank_or_model} is a whole model; --int8 is for banks.")
        _export_int8(target, folder, validation, label or [], max_loss, progress=progress, as_json=as_json)
        return
    if isinstance(target, ReaderBank):
        check_known("export", names, target, "reader")
    elif names:
        raise ConfigError(f"export: a reader was named, but {bank_or_model} is a whole model, which has no readers.")
    if form is Format.TORCH:
        _export_reader(cast("ReaderBank", target), names[0], folder, as_json=as_json)
    else:
        _export_graph(target, processor, folder, names or None, main=main, progress=progress, as_json=as_json)


def _opened(saved: str, base: str | None) -> tuple[ReaderBank | PreTrainedModel, Processor | None]:
    """Load a bank or a whole model by folder or hub id; return it and its tokenizer (None if it has none).

    `base` is the base model of a bank. None: the one that the bank names. Raises LaminaError if loading fails.
    """
    from lamina.store import load, saved_class
    from lamina.store.manifest import MANIFEST
    from lamina.store.models import source_of

    source = Path(source_of(saved, None))
    if base is None and is_file(source / "config.json") and not is_file(source / MANIFEST):
        return load(saved, saved_class(saved))
    target = options.open_on(saved, base=base, device="cpu")
    return target, getattr(target, "processor", None)


def _export_reader(bank: ReaderBank, name: str, out: Path, *, as_json: bool) -> None:
    """Export the reader `name` of a bank as plain PyTorch into the folder `out`; print facts about it as text or JSON.

    Raises UnknownNameError if the bank lacks the reader, ConfigError if it cannot be exported, and the other errors of
    `export_reader`.
    """
    from lamina.store.export import export_reader
    from lamina.store.files import read_json
    from lamina.store.manifest import READER

    export_reader(bank, name, out)
    facts = read_json(out / READER)
    if as_json:
        print_json({"folder": str(out), **facts})
    else:
        print(f"{out}: reader '{facts['name']}' of layers {', '.join(map(str, facts['layers']))}")


def _export_graph(
    target: ReaderBank | PreTrainedModel,
    processor: Processor | None,
    out: Path,
    readers: list[str] | None,
    *,
    main: bool,
    progress: bool,
    as_json: bool,
) -> None:
    """Export `target`, a bank or a model, as an ONNX graph into `out`; print the graph's outputs as a table or JSON.

    The graph has the outputs of `readers` (None: all); with `main`, also the model's own output. `processor` is saved
    with the graph (None: the bank's). With `progress`, a progress bar is shown. Raises the errors of `export_onnx`.
    """
    from lamina.store.onnx import export_onnx

    facts = export_onnx(target, out, processor, readers=readers, main=main, progress=progress)
    if as_json:
        print_json({"folder": str(out), **facts.model_dump()})
    else:
        rows = [
            (name, (output.kind or "the model").replace("_", " "), " x ".join(output.axes), ", ".join(output.labels))
            for name, output in facts.outputs.items()
        ]
        print_table(f"{out}: within {facts.max_difference:.0e} of PyTorch", _COLUMNS, rows)


def _export_int8(
    bank: ReaderBank,
    out: Path,
    validation: Path,
    label: list[str],
    max_loss: float,
    *,
    progress: bool,
    as_json: bool,
) -> None:
    """Export a bank with a quantised base into `out`; print every reader's score before and after, as a table or JSON.

    The scores are measured on the file `validation`, by default with the columns of the training; `label` holds other
    columns as "READER=COLUMN". `max_loss` and `progress` are those of the function `export_int8`. Raises its errors,
    and ConfigError if a text in `label` has another form or names a reader twice.
    """
    from lamina.prediction.int8 import export_int8

    labels = options.by_reader("export", "--label", label, "READER=COLUMN") or None
    facts = export_int8(bank, out, validation, max_loss=max_loss, labels=labels, progress=progress)
    if as_json:
        print_json({"folder": str(out), **facts.model_dump()})
    else:
        scores = (facts.int8 or {}).items()
        rows = [(name, own.metric, own.float32, own.int8, own.int8 - own.float32) for name, own in scores]
        print_table(f"{out}: int8", ("reader", "metric", "float32", "int8", "change"), rows)
