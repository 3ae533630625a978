"""
sample.py: what is a sample? One prompt and one response: the one record that generation, reward, buffer and training share.

    tokens               p p p p r r r r r r r r r r      prompt, then response_length response tokens
    loss_mask                    1 1 1 1 0 0 0 1 1 1      0: a tool's words, which nobody learns
    rollout_log_probs            . . . . 0 0 0 . . .      as the engine sampled them
    weight_versions              4 4 4 4 - - - 5 5 5      which weights wrote each of them; -1: none of the model's

Test:  pytest tests/test_buffer.py
Knows nothing about: everything else.
"""
import base64
import copy
import enum
from dataclasses import dataclass, field, fields
from typing import Any


class Status(str, enum.Enum):
    PENDING = "pending"      # not generated yet, or put back to go on later
    COMPLETED = "completed"  # the model stopped by itself
    TRUNCATED = "truncated"  # it ran into a length limit
    ABORTED = "aborted"      # cut off: not wanted any more, or for a weight sync
    FAILED = "failed"        # its reward raised, or a hook gave it up


# Why SGLang says that an answer ended (finish_reason) -> what that makes of the sample.
FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass
class Sample:
    """One prompt and one response: the only thing that generation, reward, buffer and training share.

    `tokens` is prompt then response. loss_mask and the other lists beside the response have response_length entries, because a
    response grows through `append`; check() looks at those that hooks make by hand.
    """
    Status = Status                          # upstream's Sample.Status.COMPLETED; no field
    group_index: int | None = None           # data source: samples of one prompt share it
    index: int | None = None                 # data source: unique in the run; also the sampling seed's offset
    prompt: str | list = ""                  # data source: after the chat template; a list stays as messages
    tokens: list[int] = field(default_factory=list)   # data source: the prompt's ids; append: the response's
    response: str = ""                       # rollout: decoded, for rewards and people; never tokenised again
    response_length: int = 0                 # append
    label: Any = None                        # data source: the right answer
    reward: float | dict | None = None       # rollout, from rewards.py
    loss_mask: list[int] = field(default_factory=list)            # append: 1 = trained, per response token
    rollout_log_probs: list[float] = field(default_factory=list)  # append: as the engine sampled; 0.0 where loss_mask is 0
    weight_versions: list[int] = field(default_factory=list)      # append: which weights wrote each response token
    rollout_routed_experts: list = field(default_factory=list)    # client.py: [rows, base64 of int32 [rows, L * k]], row t
    #                                          which experts the engine took for token t; the last token has no row
    status: Status = Status.PENDING          # rollout
    metadata: dict = field(default_factory=dict)  # data source and hooks
    teacher_log_probs: list[float] = field(default_factory=list)  # rollout, with opd_teacher_url; per response token
    remove_sample: bool = False              # hooks: keep it for the group's statistics, train none of its tokens
    rollout_id: int | None = None            # custom generate: siblings of one rollout share one weight in the loss
    turns: list[dict] = field(default_factory=list)   # agent.py: messages since the prompt; see Conversation

    def append(self, tokens: list[int], log_probs: list[float] | None = None, trainable: bool = True,
               version: int = -1) -> None:
        """Add response tokens. Tool output and edits come with trainable=False and need no log-probs."""
        if trainable and (log_probs is None or len(log_probs) != len(tokens)):
            have = "no" if log_probs is None else len(log_probs)
            raise ValueError(f"sample {self.index}: {len(tokens)} trainable tokens came with {have} log-probs; "
                             "give one for each, or trainable=False")
        n = len(tokens)
        self.tokens = self.tokens + list(tokens)
        self.response_length += n
        self.loss_mask = self.loss_mask + [int(trainable)] * n
        self.rollout_log_probs = self.rollout_log_probs + (list(log_probs) if trainable else [0.0] * n)
        self.weight_versions = self.weight_versions + [version] * n

    def drop(self, n: int) -> None:
        """Take the last n response tokens away."""
        if n == 0:
            return
        self.tokens, self.response_length = self.tokens[:-n], self.response_length - n
        self.loss_mask, self.rollout_log_probs = self.loss_mask[:-n], self.rollout_log_probs[:-n]
        self.weight_versions = self.weight_versions[:-n]
        if self.rollout_routed_experts and self.rollout_routed_experts[0] >= len(self.tokens):
            rows, text = self.rollout_routed_experts
            told, keep = base64.b64decode(text), len(self.tokens) - 1
            self.rollout_routed_experts = [keep, base64.b64encode(told[:len(told) // rows * keep]).decode()]

    @property
    def rollout(self) -> int:
        """Which of its group's rollouts it is (a part of): the branches of one agent's run count once in its group's mean,
        in raw_reward and in evaluation. (Lengths and turns are means over all branches.)"""
        return self.index if self.rollout_id is None else self.rollout_id

    def response_ids(self) -> list[int]:
        return self.tokens[len(self.tokens) - self.response_length:]

    def trained_versions(self) -> list[int]:
        """Which weights wrote each token that is trained; tokens of a hook that knows no versions are left out."""
        return [v for v, mask in zip(self.weight_versions, self.loss_mask) if mask and v >= 0]

    def get_reward_value(self, key) -> float:
        """key: of a dict reward, or upstream's args, which have it as reward_key."""
        key = getattr(key, "reward_key", key)
        return self.reward[key] if isinstance(self.reward, dict) else self.reward

    def append_response_tokens(self, args=None, *, tokens=(), log_probs=None, trainable=True, meta_info=None, text=None,
                               update_terminal_info=True) -> None:
        """append() by upstream's name: meta_info of the engine's answer has the weight version, and why it ended."""
        meta, mask = meta_info or {}, self.loss_mask
        self.loss_mask, self.rollout_log_probs = mask or [], self.rollout_log_probs or []    # upstream's default is None
        self.append(list(tokens or ()), log_probs, trainable, int(meta.get("weight_version", -1)) if trainable else -1)
        if mask is not None:                 # NOTE: in place, as upstream does: hooks keep this list, and set it again later
            mask[:], self.loss_mask = self.loss_mask, mask
        self.response += text or ""
        if trainable and update_terminal_info and "finish_reason" in meta:
            self.status = FINISHED[meta["finish_reason"]["type"]]

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask)

    def check(self) -> None:
        """Hooks may build samples by hand; what training relies on is checked here once."""
        n = self.response_length
        for name in ("loss_mask", "rollout_log_probs", "weight_versions", "teacher_log_probs"):
            have = len(getattr(self, name))
            if have != n and not (name != "loss_mask" and have == 0):
                raise ValueError(f"sample {self.index}: {name} has {have} entries for {n} response tokens; "
                                 f"extend responses with sample.append()")
        spans = [(turn["begin"], turn.get("end", n)) for turn in self.turns if "begin" in turn]
        others = sum(self.loss_mask) - sum(sum(self.loss_mask[begin:end]) for begin, end in spans)
        if spans and others:                 # a tool's words, a user's, a template's
            raise ValueError(f"sample {self.index}: {others} tokens would be trained that the model did not say in any of its "
                             "turns; append what others say with trainable=False")
        if n >= len(self.tokens):            # the first response token needs one before it, to be predicted from
            raise ValueError(f"sample {self.index}: response_length {n} leaves no prompt in its {len(self.tokens)} tokens; "
                             f"tokens must be the prompt's ids followed by the response's")

    def copy(self, **changes) -> "Sample":
        """With lists of its own: hooks extend them in place."""
        return Sample.from_dict(self.to_dict() | changes)

    def to_dict(self) -> dict:
        """Plain data that stays as it is while the sample grows."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        own = {key: value.copy() if isinstance(value, list) else value for key, value in own.items()}
        deep = {"metadata": copy.deepcopy(self.metadata), "turns": copy.deepcopy(self.turns)}
        return own | deep | {"status": self.status.value}

    @staticmethod
    def from_dict(d: dict) -> "Sample":
        known = {f.name for f in fields(Sample)}
        return Sample(**{k: v for k, v in d.items() if k in known} | {"status": Status(d["status"])})
