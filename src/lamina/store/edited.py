"""Edited models on disk: a plain checkpoint, and beside it the record of the edits that a load plays again."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lamina.editing.freeze import is_trained
from lamina.editing.insert import replay_insert
from lamina.editing.inserted import is_inserted
from lamina.editing.record import Edit, edits, note_place, restore
from lamina.errors import ConfigError, LaminaError, StoreError, UnsupportedModelError, foreign_errors
from lamina.layers import select, stacks
from lamina.layers.adapters import check_plain
from lamina.layers.wrappers import unwrapped
from lamina.store.files import check_finite, damaged, staged, write_json
from lamina.store.manifest import FORMAT, RECORD, EditsRecord
from lamina.store.models import source_of
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    check_plain(model, "save")
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


def read_record(name: str, revision: str | None = None) -> tuple[str, list[Edit]]:
    """The class of a model that was saved, and its edits; "" and none if there is no record of them."""
    source = source_of(name, revision)
    path = Path(source) / RECORD if is_dir(source) else _fetched(source, revision)
    if path is None or not os.path.lexists(path):
        return "", []
    saved = EditsRecord.read(path)
    with foreign_errors(lambda reason: damaged(path, f"holds an edit that cannot be understood ({reason})")):
        return saved.architecture, [Edit.from_dict(edit) for edit in saved.edits]


def _fetched(repo: str, revision: str | None) -> Path | None:
    """The record that a repository holds, or None; where the hub is out of reach, that of its copy.

    Asked for a file that a copy lacks, the download by itself would try for 23 seconds to reach the hub.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    hub, cached = cast("Any", huggingface_hub), False
    try:
        if not hub.HfApi().file_exists(repo, RECORD, revision=revision):
            return None
    except Exception:  # the hub's and the connection's errors have no kind in common
        cached = True
    with suppress(OSError, ValueError, EntryNotFoundError):  # no such repository: whoever loads the model says so
        return Path(hub.hf_hub_download(repo, RECORD, revision=revision, local_files_only=cached))
    return None


def with_inserts(plain: type[Any], record: Sequence[Edit]) -> Any:
    """A class that puts inserted layers in place before transformers renames a checkpoint's weights and loads them."""

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        with torch.device("cpu"):  # inputs are made here; layers go where the weights are
            replay_inserts(self, record)
        names = {path.rpartition(".")[2] for path, _ in self.named_modules()}
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *filter(is_inserted, names)}

    return type(plain.__name__, (plain,), {"__init__": start, "__module__": plain.__module__})


def check_weights(model: PreTrainedModel, name: str, report: Mapping[str, set[str]], *, exact: bool) -> None:
    """Refuse weights of which transformers reports that some are missing, or have no place in the edited model.

    Unless the model is `exact`ly of the class that was saved, only the parts that hold its layers count. A backbone
    may have been made without its pooler (`add_pooling_layer=False`), which its class always makes here.
    """
    prefix, layered = f"{model.base_model_prefix}.", set[str]() if exact else _layered(model)
    bare = model.base_model is model

    def counts(key: str) -> bool:
        part = key.removeprefix(prefix).split(".")[0]
        return is_inserted(key) or (not (bare and part == "pooler") if exact else part in layered)

    if missing := [key for key in sorted(report["missing_keys"]) if counts(key)]:
        raise _mismatch(name, f"there is no weight '{missing[0]}'")
    if unexpected := [key for key in sorted(report["unexpected_keys"]) if counts(key)]:
        raise _mismatch(name, f"the weight '{unexpected[0]}' has no place in the model")


def check_head(model: PreTrainedModel, name: str, new: Sequence[str]) -> None:
    """Refuse a model of which parts that hold its layers, or most parameters, are new: its class is another."""
    prefix, layered = f"{model.base_model_prefix}.", _layered(model) if new else ()
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    share = sum(sizes.get(key, 0) for key in new) / sum(sizes.values())
    inner = [key for key in new if key.removeprefix(prefix).split(".")[0] in layered]
    if inner or share > 0.5:
        what = f"the weights in {name} are not those of a {type(model).__name__}"
        lack = f"{len(new)} tensors, {share:.0%} of its parameters, would start at random ('{(inner or new)[0]}')"
        raise StoreError(f"load: {what}; {lack}. Give another head, or allow new weights.")


