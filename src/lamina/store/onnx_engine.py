"""Answer batches with an exported bank: ONNX Runtime computes in place of PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, final
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lamina.errors import StoreError, first_line
from lamina.layers.preserve import evaluating
from lamina.store.onnx import (
    GRAPH,
    MARK,
    ExportPlan,
    OnnxFacts,
    check_outputs,
    hash_of_graph,
    import_packages,
    open_session,
    reader_digests,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from lamina.bank import ReaderBank
    from lamina.layers.types import Batch


_OP = "onnx"
_PROBES = ((2, 9), (1, 5))  # rows and tokens of the batches on which the answers are compared with PyTorch's


@final
class OnnxEngine:
    """An ONNX Runtime session on the CPU that computes readers' answers. Several threads may use it at once.

    `OnnxEngine.open` compares its answers with PyTorch's before it is used, unless the graph is quantised.

    Args:
        bank: The bank that was exported.
        session: The session of onnxruntime.
        facts: The contents of `onnx.json`.
        names: Names of the readers that the bank and the graph share; the engine answers for them.
    """

    def __init__(self, bank: ReaderBank, session: Any, facts: OnnxFacts, names: frozenset[str]) -> None:  # noqa: ANN401
        self.facts, self.names, self._session = facts, names, session
        self._weights = _Weights(bank, {name: str(facts.outputs[name].digest) for name in names})
        self._options = import_module("onnxruntime").RunOptions()
        self._options.only_execute_path_to_fetches = True  # readers that are not asked for cost nothing

    @classmethod
    def open(
        cls, bank: ReaderBank, folder: Path, *, names: Sequence[str] | None = None, quantised: bool = False
    ) -> OnnxEngine:
        """Open an export for a bank, and compare its answers to small batches with PyTorch's.

        Args:
            bank: The bank, on the CPU.
            folder: The folder of the export.
            names: Readers for which the graph must answer. None: all readers of the bank.
            quantised: Whether the graph must be one that `export_int8` wrote; otherwise it must not.

        Raises:
            StoreError: If the files are damaged, or belong to another bank or base, the graph is quantised or not
                against `quantised`, or the answers differ from PyTorch's. A quantised graph is not compared.
            UnknownNameError: If `onnx.json` has an unknown key.
            ConfigError: If the frozen model or the processor has changed since the bank was made.
            MissingExtraError: If onnxruntime, or a package that it imports, is not installed.
        """
        import_packages(_OP, "onnxruntime")
        facts = OnnxFacts.read(folder / MARK)
        digests = reader_digests(bank)
        same = frozenset(
            name for name, own in digests.items() if name in facts.outputs and facts.outputs[name].digest == own
        )
        if others := [name for name in (bank if names is None else names) if name not in same]:
            problem = f"{folder} was not exported from reader '{others[0]}' of this bank"
            raise StoreError(f"{_OP}: {problem}. Export it again.")
        if quantised != (facts.int8 is not None):
            has, needs = ("in float32", "quantised") if quantised else ("quantised", "in float32")
            raise StoreError(f"{_OP}: the graph in {folder} is {has}; one {needs} is needed. Export it again.")
        if facts.sha256 != hash_of_graph(folder):
            raise StoreError(f"{_OP}: the graph in {folder} is damaged; its SHA-256 differs. Export it again.")
        try:
            session = open_session(folder / GRAPH)
        except Exception as error:  # onnxruntime has classes of its own
            raise StoreError(f"{_OP}: onnxruntime cannot open {folder / GRAPH} ({first_line(error)}).") from error
        engine = cls(bank, session, facts, same)
        if facts.int8 is None:
            plan = ExportPlan(bank, sorted(same), main=False)
            for size in _PROBES:
                batch = plan.inputs(*size)
                with evaluating(bank):
                    check_outputs(_OP, plan, batch, engine._run(batch, plan.names), "Export it again.")
        return engine

    def _run(self, batch: Batch, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        given = {name: np.asarray(batch[name].to(torch.int64)) for name in self.facts.inputs}
        return dict(zip(names, self._session.run(list(names), given, self._options), strict=True))

    def obstacle(self, bank: ReaderBank, batch: Batch, names: Sequence[str]) -> str | None:
        """Return why only PyTorch can answer this batch, as a phrase for a message; None if this engine can.

        Raises ConfigError as `answers_for` does.
        """
        if not self.answers_for(bank, names):
            if bank.device.type != "cpu":
                return f"the bank is on {bank.device}, and the exported graph runs on a CPU"
            return "the exported graph has other readers, or their weights have changed since the export"
        if set(batch) != set(self.facts.inputs):
            return f"the inputs are {', '.join(sorted(batch))}; the graph takes {', '.join(sorted(self.facts.inputs))}"
        return None

    def run(self, bank: ReaderBank, batch: Batch, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Return name -> logits of the readers `names` for a tokenised batch; None if there is an `obstacle`.

        Raises ConfigError as `answers_for` does.
        """
        if self.obstacle(bank, batch, names):
            return None
        return {name: torch.as_tensor(logits) for name, logits in self._run(batch, names).items()}

    def answers_for(self, bank: ReaderBank, names: Iterable[str]) -> bool:
        """Return whether the bank is on the CPU and the graph has the readers `names` with their present weights.

        The bank need not be the object that `open` received, but it must have the same model and reader modules. Raises
        ConfigError if the frozen model has changed since the bank was made.
        """
        names = list(names)
        return bank.device.type == "cpu" and self.names.issuperset(names) and self._weights.are_same(bank, names)


