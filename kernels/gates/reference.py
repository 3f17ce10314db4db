"""The gates of a Gated DeltaNet layer in eager torch, as the models of `transformers` compute them.

Shapes: n rows, H value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def input_gates(
    a: torch.Tensor, b: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.gates.api.input_gates`."""
    return -decay_rate.float().exp() * F.softplus(a.float() + dt_bias), b.sigmoid()
