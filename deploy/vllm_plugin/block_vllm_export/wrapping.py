"""Wraps the scheduler class that vLLM's engine runs, whichever it is."""

from __future__ import annotations

import time
from functools import cache, wraps
from typing import Any

from .guard import Guard


def wrap_scheduler_choice(config_class: Any) -> None:
    """Make the configuration return, for each scheduler class, a derived one that exports its state."""
    choose = config_class.get_scheduler_cls
    if hasattr(choose, "__wrapped__"):
        return  # vLLM may load plug-ins more than once

    @wraps(choose)
    def get_scheduler_cls(self: Any) -> Any:
        return exporting(choose(self))

    config_class.get_scheduler_cls = get_scheduler_cls


@cache
def exporting(scheduler_class: Any) -> Any:
    """Derive a scheduler class that exports its state, and is unchanged otherwise."""

    class Exporting(scheduler_class):  # type: ignore[misc]
        """A scheduler whose state is exported to shared memory."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.block_export = Guard(self)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            start_s = time.monotonic()
            output = super().schedule(*args, **kwargs)
            self.block_export("planned", output, start_s)
            return output

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = super().update_from_output(scheduler_output, *args, **kwargs)
            self.block_export("retired", scheduler_output, *args[:1])
            return outputs

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            finished = super().finish_requests(*args, **kwargs)
            self.block_export("publish")
            return finished

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            self.block_export("close")
            return super().shutdown(*args, **kwargs)

    Exporting.__name__ = scheduler_class.__name__
    Exporting.__qualname__ = scheduler_class.__qualname__
    Exporting.__module__ = scheduler_class.__module__
    return Exporting
