"""The Gated DeltaNet layer on the Triton backend in Triton's interpreter; `test_gdn_triton.py` runs this file."""

from tests.kernels.interpreted import single_configurations  # isort: skip  # before anything that imports Triton

import gc

import pytest
import torch

from cp_engine.kernels.conv import Channels, conv_tables, qkv, qkv_backward, rows_backward
from cp_engine.kernels.conv import triton as conv_triton
from cp_engine.kernels.gdn.triton import walks
from cp_engine.layer_memory import recurrence_bytes
from cp_engine.layers.gdn import start_gated_delta_rule
from cp_engine.layers.gdn_tables import GdnHeads, gdn_tables
from cp_engine.model_sizes import ModelSizes
from cp_engine.sharding.cost import ModelShape
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import layout_from_cuts
from tests.gdn_oracle import forest_of_segments, layer_case, layer_truth, relative_errors
from tests.kernels.attention_oracle import poisoned_memory
from tests.ranks import run_ranks
from tests.test_memory import LiveBytes

BOUND = 1e-5  # float32; see the log for what is seen
HEADS = GdnHeads(1, 2, 16, 16)
# A trunk with branch points after 1, 2 and 3 more tokens, and a second tree.
SEGMENTS = [(-1, 66), (0, 1), (1, 2), (2, 3), (2, 1), (0, 5), (0, 1), (-1, 3), (7, 2), (7, 1)]
# Rank 1 starts inside the trunk and holds a parent of rows on rank 0; the last piece goes back to rank 0.
CUTS, OWNERS = [0, 30, 71, 80, 85], [0, 1, 0, 1]
NAMES = ("o", "dmixed", "dweight", "dg", "dbeta")


def run_rank(exchange: str):
    """This rank's tokens, output and gradients on the Triton backend."""
    single_configurations()
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    forest = forest_of_segments(SEGMENTS)
    layout, case = layout_from_cuts(CUTS, OWNERS, 2), layer_case(forest.tokens, 11, HEADS)
    tables = gdn_tables(gdn_plan(forest, layout, rank, exchange, 4), rank)
    tokens = torch.as_tensor(layout.rank_tokens(rank))
    rows = tokens if len(tokens) else torch.zeros(1, dtype=torch.int64)
    leaves = [case.mixed[rows], case.weight, case.g[rows], case.beta[rows]]
    leaves = [x.float().requires_grad_() for x in leaves]
    with poisoned_memory():
        o = start_gated_delta_rule(*leaves, tables, group, HEADS, "triton")()
        o.backward(case.dout[rows].float())
    return [x.detach().numpy() for x in (tokens, o, *(leaf.grad for leaf in leaves))]


def whole(ranks, tokens: int) -> list[torch.Tensor]:
    """Shares of all ranks put together: rows by token, the weight's gradient summed."""
    out = None
    for owned, *parts in ranks:
        o, dmixed, dweight, dg, dbeta = (torch.as_tensor(x) for x in parts)
        rows = [o, dmixed, dg, dbeta]
        if out is None:
            out = [torch.full((tokens, *x.shape[1:]), torch.nan) for x in rows]
            weight = torch.zeros_like(dweight)
        weight += dweight
        if len(owned):
            for total, part in zip(out, rows, strict=True):
                total[torch.as_tensor(owned)] = part
        else:
            assert not any(x.any() for x in rows), "padding row"
    return [out[0], out[1], weight, *out[2:]]


@pytest.mark.parametrize("exchange", ["affine", "ulysses"])
def test_every_rollout_alone(exchange):
    forest = forest_of_segments(SEGMENTS)
    ranks = run_ranks(2, run_rank, exchange)
    truth = layer_truth(forest, layer_case(forest.tokens, 11, HEADS), HEADS)
    found = dict(zip(NAMES, relative_errors(whole(ranks, forest.tokens), truth), strict=True))
    assert max(found.values()) <= BOUND, found


