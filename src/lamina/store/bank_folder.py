"""A bank as a folder: save readers with a manifest of their base model, and load them onto that model.

The base is the model that the readers read. The manifest records what it was, so that loading can refuse another one.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch

from lamina.bank import NAME, Reader, ReaderBank
from lamina.bank.reader import MONITORS, WATCHES
from lamina.bank.recorded_base import check_recorded_base
from lamina.editing.record import location_of, set_location
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
from lamina.layers.adapters import adapters_of, check_no_adapters
from lamina.layers.base_facts import EARLIER_UNRELATED, StackSettings
from lamina.layers.discovery import pick_stack
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.layers.recorded import RecordedModel
from lamina.layers.wrappers import checked_model
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
from lamina.store.hub import failure, local_folder, model_card
from lamina.store.load_model import load
from lamina.store.manifest import (
    BASE,
    CARD,
    FORMAT,
    MANIFEST,
    PROCESSOR,
    READER,
    READERS,
    WEIGHTS,
    BaseFacts,
    Manifest,
    ReaderFacts,
    StackFacts,
    StatesManifest,
    library_versions,
)
from lamina.store.models import load_processor, saved_class, writing_class
from lamina.store.processors import check_inputs, checked_processor, record_inputs, save_processor
from lamina.store.save_model import changed_blocks, check_keeps_head, listed_names, save, saved_names
from lamina.utils import check_type, is_dir, is_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from contextlib import AbstractContextManager
    from os import PathLike

    from torch import nn
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers import LayerStack
    from lamina.layers.types import Processor
    from lamina.registry import Registry
    from lamina.store.files import Files
    from lamina.utils import JSON

logger = logging.getLogger(__name__)

# Some readers use parts of the model (such as its output embeddings), which are not in their files. So the settings of
# a reader may describe this many more parameters than its file has.
_SPARE_PARAMETERS = 1 << 20


# Saving


def save_bank(
    bank: ReaderBank,
    folder: str | PathLike[str],
    *,
    title: str | None = None,
    changed_base: bool = False,
    files: Files | None = None,
) -> None:
    """Save a bank to a folder, with the model's weights only if `bank.saves_base`.

    `title` is the title of the model card; None: the name of the folder. `files` are more files to write in the same
    step: name -> function that is called with the path to write. The other arguments, the errors and the warnings are
    those of `ReaderBank.save_pretrained`. Afterwards, later changes are found by comparison with what was saved.
    """
    folder = Path(check_type("save", "folder", folder, "str | Path"))
    for name in bank:
        check_finite(f"reader '{name}'", bank[name].state_dict().items())
    base = _base_facts(bank, present=changed_base or bank.train_base)
    marks = {name: mark for name, stack in base.stacks.items() if (mark := stack.fingerprint)}
    if not changed_base:
        _check_unchanged(bank, marks)
        check_inputs("save", bank.processor, bank.select(None, "save"))
    if base.id is None and bank.model.name_or_path and not base.trained:
        what = f"the base was changed after it was loaded from {bank.model.name_or_path}, so the bank does not name it"
        logger.warning("save: %s. Save the base first (lamina.save), or pass it whenever the bank is loaded.", what)
    _warn_if_cut_by_hand(bank)
    files = files or {}
    with staged(folder, [*_names(bank), *files], _listed(folder)) as stage:
        (stage / READERS).mkdir()
        for name in bank:
            _save_reader(bank[name], stage / READERS / name)
        if bank.saves_base:
            location = location_of(bank.model)
            save(bank.model, stage / BASE, bank.processor)
            set_location(bank.model, location)  # the stage is no place to load it from
        processor = save_processor(bank.processor, stage, files=not bank.saves_base)
        model_card(bank, title or folder.resolve().name).save(stage / CARD)
        for name, write in files.items():
            write(stage / name)
        manifest = Manifest(
            format=FORMAT, lamina=_version(), base=base, info=bank.info, readers=list(bank), processor=processor
        )
        write_json(stage / MANIFEST, manifest.model_dump())
    bank.accept_base(marks)  # last: after an error, a changed base still counts as changed
    record_inputs(bank.select(None, "save").values(), bank.processor)
    if bank.saves_base:
        set_location(bank.model, str(folder / BASE))


def _warn_if_cut_by_hand(bank: ReaderBank) -> None:
    """Log a warning if blocks of a model that is not saved with the bank were changed by hand: loading loses that."""
    if bank.saves_base:
        return  # `save` refuses it
    if problem := changed_blocks(bank.model):
        what = f"the base was changed by hand, and loading would build another model: {problem}"
        hint = "Cut it with lamina.truncate_ and save it, or pass the changed model: from_pretrained(folder, model=...)"
        logger.warning("save: %s. %s.", what, hint)


def _check_unchanged(bank: ReaderBank, marks: Mapping[str, str]) -> None:
    """Raise ConfigError if weights or settings of a frozen model have changed since the bank was made or loaded.

    `marks` is stack name -> fingerprint of the stack's present weights.
    """
    change = bank.change_of_base(marks, full=True)
    before = bank.fingerprints_of_base()
    if other := next((name for name, mark in marks.items() if before.get(name, mark) != mark), None):
        change = change or f"the stack '{other}' has another fingerprint"
    if change and not bank.train_base:
        raise ConfigError(
            f"save: the model has changed since the bank was made: {change}. The readers belong to the old one: load "
            "it again, or save with changed_base=True if they belong to the changed one."
        )


def push_bank(
    bank: ReaderBank,
    repo: str,
    *,
    message: str = "Save readers",
    branch: str | None = None,
    create_pr: bool = False,
    private: bool | None = None,
    token: str | None = None,
) -> str:
    """Save a bank to a repository on the hub in one commit, and return the address of the commit.

    `ReaderBank.push_to_hub` calls this, and documents the arguments, the errors and which files are deleted.
    """
    api, location = huggingface_hub.HfApi(token=token), location_of(bank.model)
    try:
        repo_id = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if branch is not None:
            api.create_branch(repo_id, branch=branch, exist_ok=True)
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            save_bank(bank, Path(folder) / "bank", title=repo)
            set_location(bank.model, location)  # not the temporary folder
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=Path(folder) / "bank",
                commit_message=message,
                revision=branch,
                create_pr=create_pr,
                delete_patterns=[f"{READERS}/*", f"{BASE}/*", f"{PROCESSOR}/*"],
            )
        return str(commit)
    except LaminaError:
        raise
    except Exception as error:  # the hub's, the connection's and the disk's errors have no common class
        raise StoreError(f"push_to_hub: '{repo}' was not saved ({failure(error, branch, 'write')}).") from error


def _version() -> str:
    """Return the installed version of lamina, or "unknown" if it runs from a source tree."""
    try:
        return version("lamina")
    except PackageNotFoundError:
        return "unknown"


def claimed_output(
    target: ReaderBank | PreTrainedModel | Mapping[str, object],
    folder: Path,
    files: Iterable[str] = (),
    op: str = "save",
) -> AbstractContextManager[None]:
    """Reserve the output folder of a training run, so that saving at its end cannot fail because of the folder.

    Args:
        target: What will be saved: a bank, a model, or a mapping with the names of a future bank's readers.
        folder: The folder; created if it does not exist.
        files: Names of more files that will be written.
        op: The operation, for the message about a head.

    Returns:
        A context in which no other process can write to the folder. Entering it raises StoreError if nothing can be
        saved there. ConfigError is raised at once if a model with adapters (PEFT) would be saved, and StoreError if the
        model in the folder would lose its head.
    """
    base = target.model if isinstance(target, ReaderBank) and target.saves_base else target
    if isinstance(base, torch.nn.Module) and not isinstance(base, ReaderBank):
        check_no_adapters(base, "save")
        if base is target:
            check_keeps_head(folder, base, op)
    names = _names(target) if isinstance(target, ReaderBank | Mapping) else saved_names(folder)
    return claimed(folder, [*names, *files])


def saved_bytes(target: ReaderBank | PreTrainedModel) -> int:
    """Return the bytes of weights that are saved for a bank or model; weights that share memory count once."""
    modules: list[nn.Module] = [target]
    if isinstance(target, ReaderBank) and target.saves_base:
        modules.append(target.model)
    tensors = (tensor for module in modules for tensor in module.state_dict().values())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def _names(readers: Iterable[str]) -> list[str]:
    """Return the paths, in a bank's folder, of its manifest (the mark), its model card and the files of `readers`."""
    reader_files = [f"{READERS}/{name}/{file}" for name in readers for file in (READER, WEIGHTS)]
    return [MANIFEST, CARD, *reader_files]


