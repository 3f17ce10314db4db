"""Cases of the Triton attention backend in Triton's interpreter; `test_attention_triton.py` runs this file."""

import tests.kernels.interpreted  # noqa: F401  isort: skip

import inspect

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward, prepare
from cp_engine.kernels.attention.triton import backward_pass, forward_pass, primitives, tiles
from cp_engine.kernels.attention.triton.primitives import Sizes
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.intervals import visible_intervals
from cp_engine.sharding.layout import contiguous_layout
from tests.forests import random_layout, random_rows, random_variety
from tests.kernels.attention_oracle import (
    Tensors,
    blind,
    dense_attention,
    partly_blind,
    poisoned_memory,
    random_tensors,
    relative_error,
    visible,
)

NAMES = ("out", "lse", "dq", "dk", "dv")
BOUND = 2e-6  # float32; errors of 1e-7 to 5e-7 are seen


def whole(forest, window: int | None = None) -> Intervals:
    return Intervals.from_arrays(visible_intervals(forest, contiguous_layout(forest, 1), 0, window))


def run(x: Tensors, keys: Tensors, intervals: Intervals, accumulate: bool = False) -> dict[str, torch.Tensor]:
    with poisoned_memory():
        out, lse = attention(x.q, keys.k, keys.v, intervals, scale=x.scale, backend="triton")
        grads = attention_backward(
            x.q,
            keys.k,
            keys.v,
            out,
            lse,
            x.dout,
            intervals,
            scale=x.scale,
            backend="triton",
            accumulate_q=accumulate,
            accumulate_kv=accumulate,
        )
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def deep_forest():
    """A trunk of full tiles that rows leave at many places, and trees of their own."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, 150)
    rows = [np.concatenate([trunk[: rng.integers(80, 150)], rng.integers(0, 50, 40)]) for _ in range(3)]
    rows += [rng.integers(50, 99, 30) for _ in range(2)]
    return build_forest(np.concatenate(rows), np.cumsum([0] + [len(row) for row in rows]))


@pytest.mark.parametrize(
    ("sizes", "heads", "size", "apart", "described"),
    [
        (Sizes(32, 16, 4, 1, held=2), (4, 2), 16, False, True),
        (Sizes(64, 128, 4, 1, held=1), (3, 1), 20, True, True),  # 3 heads in 64 rows leave one over; two words a row
        (Sizes(32, 32, 4, 1), (2, 2), 64, True, True),
        (Sizes(16, 64, 4, 1), (34, 1), 32, False, False),  # 17 packs of 2 heads; listed tiles are walked in parts
    ],
    ids=["gqa", "share 3", "mha", "several packs"],
)
def test_equals_dense_attention(monkeypatch, sizes, heads, size, apart, described):
    """Tiles that fit nothing; dk and dv in one kernel or apart; loads by descriptors (where they can) or pointers."""
    monkeypatch.setattr(primitives, "FLOAT32", sizes)
    monkeypatch.setattr(primitives, "DESCRIPTORS", described)
    monkeypatch.setattr(backward_pass, "makes_apart", lambda *_: apart)
    forest = deep_forest() if heads[0] < 8 else random_variety(4).forest
    x = random_tensors(forest.tokens, heads, size, 1, torch.float32)
    got, truth = run(x, x, whole(forest)), dense_attention(visible(forest), x)
    for name in NAMES:
        assert relative_error(got[name], truth[name]) < BOUND, name


def test_many_tiny_segments():
    for seed in range(5):
        forest = random_rows(seed, rows=20, longest=20).forest if seed else random_variety(1).forest
        x = random_tensors(forest.tokens, (4, 2), 16, seed, torch.float32)
        got, truth = run(x, x, whole(forest)), dense_attention(visible(forest), x)
        for name in NAMES:
            assert relative_error(got[name], truth[name]) < BOUND, (seed, name)


@pytest.mark.parametrize("window", [2, 6, 45])
def test_sliding_windows(window):
    """Bands narrower and wider than a tile, of one path and across branch points."""
    for forest in (deep_forest(), random_variety(4).forest):
        x = random_tensors(forest.tokens, (4, 2), 16, window, torch.float32)
        got, truth = run(x, x, whole(forest, window)), dense_attention(visible(forest, window), x)
        for name in NAMES:
            assert relative_error(got[name], truth[name]) < BOUND, name


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_keys_of_an_exchange(exchange, window):
    """Query rows of one rank against the gathered keys, and against each peer's: the same as the reference."""
    forest = random_variety(7).forest
    layout = random_layout(forest, 7, 3)
    for rank in range(3):
        plan = attention_plan(forest, layout, rank, exchange, window)
        for part in [plan.gather.intervals] if plan.gather else plan.ring.intervals:
            intervals = Intervals.from_arrays(part)
            x = random_tensors(part.rows, (4, 2), 16, rank, torch.float32)
            keys = random_tensors(intervals.key_end + 3, (4, 2), 16, 9, torch.float32)
            got = run(x, keys, intervals)
            wide, wide_keys = x.to(torch.float64), keys.to(torch.float64)
            out, lse = attention(wide.q, wide_keys.k, wide_keys.v, intervals, scale=x.scale)
            grads = attention_backward(wide.q, wide_keys.k, wide_keys.v, out, lse, wide.dout, intervals, scale=x.scale)
            for name, truth in zip(NAMES, (out, lse, *grads), strict=True):
                seen = truth.isfinite()
                assert torch.equal(got[name].isfinite(), seen), name
                assert relative_error(got[name][seen], truth[seen]) < BOUND, (rank, name)


