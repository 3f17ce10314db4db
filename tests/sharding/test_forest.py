"""The forest against a trie of dictionaries, closed forms, the real data sets, and trees too deep for recursion."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cp_engine.rollouts import flatten_rollouts, read_rollouts
from cp_engine.sharding.forest import Forest, build_forest, expand_ranges, sorted_rows
from tests.forests import Rows, chain_forest, closed_form_rows, comb_rows, random_variety

DATA = Path(__file__).parents[3] / "shared" / "data" / "tokens"
# Tree tokens of one trie a group, and of one trie over the set.
TREE_TOKENS = {
    "tau_airline": (608_792, 545_679),
    "tau_airline_calls": (104_249, 97_844),
    "toolbench_dfs": (73_930, 68_518),
    "game24_tree": (196_818, 150_148),
    "game24_samples": (57_715, 46_427),
    "gsm8k_solutions": (740_223, 734_888),
    "creative_writing": (398_935, 396_130),
}


def children_of(rows: Rows) -> list[set[int]]:
    children: list[set[int]] = [set() for _ in range(rows.forest.tokens)]
    for path in rows.paths:
        if len(path) > 1:
            children[path[-2]].add(path[-1])
    return children


@pytest.mark.parametrize("seed", range(60))
def test_one_tree_token_for_each_distinct_prefix(seed):
    rows = random_variety(seed)
    node_of_prefix: dict[tuple, int] = {}
    for rollout, row in enumerate(rows.rows):
        for position in range(len(row)):
            node = rows.node_of[rollout][position]
            assert node_of_prefix.setdefault(rows.prefix(rollout, position), node) == node
            assert rows.forest.token[node] == row[position]
            assert rows.forest.position[node] == position
    assert sorted(node_of_prefix.values()) == list(range(rows.forest.tokens))


@pytest.mark.parametrize("seed", range(60))
def test_a_query_sees_exactly_its_prefix(seed):
    rows = random_variety(seed)
    forest = rows.forest
    end = np.repeat(forest.subtree_end, forest.segment_length)
    key, query = np.meshgrid(np.arange(forest.tokens), np.arange(forest.tokens))
    sees = (key <= query) & (query < end[key])
    for token, path in enumerate(rows.paths):
        assert np.flatnonzero(sees[token]).tolist() == path
        assert forest.token_parent[token] == (path[-2] if len(path) > 1 else -1)
    assert forest.tree_pairs == sees.sum()
    lengths = np.array([len(row) for row in rows.rows])
    assert forest.rollout_length.tolist() == lengths.tolist()
    assert forest.flat_tokens == lengths.sum()
    assert forest.flat_pairs == (lengths * (lengths + 1) // 2).sum()
    assert forest.max_depth == lengths.max()


@pytest.mark.parametrize("seed", range(60))
def test_segments_are_maximal_and_end_where_rollouts_end(seed):
    rows = random_variety(seed)
    forest, children = rows.forest, children_of(rows)
    last = forest.segment_start[1:] - 1
    ends = {nodes[-1] for nodes in rows.node_of}
    for token in range(forest.tokens):
        assert (token in last) == (len(children[token]) != 1 or token in ends)
    for rollout, nodes in enumerate(rows.node_of):
        assert last[forest.end_segment[rollout]] == nodes[-1]
    for segment, parent in enumerate(forest.parent.tolist()):
        first = int(forest.segment_start[segment])
        assert forest.depth[segment] == forest.position[first] == len(rows.paths[first]) - 1
        assert parent < segment
        assert (last[parent] if parent >= 0 else -1) == forest.token_parent[first]


@pytest.mark.parametrize("seed", range(60))
def test_the_heaviest_child_follows_its_parent(seed):
    rows = random_variety(seed)
    forest, children = rows.forest, children_of(rows)
    weight = np.repeat(forest.subtree_end, forest.segment_length) - np.arange(forest.tokens)
    for token, below in enumerate(children):
        if below:
            assert weight[token + 1] == max(weight[child] for child in below)
            assert token + 1 in below
    for segment in range(forest.segments):
        head, walk = int(forest.chain_head[segment]), segment
        while walk != head:
            assert forest.parent[walk] == walk - 1
            walk -= 1
        assert forest.parent[head] != head - 1 or head == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_rollouts_changes_only_their_ends(seed):
    rows = random_variety(seed)
    order = np.random.default_rng(seed).permutation(len(rows.rows))
    keys = None if rows.keys is None else [rows.keys[i] for i in order]
    other = Rows([rows.rows[i] for i in order], [rows.groups[i] for i in order], rows.share, keys).forest
    for field in ("token", "segment_start", "parent", "depth", "subtree_end"):
        assert np.array_equal(getattr(other, field), getattr(rows.forest, field)), field
    assert np.array_equal(other.end_segment, rows.forest.end_segment[order])


@pytest.mark.parametrize("seed", range(20))
def test_sorted_neighbours_tell_what_any_two_rows_share(seed):
    rows = random_variety(seed)
    group = rows.group if rows.share == "group" else None
    order, common = sorted_rows(rows.token, rows.row_start, group, rows.share_key)
    for low in range(len(order)):
        for high in range(low + 1, len(order)):
            a, b = rows.node_of[order[low]], rows.node_of[order[high]]
            assert common[low + 1 : high + 1].min() == sum(x == y for x, y in zip(a, b, strict=False))


def test_closed_form():
    rows = closed_form_rows()
    forest = rows.forest
    assert (forest.flat_tokens, forest.tokens, forest.tree_pairs, forest.rollouts) == (23, 9, 30, 6)
    assert forest.token.tolist() == [11, 12, 13, 14, 21, 22, 15, 31, 41]
    assert forest.segment_start.tolist() == [0, 2, 3, 4, 6, 7, 8, 9]
    assert forest.parent.tolist() == [-1, 0, 1, 2, 2, 0, -1]
    assert forest.subtree_end.tolist() == [8, 7, 7, 6, 7, 8, 9]
    assert forest.position.tolist() == [0, 1, 2, 3, 4, 5, 4, 2, 0]
    assert forest.end_segment.tolist() == [4, 3, 5, 4, 1, 6]
    assert forest.chain_head.tolist() == [0, 0, 0, 0, 4, 5, 6]


def test_equal_ids_share_only_where_the_share_key_is_equal():
    rows = [[5, 6, 7], [5, 6, 7], [5, 6, 7]]
    keys = [[0, 0, 0], [0, 9, 0], [0, 9, -4]]
    assert Rows(rows, [0, 0, 0]).forest.tokens == 3
    assert Rows(rows, [0, 0, 0], keys=keys).forest.tokens == 1 + 2 + 2 + 1


def test_groups_share_nothing():
    rows, groups = [[1, 2], [1, 2], [1, 3]], [1, 0, 1]
    forest = Rows(rows, groups, "group").forest
    assert forest.token.tolist() == [1, 2, 1, 2, 3]
    assert forest.end_segment.tolist() == [2, 0, 3]


def test_large_ids_and_many_groups_sort_as_numbers():
    ids = [[2**31 - 1], [255], [256], [65_536], [1]]
    assert Rows(ids, [0] * 5).forest.token.tolist() == [1, 255, 256, 65_536, 2**31 - 1]
    assert Rows([[7]] * 3, [300, 2, 70_000], "group").forest.end_segment.tolist() == [1, 0, 2]


def test_empty_row_is_refused():
    with pytest.raises(ValueError, match="rollout 1 has no tokens"):
        build_forest(np.array([1, 2]), np.array([0, 1, 1, 2]))


def test_no_rows_make_an_empty_forest():
    forest = build_forest(np.empty(0, np.int64), np.zeros(1, np.int64))
    assert (forest.tokens, forest.segments, forest.rollouts, forest.tree_pairs, forest.max_depth) == (0, 0, 0, 0, 0)
    assert len(forest.flat_to_tree()) == 0


def test_deep_chain_needs_no_recursion():
    forest = Rows([[i % 5 for i in range(n)] for n in range(1, 2_001)], [0] * 2_000).forest
    assert forest.tokens == forest.segments == 2_000
    assert np.array_equal(forest.parent, np.arange(-1, 1_999))
    assert forest.chain_head.max() == 0
    expected = chain_forest(2_000)
    for field in ("segment_start", "parent", "depth", "subtree_end", "end_segment"):
        assert np.array_equal(getattr(forest, field), getattr(expected, field)), field


def test_deep_comb_needs_no_recursion():
    forest = comb_rows(1_000).forest
    assert forest.tokens == 2_000 and forest.max_depth == 1_001
    assert len(np.unique(forest.chain_head)) == 1_000  # the trunk with its deepest leaf, and 999 other leaves


def test_expand_ranges():
    assert expand_ranges(np.array([5, 9, 0]), np.array([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert expand_ranges(np.empty(0), np.empty(0)).tolist() == []


@pytest.mark.parametrize("name", TREE_TOKENS)
def test_tree_tokens_of_the_real_sets(name):
    flat = flatten_rollouts(read_rollouts(data_file(name), vocab_size=151_936))
    assert (flat.forest("group").tokens, flat.forest("batch").tokens) == TREE_TOKENS[name]


def test_forests_of_all_real_sets_are_fast():
    """From files 4 s together on one core are allowed, from arrays in memory 1.5 s; process time, so load is no excuse.

    The limits are doubled here, for machines slower than the one they were set on.
    """
    files = [data_file(name) for name in TREE_TOKENS]
    began = time.process_time()
    sets = [read_rollouts(file) for file in files]
    read = time.process_time() - began
    began = time.process_time()
    forests: list[Forest] = [flatten_rollouts(rollouts).forest("group") for rollouts in sets]
    built = time.process_time() - began
    assert sum(forest.rollouts for forest in forests) == 16_380
    assert sum(forest.tokens for forest in forests) == 2_180_662
    print(f"read {read:.2f} s, flatten and build {built:.2f} s")
    assert read + built < 8 and built < 3


def data_file(name: str) -> Path:
    file = DATA / f"{name}.jsonl.gz"
    if not file.exists():
        pytest.skip(f"the data set {name} is not in the folder shared/data/tokens beside the checkout")
    return file


def test_planning_and_reading_load_no_torch():
    code = (
        "import sys, cp_engine.sharding.plan, cp_engine.sharding.packing, cp_engine.rollouts, cp_engine.cli.plan\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
