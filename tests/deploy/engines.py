"""Real vLLM engines for tests: a tiny random model, served on a free port, with a state file."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from predictor.profile import FITTED, Profile, SuggestedEngine, ValidRange
from predictor.step_time import Curve, StepTime
from tests.conformance.vllm_side import interpreter, older_interpreter
from tests.ports import free_port
from tests.services.waiting import wait_until

START_S = 420.0  # on a slow machine; a fast one takes forty seconds
STOP_S = 60.0
MODEL = "tiny"
BLOCK_SIZE, NUM_BLOCKS, NUM_SEATS, LONGEST = 32, 64, 8, 1024
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 2048, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGE_TOKENS = 576  # what Block estimates for an image of a model that it does not know
CHAT = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}assistant:"
ENGINE_FLAGS = (
    "--served-model-name", MODEL, "--load-format", "dummy", "--enforce-eager", "--max-model-len", str(LONGEST),
    "--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS + 1), "--max-num-seqs",
    str(NUM_SEATS), "--enable-prompt-tokens-details", "--shutdown-timeout", "30",
)  # fmt: skip

# Slower than the tiny model on a free core: sidecars correct it online, but refuse a profile that is off by a factor of
# ten, and the tests must pass on a busy machine.
PROFILE = Profile(
    name="tiny-cpu",
    model=MODEL,
    gpu="CPU",
    tensor_parallel=1,
    dtype="float32",
    kind=FITTED,
    step_time=StepTime(
        constant_s=0.02, token_s=2e-4, decode_base=Curve(x=(1.0, 8.0), y=(4e-4, 3e-3)), prefill_qq_s=4e-8
    ),
    valid=ValidRange(max_tokens=2048, max_sequences=NUM_SEATS, max_context_tokens=NUM_SEATS * LONGEST),
    error=None,
    source="a guess, for tests",
    engine=SuggestedEngine(max_num_seqs=NUM_SEATS, max_num_batched_tokens=2048),
)


def need_vllm() -> None:
    """Skip the test without vLLM."""
    if not interpreter().exists():
        pytest.skip(f"no vLLM at {interpreter()}: `make vllm`, or set BLOCK_VLLM_PYTHON")


def need_older_vllm() -> None:
    """Skip the test without the version of vLLM from which engines are upgraded."""
    if not older_interpreter().exists():
        pytest.skip(f"no vLLM at {older_interpreter()}: `make vllm-all`, or set BLOCK_VLLM_UPGRADE_FROM")


def tiny_model(folder: Path, **shape: Any) -> Path:
    """Write a random model, with a tokenizer of single characters; `shape` overrides its sizes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY | shape))
    words = ["<unk>", "<s>", "</s>", *(chr(number) for number in range(32, 127))]
    words += [f"w{number}" for number in range(TINY["vocab_size"] - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": "<unk>", "eos_token": "</s>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    return folder


def tiny_vision_model(folder: Path) -> Path:
    """Write a small random BLIP-2, whose processor needs no torchvision; an image is `IMAGE_TOKENS` before the text."""
    tiny_model(folder)
    marker = {"id": TINY["vocab_size"], "content": "<image>", "special": True, "normalized": False}
    marker |= {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(marker)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {  # about as slow as the model without images
        "model_type": "opt", "hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 8, "vocab_size": TINY["vocab_size"] + 8, "max_position_embeddings": 2048,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    whole = {
        "architectures": ["Blip2ForConditionalGeneration"], "model_type": "blip-2", "torch_dtype": "float32",
        "vision_config": {"model_type": "blip_2_vision_model", "image_size": 224, "patch_size": 14, **sizes},
        "qformer_config": {"model_type": "blip_2_qformer", "encoder_hidden_size": 128, **sizes},
        "text_config": text, "num_query_tokens": IMAGE_TOKENS, "image_token_index": marker["id"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    images = {"image_processor_type": "BlipImageProcessor", "size": {"height": 224, "width": 224}}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    kind = {"processor_class": "Blip2Processor", "num_query_tokens": IMAGE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(kind))
    return folder


def random_weights(model: Path, seed: int) -> Path:
    """Give a model weights of the scale of a trained one, so that its text depends on the whole context."""
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    sizes = json.loads((model / "config.json").read_text())
    hidden, inner, words = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        numbers = generator.standard_normal((rows, columns), dtype=np.float32)
        return numbers / np.float32(np.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": matrix(words, hidden) * np.float32(np.sqrt(hidden)),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": matrix(words, hidden),
    }
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.self_attn.{one}_proj.weight": 2 * matrix(hidden, hidden) for one in "qkvo"}
        weights |= {f"{at}.mlp.{one}_proj.weight": matrix(inner, hidden) for one in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = matrix(hidden, inner)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{norm}.weight"] = np.ones(hidden, np.float32)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def lora_adapter(folder: Path, model: Path, seed: int, rank: int = 8) -> Path:
    """Write a LoRA adapter of a model in PEFT's format, with random weights that change its text."""
    from safetensors.numpy import save_file

    folder.mkdir()
    generator = np.random.default_rng(seed)
    sizes = json.loads((model / "config.json").read_text())
    hidden, modules = sizes["hidden_size"], ("q_proj", "v_proj")
    weights = {}
    for layer in range(sizes["num_hidden_layers"]):
        for module in modules:
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for name, shape in (("lora_A", (rank, hidden)), ("lora_B", (hidden, rank))):
                numbers = generator.standard_normal(shape, dtype=np.float32)
                weights[f"{at}.{name}.weight"] = numbers / np.float32(np.sqrt(shape[1]))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    kind = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(kind | {"target_modules": modules}))
    return folder


def repeating_weights(model: Path, seed: int, share: float, cycle: int = 12) -> Path:
    """Give a model weights whose sampled text goes round in cycles, and leaves them with the rest of the probability.

    Its layers add nothing, so that the next token depends on the last one alone.
    """
    from safetensors.numpy import save_file

    generator = np.random.default_rng(seed)
    sizes = json.loads((model / "config.json").read_text())
    hidden, inner, words = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    embedding = np.where(generator.random((words, hidden)) < 0.5, np.float32(-1), np.float32(1))
    order = generator.permutation(words - words % cycle).reshape(-1, cycle)
    follower = np.arange(words)
    follower[order] = np.roll(order, -1, axis=1)
    logit = odds = math.log(share / (1 - share) * (words - 1))
    for _ in range(20):  # the logits of the other tokens are normally distributed
        logit = odds + logit**2 / (2 * hidden)
    head = np.zeros((words, hidden), np.float32)
    head[follower] = embedding * np.float32(logit / hidden)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {f"{at}.self_attn.{one}_proj.weight": np.zeros((hidden, hidden), np.float32) for one in "qkvo"}
        weights |= {f"{at}.mlp.{one}_proj.weight": np.zeros((inner, hidden), np.float32) for one in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = np.zeros((hidden, inner), np.float32)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}.{norm}.weight"] = np.ones(hidden, np.float32)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


def narrow_and_deep(hidden: int, layers: int) -> dict[str, int]:
    """Return a shape whose steps have high fixed costs and low costs per token, like a large model on a GPU."""
    heads = max(1, hidden // 64)
    return {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads,
    }  # fmt: skip


def engine_environment(state: Path | None) -> dict[str, str]:
    """Return the environment of a small, quiet and isolated engine of the CPU build."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return environment | {
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", **({"BLOCK_STATE_FILE": str(state)} if state else {}),
    }  # fmt: skip


class Engine:
    """`vllm serve`, on a port that it keeps after a restart."""

    def __init__(self, model: Path, state: Path, log: Path, *options: str) -> None:
        """Initialise it without starting it."""
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.state = state
        self._log = log
        self._arguments = ("serve", model, "--host", "127.0.0.1", "--port", str(self._port), *ENGINE_FLAGS, *options)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, python: Path | None = None) -> None:
        """Start it, with another vLLM if an interpreter is given; it serves after about half a minute."""
        with self._log.open("a") as lines:
            self._process = subprocess.Popen(
                ((python or interpreter()).parent / "vllm", *self._arguments), stdin=subprocess.DEVNULL, stdout=lines,
                stderr=subprocess.STDOUT, start_new_session=True, env=engine_environment(self.state),
            )  # fmt: skip

    def until(self, holds: Callable[[], bool], patience_s: float) -> None:
        """Wait until a condition holds, while the process runs."""

        def is_so() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self._last_lines()
            return holds()

        wait_until(is_so, patience_s, self._last_lines)

    def _last_lines(self) -> str:
        return self._log.read_text()[-4000:]

    def is_healthy(self) -> bool:
        """Ask it."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        """Return the sum of one of its metrics."""
        lines = httpx.get(f"{self.url}/metrics", timeout=START_S).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == name)

    async def complete(self, prompt: str, max_tokens: int, name: str, **fields: Any) -> dict[str, Any]:
        """Complete a prompt with a response of this length, which the request reports to the sidecar."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body |= {"vllm_xargs": {"block_tag_tokens": max_tokens}}
        async with httpx.AsyncClient(timeout=START_S) as client:
            answer = await client.post(f"{self.url}/v1/completions", json=body | fields, headers={"x-request-id": name})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def terminate(self) -> None:
        """Terminate it, and wait for its end."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(STOP_S)

    def kill(self) -> None:
        """Kill it and all its processes at once, as the kernel does when memory runs out."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)
