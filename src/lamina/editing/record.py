"""The record of a model's edits: one `Edit` each, stored on the model, saved and replayed."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.errors import ConfigError, StoreError
from lamina.layers.block_moves import MOVES, moved
from lamina.layers.layer_guard import EDITS
from lamina.layers.wrappers import checked_model
from lamina.utils import JSON, JSONObject, is_dir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn
    from transformers import PreTrainedModel

_LOCATION = "_lamina_place"  # attribute of the model object, so that copies of a model carry it
_SOURCE = "_lamina_source"
# What an adapter around a projection, PEFT's trained copy of a module, or a block that is compiled alone adds to paths
_WRAPPER = re.compile(r"\b(?:base_layer|original_module|_orig_mod)\.")
KINDS = ("insert", "merge", "reinit", "truncate", "freeze", *MOVES)


@final
@dataclass(frozen=True)
class Edit:
    """One change of a model's layers; every editing function returns one.

    Attributes:
        kind: "insert", "merge", "reinit", "truncate", "keep", "drop", "duplicate" or "freeze".
        stack: Name of the stack that was changed; "all" if several or all were.
        layers: The edited layers, ascending, numbered as in `hidden_states` before the edit; for "truncate", "keep" and
            "drop" the removed ones.
        parameters: Full names of the parameters that were changed, added, removed or frozen. A removed parameter has
            its name before the edit; all others have their name after it. Later edits may rename them: see `names_now`.
        settings: The arguments of the edit, JSON-ready. With them the edit can be repeated.
        seed: Seed of the random numbers; None if none were drawn.
    """

    kind: str
    stack: str
    layers: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __repr__(self) -> str:
        """Return all fields as text, but only the number of parameters."""
        what = f"'{self.kind}', stack='{self.stack}', layers={list(self.layers)}, {len(self.parameters)} parameters"
        return f"Edit({what}, settings={dict(self.settings)}, seed={self.seed})"

    def to_dict(self) -> dict[str, JSON]:
        """Return the edit as a JSON-ready dict."""
        return {**asdict(self), "layers": list(self.layers), "parameters": list(self.parameters)}

    @classmethod
    def from_dict(cls, saved: JSONObject) -> Edit:
        """Build the edit from `saved`, a dict that `to_dict` returned.

        Raises:
            StoreError: If the dict does not describe an edit.
        """
        known = {field.name for field in fields(cls)}
        if set(saved) != known or saved.get("kind") not in KINDS:
            problem = f"{str(dict(saved))[:80]} is not a record of an edit, which has {', '.join(sorted(known))}"
            hint = "Use the version of lamina that saved it, or save the model again."
            raise StoreError(f"edits: {problem}. {hint}")
        return cls(**{**saved, "layers": tuple(saved["layers"]), "parameters": tuple(saved["parameters"])})


def edits(model: PreTrainedModel) -> list[Edit]:
    """Return a new list of a model's edits, oldest first.

    Raises ConfigError if inserted layers have been lost, or `model` is not a model.
    """
    check_inserted(model := checked_model(model, "edits"), "edits")
    return recorded(model)


def check_inserted(model: nn.Module, op: str) -> None:
    """Raise ConfigError, whose message begins with `op`, if layers inserted into a model are no longer in it."""
    made = recorded(model)
    owner = next((part for part in model.modules() if EDITS in vars(part)), model)  # it is inside a PEFT model
    for number, edit in enumerate(made):
        if edit.kind == "insert" and not any(later.kind == "merge" for later in made[number:]):
            paths = (name for name, _ in owner.named_parameters(remove_duplicate=False))
            names = {_WRAPPER.sub("", path) for path in paths}
            wanted = [now for all_now in names_now(made, number).values() for now in all_now]
            if lost := [name for name in wanted if name not in names]:
                problem = f"the inserted layer '{lost[0]}' is no longer in the model: another library has replaced it"
                hint = "Load the model again, call merge_, and then quantise or convert it"
                raise ConfigError(f"{op}: {problem}. {hint}.")


def names_now(made: Sequence[Edit], number: int) -> dict[str, list[str]]:
    """Return recorded name -> present names, for the parameters of the edit with index `number` in the list `made`.

    The list is empty for a parameter in a block that was cut off, and has several names for one in a repeated block.
    Later merges are not followed: the weight of a merged layer keeps its name here.
    """
    names = {name: [name] for name in made[number].parameters}
    for later in made[number + 1 :]:
        if later.kind == "truncate":
            gone = set(later.parameters)
            names = {name: [now for now in all_now if now not in gone] for name, all_now in names.items()}
        elif later.kind in MOVES:
            names = {name: [new for now in all_now for new in moved(now, later)] for name, all_now in names.items()}
    return names


def recorded(model: nn.Module) -> list[Edit]:
    """Return the edits recorded on a model as a new list, oldest first. Unlike `edits`, it checks nothing."""
    return list(getattr(model, EDITS, ()))


def record(model: PreTrainedModel, edit: Edit) -> Edit:
    """Append an edit to the model's record, and return it.

    Unless the edit only froze layers, it also clears the location from which the model can be loaded (see
    `location_of`), because the model there is now different.
    """
    setattr(model, EDITS, (*recorded(model), edit))
    if edit.kind != "freeze":
        set_location(model, "")
    return edit


def set_edits(model: PreTrainedModel, saved: Sequence[Edit]) -> None:
    """Set the record of a model that was just loaded to `saved`, the edits that were made before it was saved.

    From then on `location_of` returns the folder or hub id that the model was loaded from.
    """
    setattr(model, EDITS, tuple(saved))
    vars(model).pop(_LOCATION, None)


def set_source(model: PreTrainedModel, source: str) -> None:
    """Store the folder or hub id that a model was loaded from; a folder must be an absolute path."""
    setattr(model, _SOURCE, source)


def source_of(model: PreTrainedModel) -> str:
    """Return the folder or hub id that a model was loaded from; "" if none is known.

    After `lamina.load`, a folder is an absolute path; after other loaders, the path that they were given.
    """
    return str(getattr(model, _SOURCE, getattr(model, "name_or_path", None) or ""))


def set_location(model: PreTrainedModel, location: str) -> None:
    """Store `location`, the folder or hub id from which this model can be loaded; "" if there is none."""
    setattr(model, _LOCATION, location)


def location_of(model: PreTrainedModel) -> str:
    """Return the folder (as an absolute path) or hub id from which the same model can be loaded.

    Returns "" if there is none, or if Lamina has edited the model since, except by `freeze_`, or trained it. Changes by
    hand are not noticed.
    """
    name = str(getattr(model, _LOCATION, source_of(model)))
    return str(Path(name).absolute()) if name and is_dir(name) else name


def draw_seed(generator: torch.Generator | None) -> int:
    """Return a seed drawn from `generator`, or from torch's global generator if that is None."""
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device if generator else "cpu"))
