"""Monitors: what readers say of a text while it is written, as one score that may flag it."""

from lamina.monitors.attention_mean import AttentionMean
from lamina.monitors.base import AGGREGATIONS, Aggregation
from lamina.monitors.calibration import Calibration
from lamina.monitors.cascade import Cascade
from lamina.monitors.ema import EMA
from lamina.monitors.last_score import LastScore
from lamina.monitors.mean_score import MeanScore
from lamina.monitors.monitor import Monitor
from lamina.monitors.multi_max import MultiMax
from lamina.monitors.rolling_max import RollingMax
from lamina.monitors.softmax_mean import SoftmaxMean

__all__ = [
    "AGGREGATIONS",
    "EMA",
    "Aggregation",
    "AttentionMean",
    "Calibration",
    "Cascade",
    "LastScore",
    "MeanScore",
    "Monitor",
    "MultiMax",
    "RollingMax",
    "SoftmaxMean",
]
