"""
endpoint.py: how does any agent program become a rollout? A server in front of the engines that speaks OpenAI's protocol.

    agent --POST /SESSION/v1/chat/completions--> messages --chat template--> token ids --client.generate--> engines
          <------- message, tool calls, usage ----------------------------- recorded: ids, log-probs, versions <---+

    async def generate(args, sample, sampling_params):           a custom_generate_function: all there is to write
        async with endpoint.session(args, sample, sampling_params) as talk:
            talk.reward = await my_agent(base_url=talk.base_url, api_key="none", question=sample.prompt)
        return talk.samples()                                    without talk.reward custom_rm or rm_type judges each

What is recorded is a tree of turns. A call goes on from the longest conversation that its messages begin with: the model's
words stay the tokens that it wrote, and only what is new is text. An edited history is another branch, or another root:

    question | turn 1 | tool | turn 2                one sample; the tokens before turn 1 are its prompt
                      | other words | turn 3         another: question and turn 1 again, but turn 1 has loss_mask 0 here
    summary of it all | turn 4                       another, with a prompt of its own

Each leaf is a Sample and each token that the model wrote is trained in one of them. They have one rollout_id, so they share one
weight in the loss, but in the statistics of the group each counts.
max_tokens bounds one call; rollout_max_response_len bounds a branch, from its first turn on, tools included, as elsewhere.

Test:  pytest tests/test_endpoint.py        Example: configs/openai_agent_cpu.py
Knows nothing about: groups, how engines are asked.        Source: OpenAI's chat completions API.
Left out on purpose: sampling that training would not know of (n, another temperature, forced formats): refused, with the
remedy. Addresses beyond this machine: who can reach the server can use the engines.
"""
import asyncio
import concurrent.futures
import contextlib
import copy
import json
import resource
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

import chat
from sample import Sample, Status

MAX_BODY_BYTES = 32 * 2**20
FULL = "context_length_exceeded"             # OpenAI's code, which agents know
# Of a request's body. What stands in neither table is refused, if it is set.
READ = {"messages", "tools", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stream", "logprobs"}
NO_EFFECT = {"model", "user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key"}
USUAL = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "tool_choice": "auto", "top_logprobs": 0,
         "parallel_tool_calls": True, "response_format": {"type": "text"}}      # sampling as if it were not set


