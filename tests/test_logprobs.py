"""Log-probs for old-policy and reference passes: equal to flat rows', and of ratio 1 while the weights are frozen."""

import contextlib
import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_engine.engine import Engine
from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from cp_engine.rollout_files import add_field, check_out_file
from cp_engine.rollouts import read_rollouts
from cp_engine.step import prepare_step
from cp_engine.verify.run import VerifyOptions, run_flat
from tests.ranks import run_ranks
from tests.test_cli import SAMPLE, command
from tests.test_engine import config, this_rank


def frozen_ratios(dtype: str, budget: int | None) -> tuple[list[np.ndarray], np.ndarray]:
    """Log-probs of whole-step packs, and the log-ratios to them that a step cut into packs sees on this rank."""
    ranks, rollouts = this_rank(), read_rollouts(SAMPLE, limit=20)
    with keep_float64() if dtype == "float64" else contextlib.nullcontext():
        log_probs = Engine(config(ranks.world, dtype=dtype), ranks).logprobs(rollouts)
        rollouts = [replace(r, old_logprobs=p) for r, p in zip(rollouts, log_probs, strict=True)]
        engine = Engine(config(ranks.world, dtype=dtype, packing={"max_pack_tokens": budget}), ranks)
        step = prepare_step(rollouts, engine.config.packing, engine.config.loss)
        seen = _Seen(step)
        engine.accumulate_gradients(step, seen)
    return log_probs, np.concatenate(seen.log_ratio)


class _Seen:
    """Takes the place of the step meter: keeps the log-ratio of each occurrence."""

    def __init__(self, step):
        self.step, self.log_ratio = step, []

    def add(self, placed, plan, result, *seconds):
        old = self.step.old_logprob[self.step.occurrence_index(placed.pack, plan)]
        self.log_ratio.append(result.log_prob.double().numpy() - old)


@pytest.fixture(scope="module")
def floors() -> dict[str, float]:
    """Of each dtype: how far from 1 a ratio may be whose two log-probs were added in another order."""
    truth = np.concatenate(Engine(config(1), this_rank()).logprobs(read_rollouts(SAMPLE, limit=8)))
    # In bfloat16 as far as rounding moves the log-probs of flat rows: 0.10 nats for these weights.
    return {"float64": 1e-13, "float32": 1e-5, "bfloat16": np.nanmax(np.abs(flat_in_bfloat16() - truth))}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("budget", [None, 120])
def test_a_frozen_models_ratio_is_one(floors, world, dtype, budget):
    results = run_ranks(world, frozen_ratios, dtype, budget)
    log_ratio = np.concatenate([log_ratio for _, log_ratio in results])
    rollouts = read_rollouts(SAMPLE, limit=20)
    assert len(log_ratio) == sum(int(r.loss_mask[1:].sum()) for r in rollouts)
    # The same packs give the same bits. Packs that were cut add in another order: 3e-6 in float32; in bfloat16 0.03 on
    # the worst token, 0.0016 in the mean, and the same bits on 62 % of the tokens.
    assert np.abs(log_ratio).max() <= (floors[dtype] if budget else 0.0)
    if dtype == "bfloat16":
        assert np.abs(log_ratio).mean() <= floors[dtype] / 32
    for log_probs, _ in results:
        for mine, first, rollout in zip(log_probs, results[0][0], rollouts, strict=True):
            np.testing.assert_array_equal(mine, first)
            assert mine.dtype == np.float64 and len(mine) == rollout.length
            assert (np.isnan(mine[1:]) == ~rollout.loss_mask[1:]).all() and np.isnan(mine[0])


def test_they_are_the_flat_rows_log_probs():
    rollouts = read_rollouts(SAMPLE, limit=6)
    options = VerifyOptions(model="tiny-qwen3.5", full_vocab=512, temperature=0.7)
    flat = run_flat(rollouts, options, this_rank())
    with keep_float64():
        found = np.concatenate(Engine(config(1, loss={"temperature": 0.7}), this_rank()).logprobs(rollouts))
    assert np.abs(np.nan_to_num(found) - flat.log_prob).max() < 1e-12
    assert np.isnan(found).sum() == (flat.log_prob == 0).sum()


