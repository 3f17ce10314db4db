"""The faults that `test_gdn_gpu.py` plants on a GPU, seen by its bounds in Triton's interpreter; `test_gdn_triton.py`
runs this file.

The interpreter is slow and has no bf16: smaller heads, the convolution by its reference, and kernels in float32, beside
the errors that a GPU makes.
"""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

import numpy as np
import pytest
import torch

from cp_engine.kernels.conv import api as conv_api
from cp_engine.kernels.conv import reference
from cp_engine.layers.gdn_tables import GdnHeads
from tests.layers import test_gdn_gpu as on_gpu

# Of the paths alone in bf16 an H200 prints errors of 0.002 to 0.0144: the bounds here are wider than its own.
ALONE = 0.02


@pytest.fixture(scope="module")
def bounded():
    """Case, truth and errors of the paths alone, as the fixture of the GPU tests."""
    single_configurations()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_gpu, "HEADS", GdnHeads(1, 2, 32, 32))
        patch.setattr(conv_api, "_backend", lambda _: reference)
        case = on_gpu.bf16_case("cpu")
        truth = on_gpu.run(case, on_gpu.whole_tables("cpu"), torch.float64, "reference")
        segments = len(on_gpu.forest().segment_length)
        yield case, truth, {name: np.full(segments if name in on_gpu.ROWS else 1, ALONE) for name in truth}


def share(bounded, tables) -> float:
    case, truth, alone = bounded
    got = on_gpu.run(case, tables, torch.float32, "triton")
    return max(on_gpu.share_of_bounds(case, got, truth, alone).values())


def test_right_results_are_far_within_the_bounds(bounded):
    assert share(bounded, on_gpu.whole_tables("cpu")) <= 1e-3


@pytest.mark.parametrize("fault", on_gpu.FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(bounded, fault):
    assert share(bounded, on_gpu.faulty_tables(fault, "cpu")) > 2
