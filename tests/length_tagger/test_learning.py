"""Reading and splitting of samples; training, storage and robustness of `linear`; selection; scores."""

from __future__ import annotations

import gzip
import json
import math
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from length_tagger.cached import CachedTagger
from length_tagger.estimate import Estimate, LengthOutcome, Query
from length_tagger.features import NUM_BUCKETS, features
from length_tagger.keys import prompt_keys
from length_tagger.linear import LinearModel, LinearTagger, load, save
from length_tagger.linear_network import Recipe
from length_tagger.linear_training import fit
from length_tagger.samples import Sample, part_of, read_samples, split
from length_tagger.scores import sampling_ceiling, scores, spearman
from length_tagger.selection import Selector

HOSTILE = (
    "", " ", "a", "\0", "\ud800" * 50, "これは何ですか。" * 200, "مرحبا " * 500, "a" * 1_000_000, "word " * 200_000,
    "😀" * 5000, "?" * 4000, "\n" * 4000, "{}" * 3000, "\ufffd" * 3000, "9" * 4000,
)  # fmt: skip


def samples_of_words(num: int = 400) -> list[Sample]:
    """Prompts with words that determine the length: lists are long, names are short; one model is twice as wordy."""
    draw = random.Random(3)
    samples = []
    for number in range(num):
        task, tokens = draw.choice([("list all", 800), ("name one", 20), ("explain", 200)])
        prompt = f"Please {task} of the {draw.choice(['rivers', 'kings', 'birds'])} number {number}"
        for model, factor in (("brief", 1), ("wordy", 2)):
            lengths = tuple(max(1, round(factor * tokens * math.exp(draw.gauss(0, 0.2)))) for _ in range(4))
            samples.append(Sample(prompt=prompt, model=model, output_tokens=lengths, kind="chat"))
    return samples


@pytest.fixture(scope="module")
def model() -> LinearModel:
    """`linear`, trained on these samples."""
    return fit(samples_of_words(), recipe=Recipe(epochs=30, batch=32, members=1))


@pytest.fixture(scope="module")
def shipped() -> LinearTagger:
    """The shipped model."""
    return LinearTagger(load())


