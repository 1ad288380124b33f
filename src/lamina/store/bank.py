"""Saving a bank of readers to a folder, and loading it onto the base it was trained on."""

from __future__ import annotations

import dataclasses
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lamina.bank import NAME, Reader, ReaderBank
from lamina.errors import BaseMismatchError, LaminaError, ModelNotFoundError, StoreError
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.store import manifest as facts
from lamina.store.card import model_card
from lamina.store.edited import save
from lamina.store.files import read_json, read_tensors, staged, write_json, write_tensors
from lamina.store.hub import fetch
from lamina.store.loading import load
from lamina.store.models import load_processor, saved_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers import LayerStack
    from lamina.registry import Registry
    from lamina.store.manifest import BaseFacts

_ENTRIES = (facts.MANIFEST, facts.READERS, facts.CARD, facts.BASE)
_RENAMED = {"problem": "problem_type"}  # settings as versions before 0.2 saved them


def save_bank(bank: ReaderBank, folder: str | Path, *, title: str | None = None) -> None:
    """Save a bank; see `ReaderBank.save_pretrained`.

    Args:
        bank: The bank.
        folder: Where to.
        title: Of the model card; None: the folder's name.

    Raises:
        StoreError: If the folder cannot be written, or holds something that is not a bank under the same names.
    """
    folder = Path(folder)
    try:
        lamina = version("lamina")
    except PackageNotFoundError:
        lamina = "unknown"
    base = _base_facts(bank)
    manifest = facts.Manifest(format=facts.FORMAT, lamina=lamina, base=base, info=bank.info, readers=list(bank))
    with staged(folder, _ENTRIES) as stage:
        (stage / facts.READERS).mkdir()
        for name in bank:
            _save_reader(bank[name], stage / facts.READERS / name)
        if bank.own_base:
            save(bank.model, stage / facts.BASE, bank.processor)
        card = str(model_card(bank, title or folder.resolve().name))
        (stage / facts.CARD).write_text(card, encoding="utf-8")
        write_json(stage / facts.MANIFEST, manifest.model_dump())


def load_bank(
    folder: str | Path,
    model: PreTrainedModel | None = None,
    processor: Any = None,
    *,
    revision: str | None = None,
) -> ReaderBank:
    """Load a saved bank; see `ReaderBank.from_pretrained`.

    Raises:
        StoreError: If the folder is missing, incomplete or damaged.
        BaseMismatchError: If `model` is not the base that the readers were trained on.
        UnknownNameError: If a file holds a name or key that this version does not know.
        ModelNotFoundError: If the base is to be loaded and cannot be found.
    """
    folder = _local(folder, revision)
    manifest = facts.read_manifest(folder)
    names = _checked_names(manifest.readers, folder)
    if model is None:
        model, own = _load_base(manifest.base, folder)
        processor = own if processor is None else processor
    elif processor is None and model.name_or_path:
        processor = load_processor(model.name_or_path, model)
    _check_base(manifest.base, model)
    bank = ReaderBank(model, processor)
    bank.own_base = manifest.base.trained
    bank.info = dict(manifest.info)
    for name in names:
        _load_reader(bank, name, folder / facts.READERS / name)
    return bank.eval()


