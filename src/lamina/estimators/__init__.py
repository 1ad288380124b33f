"""Readers by scikit-learn's contract: `fit`, `predict`, `transform`, in pipelines and searches."""

from lamina.errors import require_packages

require_packages("estimators", "sklearn", "sklearn")
