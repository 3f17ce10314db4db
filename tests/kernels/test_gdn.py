import numpy as np
import pytest
import torch

from cp_engine.kernels.conv.reference import l2_normalise
from cp_engine.kernels.gdn import api as gdn
from cp_engine.kernels.gdn import chunks, reference
from tests.gdn_oracle import LENGTHS, relative_errors, repeat_heads, token_step

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5


class Local:
    """Random fragments of one rank: trees below zero states and below entries, exits at several of them."""

    def __init__(self, seed: int, fragments: int = 16, padding: int = 1):
        rng = np.random.default_rng(seed)
        length = rng.permutation(np.resize(LENGTHS, fragments))
        self.row = np.concatenate([[0], np.cumsum(length)])
        self.parent = np.array([-1] + [int(rng.integers(-1, f)) for f in range(1, fragments)])
        self.parent[1:4] = -1
        self.entries = 2
        # Two fragments share entry 1, as siblings below one remote parent do.
        self.entry = np.full(fragments, -1)
        self.entry[1:4] = [0, 1, 1]
        self.exit_fragment = np.append(0, 1 + np.sort(rng.choice(fragments - 1, 6, replace=False)))
        top = np.arange(fragments)
        for f in range(fragments):
            if self.parent[f] >= 0:
                top[f] = top[self.parent[f]]
        self.exit_entry = self.entry[top[self.exit_fragment]]
        self.rows = int(self.row[-1]) + padding
        assert (self.exit_entry >= 0).any() and (self.exit_entry < 0).any()

    def tables(self, chunk_size: int = 64):
        crossing = (self.exit_fragment, self.exit_entry, np.zeros(self.entries, int))
        return gdn.chunk_tables(self.row, self.parent, self.entry, *crossing, self.rows, chunk_size)

    def inputs(self, seed: int, keys: str, slow: bool) -> gdn.Inputs:
        rng = torch.Generator().manual_seed(seed)
        q, k = (torch.randn(self.rows, KEY_HEADS, KEY_DIM, generator=rng, dtype=torch.float64) for _ in range(2))
        if keys == "low rank":
            k = k[..., :2] @ torch.randn(2, KEY_DIM, generator=rng, dtype=torch.float64)
        v = torch.randn(self.rows, VALUE_HEADS, VALUE_DIM, generator=rng, dtype=torch.float64)
        g, beta = (torch.rand(self.rows, VALUE_HEADS, generator=rng, dtype=torch.float64) for _ in range(2))
        g = torch.log(0.97 + 0.0299 * g) if slow else -8.0 * g
        beta = beta * torch.tensor([1.0, 1.0, 1e-2, 1e-6], dtype=torch.float64)
        return gdn.Inputs(l2_normalise(q), l2_normalise(k), v, g, beta)

    def truth(self, inputs: gdn.Inputs, entry_states: torch.Tensor):
        """Outputs and exit states by the token recurrence."""
        q, k = repeat_heads(inputs.q, VALUE_HEADS), repeat_heads(inputs.k, VALUE_HEADS)
        out, last = [], []
        for f, parent in enumerate(self.parent):
            state = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=inputs.v.dtype)
            if parent >= 0:
                state = last[parent]
            elif self.entry[f] >= 0:
                state = entry_states[self.entry[f]]
            for t in range(self.row[f], self.row[f + 1]):
                state = token_step(state, k[t], inputs.v[t], inputs.g[t], inputs.beta[t])
                out.append((q[t][:, None] @ state)[:, 0] * KEY_DIM**-0.5)
            last.append(state)
        padding = [torch.zeros_like(out[0])] * (self.rows - len(out))
        return torch.stack(out + padding), torch.stack([last[f] for f in self.exit_fragment])


def leaves(tensors, dtype=torch.float64):
    return [x.detach().to(dtype).clone().requires_grad_() for x in tensors]


