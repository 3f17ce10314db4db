"""Log-probs and entropies of edges, from hidden states and the language-model head."""

from cp_engine.kernels.logprob.api import EdgeTables, edge_logprobs, edge_tables

__all__ = ["EdgeTables", "edge_logprobs", "edge_tables"]
