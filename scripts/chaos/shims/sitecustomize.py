"""Replace `time.sleep` in processes under libfaketime, whose `PYTHONPATH` has this folder.

Python sleeps until a time of the monotonic clock (`clock_nanosleep`). libfaketime 0.9.10 refuses that with
FAKETIME_DONT_FAKE_MONOTONIC: `time.sleep` raises "Invalid argument".
"""

import select
import time


def sleep(seconds: float) -> None:
    """Wait by `select`."""
    select.select((), (), (), seconds)


setattr(time, "sleep", sleep)  # noqa: B010 - a stand-in with a narrower type