def run_kernel(inputs, entry_states, dout, dexit, tables):
    """Outputs, exit states rebuilt from their affine maps, gradients of the inputs, and entry cotangents."""
    stages = gdn.chunk_stages(inputs, tables)
    exits, transition = gdn.exit_summary(inputs, stages, tables)
    out = run_forward(inputs, stages, entry_states, tables)
    back = gdn.backward_stages(inputs, stages, dout, tables)
    dentry, back = gdn.begin_backward(inputs, stages, back, entry_states, tables)
    grads = gdn.backward(inputs, stages, back, entry_states, tables).gradients(lambda: dexit)
    return out, exits, transition, grads, dentry


def run_forward(inputs, stages, entry_states, tables):
    rest = gdn.forward(inputs, stages, tables)
    rest.run(0, None)
    rest.run(1, entry_states)
    return rest.outputs()


def case(seed, keys="random", slow=True):
    local = Local(seed)
    inputs = local.inputs(seed, keys, slow)
    rng = torch.Generator().manual_seed(seed + 1)
    state = (VALUE_HEADS, KEY_DIM, VALUE_DIM)
    entry_states = torch.randn(local.entries, *state, generator=rng, dtype=torch.float64)
    dexit = torch.randn(len(local.exit_fragment), *state, generator=rng, dtype=torch.float64)
    return local, inputs, entry_states, torch.randn(inputs.v.shape, generator=rng, dtype=torch.float64), dexit


def truth_of(local, inputs, entry_states, dout, dexit, dtype=torch.float64):
    *given, entry = leaves((*inputs, entry_states), dtype)
    out, exits = local.truth(gdn.Inputs(*given), entry)
    grads = torch.autograd.grad((out * dout).sum() + (exits * dexit).sum(), given, retain_graph=True)
    return out.detach(), exits.detach(), grads, torch.autograd.grad((out * dout).sum(), entry)[0]


@pytest.mark.parametrize("keys", ["random", "low rank"])
@pytest.mark.parametrize("slow", [True, False], ids=["slow decay", "fast decay"])
@pytest.mark.parametrize("chunk_size", [64, 20])
def test_against_token_recurrence(keys, slow, chunk_size):
    local, inputs, entry_states, dout, dexit = case(3, keys, slow)
    expected_out, expected_exits, expected_grads, expected_dentry = truth_of(local, inputs, entry_states, dout, dexit)
    out, exits, transition, grads, dentry = run_kernel(inputs, entry_states, dout, dexit, local.tables(chunk_size))
    through = local.exit_entry >= 0
    exits[through] += transition @ entry_states[local.exit_entry[through]]
    actual = (out, exits, *grads, dentry)
    errors = relative_errors(actual, (expected_out, expected_exits, *expected_grads, expected_dentry))
    assert max(errors) <= 1e-11, errors
    assert out[-1].abs().max() == 0 and all(x[-1].abs().max() == 0 for x in grads), "padding row"


def test_transition_is_the_adjoint_of_the_reverse_pass():
    # dH_entry = A^T dH_exit + C: the cotangent with one exit injected differs from C by exactly A^T of that exit.
    local, inputs, entry_states, dout, dexit = case(3, "low rank")
    tables = local.tables()
    *given, entry = leaves((*inputs, entry_states))
    _, exits = local.truth(gdn.Inputs(*given), entry)
    (expected,) = torch.autograd.grad((exits * dexit).sum(), entry)
    _, _, transition, _, _ = run_kernel(inputs, entry_states, dout, dexit, tables)
    through = torch.as_tensor(np.flatnonzero(local.exit_entry >= 0))
    actual = torch.zeros_like(entry_states)
    actual.index_add_(0, torch.as_tensor(local.exit_entry)[through], transition.mT @ dexit[through])
    assert relative_errors([actual], [expected])[0] <= 1e-12
    assert float(transition.abs().max()) > 0.1, "the keys must not let A vanish"


