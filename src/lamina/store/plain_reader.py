"""An exported reader: computes logits from hidden states, with nothing but torch and safetensors.

`lamina.store.export.export_reader` copies this file as `lamina_reader.py` into the folder with the reader's weights.
The file imports nothing of Lamina, so its errors are Python's own.

Example:
    ```python
    from lamina_reader import PlainReader

    reader = PlainReader.load("out/sentiment")
    output = model(**batch, output_hidden_states=True)
    reader({layer: output.hidden_states[layer][0] for layer in reader.layers})  # logits [1, classes] of one text
    ```
"""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

Settings = Mapping[str, Any]  # contents of reader.json, or a part of them

FORMAT = 1
KEPT = 1024  # forward passes whose answers wait to be collected; older answers are dropped


class PlainReader(nn.Module):
    """A fusion and a head for inference. `PlainReader.load(folder)` builds one from an exported folder.

    Args:
        settings: Contents of `reader.json`.
        weights: Contents of `model.safetensors`.

    Attributes:
        settings: The settings.
        layers: Layers that the reader needs: 0 is the embeddings, i the output of block i. For the last layer, the
            final norm is included if the model's `hidden_states` include it.
        labels: Names of the classes, in the order of the logits.
        per_token: Whether the logits of a token depend on that token alone, so that a text can be passed in pieces.

    Raises:
        ValueError: If the settings have an unknown format.
    """

    def __init__(self, settings: Settings, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        if settings.get("format") != FORMAT:
            raise ValueError(f"reader.json has format {settings.get('format')}; this file reads {FORMAT}.")
        self.settings = dict(settings)
        self.layers: list[int] = settings["layers"]
        self.labels: list[str] = settings["labels"]
        token_wise_head = not settings["encoders"] and settings["pooling"] in ("", "mean")
        self.per_token = settings["fusion"] != "pooled" and token_wise_head
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> PlainReader:
        """Load a folder that `lamina.store.export.export_reader` wrote, onto a device, in eval mode.

        Raises OSError if a file is missing, ValueError if the settings are no JSON or have an unknown format, and
        SafetensorError if the file of weights is damaged.
        """
        settings = json.loads((Path(folder) / "reader.json").read_text(encoding="utf-8"))
        return cls(settings, load((Path(folder) / "model.safetensors").read_bytes())).to(device).eval()

    @torch.no_grad()
    def forward(self, states: Mapping[int, Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """Compute the logits of whole texts.

        Args:
            states: Layer -> states `[tokens, width]` of one text, or of several in a row, without padding.
            lengths: Number of tokens of each text. None: there is one text.

        Returns:
            Logits `[texts, classes]`; for a reader that labels tokens `[tokens, classes]`.

        Raises:
            ValueError: If a layer is missing, a length is below 1, or the sum of the lengths is not the number of
                tokens.
        """
        selected = self._select(states)
        counts = [len(selected[0])] if lengths is None else list(lengths)
        if sum(counts) != len(selected[0]) or min(counts) < 1:
            raise ValueError(f"the states have {len(selected[0])} tokens; lengths are {counts}, of at least 1 each.")
        ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
        texts = [[state[start:end] for state in selected] for start, end in pairwise(ends)]
        return torch.cat([self._text(text) for text in texts])

    @torch.no_grad()
    def tokens(self, states: Mapping[int, Tensor]) -> Tensor:
        """Compute the logits `[tokens, classes]` of tokens of any texts.

        If the reader labels texts, the logits of a text are the mean of its tokens' logits. Raises ValueError unless
        `per_token`, or if a layer is missing.
        """
        self.check_per_token()
        return self._output(self._features(self._select(states)))

    def check_per_token(self) -> None:
        """Raise ValueError if the reader needs whole texts."""
        if not self.per_token:
            raise ValueError("this reader reads whole texts, and a server's steps are parts of them. Call it on texts.")

    def _select(self, states: Mapping[int, Tensor]) -> list[Tensor]:
        """Return the states of the reader's layers, lowest first; raise ValueError if one is missing."""
        if missing := [layer for layer in self.layers if layer not in states]:
            raise ValueError(f"no states of layer {missing[0]}; this reader needs the layers {self.layers}.")
        return [states[layer] for layer in self.layers]

    def _text(self, states: Sequence[Tensor]) -> Tensor:
        """Compute the logits of one text from its states, `[tokens, width]` for each of `self.layers`, lowest first.

        They are `[1, classes]`, or `[tokens, classes]` if the reader labels tokens.
        """
        features = self._features(states)
        for layer in range(self.settings["encoders"]):  # a transformer encoder layer with norms before its parts
            prefix = f"encoder_{layer}_"
            features = features + self._attend(self._norm(features, f"{prefix}attention_norm"), prefix)
            inner = F.gelu(self._map(self._norm(features, f"{prefix}feedforward_norm"), f"{prefix}inner"))
            features = features + self._map(inner, f"{prefix}outer")
        pooling = self.settings["pooling"]
        if pooling == "attention":
            features = F.gelu(self._attend(features, ""))
        if pooling == "query":
            query = self._weight("query")
            weights = (features @ query / len(query) ** 0.5).softmax(0)
            features = (weights.unsqueeze(1) * features).sum(0, keepdim=True)
        elif pooling:
            ends = {"first": features[:1], "last": features[-1:]}
            features = ends[pooling] if pooling in ends else features.mean(0, keepdim=True)
        return self._output(features)

    def _features(self, states: Sequence[Tensor]) -> Tensor:
        """Fuse the states of the layers into features `[tokens, dim]`; the fusion "pooled" returns `[1, dim]`."""
        return cast("Tensor", getattr(self, f"_{self.settings['fusion']}")(states))

    def _sum(self, states: Sequence[Tensor]) -> Tensor:
        scales = zip(states, self._rows("scales"), strict=True)
        return torch.stack([state.to(scale.dtype) * scale for state, scale in scales]).sum(0)

    def _concat(self, states: Sequence[Tensor]) -> Tensor:
        """Fuse by projecting the concatenated layers, computed as a sum of one projection per layer."""
        maps = zip(states, self._rows("projection"), strict=True)
        parts = [F.linear(state.to(weight.dtype), weight) for state, weight in maps]
        total = torch.stack(parts).sum(0)
        return total + self._weight("bias") if hasattr(self, "bias") else total

    def _projected(self, states: Sequence[Tensor]) -> Tensor:
        """Fuse as AdaLayers or SingleLayer, to `[tokens, dim]`: GELU, projection and layer norm, then the weighted sum.

        If "activation" is set, a GELU follows the sum too.
        """
        parts = list[Tensor]()
        for state, matrix, weight in zip(states, self._rows("projection"), self._rows("weights"), strict=True):
            parts.append(weight * F.layer_norm(F.linear(F.gelu(state).to(matrix.dtype), matrix), matrix.shape[:1]))
        total = torch.stack(parts).sum(0)
        return F.gelu(total) if self.settings["activation"] else total

    def _pooled(self, states: Sequence[Tensor]) -> Tensor:
        """Fuse as PooledLayers, to `[1, dim]`: pool each layer's tokens by attention, then sum the layers, weighted."""
        parts = list[Tensor]()
        layers = zip(states, self._rows("queries"), self._rows("projection"), self._rows("weights"), strict=True)
        for state, queries, matrix, weight in layers:
            normed = F.layer_norm(state, state.shape[-1:]).to(matrix.dtype)
            shares = F.linear(normed, queries).softmax(0)
            shares = shares.view(len(normed), matrix.shape[1] // state.shape[1], -1)  # [tokens, queries, heads]
            slices = normed.view(len(normed), shares.shape[2], -1)
            pooled = torch.einsum("tqh,thd->qhd", shares, slices).flatten()
            parts.append(weight * F.gelu(F.layer_norm(F.linear(pooled, matrix), matrix.shape[:1])))
        return torch.stack(parts).sum(0, keepdim=True)

    def _attend(self, features: Tensor, prefix: str) -> Tensor:
        """Apply self-attention over the tokens of one text; `prefix` begins the names of its weights."""
        mixed = F.linear(features, self._weight(f"{prefix}attention_weight"), self._weight(f"{prefix}attention_bias"))
        split = mixed.view(len(mixed), 3, self.settings["attention_heads"], -1)  # [tokens, 3, heads, size]
        query, key, value = split.permute(1, 2, 0, 3).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self._map(attended.transpose(0, 1).flatten(1), f"{prefix}attention_output")

    def _norm(self, features: Tensor, name: str) -> Tensor:
        return F.layer_norm(features, features.shape[-1:], self._weight(f"{name}_weight"), self._weight(f"{name}_bias"))

    def _map(self, features: Tensor, name: str) -> Tensor:
        return F.linear(features, self._weight(f"{name}_weight"), self._weight(f"{name}_bias"))

    def _output(self, features: Tensor) -> Tensor:
        return self._map(features, "output") if self.settings["linear"] else features

    def _rows(self, name: str) -> tuple[Tensor, ...]:
        return self._weight(name).unbind(0)

    def _weight(self, name: str) -> Tensor:
        return cast("Tensor", getattr(self, name))


# Hooks for SGLang, whose blocks get the tokens of all requests one after the other, as [tokens, width]


class Answer(NamedTuple):
    """The output of a reader for one forward pass of a server.

    Attributes:
        logits: [tokens, classes], on the CPU.
        positions: [tokens], position of each token in its own text, if a hooked block gets it; else None.
        requests: [tokens], id of each token's request, if a hooked block gets it; else None.
    """

    logits: Tensor
    positions: Tensor | None
    requests: list[str] | None = None


class Listener:
    """Collects the states of each forward pass of a server, and calls a reader on them (see `hook`).

    Attributes:
        reader: The reader.
        answers: The latest answers, at most `KEPT`, for the caller to remove; with a `sink` it stays empty.

    Args:
        folder: Folder of the exported reader, which must be `per_token`.
        sink: Called with the `Answer` of each forward pass. None: answers are stored in `answers`.

    Raises:
        ValueError: If the reader is not `per_token`.
    """

    def __init__(self, folder: str | Path, sink: Callable[[Answer], object] | None = None) -> None:
        self.reader = PlainReader.load(folder)
        self.reader.check_per_token()
        self.answers: deque[Answer] = deque(maxlen=KEPT)
        self._sink = self.answers.append if sink is None else sink
        self._states: dict[int, Tensor] = {}
        self._positions: Tensor | None = None
        self._batch: object = None  # the server's batch object, such as SGLang's `ForwardBatch`
        self._unread = 0  # number of passes, one after the other, that did not reach the highest layer

    def hook(self, layer: int, _module: nn.Module, inputs: tuple[object, ...], output: object = None) -> None:
        """Store the state of one layer. At the highest layer of a pass, call the reader and pass its `Answer` on.

        This is a hook of the module that `settings["points"]` names for the layer.

        Args:
            layer: The layer.
            _module: Not used.
            inputs: Positional arguments of the module.
            output: What the module returned. None in a pre-hook.

        Raises:
            RuntimeError: If the server captures or compiles the model, this pass skipped a lower layer, or the two
                previous passes did not reach the highest layer. After a single one, there is only a warning.
            ValueError: If this is a forward hook although the layer needs a pre-hook, the width of the states is wrong,
                or the lengths of the batch's requests do not fit the states.
        """
        captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if captures or torch.compiler.is_compiling():
            raise RuntimeError("captured or compiled code calls no hooks. Start the server without CUDA graphs.")
        layers = self.reader.layers
        if layer == layers[0]:
            self._begin_pass()
        if list(self._states) != list(layers[: layers.index(layer)]):
            raise RuntimeError(f"layer {layer} was read, but not every layer below. Hook all layers of the reader.")
        point = self.reader.settings["points"][str(layer)]
        self._batch = next((value for value in inputs if hasattr(value, "rids")), self._batch)
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if self._positions is None:
            self._positions = next(
                (value for value in tensors if value.ndim == 1 and not value.is_floating_point()), None
            )
        if point["side"] == "output":
            state = state_of(output, add=point["block"])
        elif output is None:
            state = next(value for value in tensors if value.is_floating_point()).clone()
        else:
            raise ValueError(f"layer {layer} is the input of a block, which has changed by its end; use a pre-hook.")
        if self.reader.settings["width"] != state.shape[-1]:
            raise ValueError(f"states have width {state.shape[-1]}; the reader needs {self.reader.settings['width']}.")
        self._states[layer] = state
        if layer == self.reader.layers[-1]:
            states, self._states = self._states, {}
            positions = None if self._positions is None else self._positions.cpu().clone()  # the server reuses its own
            logits = self.reader.to(state.device).tokens(states).cpu()
            self._sink(Answer(logits, positions, requests_of(self._batch, len(logits))))

    def _begin_pass(self) -> None:
        """Forget the previous pass. Warn if it was aborted; raise RuntimeError if that is the second one in a row."""
        unread, self._states, self._positions, self._batch = list(self._states), {}, None, None
        self._unread = self._unread + 1 if unread else 0
        if unread:
            problem = f"a pass ended after layer {unread[-1]}; the reader also needs layer {self.reader.layers[-1]}."
            if self._unread > 1:
                raise RuntimeError(problem)
            warnings.warn(f"{problem} It has no answer.", stacklevel=3)


def requests_of(batch: object, tokens: int) -> list[str] | None:
    """Return the request id of each token of a pass; None if the batch has no ids.

    `batch` is SGLang's `ForwardBatch`. Raises ValueError if its requests do not have `tokens` tokens together.
    """
    ids: list[str] | None = getattr(batch, "rids", None)
    if ids is None:
        return None
    counts: list[int] = getattr(batch, "extend_seq_lens_cpu", None) or [1] * len(ids)  # decoding: one token each
    requests = [request for request, count in zip(ids, counts, strict=True) for _ in range(count)]
    if len(requests) != tokens:
        raise ValueError(f"the requests of the pass have {len(requests)} tokens; the states have {tokens}.")
    return requests


def state_of(output: object, *, add: bool) -> Tensor:
    """Return the hidden state in the output of a module, as a new tensor.

    With `add`, the module is a block in a server, and may return two tensors whose sum is the state.
    """
    values = (output,) if isinstance(output, Tensor) else cast("Sequence[object]", output)
    state, second = cast("Tensor", values[0]), values[1] if len(values) > 1 else None
    if add and isinstance(second, Tensor) and second.shape == state.shape:
        return state + second
    return state.clone()  # a copy, since the modules that follow may write into it


_listeners: dict[str, Listener] = {}


def hook_factory(config: Settings) -> Callable[..., None]:
    """Return the forward hook of one layer for SGLang; `config` is the "config" in an entry of `forward_hooks`.

    It has the "folder", the "layer" and perhaps a "sink" ("module:function"). Hooks of one folder share a `Listener`,
    which the first call makes; later sinks are ignored. Raises the errors of `PlainReader.load`, ValueError if the
    reader is not `per_token`, and the errors of importing the sink.
    """
    if (listener := _listeners.get(config["folder"])) is None:
        name = config.get("sink")  # "module:function"
        sink = None if name is None else getattr(import_module(name.partition(":")[0]), name.partition(":")[2])
        listener = _listeners[config["folder"]] = Listener(config["folder"], sink)
    return partial(listener.hook, config["layer"])


def forward_hooks(folder: str | Path, sink: str | None = None, prefix: str = "") -> list[Settings]:
    """Return the value of SGLang's `--forward-hooks` for a reader: one JSON-ready entry per layer.

    Raises the errors of `PlainReader.load`.

    Args:
        folder: Folder of the exported reader. It must be on the server's PYTHONPATH.
        sink: "module:function" to call with every `Answer`. None: the answers wait in `Listener.answers`.
        prefix: Prefix of the module names, such as "language_model." if the language model is a part of the model.
    """
    settings = PlainReader.load(folder).settings
    more = {} if sink is None else {"sink": sink}
    return [
        {
            "name": f"lamina-{settings['name']}-{layer}",
            "target_modules": [prefix + settings["points"][str(layer)]["module"]],
            "hook_factory": "lamina_reader:hook_factory",
            "hook_type": "forward_pre" if settings["points"][str(layer)]["side"] == "input" else "forward",
            "config": {"folder": str(folder), "layer": layer, **more},
        }
        for layer in settings["layers"]
    ]
