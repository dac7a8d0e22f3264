"""Template of conversations: ChatML, as a text, and in Jinja for an export."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from forge.core.config import ResolvedConfig
    from forge.data.tokenizer import LoadedTokenizer

START, END = "<|im_start|>", "<|im_end|>"  # as the tokenizers of Qwen and SmolLM have them
ROLES = ("system", "user", "assistant")
ANSWERS = "assistant"  # the role whose messages are learned

TURN = re.compile(f"{re.escape(START)}({'|'.join(ROLES)})\n(.*?){re.escape(END)}\n", re.DOTALL)
# The same for transformers, which renders it without line ends after blocks (trim_blocks).
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{START}' + message['role'] + '\n' + message['content'] + '{END}' + '\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{START}{ANSWERS}\n' }}}}{{% endif %}}"
)


class Message(NamedTuple):
    """A message of a conversation. role: one of ROLES."""

    role: str
    content: str


def render(messages: Sequence[Message]) -> str:
    """The conversation as one text. Contents have neither START nor END."""
    return "".join(f"{START}{role}\n{content}{END}\n" for role, content in messages)


def parse(text: str) -> list[Message] | None:
    """The messages of a rendered conversation; None for another text."""
    found, position = [], 0
    while turn := TURN.match(text, position):
        found.append(Message(turn[1], turn[2]))
        position = turn.end()
    return found if found and position == len(text) else None


def export_keys(config: ResolvedConfig, tokenizer: LoadedTokenizer) -> Mapping[str, Any]:
    """Keys that files of an export have where the model was trained on conversations; {} for others."""
    if all(corpus.format != "chat" for corpus in config.tokenize.corpora.values()):
        return {}
    ends = [tokenizer.eos_id, tokenizer.tokenizer.token_to_id(END)]
    return {
        "tokenizer_config.json": {"chat_template": CHAT_TEMPLATE},
        "generation_config.json": {"eos_token_id": ends},
    }
