"""Edited models on disk: a plain checkpoint, and beside it the record of the edits that a load plays again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lamina.editing.insert import replay_insert
from lamina.editing.inserted import PREFIX, all_inserted, is_inserted
from lamina.editing.record import Edit, edits, restore
from lamina.errors import StoreError, UnsupportedModelError
from lamina.layers import select, stacks
from lamina.store.files import read_json, staged, write_json
from lamina.store.models import source_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel


RECORD = "lamina_edits.json"
FORMAT = 1
_FIXED = (RECORD, "config.json", "generation_config.json")
_WEIGHTS = "model*.safetensors*"
_AGAIN = "Copy or save it again."


def save(model: PreTrainedModel, folder: str | Path, processor: Any = None) -> None:
    """Save a model with the record of its edits; all of it, or nothing.

    What is written is what `save_pretrained` writes, and `lamina_edits.json`. Without inserted layers (or once they are
    merged) plain transformers loads it; with them `lamina.load` does.

    Args:
        model: A transformers model, edited or not.
        folder: Where to; made if it is not there. What `save` wrote there before is replaced, other files stay.
        processor: Its tokenizer or image processor, saved along.

    Raises:
        StoreError: If the folder cannot be written, or holds a model that something else saved.
    """
    folder = Path(folder)
    old = sorted(path.name for path in folder.glob(_WEIGHTS))
    entries = [*_FIXED, *old]
    with staged(folder, entries) as stage:
        cast("Any", model).save_pretrained(stage)
        if processor is not None:
            processor.save_pretrained(stage)
        made = [edit.to_dict() for edit in edits(model)]
        write_json(stage / RECORD, {"format": FORMAT, "architecture": type(model).__name__, "edits": made})
        entries += sorted(path.name for path in stage.iterdir() if path.name not in entries)


def read_record(name: str, revision: str | None) -> tuple[str, list[Edit]] | None:
    """The record of a saved model: the class that was saved, and its edits; None if there is none.

    Raises:
        StoreError: If it is damaged, or of a format that this version does not read.
    """
    path = _find_record(source_of(name, revision), revision)
    if path is None:
        return None
    fields = read_json(path)
    given = fields.get("edits")
    if fields.get("format") != FORMAT or not isinstance(given, list):
        raise StoreError(
            f"load: {path} is of the format {fields.get('format')}; this version of lamina reads format {FORMAT}. "
            "Use the version that saved it, or save the model again."
        )
    return str(fields.get("architecture")), [Edit.from_dict(each) for each in cast("list[dict[str, Any]]", given)]


def _find_record(source: str, revision: str | None) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if Path(source).is_dir():
        path = Path(source) / RECORD
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source, RECORD, revision=revision))
    except (OSError, ValueError, EntryNotFoundError):  # no such repository: whoever loads the model says so
        return None


def with_inserts(plain: type[Any], made: Sequence[Edit]) -> Any:
    """The class of a model that puts its inserted layers in place before transformers fills in the weights.

    This way their names go through whatever transformers does to the names of a checkpoint.
    """

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        with torch.device("cpu"):  # here inputs are made; layers go where the weights are
            replay_inserts(self, made)
        places = {part for path in all_inserted(self) for part, _ in self.get_submodule(path).named_children()}
        wide = {part for part in places if part.startswith(PREFIX)}
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *wide}

    return type(plain.__name__, (plain,), {"__init__": start, "__module__": plain.__module__})


def check_weights(model: PreTrainedModel, name: str, report: Mapping[str, set[str]], *, exact: bool) -> None:
    """Refuse weights that are not those of the model as its config has it; under another head, of its layers."""
    missing = sorted(report["missing_keys"])
    if lost := [key for key in missing if exact or is_inserted(key)]:
        raise _disagree(name, f"there is no weight '{lost[0]}'")
    prefix, layered = f"{model.base_model_prefix}.", set[str]() if exact else _layered(model)

    def counts(key: str) -> bool:
        return exact or key.removeprefix(prefix).split(".")[0] in layered

    if lost := [key for key in missing if counts(key)]:
        raise _disagree(name, f"there is no weight '{lost[0]}'")
    if wrong := [key for key in sorted(report["unexpected_keys"]) if counts(key)]:
        raise _disagree(name, f"the weight '{wrong[0]}' has no place in the model")


def _layered(model: PreTrainedModel) -> set[str]:
    """The parts of the backbone that hold its layers; a pooler is none. All parts where layers cannot be read."""
    children = dict(getattr(model, "base_model", model).named_children())
    try:
        used = {module for stack in stacks(model).values() for module in stack.run}
    except UnsupportedModelError:  # a convolutional network, which has inserted layers all the same
        return set(children)
    return {name for name, child in children.items() if not used.isdisjoint(child.modules())}


def _disagree(name: str, what: str) -> StoreError:
    return StoreError(f"load: the weights in {name} are not those of the edited model: {what}. {_AGAIN}")


def replay_inserts(model: PreTrainedModel, made: Sequence[Edit]) -> None:
    """Put the inserted layers that were neither merged nor cut off in place again."""
    merged = max((number for number, edit in enumerate(made) if edit.kind == "merge"), default=-1)
    for number, edit in enumerate(made):
        if edit.kind == "insert" and number > merged:
            for part in _still_there(model, edit, made[number + 1 :]):
                replay_insert(model, part)


def _still_there(model: PreTrainedModel, edit: Edit, later: Sequence[Edit]) -> Iterator[Edit]:
    """An insertion as it is said of the model's present depth."""
    cuts = {each.stack: max(each.layers) for each in reversed(later) if each.kind == "truncate" and each.layers}
    if not cuts or edit.stack not in (*cuts, "all"):  # a cut of other layers, or these are convolutions
        yield edit
        return
    found = stacks(model)
    wanted = edit.settings["layers"]
    for name in found if edit.stack == "all" else [edit.stack]:
        depth = cuts.get(name, found[name].depth)  # before the first cut that followed
        chosen = select("1-" if wanted == "all" else wanted, depth + 1, op="load")
        left = [layer for layer in chosen if layer <= found[name].depth]
        if left:
            yield replace(edit, settings={**edit.settings, "layers": left, "stack": name})


