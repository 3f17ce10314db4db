import pytest
import torch
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_leaves

from cp_engine.engine import Engine
from cp_engine.models.load import float32_parameters, load_model, prepare_for_trees
from cp_engine.models.tree_causal_lm import TreeCausalLM
from cp_engine.pack import device_pack
from tests.distributed.engine_cases import sample, this_rank, tiny_config
from tests.models.flat import branching_rollouts, one_rank_pack


def test_engines_see_the_pack_as_one_opaque_leaf():
    pack = one_rank_pack(branching_rollouts(), 4)
    keywords = {"tree_pack": pack}
    assert tree_leaves(keywords) == [pack]
    seen = []
    assert _apply_to_tensors(seen.append, keywords)["tree_pack"] is pack and not seen


def test_the_pack_holds_the_plans_rows_and_occurrences():
    rollouts = branching_rollouts()
    pack = one_rank_pack(rollouts, None)
    assert pack.gdn is None and pack.token_id.shape == pack.position.shape == (1, pack.plan.rows)
    target = pack.edges.edge_target[pack.occurrence_edge]
    assert target.tolist() == [token for rollout in rollouts for token in rollout[1:]]
    assert pack.occurrence_position.tolist() == [j for rollout in rollouts for j in range(1, len(rollout))]


def test_a_plan_of_another_rank_is_an_error():
    plan = one_rank_pack([[1, 2]], None).plan
    with pytest.raises(AssertionError, match="plan of rank 0 of 2 on rank 0 of a group of 1"):
        device_pack(type(plan)(**{**vars(plan), "world": 2}))


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3.5"])
def test_bfloat16_gives_float32_log_probs_near_those_of_float32(preset):
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = load_model(preset, dtype)
        prepare_for_trees(model)
        pack = one_rank_pack(branching_rollouts(), getattr(model.config, "linear_conv_kernel_dim", None))
        log_prob, entropy = TreeCausalLM(model)(pack)
        (log_prob.sum() + entropy.sum()).backward()
        assert log_prob.dtype == entropy.dtype == torch.float32
        decays = {id(p) for p in float32_parameters(model, dtype)}
        for p in model.parameters():
            assert p.grad.dtype == (torch.float32 if id(p) in decays else dtype) and p.grad.isfinite().all()
        found[dtype] = log_prob.detach()
    # bfloat16 weights alone move the logits, whose standard deviation is 1.5, by about one per cent.
    assert (found[torch.bfloat16] - found[torch.float32]).abs().mean() < 0.05


def test_the_transport_of_the_configuration_reaches_attention():
    plan = one_rank_pack([[1, 2]], None).plan
    assert device_pack(plan).attention.transport == "auto"
    assert device_pack(plan, transport="collective").attention.transport == "collective"
    engine = Engine(tiny_config({"parallel": {"transport": "collective"}}), this_rank())
    packs = engine._packs(engine._prepare(sample()))
    assert [pack.attention.transport for _, pack, _ in packs] == ["collective"] * 3
