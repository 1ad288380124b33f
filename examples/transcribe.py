"""One pass of Whisper's encoder gives several answers: what is said, and in what mood, or who says it.

    python examples/transcribe.py CLIP.wav MOOD [SPEAKER ...] [--model openai/whisper-tiny] [--output out/transcribe]
    python examples/transcribe.py CLIP.wav DIGITS [--rows 300] [--model FOLDER]

MOOD is a folder that has a folder of audio files for each mood (such as the recordings of RAVDESS, sorted). Each
further folder asks one more question, named after the folder. DIGITS is a folder of recordings called
DIGIT_SPEAKER_NUMBER.wav (the Free Spoken Digit Dataset). They ask three questions: which digit, which speaker, and
whether white noise was added, which half of the recordings get here. Recordings 0 to 4 of each person and digit are not
learned from, so CLIP.wav can be one of them.

For each question, a reader on the frozen encoder learns from the files. Then the readers listen while the model
transcribes CLIP.wav as usual: there is no second pass, and the text is exactly the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import soundfile
import torch
from scipy.signal import resample_poly
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

import lamina
from lamina import Task


def main() -> None:
    """Train the reader, then transcribe and listen."""
    args = options()
    features, tokenizer = (auto.from_pretrained(args.model) for auto in (AutoFeatureExtractor, AutoTokenizer))
    model = AutoModelForSpeechSeq2Seq.from_pretrained(args.model).float().eval()
    if any(args.clips[0].glob("*_*_*.wav")):
        tasks = digits(args.clips[0], args.rows)
    else:
        tasks = {folder.name: Task.from_files("audio_classification", train=folder) for folder in args.clips}
    bank = lamina.ReaderBank(model, features)
    for name, task in tasks.items():
        bank.add(name, task)
    lamina.fit(bank, tasks, epochs=args.epochs, batch_size=8, learning_rate=2e-3)
    bank.save_pretrained(args.output / "bank")

    samples, rate = soundfile.read(args.clip, dtype="float32", always_2d=True)
    sound = resample_poly(samples.mean(1), features.sampling_rate, rate)
    batch = features(sound, sampling_rate=features.sampling_rate, return_tensors="pt", return_attention_mask=True)
    alone = model.generate(**batch, max_new_tokens=args.tokens)
    with bank.listen() as heard:
        text = model.generate(**batch, max_new_tokens=args.tokens)
    print("said:", tokenizer.decode(text[0], skip_special_tokens=True).strip())
    print("the same without the reader:", torch.equal(alone, text))
    for name, task in tasks.items():
        shares = heard[name].logits[0].softmax(-1).tolist()
        print(f"{name}:", ", ".join(f"{label} {share:.2f}" for label, share in zip(task.labels, shares, strict=True)))


def digits(folder: Path, count: int) -> dict[str, Task]:
    """Return three questions about recordings called DIGIT_SPEAKER_NUMBER.wav; every second one gets white noise."""
    files = [file for file in sorted(folder.glob("*_*_*.wav")) if int(file.stem.split("_")[2]) > 4]
    rng, rows = np.random.default_rng(0), []
    for number, at in enumerate(rng.permutation(len(files))[:count]):
        samples, rate = soundfile.read(files[at], dtype="float32")
        if number % 2:
            level = np.sqrt(np.mean(samples**2)) * 10 ** (-rng.uniform(10, 30) / 20)  # 10 to 30 dB
            samples = (samples + rng.normal(0, level, len(samples))).astype(np.float32)
        digit, speaker, _ = files[at].stem.split("_")
        audio = {"array": samples, "sampling_rate": rate}
        rows.append({"audio": audio, "digit": digit, "speaker": speaker, "noised": "yes" if number % 2 else "no"})
    parts = {"validation": rows[: len(rows) // 6], "train": rows[len(rows) // 6 :]}
    questions = ("digit", "speaker", "noised")
    return {name: Task.from_dataset("audio_classification", parts, label=name) for name in questions}


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path, help="recording to transcribe")
    parser.add_argument(
        "clips", type=Path, nargs="+", help="folder with a folder of recordings for each answer, or of digits"
    )
    parser.add_argument(
        "--rows", type=int, default=300, help="recordings of digits to learn from (default: %(default)s)"
    )
    parser.add_argument(
        "--model", default="openai/whisper-tiny", help="hub id or folder of a Whisper (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("out/transcribe"), help="folder of the bank (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=5, help="of training (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="of the text, at most (default: %(default)s)")
    args = parser.parse_args()
    names = [folder.name for folder in args.clips]
    if repeated := [name for name in names if names.count(name) > 1]:
        parser.error(f"two folders are called '{repeated[0]}', and a folder's name is its question. Rename one.")
    return args


if __name__ == "__main__":
    main()
