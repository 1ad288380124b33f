"""scikit-learn estimators for texts: readers on a frozen model with `fit`, `predict` and `transform`."""

from lamina.errors import require_packages

require_packages("estimators", "sklearn", "sklearn")
