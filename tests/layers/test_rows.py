"""Copies of rows 16 bytes at a time, bit for bit, and where rows do not allow them."""

import pytest
import torch

from cp_engine.kernels.attention.placing import placed
from cp_engine.sharding.exchange.rows import WIDE, put_rows, take_rows

ROWS = torch.tensor([4, 0, 6])


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every bit pattern may occur, those of NaN too."""
    made = torch.Generator().manual_seed(0)
    count = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=made).view(dtype).view(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.fixture
def widened(monkeypatch):
    """Dtypes that tensors were viewed as."""
    seen, view = [], torch.Tensor.view

    def watched(x, *arguments):
        seen.extend(arguments[:1])
        return view(x, *arguments)

    monkeypatch.setattr(torch.Tensor, "view", watched)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "size", "wide"), [((1, 3), 16, True), ((1, 2), 8, True), ((0, 3), 5, False)])
def test_rows_of_a_part_of_the_heads(widened, dtype, heads, size, wide):
    part = slice(*heads)
    x, few = bits((7, 3, size), dtype), bits((3, heads[1] - heads[0], size), dtype)
    taken, put, copied = few.clone(), x.clone(), x.clone()
    take_rows(x[:, part], ROWS, taken)
    put_rows(few, ROWS, put[:, part])
    placed(few, copied[4:, part])
    assert (WIDE in widened) == wide
    expected = x.clone()
    for row, values in zip(ROWS.tolist(), few, strict=True):
        expected[row, part] = values
    assert same(taken, torch.stack([x[row, part] for row in ROWS.tolist()])) and same(put, expected)
    assert same(copied[4:, part], few) and same(copied[:4], x[:4])


def test_another_dtype_is_converted():
    few = torch.randn(3, 2, 8)
    put, copied = (torch.zeros(7, 2, 8, dtype=torch.bfloat16) for _ in range(2))
    put_rows(few.bfloat16(), ROWS, put)
    placed(few, copied[:3])
    assert torch.equal(put[ROWS], few.bfloat16()) and torch.equal(copied[:3], few.bfloat16())
