"""What `finetune` and `evaluate` refuse, and what they see to beforehand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.finetuned import (
    bert,
    copies,
    image_processor,
    masking_tokenizer,
    pairs,
    running_text,
    scored,
    shades,
    t5,
    t5_tokenizer,
    tensors,
    tune,
    vit,
)
from tests.support.training import WORDS, length_of_text, names, same, several, tiny_tokenizer, yes_no

from lamina import fit, freeze_, predict
from lamina.bank import ReaderBank
from lamina.errors import (
    ConfigError,
    DataError,
    LaminaError,
    LayerIndexError,
    NotFiniteError,
    UnknownNameError,
    UnsupportedModelError,
)
from lamina.layers import stacks
from lamina.store import load, save
from lamina.tasks import KINDS, kind_of
from lamina.tasks.split import Split
from lamina.tasks.targets import label_array
from lamina.tasks.task import Task
from lamina.train import engine, training_run
from lamina.train.engine import Engine
from lamina.train.learner import Learner
from lamina.train.model_runner import ModelRunner
from lamina.train.options import FitOptions

TOKEN = "AutoModelForTokenClassification"


def refused(model: Any, task: Any, message: str, error: type[LaminaError] = ConfigError, **options: Any) -> None:
    """The run ends before anything was changed."""
    before, config = tensors(model), model.config.to_dict()
    flags = [(one.requires_grad, one.grad) for one in model.parameters()]
    with pytest.raises(error, match=message):
        tune(model, task, **options)
    assert same(tensors(model), before)
    assert model.config.to_dict() == config
    assert [(one.requires_grad, one.grad) for one in model.parameters()] == flags
    assert not any(one.training for one in model.modules())


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize(
    ("build", "make", "options", "needs"),
    [
        (lambda: bert("AutoModel"), yes_no, {}, "AutoModelForSequenceClassification"),
        (lambda: t5("AutoModel"), copies, {"processor": t5_tokenizer()}, "AutoModelForSeq2SeqLM"),
        (bert, lambda: names(), {}, TOKEN),
        (lambda: bert(TOKEN), yes_no, {}, "AutoModelForSequenceClassification"),
        (lambda: bert(TOKEN, 5), lambda: replace(yes_no(), labels=tuple("abcde"), positive=None), {}, "Sequence"),
        (lambda: bert("AutoModelForMaskedLM"), yes_no, {}, "AutoModelForSequenceClassification"),
        (lambda: bert("AutoModelForMaskedLM"), copies, {}, "AutoModelForSeq2SeqLM"),
        (bert, running_text, {"processor": masking_tokenizer()}, "AutoModelForMaskedLM"),
        (gpt2, copies, {}, "AutoModelForSeq2SeqLM"),
        (vit, lambda: yes_no(), {}, "AutoModelForSequenceClassification"),
        (lambda: bert(labels=3), shades, {"processor": image_processor()}, "AutoModelForImageClassification"),
        (lambda: t5("AutoModelForSequenceClassification"), yes_no, {"processor": image_processor()}, "tokenizer"),
    ],
)
def test_a_model_without_the_head(build: Any, make: Any, options: dict[str, Any], needs: str):
    model = build()
    if needs == TOKEN:
        model = bert(labels=5)
    refused(model, make(), needs, **options)


def test_a_head_with_other_classes():
    few = r"finetune: the head has 2 classes, the task has 3 \(who, where, how\); .* num_labels=3"
    refused(bert(), several(), few)
    refused(bert(), length_of_text(), r"the head has 2 classes, the task has 1 \(words\)")
    model = bert()
    model.config.id2label = {0: "bad", 1: "good"}
    refused(
        model, yes_no(), "the classes of the head are bad, good, those of the task no, yes; they must agree, in this"
    )
    model.config.id2label = {0: "yes", 1: "no"}
    refused(model, yes_no(), "the classes of the head are yes, no")


def last_token_classifier() -> Any:
    """A model that finds the last token of each text by a padding token, which its config lacks."""
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2ForSequenceClassification(config).eval()


def test_the_tokenizers_padding_token_goes_into_a_config_without_one(tmp_path: Path):
    model, tokenizer = last_token_classifier(), tiny_tokenizer()
    tune(model, yes_no())
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    save(model, tmp_path, tokenizer)
    texts = ["good film", "bad", "the film is good and fun"]
    answers = predict(load(tmp_path, "sequence_classification")[0], texts)
    for use in (lambda model: predict(model, texts), lambda model: scored(model, yes_no(), "validation", tokenizer)):
        again, _ = load(tmp_path, "sequence_classification")
        again.config.pad_token_id = None
        use(again)
        assert again.config.pad_token_id == 0
        assert again.config.id2label == {0: "no", 1: "yes"}
        assert predict(again, texts) == answers


@pytest.mark.parametrize(("examples", "options"), [([["a", "b", "c"]], {}), (["a"], {"prefix": "b"}), ("a", {})])
def test_a_refused_prediction_leaves_the_config_as_it_was(examples: Any, options: dict[str, str]):
    model, tokenizer = last_token_classifier(), tiny_tokenizer()
    with pytest.raises(ConfigError, match="predict: "):
        predict(model, examples, processor=tokenizer, **options)
    assert model.config.pad_token_id is None
    assert len(predict(model, ["good", "bad film"], processor=tokenizer)) == 2
    assert model.config.pad_token_id == 0


def test_no_padding_token_anywhere():
    model, tokenizer = last_token_classifier(), tiny_tokenizer()
    refused(model, several(), "the head has 2 classes, the task has 3")
    tokenizer.pad_token = None
    message = r"GPT2ForSequenceClassification finds the end of texts by padding, and the tokenizer has no padding "
    refused(model, yes_no(), rf"finetune: {message}token\. Set tokenizer\.pad_token", processor=tokenizer)
    with pytest.raises(ConfigError, match=f"predict: {message}"):
        predict(model, ["good", "bad"], processor=tokenizer)
    assert len(predict(model, ["good"], processor=tokenizer)) == 1


def test_nothing_is_said_of_saving_a_model_with_adapters(caplog: pytest.LogCaptureFixture):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    tune(peft.get_peft_model(bert(), config), yes_no())
    assert "will load again" not in caplog.text


def test_a_model_with_adapters_answers_like_the_model_inside():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))
    tune(model, yes_no())
    (answer,) = predict(model, ["good film"], processor=tiny_tokenizer())
    assert answer == predict(model.get_base_model(), ["good film"], processor=tiny_tokenizer())[0]
    assert answer["sequence_classification"]["label"] in ("no", "yes")


def test_names_of_classes_that_differ_in_case_alone_are_kept():
    model = bert()
    model.config.id2label = {0: "NO", 1: "Yes"}
    tune(model, yes_no())
    assert model.config.id2label == {0: "NO", 1: "Yes"}


def test_a_new_head_gets_the_names_of_the_classes():
    model = bert()
    tune(model, yes_no())
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model.config.label2id == {"no": 0, "yes": 1}
    assert model.config.problem_type == "single_label_classification"


def test_a_processor_is_found_where_the_model_came_from(tmp_path: Path):
    model, task = bert(), yes_no()
    refused(model, task, r"no processor was given, and there is none where the model came from \(''\)", processor=None)
    model.save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    refused(model, task, "no processor was given, and there is none where the model came from", processor=None)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert tune(model, task, processor=None).steps == 10
    assert scored(model, task, "validation")["accuracy"] > 0.4


@pytest.mark.parametrize("part", ["train", "validation"])
def test_a_part_without_rows(part: str):
    task = yes_no()
    task = replace(task, splits={**task.splits, part: Split.of([], [])})
    refused(bert(), task, f"task .*: its {part} part is empty; it needs at least one row")


def test_a_part_that_is_not_there():
    task = yes_no()
    refused(
        bert(), replace(task, splits={"train": task.splits["train"]}), "unknown split 'validation'", UnknownNameError
    )
    with pytest.raises(UnknownNameError, match="unknown split 'test'; known: train, validation"):
        scored(bert(), task, "test", tiny_tokenizer())


def test_a_prefix_for_a_task_that_writes_nothing():
    refused(bert(), yes_no(), "prefix is 'say: ' for a task of kind sequence_classification", prefix="say: ")


def test_weights_in_float16():
    refused(bert().half(), yes_no(), r"'bert.embeddings.* is in float16, in which small steps are lost")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_float16_without_a_gpu():
    refused(bert(), yes_no(), "precision is 'float16' and there is no GPU", precision="float16")


def test_a_model_that_a_bank_reads():
    model = bert()
    model.requires_grad_(False)
    bank = ReaderBank(model, tiny_tokenizer())
    refused(model, yes_no(), "a bank reads this model and keeps it as it is; fine-tuning changes it")
    del bank


def test_options_that_cannot_be():
    refused(bert(), yes_no(), "finetune: unknown option 'epoch'.*Did you mean 'epochs'", UnknownNameError, epoch=3)
    refused(bert(), yes_no(), "finetune: epochs is 0; it must be at least 1", epochs=0)
    refused(bert(), {"a": yes_no()}, "finetune: task is a dict; it must be a Task")
    refused(bert(), yes_no(), "encode: max_length is 99; model and tokenizer take 1 to 32", max_length=99)
    refused(bert(), yes_no(), "resume is set but no output folder", resume=True)
    refused(bert(), yes_no(), "layer 9 does not exist", LayerIndexError, layer_rates={9: 1e-3})
    frozen = bert()
    frozen.requires_grad_(False)
    refused(frozen, yes_no(), "every parameter is frozen")


def test_a_processor_of_another_kind():
    refused(
        bert(),
        yes_no(),
        "the processor is a ViTImageProcessorPil; texts need a tokenizer",
        processor=image_processor(),
    )
    refused(vit(), shades(), "images: the processor is a .*; images need", processor=tiny_tokenizer())


def test_images_of_another_size():
    config = transformers.ViTConfig(**{**vit().config.to_dict(), "num_channels": 1})
    grey = transformers.ViTForImageClassification(config).eval()  # interpolates its positions, and fails all the same
    message = r"ViTForImageClassification fails on images of 16 x 16 \(.*\); .* set the processor's size"
    refused(grey, shades(), message, processor=image_processor(16))
    refused(vit(labels=2), shades(), "the head has 2 classes, the task has 3", processor=image_processor())


def test_a_tokenizer_without_a_mask():
    refused(bert("AutoModelForMaskedLM"), running_text(), "masked_lm: the tokenizer has no mask token")


def test_a_task_that_is_written_with_labels():
    task = copies()
    numbers = Split.of(task.split("train").texts, [1] * len(task.split("train")))
    refused(t5(), replace(task, splits={**task.splits, "train": numbers}), "targets are texts", DataError)


def test_a_run_that_falls_apart_is_stopped():
    options: dict[str, Any] = {"learning_rate": 1e30, "max_grad_norm": 0.0, "epochs": 2}
    with pytest.raises(NotFiniteError, match=r"finetune: the .* of the model is NaN or infinite at .*step \d+;"):
        tune(bert(labels=1), length_of_text(scale=1e30), **options)


def test_every_kind_has_a_head():
    assert all(hasattr(transformers, kind_of(name).auto_class) for name in KINDS.names())


def test_a_part_is_scored_without_training():
    model, task = bert(), yes_no()
    before = tensors(model)
    found = scored(model, task, "train", tiny_tokenizer(), batch_size=3)
    assert found.keys() == {"accuracy", "f1", "mcc"}
    assert found == scored(model, task, "train", tiny_tokenizer(), batch_size=40)
    assert same(tensors(model), before)
    with pytest.raises(ConfigError, match="has no head for a task of kind"):
        scored(bert("AutoModel"), task, "train", tiny_tokenizer())


def test_a_token_without_a_row_in_the_model_is_named():
    """Only the longest texts have such a token, so that the trial with the shortest rows succeeds."""
    texts, last = ["the film", "the film is good . rome"] * 4, WORDS.index("rome")
    rows = [{"text": text, "label": "yes" if len(text) > 9 else "no"} for text in texts]
    task = Task.from_dataset("sequence_classification", {"train": rows, "validation": rows}, text="text", label="label")
    message = rf"the tokenizer gives ids up to {last}; the model's token table has {last} rows, 0 to {last - 1}\."
    for run in (
        lambda model: tune(model, task, epochs=1),
        lambda model: scored(model, task, "train", tiny_tokenizer()),
        lambda model: predict(model, texts, processor=tiny_tokenizer()),
    ):
        with pytest.raises(ConfigError, match=message):
            run(bert(vocab_size=last))


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize(("make", "classes", "gap"), [(length_of_text, 1, np.nan), (several, 3, (-1, -1, -1))])
def test_rows_without_a_label_give_no_loss(make: Any, classes: int, gap: Any, size: int):
    task = make()
    train = task.split("train")
    gaps = [gap if row % 3 else label for row, label in enumerate(train.labels)]
    masked = replace(task, splits={**task.splits, "train": train.with_labels(gaps)})
    kept = replace(task, splits={**task.splits, "train": train.select_rows(range(0, 40, 3))})
    models = bert(labels=classes), bert(labels=classes)
    # one step of plain gradients over all rows, whatever batches they come in
    how: dict[str, Any] = {"batch_size": size, "optimizer": "sgd", "momentum": 0.0, "schedule": "constant"}
    for model, one in zip(models, (masked, kept), strict=True):
        count = -(-len(one.split("train")) // size)
        result = tune(model, one, **how, gradient_accumulation_steps=count, max_grad_norm=0, learning_rate=0.1)
        assert result.unlabelled == ({task.name: 26} if one is masked else {})
    assert tensors(models[0]).keys() == tensors(models[1]).keys()
    for key, value in tensors(models[0]).items():
        assert torch.allclose(value, tensors(models[1])[key], atol=1e-5), key


@pytest.mark.parametrize(("make", "classes"), [(length_of_text, 1), (several, 3)])
def test_a_batch_whose_rows_all_have_labels_is_passed_on_as_it_is(make: Any, classes: int):
    """It may have a tensor without an axis of rows, and no row of it is looked up or copied."""
    task, model, seen = make(), bert(labels=classes), list[Any]()

    def note(_: Any, args: Any, given: dict[str, Any]) -> Any:
        seen.append(given)
        return args, {name: value for name, value in given.items() if name != "scale"}

    model.register_forward_pre_hook(note, with_kwargs=True)
    runner = ModelRunner(model, task, "finetune", tiny_tokenizer(), FitOptions())
    batch = {**tiny_tokenizer()(["good film", "bad film"], return_tensors="pt"), "scale": torch.tensor(2.0)}
    labels = torch.from_numpy(label_array(task.split("train"))[:2])
    (loss,) = runner.losses(batch, {task.name: labels}, [task.name], None)
    assert loss.isfinite()
    assert all(seen[0][name] is value for name, value in batch.items())


def test_scores_of_the_best_epoch_and_how_long_it_took():
    result = tune(bert(), pairs(), epochs=2)
    row = result.history[int(result.best["pairs"]["epoch"]) - 1]
    assert result.best["pairs"] == {key: value for key, value in row.items() if key != "reader"}
    assert {row["reader"] for row in result.history} == {"pairs"}
    assert (result.steps, result.seconds > 0, result.importances) == (40, True, [])
    assert result.truncated == {"pairs": 0}


def test_long_texts_are_counted():
    task = yes_no(train=8, validation=4)
    long = Split.of([f"{text} " * 12 for text in task.split("train").texts], task.split("train").labels)
    result = tune(bert(), replace(task, splits={**task.splits, "train": long}))
    assert result.truncated[task.name] > 0


def test_a_head_is_tried_on_the_shortest_rows():
    model, task = bert(), yes_no()
    shapes: list[torch.Size] = []
    model.register_forward_pre_hook(lambda _m, _a, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    model.train()
    tune(model, task)
    lengths = sorted(len(ids) for ids in tiny_tokenizer()(list(task.split("train").texts))["input_ids"])
    assert shapes[0] == (2, lengths[1])
    assert model.training


def test_scores_per_class_of_a_model():
    task = yes_no()
    rows: Any = scored(bert(), task, "train", tiny_tokenizer(), per_class=True)["per_class"]
    assert [row["label"] for row in rows] == [*task.labels, "micro avg", "macro avg", "weighted avg"]
    rows = rows[: len(task.labels)]
    assert sum(row["count"] for row in rows) == len(task.split("train"))


def test_the_test_part_is_scored_where_that_is_asked_for():
    task = yes_no()
    task = replace(task, splits={**task.splits, "test": task.splits["train"]})
    model = bert()
    result = tune(model, task, test=True)
    assert result.test == {task.name: scored(model, task, "test", tiny_tokenizer())}
    assert tune(bert(), task).test == {}
    refused(bert(), yes_no(), "unknown split 'test'", UnknownNameError, test=True)


def test_what_evaluate_does_not_know():
    known = r"known: .* others \(all: help\(lamina\.evaluate\)\)"
    with pytest.raises(UnknownNameError, match=f"evaluate: unknown option 'epochs'; {known}"):
        scored(bert(), yes_no(), "train", tiny_tokenizer(), epochs=3)


@pytest.mark.parametrize("options", [{"cache": "on"}, {"base_learning_rate": 1.0}])
def test_options_of_banks_have_no_effect_on_a_model(options: dict[str, Any]):
    (name,) = options
    with pytest.raises(ConfigError, match=f"fit: {name} is .*; a whole model has no use for it"):
        fit(bert(), yes_no(), processor=tiny_tokenizer(), **options)
    refused(bert(), yes_no(), f"finetune: unknown option '{name}'; known: .*", UnknownNameError, **options)


def test_a_model_has_one_task_and_no_grid():
    tasks = {"a": yes_no(), "b": yes_no(seed=1)}
    with pytest.raises(ConfigError, match="fit: 2 tasks were given; a whole model is trained on one"):
        fit(bert(), tasks, processor=tiny_tokenizer())
    with pytest.raises(ConfigError, match="fit: a grid was given for a whole model"):
        fit(bert(), yes_no(), processor=tiny_tokenizer(), grid={"a": {"seed": [1]}}, progress=False)


def test_fit_of_a_model_is_finetune():
    one, two, task = bert(), bert(), yes_no()
    first = tune(one, task)
    given = {"epochs": 1, "batch_size": 4, "learning_rate": 3e-3, "progress": False}
    second = fit(two, {task.name: task}, processor=tiny_tokenizer(), **given)
    assert same(tensors(one), tensors(two))
    assert first.history == second.history


def test_a_rate_of_nothing_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    """What has no rate has no gradient, so that it has no share in the norm that is clipped."""
    model = bert()
    before, flags = tensors(model), []
    losses = ModelRunner.losses

    def spy(self: ModelRunner, *args: Any) -> Any:
        flags.append({name for name, one in model.named_parameters() if one.requires_grad})
        return losses(self, *args)

    monkeypatch.setattr(ModelRunner, "losses", spy)
    result = tune(model, yes_no(), layer_rates={"0-2": 0.0})
    moved = {name for name, value in tensors(model).items() if not torch.equal(value, before[name])}
    assert moved <= flags[0]
    assert all("layer.2" in name or "pooler" in name or "classifier" in name for name in flags[0])
    assert all(one.requires_grad for one in model.parameters())
    assert result.table[0]["trained"] == sum(one.numel() for n, one in model.named_parameters() if n in flags[0])


def test_dropout_differs_by_step_seed_and_process(monkeypatch: pytest.MonkeyPatch):
    model, seeds = bert(dropout=0.1), list[int]()
    model.register_forward_pre_hook(lambda module, _: seeds.append(torch.initial_seed()) if module.training else None)
    for seed, process in ((0, 0), (1, 0), (0, 1)):
        monkeypatch.setattr(engine, "rank", lambda process=process: process)
        tune(model, yes_no(train=8), seed=seed, epochs=2)
    assert len(seeds) == len(set(seeds)) == 3 * 4


def random_states() -> list[Any]:
    """Return the states of the three global generators."""
    name, keys, *place = np.random.get_state()
    return [random.getstate(), name, keys.tolist(), place, torch.get_rng_state().tolist()]


def test_a_run_leaves_the_global_generators_as_they_were():
    model, before = bert(), random_states()
    tune(model, yes_no())
    assert random_states() == before


def test_a_run_that_fails_in_the_middle_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("in the middle of a step")

    model, before = bert(), random_states()
    monkeypatch.setattr(Learner, "step", fail)
    with pytest.raises(ZeroDivisionError):
        tune(model, yes_no(), layer_rates={"head": 0.0})
    assert random_states() == before
    assert not any(one.training for one in model.modules())
    assert all(one.requires_grad and one.grad is None for one in model.parameters())


@pytest.mark.long
def test_tied_weights_come_back(tmp_path: Path):
    options = {"epochs": 2, "processor": t5_tokenizer(), "max_target_length": 4}
    model = t5()
    tune(model, copies(), tmp_path, **options)
    assert model.lm_head.weight is model.shared.weight
    again = tune(t5(), copies(), tmp_path, resume=True, **options)
    assert again.steps == 30


def test_use_of_the_cache_stays_on():
    model = t5()
    tune(model, copies(), processor=t5_tokenizer(), max_target_length=4)
    assert model.config.use_cache


@pytest.mark.long
def test_checkpoints_of_a_run_in_a_folder_of_their_own(tmp_path: Path):
    """As recipes keep them for each of their runs."""
    whole, again, task = bert(), bert(), yes_no()
    options = FitOptions.of({"epochs": 2, "batch_size": 4, "progress": False, "save_steps": 3})
    training_run.train(whole, task, options, processor=tiny_tokenizer())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "score", None)
        with pytest.raises(TypeError):
            training_run.train(bert(), task, options, processor=tiny_tokenizer(), checkpoints=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] != []
    resumed = options.model_copy(update={"resume": True})
    result = training_run.train(again, task, resumed, processor=tiny_tokenizer(), checkpoints=tmp_path)
    assert result.folder is None
    assert same(tensors(whole), tensors(again))


def test_evaluate_leaves_the_config_as_it_is():
    model = bert()
    before = model.config.to_dict()
    scored(model, yes_no(), "train", tiny_tokenizer())
    assert model.config.to_dict() == before


def test_what_a_frozen_convolution_has_seen_stays():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
    model = transformers.AutoModelForImageClassification.from_config(config)
    freeze_(model, train=["classifier"])
    before = tensors(model)
    tune(model, shades(), processor=image_processor(32))
    changed = {name for name, value in tensors(model).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("classifier") for name in changed)


def test_a_model_in_channels_last_writes_checkpoints(tmp_path: Path):
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
    model = transformers.AutoModelForImageClassification.from_config(config).to(memory_format=torch.channels_last)
    tune(model, shades(), tmp_path / "out", processor=image_processor(32))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_config_that_asks_for_tuples_changes_nothing():
    task, models = yes_no(train=8, validation=4), [bert(), bert()]
    models[1].config.return_dict = False
    results = [tune(model, task) for model in models]
    assert results[0].history == results[1].history
    answers = [predict(model, ["the cat"], processor=tiny_tokenizer()) for model in models]
    assert answers[0] == answers[1]


def test_a_test_part_that_finetune_does_not_score_is_named(caplog: pytest.LogCaptureFixture):
    task = yes_no(train=4)
    task = replace(task, splits={**task.splits, "test": task.split("train")})
    assert tune(bert(), task, epochs=1, positive=task.labels[0]).best[task.name].keys() >= {"f1"}
    assert any(f"finetune: the test part of '{task.name}' was not scored" in text for text in caplog.messages)


def test_a_model_that_cannot_run_without_names_is_told_of_return_dict():
    """The parts of T5 follow the config alone, and the head for tokens reads their output by name."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=60, num_labels=len(names().labels), **sizes)
    model = transformers.T5ForTokenClassification(config).eval()
    model.config.return_dict = False
    with pytest.raises(UnsupportedModelError, match=r"Set model\.config\.return_dict = True"):
        stacks(model)
    refused(model, names(), r"fails with return_dict=False in its config .* Set model\.config\.return_dict = True")
