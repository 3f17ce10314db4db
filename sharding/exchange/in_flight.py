"""An exchange that runs beside the computation: started early, waited for late, without stopping the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from cp_engine.sharding.exchange.waits import aside, waiting


class CudaSideStream:
    """A stream of high priority: its short kernels take the next free place on a card that a long kernel fills."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work`` beside the compute stream, after all that was asked of either so far.

        Returns:
            A function that makes the then current stream wait for it.
        """
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream), aside():
            work()
        return self.stream.record_event().wait


@cache
def side_stream(device: torch.device) -> CudaSideStream:
    """The one of a device."""
    return CudaSideStream(device)


class InFlight:
    """``work`` on the side stream, from where the caller's stream is now. Every rank must start its exchanges in one
    order. On a CPU the work is done at once."""

    def __init__(self, work: Callable[[], object], *inputs: torch.Tensor):
        device = next((x.device for x in inputs if x.device.type == "cuda"), None)
        self._wait: Callable[[], None] | None = None
        if device is None:
            self._result = work()
            return

        def keep_result() -> None:
            self._result = work()

        self._wait = side_stream(device).submit(keep_result)
        # What the side stream still reads must not be handed to someone else before the caller's stream has waited.
        # `record_stream` would keep it until the host sees that the device came here, which may be layers behind.
        self._inputs = inputs

    def wait(self):
        """The result, for the caller's stream, on which ``inputs`` were made. It must be called."""
        if self._wait is not None:
            results = self._result if isinstance(self._result, tuple) else (self._result,)
            device = results[0].device
            with waiting(device):
                self._wait()
            for x in results:
                x.record_stream(torch.cuda.current_stream(device))
            self._wait, self._inputs = None, ()
        return self._result
