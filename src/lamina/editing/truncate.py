"""Cut the top blocks off a stack, and keep the config in step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lamina.editing.checks import check_editable, check_shared, chosen_blocks
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.layers import LayerStack

_OP = "truncate_"
_DEPTHS = {  # where a config says how many blocks a stack has; `attribute_map` of the config adds its own names
    "main": ("num_hidden_layers",),
    "encoder": ("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers")  # one entry per block


def truncate_(model: PreTrainedModel, keep: int, stack: str | None = None) -> Edit:
    """Keep the bottom blocks of a stack and remove the others, in place.

    What comes after the blocks stays: a final norm, the pooler, the head. The config says the new depth, so that
    `save_pretrained` and plain `AutoModel` give the same model back.

    Args:
        model: A transformers model.
        keep: How many blocks stay, from 1 to the depth (which removes none).
        stack: Name of the stack; None is the only one, or the encoder.

    Returns:
        The edit; its layers are the removed ones.

    Raises:
        ConfigError: If `keep` is out of range, a part of the model's shape depends on the depth, or the model cannot be
            edited. Nothing is changed then.
        UnknownNameError: If there is no such stack.
    """
    check_editable(model, _OP)
    found, _ = chosen_blocks(model, "all", stack, _OP)
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= found.depth:
        raise ConfigError(
            f"{_OP}: keep is {keep!r}; the {found.name} stack has {found.depth} blocks, and one at least must stay. "
            f"Use 1..{found.depth}."
        )
    removed = tuple(range(keep + 1, found.depth + 1))
    gone: tuple[str, ...] = ()
    if removed:
        place = _container(model, found)
        before, after = _rebuilt(model, found, keep)
        if place is not None:
            start, named = f"{place}.", model.named_parameters(remove_duplicate=False)
            inside = [name for name, _ in named if name.startswith(start)]
            gone = tuple(name for name in inside if int(name.removeprefix(start).split(".")[0]) >= keep)
        _check_shapes(model, before, after, gone)
        if place is not None:
            del model.get_submodule(place)[keep:]  # pyright: ignore[reportIndexIssue]
        _adopt(model, before, after)
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        for name in [name for name, source in tied.items() if name in gone or source in gone]:
            del tied[name]
    return record(model, Edit("truncate", found.name, removed, gone, {"keep": keep, "stack": found.name}))


def _container(model: PreTrainedModel, stack: LayerStack) -> str | None:
    """Path of the list that holds the blocks; None where one block serves as all layers."""
    if len(set(stack.blocks)) == 1 < stack.depth:
        return None
    check_shared(stack, [1], _OP)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and tuple(module) == stack.blocks:
            return path
    raise ConfigError(
        f"{_OP}: the blocks of the {stack.name} stack are in no list of their own, so none can be taken off. "
        "Use a family that keeps its blocks in one list."
    )


def _rebuilt(model: PreTrainedModel, stack: LayerStack, keep: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """What the config builds now and what it will build, without weights."""
    config = model.config
    cut = copy.deepcopy(config)
    _cut(cut, stack.name, stack.depth, keep)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            before, after = (type(model)(type(config).from_dict(each.to_dict())) for each in (config, cut))
    except Exception as error:  # what a config or a constructor refuses comes in many kinds
        told = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{_OP}: with {keep} blocks the config does not hold together ({type(error).__name__}: {told}). "
            "Nothing was changed; keep another number."
        ) from error
    return before, after


def _cut(config: PretrainedConfig, stack: str, depth: int, keep: int) -> None:
    """Write a new depth into a config, or into the one inside it that has the blocks."""
    inner: list[Any] = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for each in (config, *inner):
        names = [name for name in _DEPTHS[stack] if getattr(each, name, None) == depth]
        if not names:
            continue
        setattr(each, names[0], keep)
        for name in _PER_LAYER:
            entries = getattr(each, name, None)
            if isinstance(entries, list | tuple) and len(entries) == depth:
                setattr(each, name, list(entries[:keep]))
        if getattr(each, "attention_types", None):  # GPT-Neo's short form of `attention_layers`
            each.attention_types = [[list(each.attention_layers), 1]]
        stages = list(getattr(each, "stage_names", None) or ())
        if len(stages) == depth + 1:  # what a backbone hands out, layer by layer; its last one by default
            each.stage_names = stages[: keep + 1]
            given = [name for name in each.out_features if name in each.stage_names]
            each.set_output_features_output_indices(out_features=given or each.stage_names[-1:], out_indices=None)
        return
    raise ConfigError(
        f"{_OP}: no entry of the config says that the {stack} stack has {depth} blocks; looked for "
        f"{', '.join(_DEPTHS[stack])}. A reload would bring blocks back, so nothing was changed."
    )


def _check_shapes(model: nn.Module, before: nn.Module, after: nn.Module, gone: tuple[str, ...]) -> None:
    """Raise ConfigError if the new config builds anything but the model without the removed blocks."""
    now, was, will_be = (
        {(name, part.shape) for name, part in built.named_parameters(remove_duplicate=False)}
        for built in (model, before, after)
    )
    known = {name for name, _ in now ^ was}  # what the user added or left out
    kept = {(name, shape) for name, shape in now if name not in gone}
    if wrong := sorted({name for name, _ in kept ^ will_be} - known):
        raise ConfigError(
            f"{_OP}: the shape of {wrong[0]} depends on the number of blocks, so it could not be kept. "
            "Nothing was changed; load the model without that part."
        )


def _adopt(model: PreTrainedModel, before: PreTrainedModel, after: PreTrainedModel) -> None:
    """Give the configs and counters inside the model the values that follow from the new depth."""
    old, new = dict(before.named_modules()), dict(after.named_modules())
    for path, module in model.named_modules():
        if path not in old or path not in new:
            continue
        pairs: list[tuple[Any, Any, Any]] = [(module, old[path], new[path])]
        if hasattr(module, "config"):
            pairs.append((module.config, old[path].config, new[path].config))
        for target, was, now in pairs:
            _follow(target, was, now)


def _follow(target: object, was: object, now: object) -> None:
    for name, value in vars(now).items():
        old = vars(was).get(name)
        if hasattr(value, "to_dict") and hasattr(old, "to_dict"):
            if target is not None and not isinstance(target, nn.Module):
                _follow(getattr(target, name), old, value)
        elif isinstance(value, int | list | tuple) and type(old) is type(value) and old != value:
            setattr(target, name, copy.copy(value))
