"""What each projection of a block is for, and where convolutions are: rows of paths, checked against the model on use.

Reading layers needs no table. Changing what happens after the query projection does: the row says where it is.
To support a family, `add` a row, or put one into roles.yaml; the contract tests run over every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, final

import yaml
from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.stack import children_of

Row = TypeVar("Row", "Roles", "Convolutions")


@final
@dataclass(frozen=True)
class Attention:
    """Where an attention's projections are.

    A path is dotted and starts at the block; a number counts through a list (-1 is its last), `*` stands for any
    text, so that one path may name several modules.

    Attributes:
        query: Path of the query projection; the same as `key` and `value` where one projection gives several.
        key: Path of the key projection.
        value: Path of the value projection.
        output: Path of the projection after the heads.
        head_width: Path of the attribute that holds the width of one head. A projection gives one or more heads,
            each a run of that many features, so that grouped key and value heads need no field of their own.
        fused: Where one projection gives several roles, what comes first: "roles" (all query heads, then all key
            heads, ...) or "heads" (query, key and value of head 0, then those of head 1, ...). None otherwise.
        positions: Roles whose projections the attention also calls with position embeddings.
        positions_if: The settings of the config which all must be true for that.
    """

    query: str
    key: str
    value: str
    output: str
    head_width: str
    fused: Literal["roles", "heads"] | None = None
    positions: tuple[str, ...] = ()
    positions_if: tuple[str, ...] = ()

    def projections(self) -> dict[str, tuple[str, ...]]:
        """Path -> the roles of its projection, each path once."""
        paths = {"query": self.query, "key": self.key, "value": self.value}
        return {path: tuple(role for role in paths if paths[role] == path) for path in paths.values()}


@final
@dataclass(frozen=True)
class Roles:
    """What the parts of a family's blocks are for.

    Attributes:
        attention: The self-attention.
        ffn_in: Paths of the feed-forward network's first projections; two where one of them is a gate.
        ffn_out: Path of its last.
        cross: The attention over the encoder, where blocks have one.
    """

    attention: Attention
    ffn_in: tuple[str, ...]
    ffn_out: str
    cross: Attention | None = None


@final
@dataclass(frozen=True)
class Convolutions:
    """Where a family's convolutions are, and how they are counted.

    Attributes:
        blocks: Path, from the backbone, of what they are in; the first of those found is layer 1.
        convolution: Path of a block's convolutions, from the block; several where it has a `*`.
        stack: Name of the sequence: "main" where its layers are those of the model's `hidden_states`, and another
            where they come before layer 0.
    """

    blocks: str
    convolution: str
    stack: str = "main"


def roles_of(model: nn.Module, *, op: str) -> Roles:
    """Get the row of a model's family, or raise UnsupportedModelError."""
    return _row(model, op, ROLES, "no row of projection roles says what its projections are for", _NO_ROW_NEEDED)


def convolutions_of(model: nn.Module, *, op: str) -> Convolutions:
    """Get the row that says where the convolutions of a model's family are, or raise UnsupportedModelError."""
    return _row(model, op, CONVOLUTIONS, "no row says where its convolutions are", "")


_NO_ROW_NEEDED = " Readers, taps, freezing and truncating need no row."


def _row(model: nn.Module, op: str, rows: dict[str, Row], missing: str, more: str) -> Row:
    family = family_of(model)
    if family not in rows:
        reason = f"{missing}; rows: {', '.join(sorted(rows))}"
        hint = f"Add one with lamina.layers.roles.add.{more}"
        raise UnsupportedModelError(op=op, model_type=family, reason=reason, hint=hint)
    return rows[family]


def add(model_type: str, row: Roles | Convolutions) -> None:
    """Add a family's row; a family may have one of each kind.

    Raises:
        ConfigError: If the family (`config.model_type`) has such a row.
    """
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


_ROW_HINT = "Correct the row, or use the version of transformers that it was written for."


def modules_at(block: nn.Module, path: str, *, family: str, op: str) -> list[nn.Module]:
    """Get the modules at a path of a row; UnsupportedModelError names the part that is missing."""
    modules = _follow([block], path)
    if isinstance(modules, str):
        reason = f"its row of projection roles names '{path}', but {modules}"
        raise UnsupportedModelError(op=op, model_type=family, reason=reason, hint=_ROW_HINT)
    return modules


def head_width_at(block: nn.Module, path: str, *, family: str, op: str) -> int:
    """Get the width of one head, from the attribute at a path of a row, or raise UnsupportedModelError."""
    parent, _, name = path.rpartition(".")
    owner = modules_at(block, parent, family=family, op=op)[0]
    width: object = getattr(owner, name, None)
    if not isinstance(width, int):
        reason = f"its row of projection roles names '{path}', but {type(owner).__name__} has no number '{name}'"
        raise UnsupportedModelError(op=op, model_type=family, reason=reason, hint=_ROW_HINT)
    return width


def _follow(modules: list[nn.Module], path: str) -> list[nn.Module] | str:
    """The modules at a path, or what was missing on the way."""
    for part in path.split("."):
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
    """The weight of a plain convolution, `[out, in / groups, kernel...]`; None for anything else.

    One that computes its weight, as weight norm does, is not plain.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    plain = type(module) in (nn.Conv1d, nn.Conv2d) and weight is not None and weight.is_floating_point()
    return weight if plain else None


def _read() -> tuple[dict[str, Roles], dict[str, Convolutions]]:
    table: dict[str, list[dict[str, Any]]] = yaml.safe_load(Path(__file__).with_name("roles.yaml").read_text("utf-8"))
    roles: dict[str, Roles] = {}
    for fields in table["roles"]:
        families = fields.pop("families")
        attentions: dict[str, Any] = {
            name: Attention(**_tuples(fields.pop(name))) for name in ("attention", "cross") if name in fields
        }
        roles |= dict.fromkeys(families, Roles(**_tuples(fields), **attentions))
    convolutions: dict[str, Convolutions] = {}
    for fields in table["convolutions"]:
        convolutions |= dict.fromkeys(fields.pop("families"), Convolutions(**fields))
    return roles, convolutions


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(cast("list[str]", value)) if isinstance(value, list) else value for name, value in fields.items()
    }


ROLES, CONVOLUTIONS = _read()
