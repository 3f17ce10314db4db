"""What the stages of the Triton backend hand each other: rows that lie in fragments, without the padding row.

Shapes: n rows, H value heads, K and V head sizes, C chunk size, N chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_engine.kernels.gdn.triton.chain_tables import ChainTables


@dataclass(frozen=True, eq=False)
class Stages:
    """The tree-independent half of the forward, rows that lie in fragments only."""

    decay: torch.Tensor  # float32 [n, H] cumulative log2 decay inside each chunk
    ends: torch.Tensor  # float32 [N, H] that of each chunk's last token
    inverse: torch.Tensor  # [n, H, C]
    w: torch.Tensor  # [n, H, K]
    u: torch.Tensor  # [n, H, V]


def in_fragments(x: torch.Tensor, tables: ChainTables) -> torch.Tensor:
    """Rows in fragments, without the padding row."""
    return x[: tables.tokens].contiguous()


def with_padding(x: torch.Tensor, tables: ChainTables) -> torch.Tensor:
    """Put the padding row back, zero."""
    if len(x) == tables.rows:
        return x
    return torch.cat([x, x.new_zeros((tables.rows - len(x), *x.shape[1:]))])
