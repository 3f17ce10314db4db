"""The two autograd halves of the Gated DeltaNet mixer: before states cross ranks, and after.

Forward: `_Start` fetches history rows, convolves, computes all chunks and sends off states or maps of its exits;
`_Outputs` takes the entry states that arrive. Backward the other way round: `_Outputs` sends gradients of entry states
off, `_Start` takes those of exit states. What the caller computes between the halves hides the exchange in both
directions. Nothing else does where every tree waits for a state; and a pass over states would occupy the card for so
long that the small kernels of the exchange wait for its end.

Shapes: n local rows, m fetched rows, HV value heads, V head size, C channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from cp_engine.kernels import conv
from cp_engine.kernels.gdn import api as gdn
from cp_engine.layers.gdn_crossing import ByMaps, HandedOn, crossing_of
from cp_engine.layers.gdn_tables import GdnHeads, GdnTables
from cp_engine.sharding.exchange.in_flight import InFlight
from cp_engine.sharding.exchange.kept import is_taken, kept, part_of
from cp_engine.sharding.exchange.rows import accumulation_dtype, fetch_rows_raw, send_rows_home
from cp_engine.sharding.exchange.transport import Transport


class _Pulled(NamedTuple):
    """What the first half of the backward leaves to the second."""

    x: torch.Tensor
    weight: torch.Tensor
    fetched: torch.Tensor


class _Mixing:
    """One call of the mixer: what it computes with, and what its halves hand each other."""

    def __init__(self, tables: GdnTables, transport: Transport | None, heads: GdnHeads, backend: str):
        self.tables, self.transport, self.heads, self.backend = tables, transport, heads, backend
        self.local = tables.of_backend(backend)
        self.crossing: HandedOn | ByMaps | None = None
        self.saved: tuple[torch.Tensor, ...] = ()  # history rows of other ranks [m, C], and what the backend keeps
        self.pulled: _Pulled | None = None

    def start(self, x, weight, g, beta) -> None:
        tables, transport = self.tables, self.transport

        def fetch() -> torch.Tensor:
            (rows,) = kept("exchange", lambda: (fetch_rows_raw(x, tables.history, transport),), x)
            return rows

        history = InFlight(fetch, x)
        inputs = self._inputs(x, history.wait, weight, g, beta)
        stages = gdn.chunk_stages(inputs, self.local)
        self.saved = history.wait(), *gdn.kept_tensors(stages)
        self.crossing = crossing_of(tables, self.backend, transport)
        self.crossing.start(inputs, stages)

    def finish(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """o in ``dtype``, history rows, entry states, A, and what the backend keeps of its chunks."""
        crossing, (fetched, *of_chunks) = self.crossing, self.saved
        self.crossing, self.saved = None, ()
        o, entry_states, transition = crossing.outputs()
        return o.to(dtype), fetched, entry_states, transition, *of_chunks

    def pull(self, dout, x, weight, g, beta, fetched, entry_states, transition, *of_chunks) -> None:
        inputs = self._inputs(x, lambda: fetched, weight, g, beta)
        stages = gdn.chunk_stages(inputs, self.local, of_chunks)
        back = gdn.backward_stages(inputs, stages, dout.to(inputs.v.dtype), self.local)
        self.crossing = crossing_of(self.tables, self.backend, self.transport)
        self.crossing.pull(inputs, stages, back, entry_states, transition)
        self.pulled = _Pulled(x, weight, fetched)

    def gradients(self) -> tuple[torch.Tensor, ...]:
        """Of x, weight, g and beta."""
        ((x, weight, fetched), crossing), self.pulled, self.crossing = (self.pulled, self.crossing), None, None
        tables, backend, transport = self.tables, self.backend, self.transport
        *dqkv, dg, dbeta = crossing.gradients()
        del crossing  # states above all: the convolution needs room for its rows
        part = conv.qkv_backward(x, fetched, weight, tuple(dqkv), tables.conv, self.heads.of_channels, backend)
        home = InFlight(lambda: send_rows_home(part.fetched, tables.history, transport), part.fetched)
        return conv.rows_backward(part, home.wait, x, weight, tables.conv, backend), part.weight, dg, dbeta

    def _inputs(self, x, fetched: Callable[[], torch.Tensor], weight, g, beta) -> gdn.Inputs:
        """On `triton` in the dtype of x with decays in float32, else in the accumulation dtype."""
        q, k, v = conv.qkv(x, fetched, weight, self.tables.conv, self.heads.of_channels, self.backend)
        acc = accumulation_dtype(x.dtype)
        return gdn.Inputs(q, k, v, g.to(acc), beta.to(acc))


class _Start(torch.autograd.Function):
    """The half before the exchange. What it returns is empty, and tells autograd which half comes first."""

    @staticmethod
    def forward(ctx, x, weight, g, beta, mixing: _Mixing) -> torch.Tensor:
        ctx.mixing, ctx.gate_dtypes = mixing, (g.dtype, beta.dtype)
        if not is_taken("mixer"):
            with part_of("mixer"):
                mixing.start(x, weight, g, beta)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        dx, dweight, *gates = ctx.mixing.gradients()
        return dx, dweight, *(grad.to(dtype) for grad, dtype in zip(gates, ctx.gate_dtypes, strict=True)), None


class _Outputs(torch.autograd.Function):
    """The half after the exchange. It saves for both: inputs, fetched history rows, entry states and A, and of the
    chunks what the backend keeps; backward computes the rest again and exchanges gradients only."""

    @staticmethod
    def forward(ctx, started, x, weight, g, beta, mixing: _Mixing) -> torch.Tensor:
        o, *saved = kept("mixer", lambda: mixing.finish(x.dtype), x)
        ctx.save_for_backward(x, weight, g, beta, *saved)
        ctx.mixing = mixing
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor):
        ctx.mixing.pull(dout, *ctx.saved_tensors)
        return dout.new_empty(0), None, None, None, None, None


def start_mixing(
    x: torch.Tensor,
    weight: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    tables: GdnTables,
    transport: Transport | None,
    heads: GdnHeads,
    backend: str,
) -> Callable[[], torch.Tensor]:
    """Convolution and recurrence up to where states cross ranks; the function that it returns gives the outputs
    [n, HV, V]. Activation recompute keeps what came from other ranks, or all results, so it exchanges nothing.

    Args:
        x: [n, C].
        weight: [C, W].
        g, beta: [n, HV].
        transport: None on a single rank.
        backend: ``reference`` or ``triton``.
    """
    mixing = _Mixing(tables, transport, heads, backend)
    started = _Start.apply(x, weight, g, beta, mixing)
    # Their gradients are the first half's.
    constant = [each.detach() for each in (x, weight, g, beta)]
    return lambda: _Outputs.apply(started, *constant, mixing)