def test_all_formats_hold_the_same(tmp_path: Path) -> None:
    """JSON lines, CSV and Parquet, compressed or not, give the same samples."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"prompt": 'Say "hi",\nplease', "output_tokens": [5, 7], "model": "m"},
        {"prompt": "Grüße", "output_tokens": [9], "model": "n"},
    ]
    expected = [
        Sample(prompt=row["prompt"], output_tokens=tuple(row["output_tokens"]), model=row["model"]) for row in rows
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = 'prompt,output_tokens,model\n"Say ""hi"",\nplease",5 7,m\nGrüße,9,n\n'
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.csv").write_text(table)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(table.encode()))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.csv", "a.jsonl.gz", "a.csv.gz", "a.parquet"):
        assert read_samples(tmp_path / name) == expected, name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x", "output_tokens": 3}\n{"output_tokens": 3}', ":2: prompt: is missing"),
        ("a.jsonl", '{"prompt": "x"}', ":1: output_tokens: is missing"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": [3, 0]}', ":1: output_tokens: must lie between"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": [3.5]}', ":1: output_tokens: must be whole"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": []}', ":1: output_tokens: must be 1 to"),
        ("a.jsonl", '{"prompt": "x", "output_tokens": true}', ":1: output_tokens: must be whole"),
        ("a.jsonl", '{"prompt": 7, "output_tokens": 3}', ":1: prompt: must be a string"),
        ("a.jsonl", "[3]", ":1: must be an object"),
        ("a.jsonl", "{", ":1: is not JSON"),
        ("a.jsonl", "\n", "has no samples"),
        ("a.jsonl", b"\xff\xfe", "is not UTF-8"),
        ("a.csv", "prompt,output_tokens\nx,many\n", ":2: output_tokens: must be whole"),
        ("a.csv", "prompt,length\nx,3\n", ":2: output_tokens: is missing"),
        ("a.txt", "x", "must end in .jsonl"),
        ("a.parquet", "x", "is not Parquet"),
        ("a.jsonl.gz", "x", "cannot be read"),
    ],
)
def test_bad_rows_are_named(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    """Each error names the file, the row and the field."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message.replace(".", r"\.")) as caught:
        read_samples(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Its path is in the message."""
    with pytest.raises(ValueError, match="nowhere.jsonl: cannot be read"):
        read_samples(tmp_path / "nowhere.jsonl")


def test_all_rows_of_a_prompt_are_in_one_part() -> None:
    """All rows of a prompt are in one part; parts have about their shares; another seed gives another split."""
    samples = samples_of_words(1000)
    parts = split(samples, 0)
    prompts = {part: {sample.prompt for sample in some} for part, some in parts.items()}
    assert sum(map(len, prompts.values())) == len({sample.prompt for sample in samples})
    assert len(prompts["test"]) == pytest.approx(200, abs=50)
    assert len(prompts["validation"]) == pytest.approx(100, abs=40)
    assert part_of(" padded\n", 5) == part_of("padded", 5)
    assert prompts["test"] != {sample.prompt for sample in split(samples, 1)["test"]}


def test_linear_learns_what_words_and_models_mean(model: LinearModel) -> None:
    """Held-out prompts: less than half the median's error, ranks mostly right, nine of ten below the 90th percentile."""
    samples = samples_of_words()
    tests = split(samples, 0)["test"]
    known = [tokens for sample in samples for tokens in sample.output_tokens]
    medians, spreads = model.predict([one.prompt for one in tests], [one.model for one in tests])
    lengths = np.array([one.output_tokens for one in tests], float)
    said = np.repeat(medians, 4), np.repeat(spreads, 4)
    score = scores(lengths.ravel(), *said)
    baseline = scores(lengths.ravel(), np.full(lengths.size, np.median(known)), np.ones(lengths.size))
    assert score["mae"] < 0.5 * baseline["mae"]
    assert score["spearman"] > 0.8
    assert 0.75 < score["coverage_p90"] <= 1.0


def test_the_served_model_s_name_counts(model: LinearModel) -> None:
    """The wordy model gets longer estimates, with any path before its name and in any case; an unknown model is between."""
    estimate_of = ["brief", "wordy", "some/WORDY", "unheard-of"]
    (brief, wordy, same, unknown), spreads = model.predict(["Please explain of the kings"] * 4, estimate_of)
    assert brief < unknown < wordy == same
    assert spreads[3] > spreads[0]


@pytest.mark.slow
def test_training_again_gives_the_same(model: LinearModel) -> None:
    """The same samples and seed give the same weights."""
    again = fit(samples_of_words(), recipe=Recipe(epochs=30, batch=32, members=1))
    assert again.spread_scale == model.spread_scale
    assert np.array_equal(again.network.words, model.network.words)


def test_too_few_samples_are_refused() -> None:
    """A handful of prompts is not a training set."""
    with pytest.raises(ValueError, match="^prompt: .* too few"):
        fit(samples_of_words(8))


def test_a_saved_model_gives_the_same_estimates(model: LinearModel, tmp_path: Path) -> None:
    """Up to the rounding of 8-bit weights."""
    save(model, tmp_path / "m.npz")
    prompts = [sample.prompt for sample in samples_of_words(20)]
    before, after = (one.predict(prompts, ["wordy"] * len(prompts)) for one in (model, load(tmp_path / "m.npz")))
    assert np.allclose(before[0], after[0], rtol=0.02)
    assert np.allclose(before[1], after[1], rtol=0.02)


def test_invalid_model_files_are_refused(model: LinearModel, tmp_path: Path) -> None:
    """Pickles, other archives, missing or infinite weights and random bytes are refused, and no code in them is run."""
    path = tmp_path / "m.npz"
    with pytest.raises(ValueError, match="cannot be read"):
        load(path)

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (Path(tmp_path / "ran"),))  # type: ignore[return-value]

    save(model, path)
    with np.load(path) as arrays:
        good = dict(arrays)
    for content in (b"", b"PK\x03\x04nonsense", pickle.dumps(Bomb()), b"x" * 1000, path.read_bytes()[:5000]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=str(path)):
            load(path)
    for name, value in (
        ("about", np.frombuffer(b"{}", np.uint8)),
        ("words", np.array([Bomb()], object)),
        ("words", np.zeros((NUM_BUCKETS, 3), np.int8)),
        ("out_bias", np.full_like(good["out_bias"], np.inf)),
    ):
        np.savez(path, **{**good, name: value})
        with pytest.raises(ValueError, match="is not a model of `linear`"):
            load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("served", ["", "meta-llama/Llama-3.1-8B-Instruct", "\ud800" * 999])
