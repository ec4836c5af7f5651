"""`block bench`, run as a command."""

from __future__ import annotations

import asyncio
import csv
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services.cli.running import answer, block, refusal
from tests.services.gateway.stubs import DONE, Answer, Call, Engine, event
from tests.services.load.test_running import answers, refuses

GOOD = "http://127.0.0.1:1"


@contextmanager
def engine_running(reply: Answer) -> Iterator[Engine]:
    """Run an engine in another thread."""
    engine = Engine(answer=reply)
    started, ended = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await engine.start()
        started.set()
        await ended.wait()
        await engine.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield engine
    finally:
        loops[0].call_soon_threadsafe(ended.set)
        thread.join()


async def lists_and_answers(call: Call) -> None:
    """List one model, and serve it."""
    if call.target == "/v1/models":
        call.whole({"object": "list", "data": [{"id": "only"}]})
    else:
        await answers(call)


def test_one_object_and_one_file(tmp_path: Path) -> None:
    """--json prints one object, --csv writes a line per request, and --warm-up requests do not count."""
    file = tmp_path / "requests.csv"
    with engine_running(lists_and_answers) as engine:
        flags = ("-n", "12", "--warm-up", "2", "--rate", "500", "--output-tokens", "uniform:1:5", "--csv", str(file))
        total = answer("bench", f"{engine.url}/v1/", *flags, "--slo-ttft-ms", "10000", "-H", "X-Team: a")
        assert (total["num_requests"], total["num_ok"], total["num_warm_up"]) == (10, 10, 2)
        assert total["goodput_share"] == 1.0
        assert total["num_wrong_length"] == 0
        assert total["forecast_error"]["e2e_s"]["n"] == 10
        posts = engine.calls[1:]
        assert len(posts) == 12
        assert all(json.loads(call.body)["model"] == "only" for call in posts)
        assert all((call.headers["x-team"], call.headers["x-slo-ttft-ms"]) == ("a", "10000.000") for call in posts)
        with file.open() as rows:
            assert len(list(csv.DictReader(rows))) == 10


def test_a_mix(tmp_path: Path) -> None:
    """Requests are sent with the facts of their entries, and the report has what each entry attained."""
    mix = tmp_path / "mix.toml"
    mix.write_text(
        "[[mix]]\nname = 'chat'\nshare = 1\nweight = 2.0\nttft_slo_s = 600\ntpot_slo_s = 600\n"
        "[[mix]]\nname = 'late'\nshare = 1\nclass = 'best-effort'\npriority = 4\nttft_slo_s = 1e-9\n"
    )
    with engine_running(answers) as engine:
        flags = ("--model", "m", "-n", "20", "--rate", "500", "--output-tokens", "4", "--mix", str(mix))
        total = answer("bench", engine.url, *flags, "--priority-weight", "4=8")
        sent = [(call.headers, json.loads(call.body)) for call in engine.calls]
    chats = [headers for headers, _ in sent if headers.get("x-block-weight") == "2.0"]
    late = [body for headers, body in sent if headers.get("x-block-class") == "best-effort"]
    assert len(chats) + len(late) == 20
    assert 0 < len(chats) < 20
    assert all(headers["x-slo-ttft-ms"] == "600000.000" for headers in chats)
    assert all(body["priority"] == 4 for body in late)
    assert (total["by_mix"]["chat"]["tdg_ratio"], total["by_mix"]["late"]["tdg_ratio"]) == (1.0, 0.0)
    gained, lost = 2 * 4 * len(chats), 8 * 1 * len(late)
    assert total["tdg_ratio"] == pytest.approx(gained / (gained + lost))
    assert set(total["by_class"]) == {"real-time", "best-effort"}


def test_objectives_of_a_mix(tmp_path: Path) -> None:
    """The endpoint gets the name and what the entry states itself; a table only says what the report counts."""
    mix, table = tmp_path / "mix.toml", tmp_path / "objectives.toml"
    mix.write_text(
        "[[mix]]\nname = 'chat'\nshare = 1\nobjective = 'gold'\n"
        "[[mix]]\nname = 'own'\nshare = 1\nobjective = 'gold'\nclass = 'real-time'\nweight = 1\npriority = 0\n"
        "ttft_slo_s = 300\n"
    )
    table.write_text(
        "[[objective]]\nname = 'gold'\nclass = 'best-effort'\nweight = 2\npriority = 3\nttft_slo_s = 600\n"
    )
    flags = ("--model", "m", "-n", "20", "--rate", "500", "--output-tokens", "4", "--mix", str(mix))
    with engine_running(answers) as engine:
        without = answer("bench", engine.url, *flags)
        total = answer("bench", engine.url, *flags, "--objectives", str(table))
        sent = [(call.headers, json.loads(call.body)) for call in engine.calls]
    assert without["num_with_targets"] == without["by_mix"]["own"]["num_requests"]
    assert without["by_mix"]["chat"]["deadline_attained"] is None
    assert without["by_mix"]["chat"]["num_served"] == without["by_mix"]["chat"]["num_requests"]
    assert (total["num_with_targets"], total["by_mix"]["chat"]["deadline_attained"]) == (20, 1.0)
    assert total["by_class"]["best-effort"]["num_requests"] == total["by_mix"]["chat"]["num_requests"]
    assert {headers["x-block-objective"] for headers, _ in sent} == {"gold"}
    stated = [(headers.get("x-block-class"), headers.get("x-block-weight"), headers.get("x-slo-ttft-ms"),
               body.get("priority")) for headers, body in sent]  # fmt: skip
    assert set(stated) == {(None, None, None, None), ("real-time", "1.0", "300000.000", 0)}
    assert "objectives: needs a --mix" in refusal("bench", GOOD, "--model", "m", "--objectives", str(table))
    table.write_text("[[objective]]\nname = 'silver'\n")
    error = refusal("bench", GOOD, *flags, "--objectives", str(table))
    assert "mix[0].objective: 'gold' is no known objective" in error