def scored_in_bfloat16(engines: list[str]) -> list[list[np.ndarray]]:
    """Log-probs by an engine that trains, and by some that only score."""
    ranks, rollouts, found = this_rank(), read_rollouts(SAMPLE, limit=8), []
    for name in ("plain", *engines):
        section = {"dtype": "bfloat16", "engine": {"name": name}, "packing": {"max_pack_tokens": 120}}
        engine = Engine(config(ranks.world, **section), ranks, only_scores=bool(found))
        found.append(engine.logprobs(rollouts))
        parameters = list(engine.model.causal_lm.parameters())
        # The decays of GDN layers stay float32; no master or shard is.
        assert len(found) == 1 or sum(p.dtype == torch.float32 for p in parameters) == 2 * 3
    assert not any(p.requires_grad for p in parameters) and not engine.distributed.updated
    with pytest.raises(ValueError, match="made with only_scores, so its weights are frozen: make another to train"):
        engine.train_step(rollouts)
    return found


def test_engines_that_only_score_give_the_bits_of_training_in_bfloat16(floors):
    trained, *scored = run_ranks(2, scored_in_bfloat16, ["plain", "fsdp2"])[0]
    for found in scored:
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(trained))
    truth = np.concatenate(Engine(config(1), this_rank()).logprobs(read_rollouts(SAMPLE, limit=8)))
    assert 0.01 < np.nanmax(np.abs(np.concatenate(trained) - truth)) <= 1.25 * floors["bfloat16"]


@torch.no_grad()
def flat_in_bfloat16() -> np.ndarray:
    """Log-probs of every token but the first ones by the unmodified model, row by row."""
    model, found = load_model("tiny-qwen3.5", torch.bfloat16, vocab_size=512), []
    make_cpu_runnable(model)
    for rollout in read_rollouts(SAMPLE, limit=8):
        ids = torch.as_tensor(rollout.input_ids)
        log_p = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        found += [np.array([np.nan]), log_p[:-1].gather(1, ids[1:, None])[:, 0].numpy()]
    return np.concatenate(found)


def test_deepspeed_is_not_for_scoring():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (pip install 'cp-engine[deepspeed]')")
    with pytest.raises(ValueError, match="has nothing to do for a frozen model"):
        Engine(config(1, dtype="float32", engine={"name": "deepspeed", "stage": 2}), this_rank(), only_scores=True)


def test_the_command_adds_the_field_and_keeps_the_rest(tmp_path):
    lines = [json.loads(line) for line in SAMPLE.read_text().splitlines()[:6]]
    lines[0] |= {"source": "höhle", "score": 1.0, "tags": [None, {"a": 1e-7}]}
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    run = ("logprobs", "--rollouts", file, "--model", "tiny-qwen3.5", "--vocab-size", 512, "--dtype", "float64")
    done = command(*run, "--out", out, "--field", "ref_logprobs", "--cp", 2)
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    truth = Engine(config(1), this_rank()).logprobs(read_rollouts(file))
    for record, line, log_prob in zip(written, lines, truth, strict=True):
        found = np.array(record.pop("ref_logprobs"), np.float64)
        np.testing.assert_allclose(found, log_prob, rtol=1e-5)  # float32 casts inside transformers
        assert record == line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.gz"]

    done = command(*run, "--out", tmp_path / "out.txt")
    assert done.returncode == 2 and "expected a name that ends with .jsonl or .jsonl.gz" in done.stderr


def test_a_file_can_be_replaced_and_a_failed_write_leaves_it_whole(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text('{"input_ids": [1, 2], "old_logprobs": [null, -9.0]}\n')
    add_field(file, file, "old_logprobs", [np.array([np.nan, -0.5])])
    before = file.read_text()
    assert json.loads(before) == {"input_ids": [1, 2], "old_logprobs": [None, -0.5]}
    with pytest.raises(ValueError, match="has 1 rollouts, but 2 were computed"):
        add_field(file, file, "old_logprobs", [np.zeros(2)] * 2)
    assert file.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        check_out_file(tmp_path / "d.jsonl")
    with pytest.raises(ValueError, match="the folder .*absent does not exist"):
        check_out_file(tmp_path / "absent" / "r.jsonl")
