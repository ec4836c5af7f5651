"""A number of instances by time of day; instances are started a cold start before they are due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.provisioning.limits import ScalingObjectives
from scheduler.provisioning.pool_state import PoolState, Rule, ScalingTarget

DAY_S = 86400.0
EPOCH_WEEKDAY = 3  # 1970 began on a Thursday
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
LEAD_S = 30.0  # beyond the cold start


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledPeriod:
    """A number of instances from one time of day to another, in UTC, on some or all weekdays."""

    from_s: float
    until_s: float
    num: int
    weekdays: frozenset[int] = frozenset(range(7))

    def includes(self, unix_s: float) -> bool:
        """Return whether a time is within; a period past midnight belongs to the weekday on which it starts."""
        day, time_s = divmod(unix_s, DAY_S)
        weekday = (int(day) + EPOCH_WEEKDAY) % 7
        if self.from_s < self.until_s:
            return self.from_s <= time_s < self.until_s and weekday in self.weekdays
        if time_s >= self.from_s:
            return weekday in self.weekdays
        return time_s < self.until_s and (weekday - 1) % 7 in self.weekdays


def parse_schedule(text: str) -> tuple[ScheduledPeriod, ...]:
    """Parse a schedule like `mon-fri 07:30-19:00=8; 00:00-06:00=2`."""
    periods = tuple(_period(part.strip()) for part in text.split(";") if part.strip())
    if not periods:
        raise ValueError("schedule: is empty")
    return periods


def _period(text: str) -> ScheduledPeriod:
    message = f"schedule: {text!r} must be like 'mon-fri 07:30-19:00=8'"
    when, equals, number = text.rpartition("=")
    *days, hours = when.split() or [""]
    start, dash, end = hours.partition("-")
    if not (equals and dash and number.strip().isdigit() and len(days) <= 1):
        raise ValueError(message)
    try:
        weekdays = _weekdays(days[0]) if days else frozenset(range(7))
        return ScheduledPeriod(from_s=_time(start), until_s=_time(end), num=int(number), weekdays=weekdays)
    except ValueError:
        raise ValueError(message) from None


def _weekdays(text: str) -> frozenset[int]:
    first, dash, last = text.lower().partition("-")
    start = WEEKDAYS.index(first)
    if not dash:
        return frozenset([start])
    end = WEEKDAYS.index(last)
    return frozenset((start + step) % 7 for step in range((end - start) % 7 + 1))


def _time(text: str) -> float:
    hours, _, minutes = text.partition(":")
    if not (hours.isdigit() and minutes.isdigit() and int(hours) <= 24 and int(minutes) < 60):
        raise ValueError(text)
    return (int(hours) * 60 + int(minutes)) * 60.0 % DAY_S


def schedule(objectives: ScalingObjectives, periods: Sequence[ScheduledPeriod]) -> Rule:
    """Return a rule that wants the highest number that is scheduled until a cold start from now."""

    def num_at(unix_s: float) -> int:
        return max((period.num for period in periods if period.includes(unix_s)), default=0)

    def rule(state: PoolState) -> ScalingTarget:
        lead_s = min(objectives.horizon_s, state.cold_start_s + LEAD_S)
        at_s = sorted({state.unix_s, state.unix_s + lead_s, *_starts(periods, state.unix_s, lead_s)})
        num = max(num_at(time_s) for time_s in at_s)
        return ScalingTarget(
            num_wanted=num,
            num_enough=num,
            why=f"{num} instances are scheduled within the next {lead_s:.0f} s",
            numbers={"scheduled_instances": float(num), "cold_start_s": state.cold_start_s},
        )

    return rule


def _starts(periods: Sequence[ScheduledPeriod], unix_s: float, lead_s: float) -> list[float]:
    """Return the starts of periods within the lead time."""
    day_s = unix_s // DAY_S * DAY_S
    starts = [day_s + days * DAY_S + period.from_s for period in periods for days in range(int(lead_s // DAY_S) + 2)]
    return [start_s for start_s in starts if unix_s <= start_s <= unix_s + lead_s]
