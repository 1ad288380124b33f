"""Which readers of a saved bank an engine runs, which columns of scores each has, and what engines are refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, final, get_args

from lamina.bank.monitoring import stored_monitors
from lamina.errors import BaseMismatchError, ConfigError, check_known
from lamina.heads import HEADS
from lamina.heads.sequence_classification import SequenceClassification
from lamina.store.hub import local_folder
from lamina.store.manifest import MANIFEST, READER, READERS, Manifest, ReaderFacts

if TYPE_CHECKING:
    from lamina.heads.base import HeadConfig
    from lamina.monitors.cascade import AnyMonitor
    from lamina.vllm.engine_types import EngineConfig

KEY = "lamina"  # in `additional_config` of an engine, and in `extra_args` of a request
PARTS = ("prompt", "output", "both")  # parts of a text over which a reader of texts answers
_SETTINGS = ("bank", "readers", "revision", "on_flag")
OnFlag = Literal["end", "report"]
logger = logging.getLogger("vllm.lamina")  # vLLM shows what is logged under its own name
TRIED = ("0.32.0",)  # versions of vLLM with which the tests have run


@final
@dataclass(frozen=True)
class ReaderColumns:
    """One reader of the bank, and its columns in the matrix of scores: logits, then maybe the token's weight.

    Attributes:
        head: Config of its head, which has the labels.
        whole: Whether the reader pools the whole prompt. It then has a row of scores per prompt, not per token.
        first: Its first column. Columns of readers that pool prompts, and of readers that score tokens, are counted
            apart.
        logits: Number of columns with logits, one per label.
    """

    head: HeadConfig
    whole: bool
    first: int
    logits: int

    @property
    def weighs_tokens(self) -> bool:
        """Whether the reader has one more column, with the logarithm of the token's weight."""
        return self.head.weighs_tokens and not self.whole

    @property
    def last(self) -> int:
        """Index of the column after the reader's last one."""
        return self.first + self.logits + self.weighs_tokens

    @property
    def answer_keys(self) -> tuple[str, ...]:
        """Keys of the reader's answers: "prompt", "output" and "both" for parts of a text, "tokens" for each token."""
        if self.whole:
            return ("prompt",)
        return (*PARTS, "tokens") if isinstance(self.head, SequenceClassification) else ("tokens",)


