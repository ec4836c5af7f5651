"""Tokens of images and audio by the rules of models, worked out by hand from their processors' settings."""

from __future__ import annotations

import pytest

from predictor.media_tokens import ESTIMATED_IMAGE_TOKENS, audio_tokens, image_tokens, media_of, video_tokens


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        ("Qwen/Qwen2-VL-7B-Instruct", (448, 448), 256),  # 16 x 16 squares of 28 pixels
        ("qwen2.5-vl-72b", (280, 560), 200),
        ("qwen2-vl", (28, 28), 4),  # enlarged to 56 x 56
        ("Qwen3-VL-8B", (448, 448), 196),  # 14 x 14 squares of 32 pixels
        ("llava-1.5-7b-hf", (1000, 30), 576),
        ("llava-v1.6-mistral-7b-hf", (336, 336), 1176),  # 576, and 24 rows of 24 with a token at the end of each
        ("llava-v1.6-mistral-7b-hf", (672, 672), 2928),
        ("OpenGVLab/InternVL2-8B", (448, 448), 256),
        ("internvl3-8b", (896, 448), 768),  # two tiles and the small image
        ("google/gemma-3-27b-it", (5000, 3), 256),
        ("mistralai/Pixtral-12B-2409", (1024, 1024), 4160),  # 64 rows of 64 and one more
        ("pixtral", (2048, 1024), 2080),
        ("Mistral-Small-3.1-24B", (1540, 1540), 3080),
    ],
)
def test_images_are_counted_by_the_models_rule(model: str, size: tuple[int, int], tokens: int) -> None:
    """The count is exact."""
    counted = image_tokens(model, size)
    assert (counted.tokens, counted.is_exact) == (tokens, True)


def test_what_is_not_known_is_an_estimate() -> None:
    """An unknown model, an unknown size, and every video."""
    assert image_tokens("my-model", (448, 448)).tokens == ESTIMATED_IMAGE_TOKENS
    assert not image_tokens("my-model", (448, 448)).is_exact
    assert not image_tokens("qwen2-vl", None).is_exact
    assert image_tokens("llava-1.5", None).is_exact
    assert not image_tokens("llava-next", None).is_exact
    assert not video_tokens("qwen2-vl").is_exact
    assert media_of("my-model").family == ""


def test_audio_is_counted_by_its_length() -> None:
    """Qwen2-Audio makes 25 tokens of a second."""
    assert audio_tokens("Qwen2-Audio-7B", 4.0).tokens == 100
    assert audio_tokens("Qwen2-Audio-7B", 4.0).is_exact
    assert not audio_tokens("Qwen2-Audio-7B", None).is_exact
    assert not audio_tokens("other", 4.0).is_exact
    assert audio_tokens("other", 1e9).tokens <= 2**20
