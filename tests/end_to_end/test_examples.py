"""Every script in `examples/` runs, on small models that are made here."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.pictures import picture_folder, put
from tests.support.sounds import sound_bytes, sound_folder, tone, whisper, whisper_features
from tests.support.stored import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

EXAMPLES = Path(__file__).parents[2] / "examples"
STORY = ["<pad>", "<s>", "</s>", "<unk>", '▁"', "▁happy", "▁cat", "▁the", "▁sat", "▁on", "▁mat", "▁."]


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


def teller(folder: Path) -> Path:
    """A model that writes words at random, quotes among them."""
    torch.manual_seed(0)
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(STORY)}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=48, **special).save_pretrained(folder)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"vocab_size": len(STORY), "n_positions": 48, "n_embd": 16, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, **ids)).save_pretrained(folder)
    return folder


def summariser(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    config = BartConfig(vocab_size=len(tokenizer), **sizes, **heads, **ids, forced_eos_token_id=3)
    BartForConditionalGeneration(config).save_pretrained(folder)
    return folder


def hearer(folder: Path) -> Path:
    for part in (whisper(), whisper_features(), tiny_tokenizer()):
        part.save_pretrained(folder)
    return folder


def test_a_story_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    small = ["--stories", "90", "--tokens", "8", "--epochs", "1", "--rate", "0.5", "--tell", "2"]
    run(monkeypatch, "stories", teller(tmp_path / "teller"), "--output", out, *small)
    printed = capsys.readouterr().out
    assert "speech: flags 0." in printed
    assert printed.count("told to its end") + printed.count("stopped: it is happy") == 2
    assert (out / "story-2.svg").read_text().count("<text") >= 3  # the legend and a token
    assert (out / "bank" / "lamina.json").is_file()


def test_a_summary_and_what_the_readers_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, out = summariser(tmp_path / "summariser"), tmp_path / "out"
    small = ["--rows", "60", "--epochs", "1", "--tokens", "5"]
    run(monkeypatch, "summarise", "--model", model, "--output", out, *small)
    printed = capsys.readouterr().out
    assert "the same without readers: True" in printed
    assert "mood: negative 0." in printed
    assert "names: " in printed


@pytest.mark.long
def test_a_transcript_and_its_mood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    folder, clips = hearer(tmp_path / "hears"), sound_folder(tmp_path / "mood", rows=6)
    sizes = ["--epochs", "1", "--tokens", "5"]
    arguments = [clips / "low" / "0000.wav", clips, "--model", folder, "--output", tmp_path / "out", *sizes]
    with pytest.raises(SystemExit):
        run(monkeypatch, "transcribe", *arguments[:2], tmp_path / "other" / "mood")
    assert "two folders are called 'mood'" in capsys.readouterr().err
    run(monkeypatch, "transcribe", *arguments)
    printed = capsys.readouterr().out
    assert "the same without the reader: True" in printed
    assert "mood: high 0." in printed


@pytest.mark.long
def test_a_transcript_and_three_questions_about_a_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clips = tmp_path / "digits"
    for number, (digit, speaker) in enumerate([("1", "ada"), ("2", "bob")] * 14):
        put(clips, f"{digit}_{speaker}_{number // 2}.wav", sound_bytes(tone("low" if digit == "1" else "high")))
    small = ["--epochs", "1", "--tokens", "5", "--rows", "18", "--output", tmp_path / "out"]
    run(monkeypatch, "transcribe", clips / "1_ada_0.wav", clips, "--model", hearer(tmp_path / "hears"), *small)
    printed = capsys.readouterr().out
    assert "the same without the reader: True" in printed
    for answer in ("digit: 1 ", "speaker: ada ", "noised: no "):
        assert answer in printed


@pytest.mark.parametrize("at_hand", [False, pytest.param(True, marks=pytest.mark.long)])
def test_two_attributes_of_an_image(
    at_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    classes = ("cat", "ship")
    parts = [picture_folder(tmp_path / part, rows=8, classes=classes) for part in ("train", "test")] if at_hand else []
    run(monkeypatch, "two_attributes", *parts, "--epochs", "1", "--output", tmp_path / "out")
    printed = capsys.readouterr().out
    assert ("drawn here, no photographs" in printed) is not at_hand
    assert "began with random weights" in printed
    count = 16 if at_hand else 80
    for name, share in (("class", 1 / len(classes) if at_hand else 0.25), ("living", 0.5)):
        assert f"of {count} test images right; always the same: {share:.3f}" in printed
        assert f"{name}: " in printed
    assert printed.count("living: animal ") + printed.count("living: vehicle ") == 4
    assert (tmp_path / "out" / "lamina.json").is_file()


def test_images_that_are_neither_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = picture_folder(tmp_path, classes=("cat", "teapot"))
    with pytest.raises(SystemExit, match="teapot is neither an animal nor a vehicle"):
        run(monkeypatch, "two_attributes", part, part)


def test_each_example_is_tested():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [path.stem for path in EXAMPLES.glob("*.py") if f'"{path.stem}"' not in source] == []


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help_says_what_every_option_is_and_its_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
):
    given: list[argparse.Action] = []
    add = argparse.ArgumentParser.add_argument

    def noted(parser: argparse.ArgumentParser, *names: Any, **options: Any) -> argparse.Action:
        given.append(add(parser, *names, **options))
        return given[-1]

    monkeypatch.setenv("COLUMNS", "200")  # else lines end at the hyphens of names
    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", noted)
    with pytest.raises(SystemExit):
        run(monkeypatch, name, "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert given
    for action in given:
        assert action.help
        assert action.default in (None, argparse.SUPPRESS) or f"(default: {action.default})" in shown
