"""The gates of `cp_engine.kernels.gates.api` in one kernel each way.

Gradients of parameters: every program adds up its rows element by element, in a fixed order, and one sum over the
programs' parts ends them, so nothing is atomic.

Shapes: n rows, H value heads, R rows of heads, D size of a head (HP, DP: padded), P programs.
"""

from __future__ import annotations

import torch

from cp_engine.kernels.shared.triton import tl, triton

ROWS = 32  # of a forward tile of the norm, and of the tiles of the input gates
BACKWARD_ROWS = 16  # the norm's backward holds five tiles in registers
WARPS = 4
# Programs that share the rows in backward: several times what fits 132 multiprocessors at once.
NORM_PROGRAMS = 4096
GATE_PROGRAMS = 512
# From here on softplus(x) is x, as in torch.
SOFTPLUS_IDENTITY = 20.0


@triton.jit
def _softplus(x, IDENTITY: tl.constexpr):
    """log(1 + e^x) to float32's precision also where e^x vanishes beside 1: slow decays live there."""
    power = tl.exp(tl.minimum(x, IDENTITY))
    shifted = 1.0 + power
    # log(1 + p) = p log(s) / (s - 1) with the s that 1 + p was rounded to (Kahan).
    added = tl.where(shifted == 1.0, 1.0, shifted - 1.0)
    logarithm = tl.where(shifted == 1.0, power, tl.log(shifted) * (power / added))
    return tl.where(x > IDENTITY, x, logarithm)


@triton.jit(do_not_specialize=["rows"])
def _gates_kernel(
    a, b, decay_rate, dt_bias, g, beta, rows,
    H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, IDENTITY: tl.constexpr,
):  # fmt: skip
    row, head = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, HP)
    live = (row < rows)[:, None] & (head < H)[None, :]
    at = row[:, None] * H + head[None, :]
    rate = tl.exp(tl.load(decay_rate + head, mask=head < H, other=0.0).to(tl.float32))
    step = tl.load(a + at, mask=live, other=0.0).to(tl.float32)
    step += tl.load(dt_bias + head, mask=head < H, other=0.0).to(tl.float32)[None, :]
    tl.store(g + at, -rate[None, :] * _softplus(step, IDENTITY), mask=live)
    strength = 1.0 / (1.0 + tl.exp(-tl.load(b + at, mask=live, other=0.0).to(tl.float32)))
    tl.store(beta + at, strength.to(beta.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _gates_backward_kernel(
    a, b, decay_rate, dt_bias, g, dg, dbeta, da, db, parts, rows,
    H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.arange(0, HP)
    inside = head < H
    rate = tl.exp(tl.load(decay_rate + head, mask=inside, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    of_rate, of_bias = tl.zeros([ROWS, HP], dtype=tl.float32), tl.zeros([ROWS, HP], dtype=tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), PROGRAMS):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        live = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * H + head[None, :]
        grad = tl.load(dg + at, mask=live, other=0.0)
        of_rate += grad * tl.load(g + at, mask=live, other=0.0)
        step = tl.load(a + at, mask=live, other=0.0).to(tl.float32) + bias[None, :]
        grad = -grad * rate[None, :] / (1.0 + tl.exp(-step))
        of_bias += grad
        tl.store(da + at, grad.to(da.dtype.element_ty), mask=live)
        strength = 1.0 / (1.0 + tl.exp(-tl.load(b + at, mask=live, other=0.0).to(tl.float32)))
        grad = tl.load(dbeta + at, mask=live, other=0.0).to(tl.float32) * strength * (1.0 - strength)
        tl.store(db + at, grad.to(db.dtype.element_ty), mask=live)
    tl.store(parts + program * (2 * H) + head, tl.sum(of_rate, 0), mask=inside)
    tl.store(parts + program * (2 * H) + H + head, tl.sum(of_bias, 0), mask=inside)


@triton.jit
def _normalised(x, D: tl.constexpr, EPS: tl.constexpr):
    """One over the root mean square of each row of a float32 tile, and the rows times it."""
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + EPS)
    return inverse, x * inverse[:, None]


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x, gate, weight, out, rows,
    D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, DP)
    live = (row < rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    opening = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    _, value = _normalised(value, D, EPS)
    value = value.to(out.dtype.element_ty).to(tl.float32) * scale[None, :]
    if ROUND:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    value *= opening / (1.0 + tl.exp(-opening))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    x, gate, weight, dout, dx, dgate, parts, rows,
    D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    program, column = tl.program_id(0), tl.arange(0, DP)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, DP], dtype=tl.float32)
    for tile in range(program, tl.cdiv(rows, ROWS), PROGRAMS):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        live = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        opening = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
        grad = tl.load(dout + at, mask=live, other=0.0).to(tl.float32)
        inverse, value = _normalised(value, D, EPS)
        sigmoid = 1.0 / (1.0 + tl.exp(-opening))
        through = grad * value  # of weight and gate alike
        dopening = through * scale[None, :] * sigmoid * (1.0 + opening * (1.0 - sigmoid))
        tl.store(dgate + at, dopening.to(dgate.dtype.element_ty), mask=live)
        sums += through * (opening * sigmoid)
        grad *= scale[None, :] * (opening * sigmoid)
        grad = inverse[:, None] * (grad - value * (tl.sum(grad * value, 1) / D)[:, None])
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=live)
    tl.store(parts + program * D + column, tl.sum(sums, 0), mask=column < D)


