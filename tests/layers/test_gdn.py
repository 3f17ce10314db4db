from functools import lru_cache
from unittest import mock

import numpy as np
import pytest
import torch

from cp_engine.kernels.gdn import state_pass
from cp_engine.layers import gdn_crossing
from cp_engine.layers.gdn import start_gated_delta_rule
from cp_engine.layers.gdn_tables import GdnHeads, gdn_tables
from cp_engine.sharding import gdn_plan as planning
from cp_engine.sharding.exchange import state_rounds
from cp_engine.sharding.exchange import states as state_exchange
from cp_engine.sharding.forest import Forest
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import contiguous_layout, layout_from_cuts
from tests.forests import random_layout
from tests.gdn_oracle import forest_of_segments, layer_case, layer_truth, random_forest, relative_errors
from tests.ranks import run_ranks

HEADS = GdnHeads(4, 8, 6, 5)
# Three ranks fold 3, 3 and 2 of those 8 heads under affine; ulysses needs a multiple of the ranks.
THREE = GdnHeads(3, 6, 4, 3)
# On four ranks, two ranks share each key head.
SHARED_KEYS = GdnHeads(2, 4, 6, 5)
FORESTS = {
    "random": lambda: random_forest(1),
    "short": lambda: short_forest(),
    "chain": lambda: forest_of_segments([(-1, 90), (0, 64), (1, 1), (2, 2), (3, 130)]),
    "star": lambda: forest_of_segments([(-1, 70)] + [(0, n) for n in (65, 3, 64, 1, 2, 63)]),
    "roots": lambda: forest_of_segments([(-1, 3), (-1, 1), (-1, 65), (2, 2)]),
    "one token": lambda: forest_of_segments([(-1, 1)]),
}


def short_forest() -> Forest:
    """Segments of 1, 2 and 3 tokens, many levels deep."""
    rng = np.random.default_rng(7)
    parents = [-1] + [int(rng.integers(max(-1, s - 6), s)) for s in range(1, 60)]
    return forest_of_segments(list(zip(parents, rng.integers(1, 4, 60).tolist(), strict=True)))


@lru_cache
def forest_named(name: str) -> Forest:
    return FORESTS[name]()


def layout_named(forest: Forest, name, world: int):
    if name == "contiguous":
        return contiguous_layout(forest, world)
    if name == "one rank":
        return layout_from_cuts([0, forest.tokens], [world - 1], world)
    if name == "dealt":
        # Piece i goes to rank i mod P: a parent, its children and their children lie on different ranks.
        cuts = np.union1d(forest.segment_start, np.arange(0, forest.tokens, 23))
        return layout_from_cuts(cuts, np.arange(len(cuts) - 1) % world, world)
    return random_layout(forest, name, world)


def run_rank(cases, poison=False, edit=None):
    """This rank's (tokens, o, gradients) of every case; a rank without tokens reports its padding row."""
    dist = torch.distributed
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    group = dist.group.WORLD if dist.is_initialized() else None
    results = []
    for forest_name, layout_name, exchange, heads, dtype in cases:
        forest = forest_named(forest_name)
        layout = layout_named(forest, layout_name, world)
        case = layer_case(forest.tokens, 11, heads)
        if edit is not None:
            edit(forest, case)
        tables = gdn_tables(gdn_plan(forest, layout, rank, exchange, case.weight.shape[1]), rank)
        tokens = torch.as_tensor(layout.rank_tokens(rank))

        def local(x, tokens=tokens, dtype=dtype):
            return (x[tokens] if len(tokens) else torch.full_like(x[:1], 0.3)).to(dtype)

        leaves = [local(case.mixed), case.weight.to(dtype), local(case.g), local(case.beta)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        with poisoned() if poison else mock.MagicMock():
            o = start_gated_delta_rule(*leaves, tables, group, heads)()
            o.backward(local(case.dout))
        assert len(tokens) or exchange == "ulysses" or not leaves[1].grad.any(), "padding row"
        results.append([x.detach().numpy() for x in (tokens, o, *(leaf.grad for leaf in leaves))])
    return results


class poisoned:
    """Fill uninitialised floating-point memory with NaN."""

    def __enter__(self):
        def filled(make):
            def call(*args, **kwargs):
                x = make(*args, **kwargs)
                return x.fill_(torch.nan) if x.is_floating_point() else x

            return call

        self.patches = [
            mock.patch.object(torch, "empty", filled(torch.empty)),
            mock.patch.object(torch, "empty_like", filled(torch.empty_like)),
            mock.patch.object(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty)),
        ]
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def assemble(ranks, tokens: int) -> list[torch.Tensor]:
    """Whole-forest tensors from all ranks' shares; the weight's gradient sums. Checks the padding rows."""
    whole = None
    for owned, o, dmixed, dweight, dg, dbeta in ranks:
        rows = [o, dmixed, dg, dbeta]
        if whole is None:
            whole = [torch.full((tokens, *x.shape[1:]), torch.nan, dtype=torch.as_tensor(x).dtype) for x in rows]
            weight = torch.zeros(dweight.shape, dtype=torch.float64)
        weight += torch.as_tensor(dweight).double()
        if len(owned) == 0:
            assert all(len(x) == 1 and not x.any() for x in rows), "padding row"
        else:
            for x, part in zip(whole, rows, strict=True):
                x[torch.as_tensor(owned)] = torch.as_tensor(part)
    return [whole[0], whole[1], weight, *whole[2:]]


