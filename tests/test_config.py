"""Configuration: shipped files parse, overrides apply, and mistakes are named."""

from pathlib import Path

import pytest

from cp_engine.config import parse_config, read_config
from cp_engine.losses.settings import LOSS_DEFAULTS, LOSSES, LossConfig

CONFIGS = sorted((Path(__file__).parent.parent / "launch" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_is_valid(path):
    config = read_config(path)
    # The coin game makes its own rollouts.
    assert (config.data is None) == (path.stem == "game") and config.output_dir


def test_there_are_shipped_configs():
    assert {"quickstart", "tau_airline_tiny"} <= {path.stem for path in CONFIGS}


def test_overrides_replace_values(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: tiny-qwen3}\n")
    config = read_config(file, ["parallel.cp=3", "optimizer.lr=2.0e-4", "loss.name=sft", "packing.max_pack_tokens=64"])
    assert (config.parallel.cp, config.optimizer.lr, config.loss.name) == (3, 2e-4, "sft")
    assert config.packing.max_pack_tokens == 64
    file.write_text("model: {path: tiny-qwen3}\nlora:\ncheckpoint: null\n")
    config = read_config(file, ["lora.r=4"])
    assert config.lora.r == 4 and config.checkpoint is None


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"model": {"path": "x"}, "los": {}}, "unknown key 'los'; did you mean 'loss'?"),
        ({"model": {"path": "x"}, "parallel": {"cpp": 1}}, "unknown key 'parallel.cpp'; did you mean 'cp'?"),
        ({"model": {"path": "x"}, "loss": {"zzz": 1}}, "unknown key 'loss.zzz'; known: name, aggregation"),
        (
            {"model": {"path": "x"}, "parallel": {"exchange": "ring", "max_exchange_mib": 64}},
            "max_exchange_mib only steers exchange: auto, and exchange is ring; leave one of them out",
        ),
        (
            {"model": {"path": "x"}, "parallel": {"cp": 4, "exchange": "ulysses_gather"}},
            "ulysses_ranks is set for exchange: ulysses_gather and only for it; exchange is ulysses_gather, "
            "ulysses_ranks is None",
        ),
        (
            {"model": {"path": "x"}, "parallel": {"cp": 4, "exchange": "ulysses_gather", "ulysses_ranks": 3}},
            "ulysses_ranks must divide cp; got ulysses_ranks 3 and cp 4",
        ),
        (
            {"model": {"path": "x"}, "parallel": {"gdn_layout": "own", "gdn_exchange": "ulysses"}},
            "gdn_layout: own keeps states from crossing ranks, and with gdn_exchange: ulysses none do",
        ),
        ({"model": {"path": "x"}, "parallel": {"cp": 0}}, "parallel.cp: Input should be greater than or equal to 1"),
        (
            {"model": {"path": "x"}, "loss": {"name": "reinforce"}},
            "loss.name: Input should be 'sft', 'grpo'",
        ),
        (
            {"model": {"path": "x"}, "loss": {"name": "dapo", "kl_coef": 0.1}},
            "config: loss: dapo does not use kl_coef; its settings are aggregation, clip_low, clip_high,",
        ),
        ({"model": {"path": "x"}, "loss": {"kl_estimator": "k1"}}, "kl_estimator has no effect while kl_coef is 0"),
        ({"model": {"path": "x"}, "loss": {"sum_norm": 3}}, "sum_norm is used by aggregation seq-mean-token-sum-norm"),
        ({"model": {"path": "x"}, "loss": {"clip": 0.1}}, "unknown key 'loss.clip'; did you mean 'clip_low'?"),
        (
            {"model": {"path": "x"}, "engine": {"name": "deepspeed"}},
            "engine: stage is set for deepspeed and only for it; name is deepspeed, stage is None",
        ),
        ({"model": {"path": "x"}, "engine": {"name": "fsdp2", "stage": 3}}, "name is fsdp2, stage is 3"),
        (
            {"model": {"path": "x"}, "engine": {"name": "deepspeed", "stage": 3, "shard": "node"}},
            "shard: node is a setting of fsdp2, and name is deepspeed",
        ),
        ({"model": {"path": "x"}, "engine": {"offload": "cpu"}}, "offload: cpu needs sharded optimizer states"),
        (
            {"model": {"path": "x"}, "engine": {"name": "deepspeed", "stage": 2, "persistence_threshold": 0}},
            "persistence_threshold is a setting of deepspeed stage 3",
        ),
        (
            {"model": {"path": "x"}, "optimizer": {"name": "sgd", "eps": 1e-6}},
            "betas and eps are settings of adamw, and name is sgd",
        ),
        (
            {"model": {"path": "x"}, "optimizer": {"final_lr": 1e-6}},
            "final_lr is a setting of the linear and cosine schedules, and schedule is constant",
        ),
        ({"model": {"path": "x"}, "lora": {"rank": 3}}, "unknown key 'lora.rank'"),
        (
            {"model": {"path": "x"}, "lora": {"targets": "q_proj"}},
            "config: lora.targets: expected a list of names of linear modules, such as [q_proj], or all-linear; got "
            "'q_proj'",
        ),
        ({"model": {"path": "x"}, "lora": {"targets": []}}, "such as [q_proj], or all-linear; got []"),
        ({"model": {"path": "x"}, "lora": {"targets": [3]}}, "such as [q_proj], or all-linear; got [3]"),
        ({}, "config: model: Field required"),
        ({"model": {"path": "x"}, "checkpoint": {"evry": 2}}, "checkpoint.every: Field required; unknown key"),
        (
            {"model": {"path": "x"}, "checkpoint": 2},
            "checkpoint: expected a section of settings, such as checkpoint.every;",
        ),
        ({"model": {"path": "x"}, "lora": True}, "lora: expected a section of settings, such as lora.r; got True"),
        ({"model": {"path": "x"}, "loss": "sft"}, "loss: expected a section of settings, such as loss.name; got 'sft'"),
    ],
)
def test_mistakes_are_named(raw, text):
    with pytest.raises(ValueError) as error:
        parse_config(raw)
    assert text in str(error.value)


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_has_its_defaults_and_a_resolved_section_reads_back(name):
    loss = LossConfig(name=name)
    own = LOSS_DEFAULTS[name]
    assert all(getattr(loss, key) == value for key, value in own.items())
    others = set(LossConfig.model_fields) - set(own) - {"name", "temperature", "router_aux_coef"}
    assert all(getattr(loss, key) is None for key in others)
    assert LossConfig(**loss.model_dump()) == loss


def test_a_kl_is_k3_unless_said_otherwise():
    assert LossConfig(kl_coef=0.1).kl_estimator == "k3"
    assert LossConfig(kl_coef=0.1, kl_estimator="k2").kl_estimator == "k2"


def test_bad_files_and_overrides_are_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read config .*absent.yaml: No such file"):
        read_config(tmp_path / "absent.yaml")
    file = tmp_path / "c.yaml"
    file.write_text("model: [1, 2")
    with pytest.raises(ValueError, match="is not valid YAML"):
        read_config(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"c.yaml is not valid YAML: 'utf-8' codec"):
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
