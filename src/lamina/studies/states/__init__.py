"""Studies that read hidden states, weights or trained readers as they are, without training."""
