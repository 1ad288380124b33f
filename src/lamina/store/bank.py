"""Saving a bank of readers to a folder, and loading it onto the base it was trained on."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lamina.bank import NAME, Reader, ReaderBank
from lamina.errors import BaseMismatchError, LaminaError, ModelNotFoundError, StoreError
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.store.card import model_card
from lamina.store.files import read_json, read_tensors, staged, write_json, write_tensors
from lamina.store.loading import load
from lamina.store.manifest import (
    BASE,
    CARD,
    FORMAT,
    MANIFEST,
    READER,
    READERS,
    WEIGHTS,
    BaseFacts,
    Manifest,
    ReaderFacts,
    StackFacts,
    parse,
    read_manifest,
)
from lamina.store.models import load_processor

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers import LayerStack

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_ENTRIES = (MANIFEST, READERS, CARD, BASE)


def save_bank(bank: ReaderBank, folder: str | Path) -> None:
    """Save every reader, a manifest that names the base, and a model card; the base too if it was trained with them.

    A bank that is there already is replaced as a whole; files of other names in the folder stay. A save that fails
    changes nothing.

    Args:
        bank: The bank.
        folder: Where to; made if it is not there.

    Raises:
        StoreError: If the folder cannot be written, or holds something that is not a bank under the same names.
    """
    folder = Path(folder)
    manifest = Manifest(
        format=FORMAT,
        lamina=_version(),
        base=_describe(bank),
        info=bank.info,
        readers=list(bank),
    )
    with staged(folder, _ENTRIES) as stage:
        (stage / READERS).mkdir()
        for name in bank:
            _save_reader(bank[name], stage / READERS / name)
        if bank.own_base:
            cast("Any", bank.model).save_pretrained(stage / BASE)
            if bank.processor is not None:
                bank.processor.save_pretrained(stage / BASE)
        (stage / CARD).write_text(model_card(bank, manifest.base, folder.resolve().name), encoding="utf-8")
        write_json(stage / MANIFEST, manifest.model_dump())


def load_bank(
    folder: str | Path,
    model: PreTrainedModel | None = None,
    processor: Any = None,
    *,
    revision: str | None = None,
) -> ReaderBank:
    """Load a saved bank, in eval mode.

    Args:
        folder: A local folder or a hub id.
        model: The base; None: the one that the manifest names is loaded.
        processor: Its tokenizer; None: the base's own.
        revision: Revision of the bank on the hub.

    Returns:
        A bank whose readers give the same logits as the saved ones, bit for bit.

    Raises:
        StoreError: If the folder is missing, incomplete or damaged.
        BaseMismatchError: If `model` is not the base that the readers were trained on.
        UnknownNameError: If a file holds a name or key that this version does not know.
        ModelNotFoundError: If the base is to be loaded and cannot be found.
    """
    folder = _local(folder, revision)
    manifest = read_manifest(folder)
    names = _checked_names(manifest, folder)
    if model is None and manifest.base.trained:
        model, own = load(folder / BASE, dtype=manifest.base.dtype)
        model.name_or_path = cast("Any", model.config)._name_or_path = manifest.base.id or ""
    elif model is None:
        model, own = _load_base(manifest.base, folder)
    else:
        own = None if processor is not None else _processor_of(model)
    _check_base(manifest.base, model)
    bank = ReaderBank(model, own if processor is None else processor)
    bank.own_base = manifest.base.trained
    bank.info = dict(manifest.info)
    for name in names:
        _load_reader(bank, name, folder / READERS / name)
    return bank.eval()


def _version() -> str:
    try:
        return version("lamina")
    except PackageNotFoundError:
        return "unknown"


def _describe(bank: ReaderBank) -> BaseFacts:
    model, config = bank.model, bank.model.config
    used = {bank[name].stack for name in bank}
    found = {name: stack for name, stack in stacks(model).items() if name in used or not used}
    return BaseFacts(
        id=str(getattr(model, "name_or_path", "") or "") or None,
        revision=getattr(config, "_commit_hash", None),
        model_type=str(config.model_type),
        dtype=_dtype(model),
        stacks={
            name: StackFacts(layers=stack.layers, width=stack.width, fingerprint=fingerprint_of(stack))
            for name, stack in found.items()
        },
        trained=bank.own_base,
    )


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _save_reader(reader: ReaderModule, folder: Path) -> None:
    facts = ReaderFacts(
        fusion=FUSIONS.to_dict(reader.config.fusion),
        head=HEADS.to_dict(reader.config.head),
        stack=reader.stack,
        seed=reader.config.seed,
        layers=list(reader.layers),
        parameters=reader.size(),
        info=reader.info,
        borrowed=_borrowed(reader),
    )
    folder.mkdir()
    write_json(folder / READER, facts.model_dump())
    write_tensors(folder / WEIGHTS, reader.state_dict())


def _borrowed(reader: ReaderModule) -> str | None:
    tensors = reader.head.borrowed()
    return fingerprint_of_tensors(tensors.items()) if tensors else None


def _local(folder: str | Path, revision: str | None) -> Path:
    """The folder itself, or that of its copy from the hub."""
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists():
        raise StoreError(f"load: {path} is a file; a bank is a folder. Give the folder that holds {MANIFEST}.")
    if not HUB_ID.fullmatch(str(folder)):
        raise StoreError(f"load: {path} is not there; a bank is a folder or a hub id. Check the path.")
    from lamina.store.hub import fetch

    return fetch(str(folder), revision)


def _checked_names(manifest: Manifest, folder: Path) -> list[str]:
    names = manifest.readers
    wrong = [name for name in names if not NAME.fullmatch(name) or names.count(name) > 1]
    if wrong:
        raise StoreError(
            f"load: {folder / MANIFEST} names a reader '{wrong[0]}'; every name is given once and is a plain folder "
            "name. Do not use this folder, or save the bank again."
        )
    return names


def _load_base(base: BaseFacts, folder: Path) -> tuple[PreTrainedModel, Any]:
    if base.id is None:
        raise StoreError(
            f"load: {folder / MANIFEST} names no base, which was never saved itself; readers need their base. "
            "Give `model`."
        )
    try:
        return load(base.id, revision=base.revision, dtype=base.dtype)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(
            op=f"load {folder}", got=error.got, reason=f"it is the base of this bank, and {error.reason}"
        ) from error


def _processor_of(model: PreTrainedModel) -> Any:
    """The tokenizer of a model that was given without one, if it can be had."""
    return load_processor(model.name_or_path, model) if model.name_or_path else None


def _check_base(saved: BaseFacts, model: PreTrainedModel) -> None:
    """Raise BaseMismatchError unless the model is the base; fingerprints are taken only where the shapes agree."""
    differs: dict[str, tuple[object, object]] = {}
    given_type = str(model.config.model_type)
    if given_type != saved.model_type:
        differs["model_type"] = (saved.model_type, given_type)
    found = stacks(model)
    for name, want in saved.stacks.items():
        prefix = f"{name} " if len(saved.stacks) > 1 else ""
        stack = _same_stack(found, name)
        if stack is None:
            differs[f"{prefix}stack"] = (name, "/".join(found))
            continue
        given: dict[str, object] = {"layers": stack.layers, "width": stack.width}
        if not differs and given == {"layers": want.layers, "width": want.width}:
            given["fingerprint"] = fingerprint_of(stack)
        differs |= {
            f"{prefix}{key}": (getattr(want, key), now) for key, now in given.items() if getattr(want, key) != now
        }
    if not differs:
        return
    if _dtype(model) != saved.dtype:
        differs["dtype"] = (saved.dtype, _dtype(model))
    raise BaseMismatchError(op="load", differs=differs)


def _same_stack(found: dict[str, LayerStack], name: str) -> LayerStack | None:
    """The stack of a name; an encoder is called "main" where it is loaded without its decoder."""
    return found.get(name) or found.get({"main": "encoder", "encoder": "main"}.get(name, name))


def _load_reader(bank: ReaderBank, name: str, folder: Path) -> None:
    path = folder / READER
    facts = parse(ReaderFacts, read_json(path), path)
    try:
        fusion, head = FUSIONS.from_dict(_tuples(facts.fusion)), HEADS.from_dict(_tuples(facts.head))
        stack = _same_stack(bank.stacks, facts.stack)
        reader = bank.add(name, Reader(fusion, head, stack=stack.name if stack else facts.stack, seed=facts.seed))
    except LaminaError as error:
        error.add_note(f"in {path}")
        raise
    except (TypeError, ValueError) as error:
        raise StoreError(f"load: {path} has settings that cannot be ({error}). Copy or save it again.") from error
    if list(reader.layers) != facts.layers:
        raise StoreError(
            f"load: {path} was trained on the layers {facts.layers}; its settings select {list(reader.layers)}. "
            "Use the version of lamina that saved it."
        )
    if (given := _borrowed(reader)) != facts.borrowed:
        raise BaseMismatchError(op=f"load: reader '{name}'", differs={"vocabulary": (facts.borrowed, given)})
    _fill(reader, read_tensors(folder / WEIGHTS, reader.state_dict()))
    reader.info = dict(facts.info)


def _tuples(value: Any) -> Any:
    """Lists as tuples, at every depth: JSON has no tuples, and configs are made of them."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in cast("list[Any]", value))
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _fill(reader: ReaderModule, tensors: dict[str, Tensor]) -> None:
    """Put the saved tensors in place, in the precision in which they were saved."""
    for name, tensor in reader.state_dict(keep_vars=True).items():
        tensor.data = tensors[name].to(tensor.device)
