"""How far weights lie apart: block by block and role by role, between a checkpoint and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor, nn

from lamina.errors import ConfigError, UnsupportedModelError, check_known
from lamina.layers import default_stack, select
from lamina.layers.adapters import check_no_adapters
from lamina.layers.roles import ROLES, Attention, family_of, has_path, modules_at
from lamina.layers.wrappers import unwrapped
from lamina.store.load_model import load
from lamina.studies.study import Figure, Study, library_versions, model_facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector

    Checkpoint = PreTrainedModel | str | Path
    from lamina.layers import LayerStack

_OP = "drift"
_LARGEST_SVD = 1024  # the shorter side of a matrix up to which all singular values are computed
_STEPS, _SETTLED = 200, 1e-7  # of the power iteration: at most, and the relative change at which it ends
_SHOWN = {  # measure -> its unit, and what to see in its figure
    "l2": ("norm of the difference", "A high point is a role that training changed; larger matrices lie higher."),
    "relative": ("norm of the difference / norm of the base", "Comparable between roles: 0 is unchanged, 0.1 a tenth."),
    "spectral": ("largest singular value of the difference", "High where the change has one strong direction."),
}
_MEASURES = tuple(_SHOWN)


def drift(
    base: Checkpoint,
    others: Checkpoint | Sequence[Checkpoint] | Mapping[str, Checkpoint],
    *,
    layers: Selector = "1-",
    roles: str | Sequence[str] = "all",
    stack: str | None = None,
) -> Study:
    """Measure how far the linear weights of each block lie from those of another checkpoint, or of several runs.

    Roles are "query", "key", "value", "attention_output", "ffn_in" and "ffn_out", with "cross_" before those of an
    attention over an encoder; roles that one projection serves are joined ("query+key+value"). A family without a row
    of roles has one, "linear": all linear maps of a block. "ffn_out" alone is the output sub-layer.

    Measures, over all weights of a role: "l2", the norm of the difference; "relative", that over the norm of the base's
    weights; "spectral", the largest singular value of the difference (the largest of any of its matrices).

    Args:
        base: A model, or a folder or name for `lamina.load`.
        others: One or more of the same; a mapping gives them names, else they are numbered from 1. Folders are loaded
            one at a time.
        layers: Which blocks, from 1.
        roles: Names of roles, or "all".
        stack: Which stack; None: the only one, or the encoder.

    Returns:
        A study whose table has "run", "stack", "layer", "role", "measure" and "score". `settings["spectral_by"]` names
        the method: "svd", or "power iteration" where a matrix is larger than 1,024 both ways.

    Raises:
        ConfigError: If checkpoints differ in family, depth or the shape of a weight, layer 0 is named, there is nothing
            to compare, or a model carries adapters.
        UnknownNameError: If there is no such role or stack.
        LayerIndexError: If there is no such layer.
        UnsupportedModelError: If blocks, or linear maps in them, cannot be found.

    Source:
        Tamkin et al. 2020, arXiv:2004.14975: L2 distance per block, of the output sub-layer; the other roles and
        measures are ours.
    """
    start = _Blocks(_loaded(base), layers, stack, [roles] if isinstance(roles, str) and roles != "all" else roles)
    rows: list[dict[str, Any]] = []
    models = {"base": model_facts(start.model)}
    for name, given in _named(others).items():
        other = _Blocks(_loaded(given), start.layers, start.stack.name, start.roles)
        models[name] = model_facts(other.model)
        _check_alike(start, other, name)
        for layer in start.layers:
            for role, weights in start.maps[layer].items():
                for measure, score in zip(_MEASURES, _distances(weights, other.maps[layer][role]), strict=True):
                    place = {"run": name, "stack": start.stack.name, "layer": layer, "role": role}
                    rows.append({**place, "measure": measure, "score": score})
    settings = {
        "models": models,
        "layers": start.layers,
        "roles": list(start.roles),
        "stack": start.stack.name,
        "spectral_by": "power iteration" if start.largest > _LARGEST_SVD else "svd",
        "versions": library_versions(),
    }
    figures = {
        f"{measure} {run}": Figure(
            "line",
            x="layer",
            colour="role",
            where={"measure": measure, "run": run},
            title=f"{measure.capitalize()} distance of weights by block: {run}",
            value_title=value,
            note=note,
        )
        for measure, (value, note) in _SHOWN.items()
        for run in list(models)[1:]
    }
    return Study(_OP, pd.DataFrame(rows), settings, figures, tuple(_conclusions(rows)))


def _conclusions(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Which block moved most and which least, by the mean over roles of the relative distance."""
    relative = [row for row in rows if row["measure"] == "relative"]
    for run in dict.fromkeys(row["run"] for row in relative):
        own = [row for row in relative if row["run"] == run]
        layers = dict.fromkeys(row["layer"] for row in own)
        means = {layer: fmean(row["score"] for row in own if row["layer"] == layer) for layer in layers}
        most, least = max(means, key=lambda layer: means[layer]), min(means, key=lambda layer: means[layer])
        if not means[most] > 0:
            yield f"{run}: no weight that was compared changed."
        elif len(means) > 1:
            said = f"{run}: block {most} moved most ({means[most]:.2g} of the base's weights, mean over roles)"
            yield f"{said}, block {least} least ({means[least]:.2g})."


