"""What a server is asked about itself."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lamina.data.encode import length_limit
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.serve.generation.prompts import generates_text
from lamina.serve.uploads import medium_of
from lamina.serve.web_page import default_examples, default_title, learnt_pairs
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from lamina.serve.scheduler import ServedBank
    from lamina.serve.settings import Settings


# Reader -> the hash of its weights, stack -> that of the base's; all weights are read for them, and none change
_HASHES: WeakKeyDictionary[ServedBank, tuple[dict[str, str], dict[str, str]]] = WeakKeyDictionary()


def info_of(served: ServedBank, settings: Settings, name: str) -> dict[str, Any]:
    """The model, its tasks and the limits.

    Of a task "pairs" says whether it learnt from pairs of texts (None: not known), "max_length" how many tokens of a
    text it reads; "max_input_length" is how many the model does.
    """
    bank, (weights, fingerprints) = served.bank, _hashes(served)
    limit = length_limit(bank.model, bank.processor)
    tasks = {
        task: {
            "kind": reader.config.head.kind,
            "problem_type": reader.config.head.problem_type,
            "reads": medium_of(bank, task),
            "pairs": learnt_pairs(reader),
            "max_length": reader.info.get("max_length") or limit,
            "has_classes": kind_of(reader.config.head.kind).has_classes,
            "labels": list(reader.config.head.labels),
            "stack": reader.stack,
            "layers": list(reader.layers),
            "parameters": sum(parameter.numel() for parameter in reader.parameters()),
            "version": served.versions[task],
            "weights": weights[task],
            "metric": reader.info.get("metric"),
            "fingerprint": fingerprints[reader.stack],
        }
        for task, reader in ((task, bank[task]) for task in bank)
    }
    limits = settings.model_dump(exclude={"api_key", "admin_key", "cors_allow_origin", "title", "examples"})
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
        "stacks": {name: {"layers": stack.layers, "width": stack.width} for name, stack in bank.stacks.items()},
        "tasks": tasks,
        **limits,
    }


def _hashes(served: ServedBank) -> tuple[dict[str, str], dict[str, str]]:
    if served not in _HASHES:
        bank = served.bank
        weights = {task: fingerprint_of_tensors(bank[task].state_dict().items())[:16] for task in bank}
        read = dict.fromkeys(bank[task].stack for task in bank)
        _HASHES[served] = weights, {stack: fingerprint_of(bank.stacks[stack]) for stack in read}
    return _HASHES[served]
