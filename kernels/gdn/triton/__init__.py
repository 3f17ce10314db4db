"""The Triton backend of the gated delta rule: our kernels, and fla's for the solve and for w and u.

The stages of `cp_engine.kernels.gdn.api` on `ChainTables`, for float32, bfloat16 and float16 rows; states, summaries
and their gradients are float32. Triton and fla are imported at the first call, so that everything imports where they
are not installed.

Shapes: n rows, Hk key heads, H value heads, K and V head sizes, N chunks, Y entries, X exits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from cp_engine.kernels.gdn import fla_stages
from cp_engine.kernels.gdn.reference import Inputs
from cp_engine.kernels.gdn.triton.chain_tables import ChainTables, chain_tables
from cp_engine.kernels.shared import packages

if TYPE_CHECKING:
    from cp_engine.kernels.gdn.triton.backward_pass import HalfAdjoint

__all__ = [
    "ChainTables",
    "Stages",
    "backward_stages",
    "chain_tables",
    "chunk_stages",
    "entry_cotangents",
    "exit_summary",
    "input_gradients",
    "kept_tensors",
    "outputs",
    "why_not",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
# Rows of states and of their gradients (1 MiB each with 32 bf16 heads of 128 x 128) that are kept while gradients cross
# ranks. Of waves beyond that the reverse pass runs twice.
KEPT_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Stages:
    """The tree-independent half of the forward, rows that lie in fragments only."""

    decay: torch.Tensor  # float32 [n, H] cumulative log2 decay inside each chunk
    ends: torch.Tensor  # float32 [N, H] that of each chunk's last token
    inverse: torch.Tensor  # [n, H, C]
    w: torch.Tensor  # [n, H, K]
    u: torch.Tensor  # [n, H, V]


def why_not(k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why this backend cannot compute with rows like k and v, in the user's words; None when it can."""
    for module, package in (("triton", "triton"), ("fla", "fla-core==" + fla_stages.VERSION)):
        if not packages.installed(module):
            return f"needs the package {module} (pip install {package})"
    if v.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a GPU, or TRITON_INTERPRET=1 before the start; v is on {v.device}"
    if k.dtype != v.dtype or v.dtype not in DTYPES:
        return f"computes float32, bfloat16 and float16; got {k.dtype} and {v.dtype}. Use reference"
    if max(k.shape[2], v.shape[2]) > LARGEST_HEAD:
        return f"needs head sizes up to {LARGEST_HEAD}; got {k.shape[2]} and {v.shape[2]}. Use reference"
    return None


def _sequences(tables: ChainTables) -> fla_stages.Sequences:
    return fla_stages.Sequences(tables.fragment_row, tables.chunk_fragment, tables.chunk_size)


def _inside(x: torch.Tensor, tables: ChainTables) -> torch.Tensor:
    """Rows in fragments, without the padding row."""
    return x[: tables.tokens].contiguous()


def _whole(x: torch.Tensor, tables: ChainTables) -> torch.Tensor:
    """Put the padding row back, zero."""
    if len(x) == tables.rows:
        return x
    return torch.cat([x, x.new_zeros((tables.rows - len(x), *x.shape[1:]))])


def chunk_stages(inputs: Inputs, tables: ChainTables, kept: tuple[torch.Tensor, ...] = ()) -> Stages:
    """The tree-independent half of the forward, once over all chunks; in the backward from what it `kept_tensors`.

    Raises:
        ValueError: if this backend cannot compute with these inputs.
    """
    from cp_engine.kernels.gdn.triton.inside import cumulative_decay, key_products

    reason = why_not(inputs.k, inputs.v)
    if reason is not None:
        raise ValueError(f"gdn backend triton {reason}")
    q, k, v, g, beta = (_inside(x, tables) for x in inputs)
    if not tables.chunks:
        empty = v.new_empty(0, v.shape[1], tables.chunk_size)
        return Stages(g.float(), g.float(), empty, k.new_empty(0, v.shape[1], k.shape[2]), v)
    at, chunks, size = _sequences(tables), tables.chunk_rows, tables.chunk_size
    if kept:
        decay, ends, inverse = kept
    else:
        decay, ends = cumulative_decay(g, tables.ancestors, chunks, size)
        if not tables.packed:
            w, u, inverse = fla_stages.solve(k, v, decay, beta, at)
            return Stages(decay, ends, inverse, w, u)
        inverse = fla_stages.inverse_of(key_products(k, decay, beta, tables.ancestors, chunks, size), k.dtype, at)
    return Stages(decay, ends, inverse, *fla_stages.w_and_u(k, v, decay, beta, inverse, at))


