"""Three JSON dialects of questions about images become one record, told apart by each line's keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from sameday.data.questions.foreign_keys import check_conversation, check_line, check_plain, check_turn
from sameday.data.questions.sample import PLACEHOLDER, Message, last_user_text
from sameday.spec.questions import stage_number

FORMS = (
    "{image|image_filename, question, answer, stage?, type?, instruction?}",
    "{messages, images}",
    "{image, conversations}",
)
WITHOUT = "a question without an image has [] there"
# What others call our keys.
_OTHER_NAMES = {
    "image": "img image_path img_path image_file image_name img_name image_id img_id file_name filename path picture "
    "figure_path",
    "question": "q query prompt input question_text",
    "answer": "a ans answers response reply output label target answer_text ground_truth gt",
    "messages": "message chat dialog dialogue",
    "conversations": "conversation conv",
}
_STAND_FOR = {"image": "image_filename", "question": "instruction"}
OF_AN_IMAGE = ("image", "image_filename")
"""Keys under which a line with a question has its image."""
_SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system"}
_ROLES = ("system", "user", "assistant")

TYPES = ("type", "question_type", "question_class", "answer_type", "content_type")
"""Keys under which a line says what kind of question it is; the first that it has counts."""

SYSTEMS = ("system", "system_prompt")
"""Keys of a line that may hold its system turn."""

PART_NAMES = ("image", "path", "url", "image_url")
"""Keys by which an image part of a turn may name its file."""

Parts = tuple[str | int, ...]
Turn = tuple[str, list[str | None]]
"""A role and its pieces: a text, or None where an image stands."""


@dataclass(frozen=True)
class Raw:
    """A question as its line tells it; whether its images exist and its texts are sound is not known yet. `question` is
    the plain one, also where an instruction is the whole user text (`instructed`)."""

    images: list[str]
    messages: tuple[Message, ...]
    stage: int | None = None
    type: str | None = None
    question: str = field(default="", compare=False)
    instructed: bool = field(default=False, compare=False)


def parse_line(obj: Any) -> Raw:
    """Read one line's object in whichever dialect it is; ValueError names what is wrong with it."""
    if not isinstance(obj, dict):
        raise ValueError(f"not an object but {kind(obj)}; each line is one JSON object")
    if _is_table(obj):
        raise ValueError(
            "is a whole table as pandas writes it by default; "
            '`to_json(FILE, orient="records", lines=True)` writes one object per line'
        )
    check_line(obj)
    if "messages" in obj and "conversations" in obj:
        raise ValueError("has both 'messages' and 'conversations'; one of them is allowed")
    if "messages" in obj:
        turns, own = _openai_turns(obj["messages"])
        images = _named_once(_paths(obj, _one_of(obj, "images", "image"), required=False), own)
    elif "conversations" in obj:
        named = _one_of(obj, "image", "images")
        images, turns = _paths(obj, named, required=False), _spoken_turns(obj["conversations"])
    elif obj.keys() & set(OF_AN_IMAGE) and obj.keys() & {"question", "answer", "instruction"}:
        return _plain(obj)
    elif {"question", "answer"} <= obj.keys() and "image" not in meant_keys(obj.keys()).values():
        # An image that got lost is more likely than a question without one.
        raise ValueError(f"has no 'image'; {WITHOUT}")
    else:
        keys = ", ".join(map(repr, obj)) or "none"
        raise ValueError(f"unknown form with the keys {keys}; known are {'; '.join(FORMS)}")
    check_conversation(obj)
    messages = _place_images(_with_system(turns, _system(obj)), len(images))
    return Raw(images, messages, _stage(obj), _type(obj), last_user_text(messages))


def _is_table(obj: Mapping[str, Any]) -> bool:
    """By columns, {"question": {"0": ...}}; by rows, {"0": {"question": ...}}; or as pandas calls split."""
    if obj.keys() == {"columns", "index", "data"}:
        return True
    inner = list(obj.values())
    if not inner or not all(isinstance(each, dict) and each for each in inner):
        return False
    return all(key.isdigit() for key in obj) or all(key.isdigit() for each in inner for key in each)


def fields_of(obj: Any, raw: Raw | None) -> dict[str, Any]:
    """The fields of a line as conditions compare them: stage and type as they were read, and of a conversation, which
    has no such fields of its own, the last question and answer."""
    own = obj if isinstance(obj, dict) else {}
    if raw is None:
        return dict(own)
    read = {"stage": raw.stage, "type": raw.type}
    spoken = {"question": raw.question, "answer": raw.messages[-1].text}
    return {**spoken, **own, **{name: value for name, value in read.items() if value is not None}}


