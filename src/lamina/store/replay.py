"""Replay the edits of a saved model when it is loaded, and check that the saved weights fit the edited model."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from lamina.editing.freeze import is_trained
from lamina.editing.insert import replay_insert
from lamina.editing.inserted_layer import is_inserted
from lamina.editing.record import Edit, names_now, set_edits
from lamina.errors import StoreError, UnsupportedModelError, convert_errors
from lamina.layers import select, stacks
from lamina.layers.block_moves import MOVES, name_then, order_of
from lamina.layers.selectors import is_all
from lamina.layers.stack import by_path
from lamina.store.files import damaged
from lamina.store.manifest import RECORD, EditsRecord
from lamina.store.models import source_of
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from transformers import PreTrainedModel


class LoadingInfo(TypedDict):
    """What transformers' `from_pretrained` reports about weights that did not fit.

    Attributes:
        missing_keys: Names of the model's weights that the file lacks.
        unexpected_keys: Names of the file's weights that the model lacks.
        mismatched_keys: Weights of another shape: name, shape in the file, shape in the model.
    """

    missing_keys: set[str]
    unexpected_keys: set[str]
    mismatched_keys: set[tuple[str, tuple[int, ...], tuple[int, ...]]]


_NUMBER = re.compile(r"\.\d+(?=\.)")


def without_numbers(name: str) -> str:
    """Return the name of a weight with "#" in place of the numbers of blocks."""
    return _NUMBER.sub(".#", name)


# The record


def read_record(name: str, revision: str | None = None) -> tuple[str, list[Edit]]:
    """Read the record of edits that `lamina.save` wrote beside a model.

    Args:
        name: A local folder or a hub id.
        revision: Branch, tag or commit on the hub. None: the main branch.

    Returns:
        The name of the saved model's class, and its edits, oldest first. "" and [] if there is no record.

    Raises:
        StoreError: If the record is damaged.
        UnknownNameError: If the record has an unknown key.
        ConfigError: If there is a `revision` other than "main" for a folder.
    """
    source = source_of(name, revision)
    path = Path(source) / RECORD if is_dir(source) else _download_record(source, revision)
    if path is None or not os.path.lexists(path):
        return "", []
    saved = EditsRecord.read(path)
    with convert_errors(lambda reason: damaged(path, f"holds an edit that cannot be understood ({reason})")):
        return saved.architecture, [Edit.from_dict(edit) for edit in saved.edits]


def _download_record(repo: str, revision: str | None) -> Path | None:
    """Return the local path of the record in `repo`, downloaded or cached; None if neither hub nor cache has one."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    cached = False
    try:  # first, because a download would retry for 23 seconds without a hub
        if not huggingface_hub.HfApi().file_exists(repo, RECORD, revision=revision):
            return None
    except Exception:  # the hub's and the connection's errors have no common class
        cached = True
    # If there is no such repository, loading the model raises the error.
    with suppress(OSError, ValueError, EntryNotFoundError):
        path = huggingface_hub.hf_hub_download(  # pyright: ignore[reportUnknownMemberType]
            repo, RECORD, revision=revision, local_files_only=cached
        )
        return Path(path)
    return None


# Inserted layers


def with_inserts(plain: type[PreTrainedModel], record: Sequence[Edit]) -> Any:
    """Return a subclass of `plain` whose constructor inserts the layers in `record`, so that weights fit into them.

    Loading keeps these layers in float32. The constructor raises LaminaError if a layer cannot be inserted.
    """

    def start(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)  # pyright: ignore[reportUnknownMemberType]
        # transformers calls constructors under `torch.device("meta")`. The inputs that find the layers need values; the
        # inserted weights go to the device of their neighbours in any case.
        with torch.device("cpu"):
            replay_inserts(self, record)
        names = {path.rpartition(".")[2] for path in by_path(self)}
        in_float32: set[str] = set(getattr(self, "_keep_in_fp32_modules_strict", None) or ())
        names = in_float32 | set(filter(is_inserted, names))
        self._keep_in_fp32_modules_strict = names  # pyright: ignore[reportPrivateUsage]

    return type(plain.__name__, (plain,), {"__init__": start, "__module__": plain.__module__})


