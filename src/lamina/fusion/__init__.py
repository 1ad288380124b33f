"""Fusions turn the hidden states of several layers into one feature vector per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamina.registry import Registry

if TYPE_CHECKING:
    from lamina.fusion.base import FusionConfig
    from lamina.fusion.depth_lstm import DepthLSTM as DepthLSTM
    from lamina.fusion.elementwise import Elementwise as Elementwise
    from lamina.fusion.extra_layers import ExtraLayers as ExtraLayers
    from lamina.fusion.gated import Gated as Gated
    from lamina.fusion.head2toe import Head2Toe as Head2Toe
    from lamina.fusion.last_layer import LastLayer as LastLayer
    from lamina.fusion.mean import Mean as Mean
    from lamina.fusion.routing import Routing as Routing

FUSIONS: Registry[FusionConfig] = Registry(
    "fusion",
    {
        "ada_layers": "lamina.fusion.ada_layers:AdaLayers",
        "single_layer": "lamina.fusion.single_layer:SingleLayer",
        "last_layer": "lamina.fusion.last_layer:LastLayer",
        "mean": "lamina.fusion.mean:Mean",
        "scalar_mix": "lamina.fusion.scalar_mix:ScalarMix",
        "elementwise": "lamina.fusion.elementwise:Elementwise",
        "gated": "lamina.fusion.gated:Gated",
        "concat": "lamina.fusion.concat:Concat",
        "dwatt": "lamina.fusion.dwatt:DWAtt",
        "depth_lstm": "lamina.fusion.depth_lstm:DepthLSTM",
        "extra_layers": "lamina.fusion.extra_layers:ExtraLayers",
        "head2toe": "lamina.fusion.head2toe:Head2Toe",
        "routing": "lamina.fusion.routing:Routing",
        "pooled_layers": "lamina.fusion.pooled_layers:PooledLayers",
        "paired_layers": "lamina.fusion.paired_layers:PairedLayers",
    },
)


def __getattr__(name: str) -> object:
    """Import and return the config class `name`; AttributeError if there is none. The package itself loads no torch."""
    for row in FUSIONS.names():
        if FUSIONS.target(row).rpartition(":")[2] == name:
            return FUSIONS.get(row)
    raise AttributeError(f"module 'lamina.fusion' has no attribute '{name}'")
