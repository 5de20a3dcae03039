"""Prompts as the model's own files say: special tokens, chat templates in a sandbox."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, processors

from orchestrator.text.conversation import ChatMessage, Conversation, Tool
from orchestrator.text.tokenizer import TextTokenizer
from outrider.protocol.errors import InternalError, InvalidRequest
from tests.unit.orchestrator.text.test_text_stream import byte_level

TEMPLATE = """
{%- for message in messages %}
{{ bos_token }}{{ message['role'] }}: {{ message.content | trim }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""


def chat_of(*messages: ChatMessage, **options: bool) -> Conversation:
    """A conversation."""
    return Conversation(messages=messages, **options)


def tokenizer(template: str = "", bos: bool = False) -> TextTokenizer:
    """A byte-level tokenizer with special token <s> = 0 and a chat template; `bos`: <s> begins a text."""
    made = byte_level()._tokenizer
    if bos:
        made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    return TextTokenizer(made.to_str().encode(), template, {"bos_token": "<s>"})


def test_text_round_trip() -> None:
    """Text becomes tokens and the same text again; special tokens have no text."""
    plain = tokenizer()
    assert plain.decode((0, *plain.encode("héllo 👍"))) == "héllo 👍"


def test_special_tokens_can_be_left_out_or_kept() -> None:
    """Of a text's token ids, of a conversation's, and of the text that ids become."""
    one = tokenizer(TEMPLATE, bos=True)
    hello = one.encode("hello", special_tokens=False)
    assert one.encode("hello") == (0, *hello)
    assert one.decode((0, *hello), special_tokens=True) == "<s>hello"
    messages = chat_of(ChatMessage("user", "hi"))
    assert one.encode_chat(messages, None, True) == (0, *one.encode_chat(messages))


def test_a_conversation_may_end_with_its_last_message() -> None:
    """Without the beginning of an answer."""
    chat = tokenizer(TEMPLATE)
    tokens = chat.encode_chat(chat_of(ChatMessage("user", "hi"), generation_prompt=False))
    assert chat.decode(tokens) == "user: hi\n"


def test_truncation_and_padding_of_the_file_are_off() -> None:
    """A tokenizer.json that was saved with truncation or padding does not cut prompts."""
    saved = Tokenizer.from_str(byte_level()._tokenizer.to_str())
    saved.enable_truncation(2)
    saved.enable_padding(length=8)
    assert len(TextTokenizer(saved.to_str().encode()).encode("abc")) == 3


def test_chat_template_is_rendered() -> None:
    """Messages go through the template; special tokens in it become their ids, none is added."""
    chat = tokenizer(TEMPLATE, bos=True)
    tokens = chat.encode_chat(chat_of(ChatMessage("user", " hi "), ChatMessage("assistant", "yo")))
    assert tokens.count(0) == 2
    assert chat.decode(tokens) == "user: hi\nassistant: yo\nassistant:"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined.attribute }}",
    ],
)
def test_template_that_refuses_names_the_messages(template: str) -> None:
    """What a template refuses, or tries and may not, is an error of the messages."""
    with pytest.raises(InvalidRequest) as caught:
        tokenizer(template).encode_chat(chat_of(ChatMessage("user", "hi")))
    assert caught.value.field == "chat.messages"


def test_template_helpers() -> None:
    """Templates find what Hugging Face gives them: tojson without HTML escapes, dates, loop controls."""
    chat = tokenizer(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m.content | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    tokens = chat.encode_chat(chat_of(ChatMessage("user", "<é>"), ChatMessage("user", "no")))
    assert chat.decode(tokens) == '"<é>"4'


def test_conversations_with_tools_may_have_a_template_of_their_own() -> None:
    """Where the model has none for them, they are in the one for all."""
    data, user = byte_level()._tokenizer.to_str().encode(), ChatMessage("user", "hi")
    plain, tools = chat_of(user), Conversation(messages=(user,), tools=(Tool("f"),))
    both = TextTokenizer(data, "default", tool_chat_template="for {{ tools[0].function.name }}")
    assert [both.decode(both.encode_chat(chat)) for chat in (plain, tools)] == ["default", "for f"]
    one = tokenizer("default")
    assert one.encode_chat(plain) == one.encode_chat(tools)


def test_unreadable_files() -> None:
    """A tokenizer that cannot be read is an error; a template that does not parse is left out."""
    with pytest.raises(InternalError, match="tokenizer"):
        TextTokenizer(b"{}")
    assert not tokenizer("{% for %}").has_chat_template


def test_chat_needs_a_template() -> None:
    """Without a template conversations are refused."""
    with pytest.raises(InvalidRequest) as caught:
        tokenizer().encode_chat(chat_of(ChatMessage("user", "hi")))
    assert caught.value.field == "chat"