def replay_inserts(model: PreTrainedModel, record: Sequence[Edit]) -> None:
    """Insert the recorded layers into a model, except layers that later edits merged or removed.

    If later edits moved or repeated blocks, the layers are inserted where these blocks are now. Raises LaminaError if a
    layer of the record cannot be inserted into this model (see `insert_`).
    """
    merged = max((number for number, edit in enumerate(record) if edit.kind == "merge"), default=-1)
    for number, edit in enumerate(record):
        if edit.kind == "insert" and number > merged:
            for remaining in _after_cuts(model, edit, record[number + 1 :]):
                replay_insert(model, remaining)


def _after_cuts(model: PreTrainedModel, edit: Edit, later: Sequence[Edit]) -> Iterator[Edit]:
    """Yield a recorded insertion for each of its stacks, with the numbers that its layers have in the model now.

    The layer numbers in `edit` are from before the `later` edits, which may have removed, moved or repeated blocks. If
    none did, `edit` itself is yielded. Stacks that lost all these layers are left out. `model` has its final depth.
    """
    moves = [move for move in later if move.kind in ("truncate", *MOVES) and edit.stack in (move.stack, "all")]
    if not moves:  # also a model without stacks
        yield edit
        return
    present, layers = stacks(model), edit.settings["layers"]
    for name in present if edit.stack == "all" else [edit.stack]:
        orders = [(move, order_of(move) or []) for move in moves if move.stack == name]
        depth = max([*orders[0][0].layers, *orders[0][1]]) if orders else present[name].depth
        chosen = select("1-" if is_all(layers) else layers, depth + 1, op="load")
        for _, order in orders:
            chosen = [place for place, layer in enumerate(order, 1) if layer in chosen]
        if chosen:
            yield replace(edit, settings={**edit.settings, "layers": chosen, "stack": name})


# Checks of the weights


def weight_problem(
    model: PreTrainedModel, missing: Collection[str], unexpected: Collection[str], *, exact: bool
) -> str | None:
    """Return a phrase that names a saved weight without a place in the loaded model, or a missing one; None if all fit.

    Args:
        model: The loaded model.
        missing: Names of its weights that were not saved.
        unexpected: Names of saved weights that it lacks.
        exact: Whether it has the class of the saved model. Then all weights must fit, except a backbone's pooler.
            Otherwise only inserted layers, and the parts that contain layers, must fit.
    """
    is_backbone = model.base_model is model

    def counted(keys: Collection[str]) -> list[str]:
        if exact:
            own = [key for key in keys if not (is_backbone and _part(model, key) == "pooler")]
        else:
            own = _in_layers(model, keys)
        return sorted({*own, *filter(is_inserted, keys)})

    if lost := counted(missing):
        return f"there is no weight '{lost[0]}'"
    if left := counted(unexpected):
        return f"the weight '{left[0]}' has no place in the model"
    return None


def check_weights(model: PreTrainedModel, name: str, report: LoadingInfo, *, exact: bool) -> None:
    """Raise StoreError, about the place `name`, if the weights there do not fit the model that was loaded from it.

    `report` is the loading report of transformers. For `exact` see `weight_problem`.
    """
    if problem := weight_problem(model, report["missing_keys"], report["unexpected_keys"], exact=exact):
        raise _mismatch(name, problem)


def check_head(model: PreTrainedModel, name: str, new: Sequence[str]) -> None:
    """Raise StoreError if the weights of a checkpoint seem to belong to another class of model.

    That is assumed if weights of a part with layers, or more than half of the parameters, would start at random. `new`
    are the names of the weights that start at random, and `name` is the checkpoint, for messages.
    """
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    share = sum(sizes.get(key, 0) for key in new) / sum(sizes.values())
    inner = _in_layers(model, new)
    if inner or share > 0.5:
        problem = f"the weights in {name} are not those of a {type(model).__name__}"
        new_part = f"{len(new)} tensors, {share:.0%} of its parameters, would start at random ('{(inner or new)[0]}')"
        raise StoreError(f"load: {problem}; {new_part}. Give another head, or allow new weights.")


