"""Edited models on disk: a plain checkpoint, and beside it the record of the edits that a load plays again."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lamina.editing.record import edits, note_place
from lamina.errors import ConfigError, LaminaError
from lamina.layers.adapters import check_no_adapters
from lamina.layers.wrappers import unwrapped
from lamina.store.files import check_finite, staged, write_json
from lamina.store.manifest import FORMAT, RECORD, EditsRecord
from lamina.utils import is_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.store.files import Files

_FIXED = (RECORD, "config.json", "generation_config.json")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save(
    model: PreTrainedModel,
    folder: str | Path,
    processor: Any = None,
    *,
    force: bool = False,
    files: Files | None = None,
) -> None:
    """Save a model as `save_pretrained` does, with the record of its edits; all of it, or nothing.

    Without inserted layers (or once they are merged) plain transformers loads it; with them `lamina.load` does. A bank
    that is saved on the model afterwards names this folder as its base.

    Args:
        model: A transformers model, edited or not; of a compiled or DataParallel one, the one inside.
        folder: Where to; made if it is not there. What `save` wrote there before is replaced, other files stay.
        processor: Its tokenizer or image processor, saved along.
        force: Replace a model that something else saved, too.
        files: Others to write with it: name -> what is called with the path.

    Raises:
        StoreError: If the folder cannot be written, or holds a model that something else saved.
        NotFiniteError: If a weight holds NaN or infinity.
        ConfigError: If it is no transformers model, or carries adapters.
    """
    folder, model = Path(folder), unwrapped(model)
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        what = "a transformers model is needed; a bank has save_pretrained of its own"
        raise ConfigError(f"save: got a {type(model).__name__}; {what}.")
    check_no_adapters(model, "save")
    check_finite("the model", model.named_parameters())
    with staged(folder, names := [*saved_names(folder), *(files or {})], names, force=force) as stage:
        cast("Any", model).save_pretrained(stage)
        if processor is not None:
            processor.save_pretrained(stage)
        for name, write in (files or {}).items():
            write(stage / name)
        done = [edit.to_dict() for edit in edits(model)]
        own = {path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file()}
        kept = {name for name in listed_names(folder) if name not in names and (folder / name).is_file()}
        fields = {"format": FORMAT, "architecture": type(model).__name__, "edits": done, "files": sorted(own | kept)}
        write_json(stage / RECORD, fields)
    note_place(model, str(folder))


def move(source: Path, target: Path) -> None:
    """Move a model that `save` wrote; it takes the place of one that `save` wrote to the target, all of it or nothing.

    The source goes once the target is whole.

    Raises:
        StoreError: If the target cannot be written, or holds a model that something else saved.
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
    """Remove a model that `save` wrote, and what a `save` that died left there; the folder too, if it is empty then.

    Raises:
        StoreError: If the model was saved by something else.
    """
    if is_dir(folder):
        with staged(folder, saved_names(folder), listed_names(folder)):
            pass
        with suppress(OSError):
            folder.rmdir()


def saved_names(folder: Path) -> list[str]:
    """What `save` replaces in a folder; the first marks a model of ours."""
    paths = folder.glob("model*") if is_dir(folder) else ()
    return [*_FIXED, *sorted(path.name for path in paths if _WEIGHTS.fullmatch(path.name))]


def listed_names(folder: Path) -> list[str]:
    """What the record in a folder says was saved there, a processor's files too; none if it cannot be read."""
    try:
        return EditsRecord.read(folder / RECORD).files
    except LaminaError:
        return []