def conv_case(width: int = 4):
    """A rank whose rows other ranks read, and that reads theirs."""
    forest = forest_of_segments(SEGMENTS)
    plan = gdn_plan(forest, layout_from_cuts(CUTS, OWNERS, 2), 1, "affine", width)
    fetch, rows = plan.history_fetch, int(plan.fragment_row[-1]) + 1
    tables = conv_tables(plan.fragment_row, plan.history, rows, fetch.rows_in, sent_rows=fetch.send_rows)
    assert fetch.rows_in and fetch.rows_out
    channels, rng = Channels(1, 2, 20, 12), torch.Generator().manual_seed(3)
    count = sum(channels.splits)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    shapes = ((rows, count), (fetch.rows_in, count), (count, width), (fetch.rows_out, count))
    x, fetched, weight, home = (normal(*shape) for shape in shapes)
    grads = tuple(normal(rows, h, d) for h, d in ((1, 20), (1, 20), (2, 12)))
    for grad in grads:
        grad[-1] = 0
    return tables, channels, x, fetched, weight, home, grads


def run_conv(backend: str, dtype, case):
    tables, channels, *tensors, grads = case
    x, fetched, weight, home = (t.to(dtype) for t in tensors)
    with poisoned_memory():
        out = qkv(x, lambda: fetched, weight, tables, channels, backend)
        part = qkv_backward(x, fetched, weight, tuple(g.to(dtype) for g in grads), tables, channels, backend)
        dx = rows_backward(part, lambda: home, x, weight, tables, backend)
    return [*out, part.fetched, part.weight, dx]


@pytest.mark.parametrize("width", [2, 3, 4])
def test_convolution_with_rows_of_other_ranks(width):
    case = conv_case(width)
    errors = relative_errors(run_conv("triton", torch.float32, case), run_conv("reference", torch.float64, case))
    assert max(errors) <= BOUND, errors


def test_a_lost_reader_shows():
    case = conv_case()
    readers = case[0].readers
    readers.row_ptr[1:] -= 1
    errors = relative_errors(run_conv("triton", torch.float32, case), run_conv("reference", torch.float64, case))
    assert errors[-1] > 1e-3, errors


@pytest.mark.parametrize("heads", [GdnHeads(1, 2, 64, 64), GdnHeads(2, 2, 16, 16)], ids=["states", "rows"])
def test_backward_holds_what_the_memory_model_counts(heads, monkeypatch):
    """Of full chunks, in float32."""
    single_configurations()
    monkeypatch.setattr(conv_triton, "SPLITS", 1)  # partial sums of the convolution's weight are nothing to many tokens
    exact = walks.solve_backward

    def without_states(*arguments):
        gc.collect()  # the interpreter's own objects hold on to the arguments of its last kernel
        return exact(*arguments)

    monkeypatch.setattr(walks, "solve_backward", without_states)
    tokens = 256
    forest = forest_of_segments([(-1, tokens)])
    tables = gdn_tables(gdn_plan(forest, layout_from_cuts([0, tokens], [0], 1), 0, "affine", 4), 0)
    case = layer_case(tokens, 11, heads)
    leaves = [x.float().requires_grad_() for x in (case.mixed, case.weight, case.g, case.beta)]
    dout = case.dout.float()
    tables.make_for_triton()
    with LiveBytes([*leaves, dout]) as live:
        o = start_gated_delta_rule(*leaves, tables, None, heads, "triton")()
        gc.collect()
        kept, live.peak = live.now, 0
        o.backward(dout)
    sizes = ModelShape(
        hidden=1, mlp_width=1, attention_layers=1, query_heads=1, kv_heads=1, head_dim=1, gdn_layers=1,
        gdn_key_heads=heads.key_heads, gdn_value_heads=heads.value_heads, element_bytes=4,
    )  # fmt: skip
    model = ModelSizes("one", sizes, 1, 1, gdn_key_dim=heads.key_dim, gdn_value_dim=heads.value_dim)
    assert recurrence_bytes(model) == pytest.approx((live.peak - kept) / tokens, rel=0.1)
