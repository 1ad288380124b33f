"""Compare readers with rival methods on public probing data sets."""
