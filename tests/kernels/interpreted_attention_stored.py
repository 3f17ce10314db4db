"""Cases of the five-product backward in Triton's interpreter; `test_attention_triton.py` runs this file."""

import tests.kernels.interpreted  # noqa: F401  isort: skip

from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_engine.kernels.attention import Intervals, attention, attention_backward
from cp_engine.kernels.attention.triton import backward_pass, primitives, stored_pass
from cp_engine.kernels.attention.triton.blocks import build_blocks
from cp_engine.kernels.attention.triton.primitives import Sizes
from cp_engine.kernels.attention.triton.stored_pass import Stored
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.intervals import RowIntervals
from tests.forests import random_layout, random_rows, random_variety
from tests.kernels.attention_oracle import (
    Tensors,
    dense_attention,
    poisoned_memory,
    random_tensors,
    relative_error,
    visible,
)
from tests.kernels.interpreted_attention import BOUND, deep_forest, specialisation, whole

NAMES = ("dq", "dk", "dv")
SMALL = Stored(scores=Sizes(32, 16, 4, 1), block=32, product=Sizes(16, 16, 4, 1), workspace=1 << 30)
TIGHT = 2 * 2 * 32 * 32 * 4 * 5  # bytes of five blocks of both of two packs


def run(x: Tensors, keys: Tensors, intervals: Intervals, how: Stored, accumulate: bool = False):
    with poisoned_memory():
        out, lse = attention(x.q, keys.k, keys.v, intervals, scale=x.scale, backend="triton")
        given = (x.q, keys.k, keys.v, out, lse, x.dout)
        grads = stored_pass.backward(*given, intervals, x.scale, accumulate, accumulate, how)
    return dict(zip(NAMES, grads, strict=True))


def check(forest, x: Tensors, how: Stored, window: int | None = None) -> None:
    got, truth = run(x, x, whole(forest, window), how), dense_attention(visible(forest, window), x)
    for name in NAMES:
        assert relative_error(got[name], truth[name]) < BOUND, name


@pytest.mark.parametrize(
    ("heads", "size", "described", "workspace", "apart", "held"),
    [
        ((4, 2), 16, True, 1 << 30, False, False),
        ((4, 2), 16, True, TIGHT, True, True),
        ((3, 1), 20, True, TIGHT, True, False),  # 3 heads in 32 rows leave two over: rows through pointers
        ((2, 2), 32, False, TIGHT, False, True),
        ((34, 1), 16, True, TIGHT, True, True),  # 17 packs of 2 heads; a row tile has more blocks than the workspace
    ],
    ids=["dq on the way", "waves", "share 3", "pointers", "several packs"],
)
def test_equals_dense_attention(monkeypatch, heads, size, described, workspace, apart, held):
    monkeypatch.setattr(primitives, "DESCRIPTORS", described)
    forest = deep_forest() if heads[0] < 8 else random_variety(4).forest
    x = random_tensors(forest.tokens, heads, size, 1, torch.float32)
    check(forest, x, replace(SMALL, dq_apart=apart, held=held, workspace=workspace))


def test_blocks_of_two_mask_words_stored_without_copies():
    """Blocks of 128 keys in steps of 64, and stores through pointers where loads are copies."""
    forest = deep_forest()
    x = random_tensors(forest.tokens, (4, 2), 16, 2, torch.float32)
    sizes = {"scores": Sizes(64, 64, 4, 1), "block": 128, "product": Sizes(32, 64, 4, 1)}
    check(forest, x, replace(SMALL, **sizes, store_by_copy=False))


@pytest.mark.parametrize("window", [2, 45])
def test_sliding_windows(window):
    for forest in (deep_forest(), random_variety(4).forest):
        check(forest, random_tensors(forest.tokens, (4, 2), 16, window, torch.float32), SMALL, window)


