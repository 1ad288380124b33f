"""The layers of a model: its stacks, selectors that name layers, and taps that collect hidden states.

Layer i is entry i of the `hidden_states` that a transformers model returns: 0 is the embeddings, 1..depth the blocks.
`stacks` finds the layers by running the model on a tiny input, so no table of model families is needed.
"""

from lamina.layers.discovery import default_stack, stacks, tap
from lamina.layers.hooks import watch
from lamina.layers.selectors import select
from lamina.layers.sites import Site, at_site
from lamina.layers.stack import LayerStack, TapPoint

__all__ = ["LayerStack", "Site", "TapPoint", "at_site", "default_stack", "select", "stacks", "tap", "watch"]
