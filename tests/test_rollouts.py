"""Rollouts from files and from memory: what is read, and the words in which each broken rule is refused."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import re

import numpy as np
import pytest
import torch

import cp_engine
from cp_engine.rollouts import Rollout, RolloutError, check_rollouts, flatten_rollouts, read_rollouts

GOOD = {"input_ids": [3, 1, 2], "loss_mask": [0, 1, 1], "group": "g", "rollout": "r"}
LOGPROB_FIELDS = ("old_logprobs", "ref_logprobs", "sampler_logprobs")


def write(path, *records) -> str:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_field_is_read(tmp_path, name):
    full = {
        **GOOD,
        "group": 7,
        "rollout": 12,
        "reward": 1,
        "advantage": [0, -1.5, 2],
        "old_logprobs": [None, -0.5, 0],
        "ref_logprobs": [None, None, -3],
        "sampler_logprobs": [None, -0.25, 1e-7],
        "share_key": [0, -5, 2**63 - 1],
        "source": {"ignored": [1]},
    }
    nulls = {**GOOD, "reward": None, "advantage": None, "share_key": None, "old_logprobs": None}
    first, second, third = read_rollouts(write(tmp_path / name, full, "", GOOD, "  ", {**nulls, "advantage": 0.5}))
    assert first.input_ids.dtype == np.int64 and first.input_ids.tolist() == [3, 1, 2]
    assert first.loss_mask.dtype == bool and first.loss_mask.tolist() == [False, True, True]
    assert (first.group, first.rollout, first.reward, first.length) == ("7", "12", 1.0, 3)
    assert first.advantage.dtype == np.float64 and first.advantage.tolist() == [0, -1.5, 2]
    assert np.array_equal(first.old_logprobs, [math.nan, -0.5, 0], equal_nan=True)
    assert np.array_equal(first.ref_logprobs, [math.nan, math.nan, -3], equal_nan=True)
    assert np.array_equal(first.sampler_logprobs, [math.nan, -0.25, 1e-7], equal_nan=True)
    assert first.share_key.tolist() == [0, -5, 2**63 - 1]
    optional = ("reward", "advantage", *LOGPROB_FIELDS, "share_key")
    assert [getattr(second, field) for field in optional] == [None] * 6
    assert (third.advantage, third.reward, third.old_logprobs) == (0.5, None, None)


def test_limits_take_the_first_of_the_file_and_of_each_group(tmp_path):
    records = [{**GOOD, "group": g, "rollout": i} for i, g in enumerate("aababbc")]
    path = write(tmp_path / "a.jsonl", *records, "not json")
    names = [r.rollout for r in read_rollouts(path, limit=7)]
    assert names == list("0123456")
    assert [r.rollout for r in read_rollouts(path, limit=4)] == list("0123")
    assert [r.rollout for r in read_rollouts(path, limit=6, limit_per_group=1)] == ["0", "2"]
    path = write(tmp_path / "b.jsonl", *records)
    assert [r.rollout for r in read_rollouts(path, limit_per_group=2)] == ["0", "1", "2", "4", "6"]
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_rollouts(path, limit=0)
    with pytest.raises(ValueError, match="limit_per_group must be at least 1, got -1"):
        read_rollouts(path, limit_per_group=-1)


BROKEN = [
    ("input_ids", 5, "expected a list of integers, got 5 (int)"),
    ("input_ids", [], "expected at least one token id, got none"),
    ("input_ids", [1, 2.0, 3], "expected 64-bit integers, got 2.0 (float) at entry 1"),
    ("input_ids", [1, True, 3], "expected 64-bit integers, got True (bool) at entry 1"),
    ("input_ids", [1, 2, "3"], "expected 64-bit integers, got '3' (str) at entry 2"),
    ("input_ids", [1, None, 3], "expected 64-bit integers, got None (NoneType) at entry 1"),
    ("input_ids", [1, [2], 3], "expected 64-bit integers, got [2] (list) at entry 1"),
    ("input_ids", [1, 2, math.nan], "expected 64-bit integers, got nan (float) at entry 2"),
    ("input_ids", [2**63, 2, 3], "expected 64-bit integers, got 9223372036854775808 (int) at entry 0"),
    ("input_ids", [1, -2, 3], "expected token ids in [0, 2147483648), got -2 at entry 1"),
    ("input_ids", [1, 2, 2**31], "expected token ids in [0, 2147483648), got 2147483648 at entry 2"),
    ("input_ids", [1, 100, 3], "expected ids of the vocabulary, in [0, 100), got 100 at entry 1"),
    ("loss_mask", None, "expected a list of 0 and 1, got None (NoneType)"),
    ("loss_mask", [0, 1], "expected 3 entries, one for each of input_ids, got 2"),
    ("loss_mask", [0, 1, 1, 1], "expected 3 entries, one for each of input_ids, got 4"),
    ("loss_mask", [0, 2, 1], "expected 0 or 1, got 2 at entry 1"),
    ("loss_mask", [0, 1, -1], "expected 0 or 1, got -1 (int) at entry 2"),
    ("loss_mask", [0, 300, 1], "expected 0 or 1, got 300 (int) at entry 1"),
    ("loss_mask", [0, 0.5, 1], "expected 0 or 1, got 0.5 (float) at entry 1"),
    ("loss_mask", [0, 1.0, 1], "expected 0 or 1, got 1.0 (float) at entry 1"),
    ("loss_mask", [0, None, 1], "expected 0 or 1, got None (NoneType) at entry 1"),
    ("group", None, "expected a string or an integer, got None (NoneType)"),
    ("group", 1.5, "expected a string or an integer, got 1.5 (float)"),
    ("rollout", True, "expected a string or an integer, got True (bool)"),
    ("reward", math.nan, "expected a finite number, got nan (float)"),
    ("reward", -math.inf, "expected a finite number, got -inf (float)"),
    ("reward", "1", "expected a number, got '1' (str)"),
    ("reward", True, "expected a number, got True (bool)"),
    ("reward", 10**400, "expected a finite number, got 1000"),
    ("advantage", "high", "expected a number, got 'high' (str)"),
    ("advantage", math.inf, "expected a finite number, got inf (float)"),
    ("advantage", [0.5, 0.5], "expected 3 entries, one for each of input_ids, got 2"),
    ("advantage", [0.5, None, 0.5], "expected a number, got None (NoneType) at entry 1"),
    ("advantage", [0.5, math.nan, 0.5], "expected finite numbers, got nan at entry 1"),
    ("share_key", [1, 2], "expected 3 entries, one for each of input_ids, got 2"),
    ("share_key", [1, 2, 0.5], "expected 64-bit integers, got 0.5 (float) at entry 2"),
    ("share_key", 4, "expected a list of integers, got 4 (int)"),
    (
        "routes",
        4,
        "expected, for each token, one list of expert ids for each MoE layer, all of one length; got 4 (int)",
    ),
    ("routes", [[[0, 1]]] * 2, "expected 3 entries, one for each of input_ids, got 2"),
    ("routes", [[[0, 1]], [[0, 1]], [[0]]], "expected, for each token, one list of expert ids for each MoE layer"),
    ("routes", [[0, 1]] * 3, "expected, for each token, one list of expert ids for each MoE layer"),
    ("routes", [[[0.0, 1.0]]] * 3, "expected, for each token, one list of expert ids for each MoE layer"),
    ("routes", [[[0, 1]], [[0, -1]], [[0, 1]]], "expected expert ids in [0, 32768), got -1"),
    ("routes", [[[0, 1]], [[0, 1]], [[2, 2]]], "expected different experts in each list, got one twice at entry 2"),
]
for _field in LOGPROB_FIELDS:
    BROKEN += [
        (_field, [None, -1], "expected 3 entries, one for each of input_ids, got 2"),
        (_field, -1.0, "expected a list of numbers, got -1.0 (float)"),
        (_field, [None, -1, "-1"], "expected a number, got '-1' (str) at entry 2"),
        (_field, [None, -1, False], "expected a number, got False (bool) at entry 2"),
        (_field, [None, math.nan, -1], "expected finite numbers, got nan at entry 1"),
        (_field, [None, -1, -math.inf], "expected finite numbers, got -inf at entry 2"),
        (_field, [None, -(10**400), -1], "expected finite numbers, got -1000"),
        (_field, [None, -1, 0.01], "expected log-probs, which are at most 0, got 0.01 at entry 2"),
    ]


@pytest.mark.parametrize(("field", "value", "problem"), BROKEN)
def test_a_broken_field_names_file_line_and_field(tmp_path, field, value, problem):
    path = write(tmp_path / "a.jsonl", GOOD, {**GOOD, field: value})
    with pytest.raises(RolloutError, match=re.escape(f"{path}, line 2: field {field}: {problem}")) as caught:
        read_rollouts(path, vocab_size=100, max_tokens=3)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.where, caught.value.field) == (f"{path}, line 2", field)


def test_a_rollout_over_the_pack_budget_names_file_line_and_field(tmp_path):
    long = {**GOOD, "input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1, 1]}
    path = write(tmp_path / "a.jsonl", GOOD, long)
    text = (
        f"{path}, line 2: field input_ids: expected at most 3 tokens, the pack budget (max_pack_tokens), got 4; raise"
    )
    with pytest.raises(RolloutError, match=re.escape(text)):
        read_rollouts(path, max_tokens=3)
    assert len(read_rollouts(path, max_tokens=4)) == len(read_rollouts(path)) == 2
    assert len(read_rollouts(path, max_tokens=3, limit_per_group=1)) == 1  # only what is taken has to fit


@pytest.mark.parametrize("field", GOOD)
def test_a_missing_field_is_named(tmp_path, field):
    path = write(tmp_path / "a.jsonl.gz", {name: GOOD[name] for name in GOOD if name != field})
    with pytest.raises(RolloutError, match=re.escape(f"{path}, line 1: field {field}: expected this field, but it is")):
        read_rollouts(path)


def test_a_missing_field_names_what_is_there_and_the_way_on(tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [], "group": "g", "reward": 1})
    text = "; the object has 'messages', 'group', 'reward'; nothing is tokenized here (docs/rollouts.md)"
    with pytest.raises(RolloutError, match=re.escape(text)):
        read_rollouts(path)


@pytest.mark.parametrize(
    ("name", "field"),
    [("advantages", "advantage"), ("old_log_probs", "old_logprobs"), ("refLogprob", "ref_logprobs")],
)
def test_another_spelling_of_a_field_is_refused_where_the_field_is_absent(tmp_path, name, field):
    value = [None, -0.5, -1]
    path = write(tmp_path / "a.jsonl", {**GOOD, name: value})
    with pytest.raises(RolloutError, match=re.escape(f"line 1: field {name}: expected the name {field}: rename it")):
        read_rollouts(path)
    beside = {**GOOD, "rewards": {"style": 1}, "reward": 0.5, name: None, "value": 3}
    assert read_rollouts(write(tmp_path / "b.jsonl", beside))[0].reward == 0.5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"input_ids": [1,', "expected one JSON object, but the line is not JSON: "),
        ("{} {}", "expected one JSON object, but the line is not JSON: "),
        ("[" * 100_000, "expected one JSON object, but the line is not JSON: "),
        ("[1, 2]", "expected a JSON object, got [1, 2] (list)"),
        ("null", "expected a JSON object, got None (NoneType)"),
    ],
    ids=["cut", "two", "deep", "list", "null"],
)
def test_a_line_that_is_no_object_is_named(tmp_path, line, problem):
    path = write(tmp_path / "a.jsonl", GOOD, "", line)
    with pytest.raises(RolloutError, match=re.escape(f"{path}, line 3: {problem}")):
        read_rollouts(path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + b'{"group": "\xff\xfe"}\n')
    with pytest.raises(RolloutError, match=re.escape(f"{path}, line 2: expected one JSON object")):
        read_rollouts(path)


def test_files_that_hold_no_rollouts_are_named(tmp_path):
    with pytest.raises(RolloutError, match="none.jsonl: expected a rollout file, but there is no such file"):
        read_rollouts(tmp_path / "none.jsonl")
    with pytest.raises(RolloutError, match="a.jsonl: expected at least one rollout, but the file is empty"):
        read_rollouts(write(tmp_path / "a.jsonl"))
    with pytest.raises(RolloutError, match="b.jsonl.gz: expected at least one rollout, but the file is empty"):
        read_rollouts(write(tmp_path / "b.jsonl.gz", "", "  "))
    with pytest.raises(RolloutError, match=r"a.parquet: expected a .jsonl or .jsonl.gz file"):
        read_rollouts(tmp_path / "a.parquet")
    (tmp_path / "c.jsonl").mkdir()
    with pytest.raises(RolloutError, match="c.jsonl: expected a readable rollout file, but reading failed: "):
        read_rollouts(tmp_path / "c.jsonl")


def test_damaged_gzip_files_are_named(tmp_path):
    whole = gzip.compress(b"".join(json.dumps({**GOOD, "rollout": i}).encode() + b"\n" for i in range(500)))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for name, data in (("cut", whole[: len(whole) // 2]), ("plain", b'{"a": 1}\n'), ("flipped", bytes(flipped))):
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(data)
        with pytest.raises(RolloutError, match=re.escape(str(path))):
            read_rollouts(path)


def test_a_rollout_in_memory_takes_lists_and_arrays_by_the_same_rules():
    made = Rollout(
        input_ids=np.array([3, 1], np.int32),
        loss_mask=np.array([0, 1]),
        group=np.int64(4),
        rollout="r",
        reward=np.float32(0.5),
        advantage=np.array([1, 2], np.float32),
        old_logprobs=np.array([np.nan, -1.0], np.float32),
        share_key=np.array([1, 1], np.uint64),
    )
    assert (made.group, made.reward) == ("4", 0.5)
    assert [made.input_ids.dtype, made.share_key.dtype] == [np.int64] * 2
    assert [made.advantage.dtype, made.old_logprobs.dtype] == [np.float64] * 2
    assert Rollout([1], [True], "g", "r", advantage=np.float64(2)).advantage == 2.0
    assert Rollout((1,), (1,), "g", "r").loss_mask.tolist() == [True]
    with pytest.raises(AttributeError):
        made.reward = 1.0
    again = pickle.loads(pickle.dumps(made))
    assert again.input_ids.tolist() == [3, 1] and again.group == "4"
    assert cp_engine.Rollout is Rollout and cp_engine.read_rollouts is read_rollouts


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("input_ids", np.array([1.0, 2.0, 3.0]), "expected integers, got an array of float64"),
        ("input_ids", np.zeros((1, 3), int), "expected a list of integers, got an array of shape (1, 3)"),
        ("input_ids", np.array([1, 2, 2**63], np.uint64), "expected 64-bit signed integers, got 9223372036854775808"),
        ("input_ids", "abc", "expected a list of integers, got 'abc' (str)"),
        ("loss_mask", np.array([0.0, 1.0, 1.0]), "expected 0 or 1, got an array of float64"),
        ("loss_mask", np.array([0, 1, 256]), "expected 0 or 1, got 256 at entry 2"),
        ("old_logprobs", np.array([np.nan, -np.inf, 0]), "expected finite numbers, got -inf at entry 1"),
        ("old_logprobs", np.array(["a", "b", "c"]), "expected numbers, got an array of <U1"),
        ("advantage", np.array([0.0, np.nan, 0.0]), "expected finite numbers, got nan at entry 1"),
    ],
)
def test_a_broken_rollout_in_memory_names_itself_and_the_field(field, value, problem):
    with pytest.raises(RolloutError, match=re.escape(f"rollout 'r' of group 'g': field {field}: {problem}")):
        Rollout(**{**GOOD, field: value})


@pytest.mark.parametrize("field", ["input_ids", "loss_mask", "advantage", "old_logprobs"])
def test_a_tensor_is_refused_with_the_way_on(field):
    with pytest.raises(RolloutError, match=f"field {field}: expected a list of .*, got a Tensor: pass its .tolist()"):
        Rollout(**{**GOOD, field: torch.zeros(3)})


def test_limits_of_a_batch_in_memory():
    batch = [Rollout([1, 2], [0, 1], "g", "a"), Rollout([1, 9, 3], [0, 1, 1], "g", "b")]
    assert check_rollouts(batch, vocab_size=10, max_tokens=3) is batch
    where = re.escape("rollouts[1], 'b' of group 'g': field input_ids: ")
    with pytest.raises(RolloutError, match=where + re.escape("expected ids of the vocabulary, in [0, 9), got 9")):
        check_rollouts(batch, vocab_size=9)
    with pytest.raises(RolloutError, match=where + "expected at most 2 tokens, the pack budget"):
        check_rollouts(batch, max_tokens=2)
    with pytest.raises(RolloutError, match="rollouts: expected at least one rollout, got none"):
        check_rollouts([])
    with pytest.raises(RolloutError, match=re.escape("rollouts[0]: expected a Rollout, got {'a': 1} (dict)")):
        check_rollouts([{"a": 1}])


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(RolloutError("f, line 2", "reward", "expected a number")))
    assert str(error) == "f, line 2: field reward: expected a number"


def test_flattening():
    batch = [
        Rollout([5, 6], [0, 1], "b", 0, share_key=[1, 2]),
        Rollout([5], [1], "a", 0, share_key=[1]),
        Rollout([5, 6, 7], [1, 0, 1], "b", 1, share_key=[1, 3, 4]),
    ]
    flat = flatten_rollouts(batch)
    assert flat.token.tolist() == [5, 6, 5, 5, 6, 7] and flat.row_start.tolist() == [0, 2, 3, 6]
    assert flat.group.tolist() == [0, 1, 0] and (flat.rollouts, flat.groups) == (3, 2)
    assert flat.loss_mask.tolist() == [False, True, True, True, False, True]
    assert flat.share_key.tolist() == [1, 2, 1, 1, 3, 4]
    assert [flat.forest(share).tokens for share in ("batch", "group")] == [4, 5]
    assert flat.forest("batch", use_share_key=False).tokens == 3
    with pytest.raises(ValueError, match="share must be one of batch, group, got 'all'"):
        flat.forest("all")
    unkeyed = Rollout([5], [1], "a", 9)
    with pytest.raises(RolloutError, match="field share_key: expected it on all rollouts of a batch or on none"):
        flatten_rollouts([*batch, unkeyed])
    assert flatten_rollouts([unkeyed]).share_key is None
    nothing = flatten_rollouts([])
    assert (nothing.rollouts, nothing.groups, len(nothing.token)) == (0, 0, 0) and nothing.row_start.tolist() == [0]
