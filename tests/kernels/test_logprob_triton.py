"""The Triton head: in the interpreter against the float64 reference, and in 16 bits and float32 on a GPU.

The interpreter has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

from dataclasses import replace

import pytest
import torch

from cp_engine.kernels.logprob import row_kernels, triton
from tests.in_interpreter import pass_in_the_interpreter
from tests.kernels.head_cases import head_case, head_errors

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_in_the_interpreter():
    pass_in_the_interpreter("tests/kernels/interpreted_logprob.py")


def test_whole_chunks_are_whole_tiles():
    assert triton.chunk_rows(151_936, 2) == 3_456 and triton.chunk_rows(248_320, 2) == 2_048
    assert triton.chunk_rows(2**23, 2) == 64 and triton.chunk_rows(2**31, 2) == 1


ARGUMENT_TYPES = (
    dict.fromkeys(("edge_ptr", "edge_target"), "*i64")
    | dict.fromkeys(("scale", "scale_log2"), "fp32")
    | {"first": "i32"}
)
WARPS = {"_score_kernel": row_kernels.WARPS, "_gradient_kernel": row_kernels.WARPS, "_target_kernel": 1}


@pytest.mark.parametrize("vocab", [151_936, 50_257])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", list(WARPS))
def test_compiles_for_hopper_without_one(name, dtype, vocab):
    """16 bytes a load where rows are aligned; threads wait for each other only when a row's lanes are added up."""
    compiler = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(row_kernels, name)
    logits = torch.empty((1, vocab), dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype), device="meta")
    constants = {key: value for key, value in row_kernels._sizes(logits).items() if key in kernel.arg_names}
    types = ARGUMENT_TYPES | {"logits": f"*{dtype}"} | dict.fromkeys(constants, "constexpr")
    signature = {each: types.get(each, "*fp32") for each in kernel.arg_names}
    places = {(place,): constants[each] for place, each in enumerate(kernel.arg_names) if each in constants}
    pointers = [(place,) for place, each in enumerate(kernel.arg_names) if signature[each].startswith("*")]
    made = compiler.compile(
        ASTSource(kernel, signature, places, dict.fromkeys(pointers, [["tt.divisibility", 16]])),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": WARPS[name]},
    )
    if name != "_target_kernel" and vocab % 8 == 0:
        assert "ld.global.v4.b32" in made.asm["ptx"]
    assert "atom" not in made.asm["ptx"]
    assert made.asm["ptx"].count("bar.sync") <= {"_score_kernel": 8, "_gradient_kernel": 0, "_target_kernel": 2}[name]


def check_on_gpu(mine, dtype: torch.dtype, frozen: bool = False) -> None:
    """Each result within 1.25 of the reference's error against float64, which rounds logits and their gradients too."""
    mine = mine.to("cuda", dtype)
    truth = mine.truth()
    found, expected = (head_errors(mine.run(backend, frozen), truth) for backend in ("triton", "reference"))
    least = 2e-6 if dtype == torch.float32 else 1e-5
    assert all(found[name] <= 1.25 * expected[name] + least for name in found), (found, expected)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [8_192, 8_193, 50_257])
def test_on_gpu(monkeypatch, dtype, vocab):
    monkeypatch.setattr(triton, "CHUNK_BYTES", 256 * vocab * dtype.itemsize)
    torch.backends.cuda.matmul.allow_tf32 = False
    mine = head_case(0, vocab=vocab, width=512, rows=700, predictors=600, edges=1500, size=3.0, temperature=0.8)
    check_on_gpu(mine, dtype)
    check_on_gpu(replace(mine, dentropy=torch.zeros_like(mine.dentropy)), dtype, frozen=True)


@pytest.mark.gpu
@on_gpu
def test_runs_are_equal_to_the_bit():
    mine = head_case(1, vocab=32_000, width=512, rows=700, predictors=600, edges=1500).to("cuda", torch.bfloat16)
    for first, second in zip(mine.run("triton"), mine.run("triton"), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
@on_gpu
def test_rows_beyond_32_bit_offsets():
    """Row 2,048 of 2**20 logits begins at element 2**31."""
    vocab, row = 2**20, 2**11
    logits = torch.zeros(row + 1, vocab, dtype=torch.bfloat16, device="cuda")
    logits[row] = torch.linspace(-2, 2, vocab, device="cuda")
    truth = logits[row].double().log_softmax(-1)
    log_prob, entropy, ones = (torch.ones(1, device="cuda") for _ in range(3))
    pointer = torch.zeros(row + 2, dtype=torch.int64, device="cuda")
    pointer[-1] = 1
    edges = 0, pointer, torch.tensor([vocab - 1], device="cuda"), 1.0
    statistics = row_kernels.Statistics.empty(logits)
    row_kernels.score_rows(logits, *edges, log_prob, entropy, statistics)
    assert abs(float(log_prob - truth[-1])) < 1e-5
    assert abs(float(entropy + (truth.exp() * truth).sum())) < 1e-5
    row_kernels.gradients_in_place(logits, *edges, log_prob, statistics, ones, 0 * ones)
    expected = -truth.exp()
    expected[-1] += 1
    assert float((logits[row].double() - expected).abs().max()) < 2**-8
    assert not logits[:row].any()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("frozen", [True, False])
def test_memory_on_gpu(frozen):
    """One chunk of logits beside hidden states and their gradient; a trained weight's gradient in float32 and bf16."""
    vocab, width, predictors = 151_936, 1_024, 8_192
    mine = head_case(2, vocab=vocab, width=width, rows=predictors, predictors=predictors, edges=20_000)
    mine = mine.to("cuda", torch.bfloat16)
    mine.run("triton", frozen)  # compiles, and makes the workspace of products
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = mine.run("triton", frozen)
    peak = torch.cuda.max_memory_allocated() - before
    del results
    logits, row, weight = triton.chunk_rows(vocab, 2) * vocab * 2, predictors * width * 2, vocab * width
    # Hidden states cloned and selected, gradients of both, the clone of the weight, edges and statistics.
    expected = logits + 4 * row + 2 * weight + 2**20 + (0 if frozen else 4 * weight)
    assert expected * 0.95 <= peak <= expected * 1.05, (peak, expected)
