"""Conversations through chat templates: the same text as `transformers` makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from orchestrator.text.conversation import ChatMessage, Conversation, Tool, ToolCall
from orchestrator.text.template import ChatTemplate
from outrider.protocol.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
CALLING = """
{%- if tools %}You may call:
{%- for tool in tools %}
{{ tool | tojson(indent=2) }}
{%- endfor %}
{% endif %}
{%- for message in messages %}
<{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}>
{%- if message.tool_calls %}{{ message.content }}
{%- for call in message.tool_calls %}
<call {{ call.id }}>{{ call.function.name }}: {{ call.function.arguments | tojson }}</call>
{%- endfor %}
{%- elif message.role == "tool" %} [{{ message.tool_call_id }}] {{ message.content }}
{%- else %} {{ message.content | trim }}
{%- endif %}</{{ message.role }}>
{% endfor %}
{%- if add_generation_prompt %}<assistant>
{%- if thinking is defined and not thinking %}<quick>{% endif %}
{%- endif %}"""
PARTS = """
{%- for message in messages %}{{ message.role }}:
{%- if message.content is string %} {{ message.content }}
{%- else %}{% for part in message['content'] %} ({{ part.type }}) {{ part.text }}{% endfor %}
{%- endif %}
{% endfor %}"""

ADD = Tool("add", "Adds two numbers.", json.dumps(SCHEMA))
TALK = (
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "  1 + 2? ", name="ann"),
    ChatMessage("assistant", "", tool_calls=(ToolCall("c1", "add", '{"a": 1, "b": "ü"}'),)),
    ChatMessage("tool", "3", tool_call_id="c1"),
)


def rendered(template: str, chat: Conversation) -> str:
    """By ours."""
    parsed = ChatTemplate.parse(template, {"bos_token": "<s>"})
    assert parsed is not None
    return parsed.render(chat)


def expected(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """By theirs."""
    (text,), _ = render_jinja_template([messages], chat_template=template, bos_token="<s>", **options)
    return str(text)


def test_tools_calls_and_results() -> None:
    """Every kind of message, as the library of the models renders it."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  1 + 2? ", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
            ],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    function = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    text = rendered(CALLING, Conversation(messages=TALK, tools=(ADD,)))
    assert text == expected(CALLING, messages, tools=tools, add_generation_prompt=True)
    assert '"Adds two numbers."' in text
    assert text.endswith("<assistant>")


def test_reasoning_of_earlier_answers() -> None:
    """Under the name that templates know; messages without it do not have the field."""
    template = (
        "{% for message in messages %}{{ message.content }}"
        "{% if message.reasoning_content is defined %} ({{ message.reasoning_content }}){% endif %}"
        "{% endfor %}"
    )
    chat = Conversation(messages=(ChatMessage("user", "a"), ChatMessage("assistant", "b", reasoning="so")))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "so"},
    ]
    assert rendered(template, chat) == expected(template, messages) == "ab (so)"


def test_the_answers_of_training_may_be_marked() -> None:
    """What stands between the tags (SmolLM 3) is text like any other; what is set there ends with them."""
    template = (
        "{% set end = '.' %}{% for message in messages %}"
        "{% generation %}{% set end = '!' %}{{ message.content }}{{ end }}{% endgeneration %}{{ end }}"
        "{% endfor %}"
    )
    chat = Conversation(messages=(ChatMessage("user", "a"), ChatMessage("assistant", "b")))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert rendered(template, chat) == expected(template, messages) == "a!.b!."


def test_more_variables() -> None:
    """What a caller gives beside the conversation; ours cannot be set twice."""
    chat = Conversation(messages=TALK[:1], template_kwargs='{"thinking": false}')
    messages = [{"role": "system", "content": "Be brief."}]
    assert rendered(CALLING, chat) == expected(CALLING, messages, add_generation_prompt=True, thinking=False)
    assert rendered(CALLING, chat).endswith("<quick>")
    for name in ("messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequest) as caught:
            rendered(CALLING, Conversation(messages=TALK[:1], template_kwargs=json.dumps({name: []})))
        assert caught.value.field == f"chat.chat_template_kwargs.{name}"


def test_documents_reach_the_template() -> None:
    """Templates of models that answer from documents name them so."""
    chat = Conversation(messages=TALK[:1], template_kwargs='{"documents": [{"title": "a"}]}')
    assert rendered("{{ documents[0].title }}", chat) == "a"
    assert rendered("{{ documents is none }}", Conversation(messages=TALK[:1])) == "True"


@pytest.mark.parametrize("text", ["two ", "two", " two\n", "two</assistant>"])
@pytest.mark.parametrize("template", [CALLING, PARTS])
def test_the_last_message_is_continued(template: str, text: str) -> None:
    """Where its own text ends, with the spaces there that the template keeps; no new answer begins."""
    chat = Conversation(
        messages=(ChatMessage("user", "count"), ChatMessage("assistant", text)), continue_final=True
    )
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": text}]
    assert rendered(template, chat) == expected(template, messages, continue_final_message=True)


def test_a_message_that_is_not_shown_cannot_be_continued() -> None:
    """Nor one without a text."""
    with pytest.raises(InvalidRequest, match="does not show the last message"):
        rendered("{{ messages[0].content }}", Conversation(messages=TALK, continue_final=True))
    with pytest.raises(InvalidRequest, match="needs a last message"):
        rendered(CALLING, Conversation(messages=TALK[2:3], continue_final=True))


def test_parts_stay_parts_where_the_template_goes_through_them() -> None:
    """Elsewhere they become lines; a text is a text in both."""
    chat = Conversation(messages=(ChatMessage("user", ("a", "b")), ChatMessage("user", "c")))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    assert rendered(PARTS, chat) == expected(PARTS, messages)
    assert "(text) a (text) b" in rendered(PARTS, chat)
    assert "<user> a\nb</user>" in rendered(CALLING, chat)


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (Conversation(messages=TALK, tools=(Tool("f", "", "{"),)), "chat.tools[0].parameters"),
        (Conversation(messages=TALK, tools=(Tool("f", "", "[1]"),)), "chat.tools[0].parameters"),
        (Conversation(messages=TALK, template_kwargs="7"), "chat.chat_template_kwargs"),
        (Conversation(messages=TALK, template_kwargs="[" * 100_000), "chat.chat_template_kwargs"),
    ],
)
def test_json_that_is_none_is_named(chat: Conversation, field: str) -> None:
    """With its place."""
    with pytest.raises(InvalidRequest) as caught:
        rendered(CALLING, chat)
    assert caught.value.field == field


@pytest.mark.parametrize("written", ["x", '{"a": 1', "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_stay_as_text(written: str) -> None:
    """Clients send back what a model wrote, also where it was cut off: the conversation goes on."""
    call = ToolCall("c1", "add", written)
    chat = Conversation(messages=(ChatMessage("assistant", "", tool_calls=(call,)),))
    function = {"name": "add", "arguments": {"INVALID_JSON": written}}
    calls = [{"id": "c1", "type": "function", "function": function}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert rendered(CALLING, chat) == expected(CALLING, messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{% for one in messages",
        "{% for one in messages %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
        "{{ " + "1" * 10_000 + " }}",
    ],
    ids=["syntax", "loops", "brackets", "digits"],
)
def test_a_template_that_does_not_parse_is_none(source: str) -> None:
    """Whether Jinja refuses it, or Python does: the model is served without conversations."""
    assert ChatTemplate.parse(source, {}) is None
