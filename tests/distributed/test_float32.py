"""FSDP2 in float32 against whole weights: gradients of every parameter, and weights after two SGD steps."""

from unittest import mock

import pytest

from cp_engine.distributed.fsdp2 import Fsdp2Model
from tests.distributed.two_steps import BOUND, SGD, assert_close, assert_moved, largest_error, several, two_steps
from tests.ranks import run_ranks

FSDP2 = {"name": "fsdp2"}


@pytest.mark.parametrize("mesh", [{"dp": 2, "cp": 1}, {"dp": 1, "cp": 2}], ids=str)
def test_two_steps_are_those_of_plain(mesh):
    cases = [SGD | {"parallel": mesh, "engine": engine} for engine in ({"name": "plain"}, FSDP2)]
    for truth, found in run_ranks(2, several, cases):
        assert_close(found, truth)
        assert_moved(truth)


def scaled_steps(sections: dict):
    """With gradients that are wrong by one part in 100,000, which clipping takes out of the weights again."""
    exact = Fsdp2Model.backward
    with mock.patch.object(Fsdp2Model, "backward", lambda model, loss, last: exact(model, loss * (1 + 1e-5), last)):
        return two_steps(sections)


def test_a_small_fault_in_gradients_is_seen():
    sections = SGD | {"parallel": {"dp": 2}}
    truth, found = (run_ranks(2, f, sections | {"engine": FSDP2})[0] for f in (two_steps, scaled_steps))
    assert largest_error(found.gradients, truth.gradients) > 2 * BOUND
    assert largest_error(found.weights, truth.weights) <= BOUND
