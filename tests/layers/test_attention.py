"""Tree attention over ranks: every exchange against dense attention on all tokens, outputs and gradients."""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_engine.kernels.attention import reference
from cp_engine.layers.attention import Heads, attention_tables, kernel_intervals, tree_attention
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.exchange import gather, ring, ulysses
from cp_engine.sharding.layout import contiguous_layout, layout_from_cuts
from tests.forests import closed_form_rows, random_layout, random_variety
from tests.kernels.attention_oracle import (
    Tensors,
    dense_attention,
    error_bounds,
    poisoned_memory,
    random_tensors,
    visible,
)
from tests.ranks import run_ranks

EXCHANGES = ("gather", "ring", "ulysses")
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    exchange: str
    seed: int = 0
    heads: tuple[int, int] = (4, 2)
    layout: str = "random"  # contiguous, random (several pieces a rank), or one (all tokens on the last rank)
    key_rank: int | None = None
    dtype: torch.dtype = torch.float64
    groups: int | None = None  # head groups of gather
    transport: str = "auto"
    window: int | None = None
    size: int = 8  # of a head
    backend: str = "auto"


def case_rows(case: Case):
    """Some hundred tokens in segments of a few; seed 0 is the closed form, whose 9 tokens leave ranks empty."""
    return closed_form_rows() if case.seed == 0 else random_variety(case.seed)


def case_layout(case: Case, forest, world: int):
    if case.layout == "contiguous":
        return contiguous_layout(forest, world)
    if case.layout == "one":
        return layout_from_cuts([0, forest.tokens], [world - 1], world)
    return random_layout(forest, 31 * case.seed + world, world)


def case_tensors(case: Case, tokens: int) -> Tensors:
    return random_tensors(tokens, case.heads, case.size, case.seed, case.dtype, case.key_rank)


