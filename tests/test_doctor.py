"""`doctor` says what the kernels themselves say, on this machine and on made-up ones, and its exit code is right."""

import json
from types import SimpleNamespace

import pytest
import torch

from cp_engine import doctor
from cp_engine.cli.doctor import operator_lines
from cp_engine.kernels.attention import auto
from cp_engine.kernels.shared import packages
from tests.test_cli import command

H200 = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper card with all packages; the names in the list that is returned are not installed."""
    absent: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(packages, "installed", lambda module: module not in absent)
    return absent


def backends(found: list[dict]) -> dict[tuple, str]:
    return {(one["operator"], one["dtype"], one["head_size"], one["pack"]): one["backend"] for one in found}


def test_on_a_hopper_card_the_kernels_choose(hopper):
    found = doctor.operators(H200)
    chosen = backends(found)
    # It would round what is merged.
    partial = [chosen[f"attention partial {step}", "bfloat16", 128, "all"] for step in ("forward", "backward")]
    assert partial == ["triton", "triton"]
    for step in ("forward", "backward"):
        assert chosen[f"attention {step}", "bfloat16", 128, "short segments"] == "triton"
        assert chosen[f"attention {step}", "bfloat16", 128, "long trunk"] == "cudnn"
    assert chosen["attention backward", "bfloat16", 256, "all"] == "triton"
    assert chosen["attention forward", "float32", 128, "all"] == "reference"
    assert chosen["gated delta rule", "bfloat16", 128, "all"] == chosen["its convolution", "bfloat16", 128, "all"]
    assert chosen["gated delta rule", "bfloat16", 128, "all"] == "triton"
    gates = [chosen["its gates and gated norm", dtype, None, "all"] for dtype in doctor.DTYPES]
    assert gates == ["triton", "reference", "reference"]
    heads = [chosen["log-prob head", dtype, None, "all"] for dtype in doctor.DTYPES]
    assert heads == ["triton", "triton", "reference"]
    assert not any(one["install"] for one in found)


def test_a_missing_package_is_named_with_its_command(hopper):
    hopper.append("cudnn")
    found = doctor.operators(H200)
    assert backends(found)["attention forward", "bfloat16", 128, "all"] == "triton"
    forward = next(one for one in found if (one["operator"], one["head_size"]) == ("attention forward", 128))
    assert forward["why_not"]["cudnn"].startswith("needs nvidia-cudnn-frontend==")
    assert forward["install"] == [f"pip install -e '{doctor._ROOT}[gpu]'"]
    hopper.append("fla")
    rule = next(one for one in doctor.operators(H200) if one["operator"] == "gated delta rule")
    assert (rule["backend"], rule["install"]) == ("reference", ["pip install 'fla-core==0.6.0'"])


def test_the_answer_follows_the_kernels_own(hopper, monkeypatch):
    """No second opinion: what a kernel refuses, for whatever reason, doctor repeats."""
    monkeypatch.setattr(auto.MODULES["cudnn"], "why_not", lambda q: "is away today")
    forward = next(one for one in doctor.operators(H200) if one["operator"] == "attention forward")
    assert forward["backend"] == "triton" and forward["why_not"]["cudnn"] == "is away today"
    assert "    not cudnn is away today" in operator_lines([forward])


def test_peer_reads_are_explained(monkeypatch):
    assert doctor.why_no_peer_reads(0) == "needs more than one GPU; there are none"
    assert doctor.why_no_peer_reads(1) == "needs more than one GPU; there is 1"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 2})
    assert doctor.why_no_peer_reads(3) == "needs GPUs that read each other's memory; devices (0, 2) do not"
    assert doctor.why_no_peer_reads(2) is None
    from torch.distributed import _symmetric_memory

    monkeypatch.delattr(_symmetric_memory, "rendezvous")
    assert "_symmetric_memory.rendezvous, which this torch lacks" in doctor.why_no_peer_reads(2)


def test_links_are_read_from_the_table_of_nvidia_smi(monkeypatch):
    text = "\x1b[4m\tGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\tSYS\t0-15\nGPU1\tNV18\t X \tPIX\t0-15\n"
    text += "GPU2\tSYS\tPIX\t X \t16-31\n\nLegend:\n\n  X    = Self\n"
    monkeypatch.setattr(doctor, "_topology_text", lambda: text)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other == 1)
    assert doctor.links(torch, 3) == [
        {"between": [0, 1], "link": "NV18", "peer_access": True},
        {"between": [0, 2], "link": "SYS", "peer_access": False},
        {"between": [1, 2], "link": "PIX", "peer_access": False},
    ]
    monkeypatch.setattr(doctor, "_topology_text", lambda: "")
    assert {link["link"] for link in doctor.links(torch, 2)} == {None}


def test_what_is_needed_and_broken_makes_it_fail(monkeypatch):
    versions = {"transformers": "5.1.0", "fla-core": None}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, real(name)))
    found, problems = doctor.package_versions()
    assert found["transformers"] == "5.1.0" and problems == [
        "transformers is 5.1.0, and >=5.17 is needed: pip install 'transformers>=5.17'",
        "fla-core is missing: pip install 'fla-core==0.6.0'",
    ]
    report = doctor.examine()
    assert not report["ok"] and report["problems"] == problems
    monkeypatch.setattr(doctor, "_imported", lambda name: (None, f"import {name} fails: ImportError: no"))
    report = doctor.examine()
    assert "import torch fails: ImportError: no" in report["problems"] and report["operators"] == []


def test_a_card_that_cannot_compute_is_a_problem(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no kernel image")

    properties = SimpleNamespace(name="Old card", total_memory=8 * 2**30)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda _: properties,
        get_device_capability=lambda _: (5, 2),
    )
    fake = SimpleNamespace(version=SimpleNamespace(cuda="13.0"), cuda=cuda, ones=refuse, bfloat16=None)
    cards, problems = doctor.gpus(fake)
    assert cards == [{"index": 0, "name": "Old card", "memory_gib": 8.0, "capability": "5.2"}]
    assert problems == ["GPU 0 cannot compute: no kernel image"]


def test_the_command_on_this_machine():
    done = command("doctor", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"] and report["gpus"] == [] and report["versions"]["torch"] == torch.__version__
    assert {one["backend"] for one in report["operators"]} == {"reference"}
    assert report["install"] == []
    shown = command("doctor", CUDA_VISIBLE_DEVICES="")
    assert shown.returncode == 0 and "no GPU: ranks run on the CPU and speak gloo" in shown.stdout
    assert "peer reads over symmetric memory: not used, needs more than one GPU; there are none" in shown.stdout
    assert "attention forward, bfloat16, head size 64 128 256: reference" in shown.stdout
    assert "training can run" in shown.stdout
