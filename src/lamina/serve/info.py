"""What a server is asked about itself."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from lamina.data.encode import length_limit
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.serve.uploads import medium_of
from lamina.serve.writing.prompts import writes

if TYPE_CHECKING:
    from lamina.serve.engine import Served
    from lamina.serve.settings import Settings


def info_of(served: Served, settings: Settings, name: str) -> dict[str, Any]:
    """The model, its tasks and the limits."""
    bank = served.bank
    tasks = {
        task: {
            "kind": reader.config.head.kind,
            "problem_type": reader.config.head.problem_type,
            "reads": medium_of(bank, task),
            "labels": list(reader.config.head.labels),
            "stack": reader.stack,
            "layers": list(reader.layers),
            "parameters": sum(parameter.numel() for parameter in reader.parameters()),
            "version": served.versions[task],
            "weights": fingerprint_of_tensors(reader.state_dict().items())[:16],
            "metric": reader.info.get("metric"),
            "fingerprint": fingerprint_of(bank.stacks[reader.stack]),
        }
        for task, reader in ((task, bank[task]) for task in bank)
    }
    limits = settings.model_dump(exclude={"api_key", "admin_key", "cors_allow_origin"})
    return {
        "name": name,
        "version": version("lamina"),
        "bank_version": served.number,
        "model_type": bank.model.config.model_type,
        "dtype": str(bank.model.dtype).removeprefix("torch."),
        "device": bank.device.type,
        "max_input_length": length_limit(bank.model, bank.processor),
        "writes_text": writes(bank),
        "stacks": {name: {"layers": stack.layers, "width": stack.width} for name, stack in bank.stacks.items()},
        "tasks": tasks,
        **limits,
    }
