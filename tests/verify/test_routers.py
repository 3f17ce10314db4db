"""The load-balancing loss of routers over a whole step: loss, gradients, faults, and what is refused."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import pytest
import torch

import cp_engine.placement as placement
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from cp_engine.losses.router_balance import RouterBalance
from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.load import load_model, prepare_for_trees
from cp_engine.models.precision import keep_float64
from cp_engine.models.routers import router_shape
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.pack import DevicePack
from cp_engine.sharding.layout import layout_from_cuts
from cp_engine.step import prepare_step
from cp_engine.verify.flat_routers import _WideSums, flat_routers
from cp_engine.verify.run import VerifyOptions, run_flat, verify_tree
from tests.distributed.engine_cases import flat_oracle, gradients
from tests.distributed.test_engines import judged
from tests.models.flat import branching_rollouts, one_rank_pack
from tests.ranks import run_ranks
from tests.verify.test_verify import on_ranks, sample, this_rank

MOE = ("tiny-qwen3-moe", "tiny-qwen3.5-moe", "tiny-qwen3-next")
ONE = Ranks(0, 1, None, torch.device("cpu"))


def options(model: str = "tiny-qwen3-moe", **fields) -> VerifyOptions:
    return VerifyOptions(model=model, loss="grpo", **({"max_pack_tokens": 90, "share": "group"} | fields))


@pytest.mark.parametrize("model", MOE)
def test_the_oracle_is_the_models_own_loss_of_one_padded_batch(model):
    config = VerifyOptions(model=model).config(1, 512)
    step = prepare_step(sample(6), config.packing, config.loss)
    hf = load_model(model, torch.float64, vocab_size=512)
    make_cpu_runnable(hf)
    length = np.diff(step.flat.row_start)
    ids, mask = (torch.zeros(len(length), length.max(), dtype=dtype) for dtype in (torch.int64, torch.float64))
    for row, count in enumerate(length):
        start = step.flat.row_start[row]
        ids[row, :count] = torch.from_numpy(step.flat.token[start : start + count])
        mask[row, :count] = 1
    with keep_float64():
        with _WideSums(torch.float64):
            out = hf(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        (0.1 * out.aux_loss).backward()
        expected = {name: p.grad.clone() for name, p in hf.named_parameters() if p.grad is not None and p.grad.any()}
        hf.zero_grad()
        routers = flat_routers(hf, step, list(range(len(length))), 0.1, router_shape(hf), ONE)
        for row in range(len(length)):
            routers.backward_row(hf, step, row)
    assert routers.loss == pytest.approx(0.1 * float(out.aux_loss.detach()), rel=1e-14)
    assert any("gate" in name for name in expected) and any("embed" in name for name in expected)
    for name, parameter in hf.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12 * expected[name].abs().max())


def crowded(forest, parallel, shape, hosts):
    """All tokens on the last rank."""
    return forest, layout_from_cuts(np.array([0, forest.tokens]), np.array([parallel.cp - 1]), parallel.cp), None


def verify_crowded(model: str) -> dict:
    chosen = options(model)
    flat = run_flat(sample(8), chosen, this_rank())
    with mock.patch.object(placement, "choose_layout", crowded):
        return verify_tree(flat, chosen, this_rank())


@pytest.mark.parametrize("model", MOE)
def test_ranks_without_tokens_take_part(model):
    result = run_ranks(3, verify_crowded, model)[0]
    assert result["ok"] and result["packs"] > 1 and result["router_loss"] > 0.1, result["reasons"]


@pytest.mark.parametrize(("name", "dp", "cp"), [("plain", 2, 1), ("fsdp2", 2, 1), ("fsdp2", 1, 2)])
def test_counts_are_those_of_all_data_parallel_groups(name, dp, cp):
    fields = {"model": "tiny-qwen3-moe", "router_aux_coef": 0.1}
    flat = flat_oracle(**fields)
    sections = {"parallel": {"dp": dp, "cp": cp}, "engine": {"name": name}}
    judged(run_ranks(dp * cp, gradients, flat, fields, sections), flat)


def own_pack_only():
    """The counts of the first pack stand for those of the step."""
    return mock.patch.object(RouterBalance, "count", counted_when_trained)


def counted_when_trained(self, logits, rollouts, count=RouterBalance.count):
    if logits[0].requires_grad:
        count(self, logits, rollouts)


def own_rank_only():
    made = RouterBalance.__init__

    def without_group(self, coefficient, top_k, tokens, group):
        made(self, coefficient, top_k, tokens, None)

    return mock.patch.object(RouterBalance, "__init__", without_group)


def shared_tokens_once():
    made = DevicePack.__init__

    def once(self, *args, **keywords):
        made(self, *args, **keywords)
        self.rollouts = self.rollouts.clamp(max=1)

    return mock.patch.object(DevicePack, "__init__", once)


def padding_counts():
    made = DevicePack.__init__

    def counted(self, *args, **keywords):
        made(self, *args, **keywords)
        self.rollouts = self.rollouts.clamp(min=1)

    return mock.patch.object(DevicePack, "__init__", counted)


FAULTS = {f.__name__: f for f in (own_pack_only, own_rank_only, shared_tokens_once, padding_counts)}


def verify_with_fault(fault: str, flat) -> dict:
    padded = mock.patch.object(placement, "choose_layout", crowded)
    with FAULTS[fault](), padded if fault == "padding_counts" else contextlib.nullcontext():
        return verify_tree(flat, options(), this_rank())


@pytest.mark.parametrize(
    ("fault", "world"),
    [("own_pack_only", 1), ("own_rank_only", 2), ("shared_tokens_once", 1), ("padding_counts", 2)],
)
def test_planted_faults_are_found(fault, world):
    flat = run_flat(sample(8), options(), ONE)
    result = on_ranks(world, verify_with_fault, fault, flat)
    assert not result["ok"] and result["max_grad_err"] > 1e-4, result


def test_a_model_without_routers_has_no_such_loss():
    config = options("tiny-qwen3", router_aux_coef=0.1).config(1, 64)
    with pytest.raises(ValueError, match="router_aux_coef is 0.1, but the model 'tiny-qwen3' has no expert routers"):
        Engine(config, ONE)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recompute_keeps_the_routers_gradient_or_says_that_it_cannot(use_reentrant):
    model = load_model("tiny-qwen3-moe", torch.float64)
    prepare_for_trees(model)
    tree, pack = TreeCausalLM(model).train(), one_rank_pack(branching_rollouts(), None)

    def part() -> torch.Tensor:
        balance = RouterBalance(1.0, router_shape(model), 700, None)
        return balance.loss(tree(pack, outputs="routers"), pack, torch.float64)

    def gradients() -> dict[str, torch.Tensor]:
        tree.zero_grad()
        part().backward()
        return {name: p.grad.clone() for name, p in tree.named_parameters() if p.grad is not None}

    with keep_float64():
        expected = gradients()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
            with pytest.raises(ValueError, match="recompute activations with use_reentrant=False"):
                part()
        else:
            for name, gradient in gradients().items():
                torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-14)


def test_rows_know_how_many_rollouts_pass_through_them():
    rollouts = branching_rollouts()
    pack = one_rank_pack(rollouts, None)
    assert int(pack.rollouts.sum()) == sum(len(r) for r in rollouts)
    for token, position, count in zip(pack.token_id[0], pack.position[0], pack.rollouts, strict=True):
        same = sum(len(r) > position and r[position] == token for r in rollouts)
        assert 1 <= count <= same
    first = {tuple(r[:1]): 0 for r in rollouts}
    for r in rollouts:
        first[tuple(r[:1])] += 1
    roots = pack.rollouts[pack.position[0] == 0]
    assert sorted(roots.tolist()) == sorted(first.values())
