"""Save a model, and check, before it is trained or saved, that it can be loaded again."""

from __future__ import annotations

import logging
import re
import shutil
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lamina.editing.editable import has_packed
from lamina.editing.record import edits, set_location, source_of
from lamina.errors import ConfigError, LaminaError, StoreError
from lamina.layers import stacks
from lamina.layers.adapters import check_no_adapters, has_peft
from lamina.layers.base_facts import is_setting, is_value
from lamina.layers.devices import check_has_weights
from lamina.layers.preserve import changed_by_passes
from lamina.layers.stack import by_path
from lamina.layers.wrappers import unwrapped
from lamina.store.files import check_finite, files_in, staged, write_json
from lamina.store.manifest import FORMAT, RECORD, EditsRecord
from lamina.store.models import empty_model
from lamina.store.replay import replay_inserts, weight_problem, without_numbers
from lamina.utils import check_types, is_dir, is_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from lamina.layers.types import Processor
    from lamina.store.files import Files

logger = logging.getLogger(__name__)

_PACKED = "the model was quantised after it was loaded; packed weights can neither be trained nor be loaded again."
_HINT = (
    "Loading builds the model from its config, so that changes by hand are lost. Change blocks with lamina.keep_, "
    "lamina.duplicate_ or lamina.insert_, other parts by their entries of the config."
)

# Attributes of modules that only repeat the size of a table, or change the loss or the memory that a pass needs
_WITHOUT_EFFECT = frozenset(
    {
        *("vocab_size", "n_words", "num_embeddings", "num_labels", "tie_word_embeddings"),
        *("chunk_size_feed_forward", "router_aux_loss_coef"),
    }
)


def check_reloads(model: PreTrainedModel, op: str) -> None:
    """Check that a model's config and recorded edits describe its weights: a saved model is built from these two.

    A model of the same class is built without memory for weights. The names, shapes and sharing of all weights are
    compared, and the names and shapes of all buffers that are saved. Models whose config says how they are quantised
    are not checked, nor are models with adapters (PEFT), which are merged before they are saved. Classes that cannot be
    built from their config are not checked either, with a warning. Another warning names a setting of a module, such as
    its activation, that was changed by hand and that a loaded model would not have.

    Args:
        model: A transformers model.
        op: The operation, for messages.

    Raises:
        ConfigError: If, in the model that would be loaded, a weight or saved buffer is missing, has another shape or
            has no place, or a weight that blocks share now would not be shared; or if the model was quantised after it
            was loaded.
    """
    if getattr(model.config, "quantization_config", None) is not None or has_peft(model):
        return
    if any(map(has_packed, model.modules())):
        raise ConfigError(f"{op}: {_PACKED}")
    try:
        problem = _problem(model, empty := _rebuilt(model), "")
    except LaminaError as error:
        logger.warning("%s: whether the saved model will load again was not checked: %s", op, error)
        return
    if problem is not None:
        raise ConfigError(f"{op}: this {type(model).__name__} could not be loaded again: {problem}. {_HINT}")
    if (changed := _changed_setting(model, empty)) is not None:
        logger.warning("%s: a model that is loaded again would compute something else: %s. %s", op, changed, _HINT)


def _changed_setting(model: nn.Module, empty: nn.Module) -> str | None:
    """Return a module's setting that differs in `empty`, the model that would be loaded, as text; None if none does.

    Settings are numbers and names that are attributes of the module in both models, and modules without weights, such
    as activations. Those that only matter in training do not count, nor do those that change nothing beyond rounding.
    """
    twins = by_path(empty)
    for path, module in by_path(model).items():
        twin = twins.get(path.replace("_orig_mod.", ""))
        if twin is None or not is_setting(path.rpartition(".")[2]):
            continue
        own, expected, whose = vars(module), vars(twin), f"'{path}'" if path else "the model"
        if type(module) is not type(twin) and not [*module.parameters(), *twin.parameters()]:
            return f"{whose} is a {type(module).__name__}, and a {type(twin).__name__} by the config"
        ignored = changed_by_passes(type(module)) | _WITHOUT_EFFECT
        if isinstance(module, nn.Embedding) or hasattr(module, "base_model_prefix"):
            ignored |= {"padding_idx"}  # others, such as RoBERTa's embeddings, compute positions with it
        for name in sorted(own.keys() & expected.keys() - ignored):
            now, then = own[name], expected[name]
            # only values: configs with settings per block cannot be compared, and raise
            if is_setting(name) and is_value(now) and is_value(then) and now != then:
                return f"{name} of {whose} is {now!r}, and {then!r} by the config"
    return None


