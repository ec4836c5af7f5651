"""Prompts in tokens: their size, and the names of their blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.prefix.kv_block_hash import SEED, kv_block_hashes
from services.http.openai_body import MAX_TOKEN_IDS, read_body
from services.http.prompt_tokens import LONG_BYTES, MAX_BYTES, PromptSizes, PromptTokens
from tests.services.gateway.stubs import completes, scene
from tests.services.waiting import run

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's tokenizer.json: one token a word, after one at the start of each prompt."""
    vocabulary = {"<s>": 0, "[UNK]": 1, **{f"w{number}": number + 2 for number in range(100)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - no secret
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def read(prompts: PromptTokens, *, chat: bool = False, **body: Any) -> tuple[int, list[bytes]]:
    """Read a prompt from a client's body."""
    return prompts.read(read_body(json.dumps(body).encode(), chat=chat))


def words(numbers: list[int]) -> tuple[str, list[int]]:
    """A prompt as text, and its token ids."""
    return " ".join(f"w{number}" for number in numbers), [0, *(number + 2 for number in numbers)]


def test_a_text_is_tokenised(tokenizer: str) -> None:
    """Its size is exact and its blocks have the engine's names; several prompts have only a size.

    So it is of chats, where there is no chat template.
    """
    prompts = PromptTokens(PromptSizes(4.0), tokenizer=tokenizer, seed=SEED)
    text, ids = words([number % 100 for number in range(50)])
    assert read(prompts, prompt=text) == (51, kv_block_hashes(ids, 16))
    assert len(kv_block_hashes(ids, 16)) == 3
    assert read(prompts, prompt=[text]) == (51, kv_block_hashes(ids, 16))
    assert read(prompts, prompt=[text, text])[1] == []
    size, names = read(prompts, chat=True, messages=[{"role": "user", "content": text}])
    assert (51 <= size <= 60, names) == (True, [])


def test_a_chat_is_rendered_and_tokenised(tokenizer: str, tmp_path: Path) -> None:
    """The template is beside the tokenizer, or named; it contains the special tokens."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(Path(tokenizer).read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>"}))
    text, ids = words(list(range(40)))
    asked = {"messages": [{"role": "user", "content": text}]}
    as_sent = [0, 1, *ids[1:], 1]  # <s>, the role, the text, the next role
    beside = PromptTokens(PromptSizes(4.0), tokenizer=str(folder / "tokenizer.json"), seed=SEED)
    assert read(beside, chat=True, **asked) == (43, kv_block_hashes(as_sent, 16))
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }} {{ bos_token }}")
    mine = PromptTokens(
        PromptSizes(4.0),
        tokenizer=str(folder / "tokenizer.json"),
        chat_template=str(tmp_path / "mine.jinja"),
        seed=SEED,
    )
    assert read(mine, chat=True, **asked) == (41, kv_block_hashes([*ids[1:], 1], 16))
    pictures = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert read(beside, chat=True, messages=pictures)[1] == []
    (tmp_path / "broken.jinja").write_text("{{ raise_exception('no') }}")
    broken = PromptTokens(PromptSizes(4.0), tokenizer=tokenizer, chat_template=str(tmp_path / "broken.jinja"))
    size, names = read(broken, chat=True, **asked)
    assert (41 <= size <= 50, names) == (True, [])


TEMPLATE = "{{ bos_token }} {% for message in messages %}<|{{ message.role }}|> {{ message.content }} {% endfor %}<|assistant|>"


def test_the_start_of_a_long_text_is_named(tokenizer: str) -> None:
    """The size of the rest is estimated from it; no name contains a token that the cut made."""
    prompts = PromptTokens(PromptSizes(4.0), tokenizer=tokenizer, seed=SEED)
    text, ids = words([number % 90 + 10 for number in range(30_000)])
    assert len(text) > 2 * MAX_BYTES
    size, names = read(prompts, prompt=text)
    assert size == pytest.approx(len(ids), rel=0.01)
    assert 100 < len(names) <= MAX_TOKEN_IDS // 16
    assert names == kv_block_hashes(ids, 16)[: len(names)]


def test_token_ids_need_no_tokenizer() -> None:
    """Blocks are named with any ids that JSON allows; several prompts have only a size."""
    prompts = PromptTokens(PromptSizes(4.0), block_tokens=4, seed="0")
    assert read(prompts, prompt=[1, 2, 3, 4, 5]) == (5, kv_block_hashes([1, 2, 3, 4], 4, "0"))
    assert read(prompts, prompt=[[1, 2, 3, 4]]) == (4, kv_block_hashes([1, 2, 3, 4], 4, "0"))
    assert read(prompts, prompt=[[1, 2, 3, 4], [5, 6]]) == (6, [])
    assert len(read(prompts, prompt=[10**30, -1, 0, 2**64])[1]) == 1
    assert read(prompts, prompt=[7] * 20_000)[0] == 20_000
    assert len(read(prompts, prompt=[7] * 20_000)[1]) == MAX_TOKEN_IDS // 4
    assert read(prompts, prompt="w1 w2 w3 w4")[1] == []


def test_schedulers_receive_the_names(tokenizer: str) -> None:
    """With each request of any length, and the size of a block."""
    text, ids = words(list(range(40)))
    long_text, long_ids = words(list(range(100)) * 10)
    assert len(long_text) > LONG_BYTES

    async def test() -> None:
        async with scene(completes, tokenizer=tokenizer, block_tokens=8) as here:
            for prompt in (text, ids):
                assert (await here.post(prompt=prompt)).status_code == 200
            for asked in here.scheduler.asked:
                assert list(asked.request.prefix_hashes) == kv_block_hashes(ids, 8)
                assert (asked.request.prefix_block_tokens, asked.request.prompt_tokens) == (8, 41)
            assert len(here.scheduler.asked) == 2
            assert (await here.post(prompt=long_text)).status_code == 200
            assert list(here.scheduler.asked[-1].request.prefix_hashes) == kv_block_hashes(long_ids, 8)

    run(test)


def test_a_bad_tokenizer_is_refused(tokenizer: str, tmp_path: Path) -> None:
    """At the start, naming the setting."""
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="chat_template: .*nowhere.* cannot be read"):
        PromptTokens(PromptSizes(4.0), tokenizer=tokenizer, chat_template=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="chat_template: has no effect without a tokenizer"):
        PromptTokens(PromptSizes(4.0), chat_template="some.jinja")
    for bad in (path, tmp_path / "missing.json"):
        with pytest.raises(ValueError, match=r"tokenizer: .*json cannot be read"):
            PromptTokens(PromptSizes(4.0), tokenizer=str(bad))
