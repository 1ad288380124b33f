"""Training: one engine for the readers of a bank and for whole models.

A learner is anything that is trained on its own: a reader, a base model trained with its readers, or a whole model.
"""

from lamina.train.fit import finetune, fit
from lamina.train.results import FitResult

__all__ = ["FitResult", "finetune", "fit"]
