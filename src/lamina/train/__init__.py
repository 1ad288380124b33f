"""Training, scoring and predicting: one engine for the readers of a bank and for whole models."""

from lamina.train.bulk import predict_file
from lamina.train.calibrate import calibrate
from lamina.train.evaluate import evaluate
from lamina.train.fit import finetune, fit
from lamina.train.predict import predict
from lamina.train.results import FitResult

__all__ = ["FitResult", "calibrate", "evaluate", "finetune", "fit", "predict", "predict_file"]
