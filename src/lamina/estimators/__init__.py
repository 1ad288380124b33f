"""Readers by scikit-learn's contract: `fit`, `predict`, `transform`, in pipelines and searches."""
