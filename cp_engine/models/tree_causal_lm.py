"""The one module that distributed engines wrap.

Shapes: n local rows, C hidden size, M predictors and E edges that this rank scores.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from cp_engine.kernels.logprob import EdgeTables, edge_logprobs
from cp_engine.pack import PACK_KEYWORD, DevicePack
from cp_engine.sharding.exchange.relay import relay_rows

Outputs = Literal["edges", "routers", "edges and routers"]


class TreeCausalLM(nn.Module):
    """A `transformers` causal LM whose forward scores the edges of a packed tree.

    It holds embedding, decoder, final norm and head, and nothing reads a parameter outside its forward: with sharded
    parameters (ZeRO-3, FSDP2) they are whole only there.

    Args:
        causal_lm: a model that went through `prepare_for_trees`, with adapters already injected if there are any.
    """

    def __init__(self, causal_lm: nn.Module):
        super().__init__()
        self.causal_lm = causal_lm
        self.scorer = EdgeScorer()

    def forward(
        self, pack: DevicePack, temperature: float = 1.0, outputs: Outputs = "edges"
    ) -> tuple[torch.Tensor, ...]:
        """Log-prob and entropy (nats) of each edge that this rank scores, and what the routers of MoE layers said.

        Every rank of the pack's group must call it, ranks without tokens too.

        Args:
            outputs: ``edges``, ``routers`` (the head is not run), or ``edges and routers``.

        Returns:
            log_prob [E] and entropy [E] in the accumulation dtype; then the router logits [n, experts] of each MoE
            layer.

        Raises:
            ValueError: for a temperature that is not a positive number.
        """
        kwargs = {PACK_KEYWORD: pack} if outputs == "edges" else {PACK_KEYWORD: pack, "output_router_logits": True}
        base = self.causal_lm.base_model(input_ids=pack.token_id, position_ids=pack.position, use_cache=False, **kwargs)
        logits = () if outputs == "edges" else base.router_logits
        if outputs == "routers":
            return logits
        hidden = base.last_hidden_state  # [1, n, C]
        head = self.causal_lm.get_output_embeddings()
        predictors = relay_rows(hidden[0], pack.predictors, pack.group)  # [M, C]
        edges = self.scorer(predictors, head, pack.edges, self.causal_lm.config.vocab_size, temperature)
        return *edges, *logits


class EdgeScorer(nn.Module):
    """Head and loss in chunks, as one module that every rank calls once for each pack.

    The number of chunks differs between ranks, and a module with sharded parameters must not be called in different
    numbers: the chunks pass by the head's hooks (which gather parameters), and its parameters are gathered for this
    module.
    """

    def forward(
        self, hidden: torch.Tensor, head: nn.Module, edges: EdgeTables, vocab_size: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`edge_logprobs`."""
        return edge_logprobs(hidden, head, edges, vocab_size, temperature)
