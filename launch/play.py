"""Reinforcement learning on the coin game: each step plays fresh rollouts with the present weights and trains on them.

    python -m launch.play launch/configs/game.yaml [key.sub=value ...]
    torchrun --nproc-per-node 2 -m launch.play launch/configs/game.yaml

The first rank plays with plain `transformers` generate on the weights that `Engine.named_full_weights` streams; the
others are sent its rollouts. Before the first step and after the last one the greedy policy plays a fixed set of
cabinets, which no step trains on. Writes metrics.jsonl, config.json and the final weights to the output folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from cp_engine.cli.main import guarded
from cp_engine.cli.ranks import read_config_for_ranks
from cp_engine.config import Config
from cp_engine.distributed.ranks import Ranks, join_ranks, shutdown
from cp_engine.engine import Engine
from cp_engine.models.load import check_save_place
from cp_engine.rollouts import Rollout
from cp_engine.trackers import check_trackers, open_trackers
from launch.game import Game
from launch.player import Player


@dataclass(frozen=True)
class Play:
    """What is played."""

    level: int = 1
    groups: int = 8
    """Cabinets a step."""
    rollouts: int = 8
    """Games of each cabinet."""
    eval_games: int = 64
    """Cabinets that the greedy policy is measured on."""

    def __post_init__(self):
        if self.groups < 1 or self.eval_games < 1:
            raise ValueError(f"expected at least one cabinet, got groups {self.groups}, eval games {self.eval_games}")
        if self.rollouts < 2:
            raise ValueError(f"a group needs at least 2 rollouts for their rewards to differ, got {self.rollouts}")
        Game(self.level, 0)  # refuses a level that does not exist


@dataclass(frozen=True)
class Result:
    """A whole run."""

    start: float  # the greedy policy's mean reward before the first step
    end: float  # and after the last one
    rewards: list[float]  # mean reward of each step's rollouts
    flat_tokens: int  # of all steps
    tree_tokens: int
    sampler_gap: float  # largest difference between `generate`'s and the engine's log-probs, last step's rollouts
    seconds: float
    cpu_seconds: float  # of this rank: what counts where the processor is shared


class GameLoop:
    """An engine and the player that makes its rollouts.

    Every rank constructs it and calls its methods in the same order; only the first one has a player.
    """

    def __init__(self, config: Config, play: Play, ranks: Ranks):
        self.config, self.play, self.ranks = config, play, ranks
        self.engine = Engine(config, ranks)
        torch.manual_seed(config.seed)  # of sampling: nothing else in the loop is random
        self.player = Player(config, ranks.device) if ranks.is_first else None

    def renew_player(self) -> None:
        """Give the player the engine's present weights."""
        weights = self.engine.named_full_weights()
        if self.player is not None:
            self.player.take(weights)
        else:
            for _ in weights:  # sharded tensors are gathered by all ranks together
                pass

    def greedy_reward(self) -> float:
        """Mean reward of the greedy policy over the fixed cabinets."""
        return self._on_first_rank(self._play_greedily)

    def fresh_rollouts(self, step: int) -> list[Rollout]:
        """Rollouts of the present weights on cabinets that no other step has; equal on every rank."""
        return self._on_first_rank(lambda: self._play_groups(step))

    def sampler_gap(self, rollouts: list[Rollout]) -> float:
        """Largest difference between the log-probs of sampling and those of the engine's present weights."""
        found = zip(self.engine.logprobs(rollouts), rollouts, strict=True)
        return float(max(np.nanmax(np.abs(ours - r.sampler_logprobs)) for ours, r in found))

    def _play_greedily(self) -> float:
        games = [Game(self.play.level, f"held out {number}") for number in range(self.play.eval_games)]
        self.player.play(games, greedy=True)
        return float(np.mean([game.reward for game in games]))

    def _play_groups(self, step: int) -> list[Rollout]:
        cabinets = [f"{self.config.seed}/{step}/{number}" for number in range(self.play.groups)]
        names = [(cabinet, f"{number:02d}") for cabinet in cabinets for number in range(self.play.rollouts)]
        games = [Game(self.play.level, cabinet) for cabinet, _ in names]
        logprobs = self.player.play(games, greedy=False)
        return [
            Rollout(game.tokens, game.loss_mask, group, name, game.reward, sampler_logprobs=np.array(row))
            for (group, name), game, row in zip(names, games, logprobs, strict=True)
        ]

    def _on_first_rank(self, make: Callable):
        """What the first rank makes, on every rank."""
        made = [make() if self.ranks.is_first else None]
        if self.ranks.group is not None:
            dist.broadcast_object_list(made, src=0, group=self.ranks.group, device=self.ranks.device)
        return made[0]


