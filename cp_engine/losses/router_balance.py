"""Load-balancing loss of expert routers, over all occurrences of an optimizer step.

    E sum_e f_e P_e        f_e = C_e / (M N)        P_e = (sum over layers and tokens of p_e) / (M N)

of Switch Transformers (Fedus et al. 2021, equations 4 to 6) in the form that `transformers` computes
(``load_balancing_loss_func``): C_e counts how often expert e is among the k chosen ones, p_e is its probability, both
over the M MoE layers and the N tokens of all rollouts. A tree token counts once for each rollout through it.

C_e has no gradient, and the loss is linear in p_e. So the gradient of one pack needs the counts of the whole step and
nothing else of the other packs; they are known once each pack's router has run.

Shapes: n local rows, M MoE layers, E experts, k experts of a token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_engine.models.routers import RouterShape
from cp_engine.pack import DevicePack


class RouterBalance:
    """The loss of one step, part by part: count all packs of this rank but one, then take the loss of that one first.

    Args:
        coefficient: weight of the loss.
        shape: of the model's routers.
        tokens: N, of all rollouts of the step.
        group: process group of all ranks that run packs of the step; None for a single rank.
    """

    def __init__(self, coefficient: float, shape: RouterShape, tokens: int, group):
        self.coefficient, self.shape, self.tokens, self.group = coefficient, shape, tokens, group
        self._counts: torch.Tensor | None = None  # int64 [E]
        self._complete = False

    @torch.no_grad()
    def count(self, logits: tuple[torch.Tensor, ...], pack: DevicePack) -> None:
        """Add the choices of a pack to the step's counts.

        Args:
            logits: [n, E] of each MoE layer, its rows in the layout of that layer.
        """
        assert not self._complete, "the counts of the step are already in use"
        if self._counts is None:
            self._counts = torch.zeros(logits[0].shape[1], dtype=torch.int64, device=logits[0].device)
        for layer, rollouts in zip(logits, self._rollouts(pack), strict=True):
            # As the router chooses: probabilities in float32, so that ties fall alike.
            chosen = torch.softmax(layer, -1, dtype=torch.float32).topk(self.shape.top_k, -1).indices
            times = rollouts[:, None].expand_as(chosen)
            self._counts.index_add_(0, chosen.reshape(-1), times.reshape(-1))

    def _rollouts(self, pack: DevicePack) -> list[torch.Tensor]:
        """int64 [n] rollouts through the rows of each MoE layer; 0 on a padding row."""
        return [pack.gdn_rollouts if in_run else pack.rollouts for in_run in self.shape.in_gdn_runs]

    def loss(self, logits: tuple[torch.Tensor, ...], pack: DevicePack, dtype: torch.dtype) -> torch.Tensor:
        """A pack's part of the weighted loss on this rank; the parts sum to the loss of the step.

        The first call takes the counts of its pack and sums them over the group, so every rank makes it.

        Args:
            logits, pack: as `count`.
            dtype: accumulation dtype.

        Raises:
            ValueError: if the logits carry no gradient although gradients are recorded.
        """
        if torch.is_grad_enabled() and not any(layer.requires_grad for layer in logits):
            raise ValueError(
                "loss.router_aux_coef is set, but router logits carry no gradient: recompute activations with "
                "use_reentrant=False, or train weights below a router"
            )
        if not self._complete:
            self.count(logits, pack)
            if self.group is not None:
                dist.all_reduce(self._counts, group=self.group)
            self._complete = True
        rows = len(logits) * self.tokens
        share = (self._counts.double() / rows).to(dtype)
        total = sum(
            rollouts.to(dtype) @ (torch.softmax(layer, -1, dtype=dtype) @ share)
            for layer, rollouts in zip(logits, self._rollouts(pack), strict=True)
        )
        return self.coefficient * len(share) / rows * total
