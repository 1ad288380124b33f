"""Saving a bank of readers to a folder or the hub, and loading it onto the base it was trained on."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lamina.bank import NAME, Reader, ReaderBank
from lamina.bank.monitoring import KEY as MONITORS
from lamina.editing.record import note_place, place_of
from lamina.errors import (
    BaseMismatchError,
    ConfigError,
    LaminaError,
    ModelNotFoundError,
    StoreError,
    check_known,
    convert_errors,
    error_context,
)
from lamina.fusion import FUSIONS
from lamina.heads import HEADS
from lamina.layers import select, stacks
from lamina.layers.adapters import check_no_adapters
from lamina.layers.discovery import pick_stack
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.store import manifest as facts
from lamina.store.card import model_card
from lamina.store.files import (
    check_finite,
    claimed,
    damaged,
    read_steady,
    read_tensors,
    staged,
    write_json,
    write_tensors,
)
from lamina.store.hub import local_folder
from lamina.store.load_model import load
from lamina.store.models import load_processor, saved_class, writing_class
from lamina.store.save_model import listed_names, save, saved_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers import LayerStack
    from lamina.registry import Registry
    from lamina.store.files import Files

logger = logging.getLogger(__name__)

_SPARE_PARAMETERS = 1 << 20  # parts of the model that some readers use, which are not in their files
_RENAMED = {"problem": "problem_type"}  # settings as versions before 0.2 saved them


def save_bank(bank: ReaderBank, folder: str | Path, *, title: str | None = None, files: Files | None = None) -> None:
    """Save a bank, with a model card of that title and other files; see `ReaderBank.save_pretrained`."""
    folder = Path(folder)
    try:
        lamina = version("lamina")
    except PackageNotFoundError:
        lamina = "unknown"
    for name in bank:
        check_finite(f"reader '{name}'", bank[name].state_dict().items())
    base = _base_facts(bank)
    if base.id is None and bank.model.name_or_path and not base.trained:
        what = f"the base was changed after it was loaded from {bank.model.name_or_path}, so that the bank names none"
        logger.warning("save: %s. Save the base first (lamina.save), or give it whenever the bank is opened.", what)
    manifest = facts.Manifest(format=facts.FORMAT, lamina=lamina, base=base, info=bank.info, readers=list(bank))
    files = files or {}
    with staged(folder, [*_names(bank), *files], _listed(folder)) as stage:
        (stage / facts.READERS).mkdir()
        for name in bank:
            _save_reader(bank[name], stage / facts.READERS / name)
        if bank.own_base:
            save(bank.model, stage / facts.BASE, bank.processor)
        model_card(bank, title or folder.resolve().name).save(stage / facts.CARD)
        for name, write in files.items():
            write(stage / name)
        write_json(stage / facts.MANIFEST, manifest.model_dump())
    if bank.own_base:
        note_place(bank.model, str(folder / facts.BASE))


def claimed_output(
    target: ReaderBank | PreTrainedModel | dict[str, Any], folder: Path, files: Iterable[str] = ()
) -> AbstractContextManager[None]:
    """Hold the right to save a bank (or one of these readers) or a model, and other files; raise as saving would."""
    if isinstance(target, dict):
        return claimed(folder, [*_names(target), *files])
    if not isinstance(target, ReaderBank) or target.own_base:
        check_no_adapters(target.model if isinstance(target, ReaderBank) else target, "save")
    names = _names(target) if isinstance(target, ReaderBank) else saved_names(folder)
    return claimed(folder, [*names, *files])


def saved_bytes(target: ReaderBank | PreTrainedModel) -> int:
    """About how much saving a bank or a model writes: the weights."""
    modules: list[Any] = [target, *([target.model] if isinstance(target, ReaderBank) and target.own_base else ())]
    tensors: list[Tensor] = [tensor for module in modules for tensor in module.state_dict().values()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _names(readers: Iterable[str]) -> list[str]:
    """The files of a bank besides its base; the first marks one."""
    own = [f"{facts.READERS}/{name}/{file}" for name in readers for file in (facts.READER, facts.WEIGHTS)]
    return [facts.MANIFEST, facts.CARD, *own]


def _listed(folder: Path) -> list[str]:
    """The files that the manifest in a folder lists; none if it cannot be read."""
    try:
        manifest = facts.Manifest.read(folder / facts.MANIFEST)
    except LaminaError:
        return []
    inside = folder / facts.BASE
    base = [*saved_names(inside), *listed_names(inside)] if manifest.base.trained else ()
    return [*_names(filter(NAME.fullmatch, manifest.readers)), *(f"{facts.BASE}/{name}" for name in base)]


def load_bank(
    folder: str | Path,
    model: PreTrainedModel | None = None,
    processor: Any = None,
    *,
    revision: str | None = None,
    readers: Sequence[str] | None = None,
    writes: bool = False,
) -> ReaderBank:
    """Load a saved bank; see `ReaderBank.from_pretrained`. One that `writes` has its base's head for text, if any.

    So has one with monitors, which watch what is written.
    """
    with convert_errors(lambda reason: damaged(folder, f"cannot be loaded ({reason})")):
        path = local_folder(folder, revision, readers, base=model is None)
        load_from = partial(_load_bank, path, model, processor, readers, writes=writes)
        return read_steady(path, facts.MANIFEST, load_from)


def _load_bank(
    folder: Path, model: PreTrainedModel | None, processor: Any, readers: Sequence[str] | None, *, writes: bool
) -> ReaderBank:
    path = folder / facts.MANIFEST
    if not path.exists():
        hint = "give a folder that save_pretrained wrote"
        if (folder / "config.json").is_file():
            hint = "it is a model, and readers are trained on it first, by lamina.fit or lamina train"
        raise StoreError(f"load: {folder} has no {facts.MANIFEST}; {hint}.")
    manifest = facts.Manifest.read(path)
    base = manifest.base
    for name in manifest.readers:
        if not NAME.fullmatch(name) or manifest.readers.count(name) > 1:
            raise damaged(path, f"names a reader '{name}'; every name is given once and is a plain folder name")
    check_known(f"load {folder}", readers or (), manifest.readers, "reader")
    names = manifest.readers if readers is None else readers
    saved = {name: facts.ReaderFacts.read(folder / facts.READERS / name / facts.READER) for name in names}
    if model is None:
        watches = any(reader.info.get(MONITORS) for reader in saved.values())
        model, own = _load_base(base, folder, writes=writes or watches)
        processor = own if processor is None else processor
    elif processor is None and model.name_or_path:
        processor = load_processor(model.name_or_path, model)
    _check_base(base, model)
    bank = ReaderBank(model, processor)
    bank.own_base, bank.info = base.trained, dict(manifest.info)
    for name, reader in saved.items():
        _load_reader(bank, name, folder / facts.READERS / name, reader)
    return bank.eval()


def _base_facts(bank: ReaderBank) -> facts.BaseFacts:
    model = bank.model
    used = {bank[name].stack for name in bank}
    return facts.BaseFacts(
        id=(model.name_or_path if bank.own_base else place_of(model)) or None,
        revision=getattr(model.config, "_commit_hash", None),
        model_type=str(model.config.model_type),
        dtype=str(model.dtype).removeprefix("torch."),
        stacks={
            name: facts.StackFacts(**{trait: _trait(stack, trait) for trait in facts.StackFacts.model_fields})
            for name, stack in stacks(model).items()
            if name in used or not used
        },
        trained=bank.own_base,
    )


def _trait(stack: LayerStack, name: str) -> Any:
    return fingerprint_of(stack) if name == "fingerprint" else getattr(stack, name)


def _load_base(base: facts.BaseFacts, folder: Path, *, writes: bool) -> tuple[PreTrainedModel, Any]:
    if base.trained:
        model, processor = load(folder / facts.BASE, saved_class(folder / facts.BASE), dtype=base.dtype)
        model.name_or_path = cast("Any", model.config)._name_or_path = base.id or ""
        return model, processor
    if base.id is None:
        raise StoreError(f"load: {folder / facts.MANIFEST} names no base: it was not saved as it was. Give `model`.")
    try:
        head = writing_class(base.id, revision=base.revision) if writes else None
        return load(base.id, head, revision=base.revision, dtype=base.dtype)
    except ModelNotFoundError as error:
        reason = f"it is the base of this bank, and {error.reason}"
        raise ModelNotFoundError(op=f"load {folder}", got=error.got, reason=reason) from error


def _check_base(saved: facts.BaseFacts, model: PreTrainedModel) -> None:
    """Raise BaseMismatchError unless the model is the base; fingerprints are taken only if all else agrees."""
    differs: dict[str, tuple[object, object]] = {}
    model_type, by_name = str(model.config.model_type), stacks(model)
    if model_type != saved.model_type:
        differs["model_type"] = (saved.model_type, model_type)
    for name, expected in saved.stacks.items():
        prefix = f"{name} " if len(saved.stacks) > 1 else ""
        stack = _same_stack(by_name, name)
        if stack is None:
            differs[f"{prefix}stack"] = (name, "/".join(by_name))
            continue
        for trait, want in expected.model_dump().items():  # the fingerprint, which is slow, is the last
            if trait == "fingerprint" and differs:
                break
            if (got := _trait(stack, trait)) != want:
                differs[f"{prefix}{trait}"] = (want, got)
    if differs:
        if (dtype := str(model.dtype).removeprefix("torch.")) != saved.dtype:
            differs["dtype"] = (saved.dtype, dtype)
        raise BaseMismatchError(op="load", differs=differs)


def _same_stack(by_name: dict[str, LayerStack], name: str) -> LayerStack | None:
    """The stack of a name; an encoder is called "main" if it is loaded without its decoder."""
    return by_name.get(name) or by_name.get({"main": "encoder", "encoder": "main"}.get(name, name))


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


def _load_reader(bank: ReaderBank, name: str, folder: Path, saved: facts.ReaderFacts) -> None:
    path = folder / facts.READER
    with (
        error_context(f"in {path}"),
        convert_errors(lambda reason: damaged(path, f"has settings that do not fit ({reason})")),
    ):
        fusion, head = _config(FUSIONS, saved.fusion), _config(HEADS, saved.head)
        stack = _same_stack(bank.stacks, saved.stack)
        config = Reader(fusion, head, stack=stack.name if stack else saved.stack, seed=saved.seed)
        _check_size(config, bank, folder)
        reader = bank.add(name, config)
    if list(reader.layers) != saved.layers:
        what = f"was trained on the layers {saved.layers}; its settings select {list(reader.layers)}"
        raise StoreError(f"load: {path} {what}. Use the version of lamina that saved it.")
    if (borrowed := _borrowed(reader)) != saved.borrowed:
        raise BaseMismatchError(op=f"load: reader '{name}'", differs={"vocabulary": (saved.borrowed, borrowed)})
    tensors = read_tensors(folder / facts.WEIGHTS, reader.state_dict())
    for key, tensor in reader.state_dict(keep_vars=True).items():
        tensor.data = tensors[key].to(tensor.device)  # in the precision in which it was saved
    reader.info = dict(saved.info)


def _check_size(config: Reader, bank: ReaderBank, folder: Path) -> None:
    """Refuse settings of a reader that is larger than its file, before memory is taken for it."""
    stack = pick_stack(bank.stacks, config.stack, op="bank")
    layers = select(config.fusion.selector(), stack.layers, op="reader")
    parts: list[torch.nn.Module] = []
    with (
        suppress(ConfigError),
        torch.device("meta"),
    ):  # those that need the model say so, and are as large as parts of it
        parts.append(fusion := config.fusion.build(len(layers), stack.width))
        parts.append(config.head.build(fusion.dim))
    count = sum(parameter.numel() for part in parts for parameter in part.parameters())
    size_bytes = (folder / facts.WEIGHTS).stat().st_size if (folder / facts.WEIGHTS).is_file() else 0
    if size_bytes and count > _SPARE_PARAMETERS + size_bytes:
        what = f"has settings that describe {count:,} parameters, but its weights have {size_bytes:,} bytes"
        raise damaged(folder / facts.READER, what)


def _config(table: Registry, saved: dict[str, Any]) -> Any:
    """The config that a file describes, under the names that its settings have now."""
    for old, new in _RENAMED.items():
        if old in saved and new in {field.name for field in fields(table.get(str(saved.get("name"))))}:
            saved = {new if key == old else key: value for key, value in saved.items()}
    return table.from_dict(saved)
