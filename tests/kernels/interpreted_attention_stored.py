"""Cases of the five-product backward in Triton's interpreter; `test_attention_triton.py` runs this file."""

import tests.kernels.interpreted  # noqa: F401  isort: skip

from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward, prepare
from cp_engine.kernels.attention import triton as backend
from cp_engine.kernels.attention.triton import primitives, stored_pass
from cp_engine.kernels.attention.triton.blocks import build_blocks
from cp_engine.kernels.attention.triton.primitives import Sizes
from cp_engine.kernels.attention.triton.stored_pass import Stored
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.forest import build_forest
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
from tests.kernels.interpreted_attention import BOUND, before_nan, deep_forest, specialisation, whole

NAMES = ("dq", "dk", "dv")
TIGHT = 2 * 2 * 32 * 32 * 4 * 5  # bytes of five blocks of both of two packs
SMALL = Stored(scores=Sizes(32, 16, 4, 1, held=2), product=Sizes(16, 32, 4, 1), workspace=TIGHT)


@pytest.fixture(autouse=True)
def small_and_in_use(monkeypatch):
    """The backend takes this backward on a CPU and in float32 too, with small tiles and many waves."""
    monkeypatch.setattr(backend, "stores", lambda q: True)
    monkeypatch.setattr(stored_pass, "IN_USE", SMALL)


def run(x: Tensors, keys: Tensors, intervals: Intervals, accumulate_q: bool = False, accumulate_kv: bool = False):
    call = {"intervals": intervals, "scale": x.scale, "backend": "triton"}
    with poisoned_memory():
        out, lse = attention(x.q, keys.k, keys.v, **call)
        given = (x.q, keys.k, keys.v, out, lse, x.dout)
        grads = attention_backward(*given, **call, accumulate_q=accumulate_q, accumulate_kv=accumulate_kv)
    return dict(zip(NAMES, grads, strict=True))


def check(forest, x: Tensors, window: int | None = None) -> None:
    got, truth = run(x, x, whole(forest, window)), dense_attention(visible(forest, window), x)
    for name in NAMES:
        assert relative_error(got[name], truth[name]) < BOUND, name


@pytest.mark.parametrize(
    ("heads", "size", "described", "workspace"),
    [
        ((4, 2), 16, True, 1 << 30),
        ((4, 2), 16, True, TIGHT),
        ((3, 1), 20, True, TIGHT),  # 3 heads in 32 rows leave two over, 20 is no power of two: rows through pointers
        ((2, 2), 32, False, TIGHT),
        ((34, 1), 16, True, TIGHT),  # 17 packs of 2 heads; a row tile has more blocks than the workspace
    ],
    ids=["one wave", "waves", "share 3", "pointers", "several packs"],
)
def test_equals_dense_attention(monkeypatch, heads, size, described, workspace):
    monkeypatch.setattr(primitives, "DESCRIPTORS", described)
    monkeypatch.setattr(stored_pass, "IN_USE", replace(SMALL, workspace=workspace))
    forest = deep_forest() if heads[0] < 8 else random_variety(4).forest
    x = random_tensors(forest.tokens, heads, size, 1, torch.float32)
    check(forest, x)
    waves = len(stored_pass.blocks_of(x.q, heads[1], whole(forest)).waves)
    assert (waves == 1) == (workspace > TIGHT)


def test_blocks_of_two_mask_words(monkeypatch):
    """Blocks of 128 keys in steps of 64."""
    monkeypatch.setattr(stored_pass, "IN_USE", Stored(Sizes(64, 64, 4, 1), Sizes(32, 128, 4, 1)))
    forest = deep_forest()
    check(forest, random_tensors(forest.tokens, (4, 2), 16, 2, torch.float32))


@pytest.mark.parametrize("window", [2, 45])
def test_sliding_windows(window):
    for forest in (deep_forest(), random_variety(4).forest):
        check(forest, random_tensors(forest.tokens, (4, 2), 16, window, torch.float32), window)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_what_lies_behind_the_last_row_is_not_used(heads):
    """p and ds of rows beyond the end are stored too and multiply rows of zeros: they have to be finite."""
    forest = build_forest(np.arange(150), np.array([0, 150]))
    x = random_tensors(forest.tokens, heads, 16, 5, torch.float32)
    ended, truth = Tensors(*map(before_nan, vars(x).values())), dense_attention(visible(forest), x)
    call = {"intervals": whole(forest), "scale": x.scale, "backend": "triton"}
    out, lse = (before_nan(made) for made in attention(ended.q, ended.k, ended.v, **call))
    with poisoned_memory():
        grads = attention_backward(ended.q, ended.k, ended.v, out, lse, ended.dout, **call)
    for name, got in zip(NAMES, grads, strict=True):
        assert relative_error(got, truth[name]) < BOUND, name


