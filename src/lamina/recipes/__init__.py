"""Recipes: YAML files that say what to train, from the schema to the run."""
