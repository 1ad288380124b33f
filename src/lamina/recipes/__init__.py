"""Recipes: YAML files that say what to train, how to check them, and how to run them."""