@lru_cache
def truth(forest_name: str, heads: GdnHeads, dtype=torch.float64):
    forest = forest_named(forest_name)
    return layer_truth(forest, layer_case(forest.tokens, 11, heads), heads, dtype)


def errors_of(world: int, cases, **kwargs) -> list[list[float]]:
    results = run_ranks(world, run_rank, cases, *kwargs.values()) if world > 1 else [run_rank(cases, *kwargs.values())]
    errors = []
    for index, (forest_name, _, _, heads, _) in enumerate(cases):
        actual = assemble([rank[index] for rank in results], forest_named(forest_name).tokens)
        errors.append(relative_errors(actual, truth(forest_name, heads)))
    return errors


def cases_for(world: int, dtype=torch.float64):
    affine = [
        (f, where, "affine", HEADS, dtype) for f in FORESTS for where in ("contiguous", "dealt", "one rank", 5, 6)
    ]
    ulysses_heads = THREE if world == 3 else SHARED_KEYS if world == 4 else HEADS
    return affine + [
        (f, where, "ulysses", ulysses_heads, dtype) for f in FORESTS for where in ("contiguous", 5, "one rank")
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rollout_alone(world):
    cases = cases_for(world)
    for case, errors in zip(cases, errors_of(world, cases), strict=True):
        assert max(errors) <= 1e-11, (case, errors)


def run_with_rounds(most: int, cases):
    with mock.patch.object(planning, "MOST_ROUNDS", most):
        return run_rank(cases, poison=True)


@pytest.mark.parametrize("most", [0, 99], ids=["maps", "handed on"])
def test_both_ways_across_ranks_for_every_layout(most):
    cases = [case for case in cases_for(3) if case[2] == "affine"]
    ranks = run_ranks(3, run_with_rounds, most, cases)
    for index, case in enumerate(cases):
        actual = assemble([rank[index] for rank in ranks], forest_named(case[0]).tokens)
        errors = relative_errors(actual, truth(case[0], case[3]))
        assert max(errors) <= 1e-11, (case, errors)


def test_parent_and_children_on_three_ranks():
    forest = forest_named("star")
    layout = layout_named(forest, "dealt", 3)
    parent = layout.owner[forest.segment_start[1] - 1]
    children = set(layout.owner[forest.segment_start[1:-1]].tolist())
    assert len(children | {int(parent)}) == 3
    fold = gdn_plan(forest_named("chain"), layout_named(forest_named("chain"), "dealt", 3), 0, "affine", 4).fold
    assert fold.entry_level.max() >= 3 and (fold.exit_counts > 0).all() and (fold.exit_entry >= 0).any()


def test_float32_is_as_good_as_the_token_recurrence_in_float32():
    cases = cases_for(3, torch.float32)
    for case, errors in zip(cases, errors_of(3, cases), strict=True):
        yardstick = relative_errors(truth(case[0], case[3], torch.float32), truth(case[0], case[3]))
        for error, allowed in zip(errors, yardstick, strict=True):
            # Both round every product once or twice; a chunk's solve adds at most a chunk's worth of roundings.
            assert error <= 4 * allowed + 64 * 2**-24, (case, errors, yardstick)


def test_uninitialised_memory_is_never_read():
    cases = cases_for(3)[:9] + cases_for(3)[-3:]
    clean, dirty = (run_ranks(3, run_rank, cases, poison) for poison in (False, True))
    for a, b in zip(clean, dirty, strict=True):
        for x, y in zip(a, b, strict=True):
            assert all(np.array_equal(p, q) for p, q in zip(x, y, strict=True))


def change_last_child(forest, case):
    """New values in one leaf subtree."""
    case.mixed[changed(forest)] += 1.0
    case.g[changed(forest)] -= 0.01
    case.beta[changed(forest)] *= 0.5


def changed(forest) -> slice:
    segment = int(np.flatnonzero(forest.parent >= 0)[-1])
    return slice(int(forest.segment_start[segment]), int(forest.subtree_end[segment]))


@pytest.mark.parametrize("exchange", ["affine", "ulysses"])
def test_siblings_do_not_leak(exchange):
    cases = [(f, where, exchange, THREE, torch.float64) for f in ("random", "short", "star") for where in ("dealt", 5)]
    before, after = (run_ranks(3, run_rank, cases, False, edit) for edit in (None, change_last_child))
    for index, case in enumerate(cases):
        forest = forest_named(case[0])
        a, b = (assemble([rank[index] for rank in ranks], forest.tokens)[0] for ranks in (before, after))
        part = changed(forest)
        assert not torch.equal(a[part], b[part])
        a[part] = b[part] = 0
        assert torch.equal(a, b), case


def forget_entry_states(states, entry_states):
    states[1 : 1 + len(entry_states)] = 0


def swap_siblings(states, reads):
    return states[reads.roll(1)]


def last_child_only(dstates, reads, dstate):
    dstates[reads] = dstate


def drop_transitions(dentry, transition, tables, group, exact=state_exchange.fold_exit_cotangents):
    return exact(dentry, 0 * transition, tables, group)


def forget_what_arrives(exits, tables, transport, exact=state_rounds.hand_on):
    return 0 * exact(exits, tables, transport)


def forget_what_returns(dentry, tables, exits, transport, exact=state_rounds.hand_back):
    return 0 * exact(dentry, tables, exits, transport)


FAULTS = {
    "forgotten entry state": (state_pass, "place_entry_states", forget_entry_states),
    "swapped sibling state": (state_pass, "read_states", swap_siblings),
    "dropped dH sum": (state_pass, "add_to_parents", last_child_only),
    "dropped A in backward": (gdn_crossing, "fold_exit_cotangents", drop_transitions),
    "forgotten state handed on": (gdn_crossing, "hand_on", forget_what_arrives),
    "forgotten gradient handed back": (gdn_crossing, "hand_back", forget_what_returns),
}


def run_with_fault(name: str, cases):
    with mock.patch.object(*FAULTS[name]), mock.patch.object(planning, "MOST_ROUNDS", 99 if "handed" in name else 0):
        return run_rank(cases)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault):
    case = ("random", "dealt", "affine", HEADS, torch.float64)
    results = run_ranks(3, run_with_fault, fault, [case])
    actual = assemble([rank[0] for rank in results], forest_named("random").tokens)
    assert max(relative_errors(actual, truth("random", HEADS))) > 1e-3


