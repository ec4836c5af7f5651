"""Python imports this first in processes under libfaketime, which are not this package's.

Python sleeps until a moment of the monotonic clock (`clock_nanosleep`). With FAKETIME_DONT_FAKE_MONOTONIC, libfaketime
0.9.10 refuses that: `time.sleep` raises "Invalid argument".
"""

import select
import time


def sleep(seconds: float) -> None:
    """Wait by another system call."""
    select.select((), (), (), seconds)


setattr(time, "sleep", sleep)  # noqa: B010 - a stand-in with a narrower type
