"""Fusions: from the hidden states of several layers to one feature vector per token."""

from lamina.registry import Registry

FUSIONS = Registry(
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
