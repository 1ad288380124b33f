"""Make a tiny random input for any model, from its config alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from lamina.layers.devices import main_device

PADDED = 3  # padding tokens in the second row, so that a model that removes padding inside is noticed


@dataclass(frozen=True)
class Probe:
    """A tiny input of a model: its keyword arguments, and its batch size `rows`."""

    inputs: dict[str, Tensor]
    rows: int

    def without_mask(self) -> Probe:
        """Return the input without its attention masks; some models without weights can only be called like this."""
        return Probe(
            {key: value for key, value in self.inputs.items() if not key.endswith("attention_mask")}, self.rows
        )


class NoInputError(Exception):
    """Raised when no input can be made for a model. The message, part of a sentence, says why."""


def probe_input(model: nn.Module, tokens: int, seed: int) -> Probe:
    """Make a random input of the kind that a model's `main_input_name` and config require.

    Args:
        model: A transformers model that reads token ids, pixels, waveforms or spectrograms.
        tokens: Length of texts, and number of audio frames. Images have the size that the config states.
        seed: Seed of the random values.

    Raises:
        NoInputError: If the model reads another kind of input.
    """
    name = str(getattr(model, "main_input_name", "input_ids"))
    maker = _MAKERS.get(name)
    if maker is None:
        raise NoInputError(f"it reads '{name}', and inputs are known for {', '.join(_MAKERS)}")
    rng = torch.Generator().manual_seed(seed)
    inputs = maker(model, tokens, rng)
    rows = len(inputs[name])
    accepted = inspect.signature(model.forward).parameters
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs |= _text(model, tokens - 2, rng, rows=rows, prefix="decoder_")
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    device, dtype = main_device(model), next(floats, torch.float32)
    inputs = {
        key: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for key, value in inputs.items()
        if key in accepted or key == name
    }
    return Probe(inputs, rows)


def _configs(model: nn.Module) -> list[object]:
    """Return a model's config and the configs inside it (`text_config`, `vision_config`, `encoder`, ...)."""
    config: object = model.config
    return [config, *(value for key, value in vars(config).items() if hasattr(value, "to_dict") and key[0] != "_")]


def _counts(model: nn.Module, name: str) -> list[int]:
    """Return the setting `name` of the config, or of a config inside it, as a list of ints; [] if it is missing."""
    values = (getattr(config, name, None) for config in _configs(model))
    return next((_ints(value) for value in values if value is not None), list[int]())


def _ints(value: object) -> list[int]:
    """Return the ints in a list or tuple, or a single int as a list."""
    items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, int)]


def _count(model: nn.Module, name: str, default: int = 0) -> int:
    """Return the setting `name` of the config, or of a config inside it, or `default`; of a list, the first entry."""
    return next(iter(_counts(model, name)), default)


def _text(model: nn.Module, tokens: int, rng: torch.Generator, *, rows: int = 2, prefix: str = "") -> dict[str, Tensor]:
    """Return token ids and a mask: random ordinary tokens, then the end token, which some classifiers look for.

    The second of the `rows` rows is padded. `prefix` is "decoder_" for the input of a decoder.
    """
    outer: object = model.config
    config: object = getattr(outer, "decoder" if prefix else "encoder", None)
    if not hasattr(config, "to_dict"):
        get_text_config: Callable[[], object] | None = getattr(outer, "get_text_config", None)
        config = outer if get_text_config is None else get_text_config()
    size = int(getattr(config, "vocab_size", None) or _count(model, "vocab_size"))
    if size < 2:
        raise NoInputError("its config has no vocab_size")
    settings: list[tuple[str, object]] = [pair for part in _configs(model) for pair in vars(part).items()]
    special = {0, *(token for key, value in settings if key.endswith(_SPECIAL) for token in _ints(value))}
    ordinary = torch.tensor([token for token in range(size) if token not in special] or [size - 1])
    ids = ordinary[torch.randint(len(ordinary), (rows, tokens), generator=rng)]
    mask = torch.ones(rows, tokens, dtype=torch.long)
    end, pad = getattr(config, "eos_token_id", None), getattr(config, "pad_token_id", None)
    for row in range(rows):
        real = tokens - PADDED if row == 1 and tokens > PADDED else tokens
        if isinstance(end, int) and 0 <= end < size:
            ids[row, real - 1] = end
        ids[row, real:] = pad if isinstance(pad, int) and 0 <= pad < size else 0
        mask[row, real:] = 0
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}


_SPECIAL = ("_token_id", "_token_index", "_token_ids")


def _image(model: nn.Module, _tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return one random image, or one clip of several frames, of the size that the config states."""
    size = _counts(model, "image_size") or [224]
    shape = (1, *_counts(model, "num_frames"), _count(model, "num_channels", 3), size[0], size[-1])
    return {"pixel_values": torch.randn(shape, generator=rng)}


def _audio(model: nn.Module, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return two waveforms of `tokens` frames, the second padded; or a full spectrogram if the config has mel bins."""
    kernels, strides = _counts(model, "conv_kernel"), _counts(model, "conv_stride")
    if kernels and strides:
        samples = tokens * _count(model, "squeeze_factor", 1)
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            samples = (samples - 1) * stride + kernel
        mask = torch.ones(2, samples, dtype=torch.long)
        mask[1, samples * 2 // 3 :] = 0
        return {"input_values": torch.randn(2, samples, generator=rng) * mask, "attention_mask": mask}
    bins, length = _count(model, "num_mel_bins"), _count(model, "max_length")
    if bins and length:
        return {"input_values": torch.randn(1, length, bins, generator=rng)}
    raise NoInputError("it reads audio, and its config has neither conv_kernel and conv_stride nor num_mel_bins")


def _spectrogram(model: nn.Module, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return one full-length spectrogram for Whisper-like configs, otherwise two of `4 * tokens` frames, one padded."""
    bins = next(filter(None, (_count(model, name) for name in _BINS)), 0)
    if not bins:
        raise NoInputError(f"it reads spectrograms, and its config has none of {', '.join(_BINS)}")
    positions = _count(model, "max_source_positions")
    if _count(model, "num_mel_bins") and positions:
        return {"input_features": torch.randn(1, bins, 2 * positions, generator=rng)}
    length = 4 * tokens
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length * 2 // 3 :] = 0
    return {"input_features": torch.randn(2, length, bins, generator=rng), "attention_mask": mask}


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
_MAKERS: dict[str, Callable[[nn.Module, int, torch.Generator], dict[str, Tensor]]] = {
    "input_ids": _text,
    "pixel_values": _image,
    "input_values": _audio,
    "input_features": _spectrogram,
}
MAIN_INPUTS = frozenset(_MAKERS)  # values of `main_input_name` for which an input can be made