def train(config: Config, play: Play, ranks: Ranks, report: Callable[[dict], None]) -> tuple[GameLoop, Result]:
    """Train for ``config.steps`` steps.

    Args:
        report: called on every rank after each step with the engine's metrics and the step's ``reward`` and
            ``play_seconds``.
    """
    begun, cpu_begun, steps = time.perf_counter(), time.process_time(), []
    loop = GameLoop(config, play, ranks)
    start = loop.greedy_reward()
    for step in range(config.steps):
        play_begun = time.perf_counter()
        loop.renew_player()
        rollouts = loop.fresh_rollouts(step)
        play_seconds = time.perf_counter() - play_begun
        if step + 1 == config.steps:  # of the others it would only cost a forward pass
            gap = loop.sampler_gap(rollouts)
        reward = float(np.mean([rollout.reward for rollout in rollouts]))
        steps.append(loop.engine.train_step(rollouts) | {"reward": reward, "play_seconds": play_seconds})
        report(steps[-1])
    loop.renew_player()
    return loop, Result(
        start=start,
        end=loop.greedy_reward(),
        rewards=[step["reward"] for step in steps],
        flat_tokens=sum(step["flat_tokens"] for step in steps),
        tree_tokens=sum(step["tree_tokens"] for step in steps),
        sampler_gap=gap,
        seconds=time.perf_counter() - begun,
        cpu_seconds=time.process_time() - cpu_begun,
    )


def read_settings(path: str | Path, overrides: Sequence[str] = (), seed: int | None = None) -> Config:
    """The configuration of a run on the ranks that run.

    Args:
        seed: of the weights, the cabinets and the sampling; None leaves those of the file.

    Raises:
        ValueError: as `read_config`, and for a configuration without an output folder or with a section that the game
            has no use for.
    """
    seeds = [] if seed is None else [f"seed={seed}", f"model.seed={seed}"]
    config = read_config_for_ranks(path, [*overrides, *seeds])
    if config.data is not None or config.output_dir is None:
        raise ValueError(f"{path}: the game needs output_dir, and makes its own data: leave the data section out")
    if config.checkpoint is not None:
        raise ValueError(f"{path}: the game writes no checkpoints: leave the checkpoint section out")
    return config


def run(args: argparse.Namespace) -> int:
    """Train, write the run's folder and print what was learned."""
    config = read_settings(args.config, args.overrides, args.seed)
    check_trackers(config.metrics)
    play = Play(args.level, args.groups, args.rollouts, args.eval_games)
    out = Path(config.output_dir)
    check_save_place(out / "final")
    ranks = join_ranks(config.parallel.timeout_s)
    trackers = []
    if ranks.is_first:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
        trackers = open_trackers(out, config, steps_done=0)

    def report(metrics: dict) -> None:
        for tracker in trackers:
            tracker.write(metrics)
        if ranks.is_first:
            print(
                f"step {metrics['step']}: reward {metrics['reward']:.3f}, entropy {metrics['entropy']:.2f}, "
                f"{metrics['tree_tokens']:,} of {metrics['flat_tokens']:,} tokens computed, "
                f"played {metrics['play_seconds']:.2f} s, trained {metrics['seconds']:.2f} s",
                flush=True,
            )

    loop, result = train(config, play, ranks, report)
    loop.engine.save(out / "final")
    for tracker in trackers:
        tracker.close()
    if ranks.is_first:
        Console().print(result_table(result))
    return 0


def result_table(result: Result) -> Table:
    """Rows of (what, value)."""
    table = Table(title="the coin game", show_header=False)
    table.add_row("steps", str(len(result.rewards)))
    table.add_row("greedy reward, start -> end", f"{result.start:.3f} -> {result.end:.3f}")
    for number, part in enumerate(np.array_split(result.rewards, min(4, len(result.rewards))), 1):
        table.add_row(f"reward of sampled games, part {number} of the run", f"{np.mean(part):.3f}")
    saved = result.flat_tokens / result.tree_tokens
    table.add_row("tokens, rollout by rollout -> as trees", f"{result.flat_tokens:,} -> {result.tree_tokens:,}")
    table.add_row("fewer tokens computed", f"{saved:.1f} times")
    table.add_row("generate's log-probs differ from the engine's by", f"{result.sampler_gap:.1e} at most")
    table.add_row("seconds (processor seconds of a rank)", f"{result.seconds:.0f} ({result.cpu_seconds:.0f})")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.play", description=__doc__.splitlines()[0])
    parser.add_argument("config", help="YAML file, for example launch/configs/game.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    parser.add_argument("--seed", type=int, help="of weights, cabinets and sampling; replaces seed and model.seed")
    parser.add_argument("--level", type=int, default=Play.level, help="of the game (default: %(default)s)")
    parser.add_argument("--groups", type=int, default=Play.groups, help="cabinets a step (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=Play.rollouts, help="games of each (default: %(default)s)")
    parser.add_argument(
        "--eval-games", type=int, default=Play.eval_games, help="cabinets of the greedy policy (default: %(default)s)"
    )
    shutdown(guarded(run, parser.parse_intermixed_args()))


if __name__ == "__main__":
    main()
