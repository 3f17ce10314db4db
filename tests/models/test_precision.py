import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cp_engine.models.precision import keep_float64

WIDE = torch.linspace(-1.0, 1.0, 7, dtype=torch.float64)
NARROW = torch.ones(1)

CASTS = {
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float32),
    "to keyword": lambda x: x.to(dtype=torch.float32),
    "to device and dtype": lambda x: x.to("cpu", torch.float32),
    "to tensor": lambda x: x.to(NARROW),
    "type": lambda x: x.type(torch.float32),
    "type name": lambda x: x.type("torch.FloatTensor"),
    "type_as": lambda x: x.type_as(NARROW),
    "Tensor.softmax": lambda x: x.softmax(-1, dtype=torch.float32),
    "torch.softmax": lambda x: torch.softmax(x, -1, dtype=torch.float32),
    "F.softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "F.log_softmax": lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32),
    "F.log_softmax input=": lambda x: F.log_softmax(input=x, dim=-1, dtype=torch.float32),
    "positional dtype": lambda x: torch.softmax(x, -1, torch.float32),
    "sum": lambda x: x.sum(dtype=torch.float32),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_float64_is_never_cast_to_float32(cast):
    assert cast(WIDE).dtype == torch.float32
    with keep_float64():
        assert cast(WIDE).dtype == torch.float64
    assert cast(WIDE).dtype == torch.float32


def test_other_casts_are_left_alone():
    with keep_float64():
        assert torch.arange(3).float().dtype == torch.float32
        assert WIDE.to(torch.bfloat16).dtype == WIDE.bfloat16().dtype == torch.bfloat16
        assert NARROW.float() is not None and NARROW.to(torch.float64).dtype == torch.float64


class _RecordsBackward(torch.autograd.Function):
    dtypes = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _RecordsBackward.dtypes.append(grad.float().dtype)
        return grad


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_context_holds_in_backward_and_recompute(use_reentrant):
    seen = []

    def block(x):
        x = x.float()
        seen.append(x.dtype)
        return _RecordsBackward.apply(x).exp().sum()

    x = WIDE.clone().requires_grad_()
    _RecordsBackward.dtypes.clear()
    with keep_float64():
        checkpoint(block, x, use_reentrant=use_reentrant).backward()
        torch.autograd.backward(checkpoint(block, x, use_reentrant=use_reentrant))
        if not use_reentrant:
            torch.autograd.grad(checkpoint(block, x, use_reentrant=False), x)
    assert len(seen) == 4 + 2 * (not use_reentrant) and set(seen) == set(_RecordsBackward.dtypes) == {torch.float64}


def test_the_context_ends_with_an_exception():
    with pytest.raises(KeyError), keep_float64():
        raise KeyError
    x = WIDE.clone().requires_grad_()
    _RecordsBackward.dtypes.clear()
    _RecordsBackward.apply(x).sum().backward()
    assert _RecordsBackward.dtypes == [torch.float32]