class _Blocks:
    """The linear weights of some blocks of a model, by layer and role."""

    def __init__(self, model: PreTrainedModel, layers: Selector, stack: str | None, roles: str | Sequence[str]) -> None:
        check_no_adapters(model, _OP)
        self.model, self.stack = model, default_stack(model, stack, op=_OP)
        self.layers = select(layers, self.stack.layers, op=_OP)
        if self.layers[0] == 0:
            raise ConfigError(f"{_OP}: layer 0, the embeddings, is named; blocks are counted from 1.")
        if not self.stack.blocks:
            raise _unsupported(model, "it has no module per block")
        self.maps = {layer: dict(weight_maps(model, self.stack, layer, op=_OP)) for layer in self.layers}
        known = tuple(dict.fromkeys(role for maps in self.maps.values() for role in maps))
        if not known:
            raise _unsupported(model, "its blocks have no linear maps with weights")
        self.roles = known if roles == "all" else tuple(roles)
        check_known(_OP, self.roles, known, "role")
        self.maps = {
            layer: {role: maps[role] for role in self.roles if role in maps} for layer, maps in self.maps.items()
        }
        weights = [weight for maps in self.maps.values() for named in maps.values() for weight in named.values()]
        self.largest = max((min(weight.shape[-2:]) for weight in weights), default=0)


def _unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    hint = "Compare models whose weights are plain linear maps."
    return UnsupportedModelError(op=_OP, model_type=family_of(model), reason=reason, hint=hint)


def _loaded(given: Checkpoint) -> PreTrainedModel:
    return load(given)[0] if isinstance(given, str | Path) else unwrapped(given)


def _named(others: Any) -> dict[str, Checkpoint]:
    if isinstance(others, Mapping):
        named = {str(name): given for name, given in others.items()}
    else:
        listed = others if isinstance(others, list | tuple) else [others]
        named = {str(number): given for number, given in enumerate(listed, start=1)}
    if not named or "base" in named:
        came = "one of the others is named 'base'" if named else "there is no other checkpoint"
        raise ConfigError(f"{_OP}: {came}; each needs a name of its own.")
    return named


def _check_alike(base: _Blocks, other: _Blocks, name: str) -> None:
    """Raise ConfigError that says what differs between the two models, if anything that is compared does."""
    what = {
        "family": (family_of(base.model), family_of(other.model)),
        "depth": (base.stack.depth, other.stack.depth),
        "width": (base.stack.width, other.stack.width),
    }
    shapes = [
        {
            f"layer {layer} {role} {key}".rstrip(): tuple(weight.shape)
            for layer, maps in side.maps.items()
            for role, weights in maps.items()
            for key, weight in weights.items()
        }
        for side in (base, other)
    ]
    what |= {key: (shapes[0].get(key), shapes[1].get(key)) for key in dict.fromkeys([*shapes[0], *shapes[1]])}
    differs = [f"{key} is {was} in the base and {now} in '{name}'" for key, (was, now) in what.items() if was != now]
    if differs:
        more = f" (and {len(differs) - 3} more)" if len(differs) > 3 else ""
        rule = "only models of one shape can be compared"
        raise ConfigError(f"{_OP}: {'; '.join(differs[:3])}{more}; {rule}.")


def _distances(base: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, float, float]:
    squares = norm = spectral = 0.0
    for key, weight in base.items():
        start = weight.double().cpu()
        difference = other[key].double().cpu() - start
        squares += float(difference.square().sum())
        norm += float(start.square().sum())
        matrices = difference.reshape(-1, *difference.shape[-2:]).unbind(0)
        spectral = max(spectral, *map(spectral_norm, matrices))
    relative = (squares / norm) ** 0.5 if norm else float("inf") if squares else 0.0
    return squares**0.5, relative, spectral


def spectral_norm(matrix: Tensor, *, largest_svd: int = _LARGEST_SVD) -> float:
    """The largest singular value of a matrix: from all of them, or of a large one by power iteration."""
    if min(matrix.shape) <= largest_svd:
        return float(torch.linalg.matrix_norm(matrix, ord=2))
    vector = torch.randn(matrix.shape[1], dtype=matrix.dtype, generator=torch.Generator().manual_seed(0))
    value = 0.0
    for _ in range(_STEPS):
        image = matrix @ (vector / vector.norm())
        before, value = value, float(image.norm())
        if value == 0 or abs(value - before) <= _SETTLED * value:
            break
        vector = matrix.T @ image
    return value


ANY = "linear"  # the role of all linear maps of a block, where no row says what each is for


def weight_maps(
    model: PreTrainedModel, stack: LayerStack, layer: int, *, op: str
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Role -> the linear maps of a block that serve it."""
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
        yield ANY, weights


def _role_paths(block: nn.Module, family: str) -> dict[str, tuple[str, ...]]:
    row = ROLES[family]
    paths: dict[str, tuple[str, ...]] = {}
    for prefix, attention in (("", row.attention), ("cross_", row.cross)):
        if isinstance(attention, Attention) and has_path(block, attention.output):
            for path, served in attention.projections().items():
                paths["+".join(f"{prefix}{role}" for role in served)] = (path,)
            paths[f"{prefix}attention_output"] = (attention.output,)
    return {**paths, "ffn_in": row.ffn_in, "ffn_out": (row.ffn_out,)}


def _weights(module: nn.Module, name: str) -> dict[str, Tensor]:
    """The linear maps in a module, itself included; experts keep several in one tensor of three axes."""
    return {
        ".".join(filter(None, (name, path, key))): value.detach()
        for path, part in module.named_modules()
        for key, value in part.named_parameters(recurse=False)
        if not isinstance(part, nn.Embedding) and (value.ndim == 3 or (value.ndim == 2 and key.endswith("weight")))
    }
