"""Layers: kernels and exchanges joined into differentiable operations."""
