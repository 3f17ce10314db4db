"""The metrics of a step: equal on every mesh to values from flat rows by hand, and to what really moved."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cp_engine.sharding.gdn_plan as planning
from cp_engine.config import Config
from cp_engine.engine import Engine
from cp_engine.flops import Work, training_flops
from cp_engine.machines import peak_flops
from cp_engine.metrics import StepMeter
from cp_engine.model_sizes import model_sizes
from cp_engine.models.load import load_model
from cp_engine.models.precision import keep_float64
from cp_engine.rollouts import Rollout
from cp_engine.sharding.forest import build_forest
from tests.distributed.engine_cases import sample, this_rank
from tests.ranks import run_ranks

VOCAB = 36
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
GRPO = {"name": "grpo", **CLIP, "kl_coef": 0.1, "entropy_coef": 0.01}


def rollouts() -> list[Rollout]:
    """Of the sample, with old and reference log-probs that clip and that differ from the model's."""
    rng = np.random.default_rng(3)

    def drawn(rollout: Rollout) -> Rollout:
        old, ref = -3.5 + rng.normal(size=(2, rollout.length))
        return replace(rollout, old_logprobs=old, ref_logprobs=ref, advantage=float(rng.normal()))

    return [drawn(rollout) for rollout in sample()]


def config(sections: dict) -> Config:
    raw = {"model": {"path": "tiny-qwen3", "vocab_size": VOCAB}, "dtype": "float64", "loss": GRPO}
    return Config.model_validate(raw | {"packing": {"max_pack_tokens": 90}} | sections)


def step_metrics(sections: dict) -> dict:
    with keep_float64():
        return Engine(config(sections), this_rank()).train_step(rollouts())


def flat_values() -> dict[str, float]:
    """Each rollout alone through the unmodified model, and the equations in numpy."""
    model = load_model("tiny-qwen3", torch.float64, vocab_size=VOCAB)
    columns = []
    for rollout in rollouts():
        with torch.no_grad(), keep_float64():
            logits = model(input_ids=torch.as_tensor(rollout.input_ids)[None], use_cache=False).logits[0]
            log_prob = logits.log_softmax(-1).numpy()[:-1]
        entropy = -(np.exp(log_prob) * log_prob).sum(-1)
        own = log_prob[np.arange(rollout.length - 1), rollout.input_ids[1:]]
        trained = np.asarray(rollout.loss_mask[1:], bool)
        given = np.full(rollout.length - 1, rollout.advantage)
        row = (own, entropy, rollout.old_logprobs[1:], rollout.ref_logprobs[1:], given)
        columns.append(np.stack(row)[:, trained])
    own, entropy, old, ref, advantage = np.concatenate(columns, axis=1)
    ratio = np.exp(own - old)
    clipped = np.clip(ratio, 1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
    kl_ref = np.exp(ref - own) - 1 - (ref - own)
    found = {
        "policy_loss": -np.minimum(ratio * advantage, clipped * advantage).mean(),
        "kl_loss": 0.1 * kl_ref.mean(),
        "entropy_loss": -0.01 * entropy.mean(),
        "kl_ref": kl_ref.mean(),
        "kl_old": (np.exp(own - old) - 1 - (own - old)).mean(),
        "entropy": entropy.mean(),
        "clipped_high": ((ratio > 1 + CLIP["clip_high"]) & (advantage > 0)).mean(),
        "clipped_low": ((ratio < 1 - CLIP["clip_low"]) & (advantage < 0)).mean(),
        "occurrences": len(own),
    }
    return found | {"loss": found["policy_loss"] + found["kl_loss"] + found["entropy_loss"]}


@pytest.fixture(scope="module")
def truth() -> dict[str, float]:
    found = flat_values()
    assert min(found["clipped_high"], found["clipped_low"], found["kl_loss"]) > 0.01
    return found


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (4, 1)])
def test_sums_over_ranks_are_those_of_flat_rows(dp, cp, truth):
    """Three packs for one DP group; four for two or four, which have as few rounds."""
    sections = {"parallel": {"dp": dp, "cp": cp}}
    every = [step_metrics(sections)] if dp * cp == 1 else run_ranks(dp * cp, step_metrics, sections)
    for found in every:
        assert {name: found[name] for name in truth} == pytest.approx(truth, rel=1e-10)
        assert found["packs"] == (3 if dp == 1 else 4)
        assert found["mfu"] is None and found["mfu_flat"] is None and found["peak_gib"] is None
        assert found["seconds"] == every[0]["seconds"] and found["plan_ms"] == every[0]["plan_ms"] > 0


