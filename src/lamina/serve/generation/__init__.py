"""Text generation by the bank's model, with the readers' scores for each token."""
