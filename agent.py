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
from collections.abc import Callable

import chat
from sample import Sample, Status


async def converse(args, sample: Sample, params: dict, tools: list[Callable] | None = None) -> Sample:
    """Turns until the model calls no tool any more, or max_turns, tokens or context are used up (then it is TRUNCATED).

    tools: functions, `def` (run in another process, so it may hang or crash) or `async def`; default args.tools. Whatever a
    call does wrong, the model reads as the tool's output.
    """
    tools = {tool.__name__: tool for tool in (args.tools if tools is None else tools)}
    parser = call_parser(args, list(tools.values()))
    talk = Conversation(args, sample, params)
    while True:
        if talk.waiting() == "assistant":
            if talk.turns_done() == args.max_turns:              # what the last call said is never read
                sample.status = Status.TRUNCATED
                return sample
            text = await talk.say()
            if sample.status != Status.COMPLETED:
                return sample
            content, calls = parser(text)
            sample.turns[-1] |= {"content": content} | ({"tool_calls": calls} if calls else {})
        calls = sample.turns[-1].get("tool_calls", ())
        results = await asyncio.gather(*(run_tool(args, tools, call) for call in calls))
        if not results or not talk.hear(*results):
            return sample


class Conversation:
    """A sample that grows by turns. It may have been put back in the middle of one, and then goes on there.

    sample.turns, what was said since the prompt: chat messages; the assistant's also know their place, "begin" and "end", in
    response tokens.
    """

    def __init__(self, args, sample: Sample, params: dict):
        self.args, self.sample, self.params = args, sample, params
        if not isinstance(sample.metadata.get("messages"), list):
            raise ValueError(f"sample {sample.index}: no messages to go on with; set apply_chat_template=True")

    def turns_done(self) -> int:
        return sum("end" in turn for turn in self.sample.turns)

    def waiting(self) -> str:
        """Whose turn it is: "assistant", or "tool" where a call was put back before its result came."""
        last = self.sample.turns[-1] if self.sample.turns else {"role": "user"}
        return "tool" if last["role"] == "assistant" and "end" in last else "assistant"

    async def say(self) -> str:
        """The assistant's next turn -> its text, special tokens and all. Why it ended is in sample.status."""
        sample = self.sample
        if not (sample.turns and sample.turns[-1]["role"] == "assistant" and "end" not in sample.turns[-1]):
            sample.turns = [*sample.turns, {"role": "assistant", "content": "", "begin": sample.response_length}]
        await self.args.generate(sample, self.params)
        turn = sample.turns[-1]
        ids = sample.response_ids()[turn["begin"]:]
        ended = sample.status == Status.COMPLETED and ids and ids[-1] in self.args.end_ids
        turn["content"] = self.args.tokenizer.decode(ids[:-1] if ended else ids)
        if sample.status != Status.ABORTED:
            turn |= {"end": sample.response_length, "ended": bool(ended)}
        return turn["content"]

    def hear(self, *messages: dict) -> bool:
        """Others' messages, and what asks for the assistant's next turn. False: no room for them, the sample is TRUNCATED."""
        sample, args = self.sample, self.args
        *before, turn = sample.turns
        text = chat.reply(args.tokenizer, [*sample.metadata["messages"], *map(plain, before)], plain(turn), list(messages),
                          turn["ended"], sample.metadata.get("tools"), **args.apply_chat_template_kwargs)
        room = min(self.params["max_new_tokens"] - sample.response_length, args.context_len - len(sample.tokens))
        ids = args.tokenizer(text[:100 * max(room, 1)], add_special_tokens=False)["input_ids"]       # a tool may say megabytes
        if len(ids) >= room:
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
    """-> parser(text of a turn) -> what is said beside the calls, and the calls as chat messages have them.

    SGLang's parsers know the format of each family (tool_call_parser). A call that they cannot read, or of a tool that does
    not exist, becomes a call of "unknown": run_tool answers it.
    """
    from sglang.srt.entrypoints.openai.protocol import Tool      # 2 s to import: only where tools are
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    schemas = [Tool(**(tool if isinstance(tool, dict) else chat.schema(tool))) for tool in tools]

    def parse(text):
        parser = FunctionCallParser(schemas, args.tool_call_parser)      # one for each text: it remembers
        if not parser.has_tool_call(text):
            return text, []
        content, found = parser.parse_non_stream(text)
        calls = [{"name": one.name, "arguments": one.parameters} for one in found] or [{"name": "unknown", "arguments": text}]
        return content, [{"type": "function", "function": call} for call in calls]
    return parse


async def run_tool(args, tools: dict[str, Callable], call: dict) -> dict:
    """-> the tool's message; "error" is set where it is about a failure, and counted (rollout/tool_errors)."""
    name, text = call["function"]["name"], call["function"]["arguments"]
    try:
        if name not in tools:
            raise ValueError(f"this call cannot be read; call one of {', '.join(tools)} in the format shown")
        arguments = json.loads(text)
        inspect.signature(tools[name]).bind(**arguments)         # TypeError names what is missing or too much
        result = await args.workers.call(tools[name], arguments, args.tool_timeout_s)
        content, error = result if isinstance(result, str) else json.dumps(result, default=str), False
    except Exception as problem:             # the model's arguments, or the tool's own code: the model shall read it
        content, error = f"Error: {type(problem).__name__}: {problem}", True
    return {"role": "tool", "name": name, "content": content} | ({"error": True} if error else {})
