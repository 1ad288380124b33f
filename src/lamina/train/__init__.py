"""Training: one engine for the readers of a bank and for whole models."""

from lamina.train.fit import finetune, fit
from lamina.train.results import FitResult

__all__ = ["FitResult", "finetune", "fit"]
