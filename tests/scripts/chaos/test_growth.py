"""Growth of processes, fitted to their sizes."""

from __future__ import annotations

import os

import pytest

from scripts.chaos.growth import MEBIBYTE, GrowthWatch, ProcessSize, fitted_growth, growth_problems, size_of


def sizes(*, grows_by: float = 0.0, files: int = 0, pid: int = 7, num: int = 60) -> list[ProcessSize]:
    """Return sizes over time: 100 MiB, and linear growth over the whole of it."""
    return [
        ProcessSize(
            at_s=10.0 * place,
            pid=pid,
            resident_bytes=round(100 * MEBIBYTE * (1 + grows_by * place / (num - 1))),
            num_files=20 + files * place // (num - 1),
        )
        for place in range(num)
    ]


def test_a_line_is_fitted() -> None:
    """Growth over the size at the start."""
    found = fitted_growth("one", sizes(grows_by=0.05, files=10))
    assert found.memory_ratio == pytest.approx(0.05, rel=0.01)
    assert found.more_files == pytest.approx(10, rel=0.1)
    assert found.for_s == 590.0


def test_noise_is_no_growth() -> None:
    """A line through sizes that go up and down is flat."""
    noisy = [
        ProcessSize(at_s=one.at_s, pid=7, resident_bytes=one.resident_bytes + MEBIBYTE * (place % 5), num_files=20)
        for place, one in enumerate(sizes())
    ]
    assert abs(fitted_growth("one", noisy).memory_ratio) < 0.005


def test_only_processes_that_lived_all_the_time_are_judged() -> None:
    """A process that was restarted has just warmed up."""
    watch = GrowthWatch(start_s=0.0)
    watch.sizes = {
        "steady": sizes(grows_by=0.3),
        "restarted": [*sizes(num=30), *sizes(pid=8)[30:]],
        "new": sizes()[-4:],
    }
    (found,) = watch.fitted()
    assert found.part == "steady"
    assert found.memory_ratio == pytest.approx(0.2 / 1.1, rel=0.05)  # of the last two thirds
    assert watch.resident_bytes == pytest.approx(330 * MEBIBYTE, rel=0.01)


def test_sizes_are_kept_for_the_report() -> None:
    """About one a minute."""
    watch = GrowthWatch(start_s=-10.0)
    watch.sizes = {"one": sizes(num=25)}
    assert watch.series() == {"one": [(10, 7, 100.0, 20), (130, 7, 100.0, 20), (250, 7, 100.0, 20)]}


def test_growth_beyond_the_limits_is_a_problem() -> None:
    """Memory in long runs alone, open files always."""
    grown = [fitted_growth("fat", sizes(grows_by=0.05)), fitted_growth("leaking", sizes(files=40))]
    assert growth_problems(grown, 100.0) == ["leaking: +40 open files in 590 s"]
    assert growth_problems(grown, 1800.0) == ["leaking: +40 open files in 590 s", "fat: memory grew by 5.0% in 590 s"]
    assert growth_problems([fitted_growth("flat", sizes(grows_by=0.015, files=5))], 1800.0) == []


def test_the_size_of_a_process() -> None:
    """Of this one: memory and open files."""
    before = size_of(os.getpid())
    held = bytearray(os.urandom(1 << 16) * 512)
    reader, writer = os.pipe()
    after = size_of(os.getpid())
    os.close(reader)
    os.close(writer)
    assert after.num_files == before.num_files + 2
    assert after.resident_bytes > before.resident_bytes + len(held) // 2
