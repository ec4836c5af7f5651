"""The training of `roberta`: from a published encoder, or of a small encoder from scratch."""

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
from length_tagger.linear_training import MIN_PROMPTS, arrange_samples, spread_scale
from length_tagger.roberta import ABOUT, CONFIG, FORMAT, TOKENS, WEIGHTS, Checkpoint, load
from length_tagger.samples import Sample, split
from length_tagger.tokenization import encoded, padded

PADDING, UNKNOWN, MASK = "<pad>", "<unk>", "<mask>"
STATE, PROGRESS = "training.safetensors", "training.json"
MAX_ROUNDING = 0.02  # mean error of the logarithm that 8-bit weights may add
SORTED_BATCHES = 32  # batches whose prompts are sorted by length, so that little is padded


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRecipe:
    """The hyperparameters of `roberta`; size, layers, heads and num_words are used without a checkpoint only."""

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
    hide: float = 0.15  # share of tokens that are masked in training
    patience: int = 4  # epochs without improvement until training stops
    beside_linear: float = 0.0  # weight of `linear` in the estimates
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject values out of range, naming the field."""
        for name in ("size", "layers", "heads", "num_words", "most_tokens", "epochs", "batch", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.size % self.heads:
            raise ValueError(f"size: {self.size} is not a multiple of heads, {self.heads}")
        if not 0 <= self.beside_linear <= 1:
            raise ValueError(f"beside_linear: must lie between 0 and 1, not {self.beside_linear}")
        if not 0 <= self.hide < 1:
            raise ValueError(f"hide: must be at least 0 and below 1, not {self.hide}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate: must be above 0, not {self.rate}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A network in training, with its tokenizer and settings."""

    network: LengthNetwork
    tokenizer: Tokenizer
    models: tuple[str, ...]
    most_tokens: int
    padding: int
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Samples as inputs and targets of the network."""

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
    max_epochs: int | None = None,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> Checkpoint:
    """Train on the training part, stop early by the validation part, and write the best checkpoint to the folder.

    The state is saved after each epoch; `resume` continues from it, with the same result as without an interruption.
    `max_epochs` stops earlier, as an interruption would.
    """
    folder = Path(folder)
    parts = split(samples, recipe.seed)
    names = tuple(sorted({sample.model for sample in samples}))
    if len({sample.prompt for sample in parts["train"]}) < MIN_PROMPTS or not parts["validation"]:
        raise ValueError("prompt: there are too few different ones")
    torch.manual_seed(recipe.seed)
    learner = _start(recipe, parts["train"], names)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = learner.network.to(device)
    training, validation = (_prepared(learner, parts[part], names) for part in ("train", "validation"))
    _set_initial_bias(network, training)
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    steps = -(-len(training.ids) // recipe.batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_factor(step, steps * recipe.epochs))
    done, since_best, best = 0, 0, math.inf
    best_weights = copy.deepcopy(network.state_dict())
    if resume:
        done, since_best, best = _resumed(folder, recipe, network, optimizer, schedule, best_weights)
    last = min(recipe.epochs, max_epochs or recipe.epochs)
    while done < last and since_best < recipe.patience:
        torch.manual_seed(recipe.seed * 100_003 + done)
        rng = np.random.default_rng((recipe.seed, done))
        network.train()
        for number, chosen in enumerate(_batches(training.ids, recipe.batch, rng), 1):
            loss = _loss(learner, training, chosen, device, recipe.hide)
            optimizer.zero_grad()
            backward: Any = loss.backward
            backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress(done * steps + number, recipe.epochs * steps, best)
        done += 1
        medians, _ = _predict(learner, validation, device, recipe.batch)
        error = float(np.nanmean(np.abs(validation.lengths.numpy() - medians[:, :, None])))
        since_best += 1
        if error < best:
            best, since_best, best_weights = error, 0, copy.deepcopy(network.state_dict())
        progress(done * steps, recipe.epochs * steps, best)
        _write_state(folder, recipe, network, optimizer, best_weights, (done, since_best, best))
    network.load_state_dict(best_weights)
    medians, log_spreads = _predict(learner, validation, device, recipe.batch)
    network.to("cpu").eval()
    scale = spread_scale(validation.lengths.numpy(), medians, np.exp(log_spreads))
    about = {**(card or {}), "recipe": asdict(recipe), "epochs_done": done, "validation_log_error": best}
    save(learner, folder, spread_scale=scale, beside_linear=recipe.beside_linear, card=about, validation=validation)
    return load(folder)


def save(
    learner: Learner,
    folder: Path,
    *,
    spread_scale: float,
    beside_linear: float,
    card: Mapping[str, Any],
    validation: Prepared,
) -> None:
    """Write a checkpoint: half-precision weights, and the ONNX form if it is accurate; the last file makes it valid."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.half().contiguous().cpu() for name, tensor in learner.network.state_dict().items()}
    _write_atomically(folder / WEIGHTS, lambda path: save_file(weights, path))
    _write_atomically(folder / TOKENS, lambda path: learner.tokenizer.save(str(path)))
    _write_atomically(folder / CONFIG, lambda path: path.write_text(json.dumps(dict(learner.config), indent=1) + "\n"))
    about = {
        "format": FORMAT,
        "models": list(learner.models),
        "most_tokens": learner.most_tokens,
        "padding": learner.padding,
        "spread_scale": spread_scale,
        "beside_linear": beside_linear,
        "onnx_rounding": _write_onnx(learner, folder / onnx_form.FILE, validation),
        "card": dict(card),
    }
    _write_atomically(folder / ABOUT, lambda path: path.write_text(json.dumps(about, indent=1) + "\n"))


