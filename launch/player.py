"""A plain `transformers` model that plays the coin game: batches of open games, one `generate` a turn.

Shapes: G open games, L tokens of the longest of them, n tokens written in a turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from transformers import GenerationConfig

from cp_engine.config import Config
from cp_engine.models.cpu import make_cpu_runnable
from cp_engine.models.load import load_model
from launch.game import NEWLINE, PAD, TURN_BYTES, Game, one_turn


class Player:
    """The unmodified model of a configuration, which knows nothing of trees, with weights that are given to it.

    It samples at the temperature of the loss.
    """

    def __init__(self, config: Config, device: torch.device):
        dtype = getattr(torch, config.dtype)
        self.model = load_model(config.model.path, dtype, config.model.vocab_size, config.model.seed, device).eval()
        make_cpu_runnable(self.model)
        self.temperature = config.loss.temperature

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights that a trainer streams; all of them have to come."""
        parameters, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        for name, tensor in weights:
            (parameters.pop(name) if name in parameters else buffers[name]).copy_(tensor)
        assert not parameters, f"no weights came for {', '.join(parameters)}"

    def play(self, games: Sequence[Game], greedy: bool) -> list[list[float]]:
        """Play games to their ends. A turn ends at a newline or where the widest drawer number would need one.

        Returns:
            for each game one number a token: the log-probability with which it was sampled, NaN where the model did
            not write it.
        """
        generation = self._generation(max(len(str(game.level.drawers - 1)) for game in games) + 1, greedy)
        logprobs = [[math.nan] * len(game.tokens) for game in games]
        while still_open := [number for number, game in enumerate(games) if not game.done]:
            turns = self._turns([games[number].tokens for number in still_open], generation)
            for number, (turn, turn_logprobs) in zip(still_open, turns, strict=True):
                games[number].play(turn)
                logprobs[number] += turn_logprobs
                logprobs[number] += [math.nan] * (len(games[number].tokens) - len(logprobs[number]))
        return logprobs

    def _generation(self, turn_tokens: int, greedy: bool) -> GenerationConfig:
        how = {"do_sample": False}
        if not greedy:
            how = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        ends = {"max_new_tokens": min(turn_tokens, TURN_BYTES), "eos_token_id": NEWLINE, "pad_token_id": PAD}
        return GenerationConfig(**how, **ends, output_logits=True, return_dict_in_generate=True)

    @torch.no_grad()
    def _turns(self, prompts: list[list[int]], generation: GenerationConfig) -> list[tuple[list[int], list[float]]]:
        """The next turn after each prompt, and the log-probability of each of its tokens."""
        length, device = max(map(len, prompts)), self.model.device
        ids = torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in prompts], device=device)  # [G, L]
        present = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)  # [G, L]
        generated = self.model.generate(ids, attention_mask=present, generation_config=generation)
        written = generated.sequences[:, length:]  # [G, n]
        logits = torch.stack(generated.logits, dim=1).float() / self.temperature  # [G, n, vocabulary]
        logprobs = logits.log_softmax(-1).gather(-1, written[..., None])[..., 0]
        turns = [one_turn(turn) for turn in written.tolist()]
        return [(turn, row[: len(turn)]) for turn, row in zip(turns, logprobs.tolist(), strict=True)]
