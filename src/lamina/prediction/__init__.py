"""Use what was trained: predict, evaluate on labelled examples, and train monitors.

The package is not named `predict`, because `lamina.predict` is the public function.
"""

from lamina.prediction.bulk import predict_file
from lamina.prediction.calibrate import calibrate
from lamina.prediction.evaluate import evaluate
from lamina.prediction.predict import predict
from lamina.prediction.train_monitor import monitor

__all__ = ["calibrate", "evaluate", "monitor", "predict", "predict_file"]
