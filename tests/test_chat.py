"""
test_chat.py: the assistant's tokens, against transformers' own mask from templates with {% generation %} markers.

    a template with markers --transformers--> mask  ==  mask <--chat.assistant_mask-- the same template without them

Test:  pytest tests/test_chat.py         CPU only, no network, about 6 s. The tokenizer is a byte-level BPE made here.
"""
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chat import assistant_mask, render

SPECIAL = ["<s>", "</s>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>",
           "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|user|>", "<|assistant|>"]
WORDS = "the answer is hello world of a question think user assistant model name arguments add INST\n\n"

# ---- Templates in the style of..., each a line, so that markers can be taken out without changing any white space --------
CALLS = (r"{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (c.function | tojson) + '\n</tool_call>' }}{% endfor %}")
QWEN2 = (r"{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
         r"{% for m in messages %}"
         r"{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
         r"{% generation %}{{ m.content or '' }}" + CALLS + r"{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
         r"{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
         r"{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
         r"{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
         r"{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
         r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
         r"{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}")
# Cuts the thinking of turns before the last question; the last turn always gets a think block.
QWEN3 = (r"{% set ns = namespace(question=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
         r"{% set ns.question = loop.index0 %}{% endif %}{% endfor %}" +
         QWEN2.replace("{{ m.content or '' }}",
                       r"{% set parts = (m.content or '').split('</think>') %}"
                       r"{% set thought = m.reasoning_content or parts[:-1] | join | replace('<think>', '') %}"
                       r"{% if loop.index0 > ns.question and (loop.last or thought) %}"
                       r"{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ parts[-1].lstrip('\n') }}"))
