"""
chat.py: which tokens of a conversation are the assistant's own, under any chat template?

    messages --render--> <|im_start|>user hi<|im_end|> <|im_start|>assistant hello<|im_end|> --tokenizer--> ids
             --said----> ............................................... ===============                   mask

A turn is found by rendering the conversation again with a stand-in for its words: the true text before and after the
stand-in is not the turn's, so what is left is. A template may thus rewrite earlier turns (Qwen3 cuts their thinking),
trim, or write no assistant header. Where the two texts do not fit together, that is an error and never a guess.

Test:  pytest tests/test_chat.py
Knows nothing about: Sample, what is prompt and what response; {% generation %} markers, which few templates have.
"""
import copy
import itertools
import json
import re
from os.path import commonprefix

from jinja2 import TemplateError


def assistant_mask(tokenizer, messages: list[dict], tools=None, **kwargs) -> tuple[list[int], list[int]]:
    """-> ids of the whole conversation; for each token 1 if it lies wholly in what the assistant says, else 0.

    It says its thinking, answer, tool calls and end-of-turn token, but not what the generation prompt says for it, nor
    the newline after its end. A turn with step_loss_mask=0 is 0 throughout. kwargs go to the template. ValueError: a
    slow tokenizer, a conversation that the template refuses, a turn whose words cannot be told apart.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} does not say where in the text its tokens are; load a fast "
                         "tokenizer (use_fast=True, or convert it to a tokenizer.json)")
    special = "|".join(map(re.escape, sorted(special_tokens(tokenizer), reverse=True)))

    def draw(messages, add_generation_prompt=False):
        return render(tokenizer, messages, tools, add_generation_prompt, **kwargs)

    text = draw(messages)
    spans = [said(draw, messages, i, text, f"(?:{special or '(?!)'})") for i, message in enumerate(messages)
             if message["role"] == "assistant" and message.get("step_loss_mask") != 0]      # parquet has None for 1
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    # The tokens of one split character all have the character's offsets, so they are in or out together.
    mask = [int(any(start <= low and high <= end for start, end in spans)) for low, high in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


def render(tokenizer, messages: list[dict], tools=None, add_generation_prompt: bool = False, **kwargs) -> str:
    """The conversation as the template writes it."""
    messages = [{key: value for key, value in m.items() if key != "step_loss_mask"} for m in messages]
    parts = [part for m in messages if isinstance(m.get("content"), list) for part in m["content"]]
    kinds = {part["type"] for part in parts} - {"text"}
    if kinds:
        raise ValueError(f"the messages hold {', '.join(sorted(kinds))}, and the trainers compute with text only; leave such "
                         "rows out (on_bad_line='skip' does, and counts them)")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False,
                                             add_generation_prompt=add_generation_prompt, **kwargs)
    except TemplateError as error:           # such as its own raise_exception("roles must alternate")
        raise ValueError(f"the chat template refuses the conversation: {error}; mend the messages") from error


def schema(tool) -> dict:
    """A function's description for the template, from its type hints and docstring (transformers says how they must look)."""
    from transformers.utils import get_json_schema
    return get_json_schema(tool)


def reply(tokenizer, messages: list[dict], turn: dict, heard: list[dict], ended: bool, tools=None, **kwargs) -> str:
    """What the template writes between an assistant's turn and the next one: its end, what was heard, the next header.

    messages: before the turn. ended: the model has written an end token itself, so the template's is left out.
    """
    word, mark = next((f"zq{n}qz", f"xk{n}kx") for n in itertools.count()
                      if not re.search(f"zq{n}qz|xk{n}kx", f"{messages}{turn}{heard}{tools}"))
    special = "|".join(map(re.escape, sorted(special_tokens(tokenizer), reverse=True))) or "(?!)"
    for stand_in in (with_content({"role": "assistant", "content": turn["content"]}, word), *keeping_calls(turn, word)):
        try:
            drawn = render(tokenizer, [*messages, stand_in, *heard], tools, True, **kwargs)
        except (ValueError, TypeError):      # some templates want a call before each tool result
            continue
        text = drawn.rpartition(word)[2]
        if "tool_calls" in stand_in:         # what closes a call the model has written
            text = text[re.search(f"{special}|$", text).start():]
        marked = render(tokenizer, [*messages, stand_in, *(with_content(m, mark) for m in heard)], tools, True, **kwargs)
        if word in drawn and marked.rpartition(word)[2].count(mark) == len(heard):
            return re.sub(rf"^\s*(?:{special})", "", text, count=1) if ended else text
    roles = [m["role"] for m in heard]
    raise ValueError(f"the chat template does not write {roles} after an assistant's turn; is it made for tools? Else answer "
                     "with role 'user'")


def special_tokens(tokenizer) -> set[str]:
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | {*tokenizer.all_special_tokens}


