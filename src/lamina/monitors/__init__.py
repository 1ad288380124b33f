"""Monitors: running scores of a text, computed token by token from a reader's logits, with thresholds that flag it."""

from typing import Any

from lamina.monitors.aggregations import EMA, AttentionMean, LastScore, MeanScore, MultiMax, RollingMax, SoftmaxMean
from lamina.monitors.base import AGGREGATIONS, Aggregation
from lamina.monitors.calibration import Calibration
from lamina.monitors.cascade import Cascade
from lamina.monitors.monitor import Monitor
from lamina.monitors.reply_drift import DriftAlarm, DriftSketch, DriftWatcher, ReplyFacts
from lamina.registry import provider

__all__ = [
    "AGGREGATIONS",
    "EMA",
    "Aggregation",
    "AttentionMean",
    "Calibration",
    "Cascade",
    "DriftAlarm",
    "DriftSketch",
    "DriftWatcher",
    "LastScore",
    "MeanScore",
    "Monitor",
    "MultiMax",
    "ReplyFacts",
    "RollingMax",
    "SoftmaxMean",
    "calibrate",  # pyright: ignore[reportUnsupportedDunderAll]
    "choose_cascade",  # pyright: ignore[reportUnsupportedDunderAll]
    "inspect_scorer",  # pyright: ignore[reportUnsupportedDunderAll]
]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Return `calibrate`, `choose_cascade` or `inspect_scorer`; raise AttributeError for any other name.

    Their code lies in `lamina.prediction`, and is imported when one of them is first used.
    """
    if name in ("calibrate", "choose_cascade", "inspect_scorer"):
        return getattr(provider("monitor fitting"), name)
    raise AttributeError(f"module 'lamina.monitors' has no attribute '{name}'")
