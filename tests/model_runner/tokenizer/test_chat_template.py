"""Templates render as transformers renders them, and fail as a client's mistake."""

from __future__ import annotations

from typing import Any

import pytest

from model_runner.errors import InvalidRequest, ModelNotServable
from model_runner.tokenizer import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hi 👋"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}\n"
        "    {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ pad }}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "loop controls": (
        "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
        "{% if loop.index == 4 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(found=false) %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.found = true %}{% endif %}{% endfor %}{{ ns.found }}"
    ),
    "variables": "{{ tools is none }} {{ documents is none }} {{ thinking }} {{ date is defined }}",
    "trailing newline": "{{ messages[0].content }}\n",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_it_renders_as_transformers_does(name: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables: dict[str, Any] = {"thinking": "on"}
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **variables}
    expected, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=TEMPLATES[name], **TOKENS, **options
    )
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    rendered = template.render(MESSAGES, variables, add_generation_prompt=add_generation_prompt)
    assert rendered == expected[0]


def test_today_s_date() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", {}).render([])
    assert rendered.isdigit()
    assert len(rendered) == 4


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.deeper }}", "missing"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{% for x in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{% set ns = namespace(_x=1) %}", "_x"),
    ],
)
def test_what_a_template_raises_is_the_client_s_to_mend(template: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        ChatTemplate(template, TOKENS).render(MESSAGES)
    assert caught.value.param == "messages"


def test_a_client_cannot_change_the_conversation_by_naming_a_variable() -> None:
    template = ChatTemplate("{{ messages | length }}{{ bos_token }}", TOKENS)
    plain = template.render(MESSAGES)
    assert template.render(MESSAGES, {"messages": [], "bos_token": "x", "self": 1}) == plain


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(ModelNotServable, match="does not compile"):
        ChatTemplate("{% if %}", {})
