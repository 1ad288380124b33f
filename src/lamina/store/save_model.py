"""Save a model: a plain transformers checkpoint, with a record of the edits that loading replays."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.editing.record import edits, set_location
from lamina.errors import ConfigError, LaminaError
from lamina.layers.wrappers import check_no_adapters, unwrapped
from lamina.store.files import check_finite, staged, write_json
from lamina.store.manifest import FORMAT, RECORD, EditsRecord
from lamina.store.reload_check import check_reloads
from lamina.utils import check_types, is_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.store.files import Files

_FIXED = (RECORD, "config.json", "generation_config.json")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@check_types("save")
def save(
    model: PreTrainedModel,
    folder: str | Path,
    processor: Processor | None = None,
    *,
    force: bool = False,
    files: Files | None = None,
) -> None:
    """Save a model with its `save_pretrained`, and a record of its edits. Either all files are written or none.

    Plain transformers can load the folder, unless the model has inserted layers that are not merged; `lamina.load` can
    always load it. A bank on this model that is saved afterwards names this folder as its base.

    Args:
        model: A transformers model, edited or not. If it is compiled or parallel, the plain model inside is saved.
        folder: Folder to write; created if it does not exist. Files of an earlier `save` are replaced, others stay.
        processor: Tokenizer or image processor to save with the model.
        force: Whether to replace a model that other software wrote.
        files: More files to write in the same step: name -> function that is called with the path to write.

    Raises:
        StoreError: If the folder cannot be written, or holds a model of other software and `force` is False.
        NotFiniteError: If a weight holds NaN or infinity.
        ConfigError: If `model` is not a transformers model, has adapters (PEFT), or would not load again because its
            blocks or other parts were changed by hand.
    """
    folder, model = Path(folder), unwrapped(model)
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        hint = "Give a transformers model; save a bank with bank.save_pretrained(folder)."
        raise ConfigError(f"save: got a {type(model).__name__}, which is not a model. {hint}")
    check_no_adapters(model, "save")
    check_finite("the model", model.named_parameters())
    check_reloads(model, "save")
    files = files or {}
    with staged(folder, names := [*saved_names(folder), *files], names, force=force) as stage:
        _as_stored(model).save_pretrained(stage)  # pyright: ignore[reportUnknownMemberType]
        if processor is not None:
            processor.save_pretrained(stage)
        for name, write in files.items():
            write(stage / name)
        written = {path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file()}
        # files of an earlier save that stay, such as those of a processor
        staying = {name for name in listed_names(folder) if name not in names and (folder / name).is_file()}
        record = {
            "format": FORMAT,
            "architecture": type(model).__name__,
            "edits": [edit.to_dict() for edit in edits(model)],
            "files": sorted(written | staying),
        }
        write_json(stage / RECORD, record)
    set_location(model, str(folder))


def _as_stored(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model whose weights are written: the model itself, or a copy if RWKV has rescaled its weights.

    RWKV divides weights by powers of two in its first pass in eval mode. A model that was loaded from these weights
    would divide them again. The copy has the original weights.
    """
    if not any(getattr(part, "layers_are_rescaled", False) for part in model.modules()):
        return model
    stored = deepcopy(model)
    for part in stored.modules():
        if getattr(part, "layers_are_rescaled", False):
            part.train()._rescale_layers()  # pyright: ignore[reportCallIssue, reportPrivateUsage]
    return stored


def move(source: Path, target: Path) -> None:
    """Move a model that `save` wrote from the folder `source` to the folder `target`.

    A model that `save` wrote to `target` before is replaced; after an error it is unchanged.

    Raises:
        StoreError: If the target cannot be written, or has a model of other software.
    """
    with staged(target, saved_names(target), listed_names(target)) as stage:
        for name in dict.fromkeys([*saved_names(source), *listed_names(source)]):
            if (source / name).is_file():
                (stage / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    (stage / name).hardlink_to(source / name)
                except OSError:  # another file system, or one without links
                    shutil.copy2(source / name, stage / name)
    discard(source)


def discard(folder: Path) -> None:
    """Delete a model that `save` wrote, and the folder if nothing else is in it.

    Raises:
        StoreError: If other software wrote the model, or the folder cannot be written.
    """
    if is_dir(folder):
        with staged(folder, saved_names(folder), listed_names(folder)):
            pass  # nothing is written in place of the old files
        with suppress(OSError):
            folder.rmdir()


def saved_names(folder: Path) -> list[str]:
    """Return the names of the files that `save` replaces in a folder: the record of edits, configs and weights.

    The record comes first; a folder without it holds no model that `save` wrote. The record and the configs are listed
    even if they do not exist, weight files only if they exist.
    """
    paths = folder.glob("model*") if is_dir(folder) else ()
    return [*_FIXED, *sorted(path.name for path in paths if _WEIGHTS.fullmatch(path.name))]


def listed_names(folder: Path) -> list[str]:
    """Return the names of all files that a folder's record lists, with a processor's; [] without a readable record."""
    try:
        return EditsRecord.read(folder / RECORD).files
    except LaminaError:
        return []
