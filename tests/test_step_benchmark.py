"""The benchmark of whole training steps: FLOPs, flat rows, comparisons that notice wrong results, records."""

import gzip
import json
import sys
import types
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import step, step_flat, step_layer, step_ranks, step_run
from benchmarks.record import ROOT
from benchmarks.step_flat import FLAT_CALLS, Rows, sdpa
from benchmarks.step_flops import hardware_flops, step_work
from benchmarks.step_models import SHAPES, random_model, shape_config
from benchmarks.step_run import Measured, Setup, StepRun, differences, within, within_bounds
from benchmarks.step_workloads import unshared, workload_rollouts
from cp_engine.config import LossConfig, PackingConfig
from cp_engine.flops import Work, training_flops
from cp_engine.models.load import load_model, prepare_for_trees
from cp_engine.models.shape import model_shape
from cp_engine.rollouts import Rollout
from tests.ranks import run_ranks
from tests.test_engine import this_rank

LENGTHS = (5, 1, 7)


def arguments(**given) -> Namespace:
    usual = ["--model", "tiny-qwen3", "--workloads", "tiny", "--flat", "sdpa", "--dtype", "float32", "--repeats", "1"]
    return Namespace(**vars(step.arguments_of([*usual, "--flat-tokens", "100"])) | given)


def joined_rows(q, k, v, rows, scale):
    """A planted fault: rows see the rows before them."""
    whole = Rows.of(np.arange(len(q)), q.device)
    return sdpa(q, k, v, whole, scale)


def test_flops_are_those_counted_by_hand():
    model = load_model("tiny-qwen3", torch.float32)
    # 4 layers: q and o 64 x 128, k and v 64 x 32, three MLP products of 64 x 128; head 64 x 512; 8 heads of 16.
    products = 4 * (2 * 64 * 128 + 2 * 64 * 32 + 3 * 64 * 128)
    assert products == sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    work, kind = Work(tokens=5, pairs=13, predictors=2), (model_shape(model.config, 4), 512)
    for frozen, times in ((False, 6), (True, 4)):
        needed = times * (5 * products + 2 * 64 * 512) + 3 * 13 * 4 * 4 * 8 * 16
        assert training_flops(work, *kind, frozen) == needed
        forward = training_flops(work, *kind, frozen, backward=False)
        assert forward == 2 * (5 * products + 2 * 64 * 512) + 13 * 4 * 4 * 8 * 16
        kept = hardware_flops(work, *kind, frozen, recompute="none")
        assert kept == needed + 2 * 2 * 64 * 512 + 13 * 2 * 4 * 8 * 16
        mixers = hardware_flops(work, *kind, frozen, recompute="layers_keep_mixers")
        assert mixers == kept + 5 * 2 * products
        assert hardware_flops(work, *kind, frozen, recompute="layers") == mixers + 13 * 4 * 4 * 8 * 16
        of_three = (5 * 2 * products + 13 * 4 * 4 * 8 * 16) * 3 // 4
        assert hardware_flops(work, *kind, frozen, recompute="layers", layers=3) == kept + of_three
    shape = model_shape(load_model("tiny-qwen3.5", torch.float32).config, 4)
    one = Work(tokens=1, pairs=0, predictors=0)
    again = hardware_flops(one, shape, 512, False, "layers") - hardware_flops(one, shape, 512, False, "none")
    assert 3 * again == training_flops(one, shape, 512)


def test_work_counts_tokens_pairs_and_predictors_once():
    shape = model_shape(load_model("tiny-qwen3", torch.float32).config, 4)
    fields = {"group": "g", "reward": 1.0}
    rollouts = [
        Rollout([1, 2, 3, 4], [0, 0, 1, 1], rollout="a", **fields),
        Rollout([1, 2, 5], [0, 0, 1], rollout="b", **fields),
    ]
    kinds = PackingConfig(), LossConfig(name="grpo"), shape
    # Tokens 1 2 (3 4 | 5); 2 predicts 3 and 5, 3 predicts 4.
    assert step_work(rollouts, *kinds) == Work(tokens=5, pairs=1 + 2 + 3 + 4 + 3, predictors=2)
    assert step_work(unshared(rollouts), *kinds) == Work(tokens=7, pairs=10 + 6, predictors=3)


