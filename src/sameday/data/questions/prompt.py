"""A question as the recipe's template asks it."""

from __future__ import annotations

from dataclasses import replace

from sameday.data.questions.read import Raw
from sameday.spec.questions import Prompt


def asked(raw: Raw, prompt: Prompt) -> Raw | None:
    """The question in its template; images stay where they are. None where the line's own text stands: that of an
    instruction, of a conversation with several questions, or of a text with images between its parts."""
    users = [number for number, message in enumerate(raw.messages) if message.role == "user"]
    texts = [n for n, part in enumerate(raw.messages[users[0]].parts) if isinstance(part, str)]
    if len(users) != 1 or len(texts) != 1 or (raw.instructed and not prompt.over_instruction):
        return None
    message = raw.messages[users[0]]
    old = str(message.parts[texts[0]])
    # Spaces and line breaks around the text are the line's, such as the one behind LLaVA's <image>.
    before, after = old[: len(old) - len(old.lstrip())], old[len(old.rstrip()) :]
    text = prompt.template(raw.stage, raw.type).format(question=raw.question)
    parts = (*message.parts[: texts[0]], before + text + after, *message.parts[texts[0] + 1 :])
    messages = list(raw.messages)
    messages[users[0]] = replace(message, parts=parts)
    return replace(raw, messages=tuple(messages))
