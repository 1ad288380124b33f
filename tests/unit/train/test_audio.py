"""Readers of sound and whole models for it: trained, saved, asked; a clip's answer is its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.pictures import put
from tests.support.portions import one_in, set_apart
from tests.support.sounds import (
    RATE,
    ast_features,
    group_normed,
    layer_normed,
    sound_bytes,
    sound_folder,
    tiny_ast,
    tone,
    waves,
    whisper,
    whisper_features,
)
from tests.support.tiny import FAMILIES
from transformers import AutoModelForAudioClassification

from lamina import (
    AdaLayers,
    AudioClassification,
    Mean,
    Reader,
    ReaderBank,
    evaluate,
    finetune,
    fit,
    load,
    predict,
    predict_file,
    save,
)
from lamina.errors import CacheError, ConfigError, DataError
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

AUDIO = "audio_classification"
HEARS: dict[str, Any] = {
    "wav2vec2 with a mask": (layer_normed, waves),
    "wav2vec2 without": (group_normed, lambda: waves(return_attention_mask=False)),
    "hubert without": (lambda: group_normed("hubert"), lambda: waves(return_attention_mask=False)),
    "whisper": (whisper, whisper_features),
    "ast": (tiny_ast, ast_features),
}
SECONDS = (0.02, 0.3, 0.55, 0.9)


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.from_files(AUDIO, train=sound_folder(tmp_path_factory.mktemp("tones"), rows=8))


def bank_of(name: str, task: Task) -> ReaderBank:
    make, processor = HEARS[name]
    bank = ReaderBank(make(), processor())
    bank.add("whole", task)
    head = AudioClassification(task.labels, attention_heads=4)
    bank.add("ada", Reader(AdaLayers(dim=16), head))
    return bank


def probabilities(answer: dict[str, Any]) -> list[float]:
    return [p for own in answer.values() for p in own["probabilities"].values()]


@pytest.mark.parametrize("name", one_in(3, HEARS))
def test_a_clip_is_independent_of_its_batch(name: str, tones: Task):
    """Law 5, in models that take a mask, that take none, and that read one length."""
    bank = bank_of(name, tones)
    sounds = [{"array": tone(seconds=s, rate=1000, seed=i), "sampling_rate": 1000} for i, s in enumerate(SECONDS)]
    together = predict(bank, sounds, batch_size=4)
    alone = [predict(bank, [sound])[0] for sound in sounds]
    np.testing.assert_allclose([*map(probabilities, together)], [*map(probabilities, alone)], atol=1e-5)
    assert len({round(p, 7) for answer in together for p in probabilities(answer)}) > 12  # and not all the same


@pytest.mark.parametrize(
    "name", set_apart(["wav2vec2 with a mask", "wav2vec2 without", "whisper"], "wav2vec2 without", "whisper")
)
def test_readers_learn_tones_and_come_back(name: str, tones: Task, tmp_path: Path):
    bank = bank_of(name, tones)
    before = {key: value.clone() for key, value in bank.model.state_dict().items()}
    tasks = dict.fromkeys(bank, tones)
    result = fit(bank, tasks, epochs=6, batch_size=4, learning_rate=2e-2, output=tmp_path, progress=False)
    assert max(own["accuracy"] for own in result.best.values()) > 0.6
    assert all(torch.equal(value, before[key]) for key, value in bank.model.state_dict().items())
    again = ReaderBank.from_pretrained(tmp_path, model=bank.model, processor=bank.processor)
    low = sound_bytes(tone("low", seconds=0.4), subtype="FLOAT")
    assert predict(again, [low, tone("high")]) == predict(bank, [low, tone("high")])
    assert evaluate(again, tasks, progress=False) == evaluate(bank, tasks, progress=False)


def test_padding_gets_into_every_frame_of_a_model_without_a_mask():
    """Why such clips are never padded to their neighbours."""
    sound = torch.from_numpy(tone(seconds=0.5)).unsqueeze(0)
    padded = torch.cat([sound, torch.zeros_like(sound)], 1)
    with torch.no_grad():
        alone = group_normed()(sound).last_hidden_state[:, :-1]
        beside = group_normed()(padded).last_hidden_state[:, : alone.shape[1]]
    assert (beside - alone).norm() > 0.1 * alone.norm()


def test_a_step_of_a_batch_without_a_mask_is_of_one_length(tones: Task, monkeypatch: pytest.MonkeyPatch):
    """Training in batches of one length sees every clip once, in as many steps as it says."""
    long = [{"audio": tone("low", seconds=1.2, seed=row), "label": "low"} for row in range(3)]
    short = [{"audio": tone("high", seconds=0.3, seed=row), "label": "high"} for row in range(5)]
    task = Task.from_dataset(AUDIO, {"train": [*long, *short], "validation": [*long, *short]})
    bank = ReaderBank(group_normed(), waves(return_attention_mask=False))
    bank.add("whole", task)
    shapes: list[tuple[int, ...]] = []
    plain = type(bank).forward

    def spied(self: ReaderBank, **batch: Any) -> Any:
        if batch.get("labels"):
            shapes.append(tuple(batch["input_values"].shape))
        return plain(self, **batch)

    monkeypatch.setattr(type(bank), "forward", spied)
    result = fit(bank, {"whole": task}, epochs=1, batch_size=4, progress=False)
    assert result.steps == 3
    assert sorted(shapes) == [(1, 400), (3, 800), (4, 400)]


def test_the_mask_is_of_frames(tones: Task):
    """Each reader counts the frames of the sound alone: of Whisper, half of its columns."""
    sounds = [tone(seconds=s, seed=i) for i, s in enumerate((0.3, 0.6))]
    for name, frames in (("wav2vec2 with a mask", [29, 59]), ("whisper", [6, 12])):
        make, processor = HEARS[name]
        bank = ReaderBank(make(), processor())
        bank.add("mean", Reader(Mean(layers="all"), AudioClassification(tones.labels, pooling="mean")))
        bank.eval()
        heard = bank(**_inputs(bank, sounds))["mean"]
        assert heard.mask.sum(1).tolist() == frames
        alone = bank(**_inputs(bank, sounds[:1]))["mean"]
        assert alone.mask.sum(1).tolist() == frames[:1]
        torch.testing.assert_close(heard.logits[:1], alone.logits, atol=1e-5, rtol=0)


def _inputs(bank: ReaderBank, sounds: list[Any]) -> dict[str, torch.Tensor]:
    options = {"padding": True} if "input_values" in bank.processor.model_input_names else {}
    return bank.processor(sounds, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **options)


def test_readers_hear_whisper_while_it_transcribes(tones: Task):
    """Trained on clips, heard in `generate`: what is said is what the bank says, and the text is untouched."""
    bank = bank_of("whisper", tones)
    fit(bank, dict.fromkeys(bank, tones), epochs=1, batch_size=8, progress=False)
    bank.eval()
    clips = [tone("low", seconds=0.4), tone("high", seconds=0.9)]
    batch = _inputs(bank, clips)
    plain = bank.model.generate(**batch, max_new_tokens=6)
    with bank.listen() as heard:
        text = bank.model.generate(**batch, max_new_tokens=6)
    assert torch.equal(text, plain)
    said = predict(bank, clips)
    for name in bank:
        torch.testing.assert_close(heard[name].logits, bank(**batch)[name].logits, atol=1e-5, rtol=0)
        assert heard[name].mask.sum(1).tolist() == [8, 18]
        found = heard[name].logits.softmax(-1)
        expected = [[*answer[name]["probabilities"].values()] for answer in said]
        np.testing.assert_allclose(found.detach(), expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", one_in(3, ["wav2vec2 with a mask", "wav2vec2 without", "whisper"]))
def test_states_of_clips_are_computed_once(name: str, tmp_path: Path):
    """Kept states, without the frames of padding, train the same readers; a changed clip is noticed."""
    files = {label: sound_folder(tmp_path / "clips", rows=4) / label / "0003.wav" for label in ("low", "high")}
    task = Task.from_files(AUDIO, train=tmp_path / "clips")
    how: dict[str, Any] = {"epochs": 3, "batch_size": 4, "learning_rate": 1e-2, "progress": False}
    kept: dict[str, Any] = {"cache": "on", "cache_dir": tmp_path / "kept", "cache_dtype": "float32"}
    trained, passes = {}, {}
    for cache in ("off", "on", "again", "changed"):
        if cache == "changed":
            files["low"].write_bytes(files["high"].read_bytes())
        make, processor = HEARS[name]
        bank = ReaderBank(make(), processor())
        head = AudioClassification(task.labels, attention_heads=4, dropout=0)
        bank.add("ada", Reader(AdaLayers(dim=16, dropout=0), head))  # dropout would be drawn for fewer frames
        assert bank.stacks
        seen: list[int] = []
        conv = next(module for module in bank.model.modules() if isinstance(module, torch.nn.Conv1d))
        conv.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(len(out)))
        fit(bank, dict.fromkeys(bank, task), **how, **({"cache": "off"} if cache == "off" else kept))
        trained[cache], passes[cache] = bank, sum(seen)
    sounds = [tone(label, seconds=s, seed=9) for label in ("low", "high") for s in SECONDS]
    plain, cached = ([*map(probabilities, predict(trained[cache], sounds))] for cache in ("off", "on"))
    np.testing.assert_allclose(cached, plain, atol=1e-3)
    assert passes["off"] > passes["on"] > passes["again"]
    assert passes["on"] >= passes["changed"] > passes["again"]  # the part with the changed clip is computed again


def test_states_of_clips_whose_frames_are_not_known_are_not_kept(tones: Task, tmp_path: Path):
    bank = bank_of("ast", tones)
    with pytest.raises(CacheError, match="audio, and it is not known which frames of this model are padding"):
        fit(bank, dict.fromkeys(bank, tones), epochs=1, cache="on", cache_dir=tmp_path, progress=False)


@pytest.mark.parametrize("name", one_in(3, ["wav2vec2 with a mask", "whisper", "ast"]))
def test_whole_models(name: str, tones: Task, tmp_path: Path):
    make, processor = HEARS[name]
    config = make().config
    config.num_labels = 3
    model = AutoModelForAudioClassification.from_config(config)
    result = finetune(model, tones, processor=processor(), epochs=1, batch_size=8, output=tmp_path, progress=False)
    assert set(result.best[tones.name]) == {"epoch", "accuracy", "f1"}
    again, features = load(tmp_path, head=AUDIO)
    assert type(features) is type(processor())
    (answer,) = predict(again, [tone("high", rate=features.sampling_rate)], processor=features)
    assert set(answer[AUDIO]["probabilities"]) == set(tones.labels)


def test_a_model_of_sound_is_loaded_with_its_feature_extractor(tmp_path: Path):
    for number, (make, processor) in enumerate(HEARS.values()):
        save(make(), tmp_path / str(number), processor())
        _, features = load(tmp_path / str(number), head=type(make()))
        assert type(features) is type(processor())
        assert features.sampling_rate == processor().sampling_rate


def test_predict_file_takes_paths_and_goes_on(tones: Task, tmp_path: Path):
    bank = bank_of("wav2vec2 with a mask", tones)
    files = [put(tmp_path, f"{row}.wav", sound_bytes(tone(seed=row))) for row in range(3)]
    files[1].write_bytes(b"no sound")
    put(tmp_path, "in.jsonl", "\n".join(json.dumps({"audio": str(file)}) for file in files))
    with pytest.raises(DataError, match=r"predict: .*in\.jsonl row 2: audio: .*1\.wav cannot be decoded"):
        predict_file(bank, tmp_path / "in.jsonl", tmp_path / "a.jsonl", progress=False)
    result = predict_file(bank, tmp_path / "in.jsonl", tmp_path / "b.jsonl", skip_bad=True, progress=False)
    assert (result.rows, result.skipped) == (2, 1)
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == [str(files[0]), str(files[2])]
    assert rows[0]["readers"] == predict(bank, [files[0]])[0]


def test_a_longest_length_is_counted_and_remembered(tones: Task, caplog: pytest.LogCaptureFixture):
    bank = bank_of("wav2vec2 with a mask", tones)
    result = fit(bank, dict.fromkeys(bank, tones), epochs=1, batch_size=8, max_length=150, progress=False)
    assert result.truncated == {"whole": 12, "ada": 12}  # 0.4 seconds and more
    assert bank["whole"].info["max_length"] == 150
    sound = tone(seconds=0.9)
    answers = predict(bank, [sound, sound[:150]])
    np.testing.assert_allclose(probabilities(answers[0]), probabilities(answers[1]), atol=1e-6)
    assert "predict: 1 example is longer than what is read of it;" in caplog.text


def test_an_array_of_clips_is_a_list_of_them(tones: Task):
    bank = bank_of("wav2vec2 with a mask", tones)
    both = np.stack([tone(seed=0), tone("high", seed=1)])
    assert predict(bank, both) == predict(bank, list(both)) == predict(bank, torch.from_numpy(both))


def test_a_decoder_is_not_asked_about_clips(tones: Task):
    bank = ReaderBank(whisper(), whisper_features())
    bank.add("late", Reader(Mean(), AudioClassification(tones.labels), stack="decoder"))
    with pytest.raises(
        ConfigError, match="fit: reader 'late' reads the decoder, and a task of kind audio_classification"
    ):
        fit(bank, {"late": tones}, progress=False)


def test_texts_and_clips_do_not_mix(tones: Task):
    bank = bank_of("wav2vec2 with a mask", tones)
    with pytest.raises(DataError, match=r"audio: what a day cannot be read \(No such file or directory\)"):
        predict(bank, ["what a day"])
    bert = FAMILIES["bert-SequenceClassification"].build()
    bert.config.num_labels = 3
    with pytest.raises(
        ConfigError, match="finetune: BertForSequenceClassification has no head for a task of kind audio"
    ):
        finetune(bert, tones, processor=waves(), progress=False)
