"""Training, scoring and use of readers: one engine, on `transformers.Trainer`."""

from lamina.train.fit import FitResult, fit
from lamina.train.inference import evaluate, predict

__all__ = ["FitResult", "evaluate", "fit", "predict"]
