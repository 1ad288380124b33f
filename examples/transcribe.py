"""One pass of Whisper's encoder gives several answers: what is said, and in what mood, or who says it.

    python examples/transcribe.py CLIP.wav MOOD [SPEAKER ...] [--model openai/whisper-tiny] [--output out/transcribe]

MOOD is a folder that has a folder of audio files for each mood (such as the recordings of RAVDESS, sorted). Each
further folder asks one more question, named after the folder. For each, a reader on the frozen encoder learns from its
files. Then the readers listen while the model transcribes CLIP.wav as usual: there is no second pass, and the text is
exactly the same. While the readers are trained, the model reads each file once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile
import torch
from scipy.signal import resample_poly
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

import lamina


def main() -> None:
    """Train the reader, then transcribe and listen."""
    args = options()
    features, tokenizer = (auto.from_pretrained(args.model) for auto in (AutoFeatureExtractor, AutoTokenizer))
    model = AutoModelForSpeechSeq2Seq.from_pretrained(args.model).eval()
    tasks = {folder.name: lamina.Task.from_files("audio_classification", train=folder) for folder in args.clips}
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


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path, help="recording to transcribe")
    parser.add_argument("clips", type=Path, nargs="+", help="folder with a folder of recordings for each answer")
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
