"""Edits: in-place changes of a model's layers that are recorded, saved and replayed."""
