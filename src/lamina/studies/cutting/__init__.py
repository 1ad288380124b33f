"""Studies that remove, re-initialise or insert blocks, and measure what that changes."""