def _listed(folder: Path) -> list[str]:
    """Return the paths, inside a folder, of all files that its manifest lists; [] if there is no readable manifest."""
    try:
        manifest = Manifest.read(folder / MANIFEST)
    except LaminaError:
        return []
    inside = folder / BASE
    base = [*saved_names(inside), *listed_names(inside)] if manifest.base.trained else ()
    processor = () if manifest.processor is None else manifest.processor.files
    inner = (*(f"{BASE}/{name}" for name in base), *(name for name in processor if name.startswith(f"{PROCESSOR}/")))
    return [*_names(filter(NAME.fullmatch, manifest.readers)), *inner]


def _base_facts(bank: ReaderBank, *, present: bool) -> BaseFacts:
    """Return the manifest's entry about the bank's model: where it comes from, and what its states depend on.

    With `present`, the settings are those that the model has now, else those that it had when the bank was made.
    """
    model = bank.model
    if isinstance(model, RecordedModel):
        return BaseFacts.of_recorded(model.facts)
    used, settings = {bank[name].stack for name in bank}, bank.settings_of_base()
    saved: dict[str, StackFacts] = {}
    for name, stack in stacks(model).items():
        if name in used or not used:
            facts = StackSettings.of(model, stack) if present else settings[name]
            saved[name] = StackFacts(
                layers=stack.layers,
                width=stack.width,
                fingerprint=fingerprint_of(stack),
                config=facts.config,
                modules=facts.modules,
            )
    return BaseFacts(
        id=(model.name_or_path if bank.saves_base else location_of(model)) or None,
        revision=getattr(model.config, "_commit_hash", None),
        model_type=str(model.config.model_type),
        dtype=str(model.dtype).removeprefix("torch."),
        stacks=saved,
        library=library_versions(),
        trained=bank.saves_base,
        adapters=adapters_of(model),
    )


