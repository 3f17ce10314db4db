"""What things cost on a GPU and its links, and the sizes of a model that a layer's time depends on.

Costs are integers (nanoseconds), so that every host predicts the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
ACCUMULATION_BYTES = 4  # states and returned gradients travel in float32


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one thing costs, in integer nanoseconds of the unit in the field's comment.

    "anchors" are the recorded measurements of one or two H200s in bf16; "predicted" means that nobody measured it yet.
    """

    # One query head x 1,000 touched 128 x 128 tiles, by head size. D 128 and 256: the smallest largest error on the
    # newest H200 times of `auto` in benchmarks/results.jsonl (measured 2026-11-30; nine trees of D 128, two of D 256):
    # forward and backward together within 9 %, each alone within 13 %. The rows are of machines of which one was 5 %
    # slower. D 64: dense rates (anchors). Others by FLOPs.
    tile_forward: tuple[tuple[int, int], ...] = ((64, 8_470), (128, 12_500), (256, 22_050))
    tile_backward: tuple[tuple[int, int], ...] = ((64, 20_480), (128, 36_850), (256, 89_610))
    # One query head x 1,000 query tiles, whatever they see; of the same fit.
    query_tile_forward: int = 6_000
    query_tile_backward: int = 27_000
    # Where results of several calls are merged `triton` computes them, in percent of what `auto` takes otherwise, by
    # head size: 279.0 + 811.0 ms for 214.3 + 583.6 (chain_128k, one H200, means of rows of 8bfacce and dc98719; 35.5 +
    # 103.8 for 26.5 + 76.3 on dualkv_16k28, rows of a1eb333), and at D 256 1.57 to 1.62 x forward (rows of 003e032),
    # nothing backward, which is `triton`'s anyway.
    partial_forward_percent: tuple[tuple[int, int], ...] = ((128, 130), (256, 160))
    partial_backward_percent: tuple[tuple[int, int], ...] = ((128, 139), (256, 100))
    # One recurrent value head (K = V = 128) x 1,000 chunks of 64 tokens: between the H200 times of one chain (141 and
    # 315 us) and of trees (117 to 119 and 305 to 306; measured 2026-11-30, commit 003e032). Both together within 5 %.
    chunk_forward: int = 126_000
    chunk_backward: int = 310_000
    # The same unit, for what states that cross ranks add, hide or wait for: between one chain and trees, from stages
    # of the rows `gdn` and `gdn-ranks` of that day (commits 5ab6634 and 003e032).
    # The state pass that keeps nothing, for summaries: one chain 43 us, trees 23.
    chunk_summary: int = 33_000
    # State pass and output of the forward: one chain 66 + 28 us, trees 43 to 46 + 28.
    chunk_states: int = 54_000
    chunk_output: int = 28_000
    # Both state passes of the backward side by side, and dqkwg: one chain 102 + 95 us, trees 97 + 94.
    chunk_both_passes: int = 100_000
    chunk_dqkwg: int = 94_000
    # The adjoint where the states are there already; the other pass beside it adds only 12 to 14 us.
    chunk_adjoint: int = 88_000
    # One MiB of states folded: what the fold of `art_5k16x100`, spread over two H200s (104 MiB a rank, 1.32 ms; commit
    # 003e032), took beside waiting for the other rank's summary, two all-to-alls and its own state pass: 0.5 ms.
    fold_mib: int = 5_000
    # One MiB of states between GPUs of one host, pulled as rows are; the latency of both exchanges and the fold's
    # launches; that of fetching the few history rows of the convolution (all predicted).
    state_mib: int = 2_830
    state_latency: int = 100_000
    history_latency: int = 50_000
    # States that are handed on: one MiB more than pulled, read and written where it leaves its pass, among all exits,
    # where it is packed and where it arrives; and one round's launches and barrier (both predicted; layers of four
    # layouts on two H200s, commits 3ec6fd0 and 0273e74, take what follows from them within 2 %).
    round_mib: int = 1_960
    round_latency: int = 80_000
    # 10**12 operations of dense products: 8192 x 8192 x 8192 in bf16 at 781 TFLOP/s (anchors). Backward is twice that.
    tera_product: int = 1_280_000
    # One MiB read or written by element-wise code: device copy at 4.28 TB/s (anchors).
    memory_mib: int = 245
    # Passes over a [tokens, hidden] activation by norms, rotary, residuals and activations of a layer (predicted).
    passes_forward: int = 24
    passes_backward: int = 48
    # Passes over [tokens, q | k | v] by a recurrent layer's convolution, gates, gated norm and narrow products: what an
    # H200's times of the whole layer (commit 003e032) leave beside its wide products and the recurrence. Forward and
    # backward 20 and 90 ns a token on trees, 24 and 96 on one chain; a pass takes 3.8.
    mixer_passes_forward: int = 6
    mixer_passes_backward: int = 24
    # Rows pulled by copy engines on one host: 16, 64 and 256 MiB at 298, 353 and 366 GB/s (anchors, links).
    pull_mib: int = 2_830
    pull_latency: int = 10_000
    # NCCL all-to-all between two GPUs, per MiB sent: 16 and 256 MiB in 54 and 471 us (anchors, links).
    all_to_all_mib: int = 3_475
    all_to_all_latency: int = 22_000
    # The same MiB packed, unpacked and put in order where heads are dealt out: fitted on seven `ulysses` layers over
    # two H200s (commits 8007910 and 3ec6fd0), which it gives within 10 %.
    head_rows_mib: int = 5_000
    # NCCL send/recv: 16 and 256 MiB in 85 and 881 us (anchors, links).
    send_mib: int = 3_320
    send_latency: int = 32_000
    # How much longer attention takes while rows are pulled, in percent of the pull: +2.6 to +5.3 % (anchors).
    pull_slowdown_percent: int = 5
    # One MiB of keys and values, or of their gradients, that travels while nothing is computed, barriers and launches
    # included: one head group of `art_5k16x100`, spread over two H200s, exposes 0.895 ms for 238.75 MiB (measured
    # 2026-11-30).
    exposed_mib: int = 3_750
    # One more head group of `gather`: launches, forward and backward (predicted), and what it adds, in per mille of the
    # kernels' time. Measured 2026-11-30 (commit 003e032, the same layout, 12.2 ms of kernels): a layer took 16.2 ms in
    # two groups and 16.8 in four, which expose 0.2 ms less. Of one group, 14.8, this says nothing: results were joined.
    group: int = 5_000
    group_per_mille: int = 30
    # One kernel launch (predicted).
    launch: int = 5_000