@pytest.mark.parametrize("described", [True, False])
def test_slices_of_heads(monkeypatch, described):
    """Heads 2 and 3 of 6, and tensors whose heads do not lie side by side: the bits of contiguous copies."""
    monkeypatch.setattr(primitives, "DESCRIPTORS", described)
    forest = random_variety(4).forest
    intervals = whole(forest)
    x = random_tensors(forest.tokens, (6, 6), 16, 4, torch.float32)
    sliced = Tensors(*(part[:, 2:4] for part in (x.q, x.k, x.v, x.dout)))
    apart = Tensors(*(part[:, 2:4].mT.contiguous().mT for part in (x.q, x.k, x.v, x.dout)))
    copied = Tensors(*(part[:, 2:4].contiguous() for part in (x.q, x.k, x.v, x.dout)))
    assert primitives.adjoining(sliced.q) is sliced.q and primitives.adjoining(apart.q) is not apart.q
    truth = run(copied, copied, intervals)
    for given in (sliced, apart):
        got = run(given, given, intervals)
        assert all(torch.equal(got[name], truth[name]) for name in NAMES)


def before_nan(x: torch.Tensor) -> torch.Tensor:
    """The same rows; what lies behind the last one in memory is NaN."""
    longer = x.new_full((x.shape[0] + 40, *x.shape[1:]), torch.nan)
    longer[: x.shape[0]] = x
    return longer[: x.shape[0]]


@pytest.mark.parametrize("described", [True, False])
def test_what_lies_behind_the_last_row_is_not_used(monkeypatch, described):
    """Tiles that reach beyond the end, owned and walked, by descriptors and by pointers, held and not."""
    monkeypatch.setattr(primitives, "DESCRIPTORS", described)
    forest = random_variety(4).forest
    assert forest.tokens % 8
    x = random_tensors(forest.tokens, (4, 2), 16, 5, torch.float32)
    ended, truth = Tensors(*map(before_nan, vars(x).values())), dense_attention(visible(forest), x)
    for held in (0, 2):
        monkeypatch.setattr(primitives, "FLOAT32", Sizes(32, 16, 4, 1, held))
        out, lse = attention(ended.q, ended.k, ended.v, whole(forest), scale=x.scale, backend="triton")
        given = ended.q, ended.k, ended.v, before_nan(out), before_nan(lse), ended.dout
        with poisoned_memory():
            grads = attention_backward(*given, whole(forest), scale=x.scale, backend="triton")
        for name, got in zip(NAMES, (out, lse, *grads), strict=True):
            assert relative_error(got, truth[name]) < BOUND, (held, name)


