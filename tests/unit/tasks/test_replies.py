"""Chats and prompts with replies: what is read, and that the replies alone are learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets
import pytest
import torch
from tests.support.causal import END, TEMPLATE, VOCABULARY, causal_model, causal_tokenizer
from tests.support.files import jsonl
from tests.support.marking import MARKS, letters
from tokenizers import Tokenizer, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from lamina import evaluate, finetune, predict
from lamina.data.encode import encode_replies
from lamina.errors import ConfigError, DataError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.chat_templates import Chat, render
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

KIND = kind_of("causal_lm")
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<reply> ' }}"
    "{% generation %}{{ message.content }}{{ ' <end> ' }}{% endgeneration %}"
    "{% else %}{{ '<user> ' }}{{ message.content }}{{ ' ' }}{% endif %}{% endfor %}"
)
FORGETFUL = "{% for message in messages %}{% if loop.last %}{{ message.content }}{% endif %}{% endfor %}"


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


CHATS = [chat("is anna good", "very good"), chat("was it fun", "not fun", "and the film", "slow")]
PAIRS = [{"prompt": "is anna good ", "reply": "very good"}, {"prompt": "was it fun ", "reply": "not"}]


def of(rows: list[Any], **how: Any) -> Task:
    return Task.from_dataset("causal_lm", {"train": rows, "validation": rows}, **how)


def read_and_learnt(task: Task, tokenizer: Any) -> list[tuple[str, str]]:
    """Per row the words that are read, and those that are learnt."""
    split = task.split("train")
    inputs = KIND.encode(split, tokenizer, EncodeOptions(part="train", max_length=32, by_row=task.by_row))
    batch = inputs.batch(range(len(split)))
    rows = []
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        words = [VOCABULARY[token] for token in ids[mask == 1]]
        learnt = [VOCABULARY[token] for token in labels if token != -100]
        places = [at + 1 for at, token in enumerate(labels.tolist()) if token != -100]
        assert [words[at] for at in places] == learnt  # at the token before
        rows.append((" ".join(words), " ".join(learnt)))
    return rows


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_of_a_chat_the_replies_are_learnt_with_their_ends(template: str):
    expected = [
        ("<user> is anna good <reply> very good <end>", "very good <end>"),
        ("<user> was it fun <reply> not fun <end> <user> and the film <reply> slow <end>", "not fun <end> slow <end>"),
    ]
    for rows in (
        [{"messages": one} for one in CHATS],
        datasets.Dataset.from_list([{"messages": one} for one in CHATS]),
    ):
        task = of(rows)  # pyright: ignore[reportArgumentType]
        assert task.by_row
        assert read_and_learnt(task, causal_tokenizer(template)) == expected


def test_of_a_prompt_with_a_reply_the_reply_is_learnt_with_an_end():
    expected = [("is anna good very good <end>", "very good <end>"), ("was it fun not <end>", "not <end>")]
    assert read_and_learnt(of(PAIRS, text="prompt", text_pair="reply"), causal_tokenizer()) == expected


@pytest.mark.parametrize("mark", MARKS)
def test_a_prompt_that_ends_in_a_space_leaves_the_reply_all_its_tokens(mark: str):
    """Tokenised as one text, the space belongs to the first word of the reply, which was not learnt then."""
    tokenizer = letters(mark)
    tokenizer.eos_token = "?"
    rows = [
        {"prompt": "A,", "reply": " yes"},
        {"prompt": "A, ", "reply": "yes"},
        {"prompt": "A", "reply": "\nyes"},
    ]
    split = of(rows, text="prompt", text_pair="reply").split("train")
    inputs = KIND.encode(split, tokenizer, EncodeOptions(part="train", max_length=32))
    batch = inputs.batch(range(3))
    for ids, labels, row in zip(batch["input_ids"], batch["labels"], rows, strict=True):
        prompt = tokenizer(row["prompt"])["input_ids"]
        assert ids.tolist()[: len(prompt)] == prompt  # what the model reads before it writes
        learnt = tokenizer.convert_ids_to_tokens(labels[labels != -100].tolist())
        spaces = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
        assert "".join(learnt).translate(spaces) == row["reply"] + "?"


def test_replies_that_are_too_long_are_truncated_on_the_side_of_the_tokenizer():
    tokenizer, rows = letters("Prepend"), [("ab", "cdefgh"), ("a", "b")]
    for side, read, marks in (("right", "<s>▁abcd", [0, 0, 0, 0, 1, 1]), ("left", "<s>defgh", [0, 1, 1, 1, 1, 1])):
        tokenizer.truncation_side = side
        encoded, found = encode_replies(rows, tokenizer, max_length=6)
        assert "".join(tokenizer.convert_ids_to_tokens(encoded.batch([0], {})["input_ids"][0].tolist())) == read
        assert (found, encoded.truncated) == ([marks, [0, 0, 0, 1]], 1)
    with pytest.raises(ConfigError, match="max_length is 1; the special tokens alone are 1"):
        encode_replies(rows, tokenizer, max_length=1)


def test_a_token_that_takes_in_the_space_before_a_reply_of_a_chat_is_learnt():
    backend = Tokenizer(
        models.BPE({token: at for at, token in enumerate(["<end>", "B", ":", "▁", "a", "▁a"])}, [("▁", "a")])
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + 'B: ' }}{% else %}{{ m.content + '<end>' }}"
        "{% endif %}{% endfor %}"
    )
    split = of([{"messages": chat("aa", "aa")}] * 2).split("train")
    batch = KIND.encode(split, tokenizer, EncodeOptions(part="train", max_length=32)).batch([0])
    learnt = batch["labels"][0][batch["labels"][0] != -100].tolist()
    assert tokenizer.convert_ids_to_tokens(learnt) == ["▁a", "a", "<end>"]


def test_a_text_to_continue_has_no_end():
    ending = causal_tokenizer()
    template = processors.TemplateProcessing("$A <end>", "$A <end> $B <end>", special_tokens=[("<end>", END)])
    ending.backend_tokenizer.post_processor = template
    texts = ["is anna good", "", "was it"]
    for tokenizer in (ending, causal_tokenizer()):
        inputs = KIND.encode(KIND.examples(texts, tokenizer), tokenizer, EncodeOptions(part="predict", max_length=8))
        batch = inputs.batch([0, 1, 2])
        rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        read = [[VOCABULARY[token] for token in ids[mask == 1]] for ids, mask in rows]
        assert read == [["is", "anna", "good"], ["<end>"], ["was", "it"]]
        short = EncodeOptions(part="predict", max_length=2)
        long = KIND.encode(KIND.examples(["is anna good"], tokenizer), tokenizer, short)
        assert (KIND.truncated(long), long.lengths.tolist()) == (1, [2])


def test_an_end_that_the_tokenizer_adds_itself_comes_once(metaspace: Any):
    task = of([{"prompt": "the cat ", "reply": "sat"}] * 2, text="prompt", text_pair="reply")
    inputs = KIND.encode(task.split("train"), metaspace, EncodeOptions(part="train", max_length=32))
    batch = inputs.batch([0])
    assert batch["input_ids"][0].tolist().count(metaspace.eos_token_id) == 1
    learnt = [token for token in batch["labels"][0].tolist() if token != -100]
    assert learnt[-1] == metaspace.eos_token_id
    assert "".join(metaspace.convert_ids_to_tokens(learnt[:-1])) == "sat"


def test_after_an_empty_prompt_no_special_token_is_learnt(words: Any):
    task = of([{"prompt": "", "reply": "very good"}] * 2, text="prompt", text_pair="reply")
    inputs = KIND.encode(task.split("train"), words, EncodeOptions(part="train", max_length=32))
    learnt = [token for token in inputs.batch([0])["labels"][0].tolist() if token != -100]
    assert words.convert_ids_to_tokens(learnt) == ["very", "good"]


def test_files_hold_chats(tmp_path: Path):
    path = jsonl(tmp_path / "chats.jsonl", [{"talk": one} for one in CHATS * 10])
    task = Task.from_files("causal_lm", train=path, text="talk")
    assert {part: len(split) for part, split in task.splits.items()} == {"train": 18, "validation": 2}
    assert isinstance(task.split("train").select_rows([3]).texts[0], Chat)
    assert "is anna good\nvery good" in task.masked_lm().split("train").texts


def test_the_loss_and_the_score_are_of_the_replies_alone():
    tokenizer, model = causal_tokenizer(TEMPLATE), causal_model()
    task = of([{"messages": one} for one in CHATS])
    losses, count = 0.0, 0
    for one in CHATS:
        text, spans = render(Chat(one), tokenizer)
        found = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
        ids, offsets = found["input_ids"], found["offset_mapping"][0].tolist()
        own = torch.tensor([[any(a <= start < b for a, b in spans) for start, _ in offsets]])
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids.where(own, -100)).loss
        losses, count = losses + float(loss) * int(own.sum()), count + int(own.sum())
    score = evaluate(model, task, processor=tokenizer)["task"]["perplexity"]
    assert score == pytest.approx(torch.tensor(losses / count).exp().item(), rel=1e-5)


@pytest.mark.long
def test_a_model_learns_to_reply_and_to_end():
    tokenizer, model = causal_tokenizer(TEMPLATE), causal_model()
    task = of([{"messages": one} for one in [chat("is anna good", "very"), chat("is ben bad", "not")] * 8])
    finetune(model, task, processor=tokenizer, epochs=25, batch_size=8, learning_rate=0.02, progress=False)
    answers = predict(model, [chat("is anna good"), chat("is ben bad")], processor=tokenizer, max_target_length=9)
    assert [answer["causal_lm"]["text"].strip() for answer in answers] == ["very", "not"]


# What does not fit


def test_without_a_chat_template():
    task = of([{"messages": CHATS[0]}] * 2)
    with pytest.raises(ConfigError, match=r"has no chat template.*Set tokenizer.chat_template, or name.*text_pair="):
        evaluate(causal_model(), task, processor=causal_tokenizer())
    with pytest.raises(ConfigError, match=r"has no chat template"):
        predict(causal_model(), [CHATS[0]], processor=causal_tokenizer())


def test_templates_that_do_not_tell_where_a_reply_is_or_fail():
    task = of([{"messages": CHATS[1]}] * 2)
    with pytest.raises(ConfigError, match=r"writes message 1 differently once others follow.*\{% generation %\}"):
        evaluate(causal_model(), task, processor=causal_tokenizer(FORGETFUL))
    with pytest.raises(ConfigError, match=r"the chat template fails on .*only users speak"):
        evaluate(causal_model(), task, processor=causal_tokenizer("{{ raise_exception('only users speak') }}"))


def test_without_a_fast_tokenizer(monkeypatch: pytest.MonkeyPatch):
    tokenizer = causal_tokenizer(TEMPLATE)
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ConfigError, match="is a slow tokenizer; replies are found by character offsets"):
        evaluate(causal_model(), of([{"messages": CHATS[0]}]), processor=tokenizer)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "bot", "content": "a"}], "row 2 has the role 'bot' in message 0; the roles are: system, developer"),
        ([{"role": "user"}], "row 2 has NoneType for the content of message 0; it must be a text"),
        ([], "row 2 is not a chat"),
        ("very good", "row 2 is not a chat: a list of messages, each with a role and a content"),
        (chat("is anna good"), r"row 2 has no label in column 'messages.assistant'; .* missing_labels='drop'"),
        (chat("is anna good", "  "), "row 2 has no label in column 'messages.assistant'"),
    ],
)
def test_chats_that_are_none(messages: Any, problem: str):
    with pytest.raises(DataError, match=problem):
        of([{"messages": CHATS[0]}, {"messages": messages}])


def test_chats_to_predict_that_are_none():
    with pytest.raises(ConfigError, match="predict: entry 1 has the role 'bot' in message 0"):
        predict(causal_model(), [CHATS[0], [{"role": "bot", "content": "a"}]], processor=causal_tokenizer(TEMPLATE))


def test_replies_that_are_blank(caplog: pytest.LogCaptureFixture):
    rows = [*PAIRS, {"prompt": "is ben bad ", "reply": " "}, {"prompt": "is ben bad ", "reply": None}]
    with pytest.raises(DataError, match="row 3 has no label in column 'reply'"):
        of(rows, text="prompt", text_pair="reply")
    task = of(rows, text="prompt", text_pair="reply", missing_labels="drop")
    assert len(task.split("train")) == 2
    assert "2 of 4 rows have no label in column 'reply' and are left out (rows 3, 4)" in caplog.text
    chats = of([{"messages": CHATS[0]}, {"messages": chat("is")}], missing_labels="drop")
    assert len(chats.split("train")) == 1


def test_chats_that_differ_in_who_speaks_are_other_examples():
    roles = [("system", "user", "assistant"), ("user", "assistant", "assistant")]
    texts = ("hello there", "good day", "yes")
    chats = [[{"role": role, "content": text} for role, text in zip(own, texts, strict=True)] for own in roles]
    keys = {of([{"messages": one}]).split("train").key for one in chats}
    assert len(keys) == 2


def test_a_chat_may_begin_with_a_reply():
    messages = [{"role": "assistant", "content": "very good"}, *chat("was it fun", "not fun")]
    text, spans = render(Chat(messages), causal_tokenizer(TEMPLATE))
    assert [text[start:stop].split()[-1] for start, stop in spans] == ["<end>", "<end>"]
    assert "very good" in text[slice(*spans[0])]
