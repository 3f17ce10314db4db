"""Packs for several data-parallel groups: no round more, no group idle, and the slowest groups take less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cp_engine.rollouts import FlatRollouts, flatten_rollouts, read_rollouts
from cp_engine.sharding import rounds
from cp_engine.sharding.cost import PRESETS
from cp_engine.sharding.forest import sorted_rows
from cp_engine.sharding.packing import Pack, deal_packs, pack_rollouts
from cp_engine.sharding.replay import RunPrices, run_prices
from cp_engine.sharding.row_trie import RowTrie
from tests.forests import Rows, random_variety
from tests.sharding.test_packing import check_packs, content, packed

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "tokens"
PRICES = run_prices(PRESETS["qwen3-8b"])
TOKENS = RunPrices(token=1, pair=0, chunk=0, fragment=0)


def cost_of(packs: list[Pack]) -> list[int]:
    return [PRICES.token * pack.tokens + PRICES.pair * pack.forest.tree_pairs for pack in packs]


def slowest(packs: list[Pack], dp: int) -> int:
    """Sum over the rounds in which packs are dealt of the dearest one's cost, in picoseconds of a step."""
    cost = dict(zip(map(id, packs), cost_of(packs), strict=True))
    dealt = deal_packs(packs, dp)
    return sum(max(cost.get(id(pack), 0) for pack in of_round) for of_round in zip(*dealt, strict=True))


def both(flat: FlatRollouts, budget: int | None, dp: int) -> tuple[list[Pack], list[Pack]]:
    """Packs for one group and for several."""
    rows = flat.token, flat.row_start, flat.group, flat.loss_mask
    return (
        pack_rollouts(*rows, max_pack_tokens=budget),
        pack_rollouts(*rows, max_pack_tokens=budget, dp=dp, dp_prices=PRICES),
    )