def changed_blocks(model: PreTrainedModel) -> str | None:
    """Return how a model's blocks differ from those that its config and edits describe, as text; None if they do not.

    Names, shapes and sharing of the weights in blocks are compared. Values are not, nor other parts, such as a pooler.
    Models that cannot be built from their config, quantised ones, and those with adapters are not compared.
    """
    if getattr(model.config, "quantization_config", None) is not None or has_peft(model):
        return None
    paths = {module: path for path, module in by_path(model).items()}
    blocks = [block for stack in stacks(model).values() for block in stack.blocks]
    owners = {paths[block].replace("_orig_mod.", "").rpartition(".")[0] for block in blocks if block in paths}
    try:
        empty = _rebuilt(model)
        problems = (_problem(model, empty, f"{owner}.") for owner in sorted(owners))
        return next((problem for problem in problems if problem is not None), None)
    except LaminaError:
        return None


def _rebuilt(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model without weights, built from a model's config and edits; LaminaError if that is impossible."""
    empty = empty_model(deepcopy(model.config), type(model))
    replay_inserts(empty, edits(model))
    return empty


def _problem(model: PreTrainedModel, empty: PreTrainedModel, under: str) -> str | None:
    """Return why a model cannot be built again from its config and its edits, as text; None if it can.

    `empty` is the model without weights that was built from both. Only weights and persistent buffers whose names begin
    with `under` are compared: their names, their shapes, and which weights blocks share. Values are not compared.
    """
    own, expected = _shapes(model, under), _shapes(empty, under)
    problem = weight_problem(empty, expected.keys() - own.keys(), own.keys() - expected.keys(), exact=True)
    for name in sorted(own.keys() & expected.keys()):
        if problem is None and own[name] != expected[name]:
            problem = f"the weight '{name}' is {list(own[name])}, and its config says {list(expected[name])}"
    if problem is None:
        for group in _shared_by_blocks(model, under) - _shared_by_blocks(empty, under):
            return f"the weights {' and '.join(map(repr, sorted(group)[:2]))} are shared, which its config does not say"
    return problem


def _named(model: nn.Module, under: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, weight), once per name, for weights below `under`, without a compiled model's prefixes."""
    for name, weight in model.named_parameters(remove_duplicate=False):
        if (plain := name.replace("_orig_mod.", "")).startswith(under):  # the name in a model that is not compiled
            yield plain, weight


def _shapes(model: nn.Module, under: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of everything below `under` that is saved: weights, and buffers that are persistent."""
    shapes = {name: tuple(weight.shape) for name, weight in _named(model, under)}
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved and (plain := name.replace("_orig_mod.", "")).startswith(under):
            shapes[plain] = tuple(buffer.shape)
    return shapes


def _shared_by_blocks(model: nn.Module, under: str) -> set[frozenset[str]]:
    """Return the sets of names below `under` that stand for one weight and differ only in numbers.

    A name without such a partner is left out.
    """
    names: dict[tuple[int, str], list[str]] = {}
    for name, weight in _named(model, under):
        names.setdefault((id(weight), without_numbers(name)), []).append(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


_FIXED = (RECORD, "config.json", "generation_config.json")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@check_types("save")
def save(
    model: PreTrainedModel,
    folder: str | Path,
    processor: Processor | None = None,
    *,
    force: bool = False,
    files: Files | None = None,
) -> None:
    """Save a model with its `save_pretrained`, and a record of its edits. Either all files are written or none.

    Plain transformers can load the folder, unless the model has inserted layers that are not merged; `lamina.load` can
    always load it. A bank on this model that is saved afterwards names this folder as its base.

    Args:
        model: A transformers model, edited or not. If it is compiled or parallel, the plain model inside is saved.
        folder: Folder to write; created if it does not exist. Files of an earlier `save` are replaced, others stay.
        processor: Tokenizer or image processor to save with the model. None: files of an earlier one stay.
        force: Whether to replace a model that other software wrote, or to give up the head of the folder's model.
        files: More files to write in the same step: name -> function that is called with the path to write.

    Raises:
        StoreError: If the folder cannot be written; or, unless `force`, if it holds a model of other software, or a
            model with a head and `model` was loaded from there without it (`lamina.load` without `head`, or with
            another one).
        NotFiniteError: If a weight holds NaN or infinity.
        ConfigError: If `model` is not a transformers model, has no weights (meta device) or has adapters (PEFT), or
            would not load again because its blocks or other parts were changed by hand.
    """
    folder, model = Path(folder), unwrapped(model)
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        hint = "Give a transformers model; save a bank with bank.save_pretrained(folder)."
        raise ConfigError(f"save: got a {type(model).__name__}, which is not a model. {hint}")
    check_no_adapters(model, "save")
    check_has_weights("save", model)
    check_finite("the model", model.named_parameters())
    check_reloads(model, "save")
    if not force:
        check_keeps_head(folder, model, "save")
    files = files or {}
    with staged(folder, names := [*saved_names(folder), *files], names, force=force) as stage:
        _as_stored(model).save_pretrained(stage)  # pyright: ignore[reportUnknownMemberType]
        if processor is not None:
            processor.save_pretrained(stage)
        for name, write in files.items():
            write(stage / name)
        # files of an earlier save that stay, such as those of a processor
        staying = {name for name in listed_names(folder) if name not in names and (folder / name).is_file()}
        record = {
            "format": FORMAT,
            "architecture": type(model).__name__,
            "edits": [edit.to_dict() for edit in edits(model)],
            "files": sorted(staying.union(files_in(stage))),
        }
        write_json(stage / RECORD, record)
    set_location(model, str(folder))


def check_keeps_head(folder: Path, model: PreTrainedModel, op: str) -> None:
    """Raise StoreError, about `op`, if saving a model to a folder would lose the head of the model that is there.

    That is so if `save` wrote the folder, and `model` was loaded from there without its head, or with another one. A
    class that transformers does not have counts as one with a head.
    """
    import transformers

    auto: Any = transformers.AutoModel
    if not (source := source_of(model)) or Path(source).resolve() != folder.resolve():
        return
    saved = type(model).__name__
    with suppress(LaminaError):
        saved = EditsRecord.read(folder / RECORD).architecture
    kind, headless = getattr(transformers, saved, None), auto._model_mapping.get(type(model.config), ())
    if saved != type(model).__name__ and (kind is None or not (isinstance(model, kind) or issubclass(kind, headless))):
        got = f"{folder} holds a {saved}, and this {type(model).__name__} was loaded from there without its head"
        head = saved if kind is None else f"'{saved}'"  # `load` takes a class too
        hint = f"Load it with head={head}, or give another folder" + "; force=True gives the head up" * (op == "save")
        raise StoreError(f"{op}: {got}, which would be lost. {hint}.")


def _as_stored(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model whose weights are written: the model itself, or a copy if RWKV has rescaled its weights.

    RWKV divides weights by powers of two in its first pass in eval mode. A model that was loaded from these weights
    would divide them again. The copy has the original weights.
    """
    if not any(getattr(part, "layers_are_rescaled", False) for part in model.modules()):
        return model
    stored = deepcopy(model)
    for part in stored.modules():
        if getattr(part, "layers_are_rescaled", False):
            part.train()._rescale_layers()  # pyright: ignore[reportCallIssue, reportPrivateUsage]
    return stored


def move(source: Path, target: Path) -> None:
    """Move a model that `save` wrote from the folder `source` to the folder `target`.

    A model that `save` wrote to `target` before is replaced; after an error it is unchanged. Raises StoreError if
    `source` has no such model, or if the target cannot be written, or has a model of other software.
    """
    if not is_file(source / RECORD):
        raise StoreError(f"save: {source} has no {RECORD}, so no saved model can be moved from it. Check the folder.")
    with staged(target, saved_names(target), listed_names(target)) as stage:
        for name in dict.fromkeys([*saved_names(source), *listed_names(source)]):
            if (source / name).is_file():
                (stage / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    (stage / name).hardlink_to(source / name)
                except OSError:  # another file system, or one without links
                    shutil.copy2(source / name, stage / name)
    discard(source)


def discard(folder: Path) -> None:
    """Delete a model that `save` wrote, and the folder if nothing else is in it. No folder: do nothing.

    Raises StoreError if other software wrote the model, or the folder cannot be written.
    """
    if is_dir(folder):
        with staged(folder, saved_names(folder), listed_names(folder)):
            pass  # nothing is written in place of the old files
        with suppress(OSError):
            folder.rmdir()


def saved_names(folder: Path) -> list[str]:
    """Return the names of the files that `save` replaces in a folder: the record of edits, configs and weights.

    The record comes first; a folder without it holds no model that `save` wrote. The record and the configs are listed
    even if they do not exist, weight files only if they exist.
    """
    paths = folder.glob("model*") if is_dir(folder) else ()
    return [*_FIXED, *sorted(path.name for path in paths if _WEIGHTS.fullmatch(path.name))]


def listed_names(folder: Path) -> list[str]:
    """Return the names of all files that a folder's record lists; [] if there is no readable record."""
    try:
        return EditsRecord.read(folder / RECORD).files
    except LaminaError:
        return []
