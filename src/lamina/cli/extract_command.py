"""`lamina extract`: write the hidden states of the texts in a file, for readers to be trained on elsewhere."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import print_json
from lamina.utils import pluralize

_FILE = "File of texts: .txt with one text per line, .tsv, .csv, .jsonl or .parquet."
_OUTPUT = "Folder to write to; it is created if it does not exist."
_LAYERS = 'Layers to write, such as "all", "top:4", "2-6" or "0,3,6".'
_TEXT = 'Column of texts, images or audio. Default: the only one, or one with a usual name ("sentence", "text").'
_PAIR = "Column of the second text of a pair. Default: none."
_POOLING = "Write one state per row: of the first or last token, or the mean. Default: write the states of all tokens."
_DTYPE = "Number type of the states. float16 takes half the space of float32; its largest number is 65,504."
_STACK = "Stack of the model. Default: its only one, or the encoder."
_MAX_LENGTH = "Maximum tokens per row; longer texts are truncated. Default: the model's limit."


class Pooling(StrEnum):
    """How the tokens of a row become one state."""

    FIRST = "first"
    LAST = "last"
    MEAN = "mean"


class Dtype(StrEnum):
    """Type of the numbers in the files."""

    FLOAT16 = "float16"
    FLOAT32 = "float32"


def extract(  # noqa: PLR0913
    model: options.ModelArgument,
    file: Annotated[Path, Argument(metavar="FILE", help=_FILE)],
    output: Annotated[Path, Option("--output", "-o", help=_OUTPUT)],
    layers: Annotated[str, Option(help=_LAYERS)] = "all",
    pooling: Annotated[Pooling | None, Option(help=_POOLING)] = None,
    dtype: Annotated[Dtype, Option(help=_DTYPE)] = Dtype.FLOAT16,
    stack: Annotated[str | None, Option(help=_STACK)] = None,
    text: Annotated[str | None, Option("--text", "--inputs", help=_TEXT)] = None,
    pair: Annotated[str | None, Option(help=_PAIR)] = None,
    max_length: Annotated[int | None, Option(min=1, help=_MAX_LENGTH)] = None,
    batch_size: options.BatchSizeOption = 32,
    device: options.DeviceOption = "auto",
    as_json: options.JsonOption = False,
) -> None:
    """Write the hidden states of a model for the texts in a file.

    Task.from_states trains readers on them without the model. The command first prints how much disk space the states
    need. If it is interrupted, run it again: it continues with the first file that is missing. Wrong input ends with
    one sentence and exit code 2.
    """
    from lamina.layers.devices import usable_device
    from lamina.prediction import extract as write_states
    from lamina.store import load

    logging.getLogger("lamina.prediction.extract").setLevel(logging.INFO)  # the disk space, before the model runs

    base, processor = load(model)
    manifest = write_states(
        base.to(usable_device(device)),  # pyright: ignore[reportArgumentType]
        file,
        output,
        layers=options.selector_of(layers),
        stack=stack,
        pooling=None if pooling is None else pooling.value,
        dtype=dtype.value,
        text=text,
        text_pair=pair,
        processor=processor,
        max_length=max_length,
        batch_size=batch_size,
        progress=not as_json,
    )
    if as_json:
        print_json({"folder": str(output), **manifest.model_dump(exclude={"arrays"}), "files": len(manifest.arrays)})
    else:
        what = f"{pluralize(manifest.rows, 'row')}, layers {', '.join(map(str, manifest.layers))}, {dtype.value}"
        print(f"{output}: {what}, {pluralize(len(manifest.arrays), 'file')}")