H200 = Costs()


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes that a layer's time depends on. A model without recurrent layers has ``gdn_layers`` and ``gdn_runs`` 0."""

    hidden: int
    mlp_width: int  # summed widths of the gated MLPs that a token goes through: all active experts of an MoE
    attention_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    window_layers: int = 0  # attention layers with a sliding window
    window: int | None = None  # tokens that a row of these sees, itself included
    gdn_layers: int = 0
    gdn_runs: int = 0  # runs of consecutive recurrent layers
    gdn_key_heads: int = 0
    gdn_value_heads: int = 0
    gdn_head_dim: int = 128
    gdn_own_gate: bool = True  # the output gate has a projection of its own, which need not come before states move
    element_bytes: int = 2

    @property
    def hidden_row_bytes(self) -> int:
        """Hidden state of one token."""
        return self.hidden * self.element_bytes

    @property
    def kv_row_bytes(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def kv_gradient_bytes(self) -> int:
        """Gradient of one key and value row on its way home."""
        return 2 * self.kv_heads * self.head_dim * max(self.element_bytes, ACCUMULATION_BYTES)

    @property
    def state_bytes(self) -> int:
        """Recurrent state of all value heads, or the affine part of a summary."""
        return self.gdn_value_heads * self.gdn_head_dim**2 * ACCUMULATION_BYTES

    @property
    def gdn_channels(self) -> int:
        """Channels of queries, keys and values of a recurrent layer."""
        return (2 * self.gdn_key_heads + self.gdn_value_heads) * self.gdn_head_dim

    @property
    def attention_products(self) -> int:
        """Multiply-adds of one token's projections and MLP in a softmax-attention layer."""
        heads = 2 * self.query_heads + 2 * self.kv_heads
        return self.hidden * (heads * self.head_dim + 3 * self.mlp_width)

    @property
    def gdn_products(self) -> int:
        """Multiply-adds of one token's projections and MLP in a recurrent layer."""
        heads = 2 * self.gdn_key_heads + 3 * self.gdn_value_heads  # q, k; v, output gate, output
        return self.hidden * (heads * self.gdn_head_dim + 3 * self.mlp_width)


# Shapes of released models, for predictions without a configuration file.
PRESETS = {
    "qwen3-8b": ModelShape(hidden=4096, mlp_width=12288, attention_layers=36, query_heads=32, kv_heads=8, head_dim=128),
    "llama-3.1-8b": ModelShape(
        hidden=4096, mlp_width=14336, attention_layers=32, query_heads=32, kv_heads=8, head_dim=128
    ),
    "qwen3-30b-a3b": ModelShape(
        hidden=2048, mlp_width=8 * 768, attention_layers=48, query_heads=32, kv_heads=4, head_dim=128
    ),
    "qwen3.5-35b-a3b": ModelShape(
        hidden=2048,
        mlp_width=9 * 512,
        attention_layers=10,
        query_heads=16,
        kv_heads=2,
        head_dim=256,
        gdn_layers=30,
        gdn_runs=10,
        gdn_key_heads=16,
        gdn_value_heads=32,
    ),
    "qwen3-next-80b-a3b": ModelShape(
        hidden=2048,
        mlp_width=11 * 512,
        attention_layers=12,
        query_heads=16,
        kv_heads=2,
        head_dim=256,
        gdn_layers=36,
        gdn_runs=12,
        gdn_key_heads=16,
        gdn_value_heads=32,
        gdn_own_gate=False,
    ),
}
