"""One pass of an image model gives two answers: the class of an image, and whether it shows an animal or a vehicle.

    python examples/two_attributes.py [TRAIN TEST] [--model NAME] [--output out/two_attributes]

TRAIN and TEST are folders, or tar files, with a folder of images per class: CIFAR-10's, each of which is an animal or a
vehicle. Without them, small pictures are drawn. NAME is a model on the hub, or its folder, such as
facebook/dinov2-small; without it, a tiny ViT with random weights is fine-tuned on the classes first. The output says
what was used.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

import lamina

ANIMALS = frozenset(("bird", "cat", "deer", "dog", "frog", "horse"))
VEHICLES = frozenset(("airplane", "automobile", "ship", "truck"))


def main() -> None:
    """Train two readers in the same passes, and evaluate both on the test images."""
    args = options()
    if args.train is None:
        parts = {"train": drawn(40, seed=0), "validation": drawn(10, seed=1), "test": drawn(20, seed=2)}
        classes = lamina.Task.from_dataset("image_classification", parts, name="class")
        print("images: small ones that were drawn here, no photographs")
    else:
        classes = lamina.Task.from_files(
            "image_classification", train=args.train, test=args.test, name="class", limit=args.rows
        )
        print(f"images: {args.train}")
    tasks = {"class": classes, "living": living(classes)}
    model, processor = seeing(args, classes)
    bank = lamina.ReaderBank(model, processor)
    for name, task in tasks.items():
        bank.add(name, task)
    training: dict[str, Any] = {"batch_size": 64, "learning_rate": 2e-3, "augment": False}
    lamina.fit(bank, tasks, epochs=args.epochs, output=args.output, **training)
    scores = lamina.evaluate(bank, tasks, split="test")
    for name, task in tasks.items():
        split, count = task.split("test"), len(task.split("test"))
        common = max(list(split.labels).count(number) for number in range(len(task.labels))) / count
        print(f"{name}: {scores[name]['accuracy']:.3f} of {count} test images right; always the same: {common:.3f}")
    tested = classes.split("test")
    images = [tested.texts[part * len(tested) // 4].open() for part in range(4)]
    for answer in lamina.predict(bank, images):
        print(", ".join(f"{name}: {own['label']} {own['score']:.2f}" for name, own in answer.items()))


def living(classes: lamina.Task) -> lamina.Task:
    """Return a task over the same images: does each show an animal or a vehicle?"""
    kinds = [1 if name in VEHICLES else 0 for name in classes.labels]
    if unknown := set(classes.labels) - ANIMALS - VEHICLES:
        raise SystemExit(f"{', '.join(sorted(unknown))} is neither an animal nor a vehicle that is known here")
    splits = {
        part: split.with_labels([kinds[label] for label in split.labels]) for part, split in classes.splits.items()
    }
    return replace(classes, labels=("animal", "vehicle"), positive="animal", splits=splits, name="living")


def seeing(args: argparse.Namespace, classes: lamina.Task) -> tuple[Any, Any]:
    """Return a pretrained model, or a newly trained one, with its image processor."""
    if args.model is not None:
        print(f"model: {args.model}")
        return lamina.load(args.model)
    sizes: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 192, "image_size": 32, "patch_size": 4, "num_labels": len(classes.labels)}
    config = ViTConfig(**sizes)
    model = ViTForImageClassification(config)
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    training: dict[str, Any] = {"batch_size": 64, "learning_rate": 1e-3, "augment": False}
    lamina.finetune(model, classes, processor=processor, epochs=args.epochs, **training)
    print("model: a tiny ViT that began with random weights and was fine-tuned on the classes here: no pretrained one")
    return model.vit, processor


def drawn(per_class: int, *, seed: int) -> list[dict[str, Any]]:
    """Return pictures of 32 x 32 in four shades of noise, of which two stand for animals and two for vehicles."""
    rng = np.random.default_rng(seed)
    shades = {"cat": (200, 60, 60), "frog": (60, 200, 60), "ship": (60, 60, 200), "truck": (180, 180, 60)}
    rows: list[dict[str, Any]] = []
    for label, shade in shades.items():
        for _ in range(per_class):
            noise = rng.integers(-60, 61, (32, 32, 3))
            rows.append({"image": np.clip(np.array(shade) + noise, 0, 255).astype(np.uint8), "label": label})
    return rows


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, nargs="?", help="a folder or tar of images to learn from")
    parser.add_argument("test", type=Path, nargs="?", help="one of images to be asked about")
    parser.add_argument("--model", help="hub id or folder of an image model; by default a tiny one is made")
    parser.add_argument(
        "--output", type=Path, default=Path("out/two_attributes"), help="folder of the bank (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=4, help="of training (default: %(default)s)")
    parser.add_argument("--rows", type=int, help="at most so many images of TRAIN; by default all")
    args = parser.parse_args()
    if (args.train is None) != (args.test is None):
        parser.error("give both TRAIN and TEST, or neither")
    return args


if __name__ == "__main__":
    main()
