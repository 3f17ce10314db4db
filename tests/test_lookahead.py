"""Plans made ahead on a thread: in order, once, and with their errors raised where they are asked for."""

import threading
import time

import pytest

from cp_engine.distributed.mesh import Mesh
from cp_engine.engine import Engine
from cp_engine.kernels.attention import reference
from cp_engine.lookahead import Lookahead
from cp_engine.pack import DevicePack
from tests.distributed.engine_cases import sample, this_rank, tiny_config

ALONE = Mesh(this_rank(), this_rank(), 1)


class _Pack:
    def __init__(self, name):
        self.name, self.tokens = name, 1


class _Step:
    def __init__(self, *names):
        self.packs = [_Pack(name) for name in names]


@pytest.fixture
def seen(monkeypatch):
    monkeypatch.setattr("cp_engine.lookahead.deal_packs", lambda packs, dp: [packs])
    return []


def lookahead(seen, prepare=None, plan=None) -> Lookahead:
    def default(step, pack):
        seen.append((pack.name, threading.current_thread().name.startswith("planner")))
        return pack.name, None

    return Lookahead(prepare or (lambda rollouts: _Step(*rollouts)), plan or default, ALONE)


def test_the_next_pack_is_planned_while_this_one_runs(seen):
    ahead = lookahead(seen)
    step = ahead.step("abc")
    for planned in ahead.planned(step):
        time.sleep(0.05)  # the pack runs
        expected = {"a": "ab", "b": "abc", "c": "abc"}[planned.pack.name]
        assert "".join(name for name, _ in seen) == expected
        assert planned.waited < 0.04 or planned.pack.name == "a"
    assert [on_thread for _, on_thread in seen] == [False, True, True]


def test_a_step_that_was_begun_is_not_prepared_again(seen):
    prepared = []
    ahead = lookahead(seen, lambda rollouts: prepared.append(rollouts) or _Step(*rollouts))
    first, second = list("ab"), list("cd")
    assert len(list(ahead.planned(ahead.step(first)))) == 2
    ahead.begin(second)
    assert [p.pack.name for p in ahead.planned(ahead.step(second))] == ["c", "d"]
    assert prepared == [first, second] and [name for name, _ in seen] == list("abcd")
    ahead.begin(first)
    assert [p.pack.name for p in ahead.planned(ahead.step(list("e")))] == ["e"]


@pytest.mark.parametrize("while_it_ran", [0.0, 1.0])
def test_what_a_step_waits_for_its_first_plan_is_told(seen, while_it_ran):
    """Preparing and planning take 0.2 s; a step that runs long enough hides them."""

    def prepare(rollouts):
        time.sleep(0.1)
        return _Step(*rollouts)

    def plan(step, pack):
        time.sleep(0.1)
        return pack.name, None

    ahead, rollouts = lookahead(seen, prepare, plan), ["a"]
    (alone,) = ahead.planned(ahead.step(["b"]))
    assert alone.waited >= 0.2
    ahead.begin(rollouts)
    time.sleep(while_it_ran)
    (planned,) = ahead.planned(ahead.step(rollouts))
    assert planned.waited < 0.1 if while_it_ran else planned.waited > 0.1


def test_errors_of_the_thread_surface(seen):
    def refuse(rollouts):
        raise ValueError(f"cannot use {rollouts}")

    ahead = lookahead(seen, refuse)
    ahead.begin("x")
    with pytest.raises(ValueError, match="cannot use x"):
        ahead.step("x")

    def broken(step, pack):
        if pack.name == "b":
            raise ValueError("no exchange keeps to the budget")
        return pack.name, None

    ahead = lookahead(seen, plan=broken)
    with pytest.raises(ValueError, match="no exchange keeps to the budget"):
        list(ahead.planned(ahead.step("abc")))


def test_lists_of_kernels_are_built_with_the_plan_and_only_there(monkeypatch):
    on_thread, build = [], reference.build_blocks

    def recorded(intervals):
        on_thread.append(threading.current_thread().name.startswith("planner"))
        return build(intervals)

    monkeypatch.setattr(reference, "build_blocks", recorded)
    engine = Engine(tiny_config({}), this_rank())
    figures = engine.train_step(sample())
    assert figures["packs"] > 1 and on_thread == [False] + [True] * (figures["packs"] - 1)


def test_a_packs_tables_are_made_with_its_plan_and_only_there(monkeypatch):
    on_thread, make = [], DevicePack.__init__

    def recorded(*arguments, **keywords):
        on_thread.append(threading.current_thread().name.startswith("planner"))
        make(*arguments, **keywords)

    monkeypatch.setattr(DevicePack, "__init__", recorded)
    engine = Engine(tiny_config({}), this_rank())
    figures = engine.train_step(sample(), upcoming := sample())
    engine.train_step(upcoming)
    packs = figures["packs"]
    assert packs > 1 and on_thread == [False] + [True] * (2 * packs - 1)


def test_upcoming_rollouts_change_nothing_but_when_plans_are_made():
    losses = []
    for ahead in (False, True):
        engine = Engine(tiny_config({"optimizer": {"lr": 1e-3}}), this_rank())
        batches = [sample()[:6], sample()[4:]]
        first = engine.train_step(batches[0], batches[1] if ahead else None)
        second = engine.train_step(batches[1])
        losses.append((first["loss"], second["loss"]))
    assert losses[0] == losses[1]