def _base_facts(bank: ReaderBank) -> BaseFacts:
    model, config = bank.model, bank.model.config
    used = {bank[name].stack for name in bank}
    return facts.BaseFacts(
        id=str(getattr(model, "name_or_path", "") or "") or None,
        revision=getattr(config, "_commit_hash", None),
        model_type=str(config.model_type),
        dtype=_dtype(model),
        stacks={
            name: facts.StackFacts(layers=stack.layers, width=stack.width, fingerprint=fingerprint_of(stack))
            for name, stack in stacks(model).items()
            if name in used or not used
        },
        trained=bank.own_base,
    )


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _save_reader(reader: ReaderModule, folder: Path) -> None:
    saved = facts.ReaderFacts(
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
    write_json(folder / facts.READER, saved.model_dump())
    write_tensors(folder / facts.WEIGHTS, reader.state_dict())


def _borrowed(reader: ReaderModule) -> str | None:
    tensors = reader.head.borrowed()
    return fingerprint_of_tensors(tensors.items()) if tensors else None


def _local(folder: str | Path, revision: str | None) -> Path:
    """The folder itself, or that of its copy from the hub."""
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists():
        raise StoreError(f"load: {path} is a file; a bank is a folder. Give the folder that holds {facts.MANIFEST}.")
    return fetch(str(folder), revision)


def _checked_names(names: list[str], folder: Path) -> list[str]:
    for name in names:
        if not NAME.fullmatch(name) or names.count(name) > 1:
            raise StoreError(
                f"load: {folder / facts.MANIFEST} names a reader '{name}'; every name is given once and is a plain "
                "folder name. Do not use this folder, or save the bank again."
            )
    return names


def _load_base(base: BaseFacts, folder: Path) -> tuple[PreTrainedModel, Any]:
    if base.trained:
        model, processor = load(folder / facts.BASE, saved_class(folder / facts.BASE), dtype=base.dtype)
        model.name_or_path = cast("Any", model.config)._name_or_path = base.id or ""
        return model, processor
    if base.id is None:
        raise StoreError(
            f"load: {folder / facts.MANIFEST} names no base, which was never saved itself; readers need their base. "
            "Give `model`."
        )
    try:
        return load(base.id, revision=base.revision, dtype=base.dtype)
    except ModelNotFoundError as error:
        reason = f"it is the base of this bank, and {error.reason}"
        raise ModelNotFoundError(op=f"load {folder}", got=error.got, reason=reason) from error


def _check_base(saved: BaseFacts, model: PreTrainedModel) -> None:
    """Raise BaseMismatchError unless the model is the base; fingerprints are taken only if the shapes agree."""
    differs: dict[str, tuple[object, object]] = {}
    given_type = str(model.config.model_type)
    if given_type != saved.model_type:
        differs["model_type"] = (saved.model_type, given_type)
    given_stacks = stacks(model)
    for name, want in saved.stacks.items():
        prefix = f"{name} " if len(saved.stacks) > 1 else ""
        stack = _same_stack(given_stacks, name)
        if stack is None:
            differs[f"{prefix}stack"] = (name, "/".join(given_stacks))
            continue
        given: dict[str, object] = {"layers": stack.layers, "width": stack.width}
        if not differs and given == {"layers": want.layers, "width": want.width}:
            given["fingerprint"] = fingerprint_of(stack)
        differs |= {
            f"{prefix}{key}": (getattr(want, key), now) for key, now in given.items() if getattr(want, key) != now
        }
    if differs:
        if _dtype(model) != saved.dtype:
            differs["dtype"] = (saved.dtype, _dtype(model))
        raise BaseMismatchError(op="load", differs=differs)


def _same_stack(found: dict[str, LayerStack], name: str) -> LayerStack | None:
    """The stack of a name; an encoder is called "main" if it is loaded without its decoder."""
    return found.get(name) or found.get({"main": "encoder", "encoder": "main"}.get(name, name))


def _load_reader(bank: ReaderBank, name: str, folder: Path) -> None:
    path = folder / facts.READER
    saved = facts.parse(facts.ReaderFacts, read_json(path), path)
    try:
        fusion, head = _config(FUSIONS, saved.fusion), _config(HEADS, saved.head)
        stack = _same_stack(bank.stacks, saved.stack)
        reader = bank.add(name, Reader(fusion, head, stack=stack.name if stack else saved.stack, seed=saved.seed))
    except LaminaError as error:
        error.add_note(f"in {path}")
        raise
    except (TypeError, ValueError) as error:
        raise StoreError(f"load: {path} has settings that do not fit ({error}). Copy or save it again.") from error
    if list(reader.layers) != saved.layers:
        raise StoreError(
            f"load: {path} was trained on the layers {saved.layers}; its settings select {list(reader.layers)}. "
            "Use the version of lamina that saved it."
        )
    if (given := _borrowed(reader)) != saved.borrowed:
        raise BaseMismatchError(op=f"load: reader '{name}'", differs={"vocabulary": (saved.borrowed, given)})
    tensors = read_tensors(folder / facts.WEIGHTS, reader.state_dict())
    for key, tensor in reader.state_dict(keep_vars=True).items():
        tensor.data = tensors[key].to(tensor.device)  # in the precision in which it was saved
    reader.info = dict(saved.info)


def _config(table: Registry, fields: dict[str, Any]) -> Any:
    """The config that a file describes, under the names that its settings have now."""
    fields = _tuples(fields)
    for old, new in _RENAMED.items():
        if old in fields and new in {field.name for field in dataclasses.fields(table.get(str(fields.get("name"))))}:
            fields[new] = fields.pop(old)
    return table.from_dict(fields)


def _tuples(value: Any) -> Any:
    """Lists as tuples, at every depth: JSON has no tuples, and configs are made of them."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in cast("list[Any]", value))
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in cast("dict[str, Any]", value).items()}
    return value