@pytest.mark.parametrize("seed", range(40))
def test_packs_hold_every_rollout_once_in_as_few_rounds(seed):
    rows, rng = random_variety(seed), np.random.default_rng(seed)
    coupled = rng.integers(0, len(rows.rows), len(rows.rows)) if seed % 2 else None
    mask = rows.mask(seed)
    longest = max(pack.tokens for pack in packed(rows, mask, max_pack_tokens=10**6, coupled=coupled))
    whole = int(rows.forest.rollout_length.max()) if coupled is None else longest
    for budget in (whole, whole + 5, 2 * whole, None):
        for dp in (2, 3, 7):
            before = packed(rows, mask, max_pack_tokens=budget, coupled=coupled)
            packs = packed(rows, mask, max_pack_tokens=budget, coupled=coupled, dp=dp, dp_prices=PRICES)
            check_packs(rows, packs, mask)
            assert -(-len(packs) // dp) == -(-len(before) // dp)
            assert budget is None or max(pack.tokens for pack in packs) <= budget
            if coupled is not None:
                pack_of = {r: index for index, pack in enumerate(packs) for r in pack.rollouts.tolist()}
                assert all(len({pack_of[r] for r in np.flatnonzero(coupled == n)}) == 1 for n in set(coupled))


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_rollouts_decides_nothing(seed):
    rows, rng = random_variety(seed), np.random.default_rng(seed)
    options = {"max_pack_tokens": int(rows.forest.rollout_length.max()) + 9, "dp": 3, "dp_prices": PRICES}
    order = rng.permutation(len(rows.rows))
    keys = None if rows.keys is None else [rows.keys[r] for r in order]
    shuffled = Rows([rows.rows[r] for r in order], [rows.groups[r] for r in order], rows.share, keys)
    assert content(shuffled, packed(shuffled, **options)) == content(rows, packed(rows, **options))


def trunk(leaves: int, length: int, own: int) -> Rows:
    return Rows([[0] * length + [leaf + 1] * own for leaf in range(leaves)], [0] * leaves)


def test_a_trunk_is_replayed_where_that_keeps_groups_busy():
    """A trunk of 8 with 16 leaves of 2: 40 tokens at once, or 4 x (8 + 4 x 2); with a budget of 24, 2 packs a round."""
    rows = trunk(16, 8, 2)
    assert [pack.tokens for pack in packed(rows, max_pack_tokens=None)] == [40]
    for budget in (None, 40, 24):
        packs = packed(rows, max_pack_tokens=budget, dp=4, dp_prices=TOKENS)
        assert [pack.tokens for pack in packs] == [16] * 4
    assert [pack.tokens for pack in packed(rows, max_pack_tokens=20, dp=2, dp_prices=TOKENS)] == [16] * 4
    # Sixteen rollouts make sixteen packs at most.
    assert [pack.tokens for pack in packed(rows, max_pack_tokens=None, dp=20, dp_prices=TOKENS)] == [10] * 16


def test_packs_are_priced_by_their_tokens_pairs_and_runs():
    for seed in range(20):
        rows = random_variety(seed)
        group = rows.group if rows.share == "group" else None
        order, common = sorted_rows(rows.token, rows.row_start, group, rows.share_key)
        trie = RowTrie(np.diff(rows.row_start)[order], common)
        packs = packed(rows, max_pack_tokens=int(rows.forest.rollout_length.max()) + 4)
        places = [np.flatnonzero(np.isin(order, pack.rollouts)).tolist() for pack in packs]
        by_pair = rounds.pack_costs(trie, places, RunPrices(token=10**6, pair=1, chunk=0, fragment=0))
        assert by_pair == [10**6 * pack.tokens + pack.forest.tree_pairs for pack in packs]
    assert rounds.slowest_groups(RowTrie(np.array([5, 3, 2]), np.zeros(3, np.int64)), [[0], [1], [2]], 2, TOKENS) == 7


def test_an_empty_step_and_equal_rollouts():
    nothing = np.empty(0, np.int64)
    (pack,) = pack_rollouts(nothing, np.zeros(1, np.int64), nothing, nothing, dp=2, dp_prices=PRICES)
    assert pack.tokens == 0
    ones = Rows([[token] for token in range(9)], [0] * 9)
    assert max(pack.tokens for pack in packed(ones, max_pack_tokens=None, dp=4, dp_prices=TOKENS)) == 3
    rows = Rows([[1, 2, 3]] * 4, [0] * 4)
    packs = packed(rows, max_pack_tokens=None, dp=2, dp_prices=PRICES)
    assert sum(len(pack.rollouts) for pack in packs) == 4


@pytest.mark.parametrize(("budget", "dp", "most"), [(None, 2, 0.6), (None, 4, 0.36), (1000, 4, 0.8), (600, 3, 0.97)])
def test_the_slowest_group_of_the_sample_takes_less(budget, dp, most):
    flat = flatten_rollouts(read_rollouts(ROOT / "launch" / "data" / "sample.jsonl"))
    before, after = both(flat, budget, dp)
    assert len(after) % dp == 0 and slowest(after, dp) <= most * slowest(before, dp)
    assert slowest(after, dp) <= 1.1 * sum(cost_of(after)) / dp


# Predicted time of the slowest groups over that of packs which know nothing of groups, and over the mean of the groups.
@pytest.mark.parametrize(
    ("name", "dp", "most"),
    [("toolbench_dfs", 4, 0.6), ("tau_airline", 8, 0.8), ("tau_airline_calls", 8, 0.42), ("creative_writing", 8, 0.8)],
)
def test_the_slowest_group_of_real_sets_takes_less(name, dp, most):
    path = DATA / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"the data set {name} is not in the folder shared/data/tokens beside the checkout")
    before, after = both(flatten_rollouts(read_rollouts(path)), 32_768, dp)
    assert -(-len(after) // dp) == -(-len(before) // dp) and len(after) % dp == 0
    assert slowest(after, dp) <= most * slowest(before, dp)
    assert slowest(after, dp) <= 1.06 * sum(cost_of(after)) / dp
