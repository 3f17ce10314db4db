"""The metric of exposed exchange time: a slow transport shows, and what runs beside the computation does not."""

import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_engine.config import Config
from cp_engine.engine import Engine
from cp_engine.sharding.exchange import in_flight, peer, transport, waits
from cp_engine.sharding.exchange.in_flight import InFlight
from cp_engine.sharding.exchange.waits import ExchangeWaits, waiting
from tests.distributed.engine_cases import sample, this_rank
from tests.ranks import run_ranks

DELAY_S = 0.02


class SlowWork:
    """What an asynchronous collective returns; it arrives late."""

    def __init__(self, work):
        self.work = work

    def wait(self):
        time.sleep(DELAY_S)
        return self.work.wait()


@contextmanager
def slow_exchanges():
    """All rows of exchanges arrive late; yields a list that grows by one each time."""
    move, calls = dist.all_to_all_single, []

    def slow(*given, async_op=False, **keywords):
        calls.append(1)
        if async_op:
            return SlowWork(move(*given, async_op=True, **keywords))
        time.sleep(DELAY_S)
        return move(*given, **keywords)

    with mock.patch.object(dist, "all_to_all_single", slow):
        yield calls


def steps(sections: dict):
    """Exposed and whole seconds of a step as it is, and with late rows; and how many exchanges this rank waited for."""
    raw = {"model": {"path": "tiny-qwen3.5", "vocab_size": 36}, "loss": {"name": "sft"}}
    engine = Engine(Config.model_validate(raw | sections), this_rank())
    engine.train_step(sample())
    prompt = engine.train_step(sample())
    with slow_exchanges() as calls:
        late = engine.train_step(sample())
    return [(m["exchange_wait_ms"] / 1e3, m["seconds"]) for m in (prompt, late)], len(calls)


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"cp": 2, "exchange": "gather"}),
        (3, {"cp": 3, "exchange": "ring"}),
        (2, {"cp": 2, "exchange": "ulysses", "gdn_exchange": "ulysses"}),
        (3, {"cp": 3, "exchange": "gather", "gdn_layout": "own"}),
    ],
    ids=["gather", "ring", "ulysses", "gdn-layout"],
)
def test_late_rows_are_seen_whatever_the_exchange(world, parallel):
    sections = {"parallel": parallel, "memory": {"recompute": "layers"}}
    found = run_ranks(world, steps, sections)
    (prompt, _), (late, seconds) = found[0][0]
    calls = max(calls for _, calls in found)
    assert calls > 5 and found[0][0] == found[1][0]
    # Each rank sleeps for all of its exchanges; a rank may have waited for the others on top of it.
    assert calls * DELAY_S <= late < seconds
    assert prompt < late - 0.5 * calls * DELAY_S


def steps_with_uncounted_arrivals(sections: dict):
    def uncounted(arrival):
        arrival._wait()
        return arrival._received

    with mock.patch.object(transport.Arrival, "wait", uncounted):
        return steps(sections)


def test_a_wait_that_is_not_counted_is_missed():
    """Planted; the model has no other exchange than attention's and the two moves of the head."""
    sections = {"parallel": {"cp": 2, "exchange": "gather"}, "model": {"path": "tiny-qwen3", "vocab_size": 36}}
    for (_, (late, _)), calls in run_ranks(2, steps_with_uncounted_arrivals, sections):
        assert calls > 5 and 2 * DELAY_S <= late < 0.5 * calls * DELAY_S


def test_one_rank_waits_for_nobody():
    sections = {"parallel": {"cp": 1}, "model": {"path": "tiny-qwen3", "vocab_size": 36}}
    assert [waited for waited, _ in steps(sections)[0]] == [0.0, 0.0]


def test_ranks_that_publish_wait_for_one_another():
    class Memory:
        def barrier(self, channel, timeout_ms):
            time.sleep(DELAY_S)

    shipment = peer.PeerShipment(0, Memory(), None, 1000, [], [], torch.float32, torch.device("cpu"))
    collected = ExchangeWaits()
    shipment.publish()
    assert DELAY_S <= collected.seconds() < 10 * DELAY_S


class Stream:
    """A compute stream that has come to a point in time, in ms."""

    now = 0.0
    done = False  # the device was waited for


class Event:
    made = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing
        Event.made += 1

    def record(self, stream: Stream):
        self.stream, self.at = stream, stream.now

    def elapsed_time(self, end) -> float:
        assert self.stream.done, "the host would wait"
        return end.at - self.at


def test_on_a_gpu_events_around_waits_are_read_at_the_end(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(waits, "_FREE", [])
    device = torch.device("cuda", 0)
    for _ in range(2):
        collected, stream.done = ExchangeWaits(), False
        for ms in (3.0, 4.5):
            stream.now += 100  # computation
            with waiting(device):
                stream.now += ms
        with in_flight.aside(), waiting(device):
            stream.now += 50
        stream.done = True
        assert collected.seconds() == pytest.approx(7.5e-3)
        with waiting(device):  # nobody collects
            stream.now += 1
        assert collected.seconds() == pytest.approx(7.5e-3)
    assert Event.made == 4


def test_on_a_cpu_work_in_flight_counts():
    """It is done at once, so what it waits for keeps the computation waiting."""

    def work():
        with waiting(torch.device("cpu")):
            time.sleep(DELAY_S)
        return torch.zeros(1)

    collected = ExchangeWaits()
    InFlight(work, torch.zeros(1)).wait()
    assert collected.seconds() >= DELAY_S


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_only_what_is_not_hidden_counts():
    """50 ms of cycles on the side stream, next to none and to 100 ms of computation; no call waits for the device."""
    device, ms = torch.device("cuda", torch.cuda.current_device()), 2_000_000  # cycles of a clock of about 2 GHz
    x = torch.zeros(1, device=device)
    InFlight(lambda: x + 1, x).wait()
    torch.cuda.synchronize(device)
    exposed = []
    for computing in (0, 100):
        collected = ExchangeWaits()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(ms)  # an exchange starts from where the computation is
            moved = InFlight(lambda: (torch.cuda._sleep(50 * ms), x + 1)[1], x)
            torch.cuda._sleep(max(1, computing * ms))
            moved.wait()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize(device)
        exposed.append(collected.seconds())
    assert 20e-3 < exposed[0] < 200e-3 and exposed[1] < 2e-3