def _here(name: str, known: Collection[str], model: PreTrainedModel) -> str:
    """A name as this model has it, which may be the backbone of the one that was saved, or have another head."""
    prefix = f"{model.base_model_prefix}."
    forms = (name, f"{prefix}{name}", name.removeprefix(prefix))
    return next((form for form in forms if form in known), name)


def restore_edits(model: PreTrainedModel, name: str, made: Sequence[Edit]) -> None:
    """Freeze again, and set the record, once it is held against the model."""
    named = dict(model.named_parameters())
    for number, edit in enumerate(made):
        gone = {each for later in made[number + 1 :] if later.kind == "truncate" for each in later.parameters}
        if any(later.kind == "merge" for later in made[number:]):
            gone |= {each for each in edit.parameters if is_inserted(each)}
        here = {each: _here(each, named, model) for each in edit.parameters}
        if edit.kind == "truncate":
            if back := [each for each in edit.parameters if here[each] in named]:
                raise _disagree(name, f"'{back[0]}' was cut off, and is there")
            continue
        if lost := [each for each in edit.parameters if here[each] not in named and each not in gone]:
            raise _disagree(name, f"the record names '{lost[0]}', which is not there")
        if edit.kind == "freeze":
            _freeze(named, [here[each] for each in edit.parameters if each not in gone], edit)
    adapted = [replace(edit, parameters=tuple(_here(each, named, model) for each in edit.parameters)) for edit in made]
    restore(model, adapted)


def _freeze(named: Mapping[str, Tensor], frozen: Sequence[str], edit: Edit) -> None:
    for key in frozen:
        named[key].requires_grad_(False)
    if edit.settings.get("train") == "inserted":
        for key in named:
            if is_inserted(key):
                named[key].requires_grad_(True)
