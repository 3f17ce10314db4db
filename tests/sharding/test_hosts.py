"""Links between hosts: what rows take on them, and that layouts and exchanges are chosen for where ranks stand."""

from types import SimpleNamespace

import numpy as np
import pytest

from cp_engine.scaling import synthetic_rollouts
from cp_engine.sharding.cost import H200, PRESETS
from cp_engine.sharding.exchange_choice import choose_exchange
from cp_engine.sharding.forest import build_forest
from cp_engine.sharding.gdn_layout import place_layers
from cp_engine.sharding.hosts import ONE_HOST, Hosts, link_rows, shared_links
from cp_engine.sharding.layer_time import step_time
from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.measure import Survey, between_ranks
from cp_engine.sharding.search import balanced_layout
from tests.forests import random_variety

DENSE, HYBRID = PRESETS["qwen3-8b"], PRESETS["qwen3-next-80b-a3b"]
PAIRS = Hosts(ranks=2)


def trunk_with_leaves(trunk: int, leaves: int, length: int):
    """One trunk under leaves of their own tokens."""
    rows = [np.concatenate([np.zeros(trunk, np.int64), np.full(length, 1 + leaf)]) for leaf in range(leaves)]
    return build_forest(np.concatenate(rows), np.arange(leaves + 1) * (trunk + length))


def test_rows_between_hosts_count_as_more_rows_of_a_link_inside_one():
    rows = np.zeros((4, 4), np.int64)
    rows[1, 0], rows[2, 0], rows[3, 0], rows[3, 2] = 100, 200, 300, 7
    assert PAIRS.crosses(4).tolist() == [[i // 2 != j // 2 for j in range(4)] for i in range(4)]
    figures = SimpleNamespace(rows_in=rows.sum(1), rows_out=rows.sum(0))
    link = link_rows(figures, rows, PAIRS, H200)
    dear = [x * PAIRS.mib // H200.pull_mib for x in (200, 300, 500)]
    assert link.rows_in.tolist() == [0, 100, dear[0], dear[1]]
    assert link.rows_out.tolist() == [dear[2], 0, 7, 0]  # rank 0 sends 500 rows through its adapter
    assert link.latency == PAIRS.latency + 2 * PAIRS.peer_latency
    near = link_rows(figures, rows, ONE_HOST, H200)
    assert near.rows_in.tolist() == [0, 100, 200, 307] and near.rows_out.tolist() == [600, 0, 7, 0]
    assert near.latency == H200.pull_latency


def test_exchanges_with_everybody_share_the_adapter():
    assert shared_links(H200, Hosts(ranks=4), 4) is H200
    far = shared_links(H200, PAIRS, 8)
    assert far.all_to_all_mib == PAIRS.mib * 6 // 8
    assert far.all_to_all_latency == PAIRS.latency + 6 * PAIRS.peer_latency
    assert far.tile_forward == H200.tile_forward


@pytest.mark.parametrize("model", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_on_one_host_nothing_changes(model):
    for seed in range(4):
        forest = random_variety(seed).forest
        for hosts in (ONE_HOST, Hosts(ranks=4), Hosts(ranks=9)):
            placed = place_layers(forest, 4, model=model, hosts=hosts)
            known = place_layers(forest, 4, model=model)
            assert np.array_equal(placed.layout.piece_start, known.layout.piece_start)
            assert np.array_equal(placed.layout.piece_rank, known.layout.piece_rank) and placed.step == known.step


def test_the_search_compares_what_hosts_take():
    """No layout that it looked at would be faster on these hosts, and its time is that of its own layout."""
    forest = trunk_with_leaves(4096, 24, 700)
    for hosts in (PAIRS, Hosts(ranks=4)):
        placed = balanced_layout(forest, 8, model=DENSE, hosts=hosts)
        survey = Survey(placed.forest)
        rows = between_ranks(survey, placed.layout)
        assert (
            placed.time.step == step_time(placed.figures, DENSE, H200, hosts, rows).step == min(placed.tried.values())
        )
        near = balanced_layout(forest, 8, model=DENSE)
        survey = Survey(near.forest)
        far = step_time(near.figures, DENSE, H200, hosts, between_ranks(survey, near.layout)).step
        assert placed.time.step <= far


def test_a_trunk_that_all_hosts_read_is_dealt_out():
    """On one host it may stand on one rank, whose link all others share; between hosts that link is an adapter."""
    flat = synthetic_rollouts("one_trunk_32k")
    forest, hosts = build_forest(flat.token, flat.row_start), Hosts(ranks=8)

    def on_hosts(placed):
        rows = between_ranks(Survey(placed.forest), placed.layout)
        out = link_rows(placed.figures, rows, hosts, H200).rows_out
        return out.max() / out.mean(), step_time(placed.figures, DENSE, H200, hosts, rows).step

    uneven, slow = on_hosts(balanced_layout(forest, 64, model=DENSE))
    even, fast = on_hosts(balanced_layout(forest, 64, model=DENSE, hosts=hosts))
    assert even < 3 < uneven and 2 * fast < slow


def test_the_exchange_is_chosen_for_the_hosts():
    forest = trunk_with_leaves(4096, 24, 700)
    survey, layout = Survey(forest), contiguous_layout(forest, 8)
    near, far = (choose_exchange(survey, layout, model=DENSE, hosts=hosts).predicted for hosts in (ONE_HOST, PAIRS))
    assert all(far[name] > near[name] for name in ("gather", "ring", "ulysses"))
