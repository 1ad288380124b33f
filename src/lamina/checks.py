"""Checks of plain values that configs share."""

from __future__ import annotations

from lamina.errors import ConfigError


def check_range(op: str, name: str, value: float, low: float, high: float, *, open_high: bool = False) -> None:
    """Raise ConfigError unless low <= value <= high (or < high)."""
    if not (low <= value < high if open_high else low <= value <= high):
        bound = f"{low} <= {name} {'<' if open_high else '<='} {high}"
        raise ConfigError(f"{op}: {name} is {value}; it must be {bound}. Change it.")
