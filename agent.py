"""
agent.py: how does a conversation with tools run, turn by turn?

    prompt | assistant: words, call | tool: result, next header | assistant: words | ...      one Sample
    mask         1 1 1 1 1 1 1 1      0 0 0 0 0 0 0 0 0 0 0       1 1 1 1 1 1 1
    ids          the engine's own     chat template's text         the engine's own

    tools = [calculator]                         in a run file: functions with type hints and docstrings; turns run in a loop
    talk = Conversation(args, sample, params)    in a custom_generate_function: one turn at a time
    text = await talk.say(); talk.hear({"role": "user", "content": ...})

What the model wrote is never tokenised again: only what stands between two of its turns is text, written by the chat template
(chat.reply), and appended with loss_mask 0.

Test:  pytest tests/test_agent.py
Knows nothing about: HTTP, groups, rewards.      Source: the loop of ReAct (2210.03629), masks as in Search-R1 (2503.09516).
"""
import asyncio
import inspect
import json
import logging
from collections.abc import Callable

import chat
from sample import Sample, Status
from workers import WorkerError


async def converse(args, sample: Sample, params: dict, tools: list[Callable] | None = None) -> Sample:
    """Turns until the model calls no tool any more. TRUNCATED: it would, but max_turns, tokens or context are used up.

    tools: functions, `def` (run in another process, so it may hang or crash) or `async def`; default args.tools. Whatever a
    call does wrong, the model reads as the tool's output.
    """
    tools = {tool.__name__: tool for tool in (args.tools if tools is None else tools)}
    parser = call_parser(args, list(tools.values()))
    talk = Conversation(args, sample, params)
    while True:
        if talk.waiting() == "assistant":
            text = await talk.say()
            if sample.status != Status.COMPLETED:
                return sample
            content, calls = parser(text)
            calls = [call | {"id": call_id(args, call, i)} for i, call in enumerate(calls, talk.calls_made())]
            sample.turns[-1] |= {"content": content} | ({"tool_calls": calls} if calls else {})
        calls = sample.turns[-1].get("tool_calls", ())
        if not calls or talk.turns_done() >= args.max_turns:     # a result that nobody would read is not asked for
            sample.status = Status.TRUNCATED if calls else Status.COMPLETED
            return sample
        sample.status = Status.PENDING       # while the tools run: see say()
        if not talk.hear(*await asyncio.gather(*(run_tool(args, tools, call) for call in calls))):
            return sample


class Conversation:
    """A sample that grows by turns. It may have been put back in the middle of one, and then goes on there.

    sample.turns, what was said since the prompt: chat messages; the assistant's also know their place, "begin" and "end", in
    response tokens.
    """

    def __init__(self, args, sample: Sample, params: dict):
        self.args, self.sample, self.params = args, sample, params
        if not isinstance(sample.metadata.get("messages"), list):
            raise ValueError(f"sample {sample.index}: no messages to go on with; set apply_chat_template=True, and where you "
                             "have a data_source, let it give prompts that are lists of messages")

    def turns_done(self) -> int:
        return sum("end" in turn for turn in self.sample.turns)

    def calls_made(self) -> int:
        return sum(len(turn.get("tool_calls", ())) for turn in self.sample.turns)

    def waiting(self) -> str:
        """Whose turn it is: "assistant", or "others" where it was put back before they had answered."""
        last = self.sample.turns[-1] if self.sample.turns else {"role": "user"}
        return "others" if last["role"] == "assistant" and "end" in last else "assistant"

    async def say(self) -> str:
        """The assistant's next turn -> its text, special tokens and all. Why it ended is in sample.status.

        NOTE: set it to PENDING before you await anything else, or an abort meanwhile would take the sample for finished."""
        sample = self.sample
        if not (sample.turns and sample.turns[-1]["role"] == "assistant" and "end" not in sample.turns[-1]):
            sample.turns = [*sample.turns, {"role": "assistant", "content": "", "begin": sample.response_length}]
        await self.args.generate(sample, self.params)
        turn = sample.turns[-1]
        ids = sample.response_ids()[turn["begin"]:]
        ended = sample.status == Status.COMPLETED and ids and ids[-1] in self.args.end_ids
        turn["content"] = self.args.tokenizer.decode(ids[:-1] if ended else ids, clean_up_tokenization_spaces=False)
        if sample.status != Status.ABORTED:
            turn |= {"end": sample.response_length, "ended": bool(ended)}
        return turn["content"]

    def hear(self, *messages: dict) -> bool:
        """Others' messages, and what asks for the assistant's next turn. False: the sample is ABORTED, or has no room for them
        and is TRUNCATED. All that is said between two turns goes into one call."""
        sample, args = self.sample, self.args
        if sample.status == Status.ABORTED:
            return False
        if self.waiting() != "others":
            raise ValueError(f"sample {sample.index}: hear() where the assistant's turn is next; say() first, and give all "
                             "that others say in one hear()")
        *before, turn = sample.turns
        earlier = [*sample.metadata["messages"], *map(plain, before)]
        text = chat.reply(args.tokenizer, earlier, plain(turn), [*map(plain, messages)], turn["ended"],
                          sample.metadata.get("tools"), **args.apply_chat_template_kwargs)
        room = min(self.params["max_new_tokens"] - sample.response_length, args.context_len - len(sample.tokens))
        # A tool may say megabytes: what has 100 characters for each token that may come is too long, however it is split.
        ids = args.tokenizer(text, add_special_tokens=False)["input_ids"] if len(text) <= 100 * room else None
        if ids is None or len(ids) >= room:
            sample.status = Status.TRUNCATED
            return False
        sample.append(ids, trainable=False)
        sample.turns = [*sample.turns, *messages]
        sample.status = Status.PENDING
        return True


