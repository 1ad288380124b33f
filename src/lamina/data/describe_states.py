"""Write `states.json` for hidden states that another program has left in a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from lamina.data.recorded_states import ENDINGS, RecordedStates, place_of
from lamina.errors import ConfigError, DataError, StoreError, check_known
from lamina.layers.recorded import StatesPooling
from lamina.store.files import write_json
from lamina.store.manifest import STATES, StatesArray, StatesAxis, StatesManifest
from lamina.utils import atomic_write, check_range, check_types, is_dir

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from os import PathLike


@dataclass(frozen=True)
class StatesForm:
    """The form in which a program writes states.

    Attributes:
        axes: The axes of a tensor, in order.
        tensor: Name of the tensor or Parquet column; None for `.npy`. "{layer}" in it stands for the program's number
            of a layer, if each layer has its own tensor.
        mask: Name of the mask's tensor, column or `.npy` file. None: no mask.
        shift: Number to add to the program's layer numbers to get Lamina's.
    """

    axes: tuple[StatesAxis, ...]
    tensor: str | None = None
    mask: str | None = None
    shift: int = 0


# The forms of vLLM and lmprobe are those of their source; vllm-lens returns tensors, which the caller saves.
FORMS = {
    "vllm": StatesForm(("tokens", "layers", "width"), "hidden_states"),
    "vllm-lens": StatesForm(("layers", "tokens", "width"), "residual_stream", shift=1),
    "lmprobe": StatesForm(("rows", "tokens", "width"), "layer_{layer}", "attention_mask", shift=1),
    "lmprobe-last_token": StatesForm(("rows", "width"), "pooled_last_token_layer_{layer}", shift=1),
    "lmprobe-first_token": StatesForm(("rows", "width"), "pooled_first_token_layer_{layer}", shift=1),
    "lmprobe-mean": StatesForm(("rows", "width"), "pooled_mean_layer_{layer}", shift=1),
}
_POOLED: dict[str, StatesPooling] = {"last_token": "last", "first_token": "first", "mean": "mean"}


@check_types("states")
def describe_states(  # noqa: PLR0913
    folder: str | PathLike[str],
    files: Collection[str] | None = None,
    *,
    layers: Sequence[int],
    depth: int,
    form: str | None = None,
    axes: Sequence[StatesAxis] | None = None,
    tensor: str | None = None,
    mask: str | None = None,
    rows: int | None = None,
    lengths: str | None = None,
    pooling: StatesPooling | None = None,
    stack: str = "main",
    model: str | None = None,
    fingerprint: str | None = None,
    max_length: int | None = None,
    table: str | None = None,
    pairs: bool | None = None,
    add_prefix_space: bool | None = None,
) -> StatesManifest:
    """Describe hidden states that another program left in a folder: check the files, and write `states.json`.

    After an error, an older `states.json` stays.

    Args:
        folder: The folder.
        files: The files in the order of the rows, relative to the folder. None: all `.npy`, `.safetensors` and
            `.parquet` files except `lengths`, `mask`, `table` and "lengths.npy", in the order of the numbers in their
            names.
        layers: The layers in the files, in the order of the axis "layers": 0 is the embeddings, 1 the output of the
            first block. With a `form`, use the program's own numbers, which are lower by one in vllm-lens and lmprobe.
        depth: Number of blocks of the model.
        form: "vllm" (files of `extract_hidden_states`), "vllm-lens" (its tensors, saved one file per row), "lmprobe"
            (its cache of all tokens), "lmprobe-last_token", "lmprobe-first_token" or "lmprobe-mean" (its pooled cache).
            `axes`, `tensor` and `mask` are then ignored; with a pooled form, `pooling` too. None: these four are used.
        axes: Name of each axis of the arrays, in order: "rows", "tokens", "layers", "width".
        tensor: Name of the tensor in a safetensors file, or of the column in a Parquet file; None for `.npy`. If each
            layer has a tensor of its own, write "{layer}" in place of its number; other braces are left as they are.
        mask: Name of the tensor or column beside `tensor`, or of a `.npy` file, with the mask `[rows, tokens]`. None:
            padding is on the right, as `lengths` say.
        rows: Number of rows in each file, if the arrays have no axis "rows". None: 1.
        lengths: A `.npy` file with the number of tokens of each row. None: the mask or the arrays show it.
        pooling: How the states of a row's tokens became one: "first", "last" or "mean". None: each token has a state.
        stack: Name of the stack.
        model: Hub id or folder of the model; None if unknown.
        fingerprint: `lamina.store.fingerprint` of the model, if known; readers of these states can then be attached to
            no other model.
        max_length: Maximum number of tokens of a row when the states were computed.
        table: A file in the folder with the labels of the rows, which is not read here.
        pairs: Whether each row is a pair of texts. None: unknown; then readers take single texts.
        add_prefix_space: Whether each text got a space before its first word. None: as the option of `fit` says.

    Returns:
        The manifest that was written.

    Raises:
        UnknownNameError: If there is no such form, axis or pooling.
        ConfigError: If no axis is "width", no layer is named, a number is below 1, or an option has a wrong type.
        DataError: If the folder or a file is missing, or there is no file of states. If a file is damaged or empty,
            does not have these axes, or does not show the lengths of its rows.
        StoreError: If the facts contradict each other, or `states.json` or a temporary file cannot be written.
    """
    check_known("states", [form] if form else [], FORMS, "form")
    check_known("states", [pooling] if pooling is not None else [], get_args(StatesPooling), "pooling")
    known = FORMS[form] if form else StatesForm(tuple(axes or ()), tensor, mask)
    check_known("states", known.axes, get_args(StatesAxis), "axis")
    if "width" not in known.axes:
        raise ConfigError(f"states: axes are {', '.join(known.axes) or 'not given'}; one of them is 'width'.")
    for name, count in {"depth": depth, "rows": rows, "max_length": max_length}.items():
        check_range("states", name, count, 1)
    if not layers:
        raise ConfigError("states: layers is empty; name the layers that are in the files.")
    names = list(files or ())
    if files is None:
        names = [name for name in sorted_files(Path(folder)) if name not in (lengths, known.mask, table)]
    arrays = [array for name in names for array in _arrays(Path(folder), name, known, list(layers), rows or 1)]
    if not arrays:
        raise DataError(f"states: {folder} has no {', '.join(ENDINGS)} file.", path=str(folder))
    ours = [layer + known.shift for layer in layers]
    count = sum(array.rows for array in arrays if ours[0] in (array.layers or ours))
    manifest = StatesManifest(
        rows=count,
        depth=depth,
        width=arrays[0].shape[arrays[0].axes.index("width")],
        layers=sorted(ours),
        arrays=arrays,
        lengths=lengths,
        pooling=_POOLED[form.partition("-")[2]] if form and known.axes[1] == "width" else pooling,
        stack=stack,
        model=model,
        fingerprint=fingerprint,
        max_length=max_length,
        table=table,
        pairs=pairs,
        add_prefix_space=add_prefix_space,
    )
    if problem := manifest.problem():
        raise StoreError(f"states: the description of {folder} {problem}. Correct the arguments.")
    RecordedStates(Path(folder), manifest)  # checks the files, before a good manifest would be replaced
    with atomic_write(Path(folder) / STATES) as path:
        write_json(path, manifest.model_dump())
    return manifest


def sorted_files(folder: Path) -> list[str]:
    """Return the names of the states files in a folder, except "lengths.npy", ordered by the numbers in their names.

    Raises DataError if there is no such folder.
    """
    if not is_dir(folder):
        raise DataError(f"states: the folder {folder} does not exist.", path=str(folder))
    names = [path.name for path in folder.iterdir() if path.suffix.lower() in ENDINGS and path.name != "lengths.npy"]
    return sorted(
        names, key=lambda name: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    )


def _arrays(folder: Path, name: str, form: StatesForm, layers: list[int], rows: int) -> list[StatesArray]:
    """Return the manifest's entries for the file `name`: one, or one per layer if each layer has its own tensor.

    `layers` are the program's layer numbers, to which `form.shift` is added. `rows` is the number of rows of a tensor
    without an axis "rows". Raises DataError if a tensor is missing, damaged or empty, or the form does not name each
    axis.
    """
    per_layer = form.tensor is not None and "{layer}" in form.tensor
    entries: list[StatesArray] = []
    for layer in layers if per_layer else [None]:
        tensor = form.tensor.replace("{layer}", str(layer)) if form.tensor else None
        shape = list(place_of(folder / name, tensor).shape)
        if len(shape) != len(form.axes):
            got = f"{folder / name} has the shape {shape}, and the axes are {', '.join(form.axes) or 'not given'}"
            raise DataError(f"states: {got}; each axis has a name.", path=str(folder / name))
        if 0 in shape:
            array = f"the tensor '{tensor}' in {folder / name}" if tensor else folder / name
            got = f"{array} is empty: it has the shape {shape}"
            raise DataError(f"states: {got}. Leave it out, or record its states again.", path=str(folder / name))
        sizes = dict(zip(form.axes, shape, strict=True))
        own = layers if layer is None else [layer]
        entries.append(
            StatesArray(
                file=name,
                tensor=tensor,
                axes=list(form.axes),
                shape=shape,
                rows=sizes.get("rows", rows),
                layers=[number + form.shift for number in own],
                mask=form.mask,
            )
        )
    return entries