LLAMA3 = (r"{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
          r"{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}"
          r"{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
          r"{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
# No assistant header; shows calls instead of the content, and wants one before each tool result.
MISTRAL = (r"{{ bos_token }}{% for m in messages %}"
           r"{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
           r"{% elif m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}"
           r"{{ raise_exception('a result without its call') }}{% endif %}{{ '[RESULT] ' + m.content + ' [/RESULT]' }}"
           r"{% elif m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}{{ '[CALL] ' + (m.tool_calls | tojson) }}"
           r"{% else %}{{ ' ' + m.content | trim }}{% endif %}{{ eos_token }}{% endgeneration %}"
           r"{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}")
GEMMA = (r"{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<start_of_turn>model\n' }}"
         r"{% generation %}{{ m.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
         r"{% else %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
         r"{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}")
# Its prompt opens the thinking, which the template writes for a last turn only.
R1 = (r"{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|Assistant|>' }}"
      r"{% if loop.last and m.reasoning_content %}{{ '<think>\n' }}"
      r"{% generation %}{{ m.reasoning_content + '\n</think>\n\n' + m.content + eos_token }}{% endgeneration %}"
      r"{% else %}{% generation %}{{ m.content.split('</think>')[-1] + eos_token }}{% endgeneration %}{% endif %}"
      r"{% else %}{{ '<|User|>' + m.content }}{% endif %}{% endfor %}"
      r"{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}")
TEMPLATES = {"qwen2": (QWEN2, "<|im_end|>"), "qwen3": (QWEN3, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"),
             "mistral": (MISTRAL, "</s>"), "gemma": (GEMMA, "<eos>"), "r1": (R1, "</s>")}


# ---- Conversations -------------------------------------------------------------------------------------------------------
def turns(*contents, **extra):
    """user, assistant, user, ...; extra belongs to the last one."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return [*messages[:-1], messages[-1] | extra]


def call(**arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


LOOKALIKE = "<|im_end|>\n<|im_start|>assistant\nno [/INST] no</s><end_of_turn>\n<start_of_turn>model\n<|Assistant|>no"
SYSTEM = {"role": "system", "content": "be the assistant"}
RESULT = {"role": "tool", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a", "parameters": {}}}]
CONVERSATIONS = {
    "single": turns("hi", "hello world"),
    "multi": turns("hi", "hello", "a question", "the answer", "hi", "the answer"),
    "question_last": turns("hi", "hello", "a question"),
    "same": turns("hello", "hello", "hello", "hello"),
    "unicode": turns("問題は？ 🤔", "答えは 42 です 🎉", "é́ 👩‍👩‍👧", "🤗世界 ñ"),
    "spaces": turns(" hi\n", "the answer \n", "\n\thi", "a \t b  "),
    "empty": turns("hi", "", "", "hello"),
    "lookalike": turns(LOOKALIKE, "no " + LOOKALIKE, LOOKALIKE, "assistant"),
    "stand_ins": turns("zq0qz xk1kx", "zq1qz", "xk0kx", "zq0qz"),
    "system": [SYSTEM, *turns("hi", "hello", "hi", "hello")],
    "two_in_a_row": [*turns("hi", "hello"), *turns("hi", "the answer")[1:]],
    "thinking": turns("hi", "<think>\nis a user\n</think>\n\nhello", "hi", "hello",
                      reasoning_content="a question of the user"),
    "thinking_inside": turns("hi", "<think>\nis a user\n</think>\n\nhello", "hi", "<think>\na b\n</think>\n\nhello"),
    "tools": [*turns("hi", None, tool_calls=[call(a=1)]), RESULT, *turns("hi", "it is 3", "hi", "hello")[1:]],
    "tools_two": [*turns("hi", "the answer", tool_calls=[call(a=1), call(b="is")]), RESULT, RESULT | {"content": "4"},
                  *turns("hi", None, tool_calls=[call()])[1:], RESULT, *turns("hi", "3")[1:]],
}
NOT_FOR = {"mistral": {"system", "tools_two", "two_in_a_row"}, "llama3": {"tools", "tools_two"},
           "gemma": {"tools", "tools_two"}, "r1": {"tools", "tools_two"}}
PAIRS = [(name, c) for name in TEMPLATES for c in CONVERSATIONS if c not in NOT_FOR.get(name, ())]


@pytest.fixture(scope="module")
def backend():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([WORDS] * 9, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def make(backend):
    def make(template, eos):
        """A tokenizer with this template, its markers taken out."""
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
        tokenizer.chat_template = re.sub(r"{% (end)?generation %}", "", template)
        return tokenizer
    return make


def runs(tokenizer, ids, mask) -> list[str]:
    """The text of each run of 1s."""
    spans = [m.span() for m in re.finditer("1+", "".join(map(str, mask)))]
    return [tokenizer.decode(ids[a:b]) for a, b in spans]


# ---- Against transformers ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, conversation", PAIRS)
def test_equals_marked_template(make, name, conversation):
    template, eos = TEMPLATES[name]
    messages, tokenizer = CONVERSATIONS[conversation], make(template, eos)
    tools = TOOLS if "tools" in conversation else None
    wanted = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, return_assistant_tokens_mask=True)
    ids, mask = assistant_mask(tokenizer, messages, tools)
    assert ids == wanted["input_ids"]
    assert runs(tokenizer, ids, mask) == runs(tokenizer, ids, wanted["assistant_masks"])
    assert mask == wanted["assistant_masks"] and sum(mask)

    # A turn with step_loss_mask=0 loses its run and nothing else changes.
    spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for run, i in enumerate(spoken):
        muted = [m | {"step_loss_mask": 0} if j == i else m | {"step_loss_mask": None} for j, m in enumerate(messages)]
        left = runs(tokenizer, *assistant_mask(tokenizer, muted, tools))
        assert left == [r for k, r in enumerate(runs(tokenizer, ids, mask)) if k != run], f"turn {i} muted"


def said(make, template, eos, messages, tools=None, **kwargs) -> list[str]:
    tokenizer = make(template, eos)
    return runs(tokenizer, *assistant_mask(tokenizer, messages, tools, **kwargs))


PIECES = st.sampled_from([
    "hello", " ", "\n", "the answer", "世界", "🤗", "é", "<|im_end|>", "</s>", "<end_of_turn>", "[/INST]", "<", "model\n",
    "<|im_start|>assistant\n", "<|Assistant|>", "<|eot_id|>", "{", '"', "zq0qz", "\\n"])
TEXT = st.lists(PIECES, max_size=5).map("".join)


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(["qwen2", "llama3", "mistral", "gemma", "r1"]), texts=st.lists(TEXT, min_size=2, max_size=6))
def test_what_was_said_and_the_end_token(make, name, texts):
    """A newline that begins an answer may share its token with the header's, and is then nobody's."""
    template, eos = TEMPLATES[name]
    texts, end = texts[:len(texts) // 2 * 2], "<end_of_turn>" if name == "gemma" else eos
    tokenizer, messages = make(template, eos), turns(*texts)
    ids, mask = assistant_mask(tokenizer, messages)
    wanted = [t + end if name in ("qwen2", "r1") else " " * (name == "mistral") + t.strip() + end for t in texts[1::2]]
    got = runs(tokenizer, ids, mask)
    assert [g.lstrip("\n") for g in got] == [w.lstrip("\n") for w in wanted]

    # What comes before the last answer is what an engine would be given.
    before = tokenizer.decode(ids[:len(ids) - mask[::-1].index(0, mask[::-1].index(1))]).rstrip("\n")
    assert name == "r1" or before == render(tokenizer, messages[:-1], add_generation_prompt=True).rstrip("\n")


# ---- Where the assistant takes over ------------------------------------------------------------------------------------
def test_the_prompts_own_think_block_is_not_the_assistants(make):
    template, eos = TEMPLATES["qwen3"]
    messages = turns("hi", "hello", "hi", "the answer")
    assert said(make, template, eos, messages) == ["hello<|im_end|>", "<think>\n\n</think>\n\nthe answer<|im_end|>"]
    assert said(make, template, eos, messages, enable_thinking=False) == ["hello<|im_end|>", "the answer<|im_end|>"]
    # The prompt of a thinking model opens the block, also where the answer brings the whole block as its content.
    keeping = TEMPLATES["r1"][0].replace(".split('</think>')[-1]", "")
    assert said(make, keeping, "</s>", turns("hi", "<think>\na\n</think>hello", "hi", "<hello")) == [
        "a\n</think>hello</s>", "<hello</s>"]


def test_a_conversation_that_begins_with_the_assistant(make):
    template, eos = TEMPLATES["qwen3"]
    template += (r"{% if messages | selectattr('role', 'equalto', 'user') | list == [] %}"
                 r"{{ raise_exception('nobody asks') }}{% endif %}")
    talk = turns("", "hello", "hi")[1:]
    assert said(make, template, eos, talk) == said(make, template, eos, [SYSTEM, *talk]) == ["hello<|im_end|>"]
    thinking = turns("", "hello", reasoning_content="a")[1:]
    assert said(make, TEMPLATES["qwen3"][0], eos, thinking) == ["<think>\na\n</think>\n\nhello<|im_end|>"]


def test_a_think_block_that_depends_on_the_question(make):
    """The neighbour's stand-in is another question, so the block's beginning stays unknown; the user's words stay out."""
    template = (r"{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' and "
                r"messages[loop.index0 - 1].content != 'quick' %}<think></think>{% endif %}{{ m.content + '</s>' }}"
                r"{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    assert said(make, template, "</s>", turns("quick", "hello", "hi", "the")) == ["hello</s>", "<think></think>the</s>"]


def test_a_template_that_ends_the_text(make):
    template, eos = TEMPLATES["qwen3"]
    template += "{% if not add_generation_prompt %}<eos>{% endif %}"
    assert said(make, template, eos, turns("hi", "hello")) == ["<think>\n\n</think>\n\nhello<|im_end|>"]


NO_PROMPT = r"{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + ' </s>\n' }}{% endfor %}"


def test_a_template_without_generation_prompt(make):
    assert said(make, NO_PROMPT, "</s>", turns("hi", "hello", "hi", " the")) == ["hello </s>", " the </s>"]


def test_a_token_across_the_border_is_nobodys(make):
    """The engine is given "assistant: "; the token " answer" would begin inside that."""
    template = (r"{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
                r"{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    assert said(make, template, "</s>", turns("hi", "answer is the answer")) == [" is the answer</s>"]


# ---- Where it ends -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end, middle, last", [
    ("{{ '<|eot_id|></s>\n<eos>' }}", "<|eot_id|></s>", "<|eot_id|></s>"),             # two tokens, and an end of the text
    ("{{ '</s>' if loop.last else '<|eot_id|>' }}", "<|eot_id|>", "</s>"),             # as gpt-oss
    ("", "<|user|>", "")])                                                             # as GLM, which stops at a header
def test_end_of_turn(make, end, middle, last):
    template = NO_PROMPT.replace(r"{{ '<|' + m.role + '|>' + m.content + ' </s>\n' }}",
                                 r"{{ '<|' + m.role + '|>' + m.content }}" + end)
    assert said(make, template, "</s>", turns("hi", "hello", "hi", "the")) == ["hello" + middle, "the" + last]


def test_calls_that_the_template_wants_kept(make):
    """Results vanish with their calls here; they come in the assistant's message, and are not its own."""
    template = (r"{% for m in messages %}{% if m.tool_calls %}<|assistant|>{% for c in m.tool_calls %}"
                r"{{ c.function.arguments + '<|eot_id|>' }}{% endfor %}{{ messages[loop.index0 + 1].content + LATE }}"
                r"{% elif m.role != 'tool' %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endif %}{% endfor %}")
    calls = [{"function": {"name": "add", "arguments": text}} for text in ('{"a": "3"}', '{"b": 4}')]
    messages = [*turns("hi", None, tool_calls=calls), RESULT, *turns("hi", "it is 3")[1:]]
    for late in ("''", "(m.content or '')"):
        late = template.replace("LATE", late)
        assert said(make, late, "</s>", messages) == ['{"a": "3"}<|eot_id|>{"b": 4}<|eot_id|>', "it is 3</s>"]
    with pytest.raises(ValueError, match="message 1"):     # nothing tells where the calls end and the result begins
        said(make, late.replace("<|eot_id|>", "|"), "</s>", messages)
    with pytest.raises(ValueError, match="message 1"):     # its words, a result that is not, its words again
        said(make, late, "</s>", [messages[0], messages[1] | {"content": "hello"}, *messages[2:]])


def test_content_in_parts(make):
    template = (r"{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for part in m.content %}{{ part.text }}{% endfor %}"
                r"</s>{% endfor %}")
    parts = [m | {"content": [{"type": "text", "text": text} for text in m["content"].split("_")]}
             for m in turns("hi", "the_answer")]
    assert said(make, template, "</s>", parts) == ["theanswer</s>"]


# ---- What is refused ---------------------------------------------------------------------------------------------------
def test_refusals(make):
    with pytest.raises(ValueError, match="load a fast tokenizer"):
        assistant_mask(SimpleNamespace(is_fast=False), turns("hi", "hello"))
    with pytest.raises(ValueError, match="refuses the conversation: no role system; mend the messages"):
        said(make, MISTRAL, "</s>", CONVERSATIONS["system"])
    with pytest.raises(ValueError, match="a result without its call"):
        said(make, MISTRAL, "</s>", [*turns("hi", "hello"), RESULT, *turns("hi", "hello")[1:]])
    lines = [("{% if m.role != 'assistant' or loop.last %}", "message 1: the chat template leaves out this assistant turn"),
             ("{% if m.role != 'tool' %}", "or the message after it"),                      # a result not shown
             ("{% if m.content != 'hello' %}", "so its tokens cannot be told apart; give it step_loss_mask=0 or drop"),
             ("{{ (messages[1] or {'content': ''}).content if loop.first }}{% if 1 %}", "message 1"),    # its words twice
             ("{{ (messages[1] or {'content': ''}).content[:1] if loop.first }}{% if 1 %}", "or changes other text, so"),
             ("{{ (messages[1] or {'content': ''}).content[:1] if loop.last }}{% if 1 %}", "or changes other text, so")]
    messages = [*turns("hi", "hello"), RESULT, *turns("hi", "the answer")[1:]]
    for line, error in lines:
        template = "{% for m in messages %}" + line + r"{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endif %}{% endfor %}"
        with pytest.raises(ValueError, match=error):
            said(make, template, "</s>", messages)
        muted = [messages[0], messages[1] | {"step_loss_mask": 0}, *messages[2:]]           # the remedy
        assert said(make, template, "</s>", muted) == ["the answer</s>"]
    template = "{% for m in messages %}{% if m.content != 'hello' %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="message 1: the chat template leaves out this assistant turn"):
        said(make, template, "</s>", turns("hi", "hello", "hi"))                            # what is around it overlaps


def test_the_messages_stay_as_they_are(make):
    messages = CONVERSATIONS["tools"]
    before = str(messages)
    said(make, MISTRAL, "</s>", [m | {"step_loss_mask": 1} for m in messages], TOOLS)
    assert str(messages) == before
    assert render(make("{{ messages[0] | length }}", "</s>"), [messages[0] | {"step_loss_mask": 1}]) == "2"  # role, content
