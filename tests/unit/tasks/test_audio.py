"""Clips of sound: found, decoded, made mono, resampled; what cannot be read is named."""

# pyright: reportArgumentType=false

from __future__ import annotations

import itertools
import math
import pickle
import sys
from base64 import b64encode, encodebytes
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.support.pictures import picture_tar, put
from tests.support.portions import one_in
from tests.support.sounds import RATE, TONES, sound_bytes, sound_folder, tone

from lamina.errors import ConfigError, DataError, MissingExtraError
from lamina.prediction.bulk import read_examples
from lamina.serve.uploads import Upload
from lamina.tasks import kind_of
from lamina.tasks.audio_classification import LazyAudio
from lamina.tasks.lazy_file import beside
from lamina.tasks.task import Task

AUDIO = "audio_classification"
KIND = kind_of(AUDIO)
MANY = 1 << 20
UNREAD_CHUNKS = [
    b"",
    b"LIST\x1a\0\0\0INFOISFT\x0e\0\0\0Lavf60.16.100\0",
    b"junk" + (5001).to_bytes(4, "little") + b"data\0\0\0\0\1\2\3\xf0".ljust(5002),
]


def clips(*entries: Any) -> list[LazyAudio]:
    return list(KIND.examples(entries, None).texts)


def opened(entry: Any, rate: int = RATE) -> Any:
    return clips(entry)[0].open(rate, MANY)


# From files to examples


def test_clips_from_folders_and_tars(tmp_path: Path):
    folder = sound_folder(tmp_path / "tones", rows=10)
    task = Task.from_files(AUDIO, train=folder, test=picture_tar(tmp_path / "tones.tar", folder))
    assert (task.kind, task.problem_type, task.labels, task.metric) == (AUDIO, "classification", TONES, "accuracy")
    assert len(task.split("train")), len(task.split("validation")) == (27, 3)
    test = task.split("test")
    assert test.labels == (0,) * 10 + (1,) * 10 + (2,) * 10
    np.testing.assert_allclose(test.texts[10].open(RATE, MANY), tone("low", seconds=0.3, seed=100), atol=1e-4)
    assert pickle.loads(pickle.dumps(test)) == test


def test_folders_without_clips_say_what_clips_are(tmp_path: Path):
    put(tmp_path, "low/a.txt", "no sound")
    with pytest.raises(
        DataError, match=r"audio: .* has no clips \(ignored: 1 other files\); they end in .*\.flac.*\.wav"
    ):
        Task.from_files(AUDIO, train=tmp_path)


def test_columns_of_data_sets_are_not_decoded_by_them(tmp_path: Path):
    """`datasets` would ask for torchcodec."""
    sound = tone("high")
    file = put(tmp_path, "a.flac", sound_bytes(sound, kind="FLAC"))
    classes = datasets.ClassLabel(names=["no", "yes"])
    cells = [{"bytes": sound_bytes(sound), "path": None}, {"bytes": None, "path": str(file)}]
    hub = datasets.Dataset.from_dict({"audio": cells, "label": [1, 0]}).cast_column("label", classes)
    hub = hub.cast_column("audio", datasets.Audio())
    arrays = [{"audio": {"array": sound.tolist(), "sampling_rate": RATE}, "label": name} for name in ("yes", "no")]
    dicts = [{"audio": sound, "label": "yes"}, {"audio": str(file), "label": "no"}]
    for part in (hub, hub.with_format("numpy"), datasets.Dataset.from_list(arrays), arrays, dicts):
        task = Task.from_dataset(AUDIO, {"train": part, "validation": part})
        assert (task.labels, task.split("train").labels) == (("no", "yes"), (1, 0))
        for clip in task.split("train").texts:
            np.testing.assert_allclose(clip.open(RATE, MANY), sound, atol=1e-4)
    with pytest.raises(
        DataError, match="audio: the data set has no clips in column 'label'; its columns of clips are: au"
    ):
        Task.from_dataset(AUDIO, {"test": hub}, text="label")
    with pytest.raises(DataError, match=r"audio: task/test cannot be read \(row 2 is int; a clip is a path, bytes"):
        Task.from_dataset(AUDIO, {"test": [{"audio": sound, "label": 1}, {"audio": 3, "label": 1}]})


