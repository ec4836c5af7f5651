"""How `roberta` is trained: from any checkpoint of an encoder, or a small one from nothing but the data."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from length_tagger import onnx_form
from length_tagger.encoder import LengthNetwork, batch_of, encoder_from, loss_of
from length_tagger.features import NUM_COUNTS, features
from length_tagger.linear_training import LEAST_PROMPTS, laid_out, spread_scale
from length_tagger.reading import encoded
from length_tagger.reading import laid_out as as_batch
from length_tagger.roberta import ABOUT, CONFIG, FORMAT, TOKENS, WEIGHTS, Checkpoint, load
from length_tagger.samples import Sample, split

PADDING, UNKNOWN, MASK = "<pad>", "<unk>", "<mask>"
STATE, PROGRESS = "training.safetensors", "training.json"
MOST_ROUNDING = 0.02  # mean error of the logarithm that weights of a byte may add
NEAR = 32  # batches whose prompts are sorted by length, so that little is padded


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRecipe:
    """How `roberta` learns; size, layers and words matter only where there is no checkpoint to start from."""

    checkpoint: str = ""
    size: int = 128
    layers: int = 2
    heads: int = 4
    num_words: int = 6000
    most_tokens: int = 256
    epochs: int = 16
    batch: int = 32
    rate: float = 1e-3
    decay: float = 0.05
    hide: float = 0.15  # share of tokens that are masked while learning
    patience: int = 4  # epochs without a better one until it ends
    beside_linear: float = 0.0  # share of `linear` in the estimates
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no training could work with."""
        for name in ("size", "layers", "heads", "num_words", "most_tokens", "epochs", "batch", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.size % self.heads:
            raise ValueError(f"size: {self.size} is no multiple of heads, {self.heads}")
        if not 0 <= self.beside_linear <= 1:
            raise ValueError(f"beside_linear: must lie between 0 and 1, not {self.beside_linear}")
        if not 0 <= self.hide < 1:
            raise ValueError(f"hide: must be at least 0 and below 1, not {self.hide}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate: must be above 0, not {self.rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What is trained: a network, and how prompts are made numbers for it."""

    network: LengthNetwork
    tokenizer: Tokenizer
    models: tuple[str, ...]
    most_tokens: int
    padding: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Samples as the network reads them."""

    ids: list[list[int]]
    counts: torch.Tensor
    lengths: torch.Tensor


def fit(
    samples: Sequence[Sample],
    folder: str | Path,
    recipe: EncoderRecipe,
    *,
    card: Mapping[str, Any] | None = None,
    resume: bool = False,
    most_epochs: int | None = None,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> Checkpoint:
    """Train on the training part, stop early by the validation part, and leave the best checkpoint in the folder.

    After each epoch everything is written down; with `resume` it goes on from there, to the same end as if it had
    never stopped. `most_epochs` stops it earlier, as an interruption would.
    """
    folder = Path(folder)
    parts = split(samples, recipe.seed)
    names = tuple(sorted({sample.model for sample in samples}))
    if len({sample.prompt for sample in parts["train"]}) < LEAST_PROMPTS or not parts["validation"]:
        raise ValueError("prompt: there are too few different ones to learn from")
    torch.manual_seed(recipe.seed)
    learner = _start(recipe, parts["train"], names)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = learner.network.to(device)
    learned, held = (_prepared(learner, parts[part], names) for part in ("train", "validation"))
    _set_out(network, learned)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    steps = -(-len(learned.ids) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps * recipe.epochs))
    done, since_best, best = 0, 0, math.inf
    best_weights = copy.deepcopy(network.state_dict())
    if resume:
        done, since_best, best = _resumed(folder, recipe, network, optimizer, schedule, best_weights)
    last = min(recipe.epochs, most_epochs or recipe.epochs)
    while done < last and since_best < recipe.patience:
        torch.manual_seed(recipe.seed * 100_003 + done)
        rng = np.random.default_rng((recipe.seed, done))
        network.train()
        for number, chosen in enumerate(_batches(learned.ids, recipe.batch, rng), 1):
            loss = _loss(learner, learned, chosen, device, recipe.hide)
            optimizer.zero_grad()
            backward: Any = loss.backward
            backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress(done * steps + number, recipe.epochs * steps, best)
        done += 1
        medians, _ = _told(learner, held, device, recipe.batch)
        error = float(np.nanmean(np.abs(held.lengths.numpy() - medians[:, :, None])))
        since_best += 1
        if error < best:
            best, since_best, best_weights = error, 0, copy.deepcopy(network.state_dict())
        progress(done * steps, recipe.epochs * steps, best)
        _write_state(folder, recipe, network, optimizer, best_weights, (done, since_best, best))
    network.load_state_dict(best_weights)
    medians, log_spreads = _told(learner, held, device, recipe.batch)
    network.to("cpu").eval()
    scale = spread_scale(held.lengths.numpy(), medians, np.exp(log_spreads))
    about = {**(card or {}), "recipe": asdict(recipe), "epochs_done": done, "validation_log_error": best}
    save(learner, folder, spread_scale=scale, beside_linear=recipe.beside_linear, card=about, held=held)
    return load(folder)


def save(
    learner: Learner,
    folder: Path,
    *,
    spread_scale: float,
    beside_linear: float,
    card: Mapping[str, Any],
    held: Prepared,
) -> None:
    """Write a checkpoint: weights in half precision, the ONNX form if it errs no more; the last file makes it whole."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.half().contiguous().cpu() for name, tensor in learner.network.state_dict().items()}
    _whole(folder / WEIGHTS, lambda path: save_file(weights, path))
    _whole(folder / TOKENS, lambda path: learner.tokenizer.save(str(path)))
    _whole(folder / CONFIG, lambda path: path.write_text(json.dumps(dict(learner.config), indent=1) + "\n"))
    about = {
        "format": FORMAT,
        "models": list(learner.models),
        "most_tokens": learner.most_tokens,
        "padding": learner.padding,
        "spread_scale": spread_scale,
        "beside_linear": beside_linear,
        "onnx_rounding": _write_onnx(learner, folder / onnx_form.FILE, held),
        "card": dict(card),
    }
    _whole(folder / ABOUT, lambda path: path.write_text(json.dumps(about, indent=1) + "\n"))


def _write_onnx(learner: Learner, path: Path, held: Prepared) -> float | None:
    """Write the ONNX form; tell by how much its log medians differ on average, None where there is none."""
    new = path.with_suffix(".new")
    path.unlink(missing_ok=True)
    if not onnx_form.write(learner.network, NUM_COUNTS, new):
        return None
    run = onnx_form.run_from(new, torch.get_num_threads())
    exact, _ = _told(learner, held, torch.device("cpu"), 16)
    rounded = [
        run(*as_batch([one], learner.padding), held.counts[place : place + 1].numpy())[0][0]
        for place, one in enumerate(held.ids)
    ]
    rounding = float(np.abs(np.stack(rounded) - exact).mean())
    if rounding > MOST_ROUNDING:
        new.unlink()
        return None
    new.replace(path)
    return rounding


def _whole(path: Path, write: Any) -> None:
    """Let a file appear only when it is complete."""
    new = path.with_suffix(".new")
    write(new)
    new.replace(path)


def _start(recipe: EncoderRecipe, samples: Sequence[Sample], names: tuple[str, ...]) -> Learner:
    """Begin with a checkpoint's encoder and tokenizer, or with small ones of one's own."""
    if recipe.checkpoint:
        encoder, tokenizer, config, padding = _published(recipe.checkpoint)
        most_tokens = min(recipe.most_tokens, int(config.get("max_position_embeddings", 514)) - 2)
    else:
        tokenizer = tokenizer_from((sample.prompt for sample in samples), recipe.num_words)
        padding, most_tokens = 0, recipe.most_tokens
        config = {
            "model_type": "roberta", "vocab_size": tokenizer.get_vocab_size(), "hidden_size": recipe.size,
            "num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads,
            "intermediate_size": 4 * recipe.size, "max_position_embeddings": most_tokens + 1, "pad_token_id": 0,
            "bos_token_id": 0, "eos_token_id": 0, "type_vocab_size": 1, "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        }  # fmt: skip
        encoder = encoder_from(config)
    return Learner(
        network=LengthNetwork(encoder, int(config["hidden_size"]), len(names)),
        tokenizer=tokenizer,
        models=names,
        most_tokens=most_tokens,
        padding=padding,
        config=config,
    )


def _published(name: str) -> tuple[torch.nn.Module, Tokenizer, dict[str, Any], int]:
    """Load somebody's encoder and tokenizer: safetensors only, and none of its code."""
    from transformers import AutoModel, AutoTokenizer

    try:
        published = AutoModel.from_pretrained(name, use_safetensors=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"checkpoint: {name} cannot be loaded: {str(error).splitlines()[0]}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"checkpoint: {name} has no tokenizer.json")
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    config = {key: value for key, value in published.config.to_dict().items() if not key.startswith("_")}
    encoder = encoder_from(config)  # without the parts that are not used
    encoder.load_state_dict(published.state_dict(), strict=False)
    return encoder, backend, config, int(tokenizer.pad_token_id or 0)


def tokenizer_from(prompts: Iterator[str], num_words: int) -> Tokenizer:
    """Learn pieces of words from prompts (byte-level BPE), of any script."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=num_words, special_tokens=[PADDING, UNKNOWN, MASK], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    unique = dict.fromkeys(prompt.encode("utf-8", "replace").decode() for prompt in prompts)
    tokenizer.train_from_iterator(iter(unique), trainer)
    return tokenizer


def _prepared(learner: Learner, samples: Sequence[Sample], names: tuple[str, ...]) -> Prepared:
    prompts, lengths = laid_out(samples, names)
    return Prepared(
        ids=encoded(learner.tokenizer, prompts, learner.most_tokens),
        counts=torch.from_numpy(features(prompts).counts),
        lengths=torch.from_numpy(lengths),
    )


def _set_out(network: LengthNetwork, learned: Prepared) -> None:
    """Start every model at its own middle."""
    with torch.no_grad():
        network.count_means.copy_(learned.counts.mean(0))
        network.count_scales.copy_(learned.counts.std(0).clamp(min=1e-3))
        num_models = learned.lengths.shape[1]
        logs = learned.lengths.transpose(0, 1).reshape(num_models, -1)
        network.out.bias[:num_models] = torch.nanmedian(logs, dim=1).values.nan_to_num(5.5).to(network.out.bias.device)
        network.out.bias[num_models:] = -0.7


def _share(step: int, steps: int) -> float:
    """Warm up over the first tenth, then cool down as a cosine."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


def _batches(ids: list[list[int]], size: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffle prompts into batches of about the same length each."""
    order = rng.permutation(len(ids)).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), size * NEAR):
        near = sorted(order[start : start + size * NEAR], key=lambda place: len(ids[place]))
        batches.extend(near[first : first + size] for first in range(0, len(near), size))
    rng.shuffle(batches)
    return batches


def _loss(learner: Learner, learned: Prepared, chosen: list[int], device: torch.device, hide: float) -> torch.Tensor:
    ids, mask = batch_of([learned.ids[place] for place in chosen], learner.padding)
    masking = learner.tokenizer.token_to_id(MASK)
    if hide and masking is not None:
        ids = torch.where((torch.rand(ids.shape) < hide) & (mask == 1), masking, ids)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        medians, spreads = learner.network(ids.to(device), mask.to(device), learned.counts[chosen].to(device))
    return loss_of(medians, spreads, learned.lengths[chosen].to(device))


def _told(learner: Learner, held: Prepared, device: torch.device, size: int) -> tuple[Any, Any]:
    """Give medians and log spreads for all of some prepared prompts."""
    learner.network.eval()
    order = sorted(range(len(held.ids)), key=lambda place: len(held.ids[place]))
    shape = (len(order), held.lengths.shape[1])
    medians, spreads = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            ids, mask = batch_of([held.ids[place] for place in chosen], learner.padding)
            some = learner.network(ids.to(device), mask.to(device), held.counts[chosen].to(device))
            medians[chosen], spreads[chosen] = (one.cpu().numpy() for one in some)
    return medians, spreads


def _write_state(
    folder: Path,
    recipe: EncoderRecipe,
    network: LengthNetwork,
    optimizer: torch.optim.Optimizer,
    best: Mapping[str, torch.Tensor],
    where: tuple[int, int, float],
) -> None:
    """Write down all that going on needs; the small file comes last, and tells that the large one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"now.{name}": value for name, value in network.state_dict().items()}
    tensors |= {f"best.{name}": value for name, value in best.items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
    whole = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    new = folder / f"{STATE}.new"
    save_file(whole, new)
    (folder / PROGRESS).unlink(missing_ok=True)
    new.replace(folder / STATE)
    done, since_best, error = where
    said = {"recipe": asdict(recipe), "done": done, "since_best": since_best, "best": error}
    (folder / PROGRESS).write_text(json.dumps(said), encoding="utf-8")


def _resumed(
    folder: Path,
    recipe: EncoderRecipe,
    network: LengthNetwork,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    best: dict[str, torch.Tensor],
) -> tuple[int, int, float]:
    """Take up where the folder says; one of another recipe is refused."""
    try:
        said = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        tensors = load_file(folder / STATE)
    except OSError as error:
        raise ValueError(f"{folder}: there is nothing to resume: {error.strerror or error}") from None
    if said["recipe"] != asdict(recipe):
        raise ValueError(f"{folder}: was begun with another recipe")
    network.load_state_dict({name[4:]: value for name, value in tensors.items() if name.startswith("now.")})
    best.update({name[5:]: value for name, value in tensors.items() if name.startswith("best.")})
    state = optimizer.state_dict()
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            number, _, field = rest.partition(".")
            state["state"].setdefault(int(number), {})[field] = value
    optimizer.load_state_dict(state)
    steps = next((int(one["step"]) for one in state["state"].values()), 0)
    schedule.last_epoch = steps
    for group, base in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
        group["lr"] = base * schedule.lr_lambdas[0](steps)
    return int(said["done"]), int(said["since_best"]), float(said["best"])
