"""Real vLLM engines for tests: a tiny random model, served on a free port, its state in a file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conformance.vllm_side import interpreter

START_S = 420.0  # on a slow machine; forty seconds on one that is not
STOP_S = 60.0
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 2048, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_model(folder: Path) -> Path:
    """A model nobody has trained, with a tokenizer that knows single characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    words = ["<unk>", "<s>", "</s>", *(chr(number) for number in range(32, 127))]
    words += [f"w{number}" for number in range(TINY["vocab_size"] - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"})
    )
    return folder


@contextmanager
def vllm_serving(model: Path, state: Path, log: Path, *options: str) -> Iterator[Engine]:
    """An engine that serves; whatever became of it, it and its processes are gone in the end."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with log.open("w") as lines:
        process = subprocess.Popen(
            [
                interpreter().parent / "vllm", "serve", model, "--served-model-name", "tiny", "--load-format", "dummy",
                "--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "1024",
                "--block-size", "32", "--num-gpu-blocks-override", "65", "--max-num-seqs", "8", *options,
            ],
            stdout=lines,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
                "BLOCK_STATE_FILE": str(state), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
        )  # fmt: skip
    engine = Engine(process, f"http://127.0.0.1:{port}", log)
    try:
        engine.until(engine.is_healthy, START_S)
        yield engine
    finally:
        engine.kill()


class Engine:
    """An engine that was started."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def until(self, holds: Callable[[], bool], patience_s: float) -> None:
        """Wait for something that this engine does."""
        deadline_s = time.monotonic() + patience_s
        while not holds():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline_s, self.log.read_text()[-4000:]
            time.sleep(0.02)

    def is_healthy(self) -> bool:
        """Ask it."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:  # noqa: S310
                return answer.status == 200
        except OSError:
            return False

    def complete(self, prompt: str, max_tokens: int, name: str) -> dict[str, Any]:
        """Have it write an answer of this very length."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        request = urllib.request.Request(  # noqa: S310 - it is on this machine
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": name},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:  # noqa: S310
            return json.load(answer)

    def kill(self) -> None:
        """End it and all its processes at once, as a machine does that runs out of memory."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_S)
