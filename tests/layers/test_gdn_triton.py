"""The Gated DeltaNet layer on the Triton backend: in the interpreter against every rollout alone, and by the bounds of
the GPU tests.

The interpreter has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

import pytest

from tests.in_interpreter import pass_in_the_interpreter


@pytest.mark.parametrize("cases", ["interpreted_gdn", "interpreted_gdn_bounds"])
def test_in_the_interpreter(cases):
    pytest.importorskip("fla")
    pass_in_the_interpreter(f"tests/layers/{cases}.py")