def _write_onnx(learner: Learner, path: Path, validation: Prepared) -> float | None:
    """Write the ONNX form; return the mean difference of its log medians, or None if it was not written."""
    new = path.with_suffix(".new")
    path.unlink(missing_ok=True)
    if not onnx_form.write(learner.network, NUM_COUNTS, new):
        return None
    run = onnx_form.run_from(new, torch.get_num_threads())
    exact, _ = _predict(learner, validation, torch.device("cpu"), 16)
    rounded = [
        run(*padded([one], learner.padding), validation.counts[index : index + 1].numpy())[0][0]
        for index, one in enumerate(validation.ids)
    ]
    rounding = float(np.abs(np.stack(rounded) - exact).mean())
    if rounding > MAX_ROUNDING:
        new.unlink()
        return None
    new.replace(path)
    return rounding


def _write_atomically(path: Path, write: Any) -> None:
    """Write a file atomically."""
    new = path.with_suffix(".new")
    write(new)
    new.replace(path)


def _start(recipe: EncoderRecipe, samples: Sequence[Sample], names: tuple[str, ...]) -> Learner:
    """Start with a published encoder and tokenizer, or with new small ones."""
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
    """Load a published encoder and tokenizer: safetensors only, without running its code."""
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
    """Train a byte-level BPE tokenizer on prompts."""
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
    prompts, lengths = arrange_samples(samples, names)
    return Prepared(
        ids=encoded(learner.tokenizer, prompts, learner.most_tokens),
        counts=torch.from_numpy(features(prompts).counts),
        lengths=torch.from_numpy(lengths),
    )


def _set_initial_bias(network: LengthNetwork, training: Prepared) -> None:
    """Start every served model at its own median."""
    with torch.no_grad():
        network.count_means.copy_(training.counts.mean(0))
        network.count_scales.copy_(training.counts.std(0).clamp(min=1e-3))
        num_models = training.lengths.shape[1]
        logs = training.lengths.transpose(0, 1).reshape(num_models, -1)
        network.out.bias[:num_models] = torch.nanmedian(logs, dim=1).values.nan_to_num(5.5).to(network.out.bias.device)
        network.out.bias[num_models:] = -0.7


def _rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warm-up over the first tenth, then a cosine."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm))))


def _batches(ids: list[list[int]], size: int, rng: np.random.Generator) -> list[list[int]]:
    """Shuffle prompts into batches of similar length."""
    order = rng.permutation(len(ids)).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), size * SORTED_BATCHES):
        near = sorted(order[start : start + size * SORTED_BATCHES], key=lambda index: len(ids[index]))
        batches.extend(near[first : first + size] for first in range(0, len(near), size))
    rng.shuffle(batches)
    return batches


def _loss(learner: Learner, training: Prepared, chosen: list[int], device: torch.device, hide: float) -> torch.Tensor:
    ids, mask = batch_of([training.ids[index] for index in chosen], learner.padding)
    masking = learner.tokenizer.token_to_id(MASK)
    if hide and masking is not None:
        ids = torch.where((torch.rand(ids.shape) < hide) & (mask == 1), masking, ids)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        medians, spreads = learner.network(ids.to(device), mask.to(device), training.counts[chosen].to(device))
    return loss_of(medians, spreads, training.lengths[chosen].to(device))


def _predict(learner: Learner, validation: Prepared, device: torch.device, size: int) -> tuple[Any, Any]:
    """Return log medians and log spreads of prepared prompts."""
    learner.network.eval()
    order = sorted(range(len(validation.ids)), key=lambda index: len(validation.ids[index]))
    shape = (len(order), validation.lengths.shape[1])
    medians, spreads = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            ids, mask = batch_of([validation.ids[index] for index in chosen], learner.padding)
            some = learner.network(ids.to(device), mask.to(device), validation.counts[chosen].to(device))
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
    """Save the training state; the small file is written last and makes the large one valid."""
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
    progress = {"recipe": asdict(recipe), "done": done, "since_best": since_best, "best": error}
    (folder / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")


def _resumed(
    folder: Path,
    recipe: EncoderRecipe,
    network: LengthNetwork,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
    best: dict[str, torch.Tensor],
) -> tuple[int, int, float]:
    """Load a saved training state; one of another recipe is rejected."""
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        tensors = load_file(folder / STATE)
    except OSError as error:
        raise ValueError(f"{folder}: has no state to resume: {error.strerror or error}") from None
    if progress["recipe"] != asdict(recipe):
        raise ValueError(f"{folder}: was started with another recipe")
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
    return int(progress["done"]), int(progress["since_best"]), float(progress["best"])
