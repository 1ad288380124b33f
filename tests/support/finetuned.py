"""Tiny models with heads, what they are fine-tuned on, and `finetune` with small settings."""

from __future__ import annotations

import inspect
import io
import random
from typing import TYPE_CHECKING, Any

import torch
import transformers as _transformers
from tests.support.image_rows import image_column, image_split
from tests.support.pictures import CLASSES, picture
from tests.support.training import LENGTH, WORDS, tiny_tokenizer
from tokenizers import processors

from lamina import evaluate, finetune
from lamina.tasks import kind_of
from lamina.tasks.image_classification import LazyImage
from lamina.tasks.split import Split
from lamina.tasks.task import Task

transformers: Any = _transformers  # the stubs of its configs lack most of their fields

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from lamina.train import FitResult

SIZE = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}
END = WORDS.index("[SEP]")


def build(auto: str, config: Any, seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, auto).from_config(config).eval()


def bert(auto: str = "AutoModelForSequenceClassification", labels: int = 2, dropout: float = 0.0, **more: Any) -> Any:
    config = transformers.BertConfig(
        **{**SIZE, **more},
        num_labels=labels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return build(auto, config)


def albert() -> Any:
    return build(
        "AutoModelForSequenceClassification", transformers.AlbertConfig(**SIZE, embedding_size=8, num_labels=2)
    )


def t5(auto: str = "AutoModelForSeq2SeqLM", labels: int = 2) -> Any:
    config = transformers.T5Config(
        vocab_size=len(WORDS),
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=END,
        num_labels=labels,
    )
    return build(auto, config)


def bart(auto: str = "AutoModelForSeq2SeqLM", labels: int = 2) -> Any:
    config = transformers.BartConfig(
        vocab_size=len(WORDS),
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        pad_token_id=0,
        eos_token_id=END,
        decoder_start_token_id=END,
        num_labels=labels,
    )
    return build(auto, config)


def masking_tokenizer() -> PreTrainedTokenizerFast:
    """One with a sign for what is hidden."""
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "[UNK]"
    return tokenizer


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """As T5's: each text ends with a sign, and a pair with two."""
    tokenizer = tiny_tokenizer()
    ends = processors.TemplateProcessing("$A [SEP]", "$A [SEP] $B [SEP]", special_tokens=[("[SEP]", END)])
    tokenizer.backend_tokenizer.post_processor = ends
    tokenizer.eos_token = "[SEP]"
    return tokenizer


def vit(size: int = 8, labels: int = 3) -> Any:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=size,
        patch_size=4,
        num_labels=labels,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return build("AutoModelForImageClassification", config)


def image_processor(size: int = 8) -> Any:
    return transformers.ViTImageProcessorPil(size={"height": size, "width": size})


# Tasks


def pairs(*, train: int = 80, validation: int = 30) -> Task:
    """Does the second text say good, whatever the first does?"""
    rng = random.Random(0)
    splits = {}
    for part, count in (("train", train), ("validation", validation)):
        words = [rng.choices(["good", "bad"], k=2) for _ in range(count)]
        texts = tuple((f"the film is {one}", f"{other} film .") for one, other in words)
        splits[part] = Split.of(texts, [int(other == "good") for _, other in words])
    metrics = ("accuracy", "f1", "mcc")
    return Task(
        kind_of("sequence_classification"), "classification", ("no", "yes"), "accuracy", metrics, splits, "pairs"
    )


def running_text(*, train: int = 40, validation: int = 20) -> Task:
    """Hidden tokens of a text that says the same again and again."""
    line = "the film is good and anna was in paris ."
    splits = {part: Split.of([line] * n) for part, n in (("train", train), ("validation", validation))}
    return Task(
        kind_of("masked_lm"), "classification", ("token",), "perplexity", ("perplexity", "accuracy"), splits, "lines"
    )


def copies(kind: str = "summarization", *, train: int = 60, validation: int = 12) -> Task:
    """Write what you read: a word three times, and another twice."""
    words = ["good", "bad", "slow", "fun"]
    orders = [f"{one} {one} {one} {other} {other}" for one in words for other in words if one != other]
    splits = {}
    for part, count in (("train", train), ("validation", validation)):
        texts = tuple(orders[number % len(orders)] for number in range(count))
        splits[part] = Split.of(texts, texts)
    metrics = ("rougeL", "rouge1") if kind == "summarization" else ("bleu", "chrf")
    return Task(kind_of(kind), "generation", ("text",), metrics[0], metrics, splits, f"copies, {kind}")


def drawn(label: int, seed: int) -> LazyImage:
    """A picture of some shade, as the bytes of a file."""
    data = io.BytesIO()
    picture(40 + 85 * label, seed=seed).save(data, format="PNG")
    return LazyImage(f"shade {label}-{seed}", data=data.getvalue())


def shades(*, train: int = 30, validation: int = 15) -> Task:
    """How bright is a picture?"""
    splits = {}
    for part, count in (("train", train), ("validation", validation)):
        numbers = [number % 3 for number in range(count)]
        images = [drawn(label, 100 * len(part) + row) for row, label in enumerate(numbers)]
        splits[part] = image_split(image_column(images), numbers)
    return Task(
        kind_of("image_classification"), "classification", CLASSES, "accuracy", ("accuracy", "f1"), splits, "shades"
    )


# Runs


def tune(model: PreTrainedModel, task: Task, output: Path | None = None, **options: Any) -> FitResult:
    """`finetune` with small settings, the tokenizer of the made words, and no progress bar; then move to the CPU."""
    small = {"epochs": 1, "batch_size": 4, "learning_rate": 3e-3, "progress": False, "processor": tiny_tokenizer()}
    call = inspect.unwrap(finetune)  # as outside these tests: no type checker
    result = call(model, task, output=output, **{**small, **options})
    model.to("cpu")  # pyright: ignore[reportArgumentType]
    return result


def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A copy of a model's tensors, on the CPU."""
    return {key: value.cpu().clone() for key, value in model.state_dict().items()}


def scores(result: FitResult, metric: str) -> list[float]:
    """A metric, epoch by epoch."""
    return [row[metric] for row in result.history]


def scored(model: Any, task: Task, part: str, processor: Any = None, **options: Any) -> dict[str, float]:
    """Scores of a model on a part of a task."""
    return evaluate(model, {"it": task}, split=part, processor=processor, **options)["it"]
