"""The demo: its corpus, and a run that compares readers on it."""