def plain(turn: dict) -> dict:
    """A turn as a chat template knows it."""
    return {key: value for key, value in turn.items() if key not in ("begin", "end", "ended", "error")}


# ---- Tools -----------------------------------------------------------------------------------------------------------
def call_parser(args, tools: list[Callable | dict]) -> Callable[[str], tuple[str, list[dict]]]:
    """-> parser(text of a turn) -> what is said before the calls, and the calls as chat messages have them.

    SGLang's parsers know the format of each family (tool_call_parser); they leave out what they cannot read, and tools that
    do not exist. Where nothing is left, the text becomes a call of "unknown": run_tool says so.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool      # 2 s to import: only where tools are
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    logging.getLogger("sglang.srt.function_call").setLevel(logging.ERROR)    # a line for each bad call; we count them
    schemas = [Tool(**(tool if isinstance(tool, dict) else chat.schema(tool))) for tool in tools]

    def parse(text):
        parser = FunctionCallParser(schemas, args.tool_call_parser)          # one for each text: it remembers
        if not parser.has_tool_call(text):
            return text, []
        try:
            content, found = parser.parse_non_stream(text)
            calls = [{"name": one.name, "arguments": json.loads(one.parameters)} for one in found]
        except Exception:                    # of SGLang, about the model's words: a call that is JSON, but only "42"
            content, calls = text, []
        calls = calls or [{"name": "unknown", "arguments": {"text": text}}]
        return content, [{"type": "function", "function": call} for call in calls]
    return parse


def call_id(args, call: dict, number: int) -> str:
    """As the model's own template wants it: Kimi's has written it itself, Mistral's takes nine letters and digits."""
    return f"functions.{call['function']['name']}:{number}" if args.tool_call_parser == "kimi_k2" else f"call{number:05}"


async def run_tool(args, tools: dict[str, Callable], call: dict) -> dict:
    """-> the tool's message; "error" is set where it is about a failure, and counted (rollout/tool_errors)."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    message = {"role": "tool", "name": name, "tool_call_id": call["id"]}
    try:
        if name not in tools:
            raise ValueError(f"this call cannot be read; call one of {', '.join(tools)} in the format shown")
        if not isinstance(arguments, dict):
            raise TypeError("the arguments must be an object with a name for each value")
        inspect.signature(tools[name]).bind(**arguments)         # TypeError names what is missing or too much
        result = await args.workers.call(tools[name], arguments, args.tool_timeout_s)
        return message | {"content": result if isinstance(result, str) else json.dumps(result, default=str)}
    except Exception as problem:             # the model's arguments, or the tool's own code: the model shall read it
        what = f"{problem}" or (f"no result in {args.tool_timeout_s:g} s" if isinstance(problem, TimeoutError) else "no words")
        kind = "" if isinstance(problem, WorkerError) else f"{type(problem).__name__}: "         # a WorkerError names it
        return message | {"content": f"Error: {kind}{what:.500}", "error": True}
