"""Tiny banks that read files: an image model's and a speech model's, with a file for each."""

from __future__ import annotations

import base64

from tests.support.finetuned import image_processor, vit
from tests.support.pictures import encoded, picture
from tests.support.sounds import layer_normed, sound_bytes, tone, waves

from lamina.bank import Reader, ReaderBank
from lamina.fusion.scalar_mix import ScalarMix
from lamina.heads.sequence_classification import AudioClassification, ImageClassification

PNG = encoded(picture(90))
WAV = sound_bytes(tone())


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def seeing() -> ReaderBank:
    bank = ReaderBank(vit(), image_processor())
    bank.add("animal", Reader(ScalarMix(), ImageClassification(("bird", "cat", "frog"))))
    return bank.eval()


def hearing() -> ReaderBank:
    bank = ReaderBank(layer_normed(), waves())
    bank.add("pitch", Reader(ScalarMix(), AudioClassification(("high", "low"))))
    return bank.eval()
