"""Make a tiny random input (a probe) for any model, from its config alone."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from lamina.layers.adapters import backbone, without_wrapper
from lamina.layers.devices import main_device

PADDED = 3  # padding tokens in the second row, so that a model that removes padding inside is noticed


@dataclass(frozen=True)
class Probe:
    """A tiny input of a model: the keyword arguments `inputs`, their batch size `rows`, and whether it is a full input.

    A full input has everything that the model can read, such as images besides a text.
    """

    inputs: dict[str, Tensor]
    rows: int
    is_full: bool = False

    def without_mask(self) -> Probe:
        """Return the input without attention masks, not marked as full. Some models without weights need this."""
        inputs = {key: value for key, value in self.inputs.items() if not key.endswith("attention_mask")}
        return Probe(inputs, self.rows)


class NoInputError(Exception):
    """Raised when no input can be made for a model. The message is a phrase that says why."""


def probe_input(model: nn.Module, tokens: int, seed: int, *, full: bool | None = None) -> Probe:
    """Make a random input of the kind that a model's `main_input_name` and config require, in its dtype on its device.

    Args:
        model: A transformers model that reads token ids, pixels, waveforms or spectrograms.
        tokens: Length of texts, and number of audio frames. Texts for a decoder are two tokens shorter. Images have the
            size that the config states.
        seed: Seed of the random values.
        full: Add images and boxes to texts that can have them, and swap the last two axes of spectrograms. None: only
            if `prefer_full` was called for the model.

    Raises:
        NoInputError: If the model reads another kind of input, or its config does not state a size that is needed.
    """
    accepted = _accepted(model)
    name = str(getattr(model, "main_input_name", "input_ids"))
    if name == "input_ids" and name not in accepted:  # some towers inherit this name, but read pixels or patches
        name = next((other for other in _MAKERS if other in accepted), name)
    maker = _MAKERS.get(name)
    if maker is None:
        raise NoInputError(f"it reads '{name}', and inputs are known for {', '.join(_MAKERS)}")
    rng = torch.Generator().manual_seed(seed)
    inputs = maker(model, tokens, rng)
    rows = 1 if any(grid in inputs for grid in _GRIDS) else len(inputs[name])  # packed images have no batch axis
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        inputs |= _text(model, tokens - 2, rng, rows=rows, prefix="decoder_")
    full = model in _preferring_full if full is None else full
    others = _others(model, inputs, rows, tokens, rng) if full else {}
    inputs |= others
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    device, dtype = main_device(model), next(floats, torch.float32)
    inputs = {
        key: value.to(device, dtype) if value.is_floating_point() else value.to(device)
        for key, value in inputs.items()
        if key in accepted or key == name
    }
    return Probe(inputs, rows, bool(others))


def run_probe(model: nn.Module, tokens: int, seed: int) -> None:
    """Run a model on an input from `probe_input`; if it refuses the input, as some heads do, run its backbone on one.

    Raises NoInputError as `probe_input` does; errors of the backbone's run pass through.
    """
    try:
        model(**probe_input(model, tokens, seed).inputs)
    except Exception:
        if (inside := backbone(model)) is model:
            raise
        inside(**probe_input(inside, tokens, seed).inputs)


def prefer_full(model: nn.Module) -> None:
    """Record that a model runs only on a full input; see `Probe`."""
    _preferring_full.add(model)


_preferring_full: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _others(
    model: nn.Module, inputs: Mapping[str, Tensor], rows: int, tokens: int, rng: torch.Generator
) -> dict[str, Tensor]:
    """Return what a full input adds to `inputs`: images and boxes for texts, spectrograms of another shape; or {}.

    `rows` and `tokens` are the sizes of the text, and `rng` draws the values.
    """
    accepted = _accepted(model)
    others: dict[str, Tensor] = {}
    if "input_features" in inputs:
        others["input_features"] = inputs["input_features"].transpose(1, 2)
    if "input_ids" in inputs and "bbox" in accepted:
        others["bbox"] = torch.randint(8, (rows, tokens, 4), generator=rng)
    if "input_ids" in inputs and "pixel_values" in accepted:
        images = _image(model, tokens, rng)  # pixels, and for images cut into patches also where the patches lie
        pixels = images["pixel_values"]
        others |= images | ({"pixel_values": pixels.expand(rows, *pixels.shape[1:])} if len(pixels) == 1 else {})
    return others


def _accepted(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(without_wrapper(model).forward).parameters  # a wrapper of PEFT may take only **kwargs


def _configs(model: nn.Module) -> list[object]:
    config: object = model.config
    return [config, *(value for key, value in vars(config).items() if hasattr(value, "to_dict") and key[0] != "_")]


def _counts(model: nn.Module, *names: str) -> list[int]:
    """Return the first of the config settings `names` that is not 0 or missing, as a list of ints; [] without any.

    If the config lacks a setting, the nested configs are asked for it.
    """
    found = (_ints(getattr(config, name, None)) for name in names for config in _configs(model))
    return next(filter(any, found), list[int]())


def _ints(value: object) -> list[int]:
    items = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else (value,)
    return [item for item in items if isinstance(item, int)]


def _count(model: nn.Module, *names: str, default: int = 0) -> int:
    """Return the first number that `_counts` returns for the settings `names`; `default` if there is none."""
    return next(iter(_counts(model, *names)), default)


def _text(model: nn.Module, tokens: int, rng: torch.Generator, *, rows: int = 2, prefix: str = "") -> dict[str, Tensor]:
    """Return token ids and a mask: random ordinary tokens, then the end token, which some classifiers look for.

    There are `rows` rows of `tokens` tokens, the second one padded. `prefix` is "decoder_" for the input of a decoder.
    Raises NoInputError if the config has no vocabulary size.
    """
    outer: object = model.config
    config: object = getattr(outer, "decoder" if prefix else "encoder", None)
    if not hasattr(config, "to_dict"):
        get_text_config: Callable[[], object] | None = getattr(outer, "get_text_config", None)
        config = outer if get_text_config is None else get_text_config()
    size = int(getattr(config, "vocab_size", None) or _count(model, "vocab_size"))
    if not size and _count(model, "num_hash_buckets"):  # it reads the code points of characters, and hashes them
        size = 128
    if size < 2:
        raise NoInputError("its config has no vocab_size")
    settings: list[tuple[str, object]] = [pair for part in _configs(model) for pair in vars(part).items()]
    special = {0, *(token for key, value in settings if key.endswith(_SPECIAL) for token in _ints(value))}
    is_ordinary = torch.ones(size, dtype=torch.bool)
    is_ordinary[[token for token in special if 0 <= token < size]] = False
    ordinary = is_ordinary.nonzero().flatten() if is_ordinary.any() else torch.tensor([size - 1])
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


def _image(model: nn.Module, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return a random image, or a clip of several frames, of the size in the config.

    Models that need a grid get one image that is cut into patches already, wider if `tokens` is larger (`_packed`).
    Models that need positions of patches get two such images of a fixed size (`_patches`).
    """
    accepted = _accepted(model)
    if any(name in accepted for name in _GRIDS):
        return _packed(model, tokens, rng)
    if "pixel_position_ids" in accepted or "spatial_shapes" in accepted:
        return _patches(model, rng)
    size = _counts(model, "image_size") or [224]
    shape = (1, *_counts(model, "num_frames"), _count(model, "num_channels", default=3), size[0], size[-1])
    return {"pixel_values": torch.randn(shape, generator=rng)}


