"""Encode prompts, which are texts or chats, and compute how many tokens may follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from lamina.bank.listening import can_generate
from lamina.bank.prompt_inputs import prompt_tokens
from lamina.data.encode import encodable, length_limit
from lamina.errors import ConfigError
from lamina.layers.types import tokenizer_of
from lamina.serve.workers import TooLongError, count_tokens
from lamina.tasks.chat_templates import Chat, Message, chat_problem, render

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank

Messages: TypeAlias = Sequence[Message]  # a chat; each message has "role" and "content"


class Sampling(TypedDict, total=False):
    """The options `do_sample`, `temperature`, `top_p` and `top_k` for transformers' `generate`.

    If a key is missing, the model's generation config decides the option.
    """

    do_sample: bool
    temperature: float
    top_p: float
    top_k: int


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one generated text, in a form that is the same for all routes.

    Attributes:
        prompt: The text that is continued, or the messages of a chat.
        sampling: How tokens are sampled.
        max_new_tokens: Maximum number of generated tokens; None: as many as there is room for.
        seed: Seed of sampling; None: a random one.
        stop: Strings that end the text.
        tasks: Names of the readers that take part; None: all that can.
        stop_on_flag: Which flags end the text. True: those of all monitors. False: none. Names: those of these
            monitors.
        stream: Whether tokens are sent one by one.
    """

    prompt: str | Messages
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    tasks: Sequence[str] | None = None
    stop_on_flag: bool | Sequence[str] = False
    stream: bool = False


def generates_text(bank: ReaderBank) -> bool:
    """Return whether the bank's model generates text from text, and the bank has a tokenizer."""
    return can_generate(bank.model) and bank.model.main_input_name == "input_ids" and bank.processor is not None


def encode_prompt(bank: ReaderBank, prompt: str | Messages, max_total_tokens: int) -> dict[str, Tensor]:
    """Encode a prompt or chat for `generate`: input_ids and attention_mask, `[1, tokens]`, on the bank's device.

    For a decoder-only model, an end token that the tokenizer adds to a text is left out, as in `bank.stream`.

    Raises ConfigError if the prompt is empty, or the messages are not a chat that the tokenizer's template accepts.
    Raises TooLongError if tokenising had to stop early, after more than `max_total_tokens` tokens or more than the
    model reads. The caller checks the length of other prompts by `token_budget`.
    """
    is_text = isinstance(prompt, str)
    tokenizer, text = tokenizer_of(bank.processor), prompt if is_text else _rendered(bank, prompt)
    most = min(max_total_tokens, length_limit(bank.model, bank.processor))
    count, is_whole = count_tokens(tokenizer, text, most) if len(text) > most else (0, True)
    if not is_whole:  # a prompt of megabytes would take seconds to tokenise
        raise _too_long(f"at least {count}", most)
    # A chat template writes the special tokens itself.
    encoded = tokenizer(encodable(text), return_tensors="pt", add_special_tokens=is_text, verbose=False)
    kept = prompt_tokens(bank, tokenizer) if is_text else slice(None)
    tensors = {key: encoded[key][:, kept].to(bank.device) for key in ("input_ids", "attention_mask")}
    if not tensors["input_ids"].shape[1]:
        raise ConfigError("serve: the prompt is empty; at least one token of text is needed.")
    return tensors


def _rendered(bank: ReaderBank, messages: Messages) -> str:
    """Return a chat as one text that ends where the reply begins, by the chat template of the bank's tokenizer.

    Raises ConfigError if the messages are not a chat, the tokenizer has no template, or the template fails.
    """
    if problem := chat_problem(messages):
        raise ConfigError(f"serve: messages {problem}.")
    if not tokenizer_of(bank.processor).chat_template:
        came = "the tokenizer of this bank has no chat template, which turns messages into text"
        raise ConfigError(f"serve: {came}. Send a text to /generate.")
    return render(Chat(messages), bank.processor, prompt=True, op="serve")[0]


def token_budget(bank: ReaderBank, prompt_tokens: int, max_new_tokens: int | None, max_total_tokens: int) -> int:
    """Return the maximum number of tokens to generate after a prompt.

    Raises TooLongError if the prompt leaves no room, and ConfigError if the request asks for more tokens than fit.

    Args:
        bank: The bank, whose model may read fewer tokens than the server allows.
        prompt_tokens: Number of tokens of the prompt.
        max_new_tokens: Number that the request asks for. None: all that there is room for.
        max_total_tokens: Number that the server allows for prompt and text together. In a model with an encoder it
            applies to each of them alone.
    """
    total = min(max_total_tokens, length_limit(bank.model, bank.processor))
    if prompt_tokens >= total:
        raise _too_long(prompt_tokens, total)
    room = total if bank.model.config.is_encoder_decoder else total - prompt_tokens
    if max_new_tokens is not None and max_new_tokens > room:
        came = f"{max_new_tokens} tokens are to be generated after a prompt of {prompt_tokens}"
        raise ConfigError(f"serve: {came}; there is room for {room}.")
    return room if max_new_tokens is None else max_new_tokens


def _too_long(tokens: int | str, most: int) -> TooLongError:
    return TooLongError(
        f"serve: the prompt has {tokens} tokens; together with the generated text at most {most} are accepted."
    )
