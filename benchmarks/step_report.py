"""Tables of training steps for `benchmarks.report`."""

from __future__ import annotations

from benchmarks.tables import cell, table

STEP = """Whole training steps (forward, backward, optimizer) in bf16 with random weights, by the wall clock. Flat: the
same model, engine, objective, head on trained tokens and recompute on every rollout as a row of its own, in
micro-batches, with the fastest of FA4, cuDNN and FA2. FLOP ratio: model FLOPs of flat over tree, from tokens, visible
pairs and rows of logits. No speed-up is given where loss, entropy, gradient norm or gradients differ. MFU: model FLOPs
a second over 989 TFLOP/s, the card's dense bf16 rate by its data sheet; HFU: with what is computed again. Largest:
rollouts that one micro-batch can hold, tree / flat, by doubling, in the last run that searched for them. Differences:
loss, gradient norm, gradients.
"""

STEP_RANKS = """The same step with as many times the rollouts on several GPUs, against one of them in the same run.
More: rollouts of each prompt, or prompts.
Efficiency: tree tokens a GPU and second over one GPU's.
"""

STEP_LAYER = """One decoder layer, forward and backward with the gradients of its weights, nothing recomputed.
Published: gain over flat FlashAttention-2 that DualKV reports for one H100.
"""


def steps(records: list[dict]) -> str:
    alone, several = ([r for r in records if (r["gpus"] > 1) == many] for many in (False, True))
    head = (
        "model",
        "weights",
        "workload",
        "recompute",
        "tree, ms",
        "flat, ms",
        "speed-up",
        "FLOP ratio",
        "over it",
        "tokens",
        "pairs",
    )
    head += ("MFU", "HFU", "flat MFU", "flat HFU", "GiB", "flat GiB", "same micro-batch, GiB", "largest", "differences")
    rows = []
    for r in alone:
        figures = [f"{r['tree_ms']:,.0f}", f"{r['flat_ms']:,.0f} ({r['flat_attention']})"]
        figures += [cell(r[key]) for key in ("speedup", "flop_ratio", "speedup_over_flop_ratio")]
        figures += [cell(r[key]) for key in ("token_ratio", "pair_ratio")]
        figures += [f"{r[key]:.1%}" for key in ("mfu", "hfu", "flat_mfu", "flat_hfu")]
        same, most = r["same_micro_batch"], r.get("largest")
        figures += [cell(r["tree_gib"]), cell(r["flat_gib"])]
        figures.append(f"{same['tree_gib']:.4g} / {same['flat_gib']:.4g} ({same['rollouts']} rollouts)")
        figures.append(f"{most['tree']} / {most['flat']}" if most else "–")
        figures.append(", ".join(f"{r[key]:.2g}" for key in ("loss_error", "norm_error", "gradient_error")))
        rows.append([r["model"], r["weights"], r["workload"], r["recompute"], *figures])
    text = table(head, rows) if alone else ""
    if several:
        columns = ("model", "weights", "workload", "more", "recompute", "gpus", "engine", "exchange", "tree_tokens")
        columns += ("tree_ms", "one_gpu_ms", "tokens_per_s_gpu", "one_gpu_tokens_per_s", "efficiency", "mfu")
        columns += ("one_gpu_mfu", "hfu", "tree_gib", "one_gpu_gib")
        rows = [[cell(r[key]) for key in columns] for r in several]
        text += f"\n### Several GPUs\n\n{STEP_RANKS}\n" + table([key.replace("_", " ") for key in columns], rows)
    return text.lstrip("\n")


def step_layers(records: list[dict]) -> str:
    head = (
        "model",
        "workload",
        "tree, ms",
        "GiB",
        "flat, ms",
        "flat GiB",
        "over FA2",
        "over the fastest",
        "FLOP ratio",
    )
    rows = []
    for r in records:
        flat = [", ".join(f"{name} {value:.4g}" for name, value in r[key].items()) for key in ("flat_ms", "flat_gib")]
        gains = [cell(r[key]) for key in ("gain_over_fa2", "gain_over_fastest", "flop_ratio", "published_gain", "mfu")]
        worst = max(r["error"].values(), default=None)
        rows.append([r["model"], r["workload"], cell(r["tree_ms"]), cell(r["tree_gib"]), *flat, *gains, cell(worst)])
    return table((*head, "published", "MFU", "error"), rows)