def test_flops_are_counted_once_whatever_the_mesh():
    """Packs depend on the number of DP groups, and what they replay with them."""
    alone, on_three, of_two, of_two_on_four = (
        run_ranks(dp * cp, step_metrics, {"parallel": {"dp": dp, "cp": cp}})[0]
        for dp, cp in ((1, 1), (1, 3), (2, 1), (2, 2))
    )
    # A predictor's row is on one rank, so the head's rows are the same too.
    assert on_three["tflop"] == alone["tflop"] < of_two["tflop"] == of_two_on_four["tflop"] < alone["flat_tflop"]
    assert {found["flat_tflop"] for found in (on_three, of_two, of_two_on_four)} == {alone["flat_tflop"]}


def test_flops_are_those_of_the_weights_and_visible_pairs():
    model = load_model("tiny-qwen3", torch.float32, vocab_size=VOCAB)
    per_token = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear))
    found = step_metrics({"packing": {"max_pack_tokens": None}})
    given = rollouts()
    lengths = [r.length for r in given]
    tokens = np.concatenate([r.input_ids for r in given])
    forest = build_forest(tokens, np.concatenate([[0], np.cumsum(lengths)]))
    trained = np.concatenate([r.loss_mask for r in given]).astype(bool)
    trained[np.cumsum([0, *lengths[:-1]])] = False
    paths = [tuple(r.input_ids[:i]) for r in given for i in range(1, r.length) if r.loss_mask[i]]
    attention = 12 * model.config.num_hidden_layers * model.config.num_attention_heads * model.config.head_dim
    head = 6 * model.lm_head.weight.numel()
    tree_pairs, flat_pairs = int((forest.position + 1).sum()), sum(n * (n + 1) // 2 for n in lengths)
    expected = 6 * per_token * forest.tokens + attention * tree_pairs + head * len(set(paths))
    assert found["tflop"] * 1e12 == pytest.approx(expected, rel=1e-12)
    expected = 6 * per_token * sum(lengths) + attention * flat_pairs + head * int(trained.sum())
    assert found["flat_tflop"] * 1e12 == pytest.approx(expected, rel=1e-12)


def test_flops_of_windows_are_those_of_the_pairs_in_them():
    """Against the same model whose layers are all full: half of its layers have a window of 24 tokens."""
    alone, sections = rollouts(), {"packing": {"max_pack_tokens": None}}
    forest = build_forest(np.concatenate([r.input_ids for r in alone]), np.cumsum([0] + [r.length for r in alone]))
    of_tree, of_rows = forest.position + 1, np.concatenate([np.arange(r.length) + 1 for r in alone])
    full = step_metrics(sections)
    found = step_metrics(sections | {"model": {"path": "tiny-qwen3-window", "vocab_size": VOCAB}})
    for name, seen in (("tflop", of_tree), ("flat_tflop", of_rows)):
        spared = int((seen - np.minimum(seen, 24)).sum())
        assert spared > 100 and (full[name] - found[name]) * 1e12 == pytest.approx(12 * 8 * 16 * 2 * spared)


def test_flops_of_released_models():
    """Six a parameter and token; the embedding is looked up, four where weights are frozen; experts that work only."""
    qwen = model_sizes("qwen3-8b")
    one = Work(tokens=1, pairs=0, predictors=1)
    trained = qwen.parameters - 151_936 * 4096
    assert training_flops(one, qwen.shape, 151_936) == pytest.approx(6 * trained, rel=1e-3)
    assert training_flops(one, qwen.shape, 151_936, frozen=True) == pytest.approx(4 * trained, rel=1e-3)
    sparse = training_flops(one, model_sizes("qwen3-30b-a3b").shape, 151_936) / 6
    assert sparse + 151_936 * 2048 == pytest.approx(3.3e9, rel=0.02)
    hybrid, state = model_sizes("qwen3.5-35b-a3b").shape, 32 * 128 * 128
    without = training_flops(Work(tokens=0, pairs=0, predictors=1), hybrid, 1000)
    two = training_flops(one, hybrid, 1000) - without
    assert two == 6 * (10 * hybrid.attention_products + 30 * hybrid.gdn_products) + 18 * 30 * state


def test_mfu_is_flops_over_what_all_cards_could_do():
    engine = Engine(config({}), this_rank())
    figures = engine.train_step(rollouts())
    object.__setattr__(engine.metered, "peak_flops", 1e9)
    figures = engine.train_step(rollouts())
    assert figures["mfu"] == pytest.approx(figures["tflop"] * 1e12 / (1e9 * figures["seconds"]))
    assert figures["mfu_flat"] / figures["mfu"] == pytest.approx(figures["flat_tflop"] / figures["tflop"])


def test_peak_rates_are_of_known_cards_in_bfloat16():
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA GB200", "bfloat16") == 2500e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("Some other card", "bfloat16") is None and peak_flops(None, "bfloat16") is None


def counted_and_told(sections: dict, most_rounds: int = planning.MOST_ROUNDS) -> tuple[int, int]:
    """Bytes that this rank's row exchanges carry to others in a step, and the metrics' sum over ranks; states that
    cross ranks more than so often do so by affine maps."""
    ranks, sent = this_rank(), []
    original = dist.all_to_all_single

    def counting(received, given, recv_counts, send_counts, group=None, **keywords):
        own = dist.get_rank(group)
        row = given[0].nbytes if len(given) else 0
        sent.append((sum(send_counts) - send_counts[own]) * row)
        return original(received, given, recv_counts, send_counts, group=group, **keywords)

    raw = {"model": {"path": "tiny-qwen3.5", "vocab_size": VOCAB}, "loss": {"name": "sft"}}
    engine = Engine(Config.model_validate(raw | sections), ranks)
    with (
        mock.patch.object(dist, "all_to_all_single", counting),
        mock.patch.object(planning, "MOST_ROUNDS", most_rounds),
    ):
        figures = engine.train_step(sample())
    return sum(sent), sum(figures[f"{part}_bytes"] for part in ("attention", "gdn", "head"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (3, {"cp": 3, "exchange": "gather", "layout": "contiguous"}),
        (3, {"cp": 3, "exchange": "ring"}),
        (2, {"cp": 2, "exchange": "ulysses", "gdn_exchange": "ulysses"}),
        (4, {"dp": 2, "cp": 2, "exchange": "gather"}),
        (4, {"cp": 4, "exchange": "gather", "gdn_exchange": "ulysses"}),
        (3, {"cp": 3, "exchange": "gather", "gdn_layout": "own"}),
        (3, {"cp": 3, "exchange": "gather", "layout": "contiguous", "model": "tiny-qwen3-window"}),
    ],
    ids=["gather", "ring", "ulysses", "dp", "gdn-ulysses", "gdn-layout", "window"],
)
def test_exchange_bytes_are_those_that_move(world, parallel, dtype):
    sections = {"dtype": dtype, "packing": {"max_pack_tokens": 90} if parallel.get("dp") else {}}
    if "model" in parallel:
        parallel = dict(parallel)
        sections["model"] = {"path": parallel.pop("model"), "vocab_size": VOCAB}
    found = run_ranks(world, counted_and_told, {"parallel": parallel, **sections})
    assert {told for _, told in found} == {sum(counted for counted, _ in found)}
    assert found[0][1] > 0


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
def test_exchange_bytes_of_states_that_are_handed_on_and_of_maps(layout):
    sections = {
        "dtype": "bfloat16",
        "parallel": {"cp": 3, "exchange": "gather", "layout": layout, "gdn_layout": "same"},
    }
    told = []
    for most_rounds in (0, 99):
        found = run_ranks(3, counted_and_told, sections, most_rounds)
        assert {total for _, total in found} == {sum(counted for counted, _ in found)}
        told.append(found[0][1])
    assert told[0] != told[1]


def test_the_meter_does_not_wait_for_the_device():
    engine = Engine(config({}), this_rank())
    add, waits = StepMeter.add, [mock.patch.object(torch.Tensor, n, side_effect=AssertionError(n)) for n in
                                 ("item", "tolist", "cpu", "numpy", "__bool__", "__float__")]  # fmt: skip

    def without_waiting(meter, *arguments):
        with waits[0], waits[1], waits[2], waits[3], waits[4], waits[5]:
            add(meter, *arguments)

    with mock.patch.object(StepMeter, "add", without_waiting):
        assert engine.train_step(rollouts())["occurrences"] > 0
