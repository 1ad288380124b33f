"""A tiny model, a tokenizer of a few words, and tasks over texts that are made here."""

from __future__ import annotations

import inspect
import random
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from lamina.bank import Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers.discovery import same_stacks
from lamina.tasks import kind_of
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.train import FitResult, fit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

PLAIN = [
    "the",
    "a",
    "film",
    "is",
    "was",
    "good",
    "bad",
    "very",
    "not",
    "slow",
    "fun",
    "and",
    "to",
    "of",
    "it",
    "we",
    ".",
]
PEOPLE, PLACES = ["anna", "ben", "carla"], ["paris", "rome", "oslo"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *PLAIN, *PEOPLE, *PLACES]
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
LENGTH = 32


def tiny_tokenizer(padding_side: str = "right") -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=LENGTH,
        padding_side=padding_side,
    )


def tiny_model(seed: int = 0) -> PreTrainedModel:
    """Three blocks of width 16. Its dropout is set high: a frozen model must not use it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.5,
            initializer_range=0.3,
        )
        return BertModel(config, add_pooling_layer=False).eval()


@cache
def _known() -> PreTrainedModel:
    return tiny_model()


def smoothed() -> PreTrainedModel:
    """The base with the same weights, whose norms add a larger number."""
    model = tiny_model()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.5
    return model


def tiny_bank(readers: Mapping[str, Reader], model: PreTrainedModel | None = None) -> ReaderBank:
    """A bank on a model of its own; where the layers of that are is found once per process."""
    if model is None:
        same_stacks(_known(), model := tiny_model())
    bank = ReaderBank(model, tiny_tokenizer())
    for name, reader in readers.items():
        bank.add(name, reader).first_hash = None  # many tests ask untrained readers
    return bank


def reader(task: Task | None = None, *, dim: int = 8, dropout: float = 0.0, seed: int = 0, **settings: Any) -> Reader:
    """AdaLayers under the head that fits the task; two classes without one."""
    fusion = AdaLayers(**{"dim": dim, "dropout": dropout, "alpha": 4.0, **settings})
    if task is not None and task.kind == "token_classification":
        head: Any = TokenClassification(task.labels, attention_heads=2, feedforward=12, dropout=dropout)
    else:
        labels, problem = (task.labels, task.problem_type) if task else (("no", "yes"), "classification")
        head = SequenceClassification(labels, attention_heads=2, dropout=dropout, problem_type=problem)  # pyright: ignore
    return Reader(fusion, head, seed=seed)


def sentences(count: int, seed: int, low: int = 2, high: int = 9) -> list[list[str]]:
    """Rows of words; most of each come from one half of the vocabulary."""
    rng = random.Random(seed)
    words = [*PLAIN, *PEOPLE, *PLACES]
    rows = []
    for _ in range(count):
        half = rng.choice((words[::2], words[1::2]))
        rows.append([rng.choice(half if rng.random() < 0.8 else words) for _ in range(rng.randint(low, high))])
    return rows


def _task(kind: str, problem: str, labels: Sequence[str], metrics: Sequence[str], splits: dict[str, Split]) -> Task:
    return Task(kind_of(kind), problem, tuple(labels), metrics[0], tuple(metrics), splits, f"{problem} of {kind[:5]}")


def _parts(train: int, validation: int, seed: int, **lengths: int) -> dict[str, list[list[str]]]:
    return {
        "train": sentences(train, 2 * seed, **lengths),
        "validation": sentences(validation, 2 * seed + 1, **lengths),
    }


def _split(rows: list[list[str]], labels: Sequence[Any]) -> Split:
    return Split.of([" ".join(row) for row in rows], labels)


def yes_no(*, train: int = 40, validation: int = 20, seed: int = 0) -> Task:
    """Which half of the vocabulary do most words come from?"""
    half = set([*PLAIN, *PEOPLE, *PLACES][::2])
    splits = {
        part: _split(rows, [int(2 * sum(word in half for word in row) > len(row)) for row in rows])
        for part, rows in _parts(train, validation, seed).items()
    }
    return _task("sequence_classification", "classification", ("no", "yes"), ("accuracy", "f1", "mcc"), splits)


def length_of_text(*, train: int = 40, validation: int = 20, seed: int = 0, scale: float = 0.1) -> Task:
    """How many words does a text have?"""
    splits = {
        part: _split(rows, [scale * len(row) for row in rows]) for part, rows in _parts(train, validation, seed).items()
    }
    return _task("sequence_classification", "regression", ("words",), ("pearson", "spearman"), splits)


def several(*, train: int = 40, validation: int = 20, seed: int = 0) -> Task:
    """Which of three things does a text speak of?"""
    wanted = (PEOPLE, PLACES, ["good", "bad"])
    splits = {
        part: _split(rows, [tuple(int(any(word in row for word in some)) for some in wanted) for row in rows])
        for part, rows in _parts(train, validation, seed).items()
    }
    return _task("sequence_classification", "multi_label", ("who", "where", "how"), ("f1", "accuracy"), splits)


def names(*, metric: str = "span_f1", train: int = 40, validation: int = 20, seed: int = 0, **lengths: int) -> Task:
    """People and places."""
    metrics = (metric, *(one for one in ("span_f1", "accuracy", "f1") if one != metric))
    splits = {}
    for part, rows in _parts(train, validation, seed, **lengths).items():
        tags = [tuple(1 if word in PEOPLE else 3 if word in PLACES else 0 for word in row) for row in rows]
        spans = []
        for row in rows:
            ends = [len(" ".join(row[: at + 1])) for at in range(len(row))]
            spans.append(tuple((end - len(word), end) for end, word in zip(ends, row, strict=True)))
        splits[part] = Split.of([" ".join(row) for row in rows], tags, spans)
    return _task("token_classification", "classification", TAGS, metrics, splits)


def train(bank: ReaderBank, tasks: Mapping[str, Task], **options: Any) -> FitResult:
    """`fit` with small settings and no progress bar. The bank is on the CPU afterwards, as the tests' tensors are."""
    call = inspect.unwrap(fit)  # as outside these tests: no type checker
    small = {"epochs": 1, "batch_size": 4, "learning_rate": 0.01, "progress": False}
    result = call(bank, tasks, **{**small, **options})
    bank.to("cpu")
    return result


def weights(bank: ReaderBank, name: str | None = None) -> dict[str, torch.Tensor]:
    """A copy of the tensors of one reader, or of all, on the CPU."""
    module = bank if name is None else bank[name]
    return {key: value.cpu().clone() for key, value in module.state_dict().items()}


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[key].cpu() - other[key].cpu()).abs().max().item() for key in one)


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key].cpu(), other[key].cpu()) for key in one)
