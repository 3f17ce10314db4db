"""An exchange that runs beside the computation: started early, waited for late, without stopping the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from cp_engine.sharding.exchange.waits import aside, waiting


class InFlight:
    """``work`` on a stream of its own, from where the caller's stream is now. Every rank must start its exchanges in
    one order. On a CPU the work is done at once."""

    def __init__(self, work: Callable[[], object], *inputs: torch.Tensor):
        device = next((x.device for x in inputs if x.device.type == "cuda"), None)
        self._done = None
        if device is None:
            self._result = work()
            return
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), aside():
            self._result = work()
            self._done = stream.record_event()
        # What the side stream still reads must not be handed to someone else.
        for x in inputs:
            x.record_stream(stream)

    def wait(self):
        """The result, for the caller's stream."""
        if self._done is not None:
            results = self._result if isinstance(self._result, tuple) else (self._result,)
            device = results[0].device
            with waiting(device):
                torch.cuda.current_stream(device).wait_event(self._done)
            for x in results:
                x.record_stream(torch.cuda.current_stream(device))
            self._done = None
        return self._result


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
