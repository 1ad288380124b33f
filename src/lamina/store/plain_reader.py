"""A reader that Lamina has exported: it reads hidden states with torch and safetensors alone.

`lamina.store.export.export_reader` copies this file, as `lamina_reader.py`, beside the weights that it loads.
It imports nothing of Lamina, so its errors are Python's own.
"""

from __future__ import annotations

import json
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

FORMAT = 1
KEPT = 1024  # passes whose answers wait to be collected, the latest


class PlainReader(nn.Module):
    """A fusion and a head, for inference, of what `reader.json` and `model.safetensors` hold.

    Attributes:
        layers: The layers that it reads: 0 the embeddings, i what block i gives; the last one behind the final norm
            where the model returns it so.
        labels: Names of its classes, in the order of the logits.
        per_token: Whether it says something of each token by itself, so that texts may come in pieces.
    """

    def __init__(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        if settings.get("format") != FORMAT:
            raise ValueError(f"reader.json has format {settings.get('format')}; this file reads {FORMAT}.")
        self.settings = dict(settings)
        self.layers: list[int] = settings["layers"]
        self.labels: list[str] = settings["labels"]
        apart = not settings["encoders"] and settings["pooling"] in ("", "mean")
        self.per_token = settings["fusion"] != "pooled" and apart
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> PlainReader:
        """Load a folder that `lamina.store.export.export_reader` wrote."""
        settings = json.loads((Path(folder) / "reader.json").read_text(encoding="utf-8"))
        return cls(settings, load((Path(folder) / "model.safetensors").read_bytes())).to(device).eval()

    @torch.no_grad()
    def forward(self, states: Mapping[int, Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """Read whole texts.

        Args:
            states: Layer -> states `[tokens, width]` of one text, or of several, one after the other, without padding.
            lengths: How many tokens each text has; None: there is one.

        Returns:
            Logits `[texts, classes]`, or `[tokens, classes]` of a reader that labels tokens.
        """
        given = self._given(states)
        counts = [len(given[0])] if lengths is None else list(lengths)
        if sum(counts) != len(given[0]) or min(counts) < 1:
            raise ValueError(f"the states have {len(given[0])} tokens; lengths are {counts}, of at least 1 each.")
        ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
        texts = [[state[start:end] for state in given] for start, end in pairwise(ends)]
        return torch.cat([self._text(text) for text in texts])

    @torch.no_grad()
    def tokens(self, states: Mapping[int, Tensor]) -> Tensor:
        """Logits `[tokens, classes]` of tokens of any texts, if `per_token`; a text's are the mean of its tokens'."""
        self.check_per_token()
        return self._output(self._features(self._given(states)))

    def check_per_token(self) -> None:
        """Raise ValueError if the reader needs a whole text."""
        if not self.per_token:
            raise ValueError("this reader reads whole texts, and a server's steps are parts of them. Call it on texts.")

    def _given(self, states: Mapping[int, Tensor]) -> list[Tensor]:
        if missing := [layer for layer in self.layers if layer not in states]:
            raise ValueError(f"no states of layer {missing[0]}; this reader needs the layers {self.layers}.")
        return [states[layer] for layer in self.layers]

    def _text(self, states: Sequence[Tensor]) -> Tensor:
        features = self._features(states)
        for layer in range(self.settings["encoders"]):
            own = f"encoder_{layer}_"
            features = features + self._attend(self._norm(features, f"{own}attention_norm"), own)
            inner = F.gelu(self._map(self._norm(features, f"{own}feedforward_norm"), f"{own}inner"))
            features = features + self._map(inner, f"{own}outer")
        pooling = self.settings["pooling"]
        if pooling == "attention":
            features = F.gelu(self._attend(features, ""))
        if pooling == "query":
            query = self._weight("query")
            weights = (features @ query / len(query) ** 0.5).softmax(0)
            features = (weights.unsqueeze(1) * features).sum(0, keepdim=True)
        elif pooling:
            features = features[:1] if pooling == "first" else features.mean(0, keepdim=True)
        return self._output(features)

    def _features(self, states: Sequence[Tensor]) -> Tensor:
        """`[tokens, dim]`; of pooled layers `[1, dim]`."""
        return cast("Tensor", getattr(self, f"_{self.settings['fusion']}")(states))

    def _sum(self, states: Sequence[Tensor]) -> Tensor:
        scales = zip(states, self._rows("scales"), strict=True)
        return torch.stack([state.to(scale.dtype) * scale for state, scale in scales]).sum(0)

    def _concat(self, states: Sequence[Tensor]) -> Tensor:
        maps = zip(states, self._rows("projection"), strict=True)
        parts = [F.linear(state.to(own.dtype), own) for state, own in maps]
        total = torch.stack(parts).sum(0)
        return total + self._weight("bias") if hasattr(self, "bias") else total

    def _projected(self, states: Sequence[Tensor]) -> Tensor:
        parts = list[Tensor]()
        for state, own, weight in zip(states, self._rows("projection"), self._rows("weights"), strict=True):
            parts.append(weight * F.layer_norm(F.linear(F.gelu(state).to(own.dtype), own), own.shape[:1]))
        total = torch.stack(parts).sum(0)
        return F.gelu(total) if self.settings["activation"] else total

    def _pooled(self, states: Sequence[Tensor]) -> Tensor:
        parts = list[Tensor]()
        every = zip(states, self._rows("queries"), self._rows("projection"), self._rows("weights"), strict=True)
        for state, queries, own, weight in every:
            normed = F.layer_norm(state, state.shape[-1:]).to(own.dtype)
            shares = F.linear(normed, queries).softmax(0)
            shares = shares.view(len(normed), own.shape[1] // state.shape[1], -1)  # [tokens, queries, heads]
            slices = normed.view(len(normed), shares.shape[2], -1)
            pooled = torch.einsum("tqh,thd->qhd", shares, slices).flatten()
            parts.append(weight * F.gelu(F.layer_norm(F.linear(pooled, own), own.shape[:1])))
        return torch.stack(parts).sum(0, keepdim=True)

    def _attend(self, features: Tensor, prefix: str) -> Tensor:
        """Self-attention over the tokens of one text."""
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


# Taking part in a server's passes, whose blocks see the tokens of all requests one after the other, [tokens, width]


class Answer(NamedTuple):
    """What a reader says of one pass."""

    logits: Tensor  # [tokens, classes], on the CPU
    positions: Tensor | None  # [tokens], each token's place in its own text, where a block that was read is given it


class Listener:
    """Puts together the states of a pass, and keeps what the reader says of it; or hands it to a `sink`."""

    def __init__(self, folder: str | Path, sink: Callable[[Answer], object] | None = None) -> None:
        self.reader = PlainReader.load(folder)
        self.reader.check_per_token()
        self.answers: deque[Answer] = deque(maxlen=KEPT)
        self._sink = sink or self.answers.append
        self._states: dict[int, Tensor] = {}
        self._positions: Tensor | None = None

    def hook(self, layer: int, _module: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> None:
        """See one layer, as a hook of the module that `settings["points"]` names: before its forward, or after it."""
        if layer == self.reader.layers[0]:
            self._states, self._positions = {}, None
        point = self.reader.settings["points"][str(layer)]
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
            raise ValueError(f"layer {layer} is what a block is given, which has changed by its end; use a pre-hook.")
        if self.reader.settings["width"] != state.shape[-1]:
            raise ValueError(f"states are of width {state.shape[-1]}; the reader's of {self.reader.settings['width']}.")
        self._states[layer] = state
        if layer == self.reader.layers[-1]:
            positions = None if self._positions is None else self._positions.cpu()
            self._sink(Answer(self.reader.to(state.device).tokens(self._states).cpu(), positions))
            self._states = {}


def state_of(output: Any, *, add: bool) -> Tensor:
    """The state in what a module returns; vLLM's and SGLang's blocks return two tensors that are yet to be added."""
    first, *rest = (output,) if isinstance(output, Tensor) else output
    if add and rest and isinstance(rest[0], Tensor) and rest[0].shape == first.shape:
        return first + rest[0]
    return first.clone()  # the modules that follow may write into it


_listeners: dict[str, Listener] = {}


def hook_factory(config: Mapping[str, Any]) -> Callable[..., None]:
    """SGLang's: the forward hook of one layer; `forward_hooks` writes the `config`, to which a `sink` may be added."""
    if (listener := _listeners.get(config["folder"])) is None:
        name = config.get("sink")  # "module:function"
        sink = None if name is None else getattr(import_module(name.partition(":")[0]), name.partition(":")[2])
        listener = _listeners[config["folder"]] = Listener(config["folder"], sink)
    return partial(listener.hook, config["layer"])


def forward_hooks(folder: str | Path, sink: str | None = None, prefix: str = "") -> list[dict[str, Any]]:
    """What SGLang's `--forward-hooks` takes, as JSON: one entry per layer.

    Args:
        folder: Of the reader; it must be on the server's PYTHONPATH, since the entries name `lamina_reader`.
        sink: "module:function", called with every `Answer`.
        prefix: Of the modules' names, such as "language_model." where the language model is a part.
    """
    settings = PlainReader.load(folder).settings
    more = {} if sink is None else {"sink": sink}
    return [
        {
            "name": f"lamina-{settings['name']}-{layer}",
            "target_modules": [prefix + settings["points"][str(layer)]["module"]],
            "hook_factory": "lamina_reader:hook_factory",
            "hook_type": _hook_type(settings["points"][str(layer)]),
            "config": {"folder": str(folder), "layer": layer, **more},
        }
        for layer in settings["layers"]
    ]


def _hook_type(point: Mapping[str, Any]) -> str:
    return "forward_pre" if point["side"] == "input" else "forward"


def attach(model: nn.Module, folder: str | Path, prefix: str = "") -> list[str]:
    """Read a model's passes, for vLLM's `llm.apply_model(functools.partial(attach, folder=...))`; names the modules."""
    listener = Listener(folder)
    points: dict[str, Any] = listener.reader.settings["points"]
    for layer in listener.reader.layers:
        module: Any = model.get_submodule(prefix + points[str(layer)]["module"])
        getattr(module, f"register_{_hook_type(points[str(layer)])}_hook")(partial(listener.hook, layer))
    _listeners[str(folder)] = listener
    return [prefix + point["module"] for point in points.values()]


def collect(_model: nn.Module, folder: str | Path) -> list[Answer]:
    """What was said since the last time, a pass each; for `llm.apply_model(functools.partial(collect, folder=...))`."""
    answers = _listeners[str(folder)].answers
    return [answers.popleft() for _ in range(len(answers))]
