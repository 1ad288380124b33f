"""The study `drift`: how far the weights of models lie from those of a base model, for each block and projection."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pandas as pd
import torch
from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError, check_known
from lamina.layers import default_stack, select
from lamina.layers.adapters import check_no_adapters
from lamina.layers.roles import ROLES, Attention, family_of, has_path, modules_at
from lamina.layers.selectors import ranges
from lamina.layers.wrappers import checked_model
from lamina.store.load_model import load
from lamina.studies.study import Figure, Pivot, Study, model_facts, study_settings
from lamina.train.results import summarise, tied
from lamina.utils import JSON, Row, check_types

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.layers.selectors import Selector
    from lamina.studies.study import Frame
    from lamina.train.results import Summary

    Checkpoint = PreTrainedModel | str | Path

_OP = "drift"
_LARGEST_SVD = 1024  # up to this length of the shorter side, all singular values of a matrix are computed
_STEPS = 200  # most steps of the power iteration
_CONVERGED = 1e-7  # relative change of the value at which the power iteration stops
_SHOWN = {  # measure -> its unit, and what to look for in its chart
    "l2": (
        "norm of the difference",
        "Higher: training changed this matrix more. Larger matrices lie higher, so compare blocks, not roles.",
    ),
    "relative": (
        "norm of the difference / norm of the base",
        "0: not changed. 0.1: the change is a tenth as large as the weights were.",
    ),
    "spectral": (
        "largest singular value of the difference",
        "Higher: the change pushes more strongly in a single direction.",
    ),
}


@check_types("drift")
def drift(
    base: Checkpoint,
    others: Checkpoint | Sequence[Checkpoint] | Mapping[str, Checkpoint | Sequence[Checkpoint]],
    *,
    layers: Selector = "1-",
    roles: str | Sequence[str] = "all",
    stack: str | None = None,
) -> Study:
    """Measure how far the linear weights of each block lie from the weights of the same block in other checkpoints.

    The role of a linear map is its purpose: "query", "key", "value", "attention_output", "ffn_in" or "ffn_out", and for
    cross-attention the same names after "cross_". If one projection serves several roles, their names are joined
    ("query+key+value"). Families that are not in the table `lamina.layers.roles.ROLES` have a single role, "linear":
    all linear maps of a block.

    Each measure covers all weights of a role: "l2" is the norm of the difference; "relative" is that norm divided by
    the norm of the base's weights; "spectral" is the largest singular value of the difference, in any of the role's
    matrices.

    Args:
        base: A model, or a folder or name to load it from with `lamina.load`.
        others: One or more models, folders or names to compare with the base. A mapping gives them names, and may give
            several, one per seed, the same name; otherwise they are numbered from 1. Folders are loaded one at a time.
        layers: Blocks to compare, from 1.
        roles: Names of roles, or "all".
        stack: Name of the stack. None: the only one, or the encoder.

    Returns:
        A study with the columns "run" (name of the other checkpoint), "seed" (its number under this name, from 0),
        "stack", "layer", "role", "measure" and "score". `settings["spectral_by"]` names the method: "svd", or "power
        iteration" if both sides of a matrix are longer than 1,024.

    Raises:
        ConfigError: If checkpoints differ in family, depth or the shape of a weight; if layer 0 is selected, `roles` or
            `others` is empty, one of the others is named "base", or a model carries adapters.
        UnknownNameError: If a role or the stack does not exist.
        ModelNotFoundError: If there is no model of a given name.
        StoreError: If files of a model are damaged.
        LayerIndexError: If a layer does not exist.
        UnsupportedModelError: If transformers does not know a family, or blocks or their linear maps cannot be found.

    Source:
        Tamkin et al. 2020, arXiv:2004.14975: L2 distance per block, of the output sub-layer, which is "ffn_out" here;
        the other roles and measures are ours.
    """
    start = _BlockWeights(_loaded(base), layers, stack, [roles] if isinstance(roles, str) and roles != "all" else roles)
    rows: list[Row] = []
    models: dict[str, JSON] = {"base": model_facts(start.model)}
    named = _named(others)
    for name, checkpoints in named.items():
        for seed, checkpoint in enumerate(checkpoints):
            model = _loaded(checkpoint)
            _check_same(_sizes(start.model, start.stack), _sizes(model, default_stack(model, stack, op=_OP)), name)
            other = _BlockWeights(model, start.layers, start.stack.name, start.roles)
            models[name if len(checkpoints) == 1 else f"{name} {seed}"] = model_facts(other.model)
            _check_same(start.shapes(), other.shapes(), name)
            rows += _rows(start, other, name, seed)
    options: dict[str, JSON] = {"layers": start.layers, "roles": list(start.roles), "stack": start.stack.name}
    options["spectral_by"] = "power iteration" if start.largest > _LARGEST_SVD else "svd"
    settings = {**study_settings({}, **options), "models": models}
    figures = {
        measure: Figure(
            "line",
            x="layer",
            colour="run" if len(named) > 1 else "role",
            facet="role" if len(named) > 1 else None,
            where={"measure": measure},
            title=f"{measure.capitalize()} distance of weights by block: {', '.join(named)}",
            value_title=value,
            note=note,
        )
        for measure, (value, note) in _SHOWN.items()
    }
    table, pivot = pd.DataFrame(rows), Pivot(("run", "role", "layer"), ("measure",))
    return Study(_OP, table, settings, figures, tuple(_conclusions(table)), pivot)


def _rows(base: _BlockWeights, other: _BlockWeights, name: str, seed: int) -> list[Row]:
    """Return a row per layer, role and measure: `other`, checkpoint `seed` (from 0) of run `name`, against `base`."""
    run = {"run": name, "seed": seed, "stack": base.stack.name}
    return [
        {**run, "layer": layer, "role": role, "measure": measure, "score": score}
        for layer in base.layers
        for role, weights in base.maps[layer].items()
        for measure, score in _distances(weights, other.maps[layer][role]).items()
    ]


def _conclusions(table: Frame) -> Iterator[str]:
    """Yield a sentence per run of the study's `table`: which block moved most and which least, and how far.

    Blocks with the same distance, as it is shown, are named together. A block's distance is the mean of its finite
    relative distances over roles and seeds; three seeds or more give a 95 % t interval. If nothing changed, or only
    weights that are all 0 in the base, the sentence says so. There is no sentence if only one block has finite
    distances, and it changed.
    """
    for run, rows in table.groupby("run", sort=False):
        # a distance from weights that are all 0 has no relative size
        finite = rows[(rows["measure"] == "relative") & (rows["score"] < math.inf)]
        by_layer = finite.groupby(["layer", "seed"])["score"].mean().groupby("layer")
        moved = {layer: summarise([*scores]) for layer, scores in by_layer}
        if not (rows[rows["measure"] == "l2"]["score"] > 0).any():
            yield f"{run}: no weight that was compared changed."
        elif not (finite["score"] > 0).any():
            yield f"{run}: only weights changed that are all 0 in the base; see the measure l2."
        elif len(moved) > 1:
            most, least = (
                _blocks_at(moved, choose(summary.mean for summary in moved.values())) for choose in (max, min)
            )
            if most == least:
                yield f"{run}: all blocks that were compared moved by {most[1]}, mean over roles."
            else:
                yield f"{run}: {most[0]} moved most (by {most[1]}, mean over roles), {least[0]} least (by {least[1]})."


def _blocks_at(moved: Mapping[int, Summary], distance: float) -> tuple[str, str]:
    """Return the blocks that moved this far, as text, and the distance as text.

    `moved` is block -> its distances, averaged. A single block's distance has an interval from three seeds on.
    """
    shown = f"{distance:.2g}"
    layers = tied({layer: summary.mean for layer, summary in moved.items()}, distance, ".2g")
    first = moved[layers[0]]
    half = first.shown_interval if len(layers) == 1 else None
    over = "" if half is None else f" ± {half:.2g}"
    blocks = f"block{'s' * (len(layers) > 1)} {ranges(layers)}"
    return blocks, f"{shown}{over} times the norm of the base's weights"


class _BlockWeights:
    """The linear weights of some blocks of a model, grouped by role.

    Arguments besides `model` are those of `drift`.

    Attributes:
        stack: The stack of the blocks.
        layers: Numbers of the chosen blocks, ascending.
        maps: Layer -> role -> name of a weight -> the weight, not a copy. A block may lack a role.
        roles: Names of the chosen roles.
        largest: The largest min(rows, columns) of any matrix.

    Raises:
        LaminaError: If a layer, role or stack does not exist, or the model cannot be compared; see `drift`.
    """

    def __init__(self, model: PreTrainedModel, layers: Selector, stack: str | None, roles: str | Sequence[str]) -> None:
        check_no_adapters(model, _OP)
        self.model, self.stack = model, default_stack(model, stack, op=_OP)
        self.layers = select(layers, self.stack.layers, op=_OP)
        if self.layers[0] == 0:
            raise ConfigError(f"{_OP}: layer 0, the embeddings, is selected; blocks are counted from 1.")
        if not self.stack.blocks:
            raise _unsupported(model, "it has no module per block")
        maps = {layer: dict(weights_by_role(model, self.stack, layer, op=_OP)) for layer in self.layers}
        known = tuple(dict.fromkeys(role for by_role in maps.values() for role in by_role))
        if not known:
            raise _unsupported(model, "its blocks have no linear maps with weights")
        self.roles = known if roles == "all" else tuple(roles)
        if not self.roles:
            raise ConfigError(f"{_OP}: roles is empty; name at least one of {', '.join(known)}, or use 'all'.")
        check_known(_OP, self.roles, known, "role")
        self.maps = {
            layer: {role: by_role[role] for role in self.roles if role in by_role} for layer, by_role in maps.items()
        }
        weights = [weight for by_role in self.maps.values() for named in by_role.values() for weight in named.values()]
        self.largest = max((min(weight.shape[-2:]) for weight in weights), default=0)

    def shapes(self) -> dict[str, object]:
        """Return the name of each weight -> its shape."""
        return {
            f"layer {layer} {role} {key}".rstrip(): tuple(weight.shape)
            for layer, by_role in self.maps.items()
            for role, weights in by_role.items()
            for key, weight in weights.items()
        }


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    hint = "Compare models whose weights are plain linear maps."
    return UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)


def _loaded(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the model of a checkpoint: load a name or folder, or unwrap a model from `torch.compile` and the like.

    Raises ConfigError if `checkpoint` is something else, and ModelNotFoundError or others as `lamina.load` does.
    """
    return load(checkpoint)[0] if isinstance(checkpoint, str | Path) else checked_model(checkpoint, _OP)


