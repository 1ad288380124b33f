"""The field `lamina` in responses and in the chunks of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import BaseModel

from lamina.vllm.http import Latest, _fill_chunks, _install_messages, _remember, install_chat, install_completion


class Recorder:
    """Answers that say what they were asked for, over a prompt of 5 tokens."""

    def before(self, output: int) -> int:
        return 4 + output

    def to_dict(self, first: int = 0) -> dict[str, Any]:
        return {"all from": first}

    def part_to_dict(self, first: int, last: int) -> dict[str, Any]:
        return {"from": first, "to": last}


async def results(*parts: tuple[int, list[int]]) -> AsyncIterator[Any]:
    for index, ids in parts:
        yield SimpleNamespace(outputs=[SimpleNamespace(index=index, token_ids=ids, lamina=Recorder())])


async def chunks(remembered: AsyncIterator[Any], last: int) -> AsyncIterator[str]:
    """One chunk per result, as a server of vLLM writes them, after a chunk without choices."""
    yield 'data: {"usage": {}}\n\n'
    count = 0
    async for result in remembered:
        count += 1
        reason = "stop" if count == last else None
        choice = {"index": result.outputs[0].index, "text": "ü", "finish_reason": reason}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


def streamed(*parts: tuple[int, list[int]]) -> list[str]:
    async def collect() -> list[str]:
        latest: Latest = {}
        remembered = _remember(results(*parts), latest)
        return [chunk async for chunk in _fill_chunks(chunks(remembered, len(parts)), latest)]

    return asyncio.run(collect())


def test_each_chunk_has_the_scores_up_to_its_own_tokens():
    first, *middle, end = streamed((0, [7]), (0, [8, 9]), (1, [3]), (0, [2]))
    assert first == 'data: {"usage": {}}\n\n'
    assert end == "data: [DONE]\n\n"
    fields = [json.loads(chunk.removeprefix("data: "))["choices"][0]["lamina"] for chunk in middle]
    assert fields == [{"from": 0, "to": 5}, {"from": 5, "to": 7}, {"from": 0, "to": 5}, {"all from": 7}]
    assert "ü" in middle[0]


class Message(BaseModel):
    """A message of vLLM, which knows no reason of a monitor."""

    id: str
    stop_reason: Literal["max_tokens"] | None = None


def test_flagged_messages_are_of_one_class():
    serving: Any = SimpleNamespace(messages_full_converter=lambda response: Message(id=response.id))
    serving.message_stream_converter = None
    _install_messages(serving)
    replies = [
        serving.messages_full_converter(SimpleNamespace(id=name, choices=[SimpleNamespace(finish_reason=reason)]))
        for name, reason in (("a", "content_filter"), ("b", "content_filter"), ("c", "length"))
    ]
    assert [reply.model_dump(exclude_none=True) for reply in replies] == [
        {"id": "a", "stop_reason": "refusal"},
        {"id": "b", "stop_reason": "refusal"},
        {"id": "c"},
    ]
    assert type(replies[0]) is type(replies[1])
    assert type(replies[2]) is Message


def outputs(*names: str) -> list[Any]:
    return [
        SimpleNamespace(index=index, token_ids=[7], lamina=SimpleNamespace(to_dict=lambda name=name: {"of": name}))
        for index, name in enumerate(names)
    ]


def choices_of(response: Any) -> tuple[list[Any], Any]:
    return [choice.lamina for choice in response.choices], response.lamina


def test_each_choice_of_a_whole_response_has_its_own_answers():
    async def read(*names: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(outputs=outputs(*names))

    async def full(_: object, results: AsyncIterator[Any]) -> Any:
        choices = [SimpleNamespace(index=output.index) async for result in results for output in result.outputs]
        return SimpleNamespace(choices=choices)

    async def full_batch(_: object, chats: list[AsyncIterator[Any]]) -> Any:
        choices = [SimpleNamespace(index=index) for index, chat in enumerate(chats) async for _ in chat]
        return SimpleNamespace(choices=choices)

    serving: Any = SimpleNamespace(create_chat_completion=None, create_batch_chat_completion=None)
    serving.chat_completion_full_generator, serving.chat_completion_stream_generator = full, None
    serving.chat_completion_full_generator_batch = full_batch
    install_chat(serving, SimpleNamespace())  # pyright: ignore[reportArgumentType]
    told = asyncio.run(serving.chat_completion_full_generator(None, read("a", "b")))
    assert choices_of(told) == ([{"of": "a"}, {"of": "b"}], {"of": "a"})
    told = asyncio.run(serving.chat_completion_full_generator_batch(None, [read("a"), read("b")]))
    assert choices_of(told) == ([{"of": "a"}, {"of": "b"}], {"of": "a"})


def test_choices_of_several_prompts_are_counted_on():
    serving: Any = SimpleNamespace(create_completion=None, completion_stream_generator=None)
    serving.request_output_to_completion_response = lambda results: SimpleNamespace(
        choices=[SimpleNamespace(index=index) for index in range(3)]
    )
    install_completion(serving, SimpleNamespace())  # pyright: ignore[reportArgumentType]
    results = [SimpleNamespace(outputs=outputs("a", "b")), SimpleNamespace(outputs=outputs("c"))]
    told = serving.request_output_to_completion_response(results)
    assert choices_of(told) == ([{"of": "a"}, {"of": "b"}, {"of": "c"}], {"of": "a"})
