"""What was done to a model's layers: a record per edit, kept with the model, saved and replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from lamina.errors import StoreError
from lamina.layers.layer_guard import EDITS
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

_PLACE = "_lamina_place"  # an attribute, as that of the edits
KINDS = ("insert", "merge", "reinit", "truncate", "freeze")


@final
@dataclass(frozen=True)
class Edit:
    """One change of a model's layers.

    Attributes:
        kind: "insert", "merge", "reinit", "truncate" or "freeze".
        stack: Name of the stack that was changed.
        layers: The layers it names, in the numbers of `hidden_states` before the edit.
        parameters: Full names of the parameters it changed, added, removed or froze.
        settings: The arguments, JSON-ready, as they replay it.
        seed: Seed of the random numbers it drew; None where it drew none, or from a generator of the caller.
    """

    kind: str
    stack: str
    layers: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __repr__(self) -> str:
        """All of it but the names of the parameters, of which there may be hundreds."""
        what = f"'{self.kind}', stack='{self.stack}', layers={list(self.layers)}, {len(self.parameters)} parameters"
        return f"Edit({what}, settings={dict(self.settings)}, seed={self.seed})"

    def to_dict(self) -> dict[str, Any]:
        """The record, JSON-ready."""
        return {**asdict(self), "layers": list(self.layers), "parameters": list(self.parameters)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Edit:
        """Read a record; StoreError if it is not one."""
        known = {field.name for field in fields(cls)}
        if set(given) != known or given.get("kind") not in KINDS:
            raise StoreError(
                f"edits: {str(dict(given))[:80]} is no record of an edit; it has {', '.join(sorted(known))}. "
                "Use the version of lamina that saved it, or save the model again."
            )
        return cls(**{**given, "layers": tuple(given["layers"]), "parameters": tuple(given["parameters"])})


def edits(model: PreTrainedModel) -> list[Edit]:
    """The edits of a model, oldest first, in a new list."""
    return list(getattr(model, EDITS, ()))


def record(model: PreTrainedModel, edit: Edit) -> Edit:
    """Add an edit to the model's record."""
    setattr(model, EDITS, (*edits(model), edit))
    if edit.kind != "freeze":
        note_place(model, "")
    return edit


def restore(model: PreTrainedModel, done: Sequence[Edit]) -> None:
    """Give a model, as it is loaded, the record of edits that were made to it before it was saved."""
    setattr(model, EDITS, tuple(done))
    vars(model).pop(_PLACE, None)


def note_place(model: PreTrainedModel, place: str) -> None:
    """Note where a model was saved; "" says that it is no longer what it was loaded from or saved to."""
    setattr(model, _PLACE, place)


def place_of(model: PreTrainedModel) -> str:
    """Where a model like this is: a folder or hub id; "" if nowhere, as it was changed since."""
    name = str(getattr(model, _PLACE, getattr(model, "name_or_path", None) or ""))
    return str(Path(name).absolute()) if name and is_dir(name) else name


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed of a generator; None is torch's global one."""
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device if generator else "cpu"))
