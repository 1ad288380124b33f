"""Tables of projection roles per family of models: what each projection in a block is for, and where convolutions are.

Reading layers needs no table. An edit that acts on, for example, the query projection does: the family's row holds the
projection's path, which is checked against the model on use. To support a family, call `add`, or put a row into
roles.yaml.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar, cast, final

import yaml
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers.stack import children_of

AnyRow = TypeVar("AnyRow", "Roles", "Convolutions")

_STRICT = ConfigDict(extra="forbid")


@final
@dataclass(frozen=True, config=_STRICT)
class OwnPositions:
    """A query or key projection for position embeddings only, which some models of a family have.

    Attributes:
        role: "query" or "key": what the projection computes.
        path: Path of the projection, relative to the block.
        setting: Name of a config setting that is a list. The model has the projection if the list contains `value`.
    """

    role: Literal["query", "key"]
    path: str
    setting: str
    value: str


@final
@dataclass(frozen=True, config=_STRICT)
class Attention:
    """The paths of an attention's projections, relative to the block.

    A number in a path is an index into a list of modules (-1 is the last). `*` stands for any text, so one path may
    name several modules.

    Attributes:
        query: Path of the query projection; equal to `key` or `value` if one projection computes both.
        key: Path of the key projection.
        value: Path of the value projection.
        output: Path of the projection after the heads.
        head_width: Path of an attribute with the width of one head. Grouped key and value projections have fewer heads.
        fused: If one projection has several roles, the order of its output: "roles" (all queries, then all keys, ...)
            or "heads" (all roles of the first head, then ...). None: each role has its own projection.
        positions: Roles whose projections are also applied to position embeddings, if all settings in `positions_if`
            are true.
        positions_if: Names of settings of the config; see `positions`. (): no condition.
        positions_shared_by: Name of a setting. If it is False, positions have projections of their own, in
            `positions_own`. None: the family has no such setting.
        positions_own: The separate projections for positions.
    """

    query: str
    key: str
    value: str
    output: str
    head_width: str
    fused: Literal["roles", "heads"] | None = None
    positions: tuple[str, ...] = ()
    positions_if: tuple[str, ...] = ()
    positions_shared_by: str | None = None
    positions_own: tuple[OwnPositions, ...] = ()

    def projections(self) -> dict[str, tuple[str, ...]]:
        """Return a dict: path of a projection -> roles of the projection ("query", "key", "value")."""
        paths = {"query": self.query, "key": self.key, "value": self.value}
        return {path: tuple(role for role in paths if paths[role] == path) for path in paths.values()}


@final
@dataclass(frozen=True, config=_STRICT)
class Roles:
    """A family's row in the table of roles: where in a block its attention and its feed-forward network are.

    Attributes:
        attention: The projections of the block's attention.
        ffn_in: First projections of the feed-forward network; two if one of them is a gate.
        ffn_out: Its last projection.
        cross: The attention over the encoder, in decoders that have one.
        ffn_norm: The norm whose output only the network reads. None: there is no such norm.
    """

    attention: Attention
    ffn_in: tuple[str, ...]
    ffn_out: str
    cross: Attention | None = None
    ffn_norm: str | None = None


@final
@dataclass(frozen=True, config=_STRICT)
class Convolutions:
    """A family's row in the table of convolutions: where they are, and how its layers are numbered.

    Attributes:
        blocks: Path of the blocks, from the backbone; the first module found there is layer 1.
        convolution: Path of the convolutions, from a block; `*` names several.
        stack: Name of the layers' stack: "main" if they are entries of the model's `hidden_states`, any other name if
            they run before entry 0 is computed.
    """

    blocks: str
    convolution: str
    stack: str = "main"


@final
@dataclass(frozen=True, config=_STRICT)
class BlockSettings:
    """Names of config settings that describe single blocks; see roles.yaml.

    Attributes:
        entries: Settings that are lists with an entry per block.
        numbers: Settings that are lists of block numbers, from 0.
        leading: Settings with the number of lowest blocks of one kind.
        trailing: Settings with the number of highest blocks of one kind.
        last: Settings with the number of the last block, from 0.
        types: The `entries` that name the kinds of the blocks.
        taps: Settings that list the blocks, from 0, whose outputs a head reads, one part of the head per entry; the
            value is the nested config that describes the blocks, "" for the config that has the list.
    """

    entries: tuple[str, ...]
    numbers: tuple[str, ...]
    leading: tuple[str, ...]
    trailing: tuple[str, ...]
    last: tuple[str, ...]
    types: tuple[str, ...]
    taps: dict[str, str]


def _read(row_class: type[AnyRow], table: str) -> dict[str, AnyRow]:
    return {family: row_class(**row) for row in _TABLES[table] for family in row.pop("families")}


_TABLES = yaml.safe_load(Path(__file__).with_name("roles.yaml").read_text("utf-8"))
ROLES, CONVOLUTIONS = _read(Roles, "roles"), _read(Convolutions, "convolutions")
BLOCK_SETTINGS = BlockSettings(**_TABLES["block_settings"])
BLOCK_TABLES: dict[str, int] = _TABLES["block_tables"]  # path from the module that has the blocks -> axis
# family -> paths, from the block, of the parts that only the first block has and that serve all blocks
FIRST_BLOCK: dict[str, list[str]] = {}
for _entry in _TABLES["first_block"]:
    for _name in _entry["families"]:
        FIRST_BLOCK.setdefault(_name, []).append(_entry["part"])


def roles_of(model: nn.Module, *, op: str) -> Roles:
    """Return the row of projection roles for a model's family; without a row, UnsupportedModelError about `op`."""
    missing = "no row of projection roles says what its projections are for"
    return _row(model, op, ROLES, missing, " Readers, taps, freezing and truncating need no row.")


