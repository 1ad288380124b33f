"""The response of `/info`: the model, its tasks and the limits of the server."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from lamina.data.batches import tokenizer_of
from lamina.data.encode import length_limit
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.monitors import Cascade
from lamina.serve.generation.prompts import generates_text
from lamina.serve.uploads import medium_of
from lamina.serve.web_page import default_examples, default_title, learnt_pairs
from lamina.tasks import kind_of
from lamina.utils import JSON

if TYPE_CHECKING:
    from lamina.bank import ReaderBank
    from lamina.monitors.cascade import AnyMonitor
    from lamina.serve.scheduler import ServedBank
    from lamina.serve.settings import Settings

_NO_LIMITS = {
    "backend",
    "api_key",
    "admin_key",
    "cors_allow_origin",
    "title",
    "examples",
}  # settings that are not limits

# Bank -> reader name -> hash of the reader's weights, and stack name -> fingerprint of the base model's stack.
# Hashing reads all weights, and none of them changes while the bank is served.
_HASHES: WeakKeyDictionary[ServedBank, tuple[dict[str, str], dict[str, str]]] = WeakKeyDictionary()


def info_of(served: ServedBank, settings: Settings, name: str, backend: str = "torch") -> dict[str, JSON]:
    """Return the public facts about a server: its bank, model, tasks and limits, without any keys.

    "max_input_length" is the number of tokens that the model reads, and a task's "max_length" the number that its
    reader reads. A task's "pairs" tells whether its reader was trained on pairs of texts; None if that is not known.

    Args:
        served: The bank, with versions.
        settings: The server's settings.
        name: Name of the bank.
        backend: What answers now: "torch", "onnx" or "int8".
    """
    bank = served.bank
    limit = length_limit(bank.model, bank.processor)
    return {
        "name": name,
        "title": settings.title or default_title(bank, name),
        "examples": default_examples(bank) if settings.examples is None else settings.examples,
        "version": version("lamina"),
        "bank_version": served.number,
        "model_type": bank.model.config.model_type,
        "dtype": str(bank.model.dtype).removeprefix("torch."),
        "device": bank.device.type,
        "max_input_length": limit,
        "writes_text": generates_text(bank),
        "chats": generates_text(bank) and bool(tokenizer_of(bank.processor).chat_template),
        "monitors": {key: _monitor_info(bank, monitor) for key, monitor in bank.monitors.items()},
        "stacks": {name: {"layers": stack.layers, "width": stack.width} for name, stack in bank.stacks.items()},
        "tasks": {task: _task_info(served, task, limit) for task in bank},
        "backend": backend,
        **settings.model_dump(exclude=_NO_LIMITS),
    }


def _task_info(served: ServedBank, task: str, limit: int) -> dict[str, JSON]:
    """Return what `/info` says about the reader `task`; `limit` is the model's maximum number of tokens."""
    reader, (weights, fingerprints) = served.bank[task], _hashes(served)
    head = reader.config.head
    return {
        "kind": head.kind,
        "problem_type": head.problem_type,
        "reads": medium_of(served.bank, task),
        "pairs": learnt_pairs(reader),
        "max_length": reader.info.get("max_length") or limit,
        "has_classes": kind_of(head.kind).has_classes,
        "labels": list(head.labels),
        "stack": reader.stack,
        "layers": list(reader.layers),
        "parameters": sum(parameter.numel() for parameter in reader.parameters()),
        "version": served.versions[task],
        "weights": weights[task],
        "metric": reader.info.get("metric"),
        "fingerprint": fingerprints[reader.stack],
    }


def _monitor_info(bank: ReaderBank, monitor: AnyMonitor) -> dict[str, JSON]:
    """Return what `/info` says about a saved monitor."""
    own = monitor.second if isinstance(monitor, Cascade) else monitor
    rates = monitor.calibration
    problem = bank[monitor.reader].config.head.problem_type
    return {
        "readers": list(monitor.readers),
        "flag": list(own.flag),
        "scale": own.scale,
        "bounded": own.scale == "probability" and problem != "regression",
        "threshold": monitor.threshold,
        "false_positive_rate": rates and rates.false_positive_rate,
        "recall": rates and rates.recall,
    }


def _hashes(served: ServedBank) -> tuple[dict[str, str], dict[str, str]]:
    """Return reader name -> hash of its weights, and stack name -> fingerprint; computed once per served bank."""
    if served not in _HASHES:
        bank = served.bank
        weights = {task: fingerprint_of_tensors(bank[task].state_dict().items())[:16] for task in bank}
        stacks = dict.fromkeys(bank[task].stack for task in bank)
        _HASHES[served] = weights, {stack: fingerprint_of(bank.stacks[stack]) for stack in stacks}
    return _HASHES[served]