def dense(q, k, v, lengths, scale):
    out, start = [], 0
    for length in lengths:
        a, b, c = (x[start : start + length].transpose(0, 1) for x in (q, k, v))
        b, c = (x.repeat_interleave(len(a) // len(x), 0) for x in (b, c))
        score = (a @ b.transpose(1, 2) * scale).masked_fill(~torch.ones(length, length).tril().bool(), -torch.inf)
        out.append((score.softmax(-1) @ c).transpose(0, 1))
        start += length
    return torch.cat(out)


def stand_in_forward(q, k, v, starts, starts_k, longest, longest_k, dropout, causal, debug, scale):
    assert q.shape == k.shape == v.shape and causal and not debug and dropout == 0.0
    assert starts is starts_k and longest == longest_k == max(LENGTHS) and starts.dtype == torch.int32
    return dense(q, k, v, starts.diff().tolist(), scale), *(torch.zeros(1) for _ in range(4))


def stand_in_backward(dout, q, k, v, out, lse, starts, *rest, scale):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(dense(*inputs, starts.diff().tolist(), scale), inputs, dout)


def fa4_forward(q, k, v, return_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale):
    assert return_lse and causal and max_seqlen_q == max_seqlen_k == max(LENGTHS) and cu_seqlens_q is cu_seqlens_k
    return dense(q, k, v, cu_seqlens_q.diff().tolist(), softmax_scale), torch.zeros(1), None


def fa4_backward(q, k, v, out, dout, lse, *, cu_seqlens_q, softmax_scale, **rest):
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(dense(*inputs, cu_seqlens_q.diff().tolist(), softmax_scale), inputs, dout)


def stand_in_kernels(monkeypatch) -> list[str]:
    """Dense kernels in the place of FA2 and FA4; the names of their forward calls are added as they come."""
    calls: list[str] = []

    def counted(name, function):
        return lambda *args, **given: (calls.append(name), function(*args, **given))[1]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", counted("fa2", stand_in_forward), raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", stand_in_backward, raising=False)
    kernels = types.SimpleNamespace(_flash_attn_fwd=counted("fa4", fa4_forward), _flash_attn_bwd=fa4_backward)
    for name, module in (("", None), (".cute", None), (".cute.interface", kernels)):
        monkeypatch.setitem(sys.modules, f"flash_attn{name}", module or types.ModuleType(name))
    return calls


@pytest.mark.parametrize("name", ["sdpa", "fa2", "fa4"])
@pytest.mark.parametrize("lengths", [LENGTHS, (7, 7)])
def test_flat_calls_keep_rows_apart(name, lengths, monkeypatch):
    stand_in_kernels(monkeypatch)
    made, heads = torch.Generator().manual_seed(0), (4, 2, 2, 4)
    q, k, v, dout = (torch.randn(sum(lengths), h, 8, dtype=torch.float64, generator=made) for h in heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    rows = Rows.of(np.concatenate([np.arange(n) for n in lengths]), torch.device("cpu"))
    assert rows.lengths == list(lengths) and (rows.place is None) == (len(set(lengths)) == 1)
    out, truth = FLAT_CALLS[name](*inputs, rows, 0.3), dense(*inputs, lengths, 0.3)
    assert (out - truth).abs().max() < 1e-12
    for one, other in zip(
        torch.autograd.grad(out, inputs, dout), torch.autograd.grad(truth, inputs, dout), strict=True
    ):
        assert (one - other).abs().max() < 1e-12
    if name == "sdpa":
        assert (joined_rows(*inputs, rows, 0.3) - truth).abs().max() > 0.1


@pytest.mark.parametrize("name", ["fa2", "fa4"])
def test_kept_results_of_flat_attention_are_not_computed_again(name, monkeypatch):
    calls, forwards = stand_in_kernels(monkeypatch), {}
    found = {}
    for recompute in ("none", "layers", "layers_keep_mixers"):
        run = StepRun(Setup("tiny-qwen3", recompute=recompute, dtype="float32"), this_rank())
        rows = unshared(workload_rollouts("tiny", run.engine.vocab_size))
        monkeypatch.setattr("tests.test_step_benchmark.LENGTHS", (max(row.length for row in rows),))
        run.use_rows(name, 10_000)
        calls.clear()
        found[recompute], forwards[recompute] = run.steps(rows), len(calls)
    assert forwards == {"none": 4, "layers": 8, "layers_keep_mixers": 4}
    assert differences(found["layers_keep_mixers"], found["none"])["worst_gradient_error"] < 1e-5
    with pytest.raises(ValueError, match="flat attention sdpa cannot be kept: use --flat fa4 or fa2, or --recompute"):
        run.use_rows("sdpa", 100)


def test_the_fastest_call_is_taken_and_what_cannot_run_is_told(capsys):
    rows = Rows.of(np.tile(np.arange(4), 2), torch.device("cpu"))
    times = step_flat.times_of_calls(("sdpa", "fa4"), rows, 4, 2, 8, torch.float32)
    assert list(times) == ["sdpa"] and "flat attention fa4: " in capsys.readouterr().out
    assert step_flat.fastest({"a": 2.0, "b": 1.0}) == "b"
    with pytest.raises(ValueError, match="none of fa4, cudnn, fa2 runs here; name a flat attention with --flat"):
        step_flat.fastest({})


FIELDS = """workload model weights gpus flat_attention_ms token_ratio pair_ratio flop_ratio speedup
    speedup_over_flop_ratio mfu hfu flat_mfu flat_hfu tree_tokens_per_s flat_tokens_per_s tree_gib flat_gib
    same_micro_batch loss_error norm_error gradient_error worst_gradient_error right recompute plan_wait_ms""".split()


@pytest.mark.parametrize(("model", "tokens"), [("tiny-qwen3", 100), ("tiny-qwen3.5", 250)])
def test_tree_and_flat_agree_and_the_record_says_all(model, tokens):
    given = arguments(model=model, flat_tokens=tokens, recompute="none" if tokens > 100 else "layers")
    run = StepRun(step.setup_of(given), this_rank())
    record = step.compare(run, "tiny", given)
    assert set(FIELDS) <= set(record) and json.loads(json.dumps(record)) == record
    rollouts = workload_rollouts("tiny", run.engine.vocab_size)
    flat = sum(rollout.length for rollout in rollouts)
    tree = 2 * 24 + flat - 8 * 24
    assert (record["tree_tokens"], record["flat_tokens"]) == (tree, flat)
    assert record["tree_packs"] == 1 and record["flat_packs"] >= flat / tokens
    assert record["right"] and record["gradient_error"] < 1e-5 and record["worst_gradient_error"] < 1e-4
    assert record["speedup"] == pytest.approx(record["flat_ms"] / record["tree_ms"], abs=1e-3)
    assert record["speedup_over_flop_ratio"] == pytest.approx(record["speedup"] / record["flop_ratio"], abs=1e-3)
    assert record["same_micro_batch"]["rollouts"] == len(within(rollouts, tokens))
    assert 1 < record["flop_ratio"] < record["token_ratio"] and record["tree_tflop"] > 0


def test_a_part_of_the_layers_is_recomputed_on_both_sides():
    given = arguments(recompute="layers", recompute_layers=3)
    run = StepRun(step.setup_of(given), this_rank())
    layers = run.causal_lm.base_model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, True, False]
    record = step.compare(run, "tiny", given)
    assert record["right"] and record["recompute"] == "layers, 3 of 4 layers"
    work = run.work(workload_rollouts("tiny", run.engine.vocab_size))
    of_part, of_all = (replace(run.setup, recompute_layers=count) for count in (3, None))
    run.setup = of_part
    part = run.flops(work)
    run.setup = of_all
    assert part[0] < part[1] < run.flops(work)[1]


def test_a_wrong_result_has_no_speed_up(monkeypatch):
    monkeypatch.setitem(FLAT_CALLS, "sdpa", joined_rows)
    given = arguments()
    record = step.compare(StepRun(step.setup_of(given), this_rank()), "tiny", given)
    assert not record["right"] and record["speedup"] is None and record["speedup_over_flop_ratio"] is None
    assert record["gradient_error"] > 0.01


def test_steps_do_not_change_weights_and_drawn_adapters_stay(monkeypatch):
    pytest.importorskip("peft", reason="adapters need peft")
    tiny = replace(SHAPES["qwen3-8b"], sizes=SHAPES["qwen3-8b"].sizes | small_sizes())
    monkeypatch.setitem(SHAPES, "qwen3-8b", tiny)
    run = StepRun(Setup("qwen3-8b", layers=2), this_rank())
    assert run.setup.title == "qwen3-8b, 2 layers" and run.setup.weights == "LoRA 16"
    before = {name: p.detach().clone() for name, p in run.causal_lm.named_parameters()}
    rollouts = workload_rollouts("tiny", run.engine.vocab_size)
    one, two = run.steps(rollouts), run.steps(rollouts)
    assert all(torch.equal(before[name], p) for name, p in run.causal_lm.named_parameters())
    assert all(p.abs().max() > 0 for name, p in before.items() if "lora_B" in name)
    assert before["model.layers.0.mlp.up_proj.base_layer.weight"].dtype == torch.bfloat16
    # With zeros in B no A would have a gradient.
    assert one.gradients and all(gradient.norm() > 0 for gradient in one.gradients.values())
    assert differences(one, two)["worst_gradient_error"] == 0


def small_sizes() -> dict:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, **heads}


