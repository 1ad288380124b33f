"""Cells: independent pieces of work that run here or on Ray, and resume where they were interrupted."""
