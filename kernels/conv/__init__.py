"""Causal depthwise convolution over prefix trees."""

from cp_engine.kernels.conv.api import ConvTables, conv_tables, tree_conv

__all__ = ["ConvTables", "conv_tables", "tree_conv"]