def test_many_tiny_segments():
    for seed in range(3):
        forest = random_rows(seed, rows=20, longest=20).forest if seed else random_variety(1).forest
        check(forest, random_tensors(forest.tokens, (4, 2), 16, seed, torch.float32), replace(SMALL, workspace=TIGHT))


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
            got = run(x, keys, intervals, replace(SMALL, dq_apart=rank == 1), accumulate=True)
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
        for tile, slot, full, blocks, first_mask in made.row_entries.tolist():
            for number in range(blocks):
                place = int(made.places[slot + number])
                assert place % 32 == 0
                bits = np.ones((16, 32), np.int64)
                if number >= full:
                    word = made.words[first_mask + number - full, 0].numpy()
                    bits = word[:, None] >> np.arange(32) & 1
                seen[tile * 16 :, place:][:16, :32] += bits
        assert (seen[: len(mask), : len(mask)] == mask).all()
        assert sum(wave.row_entries[1] for wave in made.waves) == len(made.row_entries)
        assert made.blocks == int(made.key_entries[:, 2].sum()) and made.most <= max(most, made.row_entries[:, 3].max())


def test_a_lost_block_shows():
    """Planted fault: a key tile's first item is read twice, its second one never."""
    forest = deep_forest()
    x = random_tensors(forest.tokens, (4, 2), 16, 4, torch.float32)
    intervals = whole(forest)
    made = stored_pass.blocks_of(x.q, 2, intervals, SMALL)
    made.items[1] = made.items[0]
    got, truth = run(x, x, intervals, SMALL), dense_attention(visible(forest), x)
    assert relative_error(got["dq"], truth["dq"]) < BOUND
    assert min(relative_error(got[name], truth[name]) for name in ("dk", "dv")) > 1e-2


def test_runs_are_equal_to_the_bit_on_any_slice_of_heads():
    forest = random_variety(4).forest
    x = random_tensors(forest.tokens, (6, 6), 16, 4, torch.float32)
    sliced = Tensors(*(part[:, 2:4] for part in (x.q, x.k, x.v, x.dout)))
    copied = Tensors(*(part[:, 2:4].contiguous() for part in (x.q, x.k, x.v, x.dout)))
    got, truth = (run(given, given, whole(forest), SMALL) for given in (sliced, copied))
    assert all(torch.equal(got[name], truth[name]) for name in NAMES)


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_zero_rows(queries, keys):
    none = np.empty(0, np.int64)
    arrays = RowIntervals(queries, none, none, np.zeros(1, np.int64), none, none, none, none)
    x, y = random_tensors(queries, (4, 2), 16, 0, torch.float32), random_tensors(keys, (4, 2), 16, 0, torch.float32)
    got = run(x, y, Intervals.from_arrays(arrays), SMALL)
    assert got["dq"].shape == x.q.shape and not any(got[name].any() for name in NAMES)


@pytest.mark.parametrize("apart", [False, True])
def test_twenty_forests_need_no_new_compilation(monkeypatch, apart):
    """One forest warms up. Kernels are not run, their launches are recorded."""
    seen, warm = set(), set()

    def record(module, name):
        kernel = getattr(module, name)

        class Recorded:
            def __getitem__(self, _grid):
                return lambda *arguments, **options: seen.add((name, specialisation(kernel, arguments, options)))

        monkeypatch.setattr(module, name, Recorded())

    for name in ("_scores_kernel", "_dq_product_kernel", "_key_products_kernel"):
        record(stored_pass, name)
    record(backward_pass, "_statistics_kernel")
    for seed in range(20):
        forest = random_rows(seed, rows=10 + 3 * seed, longest=(1, 7, 30)[seed % 3]).forest
        x = random_tensors(forest.tokens, (8, 2), 256, seed, torch.bfloat16)
        given = (x.q, x.k, x.v, x.q, torch.zeros(forest.tokens, 8), x.dout)
        stored_pass.backward(*given, whole(forest), x.scale, False, False, Stored(dq_apart=apart))
        warm = warm or set(seen)
    assert seen == warm and len(warm) == (4 if apart else 3)


def test_the_benchmark_checks_a_trial(capsys):
    from benchmarks.attention_d256 import run_trial
    from benchmarks.attention_problem import make_problem
    from benchmarks.attention_workloads import Workload

    problem = make_problem(Workload("", 4, 2, 16), device="cpu", dtype=torch.float32, forest=random_variety(4).forest)
    call = {"intervals": problem.intervals, "scale": problem.scale, "backend": "reference"}
    out, lse = attention(problem.q, problem.k, problem.v, **call)
    run_trial(problem, "apart+held+scores=32,64,4,1+product=16,32,4,1+gib=1", out, lse)
    line = capsys.readouterr().out
    assert float(line.split("error ")[1].split()[0]) < BOUND and "equal True" in line
