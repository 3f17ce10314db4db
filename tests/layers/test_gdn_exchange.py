"""The exchanges of a GDN layer: history rows and states by peer reads, and what runs while they are on their way.

Shapes: n local rows, C hidden size.
"""

import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from benchmarks.gdn_ranks import layer_module
from cp_engine.layers import gdn_crossing, gdn_mixer
from cp_engine.layers.attention import attention_tables, tree_attention
from cp_engine.layers.gdn import start_gated_delta_rule
from cp_engine.layers.gdn_tables import GdnHeads, gdn_tables
from cp_engine.pack import PACK_KEYWORD
from cp_engine.sharding import gdn_plan as planning
from cp_engine.sharding.attention_plan import attention_plan
from cp_engine.sharding.exchange import in_flight, peer
from cp_engine.sharding.exchange.in_flight import InFlight
from cp_engine.sharding.exchange.kept import Keeping, contexts
from cp_engine.sharding.gdn_plan import gdn_plan
from cp_engine.sharding.layout import contiguous_layout
from tests.gdn_oracle import layer_case, relative_errors
from tests.layers.shared_memory import PoisoningTransport, SharedMemory, use_stand_in
from tests.layers.test_gdn import HEADS, assemble, forest_named, layout_named, truth
from tests.ranks import run_ranks

SLOW_S = 2e-3
CASES = [(name, where) for name in ("random", "short", "chain", "star", "one token") for where in ("dealt", 5)]


