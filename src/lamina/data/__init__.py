"""Data: what a task is, the files it is read from, and how its texts become tokens."""