def _layered(model: PreTrainedModel) -> set[str]:
    """The children of the backbone that hold its layers, poolers aside; all children if layers cannot be read."""
    children = dict(getattr(model, "base_model", model).named_children())
    try:
        used = {module for stack in stacks(model).values() for module in stack.run}
    except UnsupportedModelError:  # a convolutional network, which has inserted layers all the same
        return set(children)
    return {name for name, child in children.items() if not used.isdisjoint(child.modules())}


def _layered_names(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Those that lie in parts with layers; heads and poolers, which may be frozen, are not in every class of model."""
    layered = _layered(model) if names else ()
    return [name for name in names if name.removeprefix(f"{model.base_model_prefix}.").split(".")[0] in layered]


def _mismatch(name: str, what: str) -> StoreError:
    return damaged(f"the weights in {name}", f"are not those of the model that was saved: {what}")


def replay_inserts(model: PreTrainedModel, record: Sequence[Edit]) -> None:
    """Insert again the layers that were neither merged nor cut off."""
    merged = max((number for number, edit in enumerate(record) if edit.kind == "merge"), default=-1)
    for number, edit in enumerate(record):
        if edit.kind == "insert" and number > merged:
            for remaining in _after_cuts(model, edit, record[number + 1 :]):
                replay_insert(model, remaining)


def _after_cuts(model: PreTrainedModel, edit: Edit, later: Sequence[Edit]) -> Iterator[Edit]:
    """An insertion in the layer numbers of the model's present depth, stack by stack."""
    depths = {cut.stack: max(cut.layers) for cut in reversed(later) if cut.kind == "truncate" and cut.layers}
    if not depths or edit.stack not in (*depths, "all"):  # a cut of other layers, or these are convolutions
        yield edit
        return
    present, layers = stacks(model), edit.settings["layers"]
    for name in present if edit.stack == "all" else [edit.stack]:
        depth = depths.get(name, present[name].depth)  # before the first cut that followed
        chosen = select("1-" if layers == "all" else layers, depth + 1, op="load")
        if left := [layer for layer in chosen if layer <= present[name].depth]:
            yield replace(edit, settings={**edit.settings, "layers": left, "stack": name})


def restore_edits(model: PreTrainedModel, name: str, record: Sequence[Edit]) -> None:
    """Freeze again what was frozen, and give the model its record; StoreError if the two do not agree."""
    parameters, prefix = dict(model.named_parameters()), f"{model.base_model_prefix}."

    def present_name(saved: str) -> str:
        """The name in this model, which may be the backbone of the saved one, or have another head."""
        forms = (saved, f"{prefix}{saved}", saved.removeprefix(prefix))
        return next((form for form in forms if form in parameters), saved)

    present = [[present_name(key) for key in edit.parameters] for edit in record]
    for number, edit in enumerate(record):
        names = dict(zip(edit.parameters, present[number], strict=True))
        if edit.kind == "truncate":
            if back := [key for key, now in names.items() if now in parameters]:
                raise _mismatch(name, f"'{back[0]}' was cut off, and is there")
            continue
        gone = {key for later in record[number + 1 :] if later.kind == "truncate" for key in later.parameters}
        if any(later.kind == "merge" for later in record[number:]):
            gone |= {key for key in names if is_inserted(key)}
        lost = [key for key, now in names.items() if now not in parameters and key not in gone]
        if lost := _layered_names(model, lost) if edit.kind == "freeze" else lost:
            raise _mismatch(name, f"the record names '{lost[0]}', which is not there")
        if edit.kind == "freeze":
            train, frozen = edit.settings.get("train"), set(names.values())
            for key in (key for key in parameters if is_trained(key, train) or is_trained(f"{prefix}{key}", train)):
                parameters[key].requires_grad_(True)
            for key in frozen & parameters.keys():
                parameters[key].requires_grad_(False)
    restore(model, [replace(edit, parameters=tuple(names)) for edit, names in zip(record, present, strict=True)])
