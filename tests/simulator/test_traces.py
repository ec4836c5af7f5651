"""Published trace formats, and errors in traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simulator.traces import trace_from

DATA = Path(os.environ.get("BLOCK_DATA", Path(__file__).parents[3] / "shared" / "data"))

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}\n'
GOOD = (
    (AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,3180,8\n", 4808, 10, 0.5),
    (MOONCAKE + MOONCAKE.replace("500", "1000"), 700, 5, 0.5),
    ("Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,GPT,472,18,490\n5.5,GPT,9,7,16\n", 472, 18, 0.5),
    ("num_prefill_tokens,num_decode_tokens,pd_ratio\n26,5,0.19\n72,693,9.6\n", 26, 5, 0.0),
    (
        ('{"input_toks": 3, "output_toks": 5, "arrival_time_ns": 500000000, "input_tok_ids": [1, 2, 3]}\n'
        '{"input_toks": 2, "output_toks": 1, "arrival_time_ns": 1000000000}\n'), 3, 5, 0.5,
    ),
    ("prompt_tokens,output_tokens,arrival_s\n3,4,1\n7,2,1.5\n", 3, 4, 0.5),
    ('[{"prompt_tokens": 3, "output_tokens": 4}, {"prompt_tokens": [1, 2], "output_tokens": 4}]', 3, 4, 0.0),
)  # fmt: skip


def written(folder: Path, text: str) -> str:
    """Write a trace to a file with the ending of its format."""
    path = folder / ("trace.jsonl" if text[:1] in "[{" and text else "trace.csv")
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("text", "prompt_tokens", "output_tokens", "gap_s"), GOOD)
def test_formats(text: str, prompt_tokens: int, output_tokens: int, gap_s: float, tmp_path: Path) -> None:
    """Each format is recognised by its columns."""
    trace = trace_from(written(tmp_path, text))
    first, second = trace.requests
    assert (first.prompt_tokens, first.output_tokens) == (prompt_tokens, output_tokens)
    assert second.arrival_s - first.arrival_s == pytest.approx(gap_s)
    assert trace.has_arrivals == ("num_prefill" not in text)


def test_mooncake_blocks_have_512_tokens(tmp_path: Path) -> None:
    """Mooncake's hashes stand for blocks of 512 tokens; the last block may be partial."""
    trace = trace_from(written(tmp_path, MOONCAKE))
    assert (trace.requests[0].prefix_hashes, trace.block_tokens) == ((3, 4), 512)


BAD = (
    ("", "has no requests"),
    ("a,b\n1,2\n", "row 2: has neither prompt_tokens nor the columns of a known trace, but a, b"),
    (AZURE, "has no requests"),
    (AZURE + "yesterday,1,2\n", "row 2: TIMESTAMP: must be a time from 0 on, not 'yesterday'"),
    (AZURE + "2023-11-16 18:17:04,1,2\n2023-11-16 18:17:05,0,2\n", "row 3: ContextTokens: must be a whole number of"),
    (AZURE + "2023-11-16 18:17:04,1.5,2\n", "row 2: ContextTokens: must be a whole number"),
    (AZURE + "2023-11-16 18:17:04,1,-2\n", "row 2: GeneratedTokens: must be a whole number"),
    (AZURE + "2023-11-16 18:17:04,1\n", "row 2: GeneratedTokens: is missing"),
    (AZURE + "2023-11-16 18:17:04,99999999,1\n", "row 2: ContextTokens: must be a whole number"),
    (MOONCAKE + MOONCAKE.replace("[3, 4]", '"x"'), "row 2: hash_ids: must be a list of whole numbers, not 'x'"),
    (MOONCAKE + MOONCAKE.replace("500", "NaN"), "row 2: timestamp: must be a time from 0 on, not 'nan'"),
    (MOONCAKE + MOONCAKE.replace("500", "-1"), "row 2: timestamp: must be a time from 0 on"),
    (MOONCAKE + MOONCAKE.replace("700", "7.5"), "row 2: input_length: must be a whole number"),
    (MOONCAKE + MOONCAKE.replace("700", "true"), "row 2: input_length: must be a whole number"),
    (MOONCAKE + "{", "row 2: is not JSON"),
    (MOONCAKE + "7\n", "row 2: is not an object"),
    ("Timestamp,Request tokens,Response tokens\n5,472,0\n", "row 2: Response tokens: must be a whole number"),
    ("prompt_tokens,output_tokens\n3,x\n", "requests[0].output_tokens: "),
    ("prompt_tokens\n3\n", "requests[0].output_tokens: is missing"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_traces(text: str, message: str, tmp_path: Path) -> None:
    """The error names the row and the column of a bad cell, in one line."""
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match="trace") as refused:
        trace_from(path)
    assert str(refused.value).startswith(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unreadable_files(tmp_path: Path) -> None:
    """A folder and a binary file are refused."""
    for path in (tmp_path, tmp_path / "bytes.csv"):
        if path != tmp_path:
            path.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match=str(path)):
            trace_from(str(path))


@pytest.mark.skipif(not DATA.is_dir(), reason="the public data are not installed; BLOCK_DATA names their folder")
def test_real_traces() -> None:
    """The published files are read in full."""
    sizes = {
        "traces/azure2023_code_first_half.csv": 4409,
        "traces/mooncake_conversation_0-30min.jsonl": 5719,
        "lengths/block_sharegpt_v3_58k_lens.csv": 58000,
    }
    for name, size in sizes.items():
        trace = trace_from(str(DATA / name))
        assert len(trace.requests) == size
        times = [request.arrival_s for request in trace.requests]
        assert times == sorted(times)