def test_shapes_have_the_released_models_parameters():
    for name, billions in (("qwen3-8b", 8.19), ("qwen3.5-4b", 4.21)):
        model = random_model(shape_config(name), torch.bfloat16, torch.device("meta"))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    kept = {p.dtype for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    assert kept == {torch.float32} and model.lm_head.weight.dtype == torch.bfloat16


def test_random_models_are_the_same_for_a_seed_and_forget_slowly():
    config = shape_config("qwen3.5-4b", 4)
    for name, size in small_sizes().items():
        setattr(config, name, size)
    one, two = (random_model(config, torch.float32, torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    decay = one.model.layers[0].linear_attn
    assert (-5 <= decay.A_log).all() and (decay.A_log <= -2).all() and (decay.dt_bias <= -1).all()


def test_differences_are_relative_and_bounded():
    gradients = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 1.0]), "c": torch.tensor([1e-4])}
    truth = Measured(1.0, {"loss": 1e-4, "entropy": 2.0, "grad_norm": 10.0}, gradients, 0.0)
    other = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5, 1.0]), "c": torch.tensor([1.0])}
    found = differences(replace(truth, metrics=truth.metrics | {"grad_norm": 11.0}, gradients=other), truth)
    assert found["loss_error"] == found["entropy_error"] == 0 and found["norm_error"] == pytest.approx(0.1)
    assert found["worst_gradient_error"] == pytest.approx(0.5)  # c is too small to count alone
    assert found["gradient_error"] == pytest.approx(1.25**0.5 / 26**0.5, rel=1e-3)
    assert not within_bounds(found, torch.bfloat16) and not within_bounds(found | {"norm_error": 0}, torch.bfloat16)
    good = dict.fromkeys(found, 0.0)
    assert within_bounds(good, torch.bfloat16) and not within_bounds(good | {"loss_error": float("nan")}, torch.float32)