def meant_keys(keys: Set[str]) -> dict[str, str]:
    """Of the keys that every line has, those that look like one of ours which is not there, with ours."""
    if keys & {"messages", "conversations"}:
        return {}
    there = set(keys) | {ours for ours, same in _STAND_FOR.items() if same in keys}
    names = {re.sub(r"[^a-z]+", "_", key.lower()): key for key in sorted(keys - _OTHER_NAMES.keys())}
    meant: dict[str, str] = {}
    for ours, others in _OTHER_NAMES.items():
        near = [name for name in (ours, *others.split()) if name in names]
        near = near or difflib.get_close_matches(ours, names, 1, 0.75)
        if ours not in there and near:
            meant[names[near[0]]] = ours
    return meant


def kind(value: Any) -> str:
    """What JSON calls this value."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names[type(value)]


def _plain(obj: Mapping[str, Any]) -> Raw:
    images = _paths(obj, _one_of(obj, *OF_AN_IMAGE))
    instruction = obj.get("instruction")
    if instruction is not None and not isinstance(instruction, str):
        raise ValueError(f"'instruction' is {kind(instruction)}, must be a text")
    name = "instruction" if instruction and instruction.strip() else "question"
    check_plain(obj, instructed=name == "instruction")
    text = _text(obj, name)
    if PLACEHOLDER in text:
        raise ValueError(f"'{name}' holds {PLACEHOLDER!r}, but in this form images stand before the text: remove it")
    answer = obj.get("answer")
    # A count or a measure is an answer whose text is plain; a boolean may mean yes, true or 1, so it is not.
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    system = [Message("system", (told,))] if (told := _system(obj)) else []
    user = Message("user", (*range(len(images)), *([text] if text else [])))
    assistant = Message("assistant", (_text({**obj, "answer": answer} if "answer" in obj else obj, "answer"),))
    plain = obj.get("question")
    question = plain if isinstance(plain, str) and plain.strip() else text
    return Raw(images, (*system, user, assistant), _stage(obj), _type(obj), question.strip(), name == "instruction")


def _system(obj: Mapping[str, Any]) -> str:
    """The text of a system turn that stands beside the turns, as other trainers have it; empty where there is none."""
    name = _one_of(obj, *SYSTEMS)
    system = "" if obj.get(name) is None else _text(obj, name)
    if PLACEHOLDER in system:
        raise ValueError(f"'{name}' holds {PLACEHOLDER!r}; only user turns can show an image")
    return system if system.strip() else ""


def _with_system(turns: list[Turn], system: str) -> list[Turn]:
    if not system:
        return turns
    role, pieces = turns[0]
    if role != "system":
        return [("system", [system]), *turns]
    if pieces != [system]:
        raise ValueError("the system prompt beside the turns and their system turn differ; one of them is allowed")
    return turns


def _text(obj: Mapping[str, Any], key: str, where: str = "") -> str:
    if key not in obj:
        raise ValueError(f"{where}has no '{key}'")
    value = obj[key]
    if not isinstance(value, str):
        raise ValueError(f"{where}'{key}' is {kind(value)}, must be a text")
    return value


def _one_of(obj: Mapping[str, Any], name: str, other: str) -> str:
    """Which of two names of one thing a line uses."""
    if name in obj and other in obj and obj[name] != obj[other]:
        raise ValueError(f"'{name}' and '{other}' differ; one of them is allowed")
    return other if other in obj and name not in obj else name


def _paths(obj: Mapping[str, Any], key: str, required: bool = True) -> list[str]:
    value = obj.get(key)
    if (value is None and not required) or value == "[]":  # a table has texts alone
        return []
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, list):
        none = f"; {WITHOUT}" if value is None else ""
        raise ValueError(f"'{key}' is {kind(value)}, must be a path or a list of paths{none}")
    for path in paths:
        if not isinstance(path, str):
            raise ValueError(f"'{key}' holds {kind(path)}, must be a path or a list of paths")
        if not path.strip():
            raise ValueError(f"'{key}' holds an empty path; {WITHOUT}")
    return list(paths)


def _stage(obj: Mapping[str, Any]) -> int | None:
    """Stages are ordered by number, so that a name without one says too little."""
    stage = stage_number(obj.get("stage"))
    if stage is not None and (isinstance(stage, bool) or not isinstance(stage, int)):
        raise ValueError(f'\'stage\' is {stage!r}, must be a whole number (2, "2" or "stage 2") or null')
    return stage


def _type(obj: Mapping[str, Any]) -> str | None:
    """What is neither a text nor a number, nor a list of them, says no type."""
    for key in filter(obj.__contains__, TYPES):
        values = obj[key] if isinstance(obj.get(key), list) else [obj.get(key)]
        texts = [str(v).strip() for v in values if isinstance(v, str | int | float) and not isinstance(v, bool)]
        if any(texts):
            return ", ".join(filter(None, texts))
    return None


def _named_once(listed: list[str], own: list[str]) -> list[str]:
    """An image is named in the list beside the turns, or by its part of a turn."""
    if listed and own and listed != own:
        raise ValueError("'images' and the image parts of 'messages' name other files; one of them is enough")
    return listed or own


def _openai_turns(messages: Any) -> tuple[list[Turn], list[str]]:
    """The turns, and the names of images that stand in them."""
    turns: list[Turn] = []
    names: list[str] = []
    for number, message in enumerate(_objects(messages, "messages")):
        where = f"messages[{number}]: "
        role = _text(message, "role", where)
        if role not in _ROLES:
            raise ValueError(f"{where}role {role!r} is unknown; known are {', '.join(_ROLES)}")
        check_turn(message, role, where)
        content = message.get("content")
        if isinstance(content, list):
            pieces = [piece for part in content for piece in _openai_part(part, where, names)]
        else:
            pieces = _split(_text(message, "content", where))
        turns.append((role, pieces))
    return turns, names


def _openai_part(part: Any, where: str, names: list[str]) -> list[str | None]:
    """Adds the name of an image that stands in the part."""
    if not isinstance(part, dict):
        raise ValueError(f"{where}a part of 'content' is {kind(part)}, must be an object")
    if part.get("type") == "text":
        return _split(_text(part, "text", where))
    if part.get("type") not in ("image", "image_url"):
        raise ValueError(f"{where}a part of 'content' has type {part.get('type')!r}; image and text are allowed")
    keys = [key for key in part if key not in ("type", "text") and part[key] is not None]
    if others := [key for key in keys if key not in PART_NAMES]:
        allowed = ", ".join(PART_NAMES)
        raise ValueError(
            f"{where}an image part has {', '.join(map(repr, others))}; its file is named by one of {allowed}"
        )
    if len(keys) > 1:
        raise ValueError(f"{where}an image part has {' and '.join(map(repr, keys))}; one of them is allowed")
    for key in keys:
        inner = part[key]  # of OpenAI's, `detail` says how large their models see it
        name = inner["url"] if isinstance(inner, dict) and {"url"} <= inner.keys() <= {"url", "detail"} else inner
        names += _paths({key: name}, key)
    return [None]


def _spoken_turns(conversations: Any) -> list[Turn]:
    turns: list[Turn] = []
    for number, turn in enumerate(_objects(conversations, "conversations")):
        where = f"conversations[{number}]: "
        speaker = _text(turn, "from", where)
        if speaker not in _SPEAKERS:
            raise ValueError(f"{where}from {speaker!r} is unknown; known are {', '.join(_SPEAKERS)}")
        check_turn(turn, _SPEAKERS[speaker], where)
        turns.append((_SPEAKERS[speaker], _split(_text(turn, "value", where))))
    return turns


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"'{key}' is {kind(value) if value != [] else 'empty'}, must be a list of turns")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise ValueError(f"{key}[{number}]: is {kind(item)}, must be an object")
    return value


def _split(text: str) -> list[str | None]:
    """`a<image>b` as a, an image, b."""
    pieces: list[str | None] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        pieces += [None, piece] if number else [piece]
    return [piece for piece in pieces if piece != ""]


def _place_images(turns: list[Turn], images: int) -> tuple[Message, ...]:
    """Number the images in the order they stand in. Without places, all go before the first user text."""
    roles = [role for role, _ in turns]
    if "system" in roles[1:]:
        raise ValueError("a system turn may only stand first")
    if roles[-1] != "assistant":
        raise ValueError(f"ends with a turn of role {roles[-1]}, must end with the assistant's answer")
    if "user" not in roles:
        raise ValueError("has no user turn")
    if roles[0] == "assistant":
        raise ValueError("begins with a turn of role assistant, must begin with a user turn or a system turn")
    if roles[:2] == ["system", "assistant"]:
        raise ValueError("a turn of role assistant stands behind the system turn, and a user turn must stand there")
    for role, pieces in turns:
        if role != "user" and None in pieces:
            raise ValueError(f"an image stands in a turn of role {role}; only user turns can show one")
    places = sum(pieces.count(None) for _, pieces in turns)
    if places == 0:
        turns[roles.index("user")][1][:0] = [None] * images
    elif places != images:
        raise ValueError(f"has {images} image path(s) but {places} place(s) for an image in its turns")
    numbers = iter(range(images))
    messages = []
    for role, pieces in turns:
        parts: Parts = tuple(next(numbers) if piece is None else piece for piece in pieces)
        messages.append(Message(role, parts))
    return tuple(messages)
