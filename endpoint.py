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

Each leaf is a Sample, and each token that the model wrote is trained in one of them. All have one rollout_id, so they share
one weight in the loss, and count once in the group's mean.
max_tokens bounds one call; rollout_max_response_len bounds a branch, from its first turn on, tools included, as elsewhere.

Test:  pytest tests/test_endpoint.py        Example: configs/openai_agent_cpu.py
Knows nothing about: groups, how engines are asked (client.py), what else is in a request (completions.py).
Left out on purpose: addresses beyond this machine, as who reaches the server can use the engines.
"""
import asyncio
import contextlib
import copy
import json
import resource
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

import agent
import chat
from client import owner
from completions import FULL, Refused, answer, check, comparable, loads, readable, stop_strings, stream
from sample import Sample, Status
from workers import in_thread

MAX_BODY_BYTES = 32 * 2**20
UNWANTED = "this rollout is not wanted any more; end the agent", "aborted", 503


@dataclass
class Turn:
    """One answer of the model, and all that was before it."""
    key: tuple[str, ...]                     # the tools, and each message up to this one, comparable
    messages: list[dict]                     # the same messages for a chat template
    sample: Sample                           # the branch from its root to the end of this turn
    begin: int                               # of this turn, in response tokens; it ends where the sample does
    ended: bool                              # with an end token
    parent: "Turn | None"


# ---- One rollout -----------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def session(args, sample: Sample, params: dict):
    """An address for one run of an agent, for as long as the block lasts.

    The block is left at once, by cancelling it, where its group is not wanted any more; the rollout will begin anew. It is
    left quietly where the agent raises because its context is full, if it had an answer before: talk.reward is what it was,
    or custom_rm judges.
    """
    client = args.rollout.client
    client.endpoint = client.endpoint or Server()
    await client.endpoint.start()
    name = secrets.token_hex(8)
    talk = client.endpoint.sessions[name] = Session(args, sample, params, f"{client.endpoint.url}/{name}/v1")
    try:
        yield talk
    except (Exception, asyncio.CancelledError) as error:
        full = talk.turns and getattr(error, "code", None) == FULL
        unwanted = talk.aborted and not talk.task.uncancel()    # not zero: somebody else has cancelled it as well
        if not unwanted and (isinstance(error, asyncio.CancelledError) or not full and talk.error is None):
            raise
    finally:
        del client.endpoint.sessions[name]
        for call in talk.calls:              # nobody waits for them any more
            call.cancel()
    if talk.error is not None:               # the cause; the agent's error is only what it saw of it
        raise talk.error


class Session:
    """The calls of one agent. reward may be set: one for all samples, or a list with one for each."""

    def __init__(self, args, sample: Sample, params: dict, base_url: str):
        self.args, self.sample, self.params, self.base_url = args, sample, params, base_url
        self.reward = None
        self.turns: list[Turn] = []
        self.asked = Counter()               # how often the same has been asked
        self.calls, self.task = set(), asyncio.current_task()
        self.aborted, self.error = False, None

    async def in_thread(self, function: Callable, *args, **kw):
        """An agent that blocks."""
        return await in_thread(function, *args, **kw)

    def samples(self) -> list[Sample]:
        """One for each leaf, in the order in which they were answered; the first trains what it shares with later ones."""
        own = self.sample
        if self.aborted:
            own.status = Status.ABORTED      # asked again from the beginning
            return [own]
        if not self.turns:
            raise ValueError(f"sample {own.index}: no call of the agent was answered; does it use talk.base_url?")
        inner, trained, out = {id(turn.parent) for turn in self.turns}, set(), []
        for leaf in (turn for turn in self.turns if id(turn) not in inner):
            sample, turn, mask = copy.copy(leaf.sample), leaf, leaf.sample.loss_mask.copy()
            while turn is not None:
                if id(turn) in trained:
                    mask[turn.begin:turn.sample.response_length] = [0] * (turn.sample.response_length - turn.begin)
                trained.add(id(turn))
                turn = turn.parent
            sample.loss_mask, sample.metadata = mask, copy.deepcopy(own.metadata)
            sample.rollout_log_probs = [logp if m else 0.0 for logp, m in zip(sample.rollout_log_probs, mask)]
            out.append(sample)
        written, learned = sum(t.sample.response_length - t.begin for t in self.turns), sum(sum(s.loss_mask) for s in out)
        assert written == learned, f"sample {own.index}: the model wrote {written} tokens, {learned} would be trained"
        rewards = self.reward if isinstance(self.reward, list) else [self.reward] * len(out)
        if len(rewards) != len(out):
            raise ValueError(f"sample {own.index}: {len(rewards)} rewards for {len(out)} branches; set one for all, or "
                             "one for each of talk.samples()")
        for sample, reward in zip(out, rewards):
            sample.reward = reward
        return out

    # ---- One call ----------------------------------------------------------------------------------------------------
    async def chat(self, body: dict) -> dict:
        """A request's body -> the answer's; the turn is recorded."""
        args = self.args
        owner.set(self.sample.index)         # the server's tasks know only who came first
        if self.aborted:
            raise Refused(*UNWANTED)
        try:
            check(body, self.params, args.tool_call_parser)
            tools, messages = body.get("tools") or None, [readable(message) for message in body["messages"]]
            key = (json.dumps(tools, sort_keys=True), *map(comparable, messages))
            parse = agent.call_parser(args, tools) if tools else lambda text: (text, [])
        except (AttributeError, KeyError, TypeError, ValueError) as error:       # the agent's mistake, not the run's end
            raise Refused(f"the request cannot be read ({type(error).__name__}: {str(error):.500}); write it as OpenAI's API "
                          "reference has it") from error
        known = [t for t in reversed(self.turns) if t.key == key[:len(t.key)]]
        # Where the same was said twice: what nobody has gone on from, the last of it.
        parent = max(known, key=lambda t: (len(t.key), all(t is not one.parent for one in self.turns)), default=None)
        sample = self.branch(parent, messages, tools)
        begin, before, stops = sample.response_length, len(sample.tokens), stop_strings(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or args.context_len
        params = self.params | {"max_new_tokens": min(self.params["max_new_tokens"], begin + limit)}
        params |= {"stop": stop_strings(params) + stops} if stops else {}
        if "sampling_seed" in params:        # of a deterministic run: candidates of one question shall differ
            params["sampling_seed"] += 1_000_003 * self.asked[key]
        self.asked[key] += 1
        await args.generate(sample, params)
        if sample.status == Status.ABORTED:
            if not self.aborted:             # many agents would try again for minutes
                self.aborted = self.task.cancel()
            raise Refused(*UNWANTED)
        ids = sample.tokens[before:]
        if not ids:
            raise self.full(parent, before, begin)
        ended = sample.status == Status.COMPLETED and ids[-1] in args.end_ids
        text = args.tokenizer.decode(ids[:-1] if ended else ids, clean_up_tokenization_spaces=False)
        text = text[:min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]    # OpenAI leaves it out
        content, calls = parse(text)
        if any(call["function"]["name"] == "unknown" for call in calls):         # it cannot be read: the agent may say so
            content, calls = text, []
        calls = [{"id": f"call_{secrets.token_hex(8)}"} | call for call in calls]
        turn = readable({"role": "assistant", "content": content, "tool_calls": calls})
        place = {"begin": begin, "end": sample.response_length, "ended": ended}  # as agent.Conversation writes it
        sample.turns = [*sample.turns, turn | place]
        self.turns.append(Turn((*key, comparable(turn)), [*messages, turn], sample, begin, ended, parent))
        return answer(body, content, calls, sample.status == Status.TRUNCATED, (before, len(ids)),
                      ((args.tokenizer.decode([i]), logp) for i, logp in zip(ids, sample.rollout_log_probs[begin:])))

    def branch(self, parent: Turn | None, messages: list[dict], tools: list[dict] | None) -> Sample:
        """What waits for its next turn: the parent's tokens and what was said since, or a new prompt."""
        args, own, heard = self.args, self.sample, messages[len(parent.messages):] if parent else []
        kw = args.apply_chat_template_kwargs
        try:
            text = (chat.reply(args.tokenizer, parent.messages[:-1], parent.messages[-1], heard, parent.ended, tools, **kw)
                    if parent else chat.render(args.tokenizer, messages, tools, True, **kw))
        except ValueError as error:
            raise Refused(str(error)) from error
        if len(text) > 100 * args.context_len:                   # characters: not worth the tokenizer's time
            raise self.full(parent, len(text) // 100, 0)
        ids = args.tokenizer(text, add_special_tokens=False)["input_ids"]
        if parent is None:
            return Sample(own.group_index, own.index, text, ids, label=own.label, rollout_id=own.index)
        # NOTE: not PENDING: client.generate would look for the beginning of this answer in what was said before.
        sample = copy.copy(parent.sample)    # append() makes new lists
        sample.append(ids, trainable=False)
        sample.turns = [*sample.turns, *heard]
        return sample

    def full(self, parent: Turn | None, tokens: int, response: int) -> Refused:
        if parent:                           # it has asked for more than there was
            parent.sample.status = Status.TRUNCATED
        return Refused(f"the conversation has {tokens} tokens, {response} of them since its first answer; it may have "
                       f"{self.args.context_len} and {self.params['max_new_tokens']}; make it shorter, or set "
                       "rollout_max_context_len or rollout_max_response_len higher", FULL)


# ---- HTTP ------------------------------------------------------------------------------------------------------------
class Server:
    """One for the run, in the client's event loop, started by the first session."""

    def __init__(self):
        self.sessions: dict[str, Session] = {}
        self.url, self.starting = None, asyncio.Lock()

    async def start(self) -> None:
        async with self.starting:
            if self.url:
                return
            # Both ends of an agent's connection are files of this process, and 1024 are soon open.
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            app = web.Application(client_max_size=MAX_BODY_BYTES)
            app.router.add_route("*", "/{session}/v1/{path:.*}", self.serve)
            # handler_cancellation: who hangs up wants no answer. He may ask again, and both would be branches.
            self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def close(self) -> None:
        if self.url:
            await self.runner.cleanup()

    async def serve(self, request: web.Request) -> web.Response:
        talk, path = self.sessions.get(request.match_info["session"]), request.match_info["path"]
        try:
            if talk is None:
                raise Refused("this session has ended; make all calls inside its block", "not_found", 404)
            if (request.method, path) == ("GET", "models"):
                return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})
            if (request.method, path) != ("POST", "chat/completions"):
                raise Refused(f"/v1/{path} is not served; use chat.completions", "not_found", 404)
            talk.calls.add(asyncio.current_task())
            body = loads(await request.read())
            out = await talk.chat(body)
            if body.get("stream"):
                return web.Response(text=stream(out, body.get("stream_options")), content_type="text/event-stream")
            return web.json_response(out)
        except web.HTTPException:            # aiohttp's own: too large a body
            raise
        except Refused as error:
            refused = error
        except Exception as error:           # engines that are gone for good, a bug of ours: session() raises it
            talk.error, refused = error, Refused(f"{type(error).__name__}: {error}", "server_error", 500)
        finally:
            if talk:
                talk.calls.discard(asyncio.current_task())
        return web.json_response(refused.body(), status=refused.status, headers={"x-should-retry": "false"})
