"""Requests with several responses, as vLLM serves them: a request of the engine each, and one reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from services.emulator.driver import Driver
from services.emulator.errors import DONE
from services.emulator.jobs import Job
from services.emulator.openai import ParsedRequest
from services.emulator.ranks import RankDrivers
from services.emulator.replies import CompletionReply
from services.http.application import JSON, Call
from services.http.headers import Headers


class SeveralResponses:
    """Serves one request that has several choices."""

    def __init__(self, request: ParsedRequest, driver: Driver | RankDrivers, events: Headers) -> None:
        """Serve by the engine of a driver; `events` are the headers of a stream."""
        self._request = request
        self._driver = driver
        self._headers = events
        created_s = int(time.time())
        self._replies = [
            CompletionReply(choice, created_s, index=index) for index, choice in enumerate(request.choices)
        ]

    async def serve(self, call: Call, arrived_s: float | None) -> None:
        """Add all requests to the engine, and reply; those that are left when the client leaves are aborted."""
        jobs: list[Job] = []
        try:
            for choice in self._request.choices:
                jobs.append(self._driver.submit(choice, arrived_s=arrived_s))  # noqa: PERF401 - aborted where one fails
            await (self._stream(call, jobs) if self._request.stream else self._reply_whole(call, jobs))
        finally:
            for job in jobs:
                self._driver.abort(job)

    async def _reply_whole(self, call: Call, jobs: Sequence[Job]) -> None:
        for job in jobs:
            num_tokens = job.request.answer.num_tokens
            job.num_sent = job.num_ready  # of which there may be some, as others have been waited for
            if job.num_ready < num_tokens:
                await job.more(partial(_lacks_tokens, job))
        if all(job.num_ready == job.request.answer.num_tokens for job in jobs):
            choices = [reply.choice() for reply in self._replies]
            counts = self._num_prompt_tokens(), sum(job.num_ready for job in jobs)
            await call.reply(200, JSON, self._replies[0].whole_of(choices, counts, jobs[0].cached_tokens))

    async def _stream(self, call: Call, jobs: Sequence[Job]) -> None:
        """Send the events of all responses in the order in which their tokens are ready."""
        await call.start(200, self._headers)
        pieces: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(index, job, pieces)) for index, job in enumerate(jobs)]
        num_open, has_begun = len(tasks), False
        try:
            while num_open:
                piece = await pieces.get()
                if isinstance(piece, BaseException):
                    raise piece
                if piece is None:
                    num_open -= 1
                    continue
                first = b"" if has_begun else b"".join(reply.first() for reply in self._replies)
                has_begun = True
                await call.write(first + piece)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if all(job.num_sent == job.request.answer.num_tokens for job in jobs):
            counts = self._num_prompt_tokens(), sum(job.num_sent for job in jobs)
            usage = self._replies[0].usage_event(counts, jobs[0].cached_tokens) if self._request.include_usage else b""
            await call.end(usage + DONE)

    async def _follow(self, index: int, job: Job, pieces: asyncio.Queue[bytes | BaseException | None]) -> None:
        """Queue the events of one response as its tokens become ready, and its failure or end."""
        num_tokens = job.request.answer.num_tokens
        try:
            while job.num_sent < num_tokens and await job.more():
                pieces.put_nowait(self._replies[index].events(job.num_sent, job.num_ready))
                job.num_sent = job.num_ready
        except Exception as error:  # noqa: BLE001 - the task that writes raises it
            pieces.put_nowait(error)
        else:
            pieces.put_nowait(None)

    def _num_prompt_tokens(self) -> int:
        """Count each prompt once, as vLLM does."""
        choices = self._request.choices
        return sum(len(one.prompt) for one in choices[:: len(choices) // self._request.num_prompts])


def _lacks_tokens(job: Job) -> bool:
    return job.num_ready < job.request.answer.num_tokens
