"""The identity of a run: settings, weights and data that must be the same for a run to resume from saved state.

`seal` writes saved state together with this identity, and only a run with the same identity uses the state.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import xxhash

from lamina.editing.record import edits, names_now
from lamina.errors import StoreError, UnsupportedModelError, first_line
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint_of_tensors
from lamina.utils import derive_seed, no_pipe, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.bank import Reader
    from lamina.tasks.split import Split
    from lamina.train.base import Runner
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Group, Plan
    from lamina.utils import JSON, JSONObject

    Facts = dict[str, dict[str, JSON]]
    """Where a fact belongs ("in 'cola'" for a learner, "" for the whole run) -> name of the fact -> value."""

# Options that may change when a run resumes. Epochs and learning rates are compared learner by learner instead.
_FREE = {"epochs", "learning_rate", "resume", "progress", "tensorboard", "trackers", "save_steps", "eval_batch_size"}
_FREE |= {"cache_dir", "num_workers", "test"}
_SHOWN = 200  # characters of a value in a message


def identity(
    runner: Runner,
    learners: Sequence[Learner],
    plan: Plan,
    validation: Sequence[Group],
    rates: Mapping[str, float],
    options: FitOptions,
) -> dict[str, Facts]:
    """Return the identity of a run of `fit` or `finetune`, JSON-ready.

    Args:
        runner: Runs the bank or model.
        learners: The learners to train.
        plan: The steps of the run, with its tasks.
        validation: The groups that are scored after each epoch.
        rates: Learner name -> highest learning rate.
        options: Options of the run.

    Returns:
        "settings", whose values messages quote, and "digests" of the weights and the data.
    """
    model = runner.base
    edit_facts = [[edit.kind, edit.stack, edit.layers, dict(edit.settings)] for edit in edits(model)]
    settings: Facts = {"": {"model": type(model).__name__, "edits": edit_facts, "trains": list(plan.tasks)}}
    settings[""] |= {"processes": world_size(), **options.model_dump(exclude=_FREE)}
    shapes = [(name, *weight.shape) for module in runner.modules for name, weight in module.named_parameters()]
    weights = runner.starting_weights([parameter for learner in learners for parameter in learner.parameters])
    digests: Facts = {"": {"weights of the model": weights, "shapes of the weights": derive_seed(shapes)}}
    for name, task in plan.tasks.items():
        facts = {"metric": task.metric, "epochs": plan.epochs[name], "learning_rate": rates[name]}
        facts |= {"by_row": task.by_row, "label_all_tokens": task.label_all_tokens}
        settings[f"in '{name}'"] = {**runner.settings(name), **facts}
    known: dict[int, dict[str, str]] = {}  # id of a split -> its digests, since tasks may share splits
    for group in (*plan.groups, *validation):
        for name, task in group.tasks.items():
            where, split = f"in the {group.part} part of '{name}'", task.split(group.part)
            if id(split) not in known:
                known[id(split)] = data_digests(split)
            settings[where] = {"rows": len(split)}
            digests[where] = {**known[id(split)], "tokens": group.inputs.digest}
    # Converted to JSON and back, so that it equals an identity that was read from a file (lists in place of tuples).
    return json.loads(json.dumps({"settings": settings, "digests": digests}, default=str))


def reader_settings(reader: Reader) -> dict[str, JSON]:
    """Return the settings of a reader as a flat, JSON-ready dict: "fusion.alpha", "head.labels", "stack", "seed" ..."""
    parts = {"fusion": FUSIONS.to_dict(reader.fusion), "head": HEADS.to_dict(reader.head)}
    flat = {f"{part}.{key}": value for part, fields in parts.items() for key, value in fields.items()}
    return {**flat, "stack": reader.stack, "seed": reader.seed}


def data_digests(split: Split) -> dict[str, str]:
    """Return digests of a split by name: "texts", "labels" and "words" (their places).

    Equal digests mean equal examples.
    """
    return {"texts": split.key, "labels": _digest(split.labels), "words": _digest(split.words or ())}


def _digest(values: Iterable[object]) -> str:
    """Return a hash of the `repr` of all values, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(repr(value).encode() + b"\0")
    return digest.hexdigest()


