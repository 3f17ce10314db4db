"""Model folders for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from cp_engine.models.presets import PRESETS


def save_vision_model(folder: Path) -> None:
    """A Qwen3.5 model in bfloat16 with a tiny vision tower, its weights in several files."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    config = Qwen3_5Config(
        text_config=PRESETS["tiny-qwen3.5"](64).to_dict(),
        vision_config={**vision, "out_hidden_size": 64, "num_position_embeddings": 16},
        image_token_id=60,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
    )
    Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="200KB")
