"""How rows travel: the peer transport over a stand-in for symmetric memory, its protocol, and the choice of one."""

import logging
import time
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_engine.layers.attention import attention_tables, moved_bytes, tree_attention
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.exchange import peer, transport
from cp_engine.sharding.exchange.gather import head_groups
from cp_engine.sharding.exchange.transport import Part, transport_for
from cp_engine.sharding.row_exchange import Moves
from tests.kernels.attention_oracle import dense_attention, poisoned_memory, random_tensors, visible
from tests.layers.shared_memory import PoisoningTransport, SharedMemory, use_stand_in
from tests.layers.test_attention import EXCHANGES, NAMES, Case, case_layout, case_rows, possible, rank_errors
from tests.ranks import run_ranks

SLOW_S = 2e-3


def rank_peer_errors(cases: list[Case], delay_s: float) -> list[dict[str, float]]:
    use_stand_in(dist.group.WORLD, delay_s=delay_s)
    with mock.patch.object(peer, "SMALLEST_SLOT", 1 << 10):  # so that it grows
        return rank_errors(cases)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_peer_reads_equal_dense_attention(world):
    cases = [
        Case(exchange, seed, heads, layout, groups=groups, transport="peer")
        for exchange in EXCHANGES
        for heads in (((8, 2), (12, 12)) if exchange == "ulysses" else ((8, 2),))
        for groups in ((1, heads[1]) if exchange == "gather" else (None,))
        for layout in ("random", "one")
        for seed in (0, 4)
    ]
    cases += [Case("ulysses_gather:2", seed, (8, 4), groups=2, transport="peer") for seed in (0, 1, 4)]
    cases = [case for case in cases if possible(case, world)]
    assert {case.exchange for case in cases} >= set(EXCHANGES)
    for by_case in run_ranks(world, rank_peer_errors, cases, 0.0):
        for case, errors in zip(cases, by_case, strict=True):
            assert max(errors.values()) < 1e-13, (case, errors)


def rank_chain_error(
    case: Case, kind=PoisoningTransport, delay_s: float = SLOW_S, layers: int = 3, steps: int = 2
) -> float:
    """Several layers forward, then backward, twice: largest error of any tensor. NaN counts as infinite."""
    rank, world = dist.get_rank(), dist.get_world_size()
    use_stand_in(dist.group.WORLD, kind, delay_s)
    forest = case_rows(case).forest
    layout = case_layout(case, forest, world)
    plan = attention_plan(forest, layout, rank, case.exchange)
    tables = attention_tables(plan, rank, transport="peer", head_groups=case.groups)
    tokens, mask, worst = torch.as_tensor(layout.rank_tokens(rank)), visible(forest), 0.0
    with poisoned_memory():
        for step in range(steps):
            inputs = [random_tensors(forest.tokens, case.heads, 8, 10 * step + layer) for layer in range(layers)]
            local = [[part[tokens].requires_grad_() for part in (x.q, x.k, x.v)] for x in inputs]
            if not len(tokens):
                local = [[part.new_zeros((1, *part.shape[1:])).requires_grad_() for part in one] for one in local]
            outs = [tree_attention(*one, tables, dist.group.WORLD, inputs[0].scale) for one in local]
            douts = [x.dout[tokens] if len(tokens) else x.dout.new_zeros(1, *x.dout.shape[1:]) for x in inputs]
            torch.autograd.backward(outs, douts)
            for x, one, out in zip(inputs, local, outs, strict=True):
                truth = dense_attention(mask, x)
                for name, got in zip(NAMES, (out.detach(), *(part.grad for part in one)), strict=True):
                    error = (got[: len(tokens)] - truth[name][tokens]).abs().nan_to_num(nan=torch.inf)
                    worst = max(worst, float(error.max()) if len(tokens) else 0.0)
    dist.barrier()
    return worst


CHAINS = [
    Case("gather", 4, (8, 4), "contiguous", groups=4),
    Case("gather", 4, (8, 4), groups=1),
    Case("ring", 4, (8, 4), "contiguous"),
    Case("ulysses", 4, (12, 12)),
    Case("ulysses_gather:2", 4, (8, 2), "contiguous", groups=1),
]


@pytest.mark.parametrize("case", CHAINS, ids=lambda case: f"{case.exchange}-{case.groups}")
def test_slots_are_reused_safely_by_slow_peers(case):
    assert max(run_ranks(3 if case.exchange in EXCHANGES else 4, rank_chain_error, case)) < 1e-12


class OneSlot(PoisoningTransport):
    """Planted fault: every shipment gets the same slot."""

    def open(self, parts, dtype, device):
        self._opened = 0
        return super().open(parts, dtype, device)


def rank_without_barriers(case: Case) -> float:
    with mock.patch.object(SharedMemory, "barrier", lambda *arguments: None):
        return rank_chain_error(case)


