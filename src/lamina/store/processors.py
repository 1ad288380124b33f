"""Save the processor of a bank, and compare processors: do two of them make the same inputs?"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from torch.utils.weak import WeakIdKeyDictionary

from lamina.errors import BaseMismatchError, ConfigError
from lamina.layers.types import tokenizer_of
from lamina.store.files import files_in
from lamina.store.manifest import BASE, PROCESSOR, Manifest, ProcessorFacts, library_versions
from lamina.store.models import load_processor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping
    from pathlib import Path

    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers.types import Processor
    from lamina.utils import JSON, JSONObject

# Attributes that a caller may set on a loaded tokenizer, and that its files do not always hold.
_SET = ("truncation_side", "model_max_length", "split_special_tokens")
# Facts that mean the same in every version of transformers.
_LASTING = ("size", "vocabulary", "added tokens", "special tokens", *_SET)
# Parts of a joint processor -> the class in transformers of such a processor by itself; subclasses come first.
_PARTS = {
    "video processor": "BaseVideoProcessor",
    "image processor": "ImageProcessingMixin",
    "feature extractor": "FeatureExtractionMixin",
}
_NOISE = ("processor_class", "auto_map", "_name_or_path", "name_or_path", "transformers_version")


def processor_facts(processor: Processor) -> dict[str, JSON]:
    """Return what a processor's outputs depend on, JSON-ready: short facts in full, long ones as digests.

    The padding side is not included. A processor of an unknown kind has only its class. A tokenizer with steps in
    Python raises an Exception.
    """
    facts: dict[str, JSON] = {part: _digest(settings) for part, settings in _parts_of(processor).items()}
    tokenizer = tokenizer_of(processor)
    if not hasattr(tokenizer, "get_vocab"):
        if not facts:
            settings = _settings_of(processor)
            facts["settings"] = type(processor).__name__ if settings is None else _digest(settings)
        return facts
    facts |= {"size": len(tokenizer), "vocabulary": _digest(sorted(tokenizer.get_vocab().items()))}
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    facts["added tokens"] = _digest(sorted(added.items()))
    facts["special tokens"] = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    facts |= {name: value for name in _SET if (value := getattr(tokenizer, name, None))}
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        state: JSONObject = json.loads(backend.to_str())
        facts["model"] = _digest({name: value for name, value in state["model"].items() if name != "vocab"})
        facts |= {part.replace("_", "-"): _digest(state[part]) for part in ("normalizer", "pre_tokenizer")}
        facts["post-processor"] = _digest(state["post_processor"])
    else:
        scalars = {name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, bool | int | str)}
        facts["settings"] = _digest({name: value for name, value in _settings(scalars).items() if name not in _SET})
    return facts


def _parts_of(processor: Processor) -> dict[str, JSONObject]:
    """Return name in `_PARTS` -> settings, for the parts that a joint processor has; {} for any other processor."""
    found = {part: _settings_of(getattr(processor, part.replace(" ", "_"), None)) for part in _PARTS}
    return {part: settings for part, settings in found.items() if settings is not None}


def _settings_of(part: object) -> JSONObject | None:
    to_dict: Callable[[], JSONObject] | None = getattr(part, "to_dict", None)
    return None if to_dict is None else _settings(to_dict())


def _settings(fields: JSONObject) -> JSONObject:
    return {name: value for name, value in fields.items() if name not in _NOISE}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def save_processor(processor: Processor | None, folder: Path, *, files: bool) -> ProcessorFacts | None:
    """Return a processor's entry in the manifest; None without a processor.

    With `files`, its files are written to a subfolder of the bank's `folder`, if it can be saved.
    """
    if processor is None:
        return None
    written: list[str] = []
    if files and hasattr(processor, "save_pretrained"):
        processor.save_pretrained(folder / PROCESSOR)
        written = [f"{PROCESSOR}/{name}" for name in files_in(folder / PROCESSOR)]
    return ProcessorFacts(files=written, facts=processor_facts(processor))


def checked_processor(
    manifest: Manifest, folder: Path, model: PreTrainedModel, given: Processor | None, other: Processor | None
) -> Processor | None:
    """Return `given`, or else the processor that was saved with the bank, or else `other`, which may be None.

    `manifest.processor` must not be None. The saved tokenizer gets the settings `_SET`, such as its maximum length,
    that it had when the bank was saved. Under other library versions than those that saved the bank, only facts that
    mean the same in all versions are compared.

    Raises:
        BaseMismatchError: If the processor does not make the same inputs as the one that the bank was saved with.
        StoreError: If the saved files cannot be read.
    """
    saved, processor = cast("ProcessorFacts", manifest.processor), given
    place = folder / PROCESSOR if saved.files else folder / BASE
    if processor is None and place.is_dir() and (processor := load_processor(place, model)) is not None:
        for name in filter(saved.facts.__contains__, _SET):
            setattr(tokenizer_of(processor), name, saved.facts[name])
    if (processor := other if processor is None else processor) is None:
        return None
    facts = processor_facts(processor)
    is_same_library = manifest.base.library == library_versions()
    names = {*saved.facts, *facts} if is_same_library else saved.facts.keys() & facts.keys() & {*_LASTING}
    if differs := _differences(saved.facts, facts, names):
        raise BaseMismatchError(op="load", differs=differs, what=_kind(saved.facts))
    return processor


def check_same_inputs(op: str, known: Processor, processor: Processor) -> None:
    """Check that a processor passed to a call makes the same inputs as the bank's own processor.

    Only parts that both have, such as a tokenizer, are compared. Processors of different kinds are not compared.

    Args:
        op: The operation, for messages. "fit" is the one that trains readers.
        known: The bank's processor.
        processor: The processor that was passed.

    Raises:
        ConfigError: If the inputs differ and `op` is "fit".
        BaseMismatchError: If the inputs differ and `op` is any other.
    """
    bank_facts, facts = _by_part(known), _by_part(processor)
    differs = _differences(bank_facts, facts)
    if differs and op == "fit":
        listed = "; ".join(f"{name} is {own}, and {other} there" for name, (own, other) in differs.items())
        problem = f"the bank's {_kind(bank_facts)}, which is saved with its readers, makes different inputs: {listed}"
        hint = "Leave processor= out, or make a bank with it: ReaderBank(model, processor)"
        raise ConfigError(f"{op}: {problem}. {hint}.")
    if differs:
        raise BaseMismatchError(op=op, differs=differs, what=_kind(bank_facts))


def record_inputs(readers: Iterable[ReaderModule], processor: Processor | None) -> None:
    """Set the `inputs` of readers to the facts about a processor as it is now, for `check_inputs`.

    They are None without a processor, or with a tokenizer that has steps in Python.
    """
    facts = None
    if processor is not None:
        with suppress(Exception):  # tokenizers raises no other type for such a step
            facts = _remembered_facts(processor)
    for reader in readers:
        reader.inputs = facts


def check_inputs(op: str, processor: Processor | None, readers: Mapping[str, ReaderModule]) -> None:
    """Raise ConfigError, about `op`, if a bank's processor has changed so that it makes other inputs for its readers.

    It is compared with what it was when each of `readers` was trained or loaded. `processor` None passes, and so does a
    reader without a record. A changed maximum length is allowed for a reader whose `info` has that of its training.
    """
    facts: dict[str, JSON] = {}
    for name, reader in readers.items():
        if processor is None or reader.inputs is None:
            continue
        facts = facts or _remembered_facts(processor)
        differs = {} if reader.inputs == facts else _differences(reader.inputs, facts)
        if reader.info.get("max_length") is not None:
            differs.pop("model_max_length", None)
        if differs:
            listed = "; ".join(f"{what} is {now}, not {before}" for what, (before, now) in differs.items())
            hint = "save with changed_base=True if they belong to the changed one"
            hint = hint if op == "save" else "make another bank for other inputs"
            problem = f"the {_kind(facts)} has changed since reader '{name}' was trained or loaded: {listed}"
            raise ConfigError(f"{op}: {problem}. Set it back, or {hint}.")


def _by_part(processor: Processor) -> dict[str, JSON]:
    """Return a processor's facts with the names that its parts have in a joint processor, to compare the two.

    For example, the "settings" of a lone image processor are then called "image processor".
    """
    facts = dict(_remembered_facts(processor))
    classes = {part.__name__ for part in type(processor).__mro__}
    for part, base in _PARTS.items():
        if "settings" in facts and base in classes:
            facts[part] = facts.pop("settings")
    return facts


def _remembered_facts(processor: Processor) -> dict[str, JSON]:
    """Return `processor_facts`; with a tokenizer, from a cache unless the processor's settings have changed.

    The cached dict must not be changed. Another vocabulary of the same size is noticed by a sample of its tokens.
    """
    tokenizer = tokenizer_of(processor)
    if not hasattr(tokenizer, "get_vocab"):
        return processor_facts(processor)  # settings, which take no time to digest, and which a caller may change
    settings = {} if tokenizer is processor else _parts_of(processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model: Any = getattr(backend, "model", None)
    kind: type[object] = model.__class__
    ids = range(0, len(tokenizer), len(tokenizer) // _SAMPLE + 1)
    key = (
        *(len(tokenizer), settings, _attributes(tokenizer, _SET)),
        *(tuple(tokenizer.added_tokens_decoder), tokenizer.special_tokens_map),
        *[step and step.__getstate__() for step in _attributes(backend, _STEPS)],
        *(kind, _attributes(model, _setting_names(kind))),
        None if model is None else [model.id_to_token(number) for number in ids],
    )
    held = _facts.get(processor)  # once: comparing two weak references to a tokenizer is slow
    if held is None or held[0] != key:
        held = _facts[processor] = key, processor_facts(processor)
    return held[1]


def _attributes(holder: object, names: Iterable[str]) -> list[Any]:
    return [getattr(holder, name, None) for name in names]


@cache
def _setting_names(kind: type[object]) -> list[str]:
    """Return the names of the settings that a class of tokenizer models has as attributes, such as "unk_token"."""
    return [name for name in dir(kind) if not name.startswith("_") and not callable(getattr(kind, name))]


_STEPS = ("normalizer", "pre_tokenizer", "post_processor")
_SAMPLE = 8  # tokens that are looked up in each call
# A vocabulary takes a tenth of a second to digest, and a processor may be passed with every call.
_facts: MutableMapping[object, tuple[object, dict[str, JSON]]] = WeakIdKeyDictionary()


def _differences(
    known: Mapping[str, JSON], facts: Mapping[str, JSON], names: Iterable[str] | None = None
) -> dict[str, tuple[object, object]]:
    """Return name -> (known value, present value) for the facts in `names` that differ; a missing value is None.

    Without `names`, the facts that both sides have are compared, and for two tokenizers all of `_SET`. The padding
    token does not count.
    """
    if names is None:
        both = known.keys() & facts.keys()
        names = both | {*_SET} if "vocabulary" in both else both
    known, facts = (_without_padding(side) for side in (known, facts))
    return {name: (known.get(name), facts.get(name)) for name in sorted(names) if known.get(name) != facts.get(name)}


def _without_padding(facts: Mapping[str, JSON]) -> dict[str, JSON]:
    tokens = facts.get("special tokens")
    if not isinstance(tokens, dict):
        return dict(facts)
    return {**facts, "special tokens": {name: token for name, token in tokens.items() if name != "pad_token"}}


def _kind(facts: Mapping[str, JSON]) -> str:
    return "tokenizer" if "vocabulary" in facts else "processor"