class Refused(Exception):
    """What the agent reads as an error of OpenAI's."""

    def __init__(self, message: str, code: str = "unsupported", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass
class Turn:
    """One answer of the model, and all that was before it."""
    key: tuple[str, ...]                     # tools and each message up to this one, comparable
    messages: list[dict]                     # the same for a chat template
    sample: Sample                           # the branch from its root to the end of this turn
    begin: int                               # of this turn, in response tokens; it ends where the sample does
    ended: bool                              # with an end token
    parent: "Turn | None"


# ---- One rollout -----------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def session(args, sample: Sample, params: dict):
    """An address for one run of an agent, for as long as the block lasts.

    An agent that ends by an error leaves the block quietly in two cases: its group is not wanted any more; it ran out of
    context after its first turn (set talk.reward before it, if it knows no better). Other errors are the caller's.
    """
    client = args.rollout.client
    if client.endpoint is None:
        client.endpoint = Server()
    await client.endpoint.start()
    name = f"{sample.index}-{secrets.token_hex(8)}"
    talk = client.endpoint.sessions[name] = Session(args, sample, params, f"http://127.0.0.1:{client.endpoint.port}/{name}/v1")
    try:
        yield talk
    except Exception as error:
        if talk.error is None and not talk.aborted and not (talk.turns and getattr(error, "code", None) == FULL):
            raise
    finally:
        del client.endpoint.sessions[name]
        for call in talk.calls:              # nobody waits for them any more
            call.cancel()
    if talk.error is not None:               # the cause; the agent's error is only what it saw of it
        raise talk.error


class Session:
    """The calls of one agent. Belongs to the event loop; reward may be set: one for all samples, or a list, one for each."""

    def __init__(self, args, sample: Sample, params: dict, base_url: str):
        self.args, self.sample, self.params, self.base_url = args, sample, params, base_url
        self.reward = None
        self.turns: list[Turn] = []
        self.asked = Counter()               # calls with the same conversation so far
        self.calls: set[asyncio.Task] = set()
        self.aborted, self.error = False, None

    async def in_thread(self, agent: Callable, *args, **kw):
        """await agent(...) of one that blocks, in a thread of its own.

        NOTE: not asyncio.to_thread: its few threads serve the engines too, and agents that wait in all of them would block that.
        """
        result = concurrent.futures.Future()
        result.set_running_or_notify_cancel()                    # else a cancelled one could not be answered

        def work():
            try:
                result.set_result(agent(*args, **kw))
            except BaseException as error:
                result.set_exception(error)
        threading.Thread(target=work, name=f"agent-{self.sample.index}", daemon=True).start()
        return await asyncio.wrap_future(result)

    def samples(self) -> list[Sample]:
        """One for each leaf, in the order in which they were answered; the first trains what it shares with later ones."""
        if self.aborted:
            self.sample.status = Status.ABORTED                  # asked again from the beginning
            return [self.sample]
        if not self.turns:
            raise ValueError(f"sample {self.sample.index}: the agent made no call that was answered; does it use talk.base_url?")
        inner, trained, out = {id(turn.parent) for turn in self.turns}, set(), []
        for leaf in (turn for turn in self.turns if id(turn) not in inner):
            sample, turn, mask = copy.copy(leaf.sample), leaf, leaf.sample.loss_mask.copy()
            sample.metadata = copy.deepcopy(self.sample.metadata)
            while turn is not None:
                if id(turn) in trained:
                    mask[turn.begin:turn.sample.response_length] = [0] * (turn.sample.response_length - turn.begin)
                trained.add(id(turn))
                turn = turn.parent
            sample.loss_mask = mask
            sample.rollout_log_probs = [logp if m else 0.0 for logp, m in zip(sample.rollout_log_probs, mask)]
            out.append(sample)
        written, learned = sum(t.sample.response_length - t.begin for t in self.turns), sum(sum(s.loss_mask) for s in out)
        assert written == learned, f"sample {self.sample.index}: {written} tokens were written, {learned} would be trained"
        rewards = self.reward if isinstance(self.reward, list) else [self.reward] * len(out)
        if len(rewards) != len(out):
            raise ValueError(f"sample {self.sample.index}: {len(rewards)} rewards for {len(out)} branches; give one for all, or "
                             "set those of samples() one by one")
        for sample, reward in zip(out, rewards):
            sample.reward = reward
        return out

    # ---- One call ----------------------------------------------------------------------------------------------------
    async def chat(self, body: dict) -> dict:
        """A request's body -> the answer's; the turn is recorded."""
        self.check(body)
        if self.aborted:
            raise Refused("this rollout is not wanted any more; end the agent", "aborted", 503)
        args, tools = self.args, body.get("tools") or None
        messages = [readable(message) for message in body["messages"]]
        key = (json.dumps(tools, sort_keys=True), *map(comparable, messages))
        parent = max((t for t in self.turns if t.key == key[:len(t.key)]), key=lambda t: len(t.key), default=None)
        sample = self.begin(parent, messages, tools)
        begin, before = sample.response_length, len(sample.tokens)
        limit, stops = body.get("max_completion_tokens") or body.get("max_tokens") or args.context_len, stop_strings(body)
        params = self.params | {"max_new_tokens": min(self.params["max_new_tokens"], begin + limit)}
        if stops:
            params["stop"] = stop_strings(params) + stops
        if "sampling_seed" in params:        # of a deterministic run: candidates of one question shall differ
            params["sampling_seed"] += 1_000_003 * self.asked[key]
        self.asked[key] += 1
        await args.generate(sample, params)
        if sample.status == Status.ABORTED:
            self.aborted = True
            raise Refused("this rollout is not wanted any more; end the agent", "aborted", 503)
        ids = sample.tokens[before:]
        if not ids:
            raise self.full(parent, before, begin)
        ended = sample.status == Status.COMPLETED and ids[-1] in args.end_ids
        text = args.tokenizer.decode(ids[:-1] if ended else ids)
        content, calls = self.parse(text[:min([at for stop in stops if (at := text.find(stop)) >= 0], default=None)], tools)
        message = {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})
        known = readable(message)
        place = {"begin": begin, "end": sample.response_length, "ended": ended}  # as agent.Conversation's turns
        sample.turns = [*sample.turns, known | place]
        self.turns.append(Turn((*key, comparable(known)), [*messages, known], sample, begin, ended, parent))
        reason = "length" if sample.status == Status.TRUNCATED else "tool_calls" if calls else "stop"
        choice = {"index": 0, "message": message | {"content": content or None if calls else content}, "finish_reason": reason,
                  "logprobs": {"content": self.log_probs(sample, ids), "refusal": None} if body.get("logprobs") else None}
        return {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": int(time.time()),
                "model": body.get("model") or "policy", "choices": [choice],
                "usage": {"prompt_tokens": before, "completion_tokens": len(ids), "total_tokens": before + len(ids)}}

    def check(self, body: dict) -> None:
        """What would make the policy another than training takes it for is refused."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
            raise Refused("the body has no messages; send a list of them")
        for key, value in body.items():
            if key in ("temperature", "top_p") and value is not None and value != self.params[key]:
                raise Refused(f"{key}={value}, but the run samples with {self.params[key]}, and training relies on it; leave it "
                              f"out, or set rollout_{key} (in evaluation eval_{key}) in the run file")
            if value is not None and key not in READ | NO_EFFECT and (key not in USUAL or value != USUAL[key]):
                raise Refused(f"{key}={value!r:.100} is not served, as training would not know of it; " +
                              ("ask several times at once" if key == "n" else "leave it out"))
            if key in ("max_tokens", "max_completion_tokens") and value is not None and (type(value) is not int or value < 1):
                raise Refused(f"{key}={value!r:.100} must be a positive number; leave it out")
        if body.get("tools") and not self.args.tool_call_parser:
            raise Refused("how does the model write a call of a tool? set tool_call_parser in the run file ('qwen25', 'llama3', ...)")

    def begin(self, parent: Turn | None, messages: list[dict], tools: list[dict] | None) -> Sample:
        """A branch that waits for its next turn: its parent's tokens and what was said since, or a new prompt."""
        args, own = self.args, self.sample
        heard = messages[len(parent.messages):] if parent else []
        try:
            if parent:
                text = chat.reply(args.tokenizer, parent.messages[:-1], parent.messages[-1], heard, parent.ended, tools,
                                  **args.apply_chat_template_kwargs)
            else:
                text = chat.render(args.tokenizer, messages, tools, True, **args.apply_chat_template_kwargs)
        except ValueError as error:
            raise Refused(str(error)) from error
        if len(text) > 100 * args.context_len:                   # characters, more than fit: not worth the tokenizer's time
            raise self.full(parent, len(text) // 100, 0)
        ids = args.tokenizer(text, add_special_tokens=False)["input_ids"]
        if parent:
            sample = copy.copy(parent.sample)                    # append() makes new lists
            sample.append(ids, trainable=False)
            sample.turns = [*sample.turns, *heard]
            return sample
        return Sample(group_index=own.group_index, index=own.index, prompt=text, tokens=ids, label=own.label, rollout_id=own.index)

    def full(self, parent: Turn | None, tokens: int, response: int) -> Refused:
        if parent:                           # it has asked for more than there was
            parent.sample.status = Status.TRUNCATED
        return Refused(f"the conversation has {tokens} tokens, {response} of them since its first answer; it may have "
                       f"{self.args.context_len} and {self.params['max_new_tokens']}; make it shorter, or set "
                       "rollout_max_context_len or rollout_max_response_len higher", FULL)

    def parse(self, text: str, tools: list[dict] | None) -> tuple[str, list[dict]]:
        """-> what is said beside the calls, and the calls, by SGLang's parser. A call that cannot be read stays text."""
        if not tools:
            return text, []
        from sglang.srt.entrypoints.openai.protocol import Tool  # 2 s to import: only where tools are
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        parser = FunctionCallParser([Tool(**tool) for tool in tools], self.args.tool_call_parser)
        content, found = parser.parse_non_stream(text) if parser.has_tool_call(text) else (text, [])
        calls = [{"id": f"call_{secrets.token_hex(8)}", "type": "function",
                  "function": {"name": one.name, "arguments": one.parameters}} for one in found]
        return (content, calls) if calls else (text, [])

    def log_probs(self, sample: Sample, ids: list[int]) -> list[dict]:
        words = [self.args.tokenizer.decode([i]) for i in ids]
        return [{"token": word, "logprob": logp, "bytes": list(word.encode()), "top_logprobs": []}
                for word, logp in zip(words, sample.rollout_log_probs[-len(ids):])]


# ---- Messages --------------------------------------------------------------------------------------------------------
def readable(message: dict) -> dict:
    """A message as chat templates want it: content is text, arguments of calls are a dict, nothing is null."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"{message!r:.100} is no message; send role and content")
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise Refused("the trainers compute with text only; leave other parts out of the messages")
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    out = {key: value for key, value in message.items() if value is not None} | {"role": role, "content": content}
    if message.get("tool_calls"):
        out["tool_calls"] = [call | {"function": call["function"] | {"arguments": arguments(call)}} for call in out["tool_calls"]]
    return out


def arguments(call: dict) -> dict | str:
    given = call["function"].get("arguments") or "{}"
    with contextlib.suppress(ValueError):    # the model's own words: perhaps no JSON
        return json.loads(given) if isinstance(given, str) else given
    return given


def comparable(message: dict) -> str:
    """Equal for messages that say the same; ids and what clients add do not count."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"], calls], sort_keys=True)