def rank_left_alone(timeout_s: float) -> float:
    """Seconds until a barrier fails to which rank 1 does not come; 0 on that rank."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    made, device = use_stand_in(group), torch.device("cpu")
    part = Part(Moves(dist.get_rank(), 1 - np.eye(2, dtype=np.int64)), (1,))
    shipment = made.open([part], torch.float32, device)
    if dist.get_rank():
        time.sleep(timeout_s + 1)
        return 0.0
    began = time.monotonic()
    with pytest.raises(AssertionError, match="a rank did not come to the barrier"):
        shipment.publish()
    return time.monotonic() - began


def test_barriers_give_up_when_collectives_of_the_group_do():
    waited, _ = run_ranks(2, rank_left_alone, 1.5)
    assert 1.5 <= waited < 4


def rank_without_waiting(case: Case) -> float:
    with mock.patch.object(transport.Arrival, "wait", lambda self: self._received):
        return rank_chain_error(case)


@pytest.mark.parametrize("case", CHAINS[:3], ids=lambda case: f"{case.exchange}-{case.groups}")
def test_faults_of_the_protocol_show(case):
    assert max(run_ranks(3, rank_chain_error, case, OneSlot)) > 1e-3
    assert max(run_ranks(3, rank_without_barriers, case)) > 1e-3
    assert max(run_ranks(3, rank_without_waiting, case)) > 1e-3


def rank_slot_bytes(cases: list[Case]) -> list[int]:
    made = use_stand_in(dist.group.WORLD)
    sizes = []
    with mock.patch.object(peer, "SMALLEST_SLOT", 1 << 10):
        for case in cases:
            rank_errors([case])
            sizes.append(made._slot_bytes)
    return sizes


def test_slots_grow_together_and_only_when_needed():
    cases = [Case("gather", seed, (8, 2), transport="peer") for seed in (0, 4, 0, 4, 2)]
    first, *others = run_ranks(3, rank_slot_bytes, cases)
    assert all(sizes == first for sizes in others)
    assert first == sorted(first) and first[1] == first[2] == first[3] > first[0] >= 1 << 10
    assert all(size & (size - 1) == 0 for size in first)


def test_moves_agree_between_ranks():
    counts = np.array([[0, 3, 1], [2, 0, 0], [4, 5, 0]])
    ranks = [Moves(rank, counts) for rank in range(3)]
    assert [moves.rows_in for moves in ranks] == [4, 2, 9] and [moves.rows_out for moves in ranks] == [6, 8, 1]
    assert {moves.most_out for moves in ranks} == {8} and ranks[2].back.rows_in == 1
    packed = [[(rank, to) for to in range(3) for _ in range(counts[to, rank])] for rank in range(3)]
    for moves in ranks:
        received = [None] * moves.rows_in
        for sender, there, here, rows in moves.blocks:
            received[here : here + rows] = packed[sender][there : there + rows]
        assert received == [(sender, moves.rank) for sender in range(3) for _ in range(counts[moves.rank, sender])]
    steps = [ranks[0].at_distance(step).counts for step in range(3)]
    assert (sum(steps) == counts).all() and steps[1].tolist() == [[0, 0, 1], [2, 0, 0], [0, 5, 0]]


def rank_choice() -> tuple[str, list[str], str]:
    """The transport that `auto` finds, what it logs in two calls, and why `peer` is refused."""
    group, device = dist.new_group(), torch.device("cpu")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger(transport.__name__)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        chosen = transport_for(group, device)
        assert transport_for(group, device) is chosen is transport_for(group, device, "collective")
        with pytest.raises(ValueError) as refused:
            transport_for(group, device, "peer")
    finally:
        log.removeHandler(handler)
    return chosen.name, lines, str(refused.value)


def test_the_choice_is_made_and_logged_once():
    (name, lines, refused), (other, silent, _) = run_ranks(2, rank_choice)
    assert name == other == "collective" and silent == []
    assert lines == ["exchanges use transport collective: peer needs GPUs; the tensors are on cpu"]
    assert refused == "transport peer needs GPUs; the tensors are on cpu. Use transport collective or auto"


@pytest.mark.parametrize(
    ("ranks", "apart", "reason"),
    [
        ([("a", 0, None), ("a", 1, None)], (), None),
        ([("a", 0, None), ("b", 1, None)], (), "needs all ranks on one host; they are on 2: a, b"),
        ([("a", 0, None), ("a", 1, "needs luck")], (), "needs luck"),
        (
            [("a", 0, None), ("a", 0, None)],
            (),
            "needs a visible GPU of its own for each rank; the ranks use the devices",
        ),
        ([("a", 0, None), ("a", 1, None)], (1, 0), "needs GPUs that read each other's memory; devices (1, 0) do not"),
        ([("a", 0, None)], (), "needs more than one rank"),
    ],
)
def test_what_peer_reads_need(ranks, apart, reason):
    def gather(found, mine, group):
        found[:] = ranks

    with (
        mock.patch.object(dist, "get_world_size", lambda group: len(ranks)),
        mock.patch.object(dist, "all_gather_object", gather),
        mock.patch.object(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != apart),
    ):
        got = transport._why_not_peer(None, torch.device("cuda", 0))
    assert got is None if reason is None else got.startswith(reason)


def rank_unknown() -> str:
    with pytest.raises(ValueError) as refused:
        transport_for(dist.group.WORLD, torch.device("cpu"), "nvlink")
    return str(refused.value)


def test_an_unknown_transport_is_refused():
    assert run_ranks(2, rank_unknown) == ["transport must be one of auto, peer, collective; got 'nvlink'"] * 2


def gather_tables(rank: int, world: int, groups=None, seed: int = 4):
    forest = case_rows(Case("gather", seed)).forest
    plan = attention_plan(forest, case_layout(Case("gather", seed), forest, world), rank, "gather")
    return attention_tables(plan, rank, head_groups=groups).exchange


def test_head_groups_are_equal_on_all_ranks_and_pay_for_themselves():
    many = {head_groups(gather_tables(rank, 3), 32, 8, 128, torch.bfloat16) for rank in range(3)}
    assert many == {1}, "some hundred rows"
    big = Moves(0, np.array([[0, 200_000], [150_000, 0]]))
    for heads, wanted in (((8, 8), 4), ((6, 6), 3), ((32, 1), 1), ((7, 7), 1)):
        tables = mock.Mock(groups=None, moves=big, most_pairs=10**7)
        assert head_groups(tables, *heads, 128, torch.bfloat16) == wanted, heads
    with pytest.raises(ValueError, match="exchange gather can use 1 to 2 groups of 2 kv heads; got 3"):
        head_groups(gather_tables(0, 2, groups=3), 8, 2, 8, torch.float64)


def counted_bytes(case: Case, dtype: torch.dtype) -> list[int]:
    """Bytes that a rank's collectives carry to and from others: forward out, in, backward out, in."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), []
    original = dist.all_to_all_single

    def counting(received, sent, recv_counts, send_counts, **keywords):
        row = received[0].nbytes if len(received) else sent[0].nbytes if len(sent) else 0
        found[-1][0] += (sum(send_counts) - send_counts[rank]) * row
        found[-1][1] += (sum(recv_counts) - recv_counts[rank]) * row
        return original(received, sent, recv_counts, send_counts, **keywords)

    forest = case_rows(case).forest
    layout = case_layout(case, forest, world)
    plan = attention_plan(forest, layout, rank, case.exchange)
    rows = int(layout.rank_rows[rank])
    q, k, v, dout = (torch.randn(rows, heads, 16, dtype=dtype) for heads in (*case.heads, case.heads[1], case.heads[0]))
    with mock.patch.object(dist, "all_to_all_single", counting):
        found.append([0, 0])
        tables = attention_tables(plan, rank, head_groups=case.groups)
        out = tree_attention(*(x.requires_grad_() for x in (q, k, v)), tables, dist.group.WORLD, 1.0)
        found.append([0, 0])
        out.backward(dout)
    told = moved_bytes(plan, rank, *case.heads, 16, dtype)
    assert found[0] + found[1] == [told.forward_out, told.forward_in, told.backward_out, told.backward_in], case
    return found[0] + found[1]