def test_parquet_and_tables_of_paths(tmp_path: Path):
    cells = [{"bytes": sound_bytes(tone(label)), "path": None} for label in ("low", "high")]
    pq.write_table(pa.table({"audio": cells, "label": ["l", "h"]}), tmp_path / "a.parquet")
    sound_folder(tmp_path / "tones", rows=1)
    put(tmp_path, "a.csv", "clip,label\ntones/low/0000.wav,l\ntones/high/0000.wav,h\n")
    for file, column in (("a.parquet", {}), ("a.csv", {"text": "clip"}), ("a.csv", {"inputs": "clip"})):
        split = Task.from_files(AUDIO, train=tmp_path / file, test=tmp_path / file, **column).split("test")
        assert split.labels == (1, 0)
        assert all(len(clip.open(RATE, MANY)) >= 120 for clip in split.texts)
    with pytest.raises(
        ConfigError, match=r"text is 'a' and inputs is 'clip'; both options name the column of the inputs"
    ):
        Task.from_files(AUDIO, train=tmp_path / "a.csv", text="a", inputs="clip")


SOUND = sound_bytes(tone(), subtype="FLOAT")


@pytest.mark.parametrize(
    "cell", [SOUND, "a.wav", {"path": "a.wav"}, {"bytes": SOUND, "path": "b.wav", "more": 1}, tone().tolist()]
)
def test_parquet_holds_files_in_every_form(cell: Any, tmp_path: Path):
    """Paths start at the folder of the table, in the rows of a task as in those to predict."""
    put(tmp_path, "a.wav", SOUND)
    pq.write_table(pa.table({"audio": [None, cell, cell], "label": ["l", "l", "h"]}), tmp_path / "a.parquet")
    _, *read = Task.from_files(AUDIO, test=tmp_path / "a.parquet", labels=["h", "l"]).split("test").texts
    for clip in read:
        assert clip.open(RATE, MANY).tolist() == tone().tolist()
    bulk = read_examples(tmp_path / "a.parquet", ["audio"], file=LazyAudio, bad=lambda _: None)
    assert next(bulk)[1] == [cell, cell]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_paths_may_start_at_the_working_directory(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file beside the table is preferred."""
    monkeypatch.chdir(tmp_path)
    for path, kind in (("a/x.wav", "low"), ("x.wav", "high"), ("b/y.wav", "middle")):
        put(tmp_path, path, sound_bytes(tone(kind)))
    table = pd.DataFrame({"audio": ["x.wav", "b/y.wav", "z.wav"], "label": ["l", "h", "h"]})
    getattr(table, f"to_{ending}")(f"a/table.{ending}", index=False)
    first, second, third = Task.from_files(AUDIO, test=f"a/table.{ending}", labels=["h", "l"]).split("test").texts
    np.testing.assert_allclose(first.open(RATE, MANY), tone("low"), atol=1e-4)
    np.testing.assert_allclose(second.open(RATE, MANY), tone("middle"), atol=1e-4)
    with pytest.raises(DataError, match=r"audio: a/z.wav cannot be read \(No such file"):
        third.open(RATE, MANY)
    with pytest.raises(DataError, match=r"audio: entry 0 \(z.wav\) cannot be read \(No such file"):
        opened({"path": "z.wav"})


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            {"bytes": "data:audio/wav;base64,AAAA"},
            "entry 0 has a text as \"bytes\" that is not Base64. Leave out a prefix 'data:...,'",
        ),
        (
            b64encode(SOUND).decode(),
            r'\.\.\. cannot be read \(.*\); a file in Base64 is given as {"byt',
        ),
        ("https://a.b/c.wav", r"https://a.b/c.wav cannot be read .*; files are read from disk, so download it first"),
    ],
)
def test_base64_is_given_as_bytes_and_urls_are_not_loaded(entry: Any, problem: str, tmp_path: Path):
    with pytest.raises(DataError, match=problem) as caught:
        opened(beside(tmp_path, entry))
    assert len(str(caught.value)) < 1200
    assert opened({"bytes": encodebytes(SOUND).decode()}).tolist() == opened(bytearray(SOUND)).tolist()


def test_base64_of_an_upload_may_have_line_breaks_only():
    text = encodebytes(SOUND).decode()
    assert Upload.of("audio", text.replace("\n", "\r\n")).data == SOUND
    for space in "\x0b\x1c\x85\u2028":
        with pytest.raises(ConfigError, match="audio is not Base64"):
            Upload.of("audio", text + space)


def test_a_form_is_recognised_without_decoding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lamina.tasks.lazy_file.from_base64", None)
    entries = [{"bytes": "AAAA"}, {"bytes": None, "path": "a"}, "a", Path("a"), SOUND, bytearray(SOUND), [0.5]]
    assert [LazyAudio.accepts(entry) for entry in entries] == [True] * 7
    entries = [{"bytes": None, "path": None}, {"path": None}, {}, 3, {"bytes": 3}, None]
    assert [LazyAudio.accepts(entry) for entry in entries] == [False] * 6


def test_a_stream_of_clips_is_not_decoded():
    rows = datasets.Dataset.from_dict({"audio": [{"bytes": SOUND, "path": None}] * 2, "label": ["h", "l"]})
    names = datasets.ClassLabel(names=["l", "h"])
    stream = rows.cast_column("audio", datasets.Audio()).cast_column("label", names).to_iterable_dataset()
    task = Task.from_dataset(AUDIO, {"test": stream})
    assert (task.labels, [clip.read() for clip in task.split("test").texts]) == (("l", "h"), [SOUND, SOUND])


# Decoding


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("FLAC", "PCM_24"), ("AIFF", "PCM_S8")]
)
def test_files_are_decoded(tmp_path: Path, kind: str, subtype: str):
    sound = tone("middle")
    data = sound_bytes(sound, kind=kind, subtype=subtype)
    for entry in (data, put(tmp_path, f"a.{kind.lower()}", data), {"bytes": data, "path": "x.wav"}):
        np.testing.assert_allclose(opened(entry), sound, atol=1 / 64 if subtype == "PCM_S8" else 1e-4)


def test_the_mean_of_the_channels_is_read(tmp_path: Path):
    left, right = tone("low", seed=1), tone("high", seed=2)
    both = np.stack([left, right])
    for entry in (sound_bytes(both.T, subtype="FLOAT"), both, both.T, torch.from_numpy(both)):
        np.testing.assert_allclose(opened(entry), (left + right) / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("riff", "said", "extra"),
    one_in(5, itertools.product([None, 0, 36, 0xFFFFFFFF], [0, 0x7FFFF000, 0xFFFFFFFF], UNREAD_CHUNKS)),
)
def test_a_wav_file_of_unknown_size_is_read_to_its_end(riff: int | None, said: int, extra: bytes, tmp_path: Path):
    """As programs write it that cannot go back to the header, to a pipe for example."""
    head, samples = sound_bytes(tone()).split(b"data")
    data = head + extra + b"data" + said.to_bytes(4, "little") + samples[4:]
    data = data if riff is None else data[:4] + riff.to_bytes(4, "little") + data[8:]
    for entry in (data, put(tmp_path, "a.wav", data)):
        np.testing.assert_allclose(opened(entry), tone(), atol=1e-4)
        assert clips(entry)[0].length(RATE) == len(tone())


def test_a_wav_file_without_samples_stays_empty():
    for more in (b"", b"LIST\4\0\0\0INFO"):
        with pytest.raises(DataError, match="entry 0 has no samples; a clip has at least one"):
            opened(sound_bytes(tone()[:0]) + more)


@pytest.mark.parametrize(("kind", "scale"), [(np.int16, 1 << 15), (np.int32, 1 << 31)])
def test_integers_are_divided_by_full_scale(kind: Any, scale: int):
    sound = np.linspace(-0.9, 0.9, 50).astype(np.float32)
    np.testing.assert_allclose(opened((sound * scale).astype(kind)), sound, atol=1e-4)
    assert (
        opened((sound * scale).astype(np.dtype(kind).newbyteorder(">"))).tolist()
        == opened((sound * scale).astype(kind)).tolist()
    )
    assert opened(np.full(50, 192, np.uint8)).tolist() == [0.5] * 50
    assert opened(torch.full((50,), 0.5, dtype=torch.bfloat16)).tolist() == [0.5] * 50
    with pytest.raises(DataError, match=r"entry 0 is an array of int64; its full scale is not known. Give floats"):
        clips(np.arange(50))


@pytest.mark.parametrize("rate", [np.float32(RATE), np.array(RATE), torch.tensor(RATE), float(RATE)], ids=repr)
def test_a_rate_may_be_a_number_of_numpy_or_torch(rate: Any):
    assert clips({"array": tone(), "sampling_rate": rate})[0].rate == RATE


def test_another_rate_is_resampled():
    """A tone keeps its pitch, and is as long as before."""
    sound = tone("low", seconds=1.0, rate=1000)
    for entry in (sound_bytes(sound, rate=1000, subtype="FLOAT"), {"array": sound, "sampling_rate": 1000}):
        heard = opened(entry)
        assert len(heard) == RATE
        assert clips(entry)[0].length(RATE) == RATE
        assert int(np.abs(np.fft.rfft(heard)).argmax()) == 20
    assert len(opened(sound)) == len(sound)  # a bare array is at the rate that is asked for
    assert len(clips(sound_bytes(sound, rate=1000))[0].open(RATE, 100)) == 100


@pytest.mark.parametrize("rate", [None, 0, -8000, 1.5, 10**9, math.nan, True])
def test_arrays_need_a_rate_that_is_one(rate: Any):
    with pytest.raises(DataError, match=r"entry 0 has (an array without a sampling rate|a rate of )"):
        clips({"array": tone(), "sampling_rate": rate})
    with pytest.raises(
        DataError, match=r"entry 0 has a rate of '8000' \(str\); it is a whole number from 1 to 768,000"
    ):
        clips({"array": tone(), "sampling_rate": "8000"})


def test_what_predict_takes(tmp_path: Path):
    file = put(tmp_path, "a.wav", sound_bytes(tone(), subtype="FLOAT"))
    entries = [file, str(file), file.read_bytes(), tone(), tone().tolist(), {"array": tone(), "sampling_rate": RATE}]
    split = KIND.examples([*entries, {"array": tone().tolist(), "sampling_rate": RATE}], None)
    assert len({clip.open(RATE, MANY).tobytes() for clip in split.texts}) == 1
    assert not split.labelled
    for entry in (3, ["a"], np.zeros((2, 2, 2), np.float32), {"sound": 1}):
        with pytest.raises(ConfigError, match=r"predict: entry 1 is \w+; a clip is a path, bytes, \{'array': ...,"):
            KIND.examples([file, entry], None)


def test_what_is_no_sound_is_named(tmp_path: Path):
    data = sound_bytes(tone())
    for entry, reason in (
        ("a sentence", r"a sentence cannot be read \(No such file or directory\)"),
        (
            put(tmp_path, "a.wav", "no sound"),
            r"a\.wav cannot be decoded \(Format not recognised\); every row of an audio task is a "
            "whole clip. Replace it, or remove its row",
        ),
        (data[:20], "entry 0 is cut off after 20 of"),
        (
            sound_bytes(tone(), kind="AIFF")[:-20],
            r"entry 0 is cut off after \d+ of \d+ bytes; every row is a whole clip",
        ),
        (sound_bytes(tone())[:-20], r"entry 0 is cut off after \d+ of \d+ bytes; every row is a whole clip"),
        (put(tmp_path, "c.wav", sound_bytes(tone())[:200]), r"c\.wav is cut off after 200 of \d+ bytes"),
        (np.zeros((0, 2), np.float32), "entry 0 has no samples; a clip has at least one"),
        (put(tmp_path, "b.raw", "xxxx"), r"b\.raw cannot be decoded"),
        (
            tmp_path,
            r"cannot be read \(it is not a file\); give its files, as in sorted\(Path\('.*'\).rglob\('\*.wav'\)\)",
        ),
        (None, "entry 0 is empty; every row of an audio task has a clip"),
        (sound_bytes(np.zeros(0, np.float32)), "entry 0 has no samples; a clip has at least one"),
        (sound_bytes(np.zeros((4, 65), np.float32)), "entry 0 has 65 channels; at most 64 are read"),
        (np.zeros(0, np.float32), "entry 0 has no samples; a clip has at least one"),
        (np.array([0.1, math.nan], np.float32), "entry 0 has samples that are NaN or infinite"),
        (sound_bytes(np.array([0.1, math.inf]), subtype="FLOAT"), "entry 0 has samples that are NaN or infinite"),
    ):
        with pytest.raises(DataError, match=f"audio: .*{reason}"):
            opened(entry)
        with pytest.raises(DataError, match=f"audio: .*{reason}") if "NaN" not in reason else pytest.raises(DataError):
            assert clips(entry)[0].length(RATE) == 2
            opened(entry)


@pytest.mark.parametrize("kind", ["AU", "W64", "RF64", "OGG"])
def test_a_cut_file_of_a_rarer_format_is_no_clip(kind: str, tmp_path: Path):
    """libsndfile would read each as a shorter clip."""
    data = sound_bytes(tone(seconds=2), kind=kind, subtype="VORBIS" if kind == "OGG" else "PCM_16")
    assert len(opened(data)) == len(opened(put(tmp_path, "whole", data))) == 2 * RATE
    for cut in (data[:-50], data[: len(data) * 2 // 3], put(tmp_path, "cut", data[: len(data) // 2])):
        with pytest.raises(DataError, match=r"is cut off after \d+ (of \d+ )?bytes; every row is a whole clip"):
            opened(cut)


@pytest.mark.parametrize("byte", [b"\0", b"\x1b", b"\xff"])
def test_an_ogg_file_with_a_long_tail_is_whole(byte: bytes):
    assert len(opened(sound_bytes(tone(seconds=2), kind="OGG", subtype="VORBIS") + byte * 70_000)) == 2 * RATE


def test_a_flac_file_from_a_pipe_does_not_say_its_number_of_samples():
    data = bytearray(sound_bytes(tone(), kind="FLAC", subtype="PCM_16"))
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])  # the number of samples in the first block
    with pytest.raises(DataError, match=r"entry 0 does not say its number of samples; .* Save it as a file"):
        opened(bytes(data))


def test_a_cut_mp3_file_is_no_clip():
    """Its header says how many samples there were."""
    data = sound_bytes(tone(seconds=1, rate=8000), rate=8000, kind="MP3")
    assert len(opened(data, 8000)) == 8000
    with pytest.raises(DataError, match=r"entry 0 is cut off after \d+ of 8000 samples; every row is a whole clip"):
        opened(data[: len(data) // 2], 8000)


@pytest.mark.parametrize(
    "tag",
    [b"", b"ID3\3\0\0\0\1\0\0" + bytes(1 << 14), b"ID3\3\0\0\0\0\1\0" + b"Xing\0\0\0\1".ljust(128, b"\0")],
    ids=["none", "long", "misleading"],
)
def test_an_mp3_file_without_its_number_of_samples_is_a_whole_clip(tag: bytes):
    """libmpg123 then guesses the number from the file's size and the first frames, here silent and so small."""
    sound = np.concatenate([np.zeros(8000), tone(seconds=2, rate=8000)])
    data = sound_bytes(sound, rate=8000, kind="MP3")
    assert b"Xing" in data[:40]
    frames = data[data.index(data[:2], 2) :]
    assert len(opened(tag + frames, 8000)) == pytest.approx(len(sound), abs=3000)
    with pytest.raises(DataError, match="is cut off"):
        opened(tag + data[: len(data) // 2], 8000)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert len(opened(tone())) == 200  # arrays do without
    with pytest.raises(MissingExtraError, match=r"audio: needs the package 'soundfile'.*pip install 'lamina\[audio\]'"):
        opened(sound_bytes(tone()))
