"""Causal depthwise convolution over prefix trees."""

from cp_engine.kernels.conv.api import RowGradients, qkv, qkv_backward, rows_backward
from cp_engine.kernels.conv.tables import Channels, ConvTables, conv_tables

__all__ = [
    "Channels",
    "ConvTables",
    "RowGradients",
    "conv_tables",
    "qkv",
    "qkv_backward",
    "rows_backward",
]
