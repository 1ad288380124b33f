"""Layers with adapters that look as PEFT's do from outside (0.21), for a package that the tests do not need."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Lora(nn.Module):
    """A linear map with low-rank additions by name, as `peft.tuners.lora.Linear`."""

    adapter_layer_names = ("lora_A", "lora_B")
    other_param_names = ("r", "scaling", "lora_dropout")

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B, self.lora_dropout = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._active_adapter: str | list[str] = "default"
        self._disable_adapters = False

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    @property
    def active_adapters(self) -> list[str]:
        return [self._active_adapter] if isinstance(self._active_adapter, str) else self._active_adapter

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    def delta(self, name: str) -> Tensor:
        return self.scaling[name] * self.lora_B[name].weight @ self.lora_A[name].weight

    def merge(self) -> None:
        for name in self.active_adapters:
            self.base_layer.weight.data += self.delta(name)
            self.merged_adapters.append(name)

    def forward(self, states: Tensor) -> Tensor:
        if self.disable_adapters and self.merged:
            self.base_layer.weight.data -= self.delta(self.merged_adapters.pop())
        output = self.base_layer(states)
        if not (self.disable_adapters or self.merged):
            for name in self.active_adapters:
                output = output + nn.functional.linear(states, self.delta(name))
        return output


def adapted(model: Any) -> list[Lora]:
    return [module for module in model.modules() if isinstance(module, Lora)]


def add_adapter(model: Any, name: str = "default", seed: int = 1, rank: int = 2) -> None:
    """Add an adapter to every query projection and use it, as transformers' `model.add_adapter` does."""
    rng = torch.Generator().manual_seed(seed)
    for parent in [module for module in model.modules() if isinstance(getattr(module, "query", None), nn.Linear)]:
        parent.query = Lora(parent.query)
    for layer in adapted(model):
        width_in, width_out = layer.base_layer.in_features, layer.base_layer.out_features
        layer.lora_A[name], layer.lora_B[name] = nn.Linear(width_in, rank, False), nn.Linear(rank, width_out, False)
        for part in (layer.lora_A[name], layer.lora_B[name]):
            part.weight.data = 0.3 * torch.randn(part.weight.shape, generator=rng)
        layer.lora_dropout[name], layer.r[name], layer.scaling[name] = nn.Identity(), rank, 2.0
    model.peft_config = {**getattr(model, "peft_config", {}), name: object()}
    set_adapter(model, name)


def set_adapter(model: Any, name: str | list[str]) -> None:
    for layer in adapted(model):
        layer._active_adapter = name


def enable_adapters(model: Any, enabled: bool) -> None:
    for layer in adapted(model):
        layer._disable_adapters = not enabled