def bank_of_states(folder: str | PathLike[str]) -> ReaderBank:
    """Return a bank without a model for recorded states; see `ReaderBank.from_states`."""
    return ReaderBank(RecordedModel(StatesManifest.of_folder(folder).facts))


def _save_reader(reader: ReaderModule, folder: Path) -> None:
    """Write the settings and the weights of a reader to a new folder, which must not exist."""
    saved = ReaderFacts(
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
    write_json(folder / READER, saved.model_dump())
    write_tensors(folder / WEIGHTS, reader.state_dict())


def _borrowed(reader: ReaderModule) -> str | None:
    """Return a fingerprint of the model's tensors that the head uses (output embeddings); None if it uses none."""
    tensors = reader.head.borrowed_tensors()
    return fingerprint_of_tensors(tensors.items()) if tensors else None


# Loading


def load_bank(
    folder: str | PathLike[str],
    model: PreTrainedModel | None = None,
    processor: Processor | None = None,
    *,
    revision: str | None = None,
    readers: Collection[str] | str | None = None,
    writes: bool = False,
) -> ReaderBank:
    """Load a saved bank; the arguments and errors are those of `ReaderBank.from_pretrained`.

    With `writes`, the base model is loaded with its language model head, if it was saved with one. This is always done
    if a loaded reader has monitors or was added for them.
    """
    place = os.fsdecode(check_type("load", "folder", folder, "str | Path"))
    names = [readers] if isinstance(readers, str) else check_type("load", "readers", readers, "Collection | None")
    check_type("load", "processor", processor, "Processor | None")
    if model is not None:
        model = checked_model(model, "load")
    with convert_errors(lambda reason: damaged(place, f"cannot be loaded ({reason})")):
        path = local_folder(place, revision, names, base=model is None)
        return read_steady(path, MANIFEST, partial(_load_bank, path, model, processor, names, writes=writes))


def _load_bank(
    folder: Path,
    model: PreTrainedModel | None,
    processor: Processor | None,
    readers: Collection[str] | None,
    *,
    writes: bool,
) -> ReaderBank:
    """Load a bank from a local folder. `load_bank` explains `writes`; for all else see `ReaderBank.from_pretrained`."""
    manifest = _read_manifest(folder)
    check_known(f"load {folder}", readers or (), manifest.readers, "reader")
    names = manifest.readers if readers is None else readers
    saved = {name: ReaderFacts.read(folder / READERS / name / READER) for name in names}
    given = processor
    if model is None and manifest.base.recorded is not None:
        model = RecordedModel(manifest.base.recorded_facts)
    elif model is None:
        writes = writes or any(reader.info.get(MONITORS) or reader.info.get(WATCHES) for reader in saved.values())
        model, base_processor = _load_base(manifest.base, folder, writes=writes)
        processor = base_processor if processor is None else processor
    elif processor is None and manifest.processor is None and model.name_or_path:
        processor = load_processor(model.name_or_path, model)
    _check_base(manifest.base, model)
    if manifest.processor is None:
        if manifest.base.library is None:
            what = "its tokenizer cannot be checked until it is saved again"
            logger.info("load: an earlier version saved %s; %s", folder, what)
    else:
        processor = checked_processor(manifest, folder, model, given, processor)
    bank = ReaderBank(model, processor, saves_base=manifest.base.trained, info=manifest.info)
    for name, reader in saved.items():
        _load_reader(bank, name, folder / READERS / name, reader)
        if reader.stack not in manifest.base.stacks:
            raise damaged(folder / MANIFEST, f"has no fingerprint of the stack '{reader.stack}', which '{name}' reads")
    for name, reader in saved.items():  # `add` would remove the cascades whose first reader it adds later
        bank[name].info.update(reader.info)
    bank.accept_base({name: mark for name, stack in manifest.base.stacks.items() if (mark := stack.fingerprint)})
    record_inputs(bank.select(None, "load").values(), processor)
    bank.folder = folder.absolute()
    return bank.eval()


def saved_readers(folder: str) -> dict[str, ReaderFacts]:
    """Return reader name -> the settings that were saved with the reader, from a local folder of a bank.

    A folder that holds no saved bank gives {}. Raises StoreError if the bank is damaged, and UnknownNameError if a file
    has an unknown key.
    """
    path = Path(folder)
    if not is_file(path / MANIFEST):
        return {}
    return {name: ReaderFacts.read(path / READERS / name / READER) for name in _read_manifest(path).readers}


def _read_manifest(folder: Path) -> Manifest:
    """Read a bank's manifest; raise StoreError if it is missing or damaged, UnknownNameError for an unknown key."""
    path = folder / MANIFEST
    if not path.exists():
        hint = "give a folder that save_pretrained wrote"
        if (folder / "config.json").is_file():
            hint = "it is a model, and readers are trained on it first, by lamina.fit or lamina train"
        raise StoreError(f"load: {folder} has no {MANIFEST}; {hint}.")
    manifest = Manifest.read(path)
    if not manifest.base.stacks:
        raise damaged(path, "has no fingerprint of the base, so another base would not be noticed")
    counts = Counter(manifest.readers)
    for name, count in counts.items():
        if not NAME.fullmatch(name) or count > 1:  # a name like ".." would leave the folder
            raise damaged(path, f"names a reader '{name}'; every name must be a plain folder name, and be there once")
    return manifest


def _load_base(base: BaseFacts, folder: Path, *, writes: bool) -> tuple[PreTrainedModel, Processor | None]:
    """Load the model that a manifest names, or that is saved in the bank's folder, and its processor.

    The weights have the type that the manifest names. The model in the folder has the head that it was saved with. A
    named model is loaded with a head only if `writes` and if it was saved with a language model head. Raises StoreError
    if no model is named, ModelNotFoundError if the named one cannot be found, and the other errors of `load`.
    """
    if base.trained:
        model, processor = load(folder / BASE, saved_class(folder / BASE), dtype=base.dtype)
        model.name_or_path = base.id or ""
        model.config.__dict__["_name_or_path"] = base.id or ""
        return model, processor
    if base.id is None:
        why = "names no base, since it was built in memory, or changed and not saved"
        raise StoreError(f"load: {folder / MANIFEST} {why}. Pass `model` (--model).")
    try:
        revision = None if is_dir(base.id) else base.revision
        head = writing_class(base.id, revision=revision) if writes else None
        return load(base.id, head, revision=revision, dtype=base.dtype)
    except ModelNotFoundError as error:
        reason = f"it is the base of this bank, and {error.reason}"
        raise ModelNotFoundError(op=f"load {folder}", got=error.got, reason=reason) from error


def _check_base(saved: BaseFacts, model: PreTrainedModel) -> None:
    """Raise BaseMismatchError unless `model` is the model that the manifest describes.

    Fingerprints are slow, so they are compared only if everything else agrees. If readers were trained on recorded
    states, `check_recorded_base` compares the two.
    """
    differs: dict[str, tuple[object, object]] = {}
    model_type, by_name = str(model.config.model_type), stacks(model)
    if saved.recorded is not None:
        check_recorded_base("load", by_name, model, saved.recorded_facts)
        return
    if model_type != saved.model_type:
        differs["model_type"] = (saved.model_type, model_type)
    for name, expected in saved.stacks.items():
        prefix = f"{name} " if len(saved.stacks) > 1 else ""
        stack = _same_stack(by_name, name)
        if stack is None:
            differs[f"{prefix}stack"] = (name, "/".join(by_name))
            continue
        shape = {"layers": stack.layers, "width": stack.width}
        found = {what: (getattr(expected, what), here) for what, here in shape.items()}
        if not differs and all(was == here for was, here in found.values()):
            found = _changed_settings(expected, model, stack, saved.library)
        differing = {prefix + what: pair for what, pair in found.items() if pair[0] != pair[1]}
        if not differs | differing and (mark := fingerprint_of(stack)) != expected.fingerprint:
            differing[f"{prefix}fingerprint"] = (expected.fingerprint, mark)
        differs |= differing
    if differs:
        if (dtype := str(model.dtype).removeprefix("torch.")) != saved.dtype:
            differs["dtype"] = (saved.dtype, dtype)
        active = adapters_of(model)
        if saved.adapters not in (None, active):
            before, here = (" and ".join(names) or "none" for names in (saved.adapters, active))
            differs = {"adapters": (before, here), **differs}
        raise BaseMismatchError(op="load", differs=differs, had_adapters=bool(saved.adapters) and "adapters" in differs)


def _changed_settings(
    saved: StackFacts, model: PreTrainedModel, stack: LayerStack, library: str | None
) -> dict[str, tuple[object, object]]:
    """Return name -> (saved value, present value) of each setting that differs; `library` as in `_differing`.

    Banks of earlier versions of lamina lack some names, also in the digests of modules. So the settings are compared
    again without these names, and the shorter result is returned.
    """
    found = _differing(saved, StackSettings.of(model, stack), library)
    if found:
        found = min(found, _differing(saved, StackSettings.of(model, stack, EARLIER_UNRELATED), library), key=len)
    return found


def _differing(saved: StackFacts, here: StackSettings, library: str | None) -> dict[str, tuple[object, object]]:
    """Return name -> (saved value, present value) for each setting of a stack that differs.

    `library` has the versions of the libraries that saved the bank. If they are installed, all settings are compared; a
    value that one side lacks is None. Otherwise only settings of the config that both sides have are compared. The
    result is {} for banks of early versions of lamina, which saved no settings.
    """
    if saved.config is None or saved.modules is None:
        return {}
    same = library == library_versions()
    names = saved.config.keys() | here.config.keys() if same else saved.config.keys() & here.config.keys()
    pairs: dict[str, tuple[object, object]] = {
        name: (saved.config.get(name), here.config.get(name)) for name in sorted(names)
    }
    for path in sorted(saved.modules.keys() | here.modules.keys()) if same else ():
        pairs[f"module '{path}'"] = (saved.modules.get(path), here.modules.get(path))
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _same_stack(by_name: Mapping[str, LayerStack], name: str) -> LayerStack | None:
    """Return the model's stack that corresponds to the saved name; None if there is none.

    "main" also stands for "encoder", and the other way round: an encoder without its decoder is called "main".
    """
    return by_name.get(name) or by_name.get({"main": "encoder", "encoder": "main"}.get(name, name))


def _load_reader(bank: ReaderBank, name: str, folder: Path, saved: ReaderFacts) -> None:
    """Add a saved reader to a bank, without its `info`, with its weights in the dtype in which they were saved.

    `folder` is the reader's folder, and `saved` its settings, read from there.

    Raises StoreError if the files are damaged or do not fit each other, UnknownNameError if no such fusion or head is
    registered or the stack does not exist, ConfigError or LayerIndexError if the settings do not fit the model, and
    BaseMismatchError if the head uses other tensors of the model than when it was trained.
    """
    path = folder / READER
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
    tensors = read_tensors(folder / WEIGHTS, reader.state_dict())
    for key, tensor in reader.state_dict(keep_vars=True).items():
        tensor.data = tensors[key].to(tensor.device)  # not `copy_`, which would convert to the dtype of the new reader
    for option in ("max_length", "stride"):
        if not isinstance(value := saved.info.get(option, 0), int | None):
            raise damaged(path, f"has {value!r} as '{option}' of 'info'; it must be a number of tokens")


def _check_size(config: Reader, bank: ReaderBank, folder: Path) -> None:
    """Raise StoreError if a reader's settings (`config`) describe far more parameters than its weights file can hold.

    `folder` is the reader's folder. The reader is built on the meta device, so that a damaged settings file cannot
    exhaust the memory. A part that can only be built on a real model is not counted: the model limits its size. A
    missing weights file passes. Raises UnknownNameError for an unknown stack, LayerIndexError for a missing layer.
    """
    stack = pick_stack(bank.stacks, config.stack, op="bank")
    layers = select(config.fusion.selector(), stack.layers, op="reader")
    parts: list[nn.Module] = []
    with suppress(ConfigError), torch.device("meta"):
        parts.append(fusion := config.fusion.build(len(layers), stack.width))
        parts.append(config.head.build(fusion.dim))
    count = sum(parameter.numel() for part in parts for parameter in part.parameters())
    size_bytes = (folder / WEIGHTS).stat().st_size if (folder / WEIGHTS).is_file() else 0
    if size_bytes and count > _SPARE_PARAMETERS + size_bytes:
        what = f"has settings that describe {count:,} parameters, but its weights have {size_bytes:,} bytes"
        raise damaged(folder / READER, what)


def _config(table: Registry[Any], saved: Mapping[str, JSON]) -> Any:  # noqa: ANN401
    """Return the fusion or head config for saved settings; UnknownNameError or ConfigError as in `table.from_dict`.

    Versions before 0.2 called the setting "problem_type" of a head "problem".
    """
    if "problem" in saved and "problem_type" in {field.name for field in fields(table.get(str(saved.get("name"))))}:
        saved = {"problem_type" if key == "problem" else key: value for key, value in saved.items()}
    return table.from_dict(dict(saved))