def _named(
    others: Checkpoint | Sequence[Checkpoint] | Mapping[str, Checkpoint | Sequence[Checkpoint]],
) -> dict[str, list[Checkpoint]]:
    """Return name -> checkpoints for the argument `others` of `drift`; without names, they are numbered from 1.

    Raises ConfigError if there is no checkpoint, or one is named "base".
    """
    if not isinstance(others, Mapping):
        others = {str(number): checkpoint for number, checkpoint in enumerate(_listed(others), start=1)}
    named = {str(name): _listed(checkpoints) for name, checkpoints in others.items()}
    if "base" in named or not named or not all(named.values()):
        problem = "one of the others is named 'base'" if "base" in named else "there is no other checkpoint"
        raise ConfigError(f"{_OP}: {problem}. Pass at least one, under another name.")
    return named


def _listed(checkpoints: Checkpoint | Sequence[Checkpoint]) -> list[Checkpoint]:
    return [*checkpoints] if isinstance(checkpoints, list | tuple) else [cast("Checkpoint", checkpoints)]


def _sizes(model: PreTrainedModel, stack: LayerStack) -> dict[str, object]:
    return {"family": family_of(model), "depth": stack.depth, "width": stack.width}


def _check_same(before: Mapping[str, object], after: Mapping[str, object], name: str) -> None:
    """Raise ConfigError unless the facts `before`, about the base, and `after`, about the model `name`, are the same.

    The message lists up to three differences.
    """
    differs = [
        f"{key} is {before.get(key)} in the base and {after.get(key)} in '{name}'"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    if differs:
        more = f" (and {len(differs) - 3} more)" if len(differs) > 3 else ""
        rule = "only models of the same shape can be compared"
        raise ConfigError(f"{_OP}: {'; '.join(differs[:3])}{more}; {rule}.")


def _distances(base: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Return measure -> distance between the weights of one role in the base and in another checkpoint.

    "l2" and "relative" are over all weights together; "spectral" is the largest of any matrix. "relative" is infinite
    if all weights of the base are 0 and some of the others are not. Both mappings are weight name -> weight, with the
    same names and shapes. Sums are computed in float64.
    """
    squares = norm = spectral = 0.0
    for key, weight in base.items():
        start = weight.double().cpu()
        difference = other[key].double().cpu() - start
        squares += float(difference.square().sum())
        norm += float(start.square().sum())
        matrices = difference.reshape(-1, *difference.shape[-2:]).unbind(0)
        spectral = max(spectral, *map(spectral_norm, matrices))
    relative = (squares / norm) ** 0.5 if norm else float("inf") if squares else 0.0
    return {"l2": squares**0.5, "relative": relative, "spectral": spectral}


def spectral_norm(matrix: Tensor, *, largest_svd: int = _LARGEST_SVD) -> float:
    """Return the largest singular value of a matrix.

    If both sides are longer than `largest_svd`, the value is found by power iteration instead of a decomposition.
    """
    if min(matrix.shape) <= largest_svd:
        return float(torch.linalg.matrix_norm(matrix, ord=2))
    vector = torch.randn(matrix.shape[1], dtype=matrix.dtype, generator=torch.Generator().manual_seed(0))
    value = 0.0
    for _ in range(_STEPS):
        image = matrix @ (vector / vector.norm())
        before, value = value, float(image.norm())
        if value == 0 or abs(value - before) <= _CONVERGED * value:
            break
        vector = matrix.T @ image
    return value


def weights_by_role(
    model: PreTrainedModel, stack: LayerStack, layer: int, *, op: str
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (role, weights) for each role in block `layer` (from 1) of a stack.

    Roles are "query" or "query+key+value", for example (see `drift`); roles of a cross-attention begin with "cross_".
    The weights are name -> linear weight, not a copy; roles without any are left out. Families that are not in the
    table of roles have the single role "linear". Raises UnsupportedModelError, whose message begins with `op`, if a
    module that the table names is missing.
    """
    block, family = stack.blocks[layer - 1], family_of(model)
    paths = _role_paths(block, family) if family in ROLES else {}
    for role, role_paths in paths.items():
        weights: dict[str, Tensor] = {}
        for path in role_paths:
            for number, module in enumerate(modules_at(block, path, family=family, op=op)):
                weights |= _weights(module, f"{path}[{number}]")
        if weights:
            yield role, weights
    if not paths and (weights := _weights(block, "")):
        yield "linear", weights


def _role_paths(block: nn.Module, family: str) -> dict[str, tuple[str, ...]]:
    """Return role -> paths of its modules within a block, from the family's row in the table `ROLES`.

    Roles of an attention (self or cross) that the block does not have are left out.
    """
    row = ROLES[family]
    paths: dict[str, tuple[str, ...]] = {}
    for prefix, attention in (("", row.attention), ("cross_", row.cross)):
        if isinstance(attention, Attention) and has_path(block, attention.output):
            for path, served in attention.projections().items():
                paths["+".join(f"{prefix}{role}" for role in served)] = (path,)
            paths[f"{prefix}attention_output"] = (attention.output,)
    return {**paths, "ffn_in": row.ffn_in, "ffn_out": (row.ffn_out,)}


def _weights(module: nn.Module, name: str) -> dict[str, Tensor]:
    """Return the weights of all linear maps in a module, itself included: name -> weight. Each name begins with `name`.

    These are all two-dimensional weights except embeddings, and all three-dimensional ones, which are maps of experts.
    """
    return {
        ".".join(filter(None, (name, path, key))): value.detach()
        for path, part in module.named_modules()
        for key, value in part.named_parameters(recurse=False)
        if not isinstance(part, nn.Embedding) and (value.ndim == 3 or (value.ndim == 2 and key.endswith("weight")))
    }