def stop_strings(settings: dict) -> list[str]:
    stop = settings.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


# ---- HTTP ------------------------------------------------------------------------------------------------------------
class Server:
    """One for the run, in the client's event loop, started by the first session."""

    def __init__(self):
        self.sessions: dict[str, Session] = {}
        self.port, self.starting = None, asyncio.Lock()

    async def start(self) -> None:
        async with self.starting:
            if self.port is None:
                # Both ends of each agent's connection are files of this process, and 1024 are soon open.
                hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                app = web.Application(client_max_size=MAX_BODY_BYTES)
                app.router.add_route("*", "/{session}/v1/{path:.*}", self.serve)
                # handler_cancellation: an agent that hangs up wants no answer, and may ask again: that would be another branch.
                self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
                await self.runner.setup()
                site = web.TCPSite(self.runner, "127.0.0.1", 0)
                await site.start()
                self.port = self.runner.addresses[0][1]

    async def close(self) -> None:
        if self.port is not None:
            await self.runner.cleanup()

    async def serve(self, request: web.Request) -> web.Response:
        talk, path = self.sessions.get(request.match_info["session"]), request.match_info["path"]
        task = asyncio.current_task()
        try:
            if talk is None:
                raise Refused("this session has ended; make all calls inside its block", "not_found", 404)
            if (request.method, path) == ("GET", "models"):
                return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "nanoslime"}]})
            if (request.method, path) != ("POST", "chat/completions"):
                raise Refused(f"/v1/{path} is not served; use chat.completions", "not_found", 404)
            talk.calls.add(task)
            body = await request.json()
            answer = await talk.chat(body)
            if body.get("stream"):
                return web.Response(text=stream(answer, body.get("stream_options")), content_type="text/event-stream")
            return web.json_response(answer)
        except json.JSONDecodeError as error:
            refused = Refused(f"the body is no JSON: {error}; send an object")
        except Refused as error:
            refused = error
        except web.HTTPException:            # too large a body
            raise
        except Exception as error:           # an engine that is gone for good, a bug of ours: it ends the rollout, see session()
            talk.error, refused = error, Refused(f"{type(error).__name__}: {error}", "server_error", 500)
        finally:
            if talk:
                talk.calls.discard(task)
        error = {"message": str(refused), "type": "invalid_request_error", "param": None, "code": refused.code}
        return web.json_response({"error": error}, status=refused.status, headers={"x-should-retry": "false"})


def stream(answer: dict, options: dict | None) -> str:
    """The answer for who asked for a stream: all of it in one chunk, then why it ended, then usage if asked for."""
    choice = answer["choices"][0]
    calls = [{"index": i} | call for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    first = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [head | {"choices": [first]}, head | {"choices": [last]}]
    if (options or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": answer["usage"]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
