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
    },
)