def _video(model: nn.Module, _tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return one random clip of the size that the config states."""
    size = _counts(model, "crop_size", "image_size") or [224]
    frames = _count(model, "frames_per_clip", "num_frames", default=4)
    shape = (1, frames, _count(model, *_CHANNELS, default=3), size[0], size[-1])
    return {"pixel_values_videos": torch.randn(shape, generator=rng)}


def _packed(model: nn.Module, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return the patches of one image, `[patches, values of a patch]`, and its grid: frames, rows and columns.

    The image has more columns if `tokens` is larger, so that two probes differ in length. Some vision towers call this
    input `hidden_states`. Raises NoInputError if the model reads no grid: then its `hidden_states` are those of another
    model.
    """
    accepted = _accepted(model)
    if not (grids := [name for name in _GRIDS if name in accepted]):
        raise NoInputError("it reads 'hidden_states' of another model")
    merged = max(_count(model, "spatial_merge_size"), *_counts(model, "merge_kernel_size"), 2)
    rows, columns = 2 * merged, merged * (2 if tokens < _LONGER else 3)
    frames, channels = _count(model, "temporal_patch_size", default=1), _count(model, *_CHANNELS, default=3)
    values = _count(model, "patch_size", default=14) ** 2 * frames * channels
    name = next(name for name in ("hidden_states", "pixel_values") if name in accepted)
    inputs = {name: torch.randn(rows * columns, values, generator=rng)}
    inputs |= {grid: torch.tensor([[1, rows, columns]]) for grid in grids}
    return inputs | ({"merge_sizes": torch.tensor([merged])} if "merge_sizes" in accepted else {})


_GRIDS, _LONGER = ("grid_thw", "image_grid_thw"), 9
_CHANNELS = ("in_channels", "num_channels")


def _patches(model: nn.Module, rng: torch.Generator) -> dict[str, Tensor]:
    """Return the patches of two images of four by four patches, with their positions and their mask."""
    side = 4
    values = _count(model, "patch_size", default=14) ** 2 * _count(model, *_CHANNELS, default=3)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(2, -1, -1)
    return {
        "pixel_values": torch.rand(2, side * side, values, generator=rng),
        "pixel_position_ids": places,
        "pixel_attention_mask": torch.ones(2, side * side, dtype=torch.long),
        "spatial_shapes": torch.tensor([[side, side]] * 2),
    }


def _audio(model: nn.Module, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return two waveforms of about `tokens` frames, the second padded, or one full-length spectrogram.

    It is a spectrogram if the config has `num_mel_bins` and `max_length`, but not `conv_kernel` with `conv_stride`.
    Raises NoInputError if neither the config nor the strides of the model's Conv1d modules give a size.
    """
    kernels, strides = _counts(model, "conv_kernel"), _counts(model, "conv_stride")
    if kernels and strides:
        samples = tokens * _count(model, "squeeze_factor", default=1)
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            samples = (samples - 1) * stride + kernel
        return _waveforms(samples, rng)
    bins, length = _count(model, "num_mel_bins"), _count(model, "max_length")
    if bins and length:
        return {"input_values": torch.randn(1, length, bins, generator=rng)}
    frame = prod(part.stride[0] for part in model.modules() if isinstance(part, nn.Conv1d))  # samples in a frame
    if frame > 1:
        # more samples than `tokens` frames, as kernels are longer than strides
        return _waveforms((tokens + 4) * frame, rng)
    sizes = "conv_kernel with conv_stride nor num_mel_bins with max_length"
    raise NoInputError(f"it reads audio, and its config has neither {sizes}")


def _waveforms(samples: int, rng: torch.Generator) -> dict[str, Tensor]:
    mask = _padded(samples)
    return {"input_values": torch.randn(2, samples, generator=rng) * mask, "attention_mask": mask}


def _padded(length: int) -> Tensor:
    """Return a mask `[2, length]` whose second row ends in padding."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length * 2 // 3 :] = 0
    return mask


def _spectrogram(model: nn.Module, tokens: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return one full-length spectrogram for Whisper-like configs, otherwise two of at least `4 * tokens` frames.

    The second of the two is padded. Raises NoInputError if the config has no mel bins.
    """
    if not (bins := _count(model, *_BINS)):
        raise NoInputError(f"it reads spectrograms, and its config has none of {', '.join(_BINS)}")
    positions = _count(model, "max_source_positions")
    if _count(model, "num_mel_bins") and positions:
        features = torch.randn(1, bins, 2 * positions, generator=rng)
        return {"input_features": features, "input_features_mask": torch.ones(1, 2 * positions, dtype=torch.long)}
    # some encoders read windows of frames, or need a number of frames that is a multiple
    length = tokens * max(4, 2 * _count(model, "n_window"), _count(model, "subsampling_factor"))
    features, mask = torch.randn(2, length, bins, generator=rng), _padded(length)
    return {"input_features": features, "attention_mask": mask, "input_features_mask": mask}


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
_MAKERS: dict[str, Callable[[nn.Module, int, torch.Generator], dict[str, Tensor]]] = {
    "input_ids": _text,
    "pixel_values": _image,
    "pixel_values_videos": _video,
    "input_values": _audio,
    "input_features": _spectrogram,
    "hidden_states": _packed,
}
MAIN_INPUTS = frozenset(_MAKERS) - {"hidden_states"}  # values of `main_input_name` for which an input can be made