def convolutions_of(model: nn.Module, *, op: str) -> Convolutions:
    """Return the row that says where a model's convolutions are; without a row, UnsupportedModelError about `op`."""
    return _row(model, op, CONVOLUTIONS, "no row says where its convolutions are")


def _row(model: nn.Module, op: str, rows: dict[str, AnyRow], missing: str, more: str = "") -> AnyRow:
    """Return the entry of a model's family in `rows` (family -> entry); without one, UnsupportedModelError about `op`.

    Its message gives the reason `missing`, lists the families that have entries, and says how to add one. `more` is the
    end of the message, with a space in front ("": none).
    """
    family = family_of(model)
    if family not in rows:
        reason = f"{missing}; rows: {', '.join(sorted(rows))}"
        hint = f"Add one with lamina.layers.roles.add.{more}"
        raise UnsupportedModelError(op=op, model_type=family, reason=reason, hint=hint)
    return rows[family]


def add(model_type: str, row: Roles | Convolutions) -> None:
    """Add a row for the family `model_type`; a family may have one `Roles` and one `Convolutions`.

    Raises:
        ConfigError: If the family already has a row of that class.
    """
    name, table = ("ROLES", ROLES) if isinstance(row, Roles) else ("CONVOLUTIONS", CONVOLUTIONS)
    if model_type in table:
        raise ConfigError(f"roles: '{model_type}' has a row; a row is never replaced. Remove it from {name} first.")
    cast("dict[str, Roles | Convolutions]", table)[model_type] = row


def family_of(model: nn.Module) -> str:
    """Return the name of a model's family: `config.model_type`, or the class name if there is none."""
    return str(getattr(getattr(model, "config", None), "model_type", "") or type(model).__name__)


def has_path(block: nn.Module, path: str) -> bool:
    """Return whether a block has the module that contains the projection at `path`."""
    return not isinstance(_follow([block], path.rpartition(".")[0]), str)


def modules_at(block: nn.Module, path: str, *, family: str, op: str) -> list[nn.Module]:
    """Return the modules in a block at a `path` from the row of `family`.

    Raises:
        UnsupportedModelError: If a part of the path does not exist; the message is about `op` and names the part.
    """
    modules = _follow([block], path)
    if isinstance(modules, str):
        raise _wrong_row(path, modules, family, op)
    return modules


def head_width_at(block: nn.Module, path: str, *, family: str, op: str) -> int:
    """Return the width of one attention head: the int attribute in a block at a `path` from the row of `family`.

    Raises:
        UnsupportedModelError: If there is no such attribute; the message is about `op`.
    """
    parent, _, name = path.rpartition(".")
    owner = modules_at(block, parent, family=family, op=op)[0]
    width: object = getattr(owner, name, None)
    if not isinstance(width, int):
        raise _wrong_row(path, f"{type(owner).__name__} has no number '{name}'", family, op)
    return width


def _wrong_row(path: str, problem: str, family: str, op: str) -> UnsupportedModelError:
    """Return the error about `op` for a `path` in a family's row of projection roles that does not fit the model.

    `problem` says why it does not fit.
    """
    reason = f"its row of projection roles names '{path}', but {problem}"
    hint = "Correct the row, or use the version of transformers that it was written for."
    return UnsupportedModelError(op=op, model_type=family, reason=reason, hint=hint)


def _follow(modules: list[nn.Module], path: str) -> list[nn.Module] | str:
    """Return the modules at `path` inside each of `modules`. If a part of the path is missing, return a message.

    The parts of a path are joined by dots. A part is the name of a child, in which `*` stands for any text, or a
    negative index, such as -1 for the last child. An empty path returns `modules`.
    """
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
    """Return the weight of a linear map as `[out, in]`; None if the module is not linear, or is quantised.

    The Conv1D of GPT-2 stores `[in, out]`; the result is then a transposed view.
    """
    weight: object = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return None
    if isinstance(module, nn.Linear):
        return weight
    return weight.T if type(module).__name__ == "Conv1D" else None


def convolution_weight(module: nn.Module) -> Tensor | None:
    """Return the weight of a Conv1d or Conv2d, `[out, in / groups, kernel...]`; None for other modules.

    None, too, for subclasses, and if the weight is computed from other parameters (weight norm) or quantised.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    plain = type(module) in (nn.Conv1d, nn.Conv2d) and weight is not None and weight.is_floating_point()
    return weight if plain else None