def run_case(case: Case, x: Tensors, rank: int, world: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """This rank's tokens, and its rows of out, dq, dk, dv. A padding row holds large numbers that must not show."""
    forest = case_rows(case).forest
    layout = case_layout(case, forest, world)
    plan = attention_plan(forest, layout, rank, case.exchange, case.window)
    tables = attention_tables(plan, rank, transport=case.transport, head_groups=case.groups)
    tokens = torch.as_tensor(layout.rank_tokens(rank))
    local = [part[tokens] for part in (x.q, x.k, x.v, x.dout)]
    if not len(tokens):
        local = [part.new_full((1, *part.shape[1:]), 1e4) for part in local]
    q, k, v = (part.requires_grad_() for part in local[:3])
    group = None if world == 1 else dist.group.WORLD
    out = tree_attention(q, k, v, tables, group, x.scale, case.backend)
    out.backward(local[3])
    return tokens, {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def case_errors(case: Case) -> dict[str, float]:
    """Largest error of each tensor on this rank, over the largest true value anywhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    forest = case_rows(case).forest
    x = case_tensors(case, forest.tokens)
    truth = dense_attention(visible(forest, case.window), x)
    tokens, got = run_case(case, x, rank, world)
    if not len(tokens):
        assert not any(part.any() for part in got.values()), "a padding row has output and gradients zero"
        return dict.fromkeys(NAMES, 0.0)
    return {
        name: float((got[name].double() - truth[name][tokens]).abs().max() / truth[name].abs().max()) for name in NAMES
    }


def rank_errors(cases: list[Case]) -> list[dict[str, float]]:
    with poisoned_memory():
        return [case_errors(case) for case in cases]


def possible(case: Case, world: int) -> bool:
    query_heads, kv_heads = case.heads
    name, _, team = case.exchange.partition(":")
    if not name.startswith("ulysses"):
        return True
    size = int(team or world)
    return world % size == 0 and query_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_float64_equals_dense_attention(world):
    cases = [
        Case(exchange, seed, heads, layout, 2 if seed == 2 else None)
        for exchange in EXCHANGES
        for heads in ((8, 2), (12, 1), (6, 3), (12, 12))[: 4 if exchange == "ulysses" else 2]
        for layout in ("contiguous", "random", "one")
        for seed in range(6)
    ]
    cases += [
        Case("gather", seed, heads, layout, groups=groups)
        for heads, groups in (((8, 2), 1), ((8, 2), 2), ((6, 3), 2), ((12, 12), 12))
        for layout in ("random", "one")
        for seed in (0, 1, 4)
    ]
    cases += [
        Case(f"ulysses_gather:{team}", seed, heads, layout, groups=groups)
        for team in (1, 2, 4)
        for heads, groups in (((8, 2), None), ((4, 1), 1), ((8, 4), 2))
        for layout in ("contiguous", "random", "one")
        for seed in (0, 1, 4)
        if not (heads == (8, 4) and team == 4)
    ]
    cases += [
        Case(exchange, seed, (8, 2), layout, window=window)
        for exchange in (*EXCHANGES, "ulysses_gather:2")
        for layout in ("random", "one")
        for seed, window in ((0, 2), (1, 3), (4, 9), (5, 1000))
    ]
    cases = [case for case in cases if possible(case, world)]
    assert {case.exchange for case in cases} > set(EXCHANGES)
    assert world != 4 or Case("ulysses", 1, (8, 2)) in cases, "kv heads fewer than ranks"
    for by_case in run_ranks(world, rank_errors, cases):
        for case, errors in zip(cases, by_case, strict=True):
            assert max(errors.values()) < 1e-13, (case, errors)


def test_the_random_layouts_have_empty_ranks_and_several_pieces():
    layouts = [case_layout(Case("ring", seed), case_rows(Case("ring", seed)).forest, 4) for seed in range(6)]
    assert any((layout.rank_token_count == 0).any() for layout in layouts)
    assert any(len(layout.pieces(rank)[0]) > 1 for layout in layouts for rank in range(4))


def rank_bound_use(cases: list[Case]) -> list[float]:
    """Largest error over its derived bound."""
    rank, world = dist.get_rank(), dist.get_world_size()
    used = []
    for case in cases:
        forest = case_rows(case).forest
        mask, x = visible(forest), case_tensors(case, forest.tokens)
        truth, bounds = dense_attention(mask, x), error_bounds(mask, x, calls=world)
        tokens, got = run_case(case, x, rank, world)
        ratios = [(got[n].double() - truth[n][tokens]).abs() / bounds[n][tokens] for n in NAMES if len(tokens)]
        used.append(max((float(ratio.max()) for ratio in ratios), default=0.0))
    return used


def test_low_precision_stays_within_derived_bounds():
    """Partial results and remote gradients are summed in float32: the bounds are those of one call, rounded once."""
    cases = [
        Case(exchange, seed, (8, 2), dtype=dtype)
        for exchange in EXCHANGES
        for dtype in (torch.float32, torch.bfloat16)
        for seed in (1, 4, 5)
    ]
    for used in run_ranks(4, rank_bound_use, cases):
        for case, share in zip(cases, used, strict=True):
            assert share <= 1, (case, share)


def rank_leaks(cases: list[Case]) -> int:
    """Change everything that some tokens of this pack do not see; returns how many local tokens were compared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    compared = 0
    for case in cases:
        forest = case_rows(case).forest
        x, mask = case_tensors(case, forest.tokens), visible(forest)
        tokens, got = run_case(case, x, rank, world)
        for token in range(0, forest.tokens, 1 + forest.tokens // 6):
            others = ~mask[token][:, None, None]
            changed = Tensors(*(part.masked_fill(others, 50.0) for part in (x.q, x.k, x.v)), x.dout)
            _, got_2 = run_case(case, changed, rank, world)
            here = tokens == token
            assert torch.equal(got["out"][: len(tokens)][here], got_2["out"][: len(tokens)][here]), (case, token)
            compared += int(here.sum())
    return compared


def test_other_branches_do_not_touch_a_bit():
    cases = [Case(exchange, seed, dtype=torch.float32) for exchange in EXCHANGES for seed in (1, 4)]
    assert sum(run_ranks(2, rank_leaks, cases)) > 20


def rank_repeats(cases: list[Case]) -> bool:
    rank, world = dist.get_rank(), dist.get_world_size()
    same = True
    for case in cases:
        x = case_tensors(case, case_rows(case).forest.tokens)
        first, second = (run_case(case, x, rank, world)[1] for _ in range(2))
        same &= all(torch.equal(first[name], second[name]) for name in NAMES)
    return same


def test_gradients_repeat_bit_by_bit():
    cases = [Case(exchange, seed, (8, 2), dtype=torch.float32) for exchange in EXCHANGES for seed in (4, 5)]
    assert all(run_ranks(4, rank_repeats, cases))


def rank_tiled_heads(case: Case) -> dict[str, float]:
    with mock.patch.object(ulysses, "repeat_kv_heads", lambda kv, times: kv.repeat(1, times, 1)):
        return case_errors(case)


def rank_dropped_return(case: Case) -> dict[str, float]:
    """The exchange runs, so that no rank hangs, but what comes home is thrown away."""

    with (
        mock.patch.object(gather, "add_home", lambda *arguments: arguments[-1].wait()),
        mock.patch.object(ring, "add_home", lambda *arguments: arguments[-1].wait()),
    ):
        return case_errors(case)


def test_planted_faults_show():
    tiled = run_ranks(4, rank_tiled_heads, Case("ulysses", 4, (8, 2)))
    for name in NAMES:
        assert max(rank[name] for rank in tiled) > 1e-3, name
    for exchange in ("gather", "ring"):
        dropped = run_ranks(3, rank_dropped_return, Case(exchange, 4, layout="contiguous"))
        for name in ("dk", "dv"):
            assert max(rank[name] for rank in dropped) > 1e-3, (exchange, name)


def rank_refusal(heads: tuple[int, int]) -> str:
    """The error text; the all-reduce after it fails or hangs unless every rank stopped at the same point."""
    try:
        case_errors(Case("ulysses", 1, heads))
        text = "no error"
    except ValueError as error:
        text = str(error)
    dist.all_reduce(torch.ones(1))
    return text


@pytest.mark.parametrize(("world", "heads"), [(3, (4, 2)), (4, (12, 3)), (4, (6, 2))])
def test_impossible_heads_are_refused_on_every_rank(world, heads):
    texts = run_ranks(world, rank_refusal, heads)
    assert len(set(texts)) == 1
    assert (
        f"dealing heads to {world} ranks (exchange ulysses or ulysses_gather) needs query heads divisible by {world}"
        in texts[0]
    )
    assert f"the model has {heads[0]} query heads and {heads[1]} kv heads" in texts[0]
    assert "Use exchange gather or ring, or another number of ranks" in texts[0]


@pytest.mark.parametrize("exchange", [*EXCHANGES, "ulysses_gather:2"])
@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (8, 1)])
def test_lists_made_ahead_are_for_the_heads_that_kernels_get(exchange, heads):
    forest = case_rows(Case(exchange, 3)).forest
    plan = attention_plan(forest, case_layout(Case(exchange, 3), forest, 4), 1, exchange)
    team = {"ulysses": 4, "ulysses_gather:2": 2}.get(exchange, 1)
    query, kv = 8 // team, max(heads[1], team) // team
    groups = max(groups for groups in (1, 2) if kv % groups == 0) if "gather" in exchange else 1
    with (
        mock.patch("cp_engine.layers.attention.prepare") as prepared,
        mock.patch("cp_engine.layers.attention.best_head_groups", return_value=groups) as ahead,
    ):
        made = kernel_intervals(plan, "meta", Heads(*heads, 16, torch.bfloat16))
    assert len(made) == (4 if exchange == "ring" else 1)
    wanted = {"query_heads": query // groups, "kv_heads": kv // groups, "size": 16, "dtype": torch.bfloat16}
    wanted["accumulate"] = exchange == "ring"  # results of its rounds are merged
    assert prepared.call_args_list == [mock.call(intervals, **wanted) for intervals in made]
    tables = attention_tables(plan, 1, intervals=made)
    if "gather" in exchange:  # the exchange asks the same question
        with mock.patch.object(gather, "best_head_groups", return_value=groups) as later:
            gather.head_groups(getattr(tables.exchange, "gather", tables.exchange), query, kv, 16, torch.bfloat16)
        assert ahead.call_args_list == later.call_args_list
    assert made[0] in vars(getattr(tables.exchange, "gather", tables.exchange)).values() or exchange == "ring"


def test_lists_made_ahead_stay_on_the_host_until_they_are_used(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    forest = case_rows(Case("gather", 3)).forest
    plan = attention_plan(forest, contiguous_layout(forest, 2), 1, "gather")
    (intervals,) = kernel_intervals(plan, "meta", Heads(4, 2, 16, torch.float64))
    name, build = "reference", reference.build_blocks
    on_host, there = intervals.prepared(name, None), intervals.on_device(name, build)
    assert len(on_host) == len(there) >= 1
    for block, placed in zip(on_host, there, strict=True):
        assert block.hidden.device.type == "cpu" and placed.hidden.device.type == "meta"
        assert block.rows == placed.rows and block.hidden.shape == placed.hidden.shape
    assert intervals.on_device(name, build) is there


def test_a_plan_for_other_ranks_is_refused():
    forest = closed_form_rows().forest
    tables = attention_tables(attention_plan(forest, contiguous_layout(forest, 2), 0, "gather"), 0)
    x = random_tensors(4, (2, 1), 4, 0)
    with pytest.raises(ValueError, match="the attention plan is for 2 ranks; the process group has 1"):
        tree_attention(x.q, x.k, x.v, tables, None, 1.0)


def test_merge_of_partial_results_is_safe_where_nothing_was_seen():
    out, other = torch.tensor([[[2.0]], [[0.0]], [[4.0]], [[0.0]]]), torch.tensor([[[0.0]], [[6.0]], [[8.0]], [[0.0]]])
    inf = torch.inf
    lse, other_lse = torch.tensor([[1.0], [-inf], [0.5], [-inf]]), torch.tensor([[-inf], [2.0], [0.5], [-inf]])
    merged, total = ring.merge_partials(out, lse, other, other_lse)
    assert merged.flatten().tolist() == [2.0, 6.0, pytest.approx(6.0), 0.0]
    assert total.flatten().tolist() == [1.0, 2.0, pytest.approx(0.5 + 0.6931472), -inf]
