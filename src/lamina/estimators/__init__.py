"""scikit-learn estimators for texts: readers on a frozen model with `fit`, `predict` and `transform`."""

import sys

from lamina.errors import require_packages

require_packages("estimators", "sklearn", "sklearn")

from lamina.estimators import predictors  # noqa: E402

# pickles of earlier versions name these modules
sys.modules.update({f"{__name__}.{name}": predictors for name in ("classifier", "regressor", "tagger")})
