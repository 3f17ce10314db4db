"""Configuration: shipped files parse, overrides apply, and mistakes are named."""

from pathlib import Path

import pytest

from cp_engine.config import parse_config, read_config

CONFIGS = sorted((Path(__file__).parent.parent / "launch" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_valid(path):
    config = read_config(path)
    assert config.data is not None and config.output_dir


def test_there_are_shipped_configs():
    assert {"quickstart", "tau_airline_tiny"} <= {path.stem for path in CONFIGS}


def test_overrides_replace_values(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: tiny-qwen3}\n")
    config = read_config(file, ["parallel.cp=3", "optimizer.lr=2.0e-4", "loss.name=sft", "packing.max_pack_tokens=64"])
    assert (config.parallel.cp, config.optimizer.lr, config.loss.name) == (3, 2e-4, "sft")
    assert config.packing.max_pack_tokens == 64


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"model": {"path": "x"}, "los": {}}, "unknown key 'los'; did you mean 'loss'?"),
        ({"model": {"path": "x"}, "parallel": {"cpp": 1}}, "unknown key 'parallel.cpp'; did you mean 'cp'?"),
        ({"model": {"path": "x"}, "loss": {"zzz": 1}}, "unknown key 'loss.zzz'; known: name, aggregation"),
        ({"model": {"path": "x"}, "parallel": {"cp": 0}}, "parallel.cp: Input should be greater than or equal to 1"),
        ({"model": {"path": "x"}, "loss": {"name": "ppo"}}, "loss.name: Input should be 'sft' or 'grpo'"),
        ({}, "model: Field required"),
    ],
)
def test_mistakes_are_named(raw, text):
    with pytest.raises(ValueError) as error:
        parse_config(raw)
    assert text in str(error.value)


def test_bad_files_and_overrides_are_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read config .*absent.yaml: No such file"):
        read_config(tmp_path / "absent.yaml")
    file = tmp_path / "c.yaml"
    file.write_text("model: [1, 2")
    with pytest.raises(ValueError, match="is not valid YAML"):
        read_config(file)
    file.write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold a mapping of settings, got list"):
        read_config(file)
    file.write_text("model: {path: x}\nsteps: 2\n")
    with pytest.raises(ValueError, match="override 'steps' must have the form key.sub=value"):
        read_config(file, ["steps"])
    with pytest.raises(ValueError, match="override 'steps.x=1': 'steps' is a value, not a section"):
        read_config(file, ["steps.x=1"])
    with pytest.raises(ValueError, match=r"override 'steps=\[1': the value is not valid YAML"):
        read_config(file, ["steps=[1"])
