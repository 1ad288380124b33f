"""Where a model's layers are: its stacks, the selectors that name layers, and taps that hand each state on.

Layer i is entry i of what the model returns as `hidden_states`: 0 the embeddings, 1..depth the blocks. Nothing here
knows a family by name; `stacks` runs the model on a tiny input and looks.
"""

from lamina.layers.discovery import default_stack, stacks, tap
from lamina.layers.hooks import watch
from lamina.layers.selectors import select
from lamina.layers.sites import Site, at_site
from lamina.layers.stack import LayerStack, TapPoint

__all__ = ["LayerStack", "Site", "TapPoint", "at_site", "default_stack", "select", "stacks", "tap", "watch"]
