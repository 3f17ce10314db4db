"""The engines on (dp, cp) meshes: loss, gradients and weights equal to flat rows, whoever holds the weights."""

import pytest
import torch

from cp_engine.verify.compare import gradient_error
from tests.distributed.engine_cases import flat_oracle, gradients
from tests.ranks import run_ranks

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]


@pytest.fixture(scope="module")
def flat():
    return flat_oracle()


class _Given:
    """Gradients in the form that `gradient_error` judges."""

    def __init__(self, found):
        self.found = found

    def named_parameters(self):
        for name, gradient in self.found.items():
            parameter = torch.nn.Parameter(torch.zeros_like(gradient))
            parameter.grad = gradient
            yield name, parameter


def judged(results, flat, bound=1e-10):
    assert sum(loss for loss, _, _ in results) == pytest.approx(flat.loss, rel=1e-12)
    for _, _, found in results[:: max(1, len(results) - 1)]:
        assert gradient_error(_Given(found), flat.gradient).error <= bound


@pytest.mark.parametrize("name", ["plain", "fsdp2"])
@pytest.mark.parametrize(("dp", "cp"), MESHES, ids=lambda v: str(v))
def test_gradients_are_those_of_flat_rows(flat, name, dp, cp):
    sections = {"parallel": {"dp": dp, "cp": cp}, "engine": {"name": name}}
    results = run_ranks(dp * cp, gradients, flat, {}, sections)
    judged(results, flat)
    packs = len(flat.step.packs)
    assert packs == 3 and sum(empty for _, empty, _ in results) == cp * (-packs % dp)