def specialisation(kernel, arguments, options) -> tuple:
    """What Triton compiles a launch for: types, values of constants, and of other numbers whether they are 1 or
    divisible by 16, unless the kernel asks not to."""
    names = inspect.signature(kernel.fn).parameters
    free = kernel.kwargs.get("do_not_specialize", ())
    found = [tuple(sorted(options.items()))]
    for name, value in zip(names, arguments, strict=False):
        value = getattr(value, "base", value)  # a descriptor's tensor
        if isinstance(value, torch.Tensor):
            found.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in free:
            found.append((value == 1, value % 16 == 0))
        else:
            found.append(type(value))
    return tuple(found)


@pytest.mark.parametrize("size", [128, 256])
def test_fifty_forests_need_no_new_compilation(monkeypatch, size):
    """A forest of long and one of short segments warm up. Kernels are not run, their launches are recorded."""
    seen = set()

    def record(module, name):
        kernel = getattr(module, name)

        class Recorded:
            def __getitem__(self, _grid):
                return lambda *arguments, **options: seen.add((name, specialisation(kernel, arguments, options)))

        monkeypatch.setattr(module, name, Recorded())

    record(forward_pass, "_forward_kernel")
    for name in ("_dq_kernel", "_dkdv_kernel"):
        record(backward_pass, name)
    for seed in range(52):
        rows = random_rows(seed, rows=10 + 3 * seed, longest=(1, 7, 30)[seed % 3])
        forest = long_forest() if seed == 0 else rows.forest
        x = random_tensors(forest.tokens, (8, 2), size, seed, torch.bfloat16)
        out, lse = attention(x.q, x.k, x.v, whole(forest), scale=x.scale, backend="triton")
        attention_backward(x.q, x.k, x.v, out, lse, x.dout, whole(forest), scale=x.scale, backend="triton")
        if seed == 1:
            warm = set(seen)
    assert seen == warm and len(warm) == (5 if size == 128 else 4)


def long_forest():
    """Long enough for borders to hold few of the pairs."""
    return build_forest(np.arange(1200), np.array([0, 1200]))


def test_rows_that_see_nothing_and_keys_that_nobody_sees():
    """Rows 0, 3 and 4 see nothing; the diagonal of run 2 starts empty; keys 0 and 7 on are seen by no one."""
    arrays, mask = partly_blind()
    x, keys = random_tensors(8, (4, 2), 16, 0, torch.float32), random_tensors(9, (4, 2), 16, 1, torch.float32)
    got = run(x, keys, Intervals.from_arrays(arrays))
    unseeing, unseen = ~mask.any(1), ~mask.any(0)
    assert (
        (got["out"][unseeing] == 0).all()
        and (got["lse"][unseeing] == -torch.inf).all()
        and (got["dq"][unseeing] == 0).all()
    )
    assert (got["dk"][unseen] == 0).all() and (got["dv"][unseen] == 0).all()
    rows = Tensors(x.q[~unseeing], keys.k, keys.v, x.dout[~unseeing])
    truth = dense_attention(mask[~unseeing], rows)
    for name in NAMES:
        mine = got[name] if name in ("dk", "dv") else got[name][~unseeing]
        assert relative_error(mine, truth[name]) < BOUND, name


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_zero_rows(queries, keys):
    x, y = random_tensors(queries, (4, 2), 16, 0, torch.float32), random_tensors(keys, (4, 2), 16, 0, torch.float32)
    got = run(x, y, Intervals.from_arrays(blind(queries)))
    assert got["out"].shape == x.q.shape and (got["out"] == 0).all() and (got["lse"] == -torch.inf).all()
    assert not any(got[name].any() for name in ("dq", "dk", "dv"))


