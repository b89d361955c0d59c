"""Rendered text: words in Pillow's built-in bitmap font, and Chinese characters drawn from strokes.

The bitmap font and the strokes give the same pixels with every version of Pillow and FreeType; outline fonts
do not.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from .draw import Draw
from .record import Item, Picture, Pixels
from .strokes import CHARACTERS, draw_character

_SIGNS = """
OPEN CLOSED EXIT ENTRANCE PUSH PULL HOTEL BANK CAFE PIZZA BAKERY MARKET PARKING TAXI STATION AIRPORT
LIBRARY MUSEUM SCHOOL OFFICE GARDEN BRIDGE STREET AVENUE CENTRAL NORTH SOUTH EAST WEST FRESH FRUIT
COFFEE TEA BREAD BOOKS MUSIC CINEMA THEATRE POLICE DOCTOR PHARMACY HOSPITAL CAUTION DANGER SLOW STOP
TICKETS INFORMATION TELEPHONE SUMMER WINTER SALE SPECIAL OFFER TODAY TOMORROW MONDAY FRIDAY SUNDAY
GOLDEN SILVER ROYAL GRAND PLAZA TOWER HARBOUR ISLAND RIVER MOUNTAIN FOREST LAKE BEACH SUNSET MORNING
EVENING WELCOME PLEASE THANK YOU WATER ENERGY POWER LIGHT HOUSE HOME FAMILY FRIEND CITY WORLD TRAVEL
AGENCY REPAIR SERVICE GARAGE FLOWERS
"""
WORDS = tuple(_SIGNS.split())
WORD_PROMPTS = ("Read the word in the picture.", "What is written here?", "What does the sign say?")
LINE_PROMPTS = (
    "\u8bfb\u51fa\u56fe\u4e2d\u7684\u6587\u5b57\u3002",
    "\u56fe\u4e2d\u5199\u7684\u662f\u4ec0\u4e48\uff1f",
)


def iiit5k(draw: Draw, number: int) -> Item:
    """One word on a plain ground, as in a cropped sign."""
    word = draw.pick(WORDS)
    if draw.chance(0.3):
        word = word.lower()
    elif draw.chance(0.2):
        word = f"{draw.between(1, 999)}"
    font = ImageFont.load_default_imagefont()
    left, top, right, bottom = font.getbbox(word)
    mask = Image.new("1", (right - left + 4, bottom - top + 2))
    ImageDraw.Draw(mask).text((2 - left, 1 - top), word, fill=1, font=font)
    scale = draw.between(2, 3)
    return Item(
        [f"<image>\n{draw.pick(WORD_PROMPTS)}", word],
        [Picture(f"images/iiit5k/{number:06d}.png", _colored(np.asarray(mask), scale, draw))],
        {"dataset": "rendered", "font": "Pillow bitmap font", "scale": scale},
    )


def chinese_text_recognition(draw: Draw, number: int) -> Item:
    """A line of 2 to 10 simple Chinese characters."""
    text = "".join(draw.pick(tuple(CHARACTERS)) for _ in range(draw.between(2, 10)))
    mask = np.concatenate([np.pad(draw_character(character), 1) for character in text], axis=1)
    scale = draw.between(1, 2)
    return Item(
        [f"<image>\n{draw.pick(LINE_PROMPTS)}", text],
        [Picture(f"images/chinese_text_recognition/{number:06d}.png", _colored(mask, scale, draw))],
        {"dataset": "rendered", "font": "strokes", "scale": scale},
    )


def _colored(mask: np.ndarray, scale: int, draw: Draw) -> Pixels:
    """Mask bool ``[h, w]`` -> uint8 ``[h * scale, w * scale, 3]``, dark on light or light on dark."""
    dark = np.array([draw.between(0, 80) for _ in range(3)])
    light = np.array([draw.between(190, 255) for _ in range(3)])
    ground, ink = (light, dark) if draw.chance(0.7) else (dark, light)
    large = mask.astype(bool).repeat(scale, 0).repeat(scale, 1)
    return np.where(large[..., None], ink, ground).astype(np.uint8)