def test_many_tiny_segments():
    for seed in range(3):
        forest = random_rows(seed, rows=20, longest=20).forest if seed else random_variety(1).forest
        check(forest, random_tensors(forest.tokens, (4, 2), 16, seed, torch.float32))


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_keys_of_an_exchange(exchange):
    """Rows that see nothing, keys that nobody sees, accumulated gradients: the same as the reference."""
    forest = random_variety(7).forest
    layout = random_layout(forest, 7, 3)
    for rank in range(3):
        plan = attention_plan(forest, layout, rank, exchange)
        for part in [plan.gather.intervals] if plan.gather else plan.ring.intervals:
            intervals = Intervals.from_arrays(part)
            x = random_tensors(part.rows, (4, 2), 16, rank, torch.float32)
            keys = random_tensors(intervals.key_end + 3, (4, 2), 16, 9, torch.float32)
            got = run(x, keys, intervals, accumulate_q=True, accumulate_kv=True)
            wide, wide_keys = x.to(torch.float64), keys.to(torch.float64)
            out, lse = attention(wide.q, wide_keys.k, wide_keys.v, intervals, scale=x.scale)
            grads = attention_backward(wide.q, wide_keys.k, wide_keys.v, out, lse, wide.dout, intervals, scale=x.scale)
            for name, truth in zip(NAMES, grads, strict=True):
                assert relative_error(got[name], truth) < BOUND, (rank, name)


def test_blocks_hold_every_visible_pair_once():
    forest = deep_forest()
    intervals, mask = whole(forest), visible(forest).numpy()
    for most, multiple in ((10**6, 1), (7, 1), (30, 2)):
        made = build_blocks(intervals, 16, 32, most, multiple)
        seen = np.zeros((mask.shape[0] + 16, mask.shape[1] + 32), np.int64)
        tiles = made.key_entries[:, :2].unique(dim=0)
        ends = tiles.sum(1)
        assert (tiles[1:, 0] == ends[:-1]).all() and tiles[0, 0] == 0 and ends[-1] == forest.tokens
        assert (tiles[:, 1] < 32).sum() > 1  # some are short
        for tile, slot, full, blocks, first_mask in made.row_entries.tolist():
            for number in range(blocks):
                place = int(made.places[slot + number])
                assert place in tiles[:, 0]
                bits = np.ones((16, 32), np.int64)
                if number >= full:
                    word = made.words[first_mask + number - full, 0].numpy()
                    bits = word[:, None] >> np.arange(32) & 1
                seen[tile * 16 :, place:][:16, :32] += bits
        assert (seen[: len(mask), : len(mask)] == mask).all()
        assert sum(wave.row_entries[1] for wave in made.waves) == len(made.row_entries)
        assert made.blocks == int(made.key_entries[:, 3].sum()) and made.most <= max(most, made.row_entries[:, 3].max())


def test_a_lost_block_shows():
    """Planted fault: a key tile's first item is read twice, its second one never."""
    forest = deep_forest()
    x = random_tensors(forest.tokens, (4, 2), 16, 4, torch.float32)
    intervals = whole(forest)
    made = stored_pass.blocks_of(x.q, 2, intervals)
    made.items[1] = made.items[0]
    got, truth = run(x, x, intervals), dense_attention(visible(forest), x)
    assert relative_error(got["dq"], truth["dq"]) < BOUND
    assert min(relative_error(got[name], truth[name]) for name in ("dk", "dv")) > 1e-2


def test_runs_are_equal_to_the_bit_on_any_slice_of_heads():
    forest = random_variety(4).forest
    x = random_tensors(forest.tokens, (6, 6), 16, 4, torch.float32)
    sliced = Tensors(*(part[:, 2:4] for part in (x.q, x.k, x.v, x.dout)))
    copied = Tensors(*(part[:, 2:4].contiguous() for part in (x.q, x.k, x.v, x.dout)))
    got, truth = (run(given, given, whole(forest)) for given in (sliced, copied))
    assert all(torch.equal(got[name], truth[name]) for name in NAMES)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_zero_rows(queries, keys):
    x, y = random_tensors(queries, (4, 2), 16, 0, torch.float32), random_tensors(keys, (4, 2), 16, 0, torch.float32)
    got = run(x, y, Intervals.from_arrays(blind(queries)))
    assert got["dq"].shape == x.q.shape and not any(got[name].any() for name in NAMES)


