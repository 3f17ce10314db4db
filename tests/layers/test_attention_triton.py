"""Tree attention over ranks on the Triton backend, in the interpreter.

It has to be switched on before Triton is imported, so these cases run in a process of their own.
"""

from tests.in_interpreter import pass_in_the_interpreter


def test_in_the_interpreter():
    pass_in_the_interpreter("tests/layers/interpreted_attention.py")