@final
@dataclass(frozen=True)
class Layout:
    """The readers that an engine runs, in the order of their columns in the matrix of scores.

    Attributes:
        folder: Local folder of the bank.
        manifest: The bank's manifest.
        readers: Reader name -> its columns.
        monitors: Monitor name -> monitor, for those that are saved with the readers.
        on_flag: What happens when a monitor flags a request: "end" ends the request, "report" only reports the flag.
        pooling: Whether the engine serves a pooling model. Every reader of texts then pools the whole prompt; there are
            no monitors.
    """

    folder: Path
    manifest: Manifest
    readers: Mapping[str, ReaderColumns]
    monitors: Mapping[str, AnyMonitor]
    on_flag: OnFlag = "end"
    pooling: bool = False

    @classmethod
    def from_config(cls, additional_config: object, *, pooling: bool = False) -> Self | None:
        """Return the layout that an engine's `additional_config` describes; None without a value for the key "lamina".

        Its value has "bank", a folder or else an id on the hub, which is downloaded. It may have "readers" (None: all),
        "revision" (of the hub) and "on_flag" (by default "end"). `pooling` says whether the engine serves a pooling
        model. Raises ConfigError if the settings are not a mapping or name no bank, "readers" is not a list of names or
        is empty, a folder has a revision, or a monitor cannot be read or its reader scores no tokens or is left out;
        StoreError if the bank cannot be read; UnknownNameError if a setting, a reader or the value of "on_flag" does
        not exist.
        """
        settings = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if settings is None:
            return None
        if not isinstance(settings, Mapping):
            problem = f"additional_config['{KEY}'] is {settings!r}; it must be a mapping"
            raise ConfigError(f'vllm: {problem}. Give {{"{KEY}": {{"bank": FOLDER}}}}.')
        check_known("vllm", settings, _SETTINGS, "setting")
        if "bank" not in settings:
            raise ConfigError(f"vllm: additional_config['{KEY}'] names no bank. Give its folder or hub id as 'bank'.")
        on_flag = settings.get("on_flag", "end")
        check_known("vllm", [on_flag], get_args(OnFlag), "on_flag")
        chosen = settings.get("readers")
        readers = None if chosen is None else _reader_names(f"additional_config['{KEY}']['readers']", chosen)
        folder = local_folder(str(settings["bank"]), settings.get("revision"), readers, base=False)
        return cls.of_bank(folder, readers, on_flag, pooling=pooling)

    @classmethod
    def of_bank(cls, folder: Path, readers: list[str] | None, on_flag: OnFlag, *, pooling: bool) -> Self:
        """Return the layout of the readers `readers` (None: all) of the bank in `folder`.

        `on_flag` and `pooling` are the layout's attributes. With `pooling` there are no monitors. Raises ConfigError,
        StoreError or UnknownNameError in the cases of `from_config`.
        """
        manifest = Manifest.read(folder / MANIFEST)
        names = manifest.readers if readers is None else readers
        check_known(f"vllm: {folder}", names, manifest.readers, "reader")
        if not names:
            raise ConfigError(f"vllm: there is no reader to run from {folder}. Leave 'readers' out to run all.")
        columns: dict[str, ReaderColumns] = {}
        facts: dict[str, ReaderFacts] = {}
        first = {False: 0, True: 0}
        for name in names:
            saved = facts[name] = ReaderFacts.read(folder / READERS / name / READER)
            head, whole = HEADS.from_dict(saved.head), saved.fusion["name"] == "pooled_layers"
            if pooling:
                whole = isinstance(head, SequenceClassification)
            columns[name] = ReaderColumns(head, whole, first[whole], len(head.labels))
            first[whole] = columns[name].last
        monitors = {} if pooling else stored_monitors(facts)
        for name, monitor in monitors.items():
            for reader in monitor.readers:
                if reader not in columns or columns[reader].whole:
                    why = "has no scores of tokens" if reader in columns else "is not among the engine's readers"
                    raise ConfigError(f"vllm: monitor '{name}' needs reader '{reader}', which {why}.")
        return cls(folder, manifest, columns, monitors, on_flag, pooling)

    def check_base(self, *, layers: int, width: int) -> None:
        """Raise BaseMismatchError if the first stack of the bank's model has another number of layers or other `width`.

        `layers` counts the embeddings. The weights are compared later, by the worker, which has loaded them.
        """
        saved = next(iter(self.manifest.base.stacks.values()))
        facts: dict[str, tuple[object, object]] = {"layers": (saved.layers, layers), "width": (saved.width, width)}
        if differs := {name: pair for name, pair in facts.items() if pair[0] != pair[1]}:
            raise BaseMismatchError(op="vllm", differs=differs)

    def names(self, *, whole: bool) -> list[str]:
        """Return the names of the readers that pool whole prompts (`whole` is True), or that score tokens (False)."""
        return [name for name, reader in self.readers.items() if reader.whole == whole]

    @cached_property
    def token_columns(self) -> int:
        """Number of columns in the matrix of token scores, one row per token; 0 if no reader scores tokens."""
        return max((reader.last for reader in self.readers.values() if not reader.whole), default=0)

    def asked(self, extra_args: Mapping[str, object] | None) -> list[str]:
        """Return the names of the readers in `extra_args["lamina"]` of a request, each once; all without this key.

        Raises ConfigError if the arguments are not a mapping, or the value is not a list of names; UnknownNameError if
        the engine does not run a reader.
        """
        if extra_args is not None and not isinstance(extra_args, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f'vllm: the arguments are {extra_args!r}; they must be like {{"{KEY}": [...]}}.')
        if (chosen := (extra_args or {}).get(KEY)) is None:
            return list(self.readers)
        names = _reader_names(f"'{KEY}' of the request", chosen)
        check_known("vllm", names, self.readers, "reader")
        return names


def _reader_names(what: str, names: object) -> list[str]:
    """Return readers' names, each once. Raise ConfigError, which names `what`, if `names` is not a list of strings."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"vllm: {what} is {names!r}; it must be a list of readers' names.")
    return list(dict.fromkeys(names))


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError if an engine has settings with which readers do not run.

    These are speculative decoding, LoRA, pipeline and context parallelism, micro-batches, a KV connector, quantisation
    of a checkpoint that is not quantised, and long texts in chunks.
    """
    model, parallel = config.model_config, config.parallel_config
    shards = max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size)
    pooler, stored = model.pooler_config, getattr(model.hf_config, "quantization_config", None)
    refused = {
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": shards > 1,
        "micro-batches (enable_dbo)": parallel.use_ubatching,
        "a KV connector": config.kv_transfer_config is not None,
        "quantisation that the checkpoint does not have": model.quantization is not None and stored is None,
        "long texts in chunks (enable_chunked_processing)": bool(pooler and pooler.enable_chunked_processing),
    }
    if used := [name for name, uses in refused.items() if uses]:
        raise ConfigError(f"vllm: the engine uses {used[0]}, with which readers do not run. Start it without.")


def warn_untried(layout: Layout, version: str, dtype: str) -> None:
    """Log a warning if vLLM's `version` was never tried, or the engine's `dtype` is not that of the bank's training."""
    if version not in TRIED:
        logger.warning("lamina: vLLM %s was not tried with readers; versions that were: %s.", version, ", ".join(TRIED))
    trained = layout.manifest.base.dtype
    if dtype != trained:
        effect = "so answers differ a little from the bank's, and thresholds of monitors fit other scores"
        logger.warning("lamina: the engine computes in %s and the bank was trained on %s, %s.", dtype, trained, effect)
