"""Data: the files that tasks are read from, tokenised texts, batches, and the cache of hidden states."""
