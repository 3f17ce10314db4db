"""The game's training loop: what it plays, what it trains on, and that player and engine have the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_engine.config import Config
from cp_engine.distributed.ranks import Ranks
from cp_engine.rollouts import Rollout
from cp_engine.step import prepare_step
from launch.game import MODEL, Game
from launch.play import GameLoop, Play, read_settings, result_table, train
from tests.ranks import run_ranks

CONFIG = Path(__file__).parent.parent / "launch" / "configs" / "game.yaml"
SMALL = Play(level=1, groups=2, rollouts=6, eval_games=4)
FLOOR = 2e-5  # float32 log-probs of two ways to compute them


def settings(model: str = "tiny-qwen3", steps: int = 2) -> Config:
    return read_settings(CONFIG, [f"model.path={model}", f"steps={steps}", "parallel.cp=1"], seed=1)


def alone() -> Ranks:
    return Ranks(0, 1, None, torch.device("cpu"))


def lean_to_drawers(loop: GameLoop) -> None:
    """Make the player write drawers of level 1 and newlines far more often, so that rewards differ in every group."""
    leaning = torch.zeros(loop.engine.vocab_size)
    leaning[list(b"0123\n")] = 8.0
    loop.player.model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + leaning)


def distinct_prefixes(rows: list[np.ndarray]) -> int:
    return len({tuple(row[:end].tolist()) for row in rows for end in range(1, len(row) + 1)})


def test_rollouts_are_games_and_advantages_are_those_of_their_groups():
    loop = GameLoop(settings(), SMALL, alone())
    lean_to_drawers(loop)
    rollouts = loop.fresh_rollouts(step=3)
    assert [r.group for r in rollouts] == ["1/3/0"] * 6 + ["1/3/1"] * 6
    for rollout in rollouts:
        # A turn begins after MODEL and ends at its newline or with its second token.
        game, ids, mask = Game(1, rollout.group), rollout.input_ids.tolist(), rollout.loss_mask
        for start in (i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]):
            game.play(ids[start : start + 2])
            assert ids[start - 1] == MODEL
        assert game.done and game.tokens == ids and game.loss_mask == mask.astype(int).tolist()
        assert game.reward == rollout.reward
        assert np.array_equal(np.isfinite(rollout.sampler_logprobs), mask), "each written token has a log-prob"
        assert (rollout.sampler_logprobs[mask] <= 0).all()
    step = prepare_step(rollouts, loop.config.packing, loop.config.loss)
    for number in range(SMALL.groups):
        rewards = np.array([r.reward for r in rollouts[6 * number : 6 * number + 6]])
        assert rewards.std() > 0
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        found = step.advantage[step.flat.row_start[6 * number : 6 * number + 6]]
        assert found == pytest.approx(expected, rel=1e-12)
    rows = [r.input_ids for r in rollouts]
    assert step.tree_tokens == distinct_prefixes(rows) < step.flat_tokens / 2, "prompts and first turns are shared"
    again = loop.fresh_rollouts(step=4)
    assert not {r.group for r in again} & {r.group for r in rollouts}, "fresh cabinets every step"


def mixed_rollouts(loop: GameLoop) -> list[Rollout]:
    """Games of two levels, whose prompts differ in length, played in one batch; all of them are to be learned from."""
    games = [Game(level, number) for level in (1, 4) for number in range(2)]
    rows = loop.player.play(games, greedy=False)
    return [
        Rollout(game.tokens, game.loss_mask, "g", f"{number}", advantage=1.0, sampler_logprobs=np.array(row))
        for number, (game, row) in enumerate(zip(games, rows, strict=True))
    ]


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3.5"])
def test_the_player_plays_with_the_engines_present_weights(model):
    """Padding on the left must change nothing, and stale weights must be seen."""
    loop = GameLoop(settings(model), SMALL, alone())
    loop.renew_player()
    first = mixed_rollouts(loop)
    assert loop.sampler_gap(first) < FLOOR
    loop.engine.train_step(first)
    assert loop.sampler_gap(first) > 1e-3, "the step changes what it learned from"
    assert loop.sampler_gap(mixed_rollouts(loop)) > 1e-3, "stale weights"
    loop.renew_player()
    assert loop.sampler_gap(mixed_rollouts(loop)) < FLOOR


def test_a_run_reports_every_step_and_measures_the_greedy_policy_on_fixed_cabinets():
    seen = []
    loop, result = train(settings(), SMALL, alone(), seen.append)
    assert [metrics["step"] for metrics in seen] == [1, 2] and loop.engine.steps_done == 2
    assert result.rewards == [metrics["reward"] for metrics in seen]
    assert result.tree_tokens == sum(metrics["tree_tokens"] for metrics in seen) < result.flat_tokens
    assert result.end == loop.greedy_reward() == loop.greedy_reward()
    assert 0 <= result.start <= 1 and result.sampler_gap < FLOOR and result.cpu_seconds > 0
    what = [*result_table(result).columns[0].cells]
    assert "greedy reward, start -> end" in what


def played_on_ranks() -> tuple[list, dict]:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, torch.device("cpu"))
    config = read_settings(CONFIG, ["engine.name=fsdp2", f"parallel.cp={ranks.world}"], seed=1)
    loop = GameLoop(config, SMALL, ranks)
    loop.renew_player()
    rollouts = loop.fresh_rollouts(0)
    gap = loop.sampler_gap(rollouts)
    metrics = loop.engine.train_step(rollouts)
    loop.renew_player()
    return [r.input_ids.tolist() for r in rollouts], metrics | {"gap": gap, "greedy": loop.greedy_reward()}


def test_two_ranks_train_on_what_the_first_one_played():
    """Each holds a half of the weights."""
    (ids, metrics), (other_ids, other_metrics) = run_ranks(2, played_on_ranks)
    assert ids == other_ids
    for name in ("loss", "grad_norm", "gap", "greedy"):
        assert metrics[name] == other_metrics[name]
    assert metrics["gap"] < FLOOR


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: Play(level=7), r"level must lie in 1\.\.4, got 7"),
        (lambda: Play(rollouts=1), "a group needs at least 2 rollouts for their rewards to differ, got 1"),
        (lambda: Play(groups=0), "expected at least one cabinet, got groups 0"),
        (lambda: read_settings(CONFIG, ["data.rollouts=x.jsonl"]), "leave the data section out"),
        (lambda: read_settings(CONFIG, ["output_dir=null"]), "the game needs output_dir"),
        (lambda: read_settings(CONFIG, ["checkpoint.every=1"]), "the game writes no checkpoints: leave the checkpoint"),
    ],
)
def test_settings_that_make_no_run_are_refused(attempt, message):
    with pytest.raises(ValueError, match=message):
        attempt()
