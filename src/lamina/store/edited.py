"""Edited models on disk: a plain checkpoint, and beside it the record of the edits that a load plays again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError

from lamina.editing.insert import replay_insert
from lamina.editing.inserted import PREFIX, all_inserted
from lamina.editing.record import Edit, edits, restore
from lamina.errors import LaminaError, StoreError, UnknownNameError, UnsupportedModelError
from lamina.layers import select, stacks
from lamina.store.files import read_json, staged, write_json
from lamina.store.models import empty_model, load_config, load_model, name_classes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)
_Found = tuple[str, list[Edit]]  # the class that was saved, and its edits

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


def load(folder_or_id: str | Path, auto: Any = "AutoModel", *, labels: Sequence[str] | None = None) -> PreTrainedModel:
    """Load a model with its edits; one that was never edited, as transformers does.

    Inserted layers are put in place again, what was frozen is frozen, and the record is held against the weights.

    Args:
        folder_or_id: A local folder or a hub id.
        auto: An auto class of transformers or its name, or a model's own class; decides which head comes along.
        labels: Names of the classes, for a head that is to have these; weights of a head with as many are kept, others
            start at random.

    Returns:
        The model in eval mode; `lamina.edits` gives its record.

    Raises:
        ModelNotFoundError: If there is no such model.
        StoreError: If files are missing or damaged, or the record and the weights disagree.
        UnknownNameError: If there is no such auto class.
    """
    name = str(folder_or_id)
    found = _read_record(name)
    kind: Any = _auto_class(auto) if isinstance(auto, str) else auto
    if found is None or not found[1]:
        if kind.__name__.startswith("AutoModel"):
            return load_model(name, head=kind.__name__, labels=labels)[0]
        return kind.from_pretrained(name, **_classes(name, labels)).eval()
    architecture, made = found
    model, report = _load_edited(name, kind, made, _classes(name, labels))
    _check_report(model, name, report, exact=type(model).__name__ == architecture)
    _restore(model, name, made)
    return model.eval()


def outline(folder_or_id: str | Path, auto: str = "AutoModel") -> PreTrainedModel:
    """Build a model on the meta device, inserted layers included: the architecture, no weights, no memory.

    Args:
        folder_or_id: A local folder or a hub id; its config, and its record where there is one, are enough.
        auto: Name of an auto class of transformers.

    Raises:
        ModelNotFoundError: If there is no such model.
        StoreError: If the record is damaged.
        UnknownNameError: If there is no such auto class.
        UnsupportedModelError: If transformers does not know the family.
    """
    found, kind = _read_record(str(folder_or_id)), _auto_class(auto)
    model = empty_model(load_config(folder_or_id), kind)
    if found is not None:
        _replay_inserts(model, found[1])
        _restore(model, str(folder_or_id), found[1])
    return model


def _read_record(name: str) -> _Found | None:
    """The record of a saved model; None where there is none."""
    path = _file(name, RECORD)
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


def _file(name: str, file: str) -> Path | None:
    """A file of a local folder or of a repository of the hub; None if it is not there."""
    from transformers.utils import hub

    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    if name.count("/") > 1 or Path(name).is_absolute():
        return None
    find: Any = vars(hub)["cached_file"]
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    try:
        found = find(name, file, **quiet)
    except OSError:  # no such repository: whoever loads the model says so
        return None
    return None if found is None else Path(found)


def _auto_class(name: str) -> Any:
    import transformers

    known = [each for each in dir(transformers) if each.startswith("AutoModel")]
    if name not in known and not hasattr(transformers, name):
        raise UnknownNameError(op="load", got=name, known=known, what="auto class")
    return getattr(transformers, name)


def _classes(name: str, labels: Sequence[str] | None) -> dict[str, Any]:
    """How transformers is told which classes a head is to have."""
    if labels is None:
        return {}
    config = load_config(name)
    name_classes(config, labels)
    return {"config": config, "ignore_mismatched_sizes": True}


def _load_edited(
    name: str, kind: Any, made: Sequence[Edit], classes: Mapping[str, Any]
) -> tuple[PreTrainedModel, dict[str, set[str]]]:
    """Have transformers load a model that has its inserted layers; with the weights it missed or did not expect."""
    plain = type(empty_model(load_config(name), kind)) if kind.__name__.startswith("AutoModel") else kind
    try:
        model, report = _with_inserts(plain, made).from_pretrained(name, output_loading_info=True, **classes)
    except LaminaError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        told = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise StoreError(f"load: {name} cannot be loaded ({told}). {_AGAIN}") from error
    model.__class__ = plain
    return model, report


def _with_inserts(plain: type[Any], made: Sequence[Edit]) -> Any:
    """The class of a model that puts its inserted layers in place before transformers fills in the weights.

    This way their names go through whatever transformers does to the names of a checkpoint.
    """

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)
        with torch.device("cpu"):  # here inputs are made; layers go where the weights are
            _replay_inserts(self, made)
        places = {part for path in all_inserted(self) for part, _ in self.get_submodule(path).named_children()}
        wide = {part for part in places if part.startswith(PREFIX)}
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *wide}

    return type(plain.__name__, (plain,), {"__init__": start, "__module__": plain.__module__})


def _check_report(model: PreTrainedModel, name: str, report: Mapping[str, set[str]], *, exact: bool) -> None:
    """Refuse weights that are not those of the model as its config has it; under another head, of its layers."""
    missing = sorted(report["missing_keys"])
    if lost := [key for key in missing if exact or _is_inserted(key)]:
        raise _disagree(name, f"there is no weight '{lost[0]}'")
    prefix, layered = f"{model.base_model_prefix}.", set[str]() if exact else _layered(model)

    def counts(key: str) -> bool:
        return exact or key.removeprefix(prefix).split(".")[0] in layered

    if lost := [key for key in missing if counts(key)]:
        raise _disagree(name, f"there is no weight '{lost[0]}'")
    if wrong := [key for key in sorted(report["unexpected_keys"]) if counts(key)]:
        raise _disagree(name, f"the weight '{wrong[0]}' has no place in the model")
    if missing:
        logger.warning("load: %s has no weights for %s; they start at random", name, ", ".join(missing))


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


def _is_inserted(key: str) -> bool:
    return any(part.startswith(PREFIX) for part in key.split("."))


def _replay_inserts(model: PreTrainedModel, made: Sequence[Edit]) -> None:
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


def _restore(model: PreTrainedModel, name: str, made: Sequence[Edit]) -> None:
    """Freeze again, and set the record, once it is held against the model."""
    named = dict(model.named_parameters())
    for number, edit in enumerate(made):
        gone = {each for later in made[number + 1 :] if later.kind == "truncate" for each in later.parameters}
        if any(later.kind == "merge" for later in made[number:]):
            gone |= {each for each in edit.parameters if _is_inserted(each)}
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
            if _is_inserted(key):
                named[key].requires_grad_(True)