def starting_weights(model: PreTrainedModel, trained: Iterable[Tensor]) -> str:
    """Return a fingerprint of a model's weights at the start of its training.

    Trained weights that start at random are left out: those outside the layers (a new head), and those that an edit
    initialised. They differ each time the model is loaded, and checkpoints restore them.

    Args:
        model: The model.
        trained: The parameters that are trained. Every checkpoint holds them.
    """
    try:
        inside = [module for stack in stacks(model).values() for module in stack.run]
    except UnsupportedModelError:  # a convolutional network
        inside = list(model.base_model.modules())
    layered = {id(parameter) for module in inside for parameter in module.parameters(recurse=False)}
    made = edits(model)
    drawn = {
        now
        for number, edit in enumerate(made)
        if edit.kind in ("insert", "reinit", "merge")
        for all_now in names_now(made, number).values()
        for now in all_now
    }
    restored = set(map(id, trained))
    return fingerprint_of_tensors(
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in restored or (id(parameter) in layered and name not in drawn)
    )


def difference(before: Mapping[str, Facts], now: Mapping[str, Facts]) -> str | None:
    """Return the first difference between the identities of two runs as text; None if they are equal.

    Args:
        before: Identity of the run that saved its state.
        now: Identity of this run.

    Returns:
        A setting with both values, such as "batch_size 4 in 'cola', here 8", or "other texts in 'cola'" for a digest.
    """
    old, new = before.get("settings", {}), now.get("settings", {})
    for where in dict.fromkeys([*new, *old]):
        was, values = old.get(where, {}), new.get(where, {})
        for name in dict.fromkeys([*values, *was]):
            if was.get(name) != values.get(name):
                both = [str(place.get(name))[:_SHOWN] for place in (was, values)]
                return f"{name} {both[0]}{where and f' {where}'}, here {both[1]}"
    for where, values in now.get("digests", {}).items():
        was = before.get("digests", {}).get(where, {})
        if changed := [name for name, value in values.items() if was.get(name) != value]:
            return f"other {changed[0]}{where and f' {where}'}"
    return None


FORMAT = 2  # version of the file format; version 0.1 wrote another


def seal(run: Mapping[str, Facts], state: Mapping[str, JSON]) -> str:
    """Return the text of a JSON file with the run's identity `run`, its `state`, and a checksum over both.

    `unseal` reads the file. Values that JSON does not have are written as strings.
    """
    content = json.dumps([run, state], default=str)
    return f'{{"format": {FORMAT}, "checksum": "{xxhash.xxh3_128_hexdigest(content.encode())}", "content": {content}}}'


def unseal(path: Path) -> tuple[dict[str, Facts], JSONObject]:
    """Read a file that holds what `seal` returned, and return the run's identity and its state.

    Raises:
        StoreError: If the file cannot be read, is damaged, or has another format. The short message begins with the
            file's name; callers add the rest.
    """
    try:
        fields = json.loads(no_pipe(path).read_bytes())
        fields = fields if isinstance(fields, dict) else {}
        checksum = xxhash.xxh3_128_hexdigest(json.dumps(fields.get("content")).encode())
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path.name} is not JSON: {first_line(error)}") from error
    if (version := fields.get("format")) != FORMAT:
        what = f"format {str(version)[:40]}; this version of lamina reads format {FORMAT}"
        raise StoreError(f"{path.name} is damaged or was written by another version of lamina, in {what}")
    if fields.get("checksum") != checksum:
        raise StoreError(f"{path.name} does not hold what was saved: its checksum differs")
    return tuple(fields["content"])  # pyright: ignore[reportReturnType]
