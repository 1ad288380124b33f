"""Tasks: labelled examples, what is asked about them, and how the answers are scored."""
