"""Load a model, edited or not, from a folder, from the hub, or from an installed package."""

from __future__ import annotations

import logging
import os
import re
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from lamina.editing.inserted_layer import is_inserted
from lamina.editing.record import set_source
from lamina.errors import ConfigError, StoreError, convert_errors
from lamina.heads.base import label_names
from lamina.layers.nan_checks import first_non_finite
from lamina.store import models
from lamina.store.files import damaged, read_steady
from lamina.store.manifest import RECORD
from lamina.store.replay import (
    LoadingInfo,
    check_head,
    check_weights,
    read_record,
    replay_inserts,
    restore_edits,
    with_inserts,
    without_numbers,
)
from lamina.utils import check_type, is_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Usual prefixes of programs that train the model as a part of a larger module.
_OWNERS = {"model.", "backbone.", "base_model.model.", "0.auto_model."}
# What wrappers add to names of weights: torch.compile, FSDP and checkpointing anywhere, DataParallel in front.
_WRAPPERS = dict.fromkeys(
    (r"_orig_mod\.", r"_fsdp_wrapped_module\.", r"_checkpoint_wrapped_module\.", r"^(?:module\.)+"), ""
)
_INNER = ".module."  # what DataParallel around a part of the model adds


def load(
    name: str | Path,
    head: str | type[object] | None = None,
    labels: Sequence[str] | None = None,
    revision: str | None = None,
    *,
    dtype: str | torch.dtype = "auto",
    new_weights: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a model in eval mode, and its processor.

    A folder that `lamina.save` wrote is loaded with its edits: inserted layers are in place, and frozen parameters are
    frozen. Code that comes with a model is never executed.

    Example:
        ```python
        model, tokenizer = lamina.load("bert-base-uncased")
        model, tokenizer = lamina.load("out/model", head="sequence_classification", labels=("no", "yes"))
        ```

    Args:
        name: A local folder, a hub id, or "minilm" (always all-MiniLM-L6-v2, from its Python package if that is
            installed).
        head: None for the backbone alone, even if the model was saved with a head; a kind of task, such as
            "sequence_classification"; or an auto class or model class of transformers, or its name. The name of the
            saved class is `lamina.store.saved_class(name)`.
        labels: Names of the head's classes. If the saved head has as many classes, its weights are used; otherwise the
            head starts at random, with a warning if there is a saved one. If the head has no classes, as with
            `head=None`, there is a warning too. None: the classes that the config names.
        revision: Branch, tag or commit on the hub. None: the main branch.
        dtype: Type of the weights, such as "bfloat16". "auto": the type in which they were saved.
        new_weights: True: weights that the files lack start at random. A warning names them; with `labels`, only those
            of layers and embedding tables, since the head is new. False: StoreError if the files lack weights of a
            layer, or more than half of the model's parameters; a missing head or pooler still starts at random.

    Returns:
        The model and its processor: a tokenizer, image processor, feature extractor or joint processor. The processor
        is None if the model has none.

    Raises:
        ModelNotFoundError: If the folder holds no model; or if it does not exist, and the hub does not have the model
            or cannot be reached.
        StoreError: If files are damaged, do not fit together, hold NaN or infinity, or lack weights that may not start
            at random.
        UnknownNameError: If the head does not exist, or the record of edits has an unknown key.
        UnsupportedModelError: If transformers does not know the family, the family has no such head, or the model needs
            a missing package or code from the hub.
        ConfigError: If an argument has the wrong type; if `dtype` is not a float type; if `labels` is empty or has a
            name twice; or if there is a `revision` other than "main" for a folder.
    """
    if not isinstance(name, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"load: got a {type(name).__name__}; a folder, a hub id or 'minilm' is needed.")
    check_type("load", "revision", revision, "str | None")
    check_type("load", "new_weights", new_weights, "bool")
    name, kind = os.fsdecode(name), models.model_class(head)
    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype != "auto" and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise ConfigError(f"load: dtype is {dtype!r}; it must be 'auto' or a float type of torch, such as 'bfloat16'.")
    read = partial(_load, name, kind, labels, revision, dtype, new_weights=new_weights)
    with convert_errors(lambda reason: damaged(name, f"cannot be loaded ({reason})")):
        source = Path(models.source_of(name, revision))
        return read_steady(source, RECORD, read) if is_dir(source) else read()


def _load(
    name: str,
    kind: Any,
    labels: Sequence[str] | None,
    revision: str | None,
    dtype: str | torch.dtype,
    *,
    new_weights: bool,
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its processor from a folder or a hub id.

    `kind` is the class of transformers that loads the model. All else is as in `load`.
    """
    config = models.load_config(name, revision=revision)
    if labels is not None:
        models.name_classes(config, label_names("load", labels))
    architecture, edits = read_record(name, revision)
    with models.model_errors(name, config.model_type):
        empty = models.empty_model(config, kind)
        models.check_size(models.source_of(name, revision), empty)
        models.check_files(models.source_of(name, revision), config)
        if labels is not None and not _has_classes(empty, kind, len(labels)):
            what = "labels name the classes of a head, and a %s has none; give a head such as 'sequence_classification'"
            logger.warning(f"load: {what}", type(empty).__name__)
        plain: Any = type(empty) if edits and kind.__name__.startswith("AutoModel") else kind
        load_weights = partial(
            (with_inserts(plain, edits) if edits else plain).from_pretrained,
            models.source_of(name, revision),
            config=config,
            revision=revision or "main",
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_report` refuses them, with the name of the weight
        )
        with _without_report():
            model, report = _without_prefixes(load_weights)
    new = _check_report(model, name, report, new_head=labels is not None)
    if not new_weights:
        check_head(model, name, new)
    if edits:
        model.__class__ = plain  # the subclass of `with_inserts` was needed for loading only
    if architecture:  # the folder has all weights of the saved model, since `lamina.save` wrote it
        check_weights(model, name, report, exact=type(model).__name__ == architecture)
    if weight := first_non_finite(model.named_parameters()):  # missing weights of inserted layers can hold anything
        raise damaged(f"the weights of {name}", f"hold NaN or infinity in '{weight}'")
    if edits:
        restore_edits(model, name, edits)
    elif lost := [key for key in sorted(report["unexpected_keys"]) if is_inserted(key)]:
        raise StoreError(f"load: {name} has inserted layers ('{lost[0]}'), but no {RECORD} that says where they go.")
    model.config._name_or_path = model.name_or_path = full = models.SHORT_NAMES.get(name, name)
    set_source(model, str(Path(full).absolute()) if is_dir(full) else full)
    return model.eval(), models.load_processor(name, model, revision=revision)


def _has_classes(empty: PreTrainedModel, kind: Any, classes: int) -> bool:
    """Return whether a model has a head with classes: one class more than `classes` would change its weights' shapes.

    `empty` is the model without weights, as the class `kind` builds it.
    """
    config = deepcopy(empty.config)
    models.name_classes(config, [str(number) for number in range(classes + 1)])
    shapes, more = ([part.shape for part in model.parameters()] for model in (empty, models.empty_model(config, kind)))
    return shapes != more


@contextmanager
def _without_report() -> Generator[None]:
    """Keep transformers, in this thread, from logging its table of missing weights; `_check_report` names them."""
    log, thread = logging.getLogger("transformers.modeling_utils"), get_ident()

    def is_other(record: logging.LogRecord) -> bool:
        text = record.getMessage()  # an error refers to a table with "CONVERSION"
        return record.thread != thread or "LOAD REPORT" not in text or "CONVERSION" in text

    log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


def _without_prefixes(load_weights: Callable[..., tuple[Any, LoadingInfo]]) -> tuple[Any, LoadingInfo]:
    """Load a model, and again under plain names if the saved weights have names that a wrapper or owner has changed.

    `load_weights` returns the model and the loading report; its option `key_mapping` (pattern -> text) renames saved
    weights. The result of its last call is returned. Wrappers are those of `_WRAPPERS`, such as torch.compile. Owners,
    programs that train the model as a part of another, add a prefix such as "model.". It is dropped if no weight fits
    with it and most fit without. If several prefixes fit, such as "model." and "ema.", the one in `_OWNERS` is dropped.
    """
    model, report = load_weights()
    if any(re.search(wrapper, key) for key in report["unexpected_keys"] for wrapper in _WRAPPERS):
        model, report = load_weights(key_mapping={**_WRAPPERS})
    base = f"{model.base_model_prefix}."  # names may have it on one side only
    inner = {key.replace(_INNER, ".").removeprefix(base) for key in report["unexpected_keys"] if _INNER in key}
    if inner & {key.removeprefix(base) for key in report["missing_keys"]}:
        model, report = load_weights(key_mapping={**_WRAPPERS, re.escape(_INNER): "."})
    names, saved = {name for name, _ in model.named_parameters()}, {*report["unexpected_keys"]}
    for known in (names, {name.removeprefix(base) for name in names}) if names <= {*report["missing_keys"]} else ():
        longest = max(sorted(known), key=len, default="")
        owners = {key.removesuffix(longest) for key in saved if longest and key.endswith(f".{longest}")}
        for owner in sorted(owners if len(owners) == 1 else owners & _OWNERS):
            if 2 * len({owner + name for name in known} & saved) > len(known):
                return load_weights(key_mapping={**_WRAPPERS, f"^{re.escape(owner)}": ""})
    return model, report


def _check_report(model: PreTrainedModel, name: str, report: LoadingInfo, *, new_head: bool) -> list[str]:
    """Return the names of the weights that start at random, and log them and the saved weights that are left out.

    With `new_head`, the head got new classes, so its weights may have a different shape than the saved ones. `report`
    is the loading report of transformers. Left-out weights are logged as a warning if they are of blocks that the
    config lacks. Random weights are a warning too; with `new_head`, only those in blocks, in embedding tables and in
    place of a saved head. All others are logged as information.

    Raises:
        StoreError: If the shape of a saved weight contradicts the config; if no saved weight has a place in a block; or
            if a module of a block has another form in the checkpoint, such as quantised or with an adapter.
    """
    for key, saved, wanted in sorted(report["mismatched_keys"]):
        if not new_head or key.startswith(f"{model.base_model_prefix}.") or _is_needed(model, key):
            what = f"do not fit its config.json: '{key}' is {tuple(saved)} instead of {tuple(wanted)}"
            raise damaged(f"the weights of {name}", what)
    base, saved = f"{model.base_model_prefix}.", report["unexpected_keys"]
    names = {name for name, _ in model.named_parameters()}
    inner = {name for name in names if "#" in without_numbers(name)} or names
    if inner and inner <= {*report["missing_keys"]}:
        kind, needed = type(model).__name__, min(inner)
        what = f"fit no part of a {kind}: it holds '{min(saved)}', the model needs '{needed}'" if saved else ""
        raise damaged(f"the weights of {name}", what or f"hold no block of a {kind}, such as '{needed}'")
    forms = {without_numbers(name.removeprefix(base)) for name in names}
    plain = {key: without_numbers(key.removeprefix(base)) for key in sorted(saved)}
    modules = {f"{form.rpartition('.')[0]}." for form in forms if "#" in form.rpartition(".")[0]}
    leaves = tuple(part for part in modules if not any(other != part and other.startswith(part) for other in modules))
    is_quantised = getattr(model.config, "quantization_config", None) is not None
    for key, form in plain.items() if not is_quantised else ():
        if form not in forms and form.startswith(leaves) and not is_inserted(key):
            hint = "It was quantised, pruned, or has an adapter or another config"
            raise damaged(f"the weights of {name}", f"hold '{key}', for which the model has no place. {hint}")
    has_blocks = any("#" in form for form in forms)
    cut = [key for key, form in plain.items() if "#" in form and (form in forms or not has_blocks)]
    for left, level, what in (
        (cut, logging.WARNING, "of blocks that its config.json"),
        ([key for key in plain if key not in cut], logging.INFO, f"that a {type(model).__name__}"),
    ):
        if left:
            some = f"'{left[0]}'" + f" and {len(left) - 1:,} more" * (len(left) > 1)
            logger.log(level, "load: %s has weights %s does not have (%s); they are left out", name, what, some)
    replaced = {key for key, *_ in report["mismatched_keys"]}
    missing = sorted(replaced.union(report["missing_keys"]))
    wrong = [key for key in missing if not new_head or key in replaced or _is_needed(model, key)]
    for new, level in ((wrong, logging.WARNING), ([key for key in missing if key not in wrong], logging.INFO)):
        if new:
            listed = ", ".join(f"{key} (saved in another shape)" if key in replaced else key for key in new)
            logger.log(level, "load: %s has no weights for %s; they start at random", name, listed)
    return missing


def _is_needed(model: PreTrainedModel, key: str) -> bool:
    """Return whether a weight is in a block or an embedding table of the backbone; poolers and heads can be new."""
    base = f"{model.base_model_prefix}." if model.base_model is not model else ""
    is_table = isinstance(model.get_submodule(key.rpartition(".")[0]), torch.nn.Embedding)
    return key.startswith(base) and (is_table or "#" in without_numbers(key))


def outline(name: str | Path, head: str | None = None) -> PreTrainedModel:
    """Build a model with its edits on the meta device: modules and shapes without weights.

    Args:
        name: A local folder, a hub id, or "minilm". Only the config and the record of edits are read.
        head: None for the backbone alone; a kind of task; or the name of a class of transformers.

    Raises:
        ModelNotFoundError: If the model does not exist.
        StoreError: If the edits do not fit the config, or the config or the record of edits is damaged.
        UnknownNameError: If the head does not exist, or the record of edits has an unknown key.
        UnsupportedModelError: If transformers does not know the family, or the family has no such head.
    """
    name = str(name)
    model = models.empty_model(models.load_config(name), models.model_class(head))
    _, edits = read_record(name)
    with convert_errors(lambda reason: damaged(name, f"has edits that do not fit its config.json ({reason})")):
        replay_inserts(model, edits)
        restore_edits(model, name, edits)
    return model