async def sheds_one_tenant_at_first(call: Call) -> None:
    """Shed the first attempts of one tenant, with an exact time; demote another tenant."""
    tenant = call.headers["x-llm-d-inference-fairness-id"]
    if tenant == "loud" and "-again-" not in call.headers["x-request-id"]:
        headers = ("retry-after: 1", "x-block-retry-after-ms: 30", "x-block-shed-reason: late")
        call.whole({"error": {"message": "overloaded"}}, 429, *headers)
        return
    demoted = ("x-block-demoted: true",) if tenant == "calm" else ()
    call.head(200, "text/event-stream", "transfer-encoding: chunked", *demoted)
    await call.chunk(event("x", "length"))
    await call.chunk(DONE)
    call.end()


def test_tenants_of_a_mix_and_retries(tmp_path: Path) -> None:
    """The report has each tenant, who was demoted, and how shed requests ended, retried or not."""
    mix = tmp_path / "mix.toml"
    mix.write_text(
        "[[mix]]\nname = 'a'\nshare = 1\ntenant = 'loud'\nttft_slo_s = 600\nwhen_late = 'shed'\n"
        "[[mix]]\nname = 'b'\nshare = 1\ntenant = 'calm'\nttft_slo_s = 600\nwhen_late = 'demote'\n"
    )
    flags = ("--model", "m", "-n", "20", "--rate", "500", "--output-tokens", "1", "--mix", str(mix))
    rows_file = tmp_path / "rows.csv"
    with engine_running(sheds_one_tenant_at_first) as engine:
        total = answer("bench", engine.url, *flags)
        sent = [call.headers for call in engine.calls]
        again = answer("bench", engine.url, *flags, "--retry-shed", "3", "--csv", str(rows_file))
    loud = [headers for headers in sent if headers["x-llm-d-inference-fairness-id"] == "loud"]
    assert len(sent) == 20
    assert 0 < len(loud) < 20
    assert {headers["x-block-when-late"] for headers in loud} == {"shed"}
    assert (total["num_shed"], total["num_demoted"], total["retries"]) == (len(loud), 20 - len(loud), None)
    assert (total["by_tenant"]["loud"]["deadline_attained"], total["by_tenant"]["calm"]["deadline_attained"]) == (0, 1)
    assert total["of_admitted"]["deadline_attained"] == 1
    assert (again["num_shed"], again["num_ok"]) == (0, 20)
    assert again["by_tenant"]["loud"]["deadline_attained"] == 1
    assert (again["retries"]["num_requests"], again["retries"]["num_retries"]) == (len(loud), len(loud))
    assert again["retries"]["admitted_at_once"] == 1
    with rows_file.open() as rows:
        retried = [row for row in csv.DictReader(rows) if row["tenant"] == "loud"]
    assert all((row["retries"], row["demoted"]) == ("1", "0") for row in retried)
    assert all(float(row["retried_after_s"]) > 0.025 for row in retried)  # timers may fire a little early


def test_a_tenant_that_no_header_can_carry(tmp_path: Path) -> None:
    """It is refused before anything is sent."""
    mix = tmp_path / "mix.toml"
    mix.write_text("[[mix]]\nname = 'a'\nshare = 1\ntenant = 'caf\u00e9'\n")
    assert "tenant: must be printable ASCII" in refusal("bench", GOOD, "--model", "m", "--mix", str(mix))


def test_a_trace(tmp_path: Path) -> None:
    """A trace's requests are sent in order of arrival, at its times or at drawn ones."""
    trace = tmp_path / "trace.csv"
    trace.write_text("request_id,arrival_s,prompt_tokens,output_tokens\nb,0.02,7,2\na,0.01,3,4\n")
    with engine_running(answers) as engine:
        for flags in ((), ("--rate", "1000", "--arrivals", "gamma")):
            total = answer("bench", engine.url, "--model", "m", "--trace", str(trace), *flags)
            assert total["num_ok"] == 2
        bodies = [json.loads(call.body) for call in engine.calls]
        assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [(3, 4), (7, 2)] * 2


