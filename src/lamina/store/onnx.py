"""Export a bank or a whole model as one ONNX graph, from token ids and a mask to the logits of every reader.

An export traces the model: it runs it once and records the operations. A plan describes what one export runs.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import warnings
from contextlib import contextmanager, redirect_stderr
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from lamina.bank import ReaderBank
from lamina.bank.segments import separators_of
from lamina.bank.stack_pass import attach
from lamina.errors import ConfigError, LaminaError, MissingExtraError, StoreError, UnsupportedModelError, first_line
from lamina.fusion import FUSIONS
from lamina.fusion.base import Fusion
from lamina.heads import HEADS
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.layers.preserve import uncompiled
from lamina.layers.probe_input import probe_input
from lamina.layers.wrappers import unwrapped
from lamina.store.files import check_finite, files_in, staged, write_json
from lamina.store.manifest import FORMAT, SavedFacts
from lamina.store.processors import check_inputs
from lamina.utils import progress_bar

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from lamina.bank import ReaderModule
    from lamina.layers.types import Processor

logger = logging.getLogger(__name__)

MARK, GRAPH, WEIGHTS = "onnx.json", "model.onnx", "model.onnx.data"
TOLERANCE = 1e-4  # largest difference to PyTorch; if logits are above 1, relative to the largest one
# The first has GELU and attention as one operation each, which onnxruntime computes faster than their parts. Where the
# first cannot be used, the second is.
OPSETS = (23, 18)
_TRACED, _CHECKED = (3, 11), ((2, 14), (1, 5))  # rows and tokens of the batches to trace and to check with
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
_LOGGERS = ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir")
_OP = "export"

Batch = dict[str, Tensor]


class OutputFacts(SavedFacts):
    """The entry of `onnx.json` about one output of a graph.

    Attributes:
        kind: Kind of the reader's task; None for the model's own output.
        problem_type: Problem type of the reader's head; None for the model's own output.
        labels: Class names in the order of the logits; empty if the columns have none, as for a vocabulary.
        axes: Names of the axes: "batch", "tokens" if there is one row per token, and "classes" or "width".
        max_length: Number of tokens to which texts were truncated when the reader was trained; None if unknown.
        digest: Digest of the reader and its base, see `reader_digests`; None for the model's own output.
    """

    kind: str | None
    problem_type: str | None
    labels: list[str]
    axes: list[str]
    max_length: int | None
    digest: str | None = None


class Int8Score(SavedFacts):
    """A task's score on its validation rows, before and after the base model was quantised.

    Attributes:
        metric: The task's metric.
        float32: Its value in PyTorch.
        int8: Its value with the quantised graph.
    """

    metric: str
    float32: float
    int8: float


class OnnxFacts(SavedFacts):
    """The content of `onnx.json`, the description of a graph.

    Attributes:
        format: Version of the format.
        base: Folder or hub id of the model; None if unknown.
        model_type: The model's family.
        inputs: Names of the inputs, integers `[batch, tokens]`.
        outputs: Output name -> facts.
        max_difference: Largest difference to PyTorch that was measured, before any quantisation; relative for an output
            with values above 1.
        files: All files of the export, without `onnx.json`.
        sha256: Hash of the graph's files, see `hash_of_graph`; None in exports of earlier versions.
        int8: Task -> its scores in PyTorch and in the quantised graph; None if the graph is not quantised.
    """

    format: int
    base: str | None
    model_type: str
    inputs: list[str]
    outputs: dict[str, OutputFacts]
    max_difference: float
    files: list[str]
    sha256: str | None = None
    int8: dict[str, Int8Score] | None = None


def export_onnx(
    bank_or_model: ReaderBank | PreTrainedModel,
    folder: str | Path,
    processor: Processor | None = None,
    *,
    readers: Sequence[str] | str | None = None,
    main: bool = False,
    progress: bool = False,
) -> OnnxFacts:
    """Write a bank, or a plain or edited model, as one ONNX graph, with its tokenizer and `onnx.json`.

    The graph accepts any number of rows and tokens, and computes in float32. Before the files are put in place,
    onnxruntime runs the graph on batches of sizes that were not traced. Its outputs may differ from PyTorch's by at
    most 1e-4 (for logits above 1, by 1e-4 of the largest). If readers read only the encoder of an encoder-decoder
    model, only the encoder is written. If they read the decoder, the graph also has the inputs `decoder_input_ids` and
    `decoder_attention_mask`.

    Args:
        bank_or_model: The bank, or a model that reads text. It is not changed.
        folder: Folder to write; created if it does not exist. An earlier export in it is replaced, except after errors.
        processor: Tokenizer to save with the graph. None: the bank's; with a model, none.
        readers: Names of the readers to write, or one name. None: all.
        main: Also write the model's own output: "logits", or "last_hidden_state" of a model without a head. The graph
            of a plain model always has it.
        progress: Show a progress bar over the steps.

    Returns:
        The contents of `onnx.json`.

    Raises:
        UnknownNameError: If the bank does not have a reader.
        ConfigError: If there is nothing to write, a reader has the name of the model's own output, the bank's frozen
            model or processor has changed, or a reader of pairs has no tokenizer that separates them.
        UnsupportedModelError: If the model does not read text alone, has towers, has another attention for long texts
            than for short ones (BigBird's "block_sparse"), has weights that cannot be copied as float32, or returns
            neither output of `main`; or if torch cannot write, or onnxruntime cannot run, a part.
        NotFiniteError: If a weight holds NaN or infinity.
        StoreError: If the outputs differ too much from PyTorch's, or the folder cannot be written.
        MissingExtraError: If onnx, onnxscript or onnxruntime, or a package that these import, is not installed.
    """
    import_packages(_OP, "onnx", "onnxscript", "onnxruntime")
    is_bank = isinstance(bank_or_model, ReaderBank)
    digests = reader_digests(bank_or_model, readers) if is_bank else {}
    names = list(digests) if is_bank else [readers] if isinstance(readers, str) else readers
    plan = ExportPlan(_copied(bank_or_model, processor), names, main=main or not is_bank)
    folder, processor = Path(folder), plan.bank.processor
    with staged(folder, [MARK, GRAPH, WEIGHTS], exported_files(folder)) as stage:
        difference = _checked_graph(plan, stage / GRAPH, progress=progress)
        if processor is not None:
            processor.save_pretrained(stage)
        facts = OnnxFacts(
            format=FORMAT,
            base=str(plan.model.name_or_path or "") or None,
            model_type=plan.model_type,
            inputs=list(plan.inputs(*_TRACED)),
            outputs=plan.outputs(digests),
            max_difference=difference,
            sha256=hash_of_graph(stage),
            files=files_in(stage),
        )
        write_json(stage / MARK, facts.model_dump())
    return facts


def import_packages(op: str, *packages: str) -> None:
    """Import packages of the extra "onnx" for the operation `op`.

    Raises MissingExtraError if one of them, or a package that it imports, is not installed.
    """
    for package in packages:
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, op=op, extra="onnx") from error


def reader_digests(bank: ReaderBank, names: Sequence[str] | None = None) -> dict[str, str]:
    """Return reader name -> digest of everything that the reader's logits depend on: base model, settings, weights.

    `names` are the readers' names. None: all. Raises UnknownNameError if the bank does not have a reader, and
    ConfigError if its frozen model or its processor has changed.
    """
    readers, known, bases = bank.select(names, _OP), bank.fingerprints_of_base(), dict[str, str]()
    bank.check_base(_OP, stacks := {reader.stack for reader in readers.values()})
    check_inputs(_OP, bank.processor, readers)
    for stack in stacks:
        settings = bank.settings_of_base()[stack]
        weights = known.get(stack) if not bank.train_base else None
        weights = weights or fingerprint_of(bank.stacks[stack])
        bases[stack] = json.dumps([weights, settings.config, settings.modules], sort_keys=True)
    digests: dict[str, str] = {}
    for name, reader in readers.items():
        config = reader.config
        kept: dict[str, object] = {"fusion": FUSIONS.to_dict(config.fusion), "head": HEADS.to_dict(config.head)}
        kept["layers"] = reader.layers
        if config.fusion.reads_pairs:  # graphs of earlier versions divide pairs at the first separator
            kept["segments"] = "by token types"
        own = fingerprint_of_tensors([*reader.state_dict().items(), *reader.head.borrowed_tensors().items()])
        text = json.dumps([bases[reader.stack], reader.stack, kept, own], sort_keys=True)
        digests[name] = hashlib.sha256(text.encode()).hexdigest()
    return digests


def hash_of_graph(folder: Path) -> str:
    """Return the SHA-256 of the SHA-256 digests of an export's graph file and of its weights file, if it has one."""
    digest = hashlib.sha256()
    for path in (folder / GRAPH, folder / WEIGHTS):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def exported_files(folder: Path) -> list[str]:
    """Return the files of an earlier export in a folder, without `onnx.json`; [] if that is not readable."""
    try:
        return OnnxFacts.read(folder / MARK).files
    except LaminaError:
        return []


def _copied(bank_or_model: ReaderBank | PreTrainedModel, processor: Processor | None) -> ReaderBank:
    """Return a copy of a bank and its model; for a model, a bank without readers.

    The copy is in float32, on the CPU, frozen and in eval mode. It has the tokenizer `processor`, or the bank's if that
    is None. Raises UnsupportedModelError if the model does not read tokens, or its weights cannot be copied as float32;
    NotFiniteError for weights with NaN or infinity.
    """
    target = unwrapped(bank_or_model)
    model = target.model if isinstance(target, ReaderBank) else target
    model_type = str(model.config.model_type)
    if getattr(model, "main_input_name", "") != "input_ids":
        raise _refusal(model_type, f"it reads {getattr(model, 'main_input_name', 'no tokens')}; graphs read tokens")
    try:
        target = copy.deepcopy(target)
        bank = target if isinstance(target, ReaderBank) else ReaderBank(target)
        bank.model.cpu().float()  # pyright: ignore[reportUnknownMemberType]
        bank.cpu().float()
    except LaminaError:
        raise
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:  # packed or offloaded weights
        raise _refusal(model_type, f"its weights cannot be copied as float32 ({first_line(error)})") from error
    bank.model.eval().requires_grad_(False)
    check_finite("the bank", bank.state_dict().items())
    bank.processor = bank.processor if processor is None else processor
    return bank.eval()


def _refusal(model_type: str, reason: str, hint: str = "Serve it with PyTorch.") -> UnsupportedModelError:
    return UnsupportedModelError(op=_OP, model_type=model_type, reason=reason, hint=hint)


class ExportPlan:
    """The forward pass that an export writes as one graph: a bank's model with some readers.

    If every reader reads the stack "encoder" and `main` is False, the graph has the encoder alone.

    Attributes:
        main: Name of the model's own output; None if it is not exported.
        pairs: Whether a reader reads pairs of texts.

    Args:
        bank: The bank. An export changes it, so `export_onnx` passes a copy.
        readers: Names of the readers, in the order of the graph's outputs. None: all.
        main: Whether the model's own output is exported too, after those of the readers.

    Raises:
        ConfigError: If there is no output, a reader has the name of the model's own output, the frozen model has
            changed, or, with `main`, readers of pairs have no tokenizer that separates the texts.
        UnknownNameError: If the bank does not have a reader.
        UnsupportedModelError: If the model has towers, has another attention for long texts than for short ones, or
            returns neither logits nor last_hidden_state for `main`.
    """

    def __init__(self, bank: ReaderBank, readers: Sequence[str] | None, *, main: bool) -> None:
        self.bank, self.model = bank, cast("Any", bank.model)
        self.names = list(bank if readers is None else readers)
        modules = [bank[name] for name in self.names]
        if not modules and not main:
            raise ConfigError(f"{_OP}: there is no reader to write. Name one, or ask for the model's own output.")
        stacks = {module.stack for module in modules}
        if towers := [name for name in stacks if bank.stacks[name].tower is not None]:
            raise _refusal(self.model_type, f"its tower for '{towers[0]}' runs apart from the others")
        if getattr(self.model.config, "attention_type", None) == "block_sparse":  # a trace has a short text
            hint = "Load it with attention_type='original_full', or serve it with PyTorch."
            raise _refusal(
                self.model_type, "it computes attention differently for long texts, which a graph cannot", hint
            )
        if stacks:
            bank.check_base(_OP, stacks)  # not in the trace, which has other tensors
        self._runs = self.model if main or stacks != {"encoder"} else self.model.get_encoder()
        self.pairs = any(module.config.fusion.reads_pairs for module in modules)
        self.main = self._main_name() if main else None
        if self.main in self.names:
            problem = f"a reader is called '{self.main}', which is the name of the model's own output"
            raise ConfigError(f"{_OP}: {problem}. Rename it.")

    @property
    def model_type(self) -> str:
        """The model's family."""
        return str(self.model.config.model_type)

    def answer(self, batch: Batch) -> tuple[Tensor, ...]:
        """Run a forward pass on `batch`; return each reader's logits, then the model's own output if it is exported."""
        passes = self.bank.passes(self.bank.select(self.names, _OP), grad=False, traced=True)
        options = {"use_cache": False} if "use_cache" in inspect.signature(self._runs.forward).parameters else {}
        masks = {name: value.bool() if name.endswith("mask") else value for name, value in batch.items()}
        with attach(passes, masks):  # tensors of a trace have no values, so integers cannot be checked to be 0 and 1
            output = self._runs(**batch, **options)
        logits = {name: part for stack_pass in passes for name, part in stack_pass.finish().items()}
        main = [getattr(output, self.main)] if self.main else []
        return (*(logits[name] for name in self.names), *main)

    def inputs(self, rows: int, tokens: int) -> Batch:
        """Return a batch of the given size, at most 4 rows: ids of ordinary tokens, with every second row padded.

        A decoder's texts are two tokens shorter. For readers of pairs, every row has two texts; ConfigError if there is
        no tokenizer that separates them.
        """
        probes = [probe_input(self.model, tokens, seed).inputs for seed in (1, 2)]
        accepted = inspect.signature(self._runs.forward).parameters
        batch = {
            name: torch.cat([probe[name] for probe in probes])[:rows]
            for name in _INPUTS
            if name in probes[0] and name in accepted
        }
        if "token_type_ids" in accepted and "token_type_ids" in getattr(self.bank.processor, "model_input_names", ()):
            kinds = min(2, int(getattr(self.model.config, "type_vocab_size", 1) or 1))
            batch["token_type_ids"] = torch.arange(tokens).mul(kinds).div(tokens, rounding_mode="floor").repeat(rows, 1)
        if self.pairs:
            between = separators_of(self.bank.processor).between[: tokens // 2]
            batch["input_ids"][:, tokens // 2 : tokens // 2 + len(between)] = torch.tensor(between)
        return {name: batch[name] for name in _INPUTS if name in batch}

    @torch.no_grad()
    def expected(self, batch: Batch) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Run a batch in PyTorch, and return output name -> (values, mask).

        The mask is True at tokens and False at padding; it is None for outputs with one row per text.
        """
        values: dict[str, tuple[Tensor, Tensor | None]] = {}
        if self.names:
            out = self.bank(**batch, readers=self.names, main=self.main is not None)
            values = {name: (out[name].logits, out[name].mask) for name in self.names}
            output = out.main
        else:
            output = self.model(**batch)
        if self.main:
            mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
            values[self.main] = getattr(output, self.main), mask
        return {name: (value, mask if value.ndim > 2 else None) for name, (value, mask) in values.items()}

    def outputs(self, digests: Mapping[str, str]) -> dict[str, OutputFacts]:
        """Return output name -> its facts for `onnx.json`. `digests` is reader name -> digest."""
        facts = {name: _reader_facts(self.bank[name], digests[name]) for name in self.names}
        if self.main:
            value, _ = self.expected(self.inputs(*_TRACED))[self.main]
            logits = self.main == "logits"
            axes = ["batch", *["tokens"][: value.ndim - 2], "classes" if logits else "width"]
            labels = [str(name) for _, name in sorted(self.model.config.id2label.items())]
            named = labels if logits and len(labels) == value.shape[-1] else []
            facts[self.main] = OutputFacts(kind=None, problem_type=None, labels=named, axes=axes, max_length=None)
        return facts

    def _main_name(self) -> str:
        """Return the name of the model's own output, "logits" or "last_hidden_state", found by calling the model.

        Raises UnsupportedModelError if the model returns neither.
        """
        with torch.no_grad():
            output = self.model(**self.inputs(*_TRACED))
        for name in ("logits", "last_hidden_state"):
            if isinstance(getattr(output, name, None), Tensor):
                return name
        raise _refusal(self.model_type, f"it returns {', '.join(output)}, neither logits nor last_hidden_state")


class _Graph(nn.Module):
    """The module that is traced for the export: its forward pass is that of `plan`.

    A trace replaces submodules by proxies without hooks. So the plan, which is not a module, runs the original modules
    with their hooks. The submodules of this module are only there to show their parameters to the trace.
    """

    def __init__(self, plan: ExportPlan) -> None:
        super().__init__()
        self.plan, self.model, self.readers = plan, plan.bank.model, plan.bank.readers

    def forward(self, batch: Batch) -> tuple[Tensor, ...]:
        return self.plan.answer(batch)


def _reader_facts(reader: ReaderModule, digest: str) -> OutputFacts:
    head = reader.config.head
    length, listed = reader.info.get("max_length"), len(head.labels) == reader.head.outputs
    return OutputFacts(
        kind=head.kind,
        problem_type=str(head.problem_type),
        labels=[str(label) for label in head.labels] if listed else [],
        axes=["batch", "classes"] if reader.head.pools else ["batch", "tokens", "classes"],
        max_length=length if isinstance(length, int) else None,
        digest=digest,
    )


@contextmanager
def _as_traced(plan: ExportPlan) -> Generator[None]:
    """Prepare the readers for a trace inside the `with` block, and silence the libraries.

    Which layers of a fusion are active depends on its weights. Tensors in a trace have no values, so the layers are
    fixed here, for good.
    """
    for module in plan.bank.modules():
        if isinstance(module, Fusion):
            cast("Any", module).active_layers = partial(tuple[int, ...], module.active_layers())
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.ERROR)
        # torch prints the traced program where it cannot go on
        with redirect_stderr(StringIO()), warnings.catch_warnings(), torch.no_grad(), uncompiled():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _checked_graph(plan: ExportPlan, path: Path, *, progress: bool) -> float:
    """Write the planned pass as a graph in the first opset that works; return its largest difference from PyTorch.

    With `progress`, show a bar for each opset that is tried. If no opset of `OPSETS` works, raises the error of the
    last: UnsupportedModelError or StoreError.
    """
    *others, last = OPSETS
    for opset in others:
        try:
            return _written(plan, path, opset, progress=progress)
        except (UnsupportedModelError, StoreError) as error:
            logger.info("%s: opset %d is not used: %s", _OP, opset, error)
            (path.parent / WEIGHTS).unlink(missing_ok=True)
    return _written(plan, path, last, progress=progress)


def _written(plan: ExportPlan, path: Path, opset: int, *, progress: bool) -> float:
    """Write a planned pass as a graph in this opset and run it.

    Returns the largest difference from PyTorch's outputs, as `check_outputs` measures it. Raises UnsupportedModelError
    as `_write` and `_run` do, and StoreError as `check_outputs` does.
    """
    difference = 0.0
    for size in progress_bar([None, *_CHECKED], show=progress, desc="export"):
        if size is None:  # the first step; the others compare what it has written
            with _as_traced(plan):
                _write(plan, path, opset)
        else:
            batch = plan.inputs(*size)
            outputs = _run(plan, path, batch)
            difference = max(difference, check_outputs(_OP, plan, batch, outputs, "Nothing was written."))
    return difference


def _write(plan: ExportPlan, path: Path, opset: int) -> None:
    """Trace a planned pass, and write it as an ONNX graph.

    Raises UnsupportedModelError if torch cannot write a part of it; errors of Lamina and of the disk stay as they are.
    """
    batch = plan.inputs(*_TRACED)
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({name: {0: dynamic, 1: dynamic} for name in batch},)
    names = [*plan.names, *([plan.main] if plan.main else [])]
    onnx: Any = torch.onnx  # its stubs do not know that a traced program can be exported
    try:
        traced = torch.export.export(_Graph(plan), (batch,), dynamic_shapes=shapes, strict=False)
        program = onnx.export(
            traced, dynamo=True, opset_version=opset, verbose=False, input_names=list(batch), output_names=names
        )
        program.save(str(path))
    except Exception as error:  # torch and onnxscript raise many unrelated classes
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, LaminaError | OSError):  # a full disk says nothing about the model
            raise cause from error
        reader = _reader_in(cause, plan) or _reader_in(error, plan)
        what = "a part of the pass" if reader is None else f"its reader '{reader}'"
        raise _refusal(plan.model_type, f"{what} cannot be written as ONNX ({first_line(cause)})") from error


def _reader_in(error: BaseException, plan: ExportPlan) -> str | None:
    """Return the name of the reader in whose fusion or head `error` was raised in a trace; None if it was elsewhere."""
    owners = {id(part): name for name in plan.names for part in plan.bank[name].modules()}
    for frame, _ in walk_tb(error.__traceback__):
        acting = frame.f_locals.get("self")
        parts = (acting, *(vars(acting).get("fusions", ()) if hasattr(acting, "__dict__") else ()))
        if name := next((owners[id(part)] for part in parts if id(part) in owners), None):
            return name
    return None


def check_outputs(
    op: str, plan: ExportPlan, batch: Batch, outputs: Mapping[str, NDArray[np.float32]], hint: str
) -> float:
    """Return the largest difference between onnxruntime's outputs for a batch and those of PyTorch.

    For an output with values above 1, the difference is relative to the largest value. Padding is not compared.

    Args:
        op: The operation, for messages.
        plan: The exported pass; its bank is in eval mode.
        batch: Inputs of the pass.
        outputs: Output name -> values from onnxruntime.
        hint: A sentence that ends the messages.

    Raises:
        StoreError: If an output has a different shape, or differs by more than `TOLERANCE`.
    """
    worst = 0.0
    for name, (value, mask) in plan.expected(batch).items():
        got = torch.as_tensor(outputs[name])
        if got.shape != value.shape:
            problem = f"'{name}' has the shape {list(got.shape)} in onnxruntime, {list(value.shape)} in PyTorch"
            raise StoreError(f"{op}: {problem}. {hint}")
        got, value = (got, value) if mask is None else (got[mask.bool()], value[mask.bool()])
        difference = float((got - value).abs().max() / value.abs().max().clamp(min=1))
        if not difference <= TOLERANCE:  # NaN too
            size = " x ".join(map(str, batch["input_ids"].shape))
            problem = f"'{name}' differs by {difference:.1e} between onnxruntime and PyTorch, on {size} tokens"
            raise StoreError(f"{op}: {problem}; at most {TOLERANCE:.0e} is allowed. {hint}")
        worst = max(worst, difference)
    return worst


def open_session(graph: Path) -> Any:  # noqa: ANN401
    """Return an inference session of onnxruntime for a graph file, on the CPU, with as many threads as torch has.

    Errors are onnxruntime's own; it logs none of them.
    """
    runtime = import_module("onnxruntime")
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = torch.get_num_threads(), 1
    settings.log_severity_level = 4  # an export that cannot be run in one opset is tried in another
    # onnxruntime 1.32 takes longer for an addition joined with a LayerNorm than for the two one after the other
    options = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": ["SkipLayerNormFusion"]}
    return runtime.InferenceSession(str(graph), settings, **options)


def _run(plan: ExportPlan, path: Path, batch: Mapping[str, Tensor]) -> dict[str, NDArray[np.float32]]:
    """Run the graph file `path` in onnxruntime on a batch, and return output name -> values.

    Raises UnsupportedModelError if onnxruntime cannot run it.
    """
    try:
        session = open_session(path)
        inputs = {entry.name: batch[entry.name].numpy() for entry in session.get_inputs()}
        return dict(zip([out.name for out in session.get_outputs()], session.run(None, inputs), strict=True))
    except Exception as error:  # onnxruntime has classes of its own
        raise _refusal(plan.model_type, f"onnxruntime does not run the graph ({first_line(error)})") from error