def test_micro_batches_are_halved_until_they_fit(monkeypatch):
    run = StepRun(Setup("tiny-qwen3", dtype="float32"), this_rank())
    rows = unshared(workload_rollouts("tiny", run.engine.vocab_size))
    flat, steps = sum(row.length for row in rows), run.steps

    def with_little_memory(rollouts, repeats=1):
        if sum(rollout.length for rollout in rollouts) > 120:
            raise torch.cuda.OutOfMemoryError("no memory")
        return steps(rollouts, repeats)

    monkeypatch.setattr(run, "steps", with_little_memory)
    attention, _, tokens, _ = step.flat_micro_batch(run, rows, arguments(flat_tokens=None))
    assert attention == "sdpa" and tokens == flat // 2 and run.engine.packing.max_pack_tokens == tokens
    with pytest.raises(torch.cuda.OutOfMemoryError):
        step.flat_micro_batch(run, rows, arguments(flat_tokens=flat))
    # 120 tokens are 4 rows of 27 to 33 tokens.
    assert step.largest_rollouts(run, workload_rollouts("tiny", 512, 2), "sdpa", 8) == {"tree": 4, "flat": 4}
    for most in (0, 1, 5, 8, 11):
        tried: list[int] = []
        found = step.largest(lambda count, most=most, tried=tried: not tried.append(count) and count <= most, 4, 16)
        assert found == {0: 0, 1: 1, 5: 4, 8: 8, 11: 8}[most] and len(tried) == len(set(tried)) <= 4


