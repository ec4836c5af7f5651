"""The endpoints of an emulated engine beyond completions and chats, and its OpenAPI document."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from services.emulator.audio import speech, speech_request, transcription_request
from services.emulator.errors import bad_value
from services.emulator.jobs import Job
from services.emulator.messages import count_tokens, message_request
from services.emulator.openai import ParsedRequest
from services.emulator.pooling import pooling_reply, pooling_requests
from services.emulator.prompts import prompt_of
from services.emulator.request_bodies import parsed
from services.emulator.tokens import VOCABULARY, text_of, token_text
from services.http.application import JSON, Call, Endpoint, while_client_stays
from services.http.headers import Headers
from services.http.paths import POOLING, SCORING

if TYPE_CHECKING:
    from services.emulator.app import Emulator

RESPONSE_PATH = re.compile(r"/v1/responses/(?P<id>[^/]+)(?P<cancel>/cancel)?")
POOLED = tuple(path.decode() for path in (*POOLING, *SCORING))
WAV: Headers = [(b"content-type", b"audio/wav")]


class OtherApis:
    """Serves responses, messages, pooled outputs and audio by the engine of an emulator."""

    def __init__(self, emulator: Emulator) -> None:
        """Serve with an emulator's engine."""
        self._emulator = emulator
        self.routes: Mapping[str, Mapping[str, Endpoint]] = {
            "/v1/responses": {"POST": self._respond},
            "/v1/messages": {"POST": self._message},
            "/v1/messages/count_tokens": {"POST": self._count},
            **{path: {"POST": partial(self._pool, path)} for path in POOLED},
            "/v1/audio/transcriptions": {"POST": self._transcribe},
            "/v1/audio/translations": {"POST": self._transcribe},
            "/v1/audio/speech": {"POST": self._speak},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/completions/render": {"POST": self._render},
            "/openapi.json": {"GET": self._document},
        }

    async def _respond(self, call: Call) -> None:
        emulator = self._emulator
        emulator.require_serving()
        data = await emulator.json_of(call)
        request = emulator.responses.request(data, _headers(call), emulator.served)
        emulator.driver.require_room(request)
        if request.extra.get("background"):
            await call.reply(200, JSON, _json(emulator.responses.begin(emulator.driver, request)))
        else:
            await emulator.serve(call, request)

    async def respond_by_id(self, response_id: str, call: Call) -> None:
        """Return a response as it is now."""
        await call.reply(200, JSON, _json(self._emulator.responses.find(response_id).body))

    async def cancel(self, response_id: str, call: Call) -> None:
        """End a response in the background."""
        await call.reply(200, JSON, _json(self._emulator.responses.cancel(response_id, self._emulator.driver)))

    async def _message(self, call: Call) -> None:
        emulator = self._emulator
        emulator.require_serving()
        request = message_request(await emulator.json_of(call), _headers(call), call.request_id, emulator.served)
        emulator.driver.require_room(request)
        await emulator.serve(call, request)

    async def _count(self, call: Call) -> None:
        await call.reply(200, JSON, _json({"input_tokens": count_tokens(await self._emulator.json_of(call))}))

    async def _pool(self, path: str, call: Call) -> None:
        emulator = self._emulator
        emulator.require_serving()
        data = await emulator.json_of(call)
        requests = pooling_requests(path, data, _headers(call), call.request_id, emulator.served)
        emulator.driver.require_room(requests[0])
        reply = partial(pooling_reply, path, data, requests)
        with emulator.admitted():
            await while_client_stays(self._compute(call, requests, reply, JSON), call.receive)

    async def _compute(self, call: Call, requests: list[ParsedRequest], reply: Any, kind: Headers) -> None:
        """Have the engine compute some requests; reply when all are done."""
        driver = self._emulator.driver
        jobs: list[Job] = []
        try:
            for request in requests:
                jobs.append(driver.submit(request))  # noqa: PERF401 - those before a refused one must be aborted
            for job in jobs:
                num_tokens = job.request.answer.num_tokens
                await job.more(partial(_all_ready, job, num_tokens))
            if all(job.num_ready == job.request.answer.num_tokens for job in jobs):
                await call.reply(200, kind, reply(int(time.time())))
        finally:
            for job in jobs:
                driver.abort(job)

    async def _transcribe(self, call: Call) -> None:
        emulator = self._emulator
        emulator.require_serving()
        data = await emulator.body_of(call, emulator.max_body_bytes)
        kind = call.header(b"content-type") or b""
        request = transcription_request(data, kind, _headers(call), call.request_id, emulator.served)
        emulator.driver.require_room(request)
        await emulator.serve(call, request)

    async def _speak(self, call: Call) -> None:
        emulator = self._emulator
        emulator.require_serving()
        request = speech_request(await emulator.json_of(call), _headers(call), call.request_id, emulator.served)
        with emulator.admitted():
            work = self._compute(call, [request], lambda _: speech(request), WAV)
            await while_client_stays(work, call.receive)

    async def _tokenize(self, call: Call) -> None:
        ids, wants_texts = prompt_of(await self._emulator.json_of(call))
        texts = [token_text(token) for token in ids] if wants_texts else None
        limit = self._emulator.served.max_model_len
        body = {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": texts}
        await call.reply(200, JSON, _json(body))

    async def _detokenize(self, call: Call) -> None:
        data = await self._emulator.json_of(call)
        ids = data.get("tokens") if isinstance(data, dict) else None
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < VOCABULARY for token in ids):
            raise bad_value("tokens must be a list of token ids.", "tokens")
        await call.reply(200, JSON, _json({"prompt": text_of(ids)}))

    async def _render(self, call: Call) -> None:
        """Return the tokens of a prompt, without an answer."""
        ids, _ = prompt_of(parsed(await self._emulator.body_of(call, self._emulator.max_body_bytes)))
        await call.reply(200, JSON, _json([{"request_id": f"cmpl-{call.request_id}", "token_ids": ids}]))

    async def _document(self, call: Call) -> None:
        paths: dict[str, Any] = {
            path: {method.lower(): {} for method in methods} for path, methods in self._emulator.routes.items()
        }
        paths |= {"/v1/responses/{response_id}": {"get": {}}, "/v1/responses/{response_id}/cancel": {"post": {}}}
        document = {"openapi": "3.1.0", "info": {"title": "FastAPI", "version": "0.1.0"}, "paths": paths}
        await call.reply(200, JSON, _json(document))

    def by_id(self, call: Call) -> Endpoint | None:
        """Find what serves a response by its id; None for other paths."""
        found = RESPONSE_PATH.fullmatch(call.scope["path"])
        if found is None or call.scope["method"] != ("POST" if found["cancel"] else "GET"):
            return None
        return partial(self.cancel if found["cancel"] else self.respond_by_id, found["id"])


def _all_ready(job: Job, num_tokens: int) -> bool:
    return job.num_ready < num_tokens


def _headers(call: Call) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