def _programs(rows: int, tile: int, most: int) -> int:
    return max(1, min(most, triton.cdiv(rows, tile)))


def input_gates(a, b, decay_rate, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cp_engine.kernels.gates.api.input_gates`."""
    a, b, (rows, heads) = a.contiguous(), b.contiguous(), a.shape
    g, beta = torch.empty_like(a, dtype=torch.float32), torch.empty_like(b)
    if rows:
        _gates_kernel[(triton.cdiv(rows, ROWS),)](
            a, b, decay_rate, dt_bias, g, beta, rows,
            H=heads, HP=triton.next_power_of_2(heads), ROWS=ROWS, IDENTITY=SOFTPLUS_IDENTITY, num_warps=WARPS,
        )  # fmt: skip
    return g, beta


def input_gates_backward(a, b, decay_rate, dt_bias, g, dg, dbeta) -> tuple[torch.Tensor, ...]:
    """Gradients of a, b, decay_rate and dt_bias, each in its own dtype; those of g and beta come in theirs."""
    a, b, dg, dbeta, (rows, heads) = a.contiguous(), b.contiguous(), dg.contiguous(), dbeta.contiguous(), a.shape
    da, db = torch.empty_like(a), torch.empty_like(b)
    programs = _programs(rows, ROWS, GATE_PROGRAMS)
    parts = torch.empty((programs, 2, heads), dtype=torch.float32, device=a.device)
    _gates_backward_kernel[(programs,)](
        a, b, decay_rate, dt_bias, g, dg, dbeta, da, db, parts, rows,
        H=heads, HP=triton.next_power_of_2(heads), ROWS=ROWS, PROGRAMS=programs, num_warps=WARPS,
    )  # fmt: skip
    of_rate, of_bias = parts.sum(0)
    return da, db, of_rate.to(decay_rate.dtype), of_bias.to(dt_bias.dtype)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `cp_engine.kernels.gates.api.gated_norm`."""
    x, gate, (rows, size) = x.contiguous(), gate.contiguous(), x.shape
    out = torch.empty_like(x)
    if rows:
        _norm_kernel[(triton.cdiv(rows, ROWS),)](
            x, gate, weight, out, rows,
            D=size, DP=triton.next_power_of_2(size), EPS=eps,
            ROUND=torch.promote_types(weight.dtype, x.dtype) == x.dtype, ROWS=ROWS, num_warps=WARPS,
        )  # fmt: skip
    return out


def gated_norm_backward(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, dout: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, gate and weight, each in its own dtype."""
    x, gate, dout, (rows, size) = x.contiguous(), gate.contiguous(), dout.contiguous(), x.shape
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    programs = _programs(rows, BACKWARD_ROWS, NORM_PROGRAMS)
    parts = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(programs,)](
        x, gate, weight, dout, dx, dgate, parts, rows,
        D=size, DP=triton.next_power_of_2(size), EPS=eps, ROWS=BACKWARD_ROWS, PROGRAMS=programs, num_warps=WARPS,
    )  # fmt: skip
    return dx, dgate, parts.sum(0).to(weight.dtype)
