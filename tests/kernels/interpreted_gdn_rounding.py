"""The bounds of `gdn_flat` in Triton's interpreter, on results rounded to bf16; `test_gdn_triton.py` runs this file.

The interpreter has no bf16 of its own: here what the stages hand on is rounded to it.
"""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

import importlib
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

from cp_engine.kernels.gdn import triton as gdn
from cp_engine.kernels.gdn.triton import walks
from tests.gdn_oracle import random_forest
from tests.kernels.gdn_cases import Case, case, rank_plans, whole_plan
from tests.kernels.gdn_faults import without_entry_of_last_chain, without_last_chain_sum
from tests.kernels.gdn_flat import share_of_bounds

CHAIN_TABLES = importlib.import_module("cp_engine.kernels.gdn.triton.chain_tables")


@pytest.fixture(autouse=True, scope="module")
def one_configuration():
    single_configurations()


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def bf16_case(seed: int, rank: int | None = None) -> Case:
    forest = random_forest(seed, 12)
    plan = whole_plan(forest) if rank is None else rank_plans(forest, 0)[rank]
    mine = case(plan, rank or 0, (1, 2, 32, 32))
    q, k, v, *gates = mine.inputs
    return replace(mine, inputs=type(mine.inputs)(*map(rounded, (q, k, v)), *gates), dout=rounded(mine.dout))


def with_rounded_stages() -> list:
    """Patches that round w, u, T, the gradient of v' inside a chunk, states in rows, and every result."""
    chunk_stages, backward_stages = gdn.chunk_stages, gdn.backward_stages
    states, adjoint, outputs, gradients = (
        walks.run_states,
        walks.run_adjoint,
        walks.Forward.outputs,
        walks.Backward.gradients,
    )

    def rounded_stages(*args):
        made = chunk_stages(*args)
        return replace(made, w=rounded(made.w), u=rounded(made.u), inverse=rounded(made.inverse))

    def run_states(k, w, u, decay, ends, entry_states, new_v, written, *rest, **how):
        states(k, w, u, decay, ends, entry_states, new_v, written, *rest, **how)
        written.rows.copy_(rounded(written.rows))

    return [
        mock.patch.object(gdn, "chunk_stages", rounded_stages),
        mock.patch.object(gdn, "backward_stages", lambda *args: rounded(backward_stages(*args))),
        mock.patch.object(walks, "run_states", run_states),
        mock.patch.object(walks, "run_adjoint", lambda *args, **how: rounded(adjoint(*args, **how))),
        mock.patch.object(walks.Forward, "outputs", lambda walk: rounded(outputs(walk))),
        mock.patch.object(
            walks.Backward, "gradients", lambda walk, dexit: [rounded(x) for x in gradients(walk, dexit)]
        ),
    ]


def share(mine: Case, fault=None) -> dict[str, float]:
    with ExitStack() as stack:
        for patch in with_rounded_stages():
            stack.enter_context(patch)
        return share_of_bounds(mine, fault(mine.tables()) if fault else None)


@pytest.mark.parametrize("rank", [None, 2])
def test_rounding_alone_is_within_the_bounds(rank):
    used = share(bf16_case(0, rank))
    # Not far below either: bounds that nothing reaches would see nothing.
    assert 0.3 <= max(used.values()) <= 1, used


@pytest.mark.parametrize("fault", [without_entry_of_last_chain, without_last_chain_sum])
def test_one_wrong_chain_is_beyond_the_bounds(fault, monkeypatch):
    monkeypatch.setattr(CHAIN_TABLES, "MOST_TWIGS", 0)
    assert max(share(bf16_case(0), fault).values()) > 3