class _Weights:
    """A record of the weights of a bank's readers and model, which tells whether they have changed since.

    A write in place raises a tensor's version. Fused optimizers do not raise it, so after a step of any optimizer the
    values are compared.
    """

    def __init__(self, bank: ReaderBank, digests: Mapping[str, str]) -> None:
        self._digests = dict(digests)
        self._compared = dict.fromkeys(digests, _steps)  # reader name -> `_steps` when its values were last compared
        # reader name -> module, the dicts of its modules, and their `_identities`; looking at dicts is quick
        self._readers = {name: (bank[name], holders := _holders(bank[name]), _identities(holders)) for name in digests}
        self._model, self._base = ref(bank.model), list(bank.model.parameters())
        self._versions = list(map(_version, self._base))

    def are_same(self, bank: ReaderBank, names: Sequence[str]) -> bool:
        """Return whether the weights of the model and of the readers `names` equal the recorded ones.

        Raises ConfigError if the frozen model has changed since the bank was made.
        """
        bank.check_base("bank", {bank[name].stack for name in names})
        if bank.model is not self._model() or list(map(_version, self._base)) != self._versions:
            return False
        for name in names:
            module, holders, mark = self._readers[name]
            if bank[name] is not module or _identities(holders) != mark:
                return False
        if stale := [name for name in names if self._compared[name] != _steps]:
            if any(self._digests[name] != now for name, now in reader_digests(bank, stale).items()):
                return False
            self._compared |= dict.fromkeys(stale, _steps)
        return True


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for tensors of inference mode."""
    return 0 if tensor.is_inference() else tensor._version


_Holder = tuple[dict[str, object], set[str]]  # parameters, buffers or submodules of a module, and names to leave out


def _holders(module: nn.Module) -> list[_Holder]:
    # buffers that are not saved are no weights: Gated, DWAtt and Routing count in them what they have read
    kinds = ("_parameters", "_buffers", "_modules")
    return [
        (vars(part)[kind], vars(part)["_non_persistent_buffers_set"]) for part in module.modules() for kind in kinds
    ]


def _identities(holders: Sequence[_Holder]) -> list[tuple[int, int, int]]:
    """Return the identity of every value in `holders`, with the version and memory address of a tensor."""
    return [
        (id(value), _version(value), value.data_ptr()) if isinstance(value, Tensor) else (id(value), 0, 0)
        for holder, others in holders
        for name, value in holder.items()
        if name not in others
    ]


_steps = 0  # steps of all optimizers in this process


def _count_step(*_: object) -> None:
    """Count an optimizer step in `_steps`; a hook that runs after a step of any optimizer."""
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count_step)
