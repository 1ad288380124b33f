"""Recorded, replayable, in-place changes of a model's layers."""
