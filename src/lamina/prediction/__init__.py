"""Use what was trained: predict, evaluate on labelled examples, and train monitors.

The package is not named `predict`, because `lamina.predict` is the public function.
"""

from lamina.prediction.bulk import predict_file
from lamina.prediction.calibrate import calibrate
from lamina.prediction.choose_cascade import choose_cascade
from lamina.prediction.evaluate import evaluate
from lamina.prediction.extract import extract
from lamina.prediction.inspect_scorer import inspect_scorer
from lamina.prediction.predict import predict
from lamina.prediction.train_monitor import monitor

__all__ = ["calibrate", "choose_cascade", "evaluate", "extract", "inspect_scorer", "monitor", "predict", "predict_file"]