def test_float32_is_as_good_as_the_token_recurrence_in_float32():
    local, inputs, entry_states, dout, dexit = case(5)
    out, _, grads, dentry = truth_of(local, inputs, entry_states, dout, dexit)
    expected = (out, *grads, dentry)
    low = [x.float() for x in (entry_states, dout, dexit)]
    inputs = gdn.Inputs(*(x.float() for x in inputs))
    yardstick, _, grads, dentry = truth_of(local, inputs, *low, dtype=torch.float32)
    bound = relative_errors((yardstick, *grads, dentry), expected)
    out, _, _, grads, dentry = run_kernel(inputs, *low, local.tables())
    assert out.dtype == torch.float32
    errors = relative_errors((out, *grads, dentry), expected)
    # Both round every product once or twice; a chunk's solve adds at most a chunk's worth of roundings (2^-24 each).
    for error, allowed in zip(errors, bound, strict=True):
        assert error <= 4 * allowed + 64 * 2**-24, (errors, bound)


def test_blocks_and_steps_do_not_change_results(monkeypatch):
    local, inputs, entry_states, dout, dexit = case(3)
    whole = run_kernel(inputs, entry_states, dout, dexit, local.tables())
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(chunks, "MAX_STEP", 1)
    small = run_kernel(inputs, entry_states, dout, dexit, local.tables())
    errors = relative_errors((small[0], *small[3], small[4]), (whole[0], *whole[3], whole[4]))
    assert max(errors) <= 1e-13, errors


def test_scalar_closed_form():
    # k = 1, beta = 1/2, no decay: parent v = 4, 0 gives states 2, 1; children v = 2 | v = 6 give 1.5 | 3.5.
    tables = gdn.chunk_tables(
        np.array([0, 2, 3, 4]),
        np.array([-1, 0, 0]),
        np.full(3, -1),
        np.array([1, 2]),
        np.array([-1, -1]),
        np.empty(0, int),
        rows=4,
    )
    one = torch.ones(4, 1, 1, dtype=torch.float64)
    v = torch.tensor([4.0, 0, 2, 6], dtype=torch.float64).view(4, 1, 1)
    inputs = gdn.Inputs(one, one, v, 0 * one[..., 0], 0.5 * one[..., 0])
    stages = gdn.chunk_stages(inputs, tables)
    out = run_forward(inputs, stages, v.new_zeros(0, 1, 1, 1), tables)
    exits, transition = gdn.exit_summary(inputs, stages, tables)
    assert out.flatten().tolist() == [2, 1, 1.5, 3.5]
    assert exits.flatten().tolist() == [1.5, 3.5] and len(transition) == 0


def test_no_rows():
    empty = np.empty(0, np.int64)
    tables = gdn.chunk_tables(np.array([0]), empty, empty, empty, empty, empty, rows=1)
    inputs = gdn.Inputs(*(torch.ones(1, 2, 3) for _ in range(3)), torch.zeros(1, 2), torch.ones(1, 2))
    none = torch.zeros(0, 2, 3, 3)
    out, exits, transition, grads, dentry = run_kernel(inputs, none, torch.ones(1, 2, 3), none, tables)
    assert out.abs().max() == 0 and all(x.abs().max() == 0 for x in grads)
    assert (len(exits), len(transition), len(dentry)) == (0, 0, 0)


def test_short_segments_take_few_steps():
    # 3,000 leaves of 2 tokens below one token: steps follow the depth of the tree, not its width.
    leaves_ = 3000
    row = np.concatenate([[0, 1], 1 + 2 * np.arange(1, leaves_ + 1)])
    parent = np.concatenate([[-1], np.zeros(leaves_, np.int64)])
    none = np.empty(0, np.int64)
    tables = gdn.chunk_tables(row, parent, np.full(len(parent), -1), none, none, none, rows=int(row[-1]))
    assert len(tables.steps) == 1 + -(-leaves_ // chunks.MAX_STEP)
    assert tables.slots == 2 and tables.groups[0].width == chunks.MIN_WIDTH


def test_chunk_size_is_checked():
    none = np.empty(0, np.int64)
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        gdn.chunk_tables(np.array([0]), none, none, none, none, none, rows=1, chunk_size=0)