@pytest.mark.parametrize("heads", [(8, 4), (8, 2)])
def test_moved_bytes_are_those_that_move(heads):
    for exchange in (*EXCHANGES, "ulysses_gather:2"):
        for dtype in (torch.float64, torch.bfloat16):
            ranks = run_ranks(
                4, counted_bytes, Case(exchange, 4, heads, groups=2 if exchange == "gather" else None), dtype
            )
            totals = np.sum(ranks, 0)
            assert totals[0] == totals[1] > 0 and totals[2] == totals[3] > 0


def rank_part_after_part() -> bool:
    """Parts of different shapes and directions in one shipment, some without rows."""
    rank = dist.get_rank()
    made = use_stand_in(dist.group.WORLD)
    counts = np.array([[0, 3, 1], [2, 0, 0], [4, 5, 0]])
    parts = [Part(Moves(rank, counts), (2, 3)), Part(Moves(rank, counts.T), (5,)), Part(Moves(rank, 0 * counts), (1,))]
    right = True
    for dtype in (torch.float64, torch.bfloat16):
        shipment = made.open(parts, dtype, torch.device("cpu"))
        for index, part in enumerate(parts):
            label = torch.arange(3).repeat_interleave(torch.tensor(part.moves.send_counts)) + 10 * rank + 100 * index
            packed = shipment.outgoing(index)
            packed.copy_(label.view(-1, *[1] * len(part.row_shape)).expand(packed.shape))
        shipment.publish()
        for index, part in enumerate(parts):
            got = shipment.start(index).wait()
            label = 10 * torch.arange(3).repeat_interleave(torch.tensor(part.moves.recv_counts)) + rank + 100 * index
            right &= bool((got == label.view(-1, *[1] * len(part.row_shape))).all()) and got.dtype == dtype
    return right


def test_parts_of_a_shipment_do_not_touch_each_other():
    assert all(run_ranks(3, rank_part_after_part))
