"""Softmax attention over interval-shaped visibility, on one device."""

from cp_engine.kernels.attention.api import attention, attention_backward, prepare
from cp_engine.kernels.attention.intervals import Intervals

__all__ = ["Intervals", "attention", "attention_backward", "prepare"]
