"""Sliding windows along the path: pieces, the reference kernel and cuDNN's mask, with all exchanges' intervals."""

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward, auto, cudnn
from cp_engine.kernels.attention.pieces import cut, row_pieces, tile_starts, transposed
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.intervals import RowIntervals, visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import random_layout, random_variety
from tests.kernels.attention_oracle import Tensors, dense_attention, random_tensors, relative_error, visible

NAMES = ("out", "lse", "dq", "dk", "dv")
WINDOWS = (1, 2, 7, 20, 1000)


def arrays_of(forest, window) -> RowIntervals:
    return visible_intervals(forest, contiguous_layout(forest, 1), 0, window)


def run(x: Tensors, keys: Tensors, intervals: Intervals) -> dict[str, torch.Tensor]:
    out, lse = attention(x.q, keys.k, keys.v, intervals, scale=x.scale)
    grads = attention_backward(x.q, keys.k, keys.v, out, lse, x.dout, intervals, scale=x.scale)
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("window", WINDOWS)
def test_reference_equals_dense_attention_by_positions(window):
    for seed in range(9):
        forest = random_variety(seed).forest
        x = random_tensors(forest.tokens, (4, 2), 8, seed)
        intervals = Intervals.from_arrays(arrays_of(forest, window))
        got, truth = run(x, x, intervals), dense_attention(visible(forest, window), x)
        # A row that sees itself alone has neither dq nor dk: design section 10 measures them against 1e-3 of dv.
        least = 1e-3 * truth["dv"].abs().max()
        for name in NAMES:
            error = (got[name] - truth[name]).abs().max() / truth[name].abs().max().maximum(least)
            assert error < 1e-12, (seed, name)


@pytest.mark.parametrize("exchange", ["gather", "ring", "ulysses"])
def test_every_exchange_sums_to_dense_attention(exchange):
    """Out and lse of a rank's parts merged, gradients of the parts added, against dense attention by positions."""
    for seed, window in ((3, 2), (7, 5), (10, 9), (13, 4)):
        forest = random_variety(seed).forest
        layout = random_layout(forest, seed, 3)
        x = random_tensors(forest.tokens, (4, 2), 8, seed)
        truth = dense_attention(visible(forest, window), x)
        found = {name: torch.zeros_like(truth[name]) for name in NAMES}
        for rank in range(3):
            for rows, keys, part in exchanged(forest, layout, rank, exchange, window):
                lse = truth["lse"].new_full((part.rows, 4), 0.0)
                mine = Tensors(*(blank(t, part.rows, rows) for t in (x.q, x.k, x.v, x.dout)))
                lse[: len(rows)] = truth["lse"][rows]
                out, part_lse = attention(mine.q, x.k[keys], x.v[keys], part, scale=x.scale)
                weight = (part_lse - lse).exp()[: len(rows), :, None]
                found["out"][rows] += out[: len(rows)] * weight
                found["lse"][rows] += weight[..., 0]
                final = blank(truth["out"], part.rows, rows)
                dq, dk, dv = attention_backward(
                    mine.q, x.k[keys], x.v[keys], final, lse, mine.dout, part, scale=x.scale
                )
                found["dq"][rows] += dq[: len(rows)]
                found["dk"].index_add_(0, keys, dk)
                found["dv"].index_add_(0, keys, dv)
            if exchange == "ulysses":
                break
        assert (found["lse"] - 1).abs().max() < 1e-12  # the parts' shares of each row's softmax
        for name in ("out", "dq", "dk", "dv"):
            assert relative_error(found[name], truth[name]) < 1e-12, (seed, name)


def blank(x: torch.Tensor, rows: int, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of a rank, a padding row of an empty rank included."""
    made = x.new_zeros((rows, *x.shape[1:]))
    made[: len(tokens)] = x[tokens]
    return made


def exchanged(forest, layout, rank, exchange, window):
    """(tokens of the query rows, tokens of the key rows, intervals) of each of a rank's kernel calls."""
    plan = attention_plan(forest, layout, rank, exchange, window)
    local = torch.as_tensor(layout.rank_tokens(rank))
    if exchange == "gather":
        rows = np.concatenate([layout.rank_tokens(rank), [-1] * (not len(local)), plan.fetch.recv_tokens])
        keys = torch.as_tensor(rows.astype(np.int64)[plan.gather.key_order])
        yield local, keys, Intervals.from_arrays(plan.gather.intervals)
    elif exchange == "ring":
        split = np.split(plan.fetch.recv_tokens, np.cumsum(plan.fetch.moves.recv_counts)[:-1])
        split[rank] = layout.rank_tokens(rank)
        for keys, part in zip(split, plan.ring.intervals, strict=True):
            yield local, torch.as_tensor(keys), Intervals.from_arrays(part)
    else:
        everything = torch.arange(forest.tokens)
        yield everything, everything, Intervals.from_arrays(plan.ulysses.intervals)


@pytest.mark.parametrize("window", WINDOWS)
def test_pieces_from_both_axes_hold_the_same_pairs(window):
    for seed in range(9):
        forest = random_variety(seed).forest
        mask = visible(forest, window).numpy()
        pieces = row_pieces(Intervals.from_arrays(arrays_of(forest, window)))
        starts = tile_starts(len(mask), 4), tile_starts(len(mask), 4, pieces)
        for made in (pieces, *(cut(pieces, one)[0] for one in starts)):
            assert (painted(made, mask.shape) == mask).all() and made.pairs.sum() == mask.sum()
        flipped = transposed(pieces)
        assert (painted(flipped, mask.T.shape) == mask.T).all() and flipped.pairs.sum() == mask.sum()


def painted(pieces, shape) -> np.ndarray:
    """How many pieces hold each pair."""
    found = np.zeros(shape, np.int64)
    for first, length, lo, hi, lo_step, hi_step in zip(*vars(pieces).values(), strict=True):
        for step in range(length):
            assert lo + lo_step * step < hi + hi_step * step
            found[first + step, lo + lo_step * step : hi + hi_step * step] += 1
    return found


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
def test_ends_of_cudnn_are_the_intervals_of_each_row(window):
    for seed in range(6):
        forest = random_variety(seed).forest
        arrays = arrays_of(forest, window)
        intervals = Intervals.from_arrays(arrays)
        ends = cudnn.interval_ends(intervals).numpy()
        assert (ends[0] == 0).all() and (np.diff(ends[1:], axis=0) >= 0).all()
        for row in range(arrays.rows):
            pairs = ends[1:, row].reshape(-1, 2).tolist()
            assert [(lo, hi) for lo, hi in pairs if lo < hi] == arrays.of_row(row), (seed, row)
        assert auto.mean_keys(intervals) * arrays.rows == pytest.approx(arrays.pairs())


def test_a_window_that_forgets_to_slide_shows():
    """Planted fault: lower ends stay where they are in a run's first row."""
    forest = random_variety(7).forest
    arrays = arrays_of(forest, 5)
    x = random_tensors(forest.tokens, (2, 1), 8, 0)
    still = RowIntervals(**(vars(arrays) | {"slide": np.zeros_like(arrays.slide)}))
    got, truth = run(x, x, Intervals.from_arrays(still)), dense_attention(visible(forest, 5), x)
    assert min(relative_error(got[name], truth[name]) for name in NAMES) > 1e-2
