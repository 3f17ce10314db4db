"""Checkpoints that are written while training goes on."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.multiprocessing.spawn import ProcessExitedException

from cp_engine import checkpoint
from cp_engine.checkpoint import Checkpoints
from cp_engine.distributed.ranks import Ranks
from cp_engine.engine import Engine
from tests.distributed.engine_cases import sample, this_rank, tiny_config, weights_of
from tests.distributed.test_weights import ADAM, mesh
from tests.distributed.two_steps import largest_error
from tests.ranks import run_ranks

BFLOAT16 = {"model": {"path": "tiny-qwen3", "vocab_size": 36}, "dtype": "bfloat16"}


@contextlib.contextmanager
def writer(wrapped):
    """``wrapped(write, tensors, folder, ranks, group)`` in place of the writing of tensors."""
    write = checkpoint.save_tensors
    checkpoint.save_tensors = lambda *given: wrapped(write, *given)
    try:
        yield
    finally:
        checkpoint.save_tensors = write


def engine_on(sections: dict, ranks: Ranks | None = None) -> Engine:
    return Engine(tiny_config(ADAM | sections), ranks or this_rank())


def saved_while_training(sections: dict, place, copies: bool = True, ranks: Ranks | None = None):
    """One checkpoint written at once, one while the weights change; without copies, one that sees them change."""
    engine, go_on = engine_on(sections, ranks), threading.Event()
    engine.train_step(sample())
    Checkpoints(place / "at_once", 1).save(engine)
    if not copies:
        state = engine.distributed.checkpoint_state
        engine.distributed.checkpoint_state = lambda copies: state(copies=False)

    def late(write, *given):
        assert go_on.wait(60)
        write(*given)

    checkpoints = Checkpoints(place / "beside", 1, asynchronous=True)
    before = weights_of(engine)
    with writer(late):
        checkpoints.save(engine)
        engine.train_step(sample())
        assert checkpoints.complete() == []
        go_on.set()
        checkpoints.wait()
    assert [path.name for path in checkpoints.complete()] == ["step-00000001"]
    return largest_error(weights_of(engine), before)


def tensors_of(place) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(Checkpoints(place, 1).complete()[0] / "state", place / "all.pt")
    return torch.load(place / "all.pt")


def changed(place) -> list[str]:
    """Names of the tensors that differ between the two checkpoints."""
    truth, found = tensors_of(place / "at_once"), tensors_of(place / "beside")
    assert truth.keys() == found.keys() and len(truth) > 100
    return [name for name in truth if not torch.equal(truth[name], found[name])]


@pytest.mark.parametrize(
    ("world", "sections"),
    [
        (1, mesh(1, 1)),
        (2, mesh(2, 1)),
        (2, mesh(1, 2, name="fsdp2")),
        (2, mesh(2, 1, name="fsdp2", offload="cpu")),
        (2, mesh(2, 1, name="fsdp2") | BFLOAT16),
    ],
    ids=str,
)
def test_steps_while_it_is_written_do_not_change_it(world, sections, tmp_path):
    assert min(run_ranks(world, saved_while_training, sections, tmp_path)) > 1e-5
    assert changed(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steps_on_a_gpu_do_not_change_it(engine, tmp_path):
    ranks = Ranks(0, 1, None, torch.device("cuda", 0))
    assert saved_while_training(mesh(1, 1, name=engine) | BFLOAT16, tmp_path, ranks=ranks) > 1e-5
    assert changed(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_goes_on_from_a_checkpoint(engine, tmp_path):
    ranks, sections = Ranks(0, 1, None, torch.device("cuda", 0)), mesh(1, 1, name=engine) | {"dtype": "float32"}
    straight, resumed = engine_on(sections, ranks), engine_on(sections, ranks)
    straight.train_step(sample())
    straight.train_step(sample())
    Checkpoints(tmp_path, 1).save(straight)
    assert Checkpoints(tmp_path, 1).resume(resumed)
    optimizer = resumed.distributed.optimizer
    assert optimizer.defaults["fused"]
    assert all(state["step"].is_cuda and float(state["step"]) == 2 for state in optimizer.state.values())
    before = weights_of(straight)
    for each in (straight, resumed):
        each.train_step(sample())
    assert largest_error(weights_of(resumed), weights_of(straight)) <= 1e-6
    assert largest_error(weights_of(resumed), before) > 1e-4


@pytest.mark.parametrize("engine", ["plain", "fsdp2"])
def test_without_copies_it_would_change(engine, tmp_path):
    run_ranks(2, saved_while_training, mesh(2, 1, name=engine), tmp_path, False)
    assert len(changed(tmp_path)) > 100


def whole_tensors_on_one_rank() -> list[str]:
    engine = engine_on(mesh(1, 2))
    return list(engine.distributed.checkpoint_state(copies=True))


def test_ranks_share_the_copies_of_what_each_holds_whole():
    first, second = run_ranks(2, whole_tensors_on_one_rank)
    assert abs(len(first) - len(second)) <= 1 and not set(first) & set(second)


def goes_on(sections: dict, place):
    engine = engine_on(sections)
    assert Checkpoints(place, 1, asynchronous=True).resume(engine)
    return engine.train_step(sample())["loss"], engine.steps_done


def test_training_goes_on_from_it_on_another_mesh_with_another_engine(tmp_path):
    run_ranks(2, saved_while_training, mesh(2, 1, name="fsdp2"), tmp_path)
    truth = run_ranks(2, goes_on, mesh(2, 1, name="fsdp2"), tmp_path / "at_once")[0]
    for sections in (mesh(1, 2), mesh(1, 2, name="fsdp2")):
        loss, steps = run_ranks(2, goes_on, sections, tmp_path / "beside")[0]
        assert loss == pytest.approx(truth[0], rel=1e-4) and steps == 2


def test_one_is_written_at_a_time(tmp_path):
    engine, spans = engine_on(mesh(1, 1)), []

    def slow(write, *given):
        began = time.perf_counter()
        time.sleep(0.2)
        write(*given)
        spans.append((began, time.perf_counter()))

    checkpoints = Checkpoints(tmp_path, 3, asynchronous=True)
    with writer(slow):
        for steps in (1, 2, 3):
            engine.steps_done = steps
            began = time.perf_counter()
            checkpoints.save(engine)
            assert steps > 1 or time.perf_counter() - began < 0.2
        assert len(spans) == 2 and len(checkpoints.complete()) == 2
        checkpoints.wait()
    assert all(end <= start for (_, end), (start, _) in zip(spans[:-1], spans[1:], strict=True))
    assert [path.name for path in checkpoints.complete()] == [f"step-{steps:08d}" for steps in (1, 2, 3)]


def no_space(*_, **options):
    raise OSError("no space left")


def failing(place, owner, name: str, asked: str):
    """What is raised after a method failed on one rank in a write beside training, and what is left."""
    ranks, told = this_rank(), ""
    engine, checkpoints = engine_on(mesh(2, 1)), Checkpoints(place, 2, asynchronous=True)
    checkpoints.save(engine)
    checkpoints.wait()
    engine.steps_done, method = 1, getattr(owner, name)
    if ranks.rank == (0 if owner is Path else 1):
        setattr(owner, name, no_space)
    try:
        checkpoints.save(engine)
        checkpoints.save(engine) if asked == "save" else checkpoints.wait()
    except OSError as error:
        told = str(error)
    finally:
        setattr(owner, name, method)
    return told, [path.name for path in checkpoints.complete()]


@pytest.mark.parametrize("asked", ["save", "wait"])
@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (FileSystemWriter, "write_data", "cannot write the checkpoint of step 1: rank 1: OSError: no space left"),
        (Path, "write_text", "no space left"),
        (Path, "mkdir", "no space left"),
    ],
)
def test_a_failed_write_is_told_on_every_rank(owner, name, message, asked, tmp_path):
    for told, left in run_ranks(2, failing, tmp_path, owner, name, asked):
        assert told == message
        assert left == ["step-00000000"]


def dies_while_writing(_, place):
    engine, checkpoints = engine_on(mesh(1, 1)), Checkpoints(place, 2, asynchronous=True)
    for steps in (1, 2):
        engine.steps_done = steps
        if steps == 1:
            checkpoints.save(engine)
            checkpoints.wait()
            continue

        def half(write, tensors, folder, *given):
            write(dict(list(tensors.items())[:20]), folder, *given)
            os._exit(9)

        with writer(half):
            checkpoints.save(engine)
            engine.train_step(sample())
            checkpoints.wait()


def test_a_crash_in_the_middle_leaves_the_checkpoint_before_it(tmp_path):
    with pytest.raises(ProcessExitedException, match="exit code 9"):
        torch.multiprocessing.spawn(dies_while_writing, (tmp_path,))
    assert (tmp_path / ".step-00000002.partial" / "state" / ".metadata").is_file()
    engine, checkpoints = engine_on(mesh(1, 1)), Checkpoints(tmp_path, 2, asynchronous=True)
    assert checkpoints.resume(engine) and engine.steps_done == 1
    engine.steps_done = 2
    checkpoints.save(engine)
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def read_damaged(place) -> str:
    engine, checkpoints = engine_on(mesh(1, 2)), Checkpoints(place, 1)
    checkpoints.save(engine)
    if this_rank().is_first:
        next((checkpoints.complete()[0] / "state").glob("__1_*.distcp")).unlink()
    with pytest.raises(ValueError, match="cannot read the checkpoint") as error:
        checkpoints.resume(engine)
    return str(error.value)


def test_a_damaged_checkpoint_is_told_on_every_rank(tmp_path):
    for told in run_ranks(2, read_damaged, tmp_path):
        assert "step-00000000: rank 0: FileNotFoundError: " in told and "__1_0.distcp'" in told
        assert told.endswith("remove it to go on from the one before it, or set checkpoint.resume: never")


@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_that_starts_anew_replaces_checkpoints_of_later_steps(keep, tmp_path):
    engine = engine_on(mesh(1, 1))
    for steps in (3, 90, 100, 5):
        engine.steps_done = steps
        Checkpoints(tmp_path, 3 if steps > 5 else keep).save(engine)
    assert [path.name for path in Checkpoints(tmp_path, keep).complete()] == ["step-00000003", "step-00000005"][-keep:]


def test_what_another_run_was_writing_is_removed(tmp_path):
    (tmp_path / ".step-00000007.partial" / "state").mkdir(parents=True)
    Checkpoints(tmp_path, 1).save(engine_on(mesh(1, 1)))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
