"""A comparison of readers with rival methods on public probing data sets."""
