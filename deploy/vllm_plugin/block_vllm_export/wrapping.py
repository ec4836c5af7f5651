"""Between vLLM's engine and whichever scheduler class it runs."""

from __future__ import annotations

import time
from functools import cache, wraps
from typing import Any

from .guard import Guard


def wrap_scheduler_choice(config_class: Any) -> None:
    """Have the configuration choose, instead of a scheduler class, the same one that shows its state."""
    choose = config_class.get_scheduler_cls
    if hasattr(choose, "__wrapped__"):
        return  # vLLM may load plug-ins more than once

    @wraps(choose)
    def get_scheduler_cls(self: Any) -> Any:
        return showing(choose(self))

    config_class.get_scheduler_cls = get_scheduler_cls


@cache
def showing(scheduler_class: Any) -> Any:
    """Derive from a scheduler class one that shows its state, and is the same in everything else."""

    class Showing(scheduler_class):  # type: ignore[misc]
        """A scheduler whose state is written to shared memory."""

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
            self.block_export("taken", scheduler_output)
            return outputs

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
            finished = super().finish_requests(*args, **kwargs)
            self.block_export("publish")
            return finished

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            self.block_export("close")
            return super().shutdown(*args, **kwargs)

    Showing.__name__ = scheduler_class.__name__
    Showing.__qualname__ = scheduler_class.__qualname__
    Showing.__module__ = scheduler_class.__module__
    return Showing
