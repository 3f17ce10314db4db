"""Moving rows between two layouts of a forest, against who owns which token in each."""

import numpy as np
import pytest

from cp_engine.sharding.layout import contiguous_layout
from cp_engine.sharding.measure import Survey, measure, measure_recurrent, rows_moved
from cp_engine.sharding.plan import shard_plan
from cp_engine.sharding.relayout import relayout
from tests.forests import closed_form_rows, random_layout, random_variety


@pytest.mark.parametrize("seed", range(60))
def test_every_token_arrives_once_on_its_owner(seed):
    forest, world = random_variety(seed).forest, 1 + seed % 5
    before, after = random_layout(forest, seed, world), random_layout(forest, seed + 100, world)
    plans = [relayout(before, after, rank) for rank in range(world)]
    rows = [before.rank_tokens(rank) for rank in range(world)]  # the token in each row
    moved = rows_moved(before, after)
    sent = [np.split(rows[r][p.send_rows], np.cumsum(p.send_counts)[:-1]) for r, p in enumerate(plans)]
    for rank, plan in enumerate(plans):
        assert (plan.rows_before, plan.rows_after) == (before.rank_rows[rank], after.rank_rows[rank])
        assert plan.send_counts[rank] == plan.recv_counts[rank] == 0
        found = np.full(plan.rows_after, -1)
        found[plan.stay_to] = rows[rank][plan.stay_from]
        found[plan.recv_rows] = np.concatenate([sent[peer][rank] for peer in range(world)])
        padding = [-1] if not after.rank_token_count[rank] else []
        assert found.tolist() == after.rank_tokens(rank).tolist() + padding
        others = np.arange(world) != rank
        assert (plan.recv_counts[others] == moved[rank][others]).all() and len(plan.stay_to) == moved[rank, rank]
        back = relayout(after, before, rank)
        for ours, theirs in (("stay_from", "stay_to"), ("send_rows", "recv_rows"), ("send_counts", "recv_counts")):
            assert (getattr(plan, ours) == getattr(back, theirs)).all()


@pytest.mark.parametrize("seed", range(30))
def test_recurrent_counts_alone_equal_those_of_all_layers(seed):
    forest = random_variety(seed).forest
    survey, layout = Survey(forest), random_layout(forest, seed)
    tokens, counts = measure_recurrent(survey, layout)
    whole = measure(survey, layout)
    assert (tokens == whole.tokens).all()
    assert (counts.chunks == whole.recurrent.chunks).all()
    alone, beside = counts.crossing, whole.recurrent.crossing
    assert type(alone) is type(beside)
    if alone is not None:
        assert all((value == getattr(beside, name)).all() for name, value in vars(alone).items())


def test_gdn_tables_and_digest_are_those_of_the_second_layout():
    rows = closed_form_rows()
    forest, mask = rows.forest, np.ones(len(rows.token), bool)
    layout, own = random_layout(forest, 1, 3), random_layout(forest, 2, 3)
    assert layout.owner.tolist() != own.owner.tolist()
    plans = [shard_plan(forest, layout, rank, mask, conv_width=4, gdn_layout=own) for rank in range(3)]
    assert [int(plan.gdn.fragment_row[-1]) for plan in plans] == own.rank_token_count.tolist()
    assert [plan.tokens for plan in plans] == layout.rank_token_count.tolist()
    assert len({plan.digest for plan in plans}) == 1
    single = shard_plan(forest, layout, 0, mask, conv_width=4)
    assert single.relayout is None and single.digest != plans[0].digest
    third = shard_plan(forest, layout, 0, mask, conv_width=4, gdn_layout=random_layout(forest, 3, 3))
    same_as_first = shard_plan(forest, layout, 0, mask, conv_width=4, gdn_layout=layout)
    assert len({single.digest, plans[0].digest, third.digest, same_as_first.digest}) == 4


def test_layouts_of_two_forests_are_refused():
    forest = closed_form_rows().forest
    with pytest.raises(ValueError, match="got 9 tokens on 2 ranks and 9 on 3"):
        relayout(contiguous_layout(forest, 2), contiguous_layout(forest, 3), 0)
