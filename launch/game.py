"""The coin game: a small tool-using game in bytes, and the script that plays it to make sample rollouts.

A cabinet has numbered drawers and a coin lies in one of them. The player writes a drawer's number and a newline; the
cabinet answers with one of

    coin      the player has won
    < or >    the coin lies in a lower or a higher drawer
    k17       this is the coin's drawer but it is locked; the key lies in drawer 17 (locked cabinets only)
    key< key> the key, and where the coin lies from here
    ?         no such drawer, or no number at all

and after ``opens`` turns the game is over. The reward is 0 without the coin, 1 for a coin at the first turn, and falls
evenly to 0.5 for one at the last turn. Everything follows from (level, seed) and the player's turns.

Tokens: 0..255 are bytes, then BEGIN (a rollout's first token), MODEL (the player's turn begins), TOOL (an answer
begins) and PAD (which batched generation fills up with; no rollout needs it). A rollout reads

    BEGIN prompt MODEL turn [TOOL answer MODEL turn]...

and ends with the player's last turn. ``loss_mask`` is 1 on the turns. To let a model play, generate from
``game.tokens`` until a newline or ``TURN_BYTES`` tokens, and hand the result to ``game.play`` until ``game.done``.

``python launch/game.py --out FILE`` plays groups of rollouts: of one cabinet each, by one policy (`POLICY_NOISE`), as
a tree: a rollout may start anywhere on an earlier one of its group, and some are cut off before their game is over,
so a group has branches at several depths, equal rollouts, and rollouts that are prefixes of others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BEGIN, MODEL, TOOL, PAD = 256, 257, 258, 259
VOCABULARY = 260

NEWLINE = ord("\n")
ALPHABET = tuple(b"0123456789\n")  # the bytes that a legal turn is made of
TURN_BYTES = 4  # a turn ends at its newline or here

POLICY_NOISE = 0.3  # share of bytes that the sample's policy draws uniformly from ALPHABET
BRANCH_SHARE = 0.5  # share of rollouts that start on an earlier one
CUT_SHARE = 0.25  # share of rollouts with a turn limit below the game's own


@dataclass(frozen=True)
class Level:
    """One difficulty."""

    drawers: int
    opens: int
    locked: bool


LEVELS = (Level(4, 5, False), Level(10, 4, False), Level(100, 7, False), Level(100, 9, True))


class Game:
    """One episode.

    Args:
        level: 1 .. len(LEVELS).
        seed: decides where coin and key lie.

    Raises:
        ValueError: for a level that does not exist.
    """

    def __init__(self, level: int, seed: int | str):
        if not 1 <= level <= len(LEVELS):
            raise ValueError(f"level must lie in 1..{len(LEVELS)}, got {level}")
        self.level = LEVELS[level - 1]
        rng = random.Random(f"cabinet {level} {seed}")
        self._coin = _below(rng, self.level.drawers)
        self._key = (self._coin + 1 + _below(rng, self.level.drawers - 1)) % self.level.drawers
        self._has_key = not self.level.locked
        lock = " It is locked." if self.level.locked else ""
        prompt = f"Find the coin. Drawers 0-{self.level.drawers - 1}, {self.level.opens} opens.{lock}\n"
        self.tokens: list[int] = [BEGIN, *prompt.encode(), MODEL]
        self.loss_mask: list[int] = [0] * len(self.tokens)
        self.history: list[tuple[int | None, str]] = []  # (drawer, answer) of each turn
        self.done = False
        self.reward = 0.0

    def play(self, turn: Sequence[int]) -> str:
        """Append a turn (token ids; what follows its newline is dropped) and the cabinet's answer, which is returned.

        Raises:
            ValueError: for an empty turn, a negative id, or a game that is over.
        """
        if self.done:
            raise ValueError("the game is over: start another Game")
        written = one_turn(turn)
        if not written or min(written) < 0:
            raise ValueError(f"a turn is one or more token ids, got {list(turn)}")
        self.tokens += written
        self.loss_mask += [1] * len(written)
        drawer = self._drawer(written)
        answer = self._open(drawer)
        self.history.append((drawer, answer))
        if answer == "coin":
            self.reward = 1.0 - 0.5 * (len(self.history) - 1) / (self.level.opens - 1)
        self.done = answer == "coin" or len(self.history) == self.level.opens
        if not self.done:
            reply = [TOOL, *answer.encode(), MODEL]
            self.tokens += reply
            self.loss_mask += [0] * len(reply)
        return answer

    def _drawer(self, turn: list[int]) -> int | None:
        """The turn's first number, as wide as the cabinet's largest at most; None without one."""
        text = "".join(chr(t) if t in ALPHABET else " " for t in turn)
        numbers = text.split()
        return int(numbers[0][: len(str(self.level.drawers - 1))]) if numbers else None

    def _open(self, drawer: int | None) -> str:
        if drawer is None or drawer >= self.level.drawers:
            return "?"
        if drawer == self._coin:
            return "coin" if self._has_key else f"k{self._key}"
        side = "<" if self._coin < drawer else ">"
        if self.level.locked and drawer == self._key:
            self._has_key = True
            return f"key{side}"
        return side


def scripted_turn(level: Level, history: Sequence[tuple[int | None, str]]) -> bytes:
    """What a player who halves the range and fetches the key writes next."""
    low, high = 0, level.drawers - 1
    coin = key = None
    has_key = False
    for drawer, answer in history:
        has_key |= answer.startswith("key")
        if answer.startswith("k") and not answer.startswith("key"):
            coin, key = drawer, int(answer[1:])
        elif answer.endswith("<"):
            high = min(high, drawer - 1)
        elif answer.endswith(">"):
            low = max(low, drawer + 1)
    if coin is None:
        drawer = (low + high) // 2
    else:
        drawer = coin if has_key else key
    return f"{drawer}\n".encode()


def random_turn(rng: random.Random) -> list[int]:
    """A turn of uniformly random legal bytes."""
    return one_turn([ALPHABET[_below(rng, len(ALPHABET))] for _ in range(TURN_BYTES)])


def noisy_turn(game: Game, rng: random.Random) -> tuple[list[int], list[float]]:
    """A turn of the sample's policy and the log-probability of each of its bytes.

    Each byte is the script's, or with probability `POLICY_NOISE` a uniformly random legal one. Where noise has left
    the script's text, the script ends the turn.
    """
    text = scripted_turn(game.level, game.history)
    turn: list[int] = []
    logprobs: list[float] = []
    while len(turn) < TURN_BYTES and NEWLINE not in turn:
        wanted = text[len(turn)] if text.startswith(bytes(turn)) else NEWLINE
        byte = ALPHABET[_below(rng, len(ALPHABET))] if rng.random() < POLICY_NOISE else wanted
        turn.append(byte)
        logprobs.append(math.log(POLICY_NOISE / len(ALPHABET) + (1 - POLICY_NOISE) * (byte == wanted)))
    return turn, logprobs


def play_group(level: int, seed: str, rollouts: int) -> list[dict]:
    """Play one cabinet several times, as a tree of rollouts with different rewards.

    Equal rewards teach a group-normalised loss nothing, so such a group is played anew.
    """
    if rollouts < 2:
        raise ValueError(f"a group needs at least 2 rollouts for their rewards to differ, got {rollouts}")
    attempt = 0
    while True:
        rng = random.Random(f"players {level} {seed} {attempt}")
        played: list[list[tuple[list[int], list[float]]]] = []
        group = [_play_rollout(level, seed, rng, played) for _ in range(rollouts)]
        if len({rollout["reward"] for rollout in group}) > 1:
            return group
        attempt += 1


def _play_rollout(level: int, seed: str, rng: random.Random, played: list) -> dict:
    """Play one rollout, from the start or from a turn of an earlier one, and add its turns to ``played``."""
    game = Game(level, seed)
    turns: list[tuple[list[int], list[float]]] = []
    if played and rng.random() < BRANCH_SHARE:
        earlier = played[_below(rng, len(played))]
        turns = earlier[: _below(rng, len(earlier))]
    limit = game.level.opens
    if rng.random() < CUT_SHARE:
        limit = 1 + _below(rng, limit)
    old_logprobs: list[float | None] = []
    for turn, logprobs in turns:
        old_logprobs += [None] * (len(game.tokens) - len(old_logprobs)) + logprobs
        game.play(turn)
    while not game.done:
        old_logprobs += [None] * (len(game.tokens) - len(old_logprobs))
        turn, logprobs = noisy_turn(game, rng)
        turns = [*turns, (turn, logprobs)]
        old_logprobs += logprobs
        game.play(turn)
        if len(turns) >= limit:
            break
    end = len(old_logprobs)  # a game that was cut off leaves an answer behind that nobody reads
    played.append(turns)
    return {
        "input_ids": game.tokens[:end],
        "loss_mask": game.loss_mask[:end],
        "old_logprobs": [None if x is None else round(x, 6) for x in old_logprobs],
        "reward": round(game.reward, 6),
    }


def sample_rollouts(groups: int, rollouts: int, seed: int) -> list[dict]:
    """Rollouts of the format in the README; group g plays level ``1 + g % len(LEVELS)``."""
    sample = []
    for g in range(groups):
        level = 1 + g % len(LEVELS)
        for r, rollout in enumerate(play_group(level, f"{seed}/{g}", rollouts)):
            sample.append({"group": f"level{level}-{g:03d}", "rollout": f"{r:02d}", **rollout})
    return sample


def one_turn(tokens: Sequence[int]) -> list[int]:
    """The tokens up to the first newline, `TURN_BYTES` at most."""
    turn = list(tokens[:TURN_BYTES])
    return turn[: turn.index(NEWLINE) + 1] if NEWLINE in turn else turn


def _below(rng: random.Random, bound: int) -> int:
    """Uniform in [0, bound). `random()` alone gives the same numbers on every Python."""
    return int(rng.random() * bound)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play the coin game and write its rollouts.")
    parser.add_argument("--out", required=True, type=Path, help="JSONL file to write")
    parser.add_argument("--groups", type=int, default=6, help="cabinets to play")
    parser.add_argument("--rollouts", type=int, default=8, help="rollouts of each cabinet, at least 2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lines = [
        json.dumps(rollout, separators=(",", ":")) for rollout in sample_rollouts(args.groups, args.rollouts, args.seed)
    ]
    args.out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
