"""Change a config so that it describes a stack whose blocks were moved, left out or repeated."""

from __future__ import annotations

import copy
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from lamina.errors import ConfigError, first_line
from lamina.layers.roles import BLOCK_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import GenerationConfig, PretrainedConfig

logger = logging.getLogger(__name__)

OVERRIDES = "_heterogeneity_spec"  # attribute of configs (transformers 5.23) with the settings of single blocks
CACHE_DEPTH = "decoder_layers"  # setting that tells transformers how many entries a decoder's cache needs
_DEPTHS = {  # names of the setting that holds the number of blocks; `attribute_map` of a config adds aliases
    "main": ("num_hidden_layers", "depth"),
    "encoder": ("encoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "num_layers", "num_hidden_layers"),
    "decoder": ("num_decoder_layers", "decoder_layers", "decoder_num_hidden_layers", "num_hidden_layers"),
}
_ANY_DEPTH = _DEPTHS["encoder"]  # the names for a tower, which has a config of its own


def cut_configs(
    config: PretrainedConfig,
    stack: str,
    depth: int,
    order: Sequence[int],
    op: str,
    *,
    owner: object = None,
    with_head: bool = True,
) -> Iterator[PretrainedConfig]:
    """Yield candidates for the config that a model has after the edit of a stack, the most likely first.

    Two things are uncertain: which nested config holds the depth; and whether a list of unknown meaning that is as long
    as the stack has one entry per block.

    Args:
        config: The config of the model; it is not changed.
        stack: Name of the stack.
        depth: The stack's number of blocks before the edit.
        order: The blocks after the edit, as their numbers before it, from 1.
        op: The operation, for messages.
        owner: The config of the part of the model that has the stack, which may be nested in `config`. It is tried
            first. None: not known.
        with_head: Whether the model has a head, which may need the outputs of certain blocks.

    Raises:
        ConfigError: Once iterated, if no setting of the config holds the depth, the family cannot have this order, a
            head needs the output of a block that would be removed, or settings would contradict each other.
    """
    parts = {name: getattr(config, name) if name else config for name in ("", *_inner(config))}
    own = [part for part in parts.values() if part is owner] or [*parts.values()]
    _check_attention(own, order, op)
    _check_first(own, order, op)
    _check_taps(config, own, depth, order, op, with_head=with_head)
    holders = [name for name in parts if _depth_names(config, name, stack, depth)]
    holders.sort(key=lambda name: parts[name] is not owner)
    if not holders:
        problem = f"no entry of the config says that the {stack} stack has {depth} blocks"
        names = ", ".join(_DEPTHS.get(stack, _ANY_DEPTH))
        raise ConfigError(f"{op}: {problem}, so a reload would bring the old blocks back; looked for {names}.")
    for every_list in (False, True):
        for name in holders:
            cut = copy.deepcopy(config)
            part = getattr(cut, name) if name else cut
            names = _depth_names(cut, name, stack, depth)
            try:
                unknown = _set_blocks(part, names, depth, order, every_list=every_list)
                for holder, setting in _taps(cut, [part]):
                    _renumber(holder, setting, order, first=0)
            except ValueError as error:  # some settings follow from others, which may contradict each other now
                problem = f"with these blocks the config is not consistent ({first_line(error)})"
                raise ConfigError(f"{op}: {problem}. Keep other blocks.") from error
            _set_cache_depth(part, op)
            if unknown or not every_list:
                yield cut


def _check_attention(parts: Sequence[PretrainedConfig], order: Sequence[int], op: str) -> None:
    """Raise ConfigError if a config lists blocks with attention, and none of them would stay.

    Transformers asks the cache of an attention block how many tokens the model has read. Linear attention has no such
    cache, so it does not count.

    Args:
        parts: The config of the part of the model that has the stack, or all configs that may be it.
        order: Numbers of the blocks that stay, from 1, in their new order; at least one.
        op: The operation, for the message.
    """
    for part in parts:
        for name in BLOCK_SETTINGS.types:
            kinds = getattr(part, name, None) or ()
            attends = [str(kind).endswith(_ATTENDING) and not str(kind).startswith("linear") for kind in kinds]
            if any(attends) and len(kinds) >= max(order) and not any(attends[layer - 1] for layer in order):
                where = ", ".join(str(layer) for layer, attending in enumerate(attends, 1) if attending)
                problem = f"no block with attention would stay, and this {part.model_type} needs one to count tokens"
                raise ConfigError(f"{op}: {problem}. Keep one of the blocks {where}.")


_ATTENDING = ("attention", "hybrid")  # endings of the kinds of blocks that have attention


def _check_first(parts: Sequence[PretrainedConfig], order: Sequence[int], op: str) -> None:
    """Raise ConfigError if the new first block would use a result of an earlier block, which it no longer has.

    The arguments are those of `_check_attention`.
    """
    for part in parts:
        for name, kind in _BORROWING.items():
            kinds = getattr(part, name, None) or ()
            if len(kinds) >= max(order) and kinds[order[0] - 1] == kind:
                others = ", ".join(str(layer) for layer, other in enumerate(kinds, 1) if other != kind)
                problem = f"block {order[0]} cannot be the first; it uses what an earlier block has chosen ('{name}')"
                raise ConfigError(f"{op}: {problem}. Put one of the blocks {others} first.")


_BORROWING = {"indexer_types": "shared"}  # entry per block -> its value for blocks that use a result of an earlier one


def _taps(config: PretrainedConfig, parts: Sequence[PretrainedConfig]) -> list[tuple[PretrainedConfig, str]]:
    """Return the settings that list blocks whose outputs a head reads, as (config that has the list, its name).

    `parts` are the configs that describe the blocks: `config` itself, or configs nested in it.
    """
    settings = BLOCK_SETTINGS.taps.items()
    own = [(part, name) for name, inner in settings if not inner for part in parts]
    outer = [(config, name) for name, inner in settings if inner and getattr(config, inner, None) in parts]
    return [(holder, name) for holder, name in own + outer if isinstance(getattr(holder, name, None), list | tuple)]


def _check_taps(
    config: PretrainedConfig,
    parts: Sequence[PretrainedConfig],
    depth: int,
    order: Sequence[int],
    op: str,
    *,
    with_head: bool,
) -> None:
    """Raise ConfigError if a head reads the output of a block that would be removed.

    The head has a part for each output that it reads, and cannot run without one. A backbone whose config is nested in
    `config` is read by the rest of the model. If it returns the top block alone, that may be any block. `parts` are
    those of `_check_attention`; the other arguments are those of `cut_configs`.
    """
    read = {name: list(getattr(holder, name)) for holder, name in _taps(config, parts) if with_head}
    for part in parts:
        stages = list(getattr(part, "stage_names", None) or ())
        if part is not config and len(stages) == depth + 1 and part.out_features != stages[-1:]:
            read["out_features"] = [stages.index(name) - 1 for name in part.out_features]
    for name, numbers in read.items():
        blocks = [number + 1 for number in numbers if 0 <= number < depth]
        if lost := [layer for layer in blocks if layer not in order]:
            which, needed = (", ".join(map(str, layers)) for layers in (lost, blocks))
            problem = f"the head reads the outputs of the blocks {needed} ('{name}'), and {which} would be removed"
            raise ConfigError(f"{op}: {problem}. Keep these blocks.")


def _renumber(part: PretrainedConfig, name: str, order: Sequence[int], *, first: int) -> None:
    """Update the setting `name` of a config, a list of blocks that are numbered from `first`; a tuple stays a tuple.

    Each number follows its block, and with a repeated block the original, not a copy. Numbers of removed blocks are
    removed. `order` is that of `cut_configs`. If the setting is no list, nothing happens.
    """
    numbers = getattr(part, name, None)
    if isinstance(numbers, list | tuple):
        places = {layer - 1 + first: place + first for place, layer in reversed(list(enumerate(order)))}
        setattr(part, name, type(numbers)(places[number] for number in numbers if number in places))


def _set_cache_depth(part: PretrainedConfig, op: str) -> None:
    """Change the config `part` so that a decoder's cache for generation has an entry for each of its blocks.

    Transformers makes `num_hidden_layers` entries, which is the depth of the encoder in some families. If the decoder
    is deeper, an encoder-decoder's config gets `decoder_layers`, which transformers then uses, even in a family that
    does not define it (T5 has `num_decoder_layers`). `op` is the operation, for the message.

    Raises:
        ConfigError: If the cache would still have fewer entries than the decoder has blocks.
    """
    depth = next((value for name in _DEPTHS["decoder"] if type(value := getattr(part, name, None)) is int), 0)
    alias = getattr(part, "attribute_map", {}).get("num_hidden_layers")
    if not depth or not (getattr(part, "is_encoder_decoder", False) or alias == "encoder_layers"):
        return
    if hasattr(part, "num_decoder_layers"):
        vars(part).pop(CACHE_DEPTH, None)  # which an earlier edit has set
    if alias and depth > _cache_depth(part):
        setattr(part, CACHE_DEPTH if part.is_encoder_decoder else "num_hidden_layers", depth)
    if depth > (entries := _cache_depth(part)):
        problem = f"the decoder of a {part.model_type} would have {depth} blocks, and its cache has {entries} entries"
        hint = "Let the encoder have as many blocks as the decoder, or more"
        raise ConfigError(f"{op}: {problem}, one for each block of the encoder. {hint}.")


def _cache_depth(part: PretrainedConfig) -> int:
    return getattr(part.get_text_config(decoder=True), "num_hidden_layers", 0)


def _inner(config: PretrainedConfig) -> list[str]:
    return [name for name, value in vars(config).items() if hasattr(value, "to_dict")]


def _depth_names(config: PretrainedConfig, inner: str, stack: str, depth: int) -> list[str]:
    """Return the known settings that hold a stack's `depth`, in the nested config `inner` of `config` ("": itself)."""
    part = getattr(config, inner) if inner else config
    is_main = stack == "main" or bool(inner and inner == stack)
    names = _DEPTHS["main"] if is_main else _DEPTHS.get(stack, _ANY_DEPTH)
    if is_main and not getattr(part, "is_encoder_decoder", False):
        names = (*names, CACHE_DEPTH)  # the decoder of a BART by itself keeps the config of the whole
    aliases = getattr(part, "attribute_map", {})
    others = {"encoder": "decoder", "decoder": "encoder"}.get(stack, "")  # `num_hidden_layers` may stand for its depth
    wrong = {name for name in names if name in aliases and aliases[name] in _DEPTHS.get(others, ())}
    return [name for name in names if name not in wrong and getattr(part, name, None) == depth]


def _set_blocks(
    part: PretrainedConfig, names: Sequence[str], depth: int, order: Sequence[int], *, every_list: bool
) -> bool:
    """Change the config `part` so that it describes the blocks in `order`, numbers (from 1) of its `depth` old blocks.

    `names` are the settings that hold the depth. With `every_list`, lists of unknown meaning with an entry per old
    block are changed too. A config raises ValueError if its settings contradict each other.

    Returns:
        Whether a list of unknown meaning was changed.
    """
    if list(order) != list(range(1, len(order) + 1)):
        _list_periods(part, depth)
    mapped = set(getattr(part, "attribute_map", {}))
    for name in dict.fromkeys([*[name for name in names if name not in mapped], *names]):
        with suppress(NotImplementedError):  # ProphetNet computes this one from another setting
            setattr(part, name, len(order))
    for name in BLOCK_SETTINGS.entries:
        _select_entries(part, name, depth, order)
    for name in BLOCK_SETTINGS.numbers:
        numbers = getattr(part, name, None)
        if isinstance(numbers, list | tuple) and numbers:
            setattr(part, name, [place for place, layer in enumerate(order) if layer - 1 in numbers])
    _set_counts(part, depth, order)
    _set_short_forms(part, depth, order)
    known = {*BLOCK_SETTINGS.entries, *BLOCK_SETTINGS.numbers, *BLOCK_SETTINGS.taps, "stage_names", "out_indices"}
    known |= {"architectures"}
    is_changed = False
    if every_list:
        lists = [name for name, value in vars(part).items() if isinstance(value, list | tuple)]
        for name in [name for name in lists if name not in known]:
            is_changed |= _select_entries(part, name, depth, order)
    return is_changed


def _select_entries(part: PretrainedConfig, name: str, depth: int, order: Sequence[int]) -> bool:
    """Put the entries of the setting `name` in the new order, if it is a list with an entry per block; else do nothing.

    A setting that follows from others cannot be set, and stays. `part`, `depth` and `order` are those of `_set_blocks`.
    Returns whether the setting was changed.
    """
    entries = getattr(part, name, None)
    setting = getattr(type(part), getattr(part, "attribute_map", {}).get(name, name), None)
    is_computed = isinstance(setting, property) and setting.fset is None
    if is_computed or not isinstance(entries, list | tuple) or len(entries) != depth:
        return False
    setattr(part, name, [entries[layer - 1] for layer in order])
    return True


def _list_periods(part: PretrainedConfig, depth: int) -> None:
    """Replace periods in the config `part`, such as "every second block is sparse", by lists for all `depth` blocks."""
    period, dense = getattr(part, "decoder_sparse_step", 1), getattr(part, "mlp_only_layers", None)
    if dense is not None and period > 1:
        part.mlp_only_layers = [number for number in range(depth) if (number + 1) % period or number in dense]
        part.decoder_sparse_step = 1
    if kinds := getattr(part, "block_types", None):
        part.block_types = [kinds[number % len(kinds)] for number in range(depth)]


def _set_counts(part: PretrainedConfig, depth: int, order: Sequence[int]) -> None:
    """Update settings that say how many of the lowest or highest blocks are of one kind, or which block is the last.

    A count is only updated if the blocks of this kind are still together at that end. The arguments are those of
    `_set_blocks`.
    """
    for name in (*BLOCK_SETTINGS.leading, *BLOCK_SETTINGS.trailing):
        count = getattr(part, name, None)
        if isinstance(count, int) and not isinstance(count, bool):
            at_top = name in BLOCK_SETTINGS.trailing
            counted = [layer > depth - count if at_top else layer <= count for layer in order]
            if counted == sorted(counted, reverse=not at_top) and count <= depth:
                setattr(part, name, sum(counted))
    for name in BLOCK_SETTINGS.last:
        if getattr(part, name, None) == depth - 1:
            setattr(part, name, len(order) - 1)


def _set_short_forms(part: PretrainedConfig, depth: int, order: Sequence[int]) -> None:
    """Update other forms in a config: overrides per block, GPT-Neo's `attention_types`, and stages of vision models.

    The arguments are those of `_set_blocks`.
    """
    if overrides := getattr(vars(part).get(OVERRIDES), "per_layer_overrides", None):
        part.per_layer_config = {
            place: dict(overrides[layer - 1]) for place, layer in enumerate(order) if layer - 1 in overrides
        }
    if getattr(part, "attention_types", None):  # GPT-Neo's short form of `attention_layers`
        part.attention_types = [[list(part.attention_layers), 1]]
    stages = list(getattr(part, "stage_names", None) or ())
    if len(stages) == depth + 1:  # the layers that a backbone can return; by default the last
        part.stage_names = [*stages[:1], *(f"stage{place}" for place in range(1, len(order) + 1))]
        places = {layer: order.index(layer) + 1 for layer in order} | {0: 0}  # number of a stage -> its new number
        numbers = [stages.index(name) for name in part.out_features]
        returned = sorted(places[number] for number in numbers if number in places)
        features = [part.stage_names[number] for number in returned if numbers != [depth]]
        part.set_output_features_output_indices(out_features=features or part.stage_names[-1:], out_indices=None)
    elif not stages:
        _renumber(part, "out_indices", order, first=1)  # Data2Vec's images


def move_alignment_heads(generation: GenerationConfig | None, order: Sequence[int], op: str) -> None:
    """Update, in place, the heads of a Whisper decoder from which `generate` computes the timestamps of tokens.

    They are pairs (block, head), both from 0. A pair follows its block, and with a repeated block the original, not a
    copy. Pairs of removed blocks are removed. If no pair is left, the setting is removed, with a warning: then
    `generate` says that there are no timestamps of tokens.

    Args:
        generation: The model's settings for generation; without such heads, nothing happens. None: do nothing.
        order: The decoder's blocks after the edit, as their numbers before it, from 1.
        op: The operation, for the warning.
    """
    if generation is None or not (pairs := getattr(generation, "alignment_heads", None)):
        return
    places = {layer - 1: place for place, layer in reversed(list(enumerate(order)))}
    moved = [[places[block], head] for block, head in pairs if block in places]
    if moved:
        setattr(generation, "alignment_heads", moved)  # noqa: B010 - the class does not declare it
        return
    delattr(generation, "alignment_heads")
    blocks = ", ".join(str(block + 1) for block in sorted({block for block, _ in pairs}))
    reason = f"they are computed from attention heads of the decoder blocks {blocks}, and none of these is left"
    logger.warning("%s: timestamps of words are no longer available: %s.", op, reason)
