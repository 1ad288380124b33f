"""The demo: its corpus, and a comparison of readers on it."""
