"""Training, interruption, storage and robustness of a small encoder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from length_tagger.estimate import Query
from length_tagger.linear import LinearTagger
from length_tagger.linear import load as load_linear
from length_tagger.samples import split
from length_tagger.scores import scores
from tests.length_tagger.test_learning import HOSTILE, samples_of_words

torch = pytest.importorskip("torch", reason="needs the extra `tagger`")
pytest.importorskip("transformers", reason="needs the extra `tagger`")
from safetensors.torch import load_file  # noqa: E402

from length_tagger.encoder import loss_of  # noqa: E402 - they need torch
from length_tagger.roberta import SHIPPED, RobertaTagger, load  # noqa: E402
from length_tagger.roberta_training import EncoderRecipe, fit  # noqa: E402
from length_tagger.tokenization import encoded, groups_of_similar_length, padded  # noqa: E402

TINY = EncoderRecipe(
    size=32, layers=1, heads=2, num_words=400, most_tokens=24, epochs=8, batch=16, rate=5e-3, hide=0.0, patience=8
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Make floating-point sums independent of the machine's load."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny encoder."""
    path = tmp_path_factory.mktemp("encoder") / "tiny"
    fit(samples_of_words(), path, TINY)
    return path


def test_a_tiny_encoder_beats_the_median(folder: Path) -> None:
    """On held-out prompts its error is less than half the median's, and ranks are mostly right."""
    tagger = RobertaTagger.load(folder)
    tests = split(samples_of_words(), 0)["test"]
    estimates = tagger.estimate_many([Query(prompt=one.prompt, model=one.model) for one in tests])
    lengths = np.array([one.output_tokens for one in tests], float)
    medians = np.repeat([one.median_tokens for one in estimates if one is not None], 4)
    spreads = np.repeat([one.spread for one in estimates if one is not None], 4)
    score = scores(lengths.ravel(), medians, spreads)
    known = [tokens for sample in samples_of_words() for tokens in sample.output_tokens]
    baseline = scores(lengths.ravel(), np.full(lengths.size, np.median(known)), np.ones(lengths.size))
    assert score["mae"] < 0.5 * baseline["mae"]
    assert score["spearman"] > 0.8
    assert 0.75 < score["coverage_p90"] <= 1.0


def test_resumed_equals_uninterrupted(folder: Path, tmp_path: Path) -> None:
    """Training that is stopped after three epochs and resumed ends with the same weights."""
    fit(samples_of_words(), tmp_path / "stopped", TINY, max_epochs=3)
    fit(samples_of_words(), tmp_path / "stopped", TINY, resume=True)
    one, other = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "stopped"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (folder / "block.json").read_text() == (tmp_path / "stopped" / "block.json").read_text()
    with pytest.raises(ValueError, match="was started with another recipe"):
        fit(samples_of_words(), tmp_path / "stopped", EncoderRecipe(size=64), resume=True)
    with pytest.raises(ValueError, match="no state to resume"):
        fit(samples_of_words(), tmp_path / "nothing", TINY, resume=True)


def test_it_starts_from_a_published_checkpoint(tmp_path: Path) -> None:
    """A Hugging Face folder is fine-tuned, with its encoder, its tokenizer and its size."""
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

    from length_tagger.roberta_training import tokenizer_from

    tokenizer = tokenizer_from((sample.prompt for sample in samples_of_words()), 300)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("pad_token", "unk_token", "mask_token"), ("<pad>", "<unk>", "<mask>"), strict=True)),
    )
    config = RobertaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=34, pad_token_id=0,
    )  # fmt: skip
    published = RobertaModel(config)
    published.save_pretrained(tmp_path / "published")
    fast.save_pretrained(tmp_path / "published")
    recipe = EncoderRecipe(checkpoint=str(tmp_path / "published"), epochs=1, rate=1e-9)
    made = fit(samples_of_words(60), tmp_path / "tuned", recipe)
    assert made.most_tokens == 32
    kept = load_file(tmp_path / "tuned" / "model.safetensors")["encoder.embeddings.word_embeddings.weight"]
    assert torch.allclose(kept.float(), published.state_dict()["embeddings.word_embeddings.weight"], atol=1e-3)
    with pytest.raises(ValueError, match=r"^checkpoint: .*nowhere cannot be loaded"):
        fit(samples_of_words(60), tmp_path / "x", EncoderRecipe(checkpoint=str(tmp_path / "nowhere")))


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_hostile_prompts_get_a_bounded_tag(folder: Path, runtime: str) -> None:
    """Empty, huge, repetitive or binary prompts, in any script, get a finite length; an empty prompt gets none."""
    tagger = RobertaTagger.load(folder, runtime=runtime)
    estimates = tagger.estimate_many([Query(prompt=prompt, model="brief") for prompt in HOSTILE])
    assert estimates[0] is None
    for estimate in estimates[1:]:
        assert estimate is not None
        assert 1 <= estimate.median_tokens <= 1_000_000
        assert 0 < estimate.spread <= 10


