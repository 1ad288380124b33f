"""Use what was trained: predict, evaluate on labelled examples, and calibrate monitors.

The package is not named `predict`, because `lamina.predict` is the public function.
"""

from lamina.prediction.bulk import predict_file
from lamina.prediction.calibrate import calibrate
from lamina.prediction.evaluate import evaluate
from lamina.prediction.predict import predict

__all__ = ["calibrate", "evaluate", "predict", "predict_file"]