def test_other_branches_do_not_touch_a_bit():
    forest = random_variety(4).forest
    mask, intervals = visible(forest), whole(forest)
    x = random_tensors(forest.tokens, (4, 2), 16, 4, torch.float32)
    out, lse = attention(x.q, x.k, x.v, intervals, scale=x.scale, backend="triton")
    for token in range(0, forest.tokens, 5):
        others = ~mask[token]
        changed = [part.masked_fill(others[:, None, None], 1e3) for part in (x.q, x.k, x.v)]
        out_2, lse_2 = attention(*changed, intervals, scale=x.scale, backend="triton")
        assert torch.equal(out[token], out_2[token]) and torch.equal(lse[token], lse_2[token])


def test_a_lost_mask_bit_shows():
    """Planted fault: one visible pair less in a border tile."""
    forest = random_variety(4).forest
    intervals = whole(forest)
    x = random_tensors(forest.tokens, (4, 2), 16, 4, torch.float32)
    made = tiles.tile_list(intervals, "rows", primitives.FLOAT32.rows // 2, primitives.FLOAT32.keys)
    tile, row = (made.words[:, 0] & 1).nonzero()[-1].tolist()
    made.words[tile, 0, row] -= 1
    got, truth = run(x, x, intervals), dense_attention(visible(forest), x)
    assert relative_error(got["out"], truth["out"]) > 1e-2


def test_tile_lists_are_made_once_and_hold_few_pairs():
    forest = deep_forest()
    intervals = whole(forest)
    assert tiles.tile_list(intervals, "rows", 16, 32) is tiles.tile_list(intervals, "rows", 16, 32)
    for axis in ("rows", "keys"):
        made = tiles.tile_list(intervals, axis, 16, 16)
        assert made.full_pairs + made.border_pairs < 1.45 * forest.tree_pairs
        assert made.full_pairs <= forest.tree_pairs


def test_key_tiles_begin_where_trunks_begin(monkeypatch):
    """Ten trunks of 64 tokens with 20 leaves of 5: no tile holds keys of a leaf and of the next trunk, and no trunk
    takes three tiles of 32. Leaves start no tile. With aligned tiles a list holds a tenth more pairs."""
    rows = [np.concatenate([np.full(64, trunk), np.full(5, 100 + leaf)]) for trunk in range(10) for leaf in range(20)]
    forest = build_forest(np.concatenate(rows), np.arange(201) * 69)
    made = tiles.build_tile_list(whole(forest), "keys", 32, 16)
    starts = made.entries[:, 0].sort().values
    assert starts.tolist() == [trunk * 164 + at for trunk in range(10) for at in range(0, 164, 32)]
    assert (made.entries[:, 1] == 4).sum() == 10 and made.entries[:, 1].sum() == forest.tokens
    monkeypatch.setattr(tiles, "tile_starts", lambda rows, size, pieces: np.arange(0, rows, size))
    aligned = tiles.build_tile_list(whole(forest), "keys", 32, 16)
    assert aligned.full_pairs + aligned.border_pairs > 1.1 * (made.full_pairs + made.border_pairs)


def test_prepared_lists_are_those_that_calls_use(monkeypatch):
    forest = random_variety(4).forest
    intervals = whole(forest)
    prepare(intervals, query_heads=4, kv_heads=2, size=16, dtype=torch.float32, backend="triton")
    monkeypatch.setattr(tiles, "build_tile_list", None)
    x = random_tensors(forest.tokens, (4, 2), 16, 4, torch.float32)
    got, truth = run(x, x, intervals), dense_attention(visible(forest), x)
    assert all(relative_error(got[name], truth[name]) < BOUND for name in NAMES)