def test_fifty_forests_need_no_new_compilation(monkeypatch):
    """One forest warms up. Kernels are not run, their launches are recorded."""
    seen, warm = set(), set()

    def record(module, name):
        kernel = getattr(module, name)

        class Recorded:
            def __getitem__(self, _grid):
                return lambda *arguments, **options: seen.add((name, specialisation(kernel, arguments, options)))

        monkeypatch.setattr(module, name, Recorded())

    for name in ("_scores_kernel", "_key_products_kernel"):
        record(stored_pass, name)
    monkeypatch.setattr(stored_pass, "IN_USE", Stored())
    for seed in range(51):
        forest = random_rows(seed, rows=10 + 3 * seed, longest=(1, 7, 30)[seed % 3]).forest
        x = random_tensors(forest.tokens, (8, 2), 256, seed, torch.bfloat16)
        given = (x.q, x.k, x.v, x.q, torch.zeros(forest.tokens, 8), x.dout)
        stored_pass.backward(*given, whole(forest), x.scale, False, False)
        warm = warm or set(seen)
    assert seen == warm and len(warm) == 2


def test_rows_that_see_nothing_and_keys_that_nobody_sees():
    """Rows 0, 3 and 4 see nothing, keys 0 and 7 on are seen by no one; and a call in which nobody sees anything."""
    arrays, mask = partly_blind()
    x, keys = random_tensors(8, (4, 2), 16, 0, torch.float32), random_tensors(9, (4, 2), 16, 1, torch.float32)
    got = run(x, keys, Intervals.from_arrays(arrays), accumulate_kv=True)
    unseeing, unseen = ~mask.any(1), ~mask.any(0)
    assert (got["dq"][unseeing] == 0).all() and (got["dk"][unseen] == 0).all() and (got["dv"][unseen] == 0).all()
    truth = dense_attention(mask[~unseeing], Tensors(x.q[~unseeing], keys.k, keys.v, x.dout[~unseeing]))
    for name in NAMES:
        mine = got["dq"][~unseeing] if name == "dq" else got[name]
        assert relative_error(mine, truth[name]) < BOUND, name
    got = run(x, keys, Intervals.from_arrays(blind(8)))
    assert not any(got[name].any() for name in NAMES)


def test_prepared_blocks_are_those_that_calls_use(monkeypatch):
    forest = random_variety(4).forest
    intervals = whole(forest)
    prepare(intervals, query_heads=4, kv_heads=2, size=16, dtype=torch.float32, backend="triton")
    monkeypatch.setattr(stored_pass, "build_blocks", None)
    x = random_tensors(forest.tokens, (4, 2), 16, 4, torch.float32)
    got, truth = run(x, x, intervals), dense_attention(visible(forest), x)
    assert all(relative_error(got[name], truth[name]) < BOUND for name in NAMES)


def test_groups_of_heads_and_dtypes_of_results():
    """A group's rows are slices, its blocks are its own; float32 sums where asked for, else rounded once."""
    forest = random_variety(4).forest
    x = random_tensors(forest.tokens, (4, 2), 16, 4, torch.float32)
    truth, found = run(x, x, whole(forest)), []
    for kv in range(2):
        query, kv = slice(2 * kv, 2 * kv + 2), slice(kv, kv + 1)
        group = Tensors(x.q[:, query], x.k[:, kv], x.v[:, kv], x.dout[:, query])
        found.append(run(group, group, whole(forest)))
    for name in NAMES:
        # Other waves, other sums of waves: not bit by bit.
        assert relative_error(torch.cat([part[name] for part in found], 1), truth[name]) < BOUND, name
    half = x.to(torch.float16)
    rounded, q_wide, kv_wide = (
        run(half, half, whole(forest), *wide) for wide in ((False, False), (True, False), (False, True))
    )
    for name in NAMES:
        wide = q_wide if name == "dq" else kv_wide
        assert wide[name].dtype == torch.float32 and rounded[name].dtype == torch.float16
        assert torch.equal(wide[name].half(), rounded[name]), name