def test_settings_from_the_environment_and_a_file(tmp_path: Path) -> None:
    """Flags are also BLOCK_BENCH_* variables and keys of a TOML table; unknown keys are refused by name."""
    file = tmp_path / "bench.toml"
    file.write_text('[bench]\nmodel = "m"\nnum_requests = 3\nrate = 1000\noutput-tokens = 2\nheader = ["X-A: b c"]\n')
    with engine_running(answers) as engine:
        total = answer("bench", engine.url, "--config", str(file), BLOCK_BENCH_NUM_REQUESTS="2")
        assert total["num_ok"] == 2
        assert {(call.headers["x-a"], json.loads(call.body)["max_tokens"]) for call in engine.calls} == {("b c", 2)}
    file.write_text("[bench]\nrat = 5\n")
    assert "bench.rat: is no known setting; did you mean rate?" in refusal("bench", GOOD, "--config", str(file))


def test_a_table() -> None:
    """Without --json there is a table, and no progress bar without a terminal."""
    with engine_running(answers) as engine:
        done = block("bench", engine.url, "--model", "m", "-n", "3", "--rate", "1000", "--endpoint", "chat")
        assert (done.returncode, done.stderr) == (0, "")
        assert "TPOT ms" in done.stdout
        assert "3 of 3 requests" in done.stdout


def test_nothing_succeeds() -> None:
    """If every request fails, the exit status is 1, and the output has the reason."""
    with engine_running(refuses) as engine:
        done = block("bench", engine.url, "--model", "m", "-n", "3", "--rate", "1000")
        assert (done.returncode, done.stderr) == (1, "")
        assert 'failed: 3 status 429, the first one: {"error": {"message": "too much"}}' in done.stdout


def test_the_api_key_is_sent_and_not_printed() -> None:
    """The key comes from the environment, and is sent to the endpoint only."""
    with engine_running(answers) as engine:
        done = block("bench", engine.url, "--model", "m", "-n", "1", "--json", OPENAI_API_KEY="sk-secret")
        assert engine.calls[0].headers["authorization"] == "Bearer sk-secret"
        assert "sk-secret" not in done.stdout + done.stderr


BAD = (
    ([""], "must be a URL"),
    (["ftp://x"], "must be a URL"),
    ([GOOD], "url: 127.0.0.1:1 cannot be reached"),
    ([GOOD, "-n", "0"], "num_requests: "),
    ([GOOD, "--rate", "-1"], "rate: "),
    ([GOOD, "--arrivals", "normal"], "arrivals: "),
    ([GOOD, "--arrivals", "trace"], "arrivals: "),
    ([GOOD, "--trace", "/nowhere"], "/nowhere: cannot be read"),
    ([GOOD, "--prompt-tokens", "many"], "prompt_tokens: "),
    ([GOOD, "--warm-up", "100"], "warm_up: "),
    ([GOOD, "--endpoint", "embeddings"], "endpoint: "),
    ([GOOD, "--output", "long"], "output: "),
    ([GOOD, "--slo-tpot-ms", "0"], "slo_tpot_ms: "),
    ([GOOD, "--timeout-s", "0"], "timeout_s: "),
    ([GOOD, "--max-in-flight", "0"], "max_in_flight: "),
    ([GOOD, "--retry-shed", "-1"], "retry_shed: "),
    ([GOOD, "--seed", "-1"], "seed: "),
    ([GOOD, "-H", "nonsense"], "header: "),
    ([GOOD, "--csv", "/nowhere/x.csv", "--model", "m"], "csv: /nowhere/x.csv cannot be written"),
    ([GOOD, "--time-scale", "0"], "time_scale: "),
    ([GOOD, "--mix", "/nowhere"], "/nowhere: cannot be read"),
    ([GOOD, "--priority-weight", "0=-1"], "priority_weight: "),
    ([GOOD, "--first-token-weight", "0"], "first_token_weight: "),
    ([GOOD, "--frobnicate"], "--frobnicate"),
)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input(arguments: list[str], message: str) -> None:
    """Bad input gives one line that names the field, and status 2."""
    assert message in refusal("bench", *arguments)


async def lists_two(call: Call) -> None:
    """List two models."""
    call.whole({"object": "list", "data": [{"id": "a"}, {"id": "b"}]})


def test_ambiguous_models() -> None:
    """If an endpoint lists several models or none, --model is required."""
    with engine_running(lists_two) as engine:
        assert "model: name one of a, b" in refusal("bench", engine.url)
    with engine_running(refuses) as engine:
        assert "name a --model" in refusal("bench", engine.url)