def test_a_real_set_is_cut_at_groups(tmp_path):
    lengths = {"a": (3, 4), "b": (5,), "c": (6,)}
    (tmp_path / "tokens").mkdir()
    with gzip.open(tmp_path / "tokens" / "tau_airline.jsonl.gz", "wt") as file:
        for group, of_group in lengths.items():
            for number, length in enumerate(of_group):
                record = {"group": group, "rollout": str(number), "reward": 0.0, "input_ids": [1] * length}
                file.write(json.dumps(record | {"loss_mask": [1] * length}) + "\n")
    for most, rollouts in ((7, 2), (11, 2), (12, 3), (None, 4)):
        assert len(workload_rollouts("tau_airline", 10, 1, most, tmp_path)) == rollouts
    with pytest.raises(ValueError, match="the first group of tau_airline has more than the 6 tokens"):
        workload_rollouts("tau_airline", 10, 1, 6, tmp_path)
    with pytest.raises(ValueError, match="gsm8k_solutions.jsonl.gz is missing: give the folder .* with --data"):
        workload_rollouts("gsm8k_solutions", 10, data=tmp_path)


def layer_record(names=("sdpa",)) -> dict:
    model = load_model("tiny-qwen3", torch.float32)
    prepare_for_trees(model)
    rollouts = workload_rollouts("tiny", 512)
    return step_layer.compare(model, "tiny", "tiny", rollouts, names, torch.device("cpu"))


def test_one_layer_on_a_tree_equals_rows(monkeypatch):
    record = layer_record(("sdpa", "fa4"))
    assert list(record["flat_ms"]) == ["sdpa"]  # the other one is not for this device
    assert record["error"]["sdpa"] < 1e-5
    assert record["gain_over_fastest"] == pytest.approx(record["flat_ms"]["sdpa"] / record["tree_ms"], rel=1e-2)
    assert record["gain_over_fa2"] is None and record["flop_ratio"] > 1
    monkeypatch.setitem(FLAT_CALLS, "sdpa", joined_rows)
    record = layer_record()
    assert record["error"]["sdpa"] > 1e-2 and record["gain_over_fastest"] is None


def ranks_record(more: str) -> dict:
    given = arguments(more=more)
    return step_ranks.compare(step.setup_of(given), "tiny", given, this_rank())


@pytest.mark.parametrize("more", ["rollouts", "prompts"])
def test_several_ranks_against_one(more):
    one, two = run_ranks(2, ranks_record, more)
    assert (one["tree_tokens"] > 2 * one["one_gpu_tree_tokens"]) == (more == "prompts")  # lengths are drawn
    assert one["right"] and one["norm_error"] < 1e-4 and one["gpus"] == 2
    assert one["rollouts"] == 16 and one["efficiency"] == two["efficiency"] > 0
    assert one["tree_ms"] == two["tree_ms"]  # the slowest rank's
    alone = one["one_gpu_tree_tokens"] / one["one_gpu_ms"]
    assert one["efficiency"] == pytest.approx(one["tree_tokens"] / one["tree_ms"] / 2 / alone, rel=0.01)


def test_the_command_appends_a_record_a_workload(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "step.py")])
    results = tmp_path / "results.jsonl"
    given = "--model tiny-qwen3 --workloads tiny --flat sdpa --dtype float32 --repeats 1 --recompute none --commit abc"
    step.main([*given.split(), "--record", "--results", str(results)])
    (record,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert record["bench"] == "step" and record["commit"] == "abc" and record["recompute"] == "none"
    assert record["roof_tflops"] is None and record["right"]
    assert "speedup_over_flop_ratio" in capsys.readouterr().out


def test_steps_that_warm_up_count_neither_in_time_nor_in_memory(monkeypatch):
    """A step that compiles takes 10 s, those after it 1 and 3; the next one's plan begins in all but the last."""
    now, seen, peaks = [0.0], [], []
    seconds = iter([10.0, 1.0, 3.0])

    def train_step(rollouts, upcoming):
        now[0] += next(seconds)
        seen.append(upcoming is rollouts)
        return {"packs": 1}

    run = object.__new__(StepRun)
    run.engine, run.device, run.gradients = types.SimpleNamespace(train_step=train_step), torch.device("cpu"), {}
    run.ranks = types.SimpleNamespace(group=None)
    monkeypatch.setattr(step_run.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(step_run.clock, "reset_peak", lambda device: peaks.append(now[0]))
    assert run.steps(["rollouts"], repeats=2, warm=1).seconds == 2.0
    assert seen == [True, True, False] and peaks == [10.0]