def test_hostile_prompts_get_a_bounded_tag(served: str, shipped: LinearTagger) -> None:
    """Empty, huge, repetitive or binary prompts, in any script, get a finite length; an empty prompt gets none."""
    said = shipped.estimate_many([Query(prompt=prompt, model=served) for prompt in HOSTILE])
    assert said[0] is None
    for prompt, estimate in zip(HOSTILE[1:], said[1:], strict=True):
        assert estimate is not None
        assert 1 <= estimate.median_tokens <= 100_000, prompt[:20]
        assert 0 < estimate.spread < 5


@settings(max_examples=100, deadline=None, derandomize=True)
@given(prompts=st.lists(st.text(st.characters(exclude_categories=()), max_size=200), min_size=1, max_size=5))
def test_any_text_gets_a_tag_alone_as_in_a_batch(prompts: list[str], shipped: LinearTagger) -> None:
    """Other prompts in a batch do not change an estimate."""
    together = shipped.estimate_many([Query(prompt=prompt) for prompt in prompts])
    for prompt, estimate in zip(prompts, together, strict=True):
        alone = shipped.estimate(Query(prompt=prompt))
        assert (alone is None) == (estimate is None) == (prompt == "")
        if alone is not None and estimate is not None:
            assert alone.median_tokens == pytest.approx(estimate.median_tokens, rel=1e-3)


def test_features_are_the_same_in_every_process() -> None:
    """Buckets come from stable hashes."""
    seen = features(["Name one river", ""])
    assert seen.buckets.tolist() == sorted(seen.buckets.tolist())
    assert seen.starts.tolist() == [0, 5, 5]
    assert np.isfinite(seen.counts).all()


def test_cached_estimates_a_repeated_prompt() -> None:
    """More responses give less spread; other prompts, other models and cut responses do not count."""
    tagger = CachedTagger(max_prompts=2)
    keys = prompt_keys("m", "How are you?")
    tagger.observe(LengthOutcome(output_tokens=900, model="m", keys=keys, cut=True))
    assert tagger.estimate(Query(keys=keys)) is None
    tagger.observe(LengthOutcome(output_tokens=40, model="m", keys=keys))
    first = tagger.estimate(Query(keys=keys))
    for _ in range(9):
        tagger.observe(LengthOutcome(output_tokens=40, model="m", keys=keys))
    later = tagger.estimate(Query(keys=keys))
    assert first is not None
    assert later is not None
    assert first.median_tokens == pytest.approx(40)
    assert later.spread < first.spread
    assert later.confidence > first.confidence
    assert tagger.estimate(Query(keys=prompt_keys("n", "How are you?"))) is None
    for prompt in "abc":
        tagger.observe(LengthOutcome(output_tokens=1, keys=prompt_keys("m", prompt)))
    assert len(tagger) == 2
    assert tagger.estimate(Query(keys=keys)) is None


