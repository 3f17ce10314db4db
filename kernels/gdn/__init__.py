"""Gated DeltaNet over prefix trees."""
