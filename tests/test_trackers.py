"""Where metrics are written, and the line that the console shows."""

import importlib.util
import io
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from cp_engine.cli.step_line import step_line
from cp_engine.config import parse_config
from cp_engine.trackers import check_trackers, open_trackers

METRICS = {
    "step": 3, "loss": 0.25, "grad_norm": 1.5, "lr": 1e-5, "skipped": False, "entropy": 2.0, "kl_ref": 0.125,
    "clipped_high": 0.01, "clipped_low": 0.02, "tree_tokens": 704, "flat_tokens": 2866, "flat_tokens_per_s": 12345.6,
    "mfu": None, "mfu_flat": None, "peak_gib": None, "seconds": 0.5, "exchange": "gather",
}  # fmt: skip


def printed(metrics: dict, **console) -> str:
    out = io.StringIO()
    Console(file=out, width=40, **console).print(step_line(metrics), soft_wrap=True)
    return out.getvalue()


def test_a_step_is_one_line_with_colours_on_a_terminal_only():
    plain = printed(METRICS)
    assert plain == (
        "step 3: loss 0.2500, grad norm 1.500, lr 1e-05, KL 0.125, entropy 2.000, 3.0% clipped, 704 of 2,866 tokens "
        "computed, 12,346 tokens/s as flat, 0.50 s\n"
    )
    coloured = printed(METRICS, force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[" in coloured and coloured.count("\n") == 1
    on_gpu = printed(
        METRICS | {"mfu": 0.41, "mfu_flat": 1.62, "peak_gib": 70.04, "skipped": True, "grad_norm": math.nan}
    )
    assert "MFU 41.0% (162.0% as flat), 70.0 GiB, 0.50 s, skipped: a gradient is not finite" in on_gpu
    assert printed(METRICS | {"skipped": True, "grad_norm": 0.0}).endswith("s, skipped: all rollouts are overlong\n")


@pytest.mark.parametrize(
    ("asked", "package"), [({"tensorboard": True}, "tensorboard"), ({"wandb_project": "p"}, "wandb")]
)
def test_a_tracker_that_is_not_installed_is_refused(asked, package, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    given = parse_config({"model": {"path": "x"}, "metrics": asked}).metrics
    with pytest.raises(ValueError, match=f"{next(iter(asked))} needs the package {package}: pip install {package}"):
        check_trackers(given)
    check_trackers(parse_config({"model": {"path": "x"}}).metrics)


def test_trackers_get_every_number_of_a_step(tmp_path, monkeypatch):
    """Stand-ins in the place of both packages; the run goes on after two steps."""
    scalars, logged = [], []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            assert (folder, purge_step) == (str(tmp_path / "tensorboard"), 3)

        def add_scalar(self, *arguments):
            scalars.append(arguments)

        flush = close = lambda self: None

    def init(**options):
        assert options["project"] == "trees" and options["config"]["model"]["path"] == "x"
        logged.append(options["id"])
        return SimpleNamespace(id="abc", log=lambda m, step: logged.append((step, m)), finish=lambda: None)

    for name, content in (("torch.utils.tensorboard", {"SummaryWriter": SummaryWriter}), ("wandb", {"init": init})):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "wandb_run").write_text("abc\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    config = parse_config({"model": {"path": "x"}, "metrics": {"tensorboard": True, "wandb_project": "trees"}})
    trackers = open_trackers(tmp_path, config, steps_done=2)
    for tracker in trackers:
        tracker.write(METRICS | {"loss": float("nan")})
        tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"step": 2}'] and '"loss": null' in lines[2] and len(lines) == 3
    assert ("grad_norm", 1.5, 3) in scalars and {name for name, *_ in scalars} >= {"loss", "kl_ref", "skipped"}
    assert not {"step", "mfu", "exchange"} & {name for name, *_ in scalars}
    assert logged[0] == "abc" and logged[1][0] == 3 and logged[1][1]["grad_norm"] == 1.5


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    config = parse_config({"model": {"path": "x"}, "metrics": {"tensorboard": True}})
    for tracker in open_trackers(tmp_path, config, steps_done=0):
        tracker.write(METRICS)
        tracker.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))