class FixedTagger:
    """An estimator with one fixed estimate."""

    def __init__(self, tokens: float, name: str) -> None:
        self.fixed = Estimate(median_tokens=tokens, spread=0.3, confidence=0.5, estimator=name)

    def estimate(self, query: Query) -> Estimate:  # noqa: ARG002 - the same for every query
        """Return the fixed estimate."""
        return self.fixed

    def observe(self, outcome: LengthOutcome) -> None:
        """Ignore outcomes."""


def estimate_of(selector: Selector, prompt: str, model: str = "m") -> Estimate:
    """Estimate a prompt."""
    estimate = selector.estimate(Query(prompt=prompt, model=model, keys=prompt_keys(model, prompt)))
    assert estimate is not None
    return estimate


def test_bias_is_corrected_for_each_model() -> None:
    """For a model with three times longer responses, estimates are corrected; for other models they do not change."""
    selector = Selector({"linear": FixedTagger(100, "linear")}, ("linear",))
    draw = random.Random(5)
    for number in range(1500):
        estimate_of(selector, str(number))
        length = max(1, round(300 * math.exp(draw.gauss(0, 0.3))))
        selector.observe(LengthOutcome(output_tokens=length, model="m", keys=prompt_keys("m", str(number))))
    assert estimate_of(selector, "x").median_tokens == pytest.approx(300, rel=0.1)
    assert estimate_of(selector, "x", "another").median_tokens == 100
    ((name, model_name, record),) = selector.records()
    assert (name, model_name, record.drifted) == ("linear", "m", True)
    assert record.error == pytest.approx(0.24, abs=0.08)


def test_cut_responses_do_not_lower_estimates() -> None:
    """A cut below the estimate is ignored; a cut above it shows that the estimate was too short."""
    selector = Selector({"linear": FixedTagger(100, "linear")}, ("linear",))
    for number in range(200):
        estimate_of(selector, str(number))
        selector.observe(LengthOutcome(output_tokens=16, model="m", cut=True, keys=prompt_keys("m", str(number))))
    assert estimate_of(selector, "x").median_tokens == 100
    for number in range(200):
        estimate_of(selector, str(number))
        selector.observe(LengthOutcome(output_tokens=400, model="m", cut=True, keys=prompt_keys("m", str(number))))
    assert estimate_of(selector, "x").median_tokens > 200


def test_the_most_accurate_estimator_is_selected() -> None:
    """The first estimator is used until another one is clearly more accurate, for each model."""
    selector = Selector({"linear": FixedTagger(100, "linear"), "history": FixedTagger(50, "history")}, ())
    assert estimate_of(selector, "x").estimator == "linear"
    for number in range(30):
        estimate_of(selector, str(number))
        selector.observe(LengthOutcome(output_tokens=50, model="m", keys=prompt_keys("m", str(number))))
    assert estimate_of(selector, "x").estimator == "history"
    assert estimate_of(selector, "x", "another").estimator == "linear"


def test_scores() -> None:
    """Scores equal values worked out by hand."""
    score = scores(np.array([100.0, 200.0, 300.0]), np.array([130.0, 260.0, 180.0]), np.zeros(3))
    assert score["mae"] == pytest.approx(70)
    assert score["mae_over_mean"] == pytest.approx(0.35)
    assert (score["acc50"], score["acc100"]) == pytest.approx((1 / 3, 2 / 3))
    assert score["spearman"] == pytest.approx(0.5)
    assert score["coverage_p90"] == pytest.approx(2 / 3)
    assert score["pinball"] == pytest.approx((35 + (0.1 * 30 + 0.1 * 60 + 0.9 * 120) / 3) / 2)
    assert spearman(np.ones(3), np.arange(3.0)) == 0.0
    lengths, medians, _ = sampling_ceiling([(10, 20, 60), (5,)])
    assert (lengths.tolist(), medians.tolist()) == ([10, 20, 60], [40, 35, 15])
