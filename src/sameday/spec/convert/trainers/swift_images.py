"""The sizes of ms-swift's images. qwen_vl_utils resizes a Qwen-VL's to limits of its own, and the model's processor
then leaves them as they are. What --max_pixels gives comes before that, for any model."""

from __future__ import annotations

from sameday.spec.convert.families import FAMILIES
from sameday.spec.convert.pixels import least_pixels
from sameday.spec.convert.settings import Settings

SHRUNK = "shrunk_to"
"""The name here of --max_pixels; max_pixels is that of the variable MAX_PIXELS."""
_MOST_TOKENS = "image_max_token_num"
TOKENS = {_MOST_TOKENS: "max_pixels", "image_min_token_num": "min_pixels"}
_LEAST_TOKENS = 4
_NEEDS_NEWER = ("qwen3_vl",)
"""Models that qwen_vl_utils knows since 0.0.14, which takes limits in tokens instead of pixels."""
_NEAR = (
    "near, not the same: images are shrunk to so many pixels first, and their sides then rounded to whole tokens, so "
    "that a side may be one token longer there than here"
)


def image_sizes(settings: Settings) -> None:
    if one := settings.one_size():
        settings.drop(
            SHRUNK, f"{one}; near, not the same: ms-swift shrinks larger images to so many pixels before that"
        )
        for name in (*TOKENS, *TOKENS.values()):
            settings.drop(name, one)
        for name in (*TOKENS, *TOKENS.values(), SHRUNK):
            settings.done(name)
        return
    for tokens, pixels in TOKENS.items():
        _version(settings, tokens, pixels)
    _shrunk(settings)
    for tokens, pixels in TOKENS.items():
        if tokens in settings.old:
            _tokens(settings, tokens, pixels)
    _least(settings)


def _version(settings: Settings, tokens: str, pixels: str) -> None:
    """Which of the two variables counts depends on the version of qwen_vl_utils."""
    if not settings.given(pixels):
        return
    variable = tokens.upper()
    if settings.kind in _NEEDS_NEWER:
        newer = "qwen_vl_utils 0.0.14 and later, which this model needs"
        settings.drop(pixels, f"does nothing: {newer}, read {variable} instead")
        settings.done(pixels)
    elif settings.given(tokens):
        why = "qwen_vl_utils before 0.0.14 reads this one alone, and later versions the other: leave out what was not"
        settings.refuse(pixels, f"but {settings.old[tokens][0]} is given too; {why} read")
    else:
        settings.why[pixels] = f"qwen_vl_utils 0.0.14 and later read {variable} instead: if it was one, leave this out"


def _shrunk(settings: Settings) -> None:
    """Of two limits on large images the smaller one says how large they are in the end."""
    first = settings.get(SHRUNK, int)
    limits = {"max_pixels": settings.get("max_pixels", int), _MOST_TOKENS: _in_pixels(settings, _MOST_TOKENS)}
    others = {name: count for name, count in limits.items() if isinstance(count, int)}
    if first is None or (isinstance(first, int) and first <= 0):
        settings.drop(SHRUNK, "does nothing at this value")
    elif isinstance(first, int) and any(count <= first for count in others.values()):
        smaller = f"images are shrunk to {min(others.values()):,} pixels after it"
        settings.drop(SHRUNK, f"{smaller}; near, not the same: those that it shrinks are resized twice there")
    else:
        for name in others:
            settings.drop(name, "--max_pixels shrinks images to fewer pixels before")
            settings.done(name)
        settings.put("recipe.max_pixels", first, [SHRUNK], _NEAR)
    settings.done(SHRUNK)


def _in_pixels(settings: Settings, tokens: str) -> int | None:
    count, side = settings.get(tokens, int), settings.family.token_side if settings.family is not None else None
    return count * side**2 if isinstance(count, int) and side is not None else None


def _tokens(settings: Settings, name: str, field: str) -> None:
    pixels = _in_pixels(settings, name)
    if pixels is None or settings.family is None:
        known = ", ".join(kind for kind, facts in FAMILIES.items() if facts.token_side is not None)
        settings.refuse(name, f"a number of image tokens of a known family is needed ({known})")
    else:
        count, side = settings.get(name, int), settings.family.token_side
        old = "; qwen_vl_utils before 0.0.14 does not read it" if settings.kind not in _NEEDS_NEWER else ""
        settings.put(f"recipe.{field}", pixels, [name], f"{count} tokens of {side}x{side} pixels{old}")
    settings.done(name)


def _least(settings: Settings) -> None:
    """Where nothing is said, its lower limit is not that of the processors of all models."""
    side = settings.family.token_side if settings.family is not None else None
    if side is None or settings.given("min_pixels") or settings.is_set("recipe.min_pixels"):
        return
    least = _LEAST_TOKENS * side**2
    if least != least_pixels(settings):
        why = f"qwen_vl_utils enlarges smaller images to {_LEAST_TOKENS} tokens of {side}x{side} pixels, and no others"
        settings.default("recipe.min_pixels", least, "IMAGE_MIN_TOKEN_NUM", why)
