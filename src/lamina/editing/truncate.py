"""Cut the top blocks off a stack, and keep the config in step."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lamina.editing.editable import check_editable, check_shared, chosen_blocks
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.layers import LayerStack

_OP = "truncate_"
_DEPTHS = {  # where a config says how many blocks a stack has; its `attribute_map` adds names
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
        keep: How many blocks stay, from 1 to the depth, which removes none and is not recorded.
        stack: Name of the stack; None is the only one, or the encoder. Of a model with towers there is none to cut.

    Returns:
        The edit; its layers are the removed ones.

    Raises:
        ConfigError: If `keep` is out of range, a part of the model's shape depends on the depth, or the model cannot be
            edited. Nothing is changed then.
        UnknownNameError: If there is no such stack.
    """
    check_editable(model, _OP)
    edited, _ = chosen_blocks(model, "all", stack, _OP)
    if edited.tower is not None:
        came = f"the {edited.name} stack is one of several towers, whose depths the config does not say apart"
        raise ConfigError(f"{_OP}: {came}. Load that tower by itself, as {type(edited.tower).__name__}.")
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= edited.depth:
        raise ConfigError(
            f"{_OP}: keep is {keep!r}; the {edited.name} stack has {edited.depth} blocks, and one at least must stay. "
            f"Use 1..{edited.depth}."
        )
    removed = tuple(range(keep + 1, edited.depth + 1))
    gone: tuple[str, ...] = ()
    if removed:
        place = _container(model, edited)
        before, after = _rebuilt(model, edited, keep)
        prefixes = () if place is None else tuple(f"{place}.{layer - 1}." for layer in removed)
        gone = tuple(name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(prefixes))
        _check_shapes(model, before, after, gone)
        if place is not None:
            del model.get_submodule(place)[keep:]  # pyright: ignore[reportIndexIssue]
        old, new = dict(before.named_modules()), dict(after.named_modules())
        for path, module in model.named_modules():
            if path in old and path in new:
                _adopt(module, old[path], new[path])
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        for name in [name for name, source in tied.items() if name in gone or source in gone]:
            del tied[name]
    edit = Edit("truncate", edited.name, removed, gone, {"keep": keep, "stack": edited.name})
    return record(model, edit) if removed else edit


def _container(model: PreTrainedModel, stack: LayerStack) -> str | None:
    """Path of the list that holds the blocks; None where one block serves as all layers."""
    if len(set(stack.blocks)) == 1 < stack.depth:
        return None
    check_shared(stack, [1], _OP)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and tuple(module) == stack.blocks:
            return path
    raise ConfigError(
        f"{_OP}: the blocks of the {stack.name} stack are in no list of their own, so none can be taken off."
    )


def _rebuilt(model: PreTrainedModel, stack: LayerStack, keep: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """What the config builds now and what it will build, without weights."""
    config = model.config
    cut = copy.deepcopy(config)
    _cut(cut, stack.name, stack.depth, keep)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            before, after = (type(model)(type(config).from_dict(version.to_dict())) for version in (config, cut))
    except Exception as error:  # what a config or a constructor refuses comes in many kinds
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"{_OP}: with {keep} blocks the config does not hold together ({reason}). Keep another number."
        ) from error
    return before, after


def _cut(config: PretrainedConfig, stack: str, depth: int, keep: int) -> None:
    """Write a new depth into a config, or into the one inside it that has the blocks."""
    inner: list[Any] = [value for value in vars(config).values() if hasattr(value, "to_dict")]
    for part in (config, *inner):
        names = [name for name in _DEPTHS[stack] if getattr(part, name, None) == depth]
        if not names:
            continue
        setattr(part, names[0], keep)
        for name in _PER_LAYER:
            entries = getattr(part, name, None)
            if isinstance(entries, list | tuple) and len(entries) == depth:
                setattr(part, name, list(entries[:keep]))
        if getattr(part, "attention_types", None):  # GPT-Neo's short form of `attention_layers`
            part.attention_types = [[list(part.attention_layers), 1]]
        stages = list(getattr(part, "stage_names", None) or ())
        if len(stages) == depth + 1:  # what a backbone hands out, layer by layer; its last one by default
            part.stage_names = stages[: keep + 1]
            features = [name for name in part.out_features if name in part.stage_names]
            part.set_output_features_output_indices(out_features=features or part.stage_names[-1:], out_indices=None)
        return
    raise ConfigError(
        f"{_OP}: no entry of the config says that the {stack} stack has {depth} blocks, so a reload would bring "
        f"blocks back; looked for {', '.join(_DEPTHS[stack])}."
    )


def _check_shapes(model: nn.Module, before: nn.Module, after: nn.Module, gone: tuple[str, ...]) -> None:
    """Raise ConfigError if the new config builds anything but the model without the removed blocks."""
    now, was, will_be = (
        {(name, part.shape) for name, part in built.named_parameters(remove_duplicate=False)}
        for built in (model, before, after)
    )
    known = {name for name, _ in now ^ was}  # what the user added or left out
    staying = {(name, shape) for name, shape in now if name not in gone}
    if wrong := sorted({name for name, _ in staying ^ will_be} - known):
        raise ConfigError(
            f"{_OP}: the shape of {wrong[0]} depends on the number of blocks. Load the model without that part."
        )


def _adopt(target: object, was: object, now: object) -> None:
    """Give a module or config, and the configs in it, the values that follow from the new depth."""
    for name, value in vars(now).items():
        old = vars(was).get(name)
        if hasattr(value, "to_dict") and hasattr(old, "to_dict"):
            if getattr(target, name, None) is not None:
                _adopt(getattr(target, name), old, value)
        elif isinstance(value, int | list | tuple) and type(old) is type(value) and old != value:
            setattr(target, name, copy.copy(value))
