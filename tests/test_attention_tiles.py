"""The sweep over tile sizes: what a trial changes, that it is undone, and what is refused."""

import pytest
import torch

from benchmarks.attention_tiles import in_use, sizes_of
from cp_engine.kernels.attention.triton import primitives, stored_pass
from cp_engine.kernels.attention.triton.primitives import Sizes

CPU = torch.device("cpu")  # where no card limits the sizes


def test_a_trial_changes_its_kernels_at_one_head_size_and_is_undone():
    pytest.importorskip("triton")
    assert sizes_of("now") == {}
    changed = sizes_of("dkdv=32,64,8,3+dq=64,64,8,2,1")
    assert changed == {"dkdv": Sizes(32, 64, 8, 3), "dq": Sizes(64, 64, 8, 2, held=1)}
    assert primitives.makes_apart(256, torch.bfloat16)
    before = primitives.kernel_sizes("dq", 256, torch.bfloat16, CPU)
    with in_use(changed, 256):
        assert not primitives.makes_apart(256, torch.bfloat16)
        assert primitives.kernel_sizes("dkdv", 256, torch.bfloat16, CPU) == changed["dkdv"]
        assert primitives.kernel_sizes("dq", 256, torch.bfloat16, CPU) == changed["dq"]
        assert primitives.kernel_sizes("dkdv", 128, torch.bfloat16, CPU) == primitives.SIZES["dkdv"][128]
    assert primitives.makes_apart(256, torch.bfloat16)
    assert primitives.kernel_sizes("dq", 256, torch.bfloat16, CPU) == before
    with in_use(sizes_of("forward=32,64,4,2"), 128):
        short = primitives.kernel_sizes("forward", 128, torch.bfloat16, CPU, short=True)
    assert short == Sizes(32, 64, 4, 2) != primitives.kernel_sizes("forward", 128, torch.bfloat16, CPU, short=True)


def test_a_trial_of_stored_scores_changes_that_backward_alone_and_is_undone():
    before, sizes = stored_pass.IN_USE, primitives.SIZES
    with in_use(sizes_of("scores=128,32,8,3"), 256):
        assert stored_pass.IN_USE == stored_pass.Stored(Sizes(128, 32, 8, 3), before.product, before.workspace)
        assert primitives.SIZES == sizes
    assert stored_pass.IN_USE is before


@pytest.mark.parametrize("trial", ["later", "dq=64,64,8", "dq=64,64,8,x", "dp=64,64,8,2", "dq=64,64,8,2+"])
def test_other_trials_are_refused(trial):
    with pytest.raises(
        ValueError, match="a trial is 'now' or kernel=rows,keys,warps,stages .* with one of forward, dq, "
    ):
        sizes_of(trial)


@pytest.mark.parametrize("trial", ["dkdv=64,64,4,2,1", "forward=64,64,4,3,2", "product=64,128,8,3,1"])
def test_kernels_hold_no_more_tiles_than_they_own(trial):
    with pytest.raises(ValueError, match="can hold [01] tiles in registers"):
        sizes_of(trial)
