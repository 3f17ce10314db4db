"""Where packs go: the exchange that was asked for, or the one chosen within the memory budget."""

from pathlib import Path

import numpy as np
import pytest

from cp_engine.config import LossConfig, PackingConfig, ParallelConfig
from cp_engine.placement import place_pack, plan_rank
from cp_engine.rollouts import read_rollouts
from cp_engine.sharding.cost import PRESETS
from cp_engine.sharding.packing import empty_pack
from cp_engine.step import prepare_step

SAMPLE = Path(__file__).parent.parent / "launch" / "data" / "sample.jsonl"
SHAPE, HYBRID = PRESETS["qwen3-8b"], PRESETS["qwen3-next-80b-a3b"]


def pack():
    rollouts = read_rollouts(SAMPLE, limit=20)
    return prepare_step(rollouts, PackingConfig(), LossConfig(name="sft")).packs[0]


def test_a_named_exchange_and_layout_are_kept():
    placed = place_pack(pack(), ParallelConfig(cp=3, layout="contiguous", exchange="ring"), SHAPE)
    assert (placed.exchange, placed.reason) == ("ring", "set by parallel.exchange")
    assert placed.layout.piece_rank.tolist() == [0, 1, 2]


def test_teams_of_ranks_reach_the_plan():
    placed = place_pack(pack(), ParallelConfig(cp=4, exchange="ulysses_gather", ulysses_ranks=2), SHAPE)
    for rank in range(4):
        both = plan_rank(placed, rank, "affine", None).attention.ulysses_gather
        assert both.order.rank_rows.tolist() == placed.layout.rank_rows[rank // 2 * 2 :][:2].tolist()


def test_auto_says_why(caplog):
    parallel = ParallelConfig(cp=2)
    with caplog.at_level("INFO"):
        placed = place_pack(pack(), parallel, SHAPE)
    assert placed.reason in caplog.text
    assert placed.reason.startswith(f"{placed.exchange} is predicted at")
    assert np.ptp(placed.layout.rank_token_count) <= 64
    for rank in range(2):
        plan = plan_rank(placed, rank, "affine", None)
        assert plan.attention.exchange == placed.exchange and plan.tokens == placed.layout.rank_token_count[rank]


def test_a_budget_that_nothing_keeps_to_is_named():
    wide = SHAPE.__class__(**{**vars(SHAPE), "kv_heads": 32, "head_dim": 1 << 16})
    with pytest.raises(ValueError, match="no exchange fits into 1.0 MiB of buffers a layer"):
        place_pack(pack(), ParallelConfig(cp=2, max_exchange_mib=1), wide)


def test_a_pack_without_tokens_has_a_place():
    placed = place_pack(empty_pack(), ParallelConfig(cp=4), SHAPE)
    assert placed.exchange == "gather" and placed.layout.rank_token_count.tolist() == [0] * 4


def test_gdn_layers_get_the_layout_that_is_asked_for(caplog):
    with caplog.at_level("INFO"):
        placed = place_pack(pack(), ParallelConfig(cp=3, gdn_layout="own"), HYBRID)
    assert "with a layout of their own" in caplog.text
    own = placed.gdn_layout
    assert own.owner.tolist() != placed.layout.owner.tolist()
    for rank in range(3):
        plan = plan_rank(placed, rank, "affine", 4)
        assert plan.tokens == placed.layout.rank_token_count[rank]
        assert plan.relayout.rows_after == plan.gdn.fragment_row[-1] == own.rank_token_count[rank]
    # Moving rows of short rollouts takes longer than it saves; head shards need no layout, one rank has none.
    for fields in ({"cp": 2}, {"cp": 3, "gdn_layout": "same"}, {"cp": 2, "gdn_exchange": "ulysses"}, {"cp": 1}):
        assert place_pack(pack(), ParallelConfig(**fields), HYBRID).gdn_layout is None
    assert place_pack(empty_pack(), ParallelConfig(cp=2, gdn_layout="own"), HYBRID).gdn_layout is None
    with pytest.raises(ValueError, match="gdn_layout own is for models with GDN layers"):
        place_pack(pack(), ParallelConfig(cp=3, gdn_layout="own"), SHAPE)
