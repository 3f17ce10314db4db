"""What the repository shows a reader first: configs that load, links that lead somewhere, scripts that parse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cp_engine.config import read_config
from cp_engine.rollouts import read_rollouts
from launch.summary import last_json_line, summary_table

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "launch" / "configs").glob("*.yaml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / "launch" / "slurm.sbatch", ROOT / ".ci" / "run"]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CONFIGS, ids=relative)
def test_every_shipped_config_loads(path):
    # The game makes its own rollouts.
    assert (read_config(path).data is None) == (path.name == "game.yaml")


def test_the_quick_starts_rollouts_fit_its_model():
    config = read_config(ROOT / "launch" / "configs" / "quickstart.yaml")
    rollouts = read_rollouts(ROOT / config.data.rollouts)
    assert max(int(r.input_ids.max()) for r in rollouts) < config.model.vocab_size
    assert all(r.reward is not None and r.old_logprobs is not None for r in rollouts)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_and_named_files_exist(page):
    """Relative links, and paths in code quotes that begin with a folder of this repository."""
    text = page.read_text(encoding="utf-8")
    links = [page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    quoted = re.findall(r"`((?:cp_engine|kernels|sharding|launch|tests|docs|benchmarks)/[\w./-]*)`", text)
    missing = [str(path) for path in [*links, *(ROOT / name for name in quoted)] if not path.exists()]
    assert not missing


def python_block(page: str) -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[1]


def test_python_that_is_shown_runs(tmp_path):
    loop = python_block("docs/python.md")
    changes = {
        "models/Qwen3-8B": "tiny-qwen3",
        '"steps": 200': '"steps": 2',
        "runs/mine/final": str(tmp_path / "final"),
    }
    for shown, used in changes.items():
        assert shown in loop
        loop = loop.replace(shown, used)
    given = "play = lambda step: rollouts\nsent = {}\ngive_to_sampler = sent.__setitem__\n"
    ending = "shutdown(0)  # ends"
    assert ending in loop
    loop = loop.replace(ending, "print(engine.steps_done, len(sent), metrics['clipped_high'] is not None)\n" + ending)
    code = python_block("README.md") + given + loop
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    first, *_, last = ran.stdout.splitlines()  # DeepSpeed, where it is installed, prints a line between them
    (loss, flat, tree), (steps, sent, clipped) = first.split(), last.split()
    assert (flat, tree, steps, clipped) == ("2866", "704", "2", "True") and int(sent) > 20 and float(loss) != 0
    assert (tmp_path / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("script", SCRIPTS, ids=relative)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_the_summary_names_what_it_found(tmp_path):
    steps = [
        {"loss": 0.5, "flat_tokens": 2866, "tree_tokens": 704, "token_imbalance": 1.0, "pair_imbalance": 1.25},
        {"loss": 0.25, "flat_tokens": 2866, "tree_tokens": 704, "token_imbalance": 1.0, "pair_imbalance": 1.25},
    ]
    check = {
        "ok": False,
        "occurrences": 684,
        "max_logprob_err": 3e-3,
        "loss_err": 2e-15,
        "max_grad_err": 4e-2,
        "worst_tensor": "lm_head.weight",
    }
    log = tmp_path / "verify.log"
    log.write_text("a library's warning\n" + json.dumps(check) + "\n")
    table = summary_table(steps, last_json_line(log))
    what, values = ([*column.cells] for column in table.columns)
    shown = dict(zip(what, values, strict=True))
    assert shown["loss, first -> last step"] == "0.5000 -> 0.2500"
    assert shown["tokens a step, as a tree"] == "704 (4.1 times fewer)"
    assert "NOT exact" in shown["check against the unmodified model"]
    assert shown["largest gradient error"] == "4.0e-02 (lm_head.weight)"


@pytest.mark.parametrize("text", ["", "Traceback\n"])
def test_the_summary_says_when_there_is_no_result(text, tmp_path):
    log = tmp_path / "verify.log"
    log.write_text(text)
    with pytest.raises(SystemExit, match="does not end with a JSON object"):
        last_json_line(log)
