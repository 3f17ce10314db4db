"""Element-wise gates of a Gated DeltaNet layer: decay and write strength before the recurrence, norm and gate after."""

from cp_engine.kernels.gates.api import choose, gated_norm, input_gates, why_not

__all__ = ["choose", "gated_norm", "input_gates", "why_not"]