def rank_results(cases, kind=PoisoningTransport, delay_s: float = 0.0, barriers: bool = True, layers: int = 2):
    """Rows and gradients of a layer, the last of several with attention between them, all forward before backward."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    use_stand_in(group, kind, delay_s)
    results = []
    with (
        mock.patch.object(peer, "SMALLEST_SLOT", 1 << 10),  # so that it grows
        mock.patch.object(SharedMemory, "barrier", SharedMemory.barrier if barriers else lambda *_: None),
    ):
        for forest_name, where in cases:
            forest = forest_named(forest_name)
            layout = layout_named(forest, where, world)
            case = layer_case(forest.tokens, 11, HEADS)
            tables = gdn_tables(gdn_plan(forest, layout, rank, "affine", 4), rank, transport="peer")
            attention = attention_tables(attention_plan(forest, layout, rank, "gather"), rank, transport="peer")
            tokens = torch.as_tensor(layout.rank_tokens(rank))

            def local(x, tokens=tokens):
                return x[tokens] if len(tokens) else torch.full_like(x[:1], 0.3)

            outs, leaves = [], []
            for _ in range(layers):
                leaves = [local(case.mixed), case.weight, local(case.g), local(case.beta)]
                leaves = [x.clone().requires_grad_() for x in leaves]
                outs.append(start_gated_delta_rule(*leaves, tables, group, HEADS)())
                rows = outs[-1].detach()[:, :2].contiguous().requires_grad_()
                outs.append(tree_attention(rows, rows, rows, attention, group, 1.0))
            douts = [local(case.dout) if index % 2 == 0 else out for index, out in enumerate(outs)]
            torch.autograd.backward(outs, douts)
            results.append([x.detach().numpy() for x in (tokens, outs[-2], *(leaf.grad for leaf in leaves))])
    dist.barrier()
    return results


def largest_errors(world: int, *arguments) -> list[float]:
    results = run_ranks(world, rank_results, CASES, *arguments)
    found = []
    for index, (name, _) in enumerate(CASES):
        actual = assemble([rank[index] for rank in results], forest_named(name).tokens)
        found.append(max(relative_errors(actual, truth(name, HEADS))))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_peer_reads_are_exact(world):
    assert max(largest_errors(world)) <= 1e-11


def test_slots_are_reused_safely_by_slow_peers():
    assert max(largest_errors(3, PoisoningTransport, SLOW_S)) <= 1e-11


class OneSlot(PoisoningTransport):
    """Planted fault: every shipment gets the same slot."""

    def open(self, parts, dtype, device):
        self._opened = 0
        return super().open(parts, dtype, device)


@pytest.mark.parametrize("fault", [(OneSlot, SLOW_S), (PoisoningTransport, SLOW_S, False)], ids=["slot", "barriers"])
def test_faults_of_the_protocol_show(fault):
    errors = largest_errors(3, *fault)
    assert not max(errors) <= 1e-3  # or not a number


def layer_and_rows(group=None):
    module = layer_module(GdnHeads(2, 4, 8, 8), 16, torch.device("cpu"), torch.float64)
    forest = forest_named("star")
    rank, world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    layout = contiguous_layout(forest, world)
    tables = gdn_tables(gdn_plan(forest, layout, rank, "affine", 4), rank)
    rows = torch.randn(1, forest.tokens, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = rows[:, torch.as_tensor(layout.rank_tokens(rank))]
    pack = SimpleNamespace(gdn=tables, group=group)
    return module, rows.requires_grad_(), {PACK_KEYWORD: pack}


def events(kinds: frozenset | None, most_rounds: int) -> list[str]:
    """What a layer starts and waits for on a rank, and when it computes its output gate, forward and backward."""
    with mock.patch.object(planning, "MOST_ROUNDS", most_rounds):
        module, rows, pack = layer_and_rows(dist.group.WORLD)
    assert len(pack[PACK_KEYWORD].gdn.rounds) == min(1, most_rounds)
    seen: list[str] = []

    class Recorded(InFlight):
        def __init__(self, work, *inputs):
            self.number = sum(event.startswith("start") for event in seen)
            seen.append(f"start {self.number}")
            super().__init__(work, *inputs)

        def wait(self):
            if seen[-1] != f"wait {self.number}":
                seen.append(f"wait {self.number}")
            return super().wait()

    module.in_proj_z.register_forward_hook(lambda *_: seen.append("gate"))
    module.in_proj_z.weight.register_hook(lambda _: seen.append("gate's gradient"))
    with mock.patch.object(gdn_mixer, "InFlight", Recorded), mock.patch.object(gdn_crossing, "InFlight", Recorded):
        if kinds is None:
            out = module(rows, **pack)
        else:
            keeping = Keeping(kinds)
            out = checkpoint(
                lambda x: module(x, **pack),
                rows,
                use_reentrant=False,
                context_fn=lambda: contexts(keeping, mock.MagicMock),
            )
        forward = len(seen)
        out.square().sum().backward()
    seen.insert(forward, "backward")
    return seen


HISTORY, STATES = ["start 0", "wait 0"], ["start 1", "gate", "wait 1"]
PULLED = ["start {0}", "gate's gradient", "wait {0}", "start {1}", "wait {1}"]
WAYS = pytest.mark.parametrize("most_rounds", [0, 2], ids=["maps", "handed on"])


@WAYS
def test_the_output_gate_is_computed_while_states_and_their_gradients_move(most_rounds):
    pulled = [event.format(2, 3) for event in PULLED]
    for seen in run_ranks(2, events, None, most_rounds):
        assert seen == [*HISTORY, *STATES, "backward", *pulled]


@WAYS
@pytest.mark.parametrize("kinds", [frozenset({"exchange"}), frozenset({"exchange", "mixer"})], ids=["rows", "mixers"])
def test_a_recomputed_layer_has_the_same_order(kinds, most_rounds):
    again = ["start 2", "wait 2", "start 3", "gate", "wait 3"] if "mixer" not in kinds else ["gate"]
    pulled = [event.format(*((2, 3) if "mixer" in kinds else (4, 5))) for event in PULLED]
    for seen in run_ranks(2, events, kinds, most_rounds):
        assert seen == [*HISTORY, *STATES, "backward", *again, *pulled]


def test_a_layer_with_two_graphs_alive_keeps_them_apart():
    module, rows, pack = layer_and_rows()
    alone = [torch.autograd.grad(module(x * rows, **pack).square().sum(), rows)[0] for x in (1.0, 2.0)]
    outs = [module(x * rows, **pack).square().sum() for x in (1.0, 2.0)]
    together = [torch.autograd.grad(out, rows, retain_graph=True)[0] for out in outs]
    again = [torch.autograd.grad(out, rows)[0] for out in reversed(outs)][::-1]
    for expected, *found in zip(alone, together, again, strict=True):
        assert all(torch.equal(expected, each) for each in found)


def test_the_convolution_goes_backward_without_what_the_recurrence_held(monkeypatch):
    module, rows, pack = layer_and_rows()
    exact, exact_convolution = gdn_crossing.gdn.backward, gdn_mixer.conv.qkv_backward
    held, left = [], []

    def gradients(inputs, stages, back, *rest):
        held.extend(weakref.ref(each) for each in tree_leaves((inputs, stages, back)))
        return exact(inputs, stages, back, *rest)

    def convolution(*arguments):
        left.extend(each() for each in held if each() is not None)
        return exact_convolution(*arguments)

    monkeypatch.setattr(gdn_crossing.gdn, "backward", gradients)
    monkeypatch.setattr(gdn_mixer.conv, "qkv_backward", convolution)
    module(rows, **pack).sum().backward()
    assert len(held) > 5 and not left


class OnGpu:
    """As much of a tensor on a GPU as `InFlight` looks at."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.streams = []

    def record_stream(self, stream):
        self.streams.append(stream)


def test_what_a_side_stream_reads_is_held_until_the_caller_has_waited(monkeypatch):
    waited, result, x = [], OnGpu(), OnGpu()
    held = weakref.ref(x)

    def submit(work):
        work()
        return lambda: waited.append(held() is not None)

    monkeypatch.setattr(in_flight, "side_stream", lambda _: SimpleNamespace(submit=submit, stream="side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "compute")
    flight = InFlight(lambda: result, x)
    assert not x.streams
    del x
    assert flight.wait() is result and waited == [True] and result.streams == ["compute"]
    assert held() is None
