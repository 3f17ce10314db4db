"""Backward passes call kernels and exchanges, which autograd does not see: a second derivative would be wrong."""

import ast
from pathlib import Path

import pytest
import torch

from cp_engine.models.load import load_model, prepare_for_trees
from cp_engine.models.tree_causal_lm import TreeCausalLM
from tests.models.flat import branching_rollouts, one_rank_pack

ROOT = Path(__file__).parents[2]


def backward_passes() -> dict[str, list[str]]:
    """The decorators of every `autograd.Function`'s backward."""
    found = {}
    for folder in ("cp_engine", "kernels", "sharding"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and "torch.autograd.Function" in map(ast.unparse, node.bases):
                    (backward,) = [part for part in node.body if getattr(part, "name", None) == "backward"]
                    found[f"{path.stem}.{node.name}"] = [ast.unparse(each) for each in backward.decorator_list]
    return found


def test_every_backward_pass_says_that_it_has_no_derivative():
    found = backward_passes()
    assert len(found) >= 11
    assert [name for name, decorators in found.items() if "once_differentiable" not in decorators] == []


def test_a_second_derivative_is_refused():
    model = load_model("tiny-qwen3", torch.float64)
    prepare_for_trees(model)
    log_prob, _ = TreeCausalLM(model)(one_rank_pack(branching_rollouts(), None))
    query = model.model.layers[0].self_attn.q_proj.weight
    (gradient,) = torch.autograd.grad(log_prob.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
