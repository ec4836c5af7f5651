"""Samples for training and evaluation: prompts and the lengths of their responses."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from length_tagger.estimate import MAX_TOKENS

Part = Literal["train", "validation", "test"]
Follow = Callable[[Iterable[tuple[int, Any]]], Iterable[tuple[int, Any]]]

VALIDATION_SHARE = 0.1
TEST_SHARE = 0.2
MAX_LENGTHS = 10_000  # of one row
KNOWN_ENDINGS = ".jsonl, .csv or .parquet, the first two also with .gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt, and the lengths of one or several responses of one model, in tokens.

    `kind` marks prompts that are evaluated separately, for instance "chat".
    """

    prompt: str
    output_tokens: tuple[int, ...]
    model: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        """Reject missing or invalid lengths."""
        if not 0 < len(self.output_tokens) <= MAX_LENGTHS:
            raise ValueError(f"output_tokens: must be 1 to {MAX_LENGTHS} lengths, not {len(self.output_tokens)}")
        for tokens in self.output_tokens:
            if not 1 <= tokens <= MAX_TOKENS:
                raise ValueError(f"output_tokens: must lie between 1 and {MAX_TOKENS}, not {tokens}")


def read_samples(path: str | Path, follow: Follow = iter) -> list[Sample]:
    """Read rows with prompt, output_tokens, and optionally model and kind; errors name the file and the row.

    `follow` gets the rows and returns them; it may count them on the way.
    """
    path = Path(path)
    samples: list[Sample] = []
    try:
        for number, row in follow(_rows(path)):
            try:
                samples.append(sample_from(row))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text") from None
    except csv.Error as error:
        raise ValueError(f"{path}: is not CSV: {error}") from None
    if not samples:
        raise ValueError(f"{path}: has no samples")
    return samples


def sample_from(row: Any) -> Sample:
    """Convert a row to a sample."""
    if not isinstance(row, Mapping):
        raise ValueError("must be an object with prompt and output_tokens")
    for name in ("prompt", "output_tokens"):
        if row.get(name) is None:
            raise ValueError(f"{name}: is missing")
    for name in ("prompt", "model", "kind"):
        if not isinstance(row.get(name) or "", str):
            raise ValueError(f"{name}: must be a string")
    return Sample(
        prompt=row["prompt"],
        output_tokens=_lengths(row["output_tokens"]),
        model=row.get("model") or "",
        kind=row.get("kind") or "",
    )


def _lengths(given: Any) -> tuple[int, ...]:
    """Parse one or several lengths: numbers, or the text of a CSV field with spaces or commas between them."""
    values = given.strip("[] ").replace(",", " ").split() if isinstance(given, str) else given
    values = values if isinstance(values, list | tuple) else [values]
    lengths = []
    for value in values:
        try:
            if isinstance(value, bool):
                raise TypeError
            number = int(value)
            if isinstance(value, float) and number != value:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"output_tokens: must be whole numbers, not {str(value)[:40]!r}") from None
        lengths.append(number)
    return tuple(lengths)


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield rows with their numbers, from 1: lines of text files, rows of Parquet tables."""
    ending = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    if ending == ".parquet":
        yield from enumerate(_parquet(path), 1)
        return
    if ending.removesuffix(".gz") not in (".jsonl", ".csv"):
        raise ValueError(f"{path}: must end in {KNOWN_ENDINGS}")
    with (
        gzip.open(path, "rt", encoding="utf-8", newline="")
        if ending.endswith(".gz")
        else path.open(encoding="utf-8", newline="") as lines
    ):
        if ending.startswith(".csv"):
            table = csv.DictReader(lines)
            for row in table:
                yield table.line_num, row
            return
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _json(line, f"{path}:{number}")


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not JSON: {error}") from None


def _parquet(path: Path) -> Iterable[Any]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install pyarrow") from None
    try:
        table = parquet.ParquetFile(path)
        columns = [name for name in ("prompt", "output_tokens", "model", "kind") if name in table.schema_arrow.names]
        for batch in table.iter_batches(columns=columns):
            yield from batch.to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: is not Parquet: {error}") from None


def read_castillo(folder: str | Path) -> list[Sample]:
    """Read the CASTILLO data: a table of prompts, and a table of ten lengths per prompt and model.

    The prompts of ShareGPT, Alpaca and Dolly are chat, the others are code.
    """
    prompts_file, lengths_file = Path(folder) / "castillo_prompts.jsonl.gz", Path(folder) / "castillo_lengths.csv.gz"
    samples = []
    try:
        with gzip.open(prompts_file, "rt", encoding="utf-8") as lines:
            prompts = {row["prompt_id"]: row for row in map(json.loads, lines)}
        with gzip.open(lengths_file, "rt", encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                prompt = prompts[row["prompt_id"]]
                samples.append(
                    Sample(
                        prompt=prompt["prompt"],
                        model=row["model"].replace("--", "/"),
                        output_tokens=tuple(int(row[f"o{number}"]) for number in range(10)),
                        kind="chat" if prompt["dataset"] in ("ShareGPT", "Alpaca", "DollyDataset") else "code",
                    )
                )
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    except (KeyError, ValueError) as error:
        raise ValueError(f"{folder}: is not the CASTILLO data: {error}") from None
    return samples


def part_of(prompt: str, seed: int) -> Part:
    """Return the part of the split that a prompt belongs to; it depends only on the prompt and the seed."""
    digest = blake2b(prompt.strip().encode("utf-8", "surrogatepass"), digest_size=8, key=seed.to_bytes(8, "big"))
    share = int.from_bytes(digest.digest(), "big") / 2**64
    if share < TEST_SHARE:
        return "test"
    return "validation" if share < TEST_SHARE + VALIDATION_SHARE else "train"


def split(samples: Iterable[Sample], seed: int) -> dict[Part, list[Sample]]:
    """Split samples by prompt."""
    parts: dict[Part, list[Sample]] = {"train": [], "validation": [], "test": []}
    for sample in samples:
        parts[part_of(sample.prompt, seed)].append(sample)
    return parts
