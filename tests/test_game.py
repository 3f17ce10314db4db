"""The sample game: its rules, its reach for a random player, and the committed sample."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from cp_engine.sharding.forest import build_forest
from launch import game as coin_game
from launch.game import ALPHABET, BEGIN, LEVELS, MODEL, POLICY_NOISE, TOOL, Game

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "launch" / "data" / "sample.jsonl"


def sample() -> list[dict]:
    return [json.loads(line) for line in SAMPLE.read_text().splitlines()]


def finish(game: Game, turn_of) -> Game:
    while not game.done:
        game.play(turn_of(game))
    return game


def coin_drawer(level: int, seed: int) -> int:
    """Found by asking: with seed and level fixed the cabinet always answers alike."""
    for drawer in range(LEVELS[level - 1].drawers):
        if Game(level, seed).play(f"{drawer}\n".encode()) not in ("<", ">", "key<", "key>"):
            return drawer
    raise AssertionError("no drawer holds the coin")


def test_a_whole_game_token_by_token():
    coin = coin_drawer(1, seed=3)
    assert 0 < coin < 3, "seed 3 puts the coin between two drawers"
    game = Game(1, seed=3)
    assert game.play(b"0\n") == ">"
    assert game.play(b"3\nignored after the newline") == "<"
    assert game.play(b"\n") == "?"
    assert not game.done and game.reward == 0.0
    assert game.play(f"{coin}".encode()) == "coin"
    assert game.done and game.reward == 1.0 - 0.5 * 3 / 4
    prompt = b"Find the coin. Drawers 0-3, 5 opens.\n"
    written = [(b"0\n", b">"), (b"3\n", b"<"), (b"\n", b"?")]
    expected, mask = [BEGIN, *prompt, MODEL], [0] * (len(prompt) + 2)
    for turn, answer in written:
        expected += [*turn, TOOL, *answer, MODEL]
        mask += [1] * len(turn) + [0] * 3
    assert game.tokens == [*expected, ord(str(coin))]
    assert game.loss_mask == [*mask, 1]


def test_the_locked_cabinet_wants_its_key_first():
    coin = coin_drawer(4, seed=0)
    game = Game(4, seed=0)
    answer = game.play(f"{coin}\n".encode())
    assert answer.startswith("k") and int(answer[1:]) != coin
    assert game.play(f"{coin}\n".encode()) == answer
    assert game.play(f"{answer[1:]}\n".encode()) == ("key<" if coin < int(answer[1:]) else "key>")
    assert game.play(f"{coin}\n".encode()) == "coin"
    assert game.reward == 1.0 - 0.5 * 3 / 8


def test_any_token_a_model_may_write_is_a_turn():
    game = Game(2, seed=0)
    assert game.play([511, 300, BEGIN, 0, 49]) == "?", "four tokens make a turn, the fifth is not read"
    assert game.tokens[-7:] == [511, 300, BEGIN, 0, TOOL, ord("?"), MODEL]


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Game(5, 0), r"level must lie in 1\.\.4, got 5"),
        (lambda: Game(1, 0).play([]), r"a turn is one or more token ids, got \[\]"),
        (lambda: Game(1, 0).play([-1]), r"a turn is one or more token ids, got \[-1\]"),
        (lambda: finish(Game(1, 0), lambda g: b"9\n").play(b"1\n"), "the game is over"),
        (lambda: coin_game.play_group(1, "0", 1), "at least 2 rollouts"),
    ],
)
def test_bad_calls_are_refused(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()


def test_a_random_player_earns_a_tenth_at_the_first_level_and_ever_less_above():
    rng = random.Random(0)
    means = [
        np.mean([finish(Game(level, seed), lambda g: coin_game.random_turn(rng)).reward for seed in range(1000)])
        for level in range(1, len(LEVELS) + 1)
    ]
    assert means[0] >= 0.1
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("level", range(1, len(LEVELS) + 1))
def test_the_script_always_finds_the_coin_or_runs_out_of_opens(level):
    games = [finish(Game(level, seed), lambda g: coin_game.scripted_turn(g.level, g.history)) for seed in range(300)]
    rewards = np.array([game.reward for game in games])
    assert ((rewards == 0) | ((rewards >= 0.5) & (rewards <= 1))).all()
    # Halving needs 3, 4 and 7 opens at most; behind the lock, 9 may not be enough.
    assert (rewards > 0).mean() >= (1.0 if level < 4 else 0.7)


def test_the_script_reproduces_the_committed_sample(tmp_path):
    out = tmp_path / "sample.jsonl"
    command = [sys.executable, ROOT / "launch" / "game.py", "--out", out, "--groups", "6", "--rollouts", "8"]
    subprocess.run([*command, "--seed", "0"], check=True)
    assert out.read_bytes() == SAMPLE.read_bytes()


def test_sample_rows_replay_in_the_game():
    """The model-written tokens of every row, played again, give the same row and reward."""
    for row in sample():
        level, number = int(row["group"][5]), int(row["group"][-3:])
        ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"])
        assert len(ids) == len(mask) == len(row["old_logprobs"])
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        ends = np.flatnonzero(np.diff(mask, append=0) == -1) + 1
        game = Game(level, f"0/{number}")
        for start, end in zip(starts, ends, strict=True):
            game.play(ids[start:end].tolist())
        assert game.tokens[: len(ids)] == row["input_ids"]
        assert game.reward == pytest.approx(row["reward"], abs=1e-6)


def test_sample_log_probs_are_the_policys():
    """At every trained token the two possible values; no value elsewhere."""
    stray = round(math.log(POLICY_NOISE / len(ALPHABET)), 6)
    wanted = round(math.log(POLICY_NOISE / len(ALPHABET) + 1 - POLICY_NOISE), 6)
    seen = []
    for row in sample():
        trained = [x for x, trains in zip(row["old_logprobs"], row["loss_mask"], strict=True) if trains]
        assert [x is None for x in row["old_logprobs"]] == [not m for m in row["loss_mask"]]
        assert set(trained) <= {stray, wanted}
        seen += trained
    noise = np.mean([x == stray for x in seen])
    assert 0.15 < noise < 0.45, f"expected about {POLICY_NOISE * 10 / 11:.2f} stray bytes, got {noise:.2f}"


def test_sample_is_a_forest_worth_training_on():
    rows = sample()
    assert len(rows) == 48 and SAMPLE.stat().st_size < 200_000
    groups = defaultdict(list)
    for row in rows:
        groups[row["group"]].append(row)
    assert len(groups) == 6
    assert all(len({row["reward"] for row in group}) > 1 for group in groups.values()), "rewards differ in each group"
    ids = [row["input_ids"] for row in rows]
    assert max(map(max, ids)) < coin_game.VOCABULARY
    pairs = [
        sorted(pair, key=len) for group in groups.values() for pair in combinations((r["input_ids"] for r in group), 2)
    ]
    assert any(a == b for a, b in pairs), "equal rollouts"
    assert any(len(a) < len(b) and b[: len(a)] == a for a, b in pairs), "a rollout that is a prefix of another"
    forest = build_forest(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))
    assert 2000 < forest.flat_tokens < 10_000 and forest.flat_tokens > 3 * forest.tokens
    rollout, _ = forest.path_segments()
    assert np.bincount(rollout).max() >= 5, "branch points at several depths of one path"
