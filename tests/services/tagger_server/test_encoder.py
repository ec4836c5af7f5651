"""An encoder from the command line to the service; and hostile prompts for each estimator through the service."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from length_tagger import TAGGERS, chained
from length_tagger.estimate import MAX_SPREAD, MAX_TOKENS
from protos.block.v1 import common_pb2, tagger_pb2, tagger_pb2_grpc
from services.rpc.server import ServerSettings, serving
from services.tagger_server.batches import SMALL, Batches
from services.tagger_server.service import TaggerService
from services.tagger_server.settings import ENCODER, EncoderSettings
from tests.length_tagger.test_learning import HOSTILE
from tests.services.cli.running import answer, block
from tests.services.tagger_server.test_learning import data
from tests.services.tagger_server.test_serving import outcomes, process, run, tag_request

PATIENCE_S = 60.0
EPOCHS = 6


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder and its tokenizer in a folder as Hugging Face has them."""
    torch = pytest.importorskip("torch", reason="needs the extra `tagger`")
    transformers = pytest.importorskip("transformers", reason="needs the extra `tagger`")
    from length_tagger.roberta_training import tokenizer_from

    torch.set_num_threads(1)  # sums come out the same however busy the machine is
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("published")
    words = (f"{task} of the kings of country {number}" for task in ("List every", "Name one") for number in range(50))
    tokenizer = tokenizer_from(words, 300)
    named = {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    config = transformers.RobertaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=34, pad_token_id=0,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(folder)
    return folder


def test_an_encoder_is_trained_resumed_evaluated_and_served(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed training equals an uninterrupted one; it beats the median, and its tags arrive over the wire."""
    from length_tagger import roberta_training

    file = data(tmp_path)

    def train(folder: Path, *more: str) -> tuple[str, ...]:
        flags = {"--checkpoint": published, "--epochs": EPOCHS, "--patience": EPOCHS, "--batch": 16, "--rate": 5e-3}
        given = [str(one) for pair in {**flags, "--hide": 0.0}.items() for one in pair]
        return ("tagger", "train", "roberta", file, "-o", str(folder), *given, *more)

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    made = answer(*train(whole))
    assert (made["num_prompts"], made["epochs_done"]) == (200, EPOCHS)
    write = roberta_training._write_state
    passes = []

    def interrupted(*given: Any) -> None:
        write(*given)
        passes.append(given)
        if len(passes) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(roberta_training, "_write_state", interrupted)
        assert block(*train(stopped)).returncode != 0
    assert json.loads((stopped / "training.json").read_text())["done"] == 2
    assert not (stopped / "block.json").exists()
    assert answer(*train(stopped, "--resume"))["validation_log_error"] == made["validation_log_error"]
    assert (whole / "model.safetensors").read_bytes() == (stopped / "model.safetensors").read_bytes()

    results = answer("tagger", "evaluate", file, "--encoder", str(whole), "--errors", str(tmp_path / "errors"))[
        "results"
    ]
    values = {one["name"]: one["value"] for one in results}
    assert values["roberta.all.mae"] < 0.6 * values["median.all.mae"]
    lines = (tmp_path / "errors" / "roberta-chat.csv").read_text().splitlines()
    assert lines[0] == "output_tokens,median_tokens,spread"
    assert len(lines) == 1 + next(one["n"] for one in results if one["name"] == "roberta.chat.mae")

    async def ask(port: int) -> list[common_pb2.Tag]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = tagger_pb2_grpc.LengthTaggerStub(channel)
            prompts = (b"List every of the kings of country 7", b"Name one of the kings of country 7")
            return [(await stub.Tag(tag_request(prompt, model="m"), timeout=PATIENCE_S)).tag for prompt in prompts]

    flags = ("--estimator", "roberta,constant", "--encoder", str(whole), "--encoder-deadline-s", str(PATIENCE_S))
    with process(*flags) as (_, line):
        long, short = asyncio.run(ask(line["port"]))
    assert (long.estimator, short.estimator) == (ENCODER, ENCODER)
    assert long.median_tokens > 3 * short.median_tokens


@asynccontextmanager
async def serving_one(estimator: str) -> AsyncIterator[Any]:
    """A tagger with one estimator and the package's own models, and a constant as the last one."""
    registry = CollectorRegistry()
    batches = None
    if estimator == ENCODER:
        pytest.importorskip("onnxruntime", reason="needs the extra `encoder`")
        loaded = EncoderSettings(folder=SMALL, deadline_s=PATIENCE_S).loaded()
        batches = Batches(loaded, registry, deadline_s=PATIENCE_S)
    order = dict.fromkeys((estimator, "constant"))
    service = TaggerService(chained(order), registry, batches)
    register = partial(tagger_pb2_grpc.add_LengthTaggerServicer_to_server, service)
    async with (
        serving(ServerSettings(), [register], registry) as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.port}", options=[("grpc.max_send_message_length", -1)]) as channel,
    ):
        yield tagger_pb2_grpc.LengthTaggerStub(channel)


def require_bounded(tag: common_pb2.Tag) -> None:
    """A tag that any forecast can use."""
    assert math.isfinite(tag.median_tokens)
    assert 1 <= tag.median_tokens <= MAX_TOKENS
    assert math.isfinite(tag.spread)
    assert 0 <= tag.spread <= MAX_SPREAD
    assert 0 <= tag.confidence <= 1


@pytest.mark.parametrize("estimator", TAGGERS)
def test_hostile_prompts_get_a_bounded_tag_of_each_estimator(estimator: str) -> None:
    """Empty, enormous, repetitive, in any script, or not text at all: before and after outcomes, tags are finite."""
    prompts = [prompt.encode("utf-8", "surrogatepass") for prompt in HOSTILE]
    prompts += [b"\xff\xfe" * 1000, b"\x80", bytes(range(256)) * 40, b"ab " * 5 * 2**20, "\u202e\u0301".encode() * 9000]
    fixed = {"max_tokens": 9, "ignore_eos": True} if estimator == "client" else {}

    async def test() -> None:
        async with serving_one(estimator) as stub:
            for prompt in prompts:
                first = (await stub.Tag(tag_request(prompt, model="m", **fixed))).tag
                require_bounded(first)
                if prompt and estimator in ("linear", ENCODER, "client"):
                    assert first.estimator == estimator
                for length in (1, 2_000_000_000):
                    await stub.Observe(outcomes(length, model="m", tag=first))
                again = (await stub.Tag(tag_request(prompt, model="m", **fixed))).tag
                require_bounded(again)
                if prompt and estimator == "cached":
                    assert again.estimator == "cached"
            await stub.Observe(tagger_pb2.ObserveRequest(outcomes=[common_pb2.Outcome()] * 9))
            last = (await stub.Tag(tag_request(b"Hello", model="m", **fixed))).tag
            assert last.estimator == ("constant" if estimator == "cached" else estimator)

    run(test)
