"""How many tokens of a prompt images and audio take, by the rule of a model's processor, or by an estimate.

The rules are those of the processors that vLLM 0.32 runs (of `transformers`), with their published settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

ESTIMATED_IMAGE_TOKENS = 576  # of an image whose size, or whose model's rule, is not known
ESTIMATED_AUDIO_S = 30.0  # of audio whose length is not known
ESTIMATED_AUDIO_TOKENS_PER_S = 25.0
ESTIMATED_VIDEO_FRAMES = 32  # that vLLM samples of a video
MOST_TOKENS = 2**20  # of one image, or of one piece of audio

Size = tuple[int, int]  # width and height in pixels
ImageRule = Callable[[Size], int]


@dataclass(frozen=True, slots=True)
class ModelMedia:
    """The rules of a family of models; None where it reads no such input, or the rule is not known."""

    family: str
    image: ImageRule | None = None
    any_image: int | None = None  # of an image of unknown size
    audio_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """The tokens of an image or of audio, and whether they are counted by the model's own rule."""

    tokens: int
    is_exact: bool


def merged_patches(patch: int, merge: int, least_pixels: int, most_pixels: int) -> ImageRule:
    """Return the rule of Qwen's models: patches of an image resized to whole squares of merged ones (smart_resize)."""
    factor = patch * merge

    def tokens(size: Size) -> int:
        width, height = size
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > most_pixels:
            shrink = math.sqrt(height * width / most_pixels)
            rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
        elif rows * columns * factor**2 < least_pixels:
            grow = math.sqrt(least_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
        return rows * columns

    return tokens


def constant(num_tokens: int) -> ImageRule:
    """Return the rule of models that make the same number of tokens of every image."""
    return lambda _: num_tokens


def anyres(side: int, patches: int, grids: tuple[Size, ...]) -> ImageRule:
    """Return the rule of LLaVA-NeXT: a small image, and tiles of the grid that fits best, without their padding.

    `grids` are widths and heights in tiles of `side` pixels and `patches` patches on each side.
    """

    def fit(size: Size, grid: Size) -> tuple[int, int]:
        width, height = size
        wide, high = grid[0] * side, grid[1] * side
        scale = min(wide / width, high / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, -(wide * high - used)

    def tokens(size: Size) -> int:
        width, height = size
        # in the order of the processor's list, the first of equal ones
        columns, rows = max(grids, key=lambda grid: fit(size, grid))
        high, wide = patches * rows, patches * columns
        if width / height > wide / high:
            high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
        else:
            wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
        return patches**2 + high * wide + high

    return tokens


def tiles(side: int, tokens_each: int, most_tiles: int) -> ImageRule:
    """Return the rule of InternVL: tiles in the closest aspect ratio, and a small image beside several of them."""
    grids = sorted(
        {
            (columns, rows)
            for columns in range(1, most_tiles + 1)
            for rows in range(1, most_tiles + 1)
            if columns * rows <= most_tiles
        },
        key=lambda grid: grid[0] * grid[1],
    )

    def tokens(size: Size) -> int:
        width, height = size
        best, least = (1, 1), math.inf
        for columns, rows in grids:
            difference = abs(width / height - columns / rows)
            if difference < least:
                best, least = (columns, rows), difference
            elif difference == least and width * height > 0.5 * side**2 * columns * rows:
                best = (columns, rows)
        num = best[0] * best[1]
        return tokens_each * (num + (num > 1))

    return tokens


def patch_rows(patch: int, longest: int) -> ImageRule:
    """Return the rule of Pixtral: patches in rows, each with one more token at its end."""

    def tokens(size: Size) -> int:
        width, height = size
        ratio = max(width / longest, height / longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        return math.ceil(height / patch) * (math.ceil(width / patch) + 1)

    return tokens


NEXT_GRIDS = ((2, 1), (1, 2), (2, 2), (1, 3), (3, 1))  # widths and heights
QWEN2_PIXELS = 4 * 28 * 28, 16384 * 28 * 28

# The first pattern that a model's name matches counts; a model that matches none is estimated.
FAMILIES: tuple[tuple[re.Pattern[str], ModelMedia], ...] = tuple(
    (re.compile(pattern), media)
    for pattern, media in (
        (
            r"qwen-?3-?vl|qwen3\.\d-vl",
            ModelMedia("Qwen3-VL", merged_patches(16, 2, 65_536, 16_777_216)),
        ),
        (r"qwen-?2(\.5)?-?vl", ModelMedia("Qwen2-VL", merged_patches(14, 2, *QWEN2_PIXELS))),
        (
            r"qwen-?2\.5-?omni",
            ModelMedia("Qwen2.5-Omni", merged_patches(14, 2, *QWEN2_PIXELS), audio_tokens_per_s=25.0),
        ),
        (r"qwen-?2-?audio", ModelMedia("Qwen2-Audio", audio_tokens_per_s=25.0)),
        (r"llava-?(v?1\.6|next)", ModelMedia("LLaVA-NeXT", anyres(336, 24, NEXT_GRIDS), any_image=2928)),
        (r"llava-?(v?1\.5)", ModelMedia("LLaVA-1.5", constant(576), any_image=576)),
        (r"internvl", ModelMedia("InternVL", tiles(448, 256, 12))),
        (r"gemma-?3", ModelMedia("Gemma 3", constant(256), any_image=256)),
        (r"mistral-small-3\.[12]", ModelMedia("Mistral Small 3.1", patch_rows(28, 1540))),
        (r"pixtral", ModelMedia("Pixtral", patch_rows(16, 1024))),
        (r"voxtral", ModelMedia("Voxtral", audio_tokens_per_s=12.5)),
        (r"whisper", ModelMedia("Whisper", audio_tokens_per_s=50.0)),
    )
)
UNKNOWN = ModelMedia("")


def media_of(model: str) -> ModelMedia:
    """Return the rules of a model by its name; those that are unknown are estimates."""
    name = model.lower()
    return next((media for pattern, media in FAMILIES if pattern.search(name)), UNKNOWN)


def image_tokens(model: str, size: Size | None) -> MediaTokens:
    """Count the tokens of an image; without a size, or a known rule, estimate them."""
    media = media_of(model)
    if media.image is not None and size is not None and min(size) > 0:
        return MediaTokens(min(max(1, media.image(size)), MOST_TOKENS), True)
    fixed = media.any_image
    if fixed is not None:
        return MediaTokens(fixed, media.image is not None and media.image((1, 1)) == media.image((5000, 100)))
    return MediaTokens(ESTIMATED_IMAGE_TOKENS, False)


def audio_tokens(model: str, seconds: float | None) -> MediaTokens:
    """Count the tokens of audio; without a length, or a known rule, estimate them."""
    rate = media_of(model).audio_tokens_per_s
    length_s = ESTIMATED_AUDIO_S if seconds is None else seconds
    tokens = round(length_s * (ESTIMATED_AUDIO_TOKENS_PER_S if rate is None else rate))
    return MediaTokens(min(max(1, tokens), MOST_TOKENS), rate is not None and seconds is not None)


def video_tokens(model: str) -> MediaTokens:
    """Estimate the tokens of a video, whose frames only the engine samples."""
    each = image_tokens(model, (448, 448))
    return MediaTokens(min(each.tokens * ESTIMATED_VIDEO_FRAMES // 2, MOST_TOKENS), False)
