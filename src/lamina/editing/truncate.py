"""Remove the top blocks of a stack, and adapt the config."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from lamina.editing.editable import check_editable, check_shared, select_blocks
from lamina.editing.record import Edit, record
from lamina.errors import ConfigError, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.layers import LayerStack

_OP = "truncate_"
_DEPTHS = {  # names of the setting that holds the number of blocks; `attribute_map` of a config adds aliases
    "main": ("num_hidden_layers",),
    "encoder": ("encoder_layers", "num_encoder_layers", "num_layers", "num_hidden_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers")  # lists with an entry per block


def truncate_(model: PreTrainedModel, keep: int, stack: str | None = None) -> Edit:
    """Keep the bottom blocks of a stack and remove the others, in place.

    Modules after the blocks (a final norm, pooler, head) stay. The config gets the new depth, so that the model can be
    saved with `save_pretrained` and loaded with plain `AutoModel`.

    Args:
        model: A transformers model.
        keep: Number of blocks to keep, from 1 to the depth. If it equals the depth, nothing is removed or recorded.
        stack: Name of the stack. None: the only one, or the encoder. Towers (CLIP) cannot be truncated.

    Returns:
        The edit; its `layers` are the removed ones.

    Raises:
        ConfigError: If `keep` is out of range, the shape of another part of the model depends on the depth, the stack
            is a tower, or the model cannot be edited. The model is then unchanged.
        UnknownNameError: If the stack does not exist.
    """
    check_editable(model, _OP)
    edited, _ = select_blocks(model, "all", stack, _OP)
    if edited.tower is not None:
        problem = f"the {edited.name} stack is one of several towers, whose depths the config does not hold separately"
        raise ConfigError(f"{_OP}: {problem}. Load that tower by itself, as {type(edited.tower).__name__}.")
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= edited.depth:
        raise ConfigError(
            f"{_OP}: keep is {keep!r}; the {edited.name} stack has {edited.depth} blocks, and one at least must stay. "
            f"Use 1..{edited.depth}."
        )
    removed = tuple(range(keep + 1, edited.depth + 1))
    gone: tuple[str, ...] = ()
    if removed:
        path = _path_of_blocks(model, edited)
        before, after = _build_empty(model, edited, keep)
        prefixes = () if path is None else tuple(f"{path}.{layer - 1}." for layer in removed)
        gone = tuple(name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(prefixes))
        _check_shapes(model, before, after, gone)
        if path is not None:
            del model.get_submodule(path)[keep:]  # pyright: ignore[reportIndexIssue]
        old, new = dict(before.named_modules()), dict(after.named_modules())
        for name, module in model.named_modules():
            if name in old and name in new:
                _copy_changes(module, old[name], new[name])
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        for name in [name for name, source in tied.items() if name in gone or source in gone]:
            del tied[name]
    edit = Edit("truncate", edited.name, removed, gone, {"keep": keep, "stack": edited.name})
    return record(model, edit) if removed else edit


def _path_of_blocks(model: PreTrainedModel, stack: LayerStack) -> str | None:
    """Return the path of the module list that holds a stack's blocks; None if one block serves as all layers.

    Raises:
        ConfigError: If there is no such list, or only some layers share a block.
    """
    if len(set(stack.blocks)) == 1 < stack.depth:
        return None
    check_shared(stack, [1], _OP)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and tuple(module) == stack.blocks:
            return path
    raise ConfigError(
        f"{_OP}: the blocks of the {stack.name} stack are in no list of their own, so none can be removed."
    )


def _build_empty(model: PreTrainedModel, stack: LayerStack, keep: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return two models without weights: one built from the current config, one from the config with `keep` blocks.

    Raises:
        ConfigError: If no model can be built from the new config.
    """
    config = model.config
    cut = copy.deepcopy(config)
    _set_depth(cut, stack.name, stack.depth, keep)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            before, after = (type(model)(type(config).from_dict(version.to_dict())) for version in (config, cut))
    except Exception as error:  # configs and constructors raise many types of errors
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(
            f"{_OP}: with {keep} blocks the config does not hold together ({reason}). Keep another number."
        ) from error
    return before, after


def _set_depth(config: PretrainedConfig, stack: str, depth: int, keep: int) -> None:
    """Change the depth of a stack from `depth` to `keep` in a config, or in the nested config that holds the depth.

    Raises:
        ConfigError: If no setting of the config holds the depth.
    """
    inner: list[PretrainedConfig] = [value for value in vars(config).values() if hasattr(value, "to_dict")]
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
        if len(stages) == depth + 1:  # the layers that a backbone can return; by default the last
            part.stage_names = stages[: keep + 1]
            features = [name for name in part.out_features if name in part.stage_names]
            part.set_output_features_output_indices(out_features=features or part.stage_names[-1:], out_indices=None)
        return
    raise ConfigError(
        f"{_OP}: no entry of the config says that the {stack} stack has {depth} blocks, so a reload would bring "
        f"blocks back; looked for {', '.join(_DEPTHS[stack])}."
    )


def _check_shapes(model: nn.Module, before: nn.Module, after: nn.Module, gone: tuple[str, ...]) -> None:
    """Raise ConfigError unless the model without the parameters `gone` has the shapes of `after`.

    `before` is built from the current config, and shows which parameters the user has added or removed.
    """
    now, was, will_be = (
        {(name, part.shape) for name, part in built.named_parameters(remove_duplicate=False)}
        for built in (model, before, after)
    )
    known = {name for name, _ in now ^ was}  # parameters that the user has added or removed
    staying = {(name, shape) for name, shape in now if name not in gone}
    if wrong := sorted({name for name, _ in staying ^ will_be} - known):
        raise ConfigError(
            f"{_OP}: the shape of {wrong[0]} depends on the number of blocks. Load the model without that part."
        )


def _copy_changes(target: object, was: object, now: object) -> None:
    """Copy attributes that differ between `was` and `now` to `target` (a module or config), and to nested configs.

    These are the values that depend on the depth.
    """
    for name, value in vars(now).items():
        old = vars(was).get(name)
        if hasattr(value, "to_dict") and hasattr(old, "to_dict"):
            if getattr(target, name, None) is not None:
                _copy_changes(getattr(target, name), old, value)
        elif isinstance(value, int | list | tuple) and type(old) is type(value) and old != value:
            setattr(target, name, copy.copy(value))
