"""`python -m cp_engine train CONFIG.yaml [key.sub=value ...]`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cp_engine.cli.ranks import read_config_for_ranks
from cp_engine.config import Config
from cp_engine.rollouts import Rollout, read_rollouts

if TYPE_CHECKING:
    from rich.console import Console

    from cp_engine.checkpoint import Checkpoints
    from cp_engine.engine import Engine
    from cp_engine.trackers import Tracker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, for example launch/configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that replace the file's")
    parser.add_argument("--cp", type=int, help="context-parallel ranks; replaces parallel.cp")
    parser.add_argument("--dp", type=int, help="data-parallel groups; replaces parallel.dp")
    parser.add_argument("--json", action="store_true", help="print the last step's metrics as the last line")


def _config(args: argparse.Namespace) -> Config:
    given = [f"parallel.{name}={getattr(args, name)}" for name in ("dp", "cp") if getattr(args, name) is not None]
    overrides = [*args.overrides, *given]
    config = read_config_for_ranks(args.config, overrides)
    if config.data is None or config.output_dir is None:
        raise ValueError(f"{args.config}: train needs data.rollouts and output_dir")
    return config


def local_ranks(args: argparse.Namespace) -> int:
    parallel = _config(args).parallel
    return parallel.dp * parallel.cp


def steps_of_groups(rollouts: list[Rollout], config: Config) -> Iterator[list[Rollout]]:
    """Yield the rollouts of each step: whole groups, in an order drawn anew for each pass over the file.

    No group comes twice in a step: where a step spans two passes, those that the first one left wait in the second.

    Raises:
        ValueError: for more groups a step than there are, when the first step is asked for.
    """
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    names = list(groups)
    per_step = config.data.groups_per_step or len(names)
    if per_step > len(names):
        raise ValueError(f"data.groups_per_step is {per_step}, but the rollouts have {len(names)} groups")
    rng, queue = np.random.default_rng(config.seed), []
    for _ in range(config.steps):
        if len(queue) < per_step:
            drawn = [names[i] for i in rng.permutation(len(names)).tolist()]
            queue += sorted(drawn, key=set(queue).__contains__)
        chosen, queue = queue[:per_step], queue[per_step:]
        yield [rollout for name in chosen for rollout in groups[name]]


def check_steps(rollouts: list[Rollout], config: Config) -> None:
    """Refuse, before the first step, rollouts that a later one could not use.

    Raises:
        ValueError: as `check_usable` and `steps_of_groups`, for a step without a trained token, and where no step
            would train anything, since every advantage is 0.
    """
    from cp_engine.step import check_usable

    check_usable(rollouts, config.loss)
    _check_advantages(rollouts, config)
    trained = {rollout.group for rollout in rollouts if rollout.loss_mask[1:].any()}
    for number, step in enumerate(steps_of_groups(rollouts, config), 1):
        if not any(rollout.group in trained for rollout in step):
            groups = ", ".join(repr(name) for name in dict.fromkeys(rollout.group for rollout in step))
            raise ValueError(
                f"step {number} would have no trained token (loss_mask 1 beyond a rollout's first token) in its groups "
                f"{groups}: leave such groups out of {config.data.rollouts}, or raise data.groups_per_step"
            )


def _check_advantages(rollouts: list[Rollout], config: Config) -> None:
    loss = config.loss
    if loss.name in ("sft", "dpo") or loss.kl_coef or loss.entropy_coef or loss.router_aux_coef:
        return
    rewards: dict[str, set[float]] = {}
    for rollout in rollouts:
        if rollout.advantage is None:
            rewards.setdefault(rollout.group, set()).add(rollout.reward)
        elif np.any(rollout.advantage):
            return
    if all(len(values) == 1 for values in rewards.values()):
        raise ValueError(
            f"every advantage of {config.data.rollouts} is 0, so {loss.name} would train nothing: rewards are compared "
            f"inside a group, and in none of the {len(rewards)} groups do they differ. Give the rollouts of one prompt "
            "the same group, or every rollout an advantage"
        )


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from cp_engine.cli.step_line import step_line
    from cp_engine.distributed.ranks import join_ranks
    from cp_engine.engine import Engine
    from cp_engine.trackers import check_trackers, strict_json

    config = _config(args)
    check_trackers(config.metrics)
    out = Path(config.output_dir)
    _check_output(out, config)
    ranks = join_ranks(config.parallel.timeout_s)
    engine = Engine(config, ranks)
    rollouts = read_rollouts(
        config.data.rollouts,
        vocab_size=engine.vocab_size,
        max_tokens=engine.packing.max_pack_tokens,
        limit=config.data.limit,
        limit_per_group=config.data.limit_per_group,
    )
    check_steps(rollouts, config)
    console = Console(stderr=True)
    checkpoints = _checkpoints(out / "checkpoints", engine, rollouts, console)
    trackers, metrics, begun = [], {}, engine.steps_done
    with Progress(console=console, disable=not ranks.is_first) as progress:
        task = progress.add_task("training", total=config.steps, completed=begun)
        for batch, upcoming in _with_next(islice(steps_of_groups(rollouts, config), begun, None)):
            metrics = engine.train_step(batch, upcoming)
            if ranks.is_first:
                # Only now, when a whole step was possible, is an earlier run in this folder overwritten.
                trackers = trackers or _start_output(out, config, begun)
                for tracker in trackers:
                    tracker.write(metrics)
                progress.console.print(step_line(metrics), soft_wrap=True)
            if checkpoints is not None and engine.steps_done % config.checkpoint.every == 0:
                checkpoints.save(engine)
            progress.advance(task)
    if checkpoints is not None:
        checkpoints.wait()
    engine.save(out / "final")
    if config.lora is not None:
        engine.save(out / "adapter", adapter=True)
    for tracker in trackers:
        tracker.close()
    if ranks.is_first:
        console.print(f"weights: {out / 'final'}   metrics: {out / 'metrics.jsonl'}")
        if args.json:
            print(strict_json(metrics), flush=True)
    return 0


def _checkpoints(place: Path, engine: Engine, rollouts: list[Rollout], console: Console) -> Checkpoints | None:
    """Where checkpoints go, if any are written, and the engine as the newest one has it.

    Raises:
        ValueError: as `Checkpoints.resume`, and for a checkpoint of a later step than the last one asked for.
    """
    from cp_engine.checkpoint import Checkpoints
    from cp_engine.run_record import described

    config = engine.config
    if config.checkpoint is None:
        return None
    checkpoints = Checkpoints(place, config.checkpoint.keep, config.checkpoint.asynchronous, described(rollouts))
    if config.checkpoint.resume == "never" or not checkpoints.resume(engine):
        return checkpoints
    done = engine.steps_done
    if done > config.steps:
        raise ValueError(
            f"steps is {config.steps}, but the newest checkpoint in {place} is of step {done} already, and nothing was "
            f"changed: set steps to more than {done} to go on, choose another output_dir, or checkpoint.resume: never "
            "to start anew"
        )
    if engine.ranks.is_first:
        left = f"going on after step {done} of {config.steps}"
        console.print(left if done < config.steps else f"all {done} steps are done: only the weights are written again")
    return checkpoints


def _with_next(steps: Iterable[list[Rollout]]) -> Iterator[tuple[list[Rollout], list[Rollout] | None]]:
    """Each step's rollouts with those of the step after it, None after the last."""
    steps = iter(steps)
    present = next(steps, None)
    while present is not None:
        following = next(steps, None)
        yield present, following
        present = following


def _check_output(out: Path, config: Config) -> None:
    """Refuse, before any work is done, an output folder that could not take what a run saves, or that is a model.

    Raises:
        ValueError: says what is in the way.
    """
    from cp_engine.models.load import check_save_place, holds_model

    for name in ("final",) if config.lora is None else ("final", "adapter"):
        check_save_place(out / name)
    if holds_model(out):
        raise ValueError(
            f"output_dir {str(out)!r} is a model folder, and the run's config.json would take the place of the "
            "model's; choose another output_dir"
        )


def _start_output(out: Path, config: Config, steps_done: int) -> list[Tracker]:
    from cp_engine.trackers import open_trackers

    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
    return open_trackers(out, config, steps_done)