def test_both_runtimes_give_the_same_estimates(folder: Path, tmp_path: Path) -> None:
    """8-bit weights change estimates little; without an ONNX model, or by request, torch is used."""
    queries = [Query(prompt=one.prompt, model=one.model) for one in split(samples_of_words(), 0)["test"]]
    onnx, by_torch = (RobertaTagger.load(folder, runtime=runtime) for runtime in ("auto", "torch"))
    assert (onnx.checkpoint.runtime, by_torch.checkpoint.runtime) == ("onnx", "torch")
    pairs = zip(onnx.estimate_many(queries), by_torch.estimate_many(queries), strict=True)
    ratios = [one.median_tokens / other.median_tokens for one, other in pairs if one is not None and other is not None]
    assert len(ratios) == len(queries)
    assert np.abs(np.log(ratios)).mean() < 0.03
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "model.onnx").unlink()
    assert load(bare).runtime == "torch"
    with pytest.raises(ValueError, match=r"model\.onnx: is not an ONNX model"):
        load(bare, runtime="onnx")
    (bare / "model.onnx").write_bytes(b"\x08\x07nonsense")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load(bare)
    with pytest.raises(ValueError, match="runtime: must be one of auto, onnx, torch, not 'x'"):
        load(folder, runtime="x")


def test_without_a_runtime_a_checkpoint_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra to install."""
    monkeypatch.setattr("length_tagger.roberta.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"is not installed: pip install 'block-serving\[encoder\]'"):
        load(folder)
    with pytest.raises(ValueError, match=r"is not installed: pip install 'block-serving\[tagger\]'"):
        load(folder, runtime="torch")


def test_the_shipped_encoder_needs_no_torch() -> None:
    """With ONNX Runtime, torch is not imported."""
    code = (
        "import sys; from length_tagger.roberta import *; "
        "estimate = RobertaTagger.load(SHIPPED).estimate(Query(prompt='Name a river.')); "
        "print(estimate.estimator, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["roberta", "False"]


def test_prompts_of_similar_length_are_batched_together() -> None:
    """Groups contain every prompt once, with little padding."""
    ids = [[1] * num for num in (120, 3, 0, 118, 9, 60, 128)]
    groups = groups_of_similar_length(ids)
    assert sorted(index for group in groups for index in group) == list(range(7))
    assert groups == [[2, 1], [4], [5], [3, 0, 6]]
    batch, mask = padded([[5, 6], []], padding=9)
    assert batch.tolist() == [[5, 6], [9, 9]]
    assert mask.tolist() == [[1, 1], [1, 0]]


def test_head_and_tail_of_a_long_prompt_are_kept(folder: Path) -> None:
    """Two thirds of the tokens are the head, one third is the tail."""
    tokenizer = load(folder).tokenizer
    whole = tokenizer.encode("first one " + "king " * 100 + "last two").ids
    (cut,) = encoded(tokenizer, ["first one " + "king " * 100 + "last two"], 24)
    assert cut == whole[:16] + whole[-8:]


def test_the_shipped_encoder_is_combined_with_linear() -> None:
    """It accepts any prompt, and its estimate is the geometric mean of the encoder's and `linear`'s."""
    shipped = RobertaTagger.load(SHIPPED)
    assert shipped.checkpoint.beside_linear == 0.5
    estimates = shipped.estimate_many([Query(prompt=prompt) for prompt in HOSTILE])
    assert estimates[0] is None
    assert all(one is not None and 1 <= one.median_tokens <= 100_000 for one in estimates[1:])
    query = Query(prompt="Write a long story about a river.", model="google/gemma-3-4b-it")
    own = RobertaTagger(replace(shipped.checkpoint, beside_linear=0.0)).estimate(query)
    linear, mean = LinearTagger(load_linear()).estimate(query), shipped.estimate(query)
    assert own is not None
    assert linear is not None
    assert mean is not None
    assert mean.median_tokens == pytest.approx((own.median_tokens * linear.median_tokens) ** 0.5)


def test_unknown_lengths_do_not_affect_the_loss() -> None:
    """Missing lengths are ignored; an error counts more for a long response."""
    medians, spreads = torch.full((1, 2), 5.7), torch.zeros(1, 2)
    log_lengths = torch.tensor([[[6.7, float("nan")], [float("nan"), float("nan")]]])
    assert loss_of(medians, spreads, log_lengths).item() == pytest.approx(2.0)
    assert loss_of(medians + 2, spreads, log_lengths + 2).item() == pytest.approx(1 + np.e)


def test_invalid_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    """Missing files, other formats, other shapes and infinite weights are named."""
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path / "nothing")
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.onnx").unlink()
    weights = load_file(folder / "model.safetensors")
    for name, value in (("out.bias", torch.zeros(3)), ("out.bias", torch.full_like(weights["out.bias"], torch.inf))):
        save_file({**weights, name: value}, broken / "model.safetensors")
        with pytest.raises(ValueError, match="is not a checkpoint"):
            load(broken)
    (broken / "model.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        load(broken)
    (broken / "block.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(ValueError, match="format is 'another'"):
        load(broken)