# ---- One turn -------------------------------------------------------------------------------------------------------
# The first answer of [user "hi", assistant "hello", user "bye"] under ChatML, where word is the stand-in, mark a neighbour's:
#     text     ...<|im_start|>user hi<|im_end|><|im_start|>assistant hello<|im_end|><|im_start|>user bye<|im_end|>
#     drawn    ...<|im_start|>user hi<|im_end|><|im_start|>assistant word<|im_end|><|im_start|>user bye<|im_end|>
#     prompt   <|im_start|>assistant                        what asks for an answer, after `ending`, here <|im_end|>
#     head     drawn before word; base: where prompt begins in it; start: behind prompt, as far as text follows it
#     tail     drawn behind word; the turn ends where it begins in text, and with the end token that follows (`usual`)
def said(draw, messages: list[dict], i: int, text: str, special: str) -> tuple[int, int]:
    """Where in the text the words of turn i begin and end."""
    earlier, turn, later = messages[:i], messages[i], messages[i + 1:]
    # Plain letters, which neither trimming nor JSON changes: word stands for the turn's words, mark for a neighbour's.
    word, mark = next((f"zq{n}qz", f"xk{n}kx") for n in itertools.count()
                      if not re.search(f"zq{n}qz|xk{n}kx", f"{text}{messages}"))
    if earlier and earlier[-1]["role"] != "system":
        asker = [*earlier[:-1], with_content(earlier[-1], mark)]
    else:                                    # templates want a question before an answer
        asker = [*earlier, {"role": "user", "content": mark}]
    plain = with_content({"role": turn["role"], "content": turn.get("content")}, word)
    ending, prompt, closing = habits(draw, asker, plain, mark, word, special)
    for stand_in in (plain, *keeping_calls(turn, word)):
        try:
            drawn = draw([*earlier, stand_in, *later])
            gap = draw([*asker, stand_in, *later]).partition(word)[0].rpartition(mark)[2]   # between the two
            next_marked = draw([*earlier, stand_in, *(with_content(m, mark) for m in later[:1]), *later[1:]])
        except (ValueError, TypeError):      # some templates want a call before each tool result
            continue
        head, tail, next_tail = drawn.partition(word)[0], drawn.rpartition(word)[2], next_marked.rpartition(word)[2]
        if stand_in is not plain:            # what closes a call is the turn's own as well
            tail, next_tail = (t[re.search(f"{special}|$", t).start():] for t in (tail, next_tail))
        # The engine takes over where the text stops following its prompt, at the latest where the words begin.
        opening = gap.removeprefix(ending) if gap.startswith(ending) else ""   # the header, perhaps a think block
        base = len(head) - len(opening) * head.endswith(opening)
        shared = len(commonprefix([prompt, text[base:]]))
        start = base + shared if shared == len(prompt) else min(base + shared, len(head))
        end = len(text) - len(tail)
        alone = drawn.count(word) == 1 or word in drawn and stand_in is not plain
        fits = alone and text[:base] == head[:base] and start <= end and text.endswith(tail)
        if fits and (not later or mark in next_tail):      # tool results can vanish with their calls
            # Else the next special token: gpt-oss ends earlier turns with another than the last, GLM with a header.
            usual = closing if closing and tail.startswith(closing) else re.match(rf"(\s*{special})?", tail)[0]
            return start, end + len(usual)
    raise ValueError(f"message {i}: the chat template leaves out this assistant turn or the message after it, or changes "
                     "other text, so its tokens cannot be told apart; give it step_loss_mask=0 or drop what is left out")


def habits(draw, asker: list[dict], plain: dict, mark: str, word: str, special: str) -> tuple[str, str, str]:
    """Around a last turn the template writes: what ends the message before, the generation prompt, the end tokens."""
    head, _, tail = draw([*asker, plain]).partition(word)
    gap, closing = head.rpartition(mark)[2], re.match(rf"(\s*{special}+)?", tail)[0]
    silent, asked = (draw(asker, flag).rpartition(mark)[2] for flag in (False, True))
    ending = commonprefix([silent, asked])   # silent itself may go on, with an <|endoftext|> for example
    if ending == asked and not gap.removeprefix(ending).isspace():
        return gap, "", closing              # no prompt: all is the template's, but the space of "[/INST] hi"
    return ending, asked[len(ending):], closing


def keeping_calls(turn: dict, word: str):
    """The turn with its tool calls, but with the word for their arguments and for its content."""
    if turn.get("tool_calls"):
        calls = copy.deepcopy(turn["tool_calls"])
        for call in calls:
            function = call.get("function", call)
            function["arguments"] = json.dumps({word: 1}) if isinstance(function.get("arguments"), str) else {word: 1}
        yield (with_content(turn, word) if turn.get("content") else turn) | {"tool_calls": calls}


def with_content(message: dict, word: str) -> dict:
    parts = isinstance(message.get("content"), list)
    return message | {"content": [{"type": "text", "text": word}] if parts else word}
