"""What a run is: what must be the same for it to go on from what it left behind, and what two runs differ in."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import xxhash

from lamina.editing.record import edits
from lamina.errors import StoreError, UnsupportedModelError, first_line
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint_of_tensors
from lamina.utils import derive_seed, world_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.bank import Reader
    from lamina.tasks.split import Split
    from lamina.train.base import Runner
    from lamina.train.groups import Group
    from lamina.train.learner import Learner
    from lamina.train.options import FitOptions
    from lamina.train.plan import Plan

Facts = dict[str, dict[str, Any]]  # where ("in reader 'cola'", or "" for the run) -> name -> value

_FREE = {"epochs", "learning_rate", "resume", "progress", "tensorboard", "save_steps", "eval_batch_size"}
_FREE |= {"cache_dir", "num_workers", "test"}  # may change when a run resumes; the first two are compared per learner
_SHOWN = 200  # characters of a value in a message


def identity(
    runner: Runner,
    learners: Sequence[Learner],
    plan: Plan,
    validation: Sequence[Group],
    rates: Mapping[str, float],
    options: FitOptions,
) -> dict[str, Facts]:
    """What a run of `fit` is, JSON-ready: settings, which messages quote, and digests of its weights and data."""
    model = runner.base
    changed = [[edit.kind, edit.stack, edit.layers, dict(edit.settings)] for edit in edits(model)]
    settings: Facts = {"": {"model": type(model).__name__, "edits": changed, "trains": list(plan.tasks)}}
    settings[""] |= {"processes": world_size(), **options.model_dump(exclude=_FREE)}
    shapes = [(name, *weight.shape) for module in runner.modules for name, weight in module.named_parameters()]
    weights = runner.starting_weights([parameter for learner in learners for parameter in learner.parameters])
    digests: Facts = {"": {"weights of the model": weights, "shapes of the weights": derive_seed(shapes)}}
    for name, task in plan.tasks.items():
        facts = {"metric": task.metric, "epochs": plan.epochs[name], "learning_rate": rates[name]}
        facts |= {"by_row": task.by_row, "label_all_tokens": task.label_all_tokens}
        settings[f"in '{name}'"] = {**runner.settings(name), **facts}
    known: dict[int, dict[str, Any]] = {}
    for group in (*plan.groups, *validation):
        for name, task in group.tasks.items():
            where, split = f"in the {group.part} part of '{name}'", task.split(group.part)
            if id(split) not in known:
                known[id(split)] = data_digests(split)
            settings[where] = {"rows": len(split)}
            digests[where] = known[id(split)] | {"tokens": group.inputs.digest}
    return json.loads(json.dumps({"settings": settings, "digests": digests}, default=str))


def reader_settings(reader: Reader) -> dict[str, Any]:
    """A reader's config, JSON-ready."""
    parts = {"fusion": FUSIONS.to_dict(reader.fusion), "head": HEADS.to_dict(reader.head)}
    flat = {f"{part}.{key}": value for part, fields in parts.items() for key, value in fields.items()}
    return {**flat, "stack": reader.stack, "seed": reader.seed}


def data_digests(split: Split) -> dict[str, str]:
    """What tells the examples of a part from others."""
    return {"texts": split.key, "labels": _digest(split.labels), "words": _digest(split.words or ())}


def _digest(cells: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for cell in cells:
        digest.update(repr(cell).encode() + b"\0")
    return digest.hexdigest()


def starting_weights(model: PreTrainedModel, learnt: Iterable[Tensor]) -> str:
    """Fingerprint of a model that is trained, but for what may be new at random in it: its head, and what edits drew.

    Only what is `learnt`, and so in every checkpoint, is left out.
    """
    try:
        inside = [module for stack in stacks(model).values() for module in stack.run]
    except UnsupportedModelError:  # a convolutional network
        inside = list(model.base_model.modules())
    layered = {id(parameter) for module in inside for parameter in module.parameters(recurse=False)}
    drawn = {name for edit in edits(model) if edit.kind not in ("freeze", "truncate") for name in edit.parameters}
    held = set(map(id, learnt))
    return fingerprint_of_tensors(
        (name, parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in held or (id(parameter) in layered and name not in drawn)
    )


def difference(before: Mapping[str, Facts], now: Mapping[str, Facts]) -> str | None:
    """What the first fact is in which a run differs from one that was, as a clause: "batch_size 4, here 8"."""
    old, new = before.get("settings", {}), now.get("settings", {})
    for where in dict.fromkeys([*new, *old]):
        was, values = old.get(where, {}), new.get(where, {})
        for name in dict.fromkeys([*values, *was]):
            if was.get(name) != values.get(name):
                both = [str(place.get(name))[:_SHOWN] for place in (was, values)]
                return f"{name} {both[0]}{where and f' {where}'}, here {both[1]}"
    for where, values in now.get("digests", {}).items():
        was = before.get("digests", {}).get(where, {})
        if other := [name for name, value in values.items() if was.get(name) != value]:
            return f"other {other[0]}{where and f' {where}'}"
    return None


FORMAT = 2  # of the file and of what is in it; a checkpoint of version 0.1 had another


def seal(run: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """What a run has come to, as JSON with the run that it is of, and a checksum."""
    content = json.dumps([run, state], default=str)
    return f'{{"format": {FORMAT}, "checksum": "{xxhash.xxh3_128_hexdigest(content.encode())}", "content": {content}}}'


def unseal(path: Path) -> tuple[dict[str, Facts], dict[str, Any]]:
    """The run and the state that `seal` wrote; a StoreError, in short, if the file is damaged or of another version."""
    try:
        fields = json.loads(path.read_bytes())
        fields = fields if isinstance(fields, dict) else {}
        checksum = xxhash.xxh3_128_hexdigest(json.dumps(fields.get("content")).encode())
    except OSError as error:
        raise StoreError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path.name} is no JSON: {first_line(error)}") from error
    if (version := fields.get("format")) != FORMAT:
        what = f"format {str(version)[:40]}; this version of lamina reads format {FORMAT}"
        raise StoreError(f"{path.name} is damaged or was written by another version of lamina, in {what}")
    if fields.get("checksum") != checksum:
        raise StoreError(f"{path.name} holds something else than was saved; its checksum differs")
    return tuple(fields["content"])  # pyright: ignore[reportReturnType]
