"""Replay the edits of a saved model when it is loaded, and check that its weights fit them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lamina.editing.freeze import is_trained
from lamina.editing.insert import replay_insert
from lamina.editing.inserted_layer import is_inserted
from lamina.editing.record import Edit, restore
from lamina.errors import StoreError, UnsupportedModelError, convert_errors
from lamina.layers import select, stacks
from lamina.store.files import damaged
from lamina.store.manifest import RECORD, EditsRecord
from lamina.store.models import source_of
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel


def read_record(name: str, revision: str | None = None) -> tuple[str, list[Edit]]:
    """The class of a model that was saved, and its edits; "" and none if there is no record of them."""
    source = source_of(name, revision)
    path = Path(source) / RECORD if is_dir(source) else _fetched(source, revision)
    if path is None or not os.path.lexists(path):
        return "", []
    saved = EditsRecord.read(path)
    with convert_errors(lambda reason: damaged(path, f"holds an edit that cannot be understood ({reason})")):
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