def ulysses_refusal(heads):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    forest = forest_named("star")
    layout = contiguous_layout(forest, world)
    tables = gdn_tables(gdn_plan(forest, layout, rank, "ulysses", 4), rank)
    case = layer_case(tables.rows, 0, heads)
    with pytest.raises(ValueError) as caught:
        start_gated_delta_rule(case.mixed, case.weight, case.g, case.beta, tables, torch.distributed.group.WORLD, heads)
    return str(caught.value)


def test_impossible_head_counts_are_refused_on_every_rank():
    messages = run_ranks(3, ulysses_refusal, GdnHeads(2, 6, 4, 4))
    assert len(set(messages)) == 1
    assert "cannot spread 2 key and 6 value heads over 3 ranks" in messages[0]
    assert "Use gdn_exchange affine" in messages[0]


def test_shapes_are_checked():
    forest = forest_named("star")
    tables = gdn_tables(gdn_plan(forest, contiguous_layout(forest, 1), 0, "affine", 4), 0)
    case = layer_case(forest.tokens, 0, HEADS, width=3)
    with pytest.raises(ValueError, match=r"conv_weight must have shape \[88, 4\] .* got \[88, 3\]: .*conv_width"):
        start_gated_delta_rule(case.mixed, case.weight, case.g, case.beta, tables, None, HEADS)
    with pytest.raises(ValueError, match="multiple of key heads, got 3 value heads and 2 key heads"):
        GdnHeads(2, 3, 4, 4)


def test_bfloat16_states_are_float32():
    forest = forest_named("random")
    tables = gdn_tables(gdn_plan(forest, contiguous_layout(forest, 1), 0, "affine", 4), 0)
    case = layer_case(forest.tokens, 11, HEADS)
    mixed, weight = (x.bfloat16().requires_grad_() for x in (case.mixed, case.weight))
    g, beta = (x.float().requires_grad_() for x in (case.g, case.beta))
    seen = []
    exact = state_pass.ForwardStates.run

    def record(states, turn, entry_states):
        exact(states, turn, entry_states)
        seen.append(states.states.dtype)

    with mock.patch.object(state_pass.ForwardStates, "run", record):
        o = start_gated_delta_rule(mixed, weight, g, beta, tables, None, HEADS)()
        o.backward(case.dout.bfloat16())
    assert set(seen) == {torch.float32} and o.dtype == torch.bfloat16
    assert mixed.grad.dtype == torch.bfloat16 and g.grad.dtype == torch.float32
    errors = relative_errors((o, mixed.grad), truth("random", HEADS)[:2])
    # Three bfloat16 roundings (2^-9 each) of values that the normalisation and the SiLU at most double.
    assert max(errors) <= 12 * 2**-9, errors


def test_empty_forest():
    forest = forest_of_segments([(-1, 1)])
    none = np.empty(0, np.int64)
    forest = Forest(none, np.zeros(1, np.int64), none, none, none, none)
    for exchange in ("affine", "ulysses"):
        tables = gdn_tables(gdn_plan(forest, contiguous_layout(forest, 1), 0, exchange, 4), 0)
        case = layer_case(1, 0, HEADS)
        leaves = [x.requires_grad_() for x in (case.mixed, case.weight, case.g, case.beta)]
        o = start_gated_delta_rule(*leaves, tables, None, HEADS)()
        o.backward(case.dout)
        assert not o.any() and not any(leaf.grad.any() for leaf in leaves)