def _in_layers(model: PreTrainedModel, names: Collection[str]) -> list[str]:
    """Return those of `names` whose parameters lie in children of the backbone that contain layers.

    Poolers and heads are left out. If the layers of the model cannot be found, all children of the backbone count.
    """
    if not names:
        return []
    children = dict(getattr(model, "base_model", model).named_children())
    layered = set(children)
    with suppress(UnsupportedModelError):  # convolutional networks can have inserted layers too
        used = {module for stack in stacks(model).values() for module in stack.run}
        layered = {name for name, child in children.items() if not used.isdisjoint(child.modules())}
    return [name for name in names if _part(model, name) in layered]


def _part(model: PreTrainedModel, name: str) -> str:
    """Return the name of the backbone's child to which a parameter belongs, or of the model's child for others."""
    return name.removeprefix(f"{model.base_model_prefix}.").split(".")[0]


def _mismatch(name: str, what: str) -> StoreError:
    return damaged(f"the weights in {name}", f"are not those of the model that was saved: {what}")


# The other edits


def restore_edits(model: PreTrainedModel, name: str, record: Sequence[Edit]) -> None:
    """Set which parameters are trained as the record of edits says, check that it fits the model, and attach it.

    Args:
        model: The loaded model: the saved one, its backbone, or its backbone with another head.
        name: Folder or hub id that it was loaded from, for error messages.
        record: The edits of the saved model.

    Raises:
        StoreError: If the model has a parameter that was removed, or lacks one that an edit names. Only a freeze may
            name missing parameters, if they belong to a head or another part without layers.
    """
    parameters = dict(model.named_parameters())
    here = _named_here(model, record, parameters)
    for number, edit in enumerate(here):
        if edit.kind == "truncate":
            back = [key for key in edit.parameters if key in parameters]
            if back and not any(later.kind == "duplicate" for later in here[number + 1 :]):
                raise _mismatch(name, f"'{back[0]}' was removed by an edit, but it is there")
        if edit.kind in ("truncate", "keep", "drop"):
            continue
        names = {now for all_now in names_now(here, number).values() for now in all_now}
        if any(later.kind == "merge" for later in here[number:]):
            names = {key for key in names if not is_inserted(key)}
        lost = [key for key in sorted(names) if key not in parameters]
        if lost := _in_layers(model, lost) if edit.kind == "freeze" else lost:
            raise _mismatch(name, f"the record names '{lost[0]}', which is not there")
        if edit.kind == "freeze":
            _replay_freeze(model, here, number, names)
    set_edits(model, here)


def _named_here(model: PreTrainedModel, record: Sequence[Edit], parameters: Collection[str]) -> list[Edit]:
    """Return the edits with the names that parameters and lists of blocks have in this model.

    The names differ by the backbone's prefix if only one of the two models, the saved and the loaded one, has a head. A
    parameter that the model does not have keeps its saved name.
    """
    prefix = f"{model.base_model_prefix}."
    paths: dict[str, str] = {}
    for edit in record:
        if saved := edit.settings.get("path"):
            forms = (saved, f"{prefix}{saved}", saved.removeprefix(prefix))
            starts = tuple(f"{form}." for form in forms)
            used = {start for start in starts for key in parameters if key.startswith(start)}
            paths[saved] = next((form for form in forms if f"{form}." in used), saved)

    def name_here(saved: str) -> str:
        for path, now in paths.items():
            if saved.startswith(f"{path}."):
                return f"{now}{saved.removeprefix(path)}"
        forms = (saved, f"{prefix}{saved}", saved.removeprefix(prefix))
        return next((form for form in forms if form in parameters), saved)

    return [
        replace(
            edit,
            parameters=tuple(map(name_here, edit.parameters)),
            settings={**edit.settings, "path": paths[edit.settings["path"]]}
            if edit.settings.get("path")
            else edit.settings,
        )
        for edit in record
    ]


def _replay_freeze(model: PreTrainedModel, record: Sequence[Edit], number: int, frozen: set[str]) -> None:
    """Replay edit `number` of the record, a freeze.

    Afterwards, parameters that the edit left trainable require gradients, and those that it froze do not; `frozen` has
    the present names of the latter. All others stay as they are.
    """
    train, prefix = record[number].settings.get("train"), f"{model.base_model_prefix}."
    for key, parameter in model.named_parameters():
        then = name_then(record, number, key)  # `train` has the names that parameters had then
        if is_trained(then, train) or is_trained(f"{prefix}{then}", train):
            parameter.requires_grad_(True)
        if key in frozen:
            parameter.requires_grad_(False)
