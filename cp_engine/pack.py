"""One rank's pack: made on the host, where a planning thread may do it ahead, then put on its device.

Shapes: n local rows, E edges, O occurrences.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
import torch.distributed as dist

from cp_engine.kernels.attention import Intervals
from cp_engine.kernels.logprob import edge_tables
from cp_engine.kernels.shared.on_device import moved
from cp_engine.layers.attention import AttentionTables, attention_tables, kernel_intervals
from cp_engine.layers.gdn_tables import gdn_tables
from cp_engine.sharding.attention_plan import AttentionPlan
from cp_engine.sharding.exchange.relay import relay_tables
from cp_engine.sharding.plan import ShardPlan

# Of the kernel calls of layers without and with a sliding window, where they were made ahead.
AttentionIntervals = tuple[Sequence[Intervals] | None, Sequence[Intervals] | None]
PACK_KEYWORD = "tree_pack"  # the keyword of ``model(...)`` under which a pack travels to every layer


class DevicePack:
    """Everything that the layers and the loss read about one pack, as one opaque handle.

    It travels as a keyword through ``model(...)`` down to each layer, so activation recompute with two packs in flight
    sees its own. It is a plain class, not a dataclass, dict or tuple: distributed engines walk through those in a
    module's arguments and cast the float tensors they find (FSDP2's mixed precision rounds them to bfloat16) or move
    them; this one they pass on untouched.

    Attributes:
        plan: the `ShardPlan` it was made from.
        group: process group of the CP ranks; None for a single rank.
        device: of the layers that read it. Tensors lie on the host until `on_device`.
        token_id, position: int64 [1, n].
        rollouts: int64 [n] rollouts that pass through each row; 0 on a padding row.
        gdn_rollouts: int64 [m] the same for rows of the layout of the GDN layers.
        routes: int64 [MoE layers, n, experts of a token] that routers have to take; None where they choose.
        gdn_routes: int64 [MoE layers, m, experts of a token], the same for rows of the layout of the GDN layers.
        attention: `AttentionTables`.
        window_attention: those of layers with a sliding window; None for a model without such layers.
        gdn: `GdnTables`, None for a model without GDN layers.
        relay: `RelayTables` into the layout of the GDN layers, None where that is the one of all other layers.
        predictors: `RelayTables` of hidden states to the ranks that score what they predict, [n] rows to [M].
        edges: `EdgeTables` of the E edges that this rank scores.
        occurrence_edge: int64 [O] index into the edges.
        occurrence_rollout: int64 [O] rollout of the pack.
        occurrence_position: int64 [O] position of the target in the rollout.
    """

    def __init__(
        self,
        plan: ShardPlan,
        group,
        device: torch.device | str,
        routes=None,
        gdn_routes=None,
        intervals: AttentionIntervals = (None, None),
        transport: str = "auto",
    ):
        world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        assert (plan.world, plan.rank) == (world, rank), (
            f"plan of rank {plan.rank} of {plan.world} on rank {rank} of a group of {world}"
        )
        assert routes is None or (gdn_routes is None) == (plan.relayout is None), "routes of one of two layouts"

        def tensor(array):
            return torch.as_tensor(array, dtype=torch.int64)

        self.plan = plan
        self.group = group
        self.device = torch.empty(0, device=device).device  # with an index, as tensors have it
        self.token_id = tensor(plan.token_id)[None]
        self.position = tensor(plan.position)[None]
        self.rollouts = tensor(plan.rollouts)
        self.gdn_rollouts = tensor(plan.gdn_rollouts)
        self.routes = None if routes is None else tensor(routes)
        self.gdn_routes = self.routes if gdn_routes is None else tensor(gdn_routes)
        self.attention, self.window_attention = (
            None if attention is None else self._attention_tables(attention, made, transport)
            for attention, made in zip((plan.attention, plan.window_attention), intervals, strict=True)
        )
        self.gdn = None if plan.gdn is None else gdn_tables(plan.gdn, rank, transport=transport)
        if self.gdn is not None and self.device.type != "cpu":
            self.gdn.make_for_triton()
        self.relay = None if plan.relayout is None else relay_tables(plan.relayout)
        loss = plan.loss
        self.predictors = relay_tables(loss.hidden)
        self.edges = edge_tables(loss.predictors, loss.edge_predictor, loss.edge_target)
        self.occurrence_edge = tensor(loss.occurrence_edge)
        self.occurrence_rollout = tensor(loss.occurrence_rollout)
        self.occurrence_position = tensor(loss.occurrence_position)

    def _attention_tables(
        self, plan: AttentionPlan, intervals: Sequence[Intervals] | None, transport: str
    ) -> AttentionTables:
        made = kernel_intervals(plan, self.device) if intervals is None else intervals
        return attention_tables(plan, self.plan.rank, intervals=made, transport=transport)

    def on_device(self) -> DevicePack:
        """The pack with its tensors on the device; nothing waits for what that is doing."""
        made = copy(self)
        tables = {name: part for name, part in vars(self).items() if name not in ("plan", "group")}
        vars(made).update(zip(tables, moved(list(tables.values()), self.device), strict=True))
        return made


def device_pack(
    plan: ShardPlan,
    group=None,
    device: torch.device | str = "cpu",
    routes=None,
    gdn_routes=None,
    intervals: AttentionIntervals = (None, None),
    transport: str = "auto",
) -> DevicePack:
    """A rank's pack on its device.

    Args:
        group: process group of the CP ranks; None for a single rank.
        routes: of the rank's rows (`routes.row_routes`); None where routers choose.
        gdn_routes: of its rows in the layout of the GDN layers, where that is another one.
        intervals: by `layers.attention.kernel_intervals`; None are made here.
        transport: of exchanges, as `parallel.transport`.
    """
    return DevicePack(plan, group, device, routes, gdn_routes, intervals, transport).on_device()


def pack_of(kwargs: dict, layer: str) -> DevicePack:
    """The pack among the keywords of a layer, which ``layer`` names.

    Raises:
        ValueError: if there is none: the model was called as if it were a plain one.
    """
    pack = kwargs.get(PACK_KEYWORD)
    if pack is None:
        raise ValueError(
            f"{layer} got no packed tree. A model prepared by prepare_for_trees runs only through TreeCausalLM; to "
            "generate, or to run plain rows, save it and load the folder with transformers"
        )
    return pack
