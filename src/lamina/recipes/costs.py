"""What passes and readers cost, counted on the meta device: no weights, no memory, no data."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from lamina.bank import ReaderModule
from lamina.errors import ConfigError, ModelNotFoundError, UnknownNameError
from lamina.layers import default_stack, stacks, watch
from lamina.layers.isolation import MetaValues
from lamina.store import empty_model, load_config

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from torch import Tensor, nn
    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.bank import Reader


def _product(_sum: object, one: Sequence[int], other: Sequence[int], **_options: object) -> int:
    """Operations of a product of matrices of these shapes that is added to a sum."""
    return 2 * math.prod(one) * other[-1]


_IN_PLACE = {torch.ops.aten.addmm_: _product, torch.ops.aten.baddbmm_: _product}  # torch 2.13 counts only the others


class Cost(NamedTuple):
    """What one reader needs.

    Attributes:
        parameters: Trainable parameters.
        flops: Floating-point operations to read one text, forward.
        counted: Whether all were counted; where not, two per token and entry of a matrix stand for them.
        stack: Name of the stack that is read.
        layers: The layers that are read.
        width: Size of their states.
        kept: How many of them must be kept until the pass ends; 0 if the fusion streams.
    """

    parameters: int
    flops: int
    counted: bool
    stack: str
    layers: tuple[int, ...]
    width: int
    kept: int


class _Read(BaseException):
    """Raised inside a forward once the last layer was reached."""


class Meter:
    """Counts for one model; each count is made once.

    Args:
        model: On the meta device.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._passes: dict[tuple[object, ...], int] = {}
        self._readers: dict[tuple[object, ...], Cost] = {}

    def size(self) -> int:
        """Number of the model's parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def longest(self) -> int:
        """Tokens that the model reads at most."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1 << 20)

    def pass_flops(self, tokens: int, deepest: Mapping[str, int]) -> int:
        """Operations of one forward over one text.

        Args:
            tokens: Length of the text.
            deepest: Stack -> the highest layer that is read; the forward ends there.
        """
        key = (tokens, *sorted(deepest.items()))
        if key not in self._passes:
            self._passes[key] = _pass_flops(self.model, tokens, deepest)
        return self._passes[key]

    def reader(self, reader: Reader, tokens: int) -> Cost:
        """Build a reader on the meta device and count.

        Args:
            reader: Its config.
            tokens: Length of the text.

        Raises:
            LaminaError: If the reader does not fit the model.
        """
        key = (replace(reader, seed=0), tokens)
        if key not in self._readers:
            self._readers[key] = _reader_cost(reader, self.model, tokens)
        return self._readers[key]


OWN, GIVEN = "its own", "that of the recipe, since the hub cannot be reached"


def open_meter(
    name: str, architecture: Mapping[str, Any] | None = None, *, revision: str | None = None, masked: bool = False
) -> tuple[Meter, str]:
    """Build a model without weights.

    Args:
        name: A local folder, a hub id, or "minilm".
        architecture: Settings of its config, "model_type" among them, where the hub cannot be reached.
        revision: Of the model, on the hub.
        masked: With its head for masked language modelling.

    Returns:
        The meter, and where the config came from: `OWN` or `GIVEN`.

    Raises:
        ModelNotFoundError: If there is no such model, and no architecture.
        ConfigError: If the architecture's family does not exist.
        UnknownNameError: If one of its keys does not.
    """
    config, source = open_config(name, architecture, revision=revision)
    return _meter_of(config, masked=masked), source


def open_config(
    name: str, architecture: Mapping[str, Any] | None = None, *, revision: str | None = None
) -> tuple[PretrainedConfig, str]:
    """Get a model's config, or what stands for it.

    Args:
        name: A local folder, a hub id, or "minilm".
        architecture: Settings of its config, "model_type" among them, where the hub cannot be reached.
        revision: Of the model, on the hub.

    Returns:
        The config, and where it came from: `OWN` or `GIVEN`.

    Raises:
        ModelNotFoundError: If there is no such model, and no architecture.
        ConfigError: If the architecture's family does not exist.
        UnknownNameError: If one of its keys does not.
    """
    try:
        return load_config(name, revision=revision), OWN
    except ModelNotFoundError as error:
        if architecture is None:
            error.add_note("a recipe may carry its model's config as 'architecture', for dry runs")
            raise
        return _config(architecture), GIVEN


_MORE_KEYS = {  # what a family's model reads of its config, though the config's class does not name it
    "deberta-v2": ("position_buckets", "share_att_key", "norm_rel_ebd"),
    "t5": ("decoder_start_token_id",),
}


def _config(fields: Mapping[str, Any]) -> PretrainedConfig:
    from transformers import AutoConfig

    rest = dict(fields)
    family = rest.pop("model_type")
    try:
        usual = AutoConfig.for_model(family)
    except ValueError as error:
        raise ConfigError(
            f"recipe, architecture: transformers has no family '{family}'; model_type names one. Correct it."
        ) from error
    known = [*usual.to_dict(), *usual.attribute_map, *_MORE_KEYS.get(family, ())]
    for key in rest:
        if key not in known:
            raise UnknownNameError(op=f"recipe, architecture of '{family}'", got=key, known=known, what="key")
    return AutoConfig.for_model(family, **rest)


