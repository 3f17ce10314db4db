"""Rank processes: starting them, what they share, agreeing, and ending them."""
