"""
completions.py: what may a request of OpenAI's chat completions ask for, and how is it answered?

    body --check--> Refused, an error as OpenAI writes it          message --readable--> as chat templates want it
    text --answer--> chat.completion --stream--> the same in chunks        --comparable--> equal if they say the same

Test:  pytest tests/test_endpoint.py        Source: platform.openai.com/docs/api-reference/chat
Knows nothing about: sessions, tokens, engines.
Left out on purpose: sampling that training would not know of (n, another temperature, forced formats): it is refused.
"""
import contextlib
import json
import secrets
import time
from collections.abc import Iterable

FULL = "context_length_exceeded"             # OpenAI's code, which agents know
READ = {"messages", "tools", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream", "logprobs"}
NO_EFFECT = {"model", "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key"}
USUAL = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "tool_choice": "auto", "top_logprobs": 0,
         "parallel_tool_calls": True, "response_format": {"type": "text"}}   # as if not set; others are refused


class Refused(Exception):
    """What the agent reads as an error of OpenAI's."""

    def __init__(self, message: str, code: str = "unsupported", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status

    def body(self) -> dict:
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}}


def loads(body: bytes):
    try:
        return json.loads(body)
    except ValueError as error:
        raise Refused(f"the body is no JSON ({error}); send an object") from error


def check(body, params: dict, tool_call_parser: str | None) -> None:
    """Refused, where the body would make the policy another than training takes it for. params: the run's sampling."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise Refused("the body has no messages; send a list of them")
    for key, value in body.items():
        if value is None:
            continue
        if key in ("temperature", "top_p") and value != params[key]:
            raise Refused(f"{key}={value!r:.100}, but the run samples with {params[key]}, which training relies on; leave it "
                          f"out, or set rollout_{key} (in evaluation eval_{key}) in the run file")
        if key not in READ | NO_EFFECT and (key not in USUAL or value != USUAL[key]):
            raise Refused(f"{key}={value!r:.100} is not served, as training would not know of it; " +
                          ("ask several times at once" if key == "n" else "leave it out"))
        if key in ("max_tokens", "max_completion_tokens") and (type(value) is not int or value < 1):
            raise Refused(f"{key}={value!r:.100} must be a positive number; leave it out")
        if key == "stop" and not all(isinstance(s, str) for s in (value if isinstance(value, list) else [value])):
            raise Refused(f"stop={value!r:.100} must be strings; leave it out")
    if body.get("tools") and not tool_call_parser:
        raise Refused("how does the model write a call of a tool? set tool_call_parser in the run file ('qwen25', ...)")


def stop_strings(settings: dict) -> list[str]:
    stop = settings.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


# ---- Messages --------------------------------------------------------------------------------------------------------
def readable(message: dict) -> dict:
    """A message as chat templates want it: content is text, the arguments of a call are a dict, nothing is null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"{message!r:.100} is no message; send role and content")
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise Refused("the trainers compute with text only; leave other parts out of the messages")
        content = "".join(part["text"] for part in content)
    out = {key: value for key, value in message.items() if value is not None and key != "tool_calls"} | {"content": content}
    if out["role"] == "developer":           # OpenAI's newer name
        out["role"] = "system"
    if message.get("tool_calls"):
        out["tool_calls"] = [call | {"function": call["function"] | {"arguments": arguments(call)}}
                             for call in message["tool_calls"]]
    return out


def arguments(call: dict) -> dict | str:
    given = call["function"].get("arguments") or "{}"
    with contextlib.suppress(ValueError):    # the model's own words: perhaps no JSON
        return json.loads(given) if isinstance(given, str) else given
    return given


def comparable(message: dict) -> str:
    """Of a readable message; ids, and what clients add, do not count."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"], calls], sort_keys=True)


# ---- Answers ---------------------------------------------------------------------------------------------------------
def answer(body: dict, content: str, calls: list[dict], truncated: bool, lengths: tuple[int, int],
           pairs: Iterable[tuple[str, float]]) -> dict:
    """lengths: tokens of the prompt and of the answer; pairs: each one's text and log-prob, read only where asked for."""
    calls = [call | {"function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}}
             for call in calls]
    message = {"role": "assistant", "content": content or None} if calls else {"role": "assistant", "content": content}
    message |= {"tool_calls": calls} if calls else {}
    told = [{"token": word, "logprob": logp, "bytes": list(word.encode()), "top_logprobs": []}
            for word, logp in (pairs if body.get("logprobs") else ())]
    choice = {"index": 0, "message": message, "finish_reason": "length" if truncated else "tool_calls" if calls else "stop",
              "logprobs": {"content": told, "refusal": None} if body.get("logprobs") else None}
    return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time()),
            "model": body.get("model") or "policy", "choices": [choice],
            "usage": {"prompt_tokens": lengths[0], "completion_tokens": lengths[1], "total_tokens": sum(lengths)}}


def stream(answer: dict, options: dict | None) -> str:
    """The answer for who asked for a stream: all of it in one chunk, then why it ended, then usage if asked for."""
    choice = answer["choices"][0]
    calls = [{"index": i} | call for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [head | {"choices": [choice | {"message": None, "delta": delta, "finish_reason": None}]},
              head | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}]
    if (options or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": answer["usage"]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