_built: dict[tuple[str, bool], Meter] = {}


def _meter_of(config: PretrainedConfig, *, masked: bool) -> Meter:
    """The meter of an architecture; what it has counted serves later dry runs of the process too."""
    from transformers import AutoModel, AutoModelForMaskedLM

    key = (config.to_json_string(use_diff=False), masked)
    if key not in _built:
        auto: Any = AutoModelForMaskedLM if masked else AutoModel
        _built[key] = Meter(empty_model(config, auto))
    return _built[key]


@contextmanager
def _counting(model: nn.Module) -> Generator[FlopCounterMode]:
    """Count operations of passes without gradients.

    The counter of torch 2.13 asks whatever goes into a module and `requires_grad` for its gradient function, which
    parameters that go in (DeBERTa's relative positions) do not have then; so none of them does for the time.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.no_grad(), MetaValues(), FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter:
            yield counter
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _pass_flops(model: PreTrainedModel, tokens: int, deepest: Mapping[str, int]) -> int:
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    batch: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    found, left = stacks(model), set(deepest)

    def take(stack: str) -> None:
        left.discard(stack)
        if not left:
            raise _Read

    with _counting(model) as counter, ExitStack() as watched:
        for name, layer in deepest.items():
            watched.enter_context(watch(found[name], [layer], lambda *_, name=name: take(name)))
        with suppress(_Read):
            model(**batch)
    return counter.get_total_flops()


def _reader_cost(reader: Reader, model: PreTrainedModel, tokens: int) -> Cost:
    stack = default_stack(model, reader.stack, op="dry run")
    with torch.device("meta"):
        module = ReaderModule(reader, stack, model).eval()
    states = torch.empty(len(module.layers), 1, tokens, stack.width, device="meta")
    features = torch.empty(1, tokens, module.fusion.dim, device="meta")
    fused, one = _counted(module.fusion, states)
    answered, other = _counted(module.head, features)
    kept = 0 if reader.fusion.streams else len(module.layers)
    return Cost(module.size(), fused + answered, one and other, stack.name, module.layers, stack.width, kept)


def _counted(module: nn.Module, value: Tensor) -> tuple[int, bool]:
    """Operations of a module, and whether they could be counted: not where values, or a whole pass, are needed."""
    tokens = value.shape[-2]
    mask = torch.ones(1, tokens, dtype=torch.bool, device="meta")
    try:
        with _counting(module) as counter:
            module(value, mask)
    except (RuntimeError, ConfigError):  # NotImplementedError, which torch raises too, is a RuntimeError
        return 2 * tokens * sum(p.numel() for p in module.parameters() if p.ndim >= 2), False
    return counter.get_total_flops(), True


class RowSize(NamedTuple):
    """How large a row is that a whole model is given.

    Attributes:
        tokens: Of the text that is read.
        target: Of the text that is written; 0: none is.
        pixels: Channels, height and width of an image, in place of a text.
    """

    tokens: int = 0
    target: int = 0
    pixels: tuple[int, int, int] | None = None


class RowCost(NamedTuple):
    """Operations of one forward over one row.

    Attributes:
        flops: Of the whole model, head included.
        decoder: Those of them that come after the encoder, where text is written; else 0.
        counted: Whether all were counted; where not, two per entry of the head's matrices stand for the head.
    """

    flops: int
    decoder: int
    counted: bool


_need_values: set[type[nn.Module]] = set()  # models whose head looks for values, such as the place of an end token


def row_cost(model: PreTrainedModel, size: RowSize) -> RowCost:
    """Count the operations of a whole model, on the meta device.

    Args:
        model: With its head.
        size: Of the row.
    """
    batch, kind = _row(size), type(model)
    if kind not in _need_values:
        try:
            return _counted_row(model, batch, writes=bool(size.target))
        except RuntimeError:
            _need_values.add(kind)
    base: Any = model.base_model
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"]
    inside = {id(parameter) for parameter in base.parameters()}
    head = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in inside)
    return RowCost(_counted_row(base, batch, writes=False).flops + 2 * head, 0, False)


def _counted_row(model: Any, batch: Mapping[str, Tensor], *, writes: bool) -> RowCost:
    with _counting(model) as counter:
        model(**batch)
    flops = counter.get_total_flops()
    if not writes:
        return RowCost(flops, 0, True)
    encoder = model.get_encoder()
    path = next(path for path, module in model.named_modules() if module is encoder)
    read = counter.get_flop_counts()[f"{type(model).__name__}.{path}"]
    return RowCost(flops, flops - sum(read.values()), True)


def _row(size: RowSize) -> dict[str, Tensor]:
    if size.pixels is not None:
        return {"pixel_values": torch.zeros(1, *size.pixels, device="meta")}
    ids, mask = (torch.zeros(1, size.tokens, dtype=torch.long, device="meta") for _ in range(2))
    batch = {"input_ids": ids, "attention_mask": mask}
    if size.target:
        batch["decoder_input_ids"] = torch.zeros(1, size.target, dtype=torch.long, device="meta")
    return batch


def readable(count: float) -> str:
    """A number with three digits and the letter of its thousands: 1.23 G."""
    power = 0 if count < 1000 else min(int(math.log10(count) / 3 + 1e-9), 8)
    return f"{count / 1000**power:.3g} {' kMGTPEZY'[power]}".strip()
