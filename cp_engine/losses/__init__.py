"""Losses over occurrences: pure functions of log-probs, and the weights that aggregate them."""
