"""What a text goes on from: a prompt or a chat as tokens, and how much room it leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lamina.bank.listening import can_generate
from lamina.data.arrow import encodable
from lamina.data.batches import tokenizer_of
from lamina.data.encode import length_limit
from lamina.errors import ConfigError
from lamina.serve.workers import TooLongError
from lamina.tasks.chats import Chat, chat_problem, render

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class GenerationRequest:
    """A text that is to be written."""

    prompt: str | Messages  # the messages of a chat
    sampling: Mapping[str, Any] = field(default_factory=dict)  # options of `generate`
    max_new_tokens: int | None = None  # None: as many as there is room for
    seed: int | None = None
    stop: Sequence[str] = ()  # strings that end the text
    tasks: Sequence[str] | None = None
    stop_on_flag: bool | Sequence[str] = False
    stream: bool = False


def check_generates(bank: ReaderBank) -> None:
    """Raise ConfigError unless the bank's model writes text."""
    if not generates_text(bank):
        came = f"the model of this bank, a {type(bank.model).__name__}, does not write text"
        raise ConfigError(f"serve: {came}. Ask /predict.")


def generates_text(bank: ReaderBank) -> bool:
    """Whether a bank's model makes text of text."""
    return can_generate(bank.model) and bank.model.main_input_name == "input_ids" and bank.processor is not None


def encode_prompt(bank: ReaderBank, prompt: str | Messages) -> dict[str, Tensor]:
    """What `generate` takes for a prompt or a chat; ConfigError if it cannot be one."""
    is_text = isinstance(prompt, str)
    tokenizer, text = tokenizer_of(bank.processor), prompt if is_text else _rendered(bank, prompt)
    encoded = tokenizer(encodable(text), return_tensors="pt", add_special_tokens=is_text, verbose=False)
    if not encoded["input_ids"].shape[1]:
        raise ConfigError("serve: the prompt is empty; a text of one token at least is needed.")
    return {key: encoded[key].to(bank.device) for key in ("input_ids", "attention_mask")}


def _rendered(bank: ReaderBank, messages: Messages) -> str:
    if problem := chat_problem(messages):
        raise ConfigError(f"serve: messages {problem}.")
    if not tokenizer_of(bank.processor).chat_template:
        came = "the tokenizer of this bank has no chat template, which makes a text of messages"
        raise ConfigError(f"serve: {came}. Send a text to /generate.")
    return render(Chat(messages), bank.processor, prompt=True, op="serve")[0]


def token_budget(bank: ReaderBank, prompt_tokens: int, asked: int | None, total: int) -> int:
    """How many tokens may be written, of `total` with the prompt; a model with an encoder has room for as many in each.

    Raises:
        TooLongError: If the prompt leaves none.
        ConfigError: If more are asked for.
    """
    total = min(total, length_limit(bank.model, bank.processor))
    if prompt_tokens >= total:
        raise TooLongError(f"serve: the prompt has {prompt_tokens} tokens; with what is written {total} are taken.")
    room = total if bank.model.config.is_encoder_decoder else total - prompt_tokens
    if asked is not None and asked > room:
        came = f"{asked} tokens are to be written after a prompt of {prompt_tokens}"
        raise ConfigError(f"serve: {came}; there is room for {room}.")
    return room if asked is None else asked
