"""What each projection of a block is for, and where convolutions are: rows of paths, checked against the model on use.

Reading layers needs no table. Changing what happens after the query projection does: the row says where it is.
To support a family, `add` a row, or put one into roles.yaml; the contract tests run over every row.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, final

import yaml
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.stack import children_of

Row = TypeVar("Row", "Roles", "Convolutions")

_STRICT = ConfigDict(extra="forbid")


@final
@dataclass(frozen=True, config=_STRICT)
class Attention:
    """Where an attention's projections are: dotted paths that start at the block.

    In a path a number counts through a list (-1 is its last), and `*` stands for any text, so that one path may name
    several modules.
    """

    query: str  # the same as `key` and `value` where one projection gives several
    key: str
    value: str
    output: str  # the projection after the heads
    head_width: str  # path of an attribute; a projection gives one or more heads of this width, grouped ones fewer
    fused: Literal["roles", "heads"] | None = None  # what one projection of several roles is ordered by, outermost
    positions: tuple[str, ...] = ()  # roles whose projections the attention also calls with position embeddings,
    positions_if: tuple[str, ...] = ()  # where these settings of the config are all true

    def projections(self) -> dict[str, tuple[str, ...]]:
        """Path -> the roles of its projection, each path once."""
        paths = {"query": self.query, "key": self.key, "value": self.value}
        return {path: tuple(role for role in paths if paths[role] == path) for path in paths.values()}


@final
@dataclass(frozen=True, config=_STRICT)
class Roles:
    """What the parts of a family's blocks are for."""

    attention: Attention
    ffn_in: tuple[str, ...]  # the feed-forward network's first projections; two where one of them is a gate
    ffn_out: str
    cross: Attention | None = None  # the attention over the encoder, where blocks have one


@final
@dataclass(frozen=True, config=_STRICT)
class Convolutions:
    """Where a family's convolutions are, and how they are counted."""

    blocks: str  # path, from the backbone, of what they are in; the first of those found is layer 1
    convolution: str  # path of a block's convolutions, from the block; several where it has a `*`
    stack: str = "main"  # "main" where its layers are those of `hidden_states`; another where they come before layer 0


def _read(kind: type[Row], table: str) -> dict[str, Row]:
    rows = yaml.safe_load(Path(__file__).with_name("roles.yaml").read_text("utf-8"))[table]
    return {family: kind(**row) for row in rows for family in row.pop("families")}


ROLES, CONVOLUTIONS = _read(Roles, "roles"), _read(Convolutions, "convolutions")


def roles_of(model: nn.Module, *, op: str) -> Roles:
    """Get the row of a model's family, or raise UnsupportedModelError."""
    missing = "no row of projection roles says what its projections are for"
    return _row(model, op, ROLES, missing, " Readers, taps, freezing and truncating need no row.")


def convolutions_of(model: nn.Module, *, op: str) -> Convolutions:
    """Get the row that says where the convolutions of a model's family are, or raise UnsupportedModelError."""
    return _row(model, op, CONVOLUTIONS, "no row says where its convolutions are")


def _row(model: nn.Module, op: str, rows: dict[str, Row], missing: str, more: str = "") -> Row:
    family = family_of(model)
    if family not in rows:
        reason = f"{missing}; rows: {', '.join(sorted(rows))}"
        hint = f"Add one with lamina.layers.roles.add.{more}"
        raise UnsupportedModelError(op=op, model_type=family, reason=reason, hint=hint)
    return rows[family]


def add(model_type: str, row: Roles | Convolutions) -> None:
    """Add a family's row; a family may have one of each kind. ConfigError if it has such a row."""
    name, known = ("ROLES", ROLES) if isinstance(row, Roles) else ("CONVOLUTIONS", CONVOLUTIONS)
    if model_type in known:
        raise ConfigError(f"roles: '{model_type}' has a row; a row is never replaced. Remove it from {name} first.")
    cast("dict[str, Any]", known)[model_type] = row


def family_of(model: nn.Module) -> str:
    """The family's name, as in `config.model_type`."""
    return str(getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__)


def has_path(block: nn.Module, path: str) -> bool:
    """Whether a block has the module that owns the projection at `path`."""
    return not isinstance(_follow([block], path.rpartition(".")[0]), str)


def modules_at(block: nn.Module, path: str, *, family: str, op: str) -> list[nn.Module]:
    """Get the modules at a path of a row; UnsupportedModelError names the part that is missing."""
    modules = _follow([block], path)
    if isinstance(modules, str):
        raise _wrong_row(path, modules, family, op)
    return modules


def head_width_at(block: nn.Module, path: str, *, family: str, op: str) -> int:
    """Get the width of one head, from the attribute at a path of a row, or raise UnsupportedModelError."""
    parent, _, name = path.rpartition(".")
    owner = modules_at(block, parent, family=family, op=op)[0]
    width: object = getattr(owner, name, None)
    if not isinstance(width, int):
        raise _wrong_row(path, f"{type(owner).__name__} has no number '{name}'", family, op)
    return width


def _wrong_row(path: str, problem: str, family: str, op: str) -> UnsupportedModelError:
    reason = f"its row of projection roles names '{path}', but {problem}"
    hint = "Correct the row, or use the version of transformers that it was written for."
    return UnsupportedModelError(op=op, model_type=family, reason=reason, hint=hint)


def _follow(modules: list[nn.Module], path: str) -> list[nn.Module] | str:
    """The modules at a path, or what was missing on the way; the empty path is where they are."""
    for part in path.split(".") if path else ():
        following: list[nn.Module] = []
        for module in modules:
            children = children_of(module)
            from_end = part.startswith("-") and part[1:].isdecimal()
            pattern = str(len(children) + int(part)) if from_end else part
            chosen = [child for name, child in children.items() if fnmatchcase(name, pattern)]
            if not chosen:
                return f"{type(module).__name__} has no '{part}' (it has {', '.join(children) or 'no parts'})"
            following += chosen
        modules = following
    return modules


def linear_weight(module: nn.Module) -> Tensor | None:
    """The weight of a linear map, `[out, in]` (a view where it is stored the other way); None for anything else."""
    weight: object = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Linear):
        return weight
    return weight.T if type(module).__name__ == "Conv1D" else None


def convolution_weight(module: nn.Module) -> Tensor | None:
    """The weight of a convolution, `[out, in / groups, kernel...]`; None if it is computed, and for anything else."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    plain = type(module) in (nn.Conv1d, nn.Conv2d) and weight is not None and weight.is_floating_point()
    return weight if plain else None