def kept_tensors(stages: Stages) -> tuple[torch.Tensor, ...]:
    """What is worth keeping for the backward: the solve costs three times as long as w and u from its result, and that
    takes a quarter of their bytes."""
    return stages.decay, stages.ends, stages.inverse


def exit_summary(inputs: Inputs, stages: Stages, tables: ChainTables) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 B [X, H, K, V] of every exit and A [XA, H, K, K] of the exits below an entry."""
    from cp_engine.kernels.gdn.triton.forward_pass import run_summary

    k, value_dim = _inside(inputs.k, tables), inputs.v.shape[2]
    maps = run_summary(
        k, stages.w, stages.u, stages.decay, stages.ends, tables.entries, tables.summary, tables.chunk_size
    )
    if not tables.entries:
        return maps[tables.exit_slot], maps.new_zeros((0, *maps.shape[1:3], maps.shape[2]))
    return maps[tables.exit_slot][..., :value_dim], maps[tables.through_slot][..., value_dim:]


def outputs(
    inputs: Inputs, stages: Stages, entry_states: Callable[[], torch.Tensor], tables: ChainTables
) -> torch.Tensor:
    """o [n, H, V]; rows outside fragments are zero.

    Args:
        entry_states: gives the float32 states [Y, H, K, V] at the entries; called after the trees that need none.
    """
    from cp_engine.kernels.gdn.triton.forward_pass import States, run_states
    from cp_engine.kernels.gdn.triton.output import run_output

    if not tables.chunks:
        return torch.zeros_like(inputs.v)
    q, k = _inside(inputs.q, tables), _inside(inputs.k, tables)
    new_v, out = torch.empty_like(stages.u), torch.empty_like(stages.u)
    for wave in tables.waves:
        entering = entry_states() if wave.below else None
        states = States.empty(k, stages.u, wave)
        run_states(
            k, stages.w, stages.u, stages.decay, stages.ends, entering, new_v, states, wave, tables.chunk_size,
            alone=True,
        )  # fmt: skip
        run_output(q, k, new_v, stages.decay, tables.ancestors, states.rows, out, wave, tables.chunk_size)
        del states  # before those of the next wave are made
    return _whole(out, tables)


def backward_stages(inputs: Inputs, stages: Stages, dout: torch.Tensor, tables: ChainTables) -> torch.Tensor:
    """The tree-independent half of the backward before the reverse state pass: the gradient of v' [n, H, V] through
    outputs of the same chunk; ``dout`` [n, H, V]."""
    from cp_engine.kernels.gdn.triton.inside import value_gradient_inside

    q, k, dout = (_inside(x, tables) for x in (inputs.q, inputs.k, dout))
    if not tables.chunks:
        return dout
    return value_gradient_inside(q, k, dout, stages.decay, tables.ancestors, tables.chunk_rows, tables.chunk_size)


@dataclass(frozen=True, eq=False)
class Begun:
    """What both passes over states have computed before gradients cross ranks, of the waves below entries."""

    new_v: torch.Tensor  # [n, H, V] v'
    # Rows of states [R, H, K, V], and the reverse pass; `input_gradients` takes them out.
    waves: list[tuple[torch.Tensor, HalfAdjoint] | None]


def entry_cotangents(
    inputs: Inputs,
    stages: Stages,
    dout: torch.Tensor,
    dv_local: torch.Tensor,
    entry_states: torch.Tensor,
    tables: ChainTables,
) -> tuple[torch.Tensor, Begun]:
    """Gradients of the entry states, float32 [Y, H, K, V], when the gradients of all exit states are zero; and what is
    final of the passes by then, as far as it is worth its memory.

    Args:
        dv_local: what `backward_stages` made; its memory takes the gradient of v' where that is final.
        entry_states: float32 [Y, H, K, V].
    """
    from cp_engine.kernels.gdn.triton.backward_pass import begin_adjoint
    from cp_engine.kernels.gdn.triton.forward_pass import States, run_states
    from cp_engine.kernels.gdn.triton.launch import Beside

    q, k, dout = (_inside(x, tables) for x in (inputs.q, inputs.k, dout))
    w, u, decay, ends, size = stages.w, stages.u, stages.decay, stages.ends, tables.chunk_size
    dentry = torch.zeros((tables.entries, u.shape[1], k.shape[2], u.shape[2]), dtype=torch.float32, device=k.device)
    new_v, begun, room = torch.empty_like(u), [], KEPT_ROWS
    for wave in tables.waves:
        if not wave.below:
            begun.append(None)
            continue
        # Of states and of their gradients; gradients that chains start from are float32.
        needed = 2 * wave.rows + 2 * len(wave.chains) * wave.exits
        gradients = partial(begin_adjoint, q, k, w, dout, decay, ends, dv_local, dentry, wave, size)
        if needed > room:
            gradients(keep=False)
            begun.append(None)
            continue
        room -= needed
        states = States.empty(k, u, wave)
        pass_again = partial(run_states, k, w, u, decay, ends, entry_states, new_v, states, wave, size, alone=False)
        beside = Beside(pass_again, k.device)
        half = gradients(keep=True)
        beside.join()
        begun.append((states.rows, half))
        del states, pass_again  # slots, before those of the next wave are made
    return dentry, Begun(new_v, begun)


def input_gradients(
    inputs: Inputs,
    stages: Stages,
    dout: torch.Tensor,
    dv_local: torch.Tensor,
    begun: Begun | None,
    entry_states: torch.Tensor,
    dexit: Callable[[], torch.Tensor],
    tables: ChainTables,
) -> Inputs:
    """Gradients of the inputs, each in the dtype of its input.

    Args:
        dv_local: what `backward_stages` made; its memory takes the gradient of v'.
        begun: what `entry_cotangents` made; None where it was not called.
        entry_states: float32 [Y, H, K, V].
        dexit: gives the gradients of the exit states, float32 [X, H, K, V]; called when nothing else is left to do.
    """
    from cp_engine.kernels.gdn.triton.backward_pass import run_adjoint
    from cp_engine.kernels.gdn.triton.dqkwg import Gradients, dqkwg
    from cp_engine.kernels.gdn.triton.forward_pass import States, run_states
    from cp_engine.kernels.gdn.triton.launch import Beside
    from cp_engine.kernels.gdn.triton.solve_backward import solve_backward

    if not tables.chunks:
        return Inputs(*(torch.zeros_like(x) for x in inputs))
    q, k, v, _, beta = (_inside(x, tables) for x in inputs)
    dout, size = _inside(dout, tables), tables.chunk_size
    decay, ends, w, u = stages.decay, stages.ends, stages.w, stages.u
    begun = Begun(torch.empty_like(u), [None] * len(tables.waves)) if begun is None else begun
    new_v, grads = begun.new_v, Gradients.empty(k, v.shape[1])

    def of_wave(number: int) -> None:
        """A function of its own: its states go before those of the next wave are made."""
        wave, done = tables.waves[number], begun.waves[number]
        begun.waves[number] = None
        gradients = partial(run_adjoint, q, k, w, dout, decay, ends, dv_local)
        if done is None:
            states = States.empty(k, u, wave)
            pass_again = partial(run_states, k, w, u, decay, ends, entry_states, new_v, states, wave, size, alone=False)
            # Neither the states nor their gradients need the other, and either leaves room on the multiprocessors.
            beside = Beside(pass_again, k.device)
            rows, dstates = states.rows, gradients(dexit() if wave.exits else None, wave, size)
            beside.join()
        else:
            rows, half = done
            dstates = gradients(dexit(), wave, size, half) if wave.exits else half.rows
        dqkwg(q, k, new_v, decay, tables.ancestors, rows, dout, dstates, dv_local, wave, size, grads)

    for number in sorted(range(len(tables.waves)), key=lambda number: tables.waves[number].exits):
        of_wave(number)
    dk, dv, dbeta, dg = solve_backward(
        k, v, decay, beta, stages.inverse, tables.ancestors, w, u, grads.dw, dv_local, grads.dk,
        grads.dtotal, tables.chunk_rows, size,
    )  # fmt: skip
    results = (grads.dq, dk, dv, dg, dbeta)
    return Inputs(*(_whole(grad.to(x.dtype), tables) for grad, x in zip(results, inputs, strict=True)))
