"""
graders.py: what is a right answer? One function a grader: (cfg, sample) -> number or dict, as a custom_rm.

    Sample --grader_view--> prompt, response, answer (after </think>), box, gold --GRADERS[rm_type]--> number | dict
Test:  pytest tests/test_graders.py
Knows nothing about: processes and time limits (rewards.py runs a grader where it may hang or crash). cfg is only what
SETTINGS lists for it. Model output is never evaluated here: programs run in sandbox.py, formulas are parsed by math-verify,
and reasoning-gym's scorers that do evaluate an answer see it only after harmless() has looked at it.
Our regexes and loops take a time linear in the answer, so 10 MB cost seconds at most.
Left out on purpose: IFEval's language check and IFBench's checks that need a parser of English.
"""
import ast
import difflib
import json
import operator
import random
import re
import string
import time
from collections import Counter
from types import SimpleNamespace

import sandbox


NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))             # for str.translate; ASCII's 32


# FORK POINT: to add a grader, write the function and name it in GRADERS, at the end.
def grader_view(sample, boxed):
    """What a grader sees: the sample without its tokens, taken apart. boxed: the box is the whole response."""
    view = {key: getattr(sample, key) for key in ("prompt", "response", "label", "metadata", "index")}
    view["answer"] = sample.response.rsplit("</think>", 1)[-1]  # all of it when there is no thinking
    view["box"] = last_boxed(view["answer"])
    view["gold"] = "" if sample.label is None else str(sample.label).strip()
    return SimpleNamespace(**view | (dict(response=view["box"] or "", answer=view["box"] or "") if boxed else {}))

def last_boxed(text):
    # What the last \boxed{} holds, nested braces included; None without one, and when the response ends inside it.
    start, depth = text.rfind(r"\boxed{") + len(r"\boxed"), 0
    text = text[start:start + 100_000] if r"\boxed{" in text else ""     # longer than that is no answer
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):  # "\{" does not nest
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[1:brace.start()].strip()


# ---- Mathematics -----------------------------------------------------------------------------------------------------
def math_(cfg, sample, box=None):
    # An answer that math-verify cannot read is wrong; a label that it cannot read is a mistake in the data.
    from math_verify import parse, verify  # brings sympy: only worker processes pay
    box, never_s = box or sample.box, 10**6  # s; its own SIGALRM limit turns a hang into "wrong", ours into an error
    gold = sample.gold if "boxed{" in sample.gold or "$" in sample.gold else rf"\boxed{{{sample.gold}}}"
    if not (want := parse(gold, parsing_timeout=never_s)):
        raise ValueError(f"math-verify cannot read the label {sample.label!r:.200}")
    text = sample.answer[-2000:] if box is None else rf"\boxed{{{box}}}"  # no box: the last expression near the end
    return verify(want, parse(text, parsing_timeout=never_s), timeout_seconds=never_s)

def deepscaler(cfg, sample):
    return sample.box is not None and math_(cfg, sample)  # the format is a must

def dapo(cfg, sample):
    # 2503.14476, eq. 7: +1 or -1. There normalised strings are compared, here values: 0.5 equals 1/2.
    pred = (re.findall(r"(?i)answer\s*:[ \t]*([^\n]+)", sample.response) or [""])[-1].strip(" *$\t").rstrip(" *$.")
    acc = pred != "" and math_(cfg, sample, pred)
    return {"score": 2.0 * acc - 1, "acc": acc, "pred": pred or "[INVALID]"}


# ---- Words and letters -----------------------------------------------------------------------------------------------
def exact(cfg, sample):
    return sample.response.strip() == sample.gold

def f1(cfg, sample):
    # SQuAD (1606.05250, sec. 6.1) on bags of words: 2PR / (P + R) = 2 common / (n_want + n_got)
    want, got = (Counter(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(NO_PUNCTUATION)).split())
                 for text in (sample.gold, sample.response))  # lower case, no ASCII punctuation, no articles
    return 2 * (want & got).total() / (want.total() + got.total()) if want and got else want == got

def gpqa(cfg, sample):
    texts, letters = list(sample.metadata.get("choices") or ()), "ABCDEFGHIJ"  # texts in the order of the letters
    right = letters[texts.index(sample.label)] if sample.label in texts else sample.gold
    right = str(sample.metadata.get("correct_letter") or right).strip("() .").upper()
    if len(right) != 1 or right not in letters:
        raise ValueError(f"{right!r:.200} is no letter; give metadata correct_letter, or choices that hold the label")
    said = (re.findall(r"\b([A-J])\b", sample.box or "") or re.findall(r"(?m)^[^\w\n]*([A-J])[^\w\n]*$", sample.answer)
            or re.findall(r"(?i:answer)(?i:\s+is)?[\s:*($]*([A-J])\b", sample.answer))  # most explicit form first
    return said[-1:] == [right]


# ---- reasoning-gym ---------------------------------------------------------------------------------------------------
# Scorers that call eval() on an answer, and those that give it to sympy's parse_expr, which is eval() too (0.1.25).
EVALS = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
PARSES = {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
FUNCTIONS = set("sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs".split())

def reasoning_gym(cfg, sample, scorers={}):  # scorers: kept per process, because making one takes up to 0.4 s
    import reasoning_gym as gym
    name, text = sample.metadata["source_dataset"], sample.answer
    if 0 <= (start := text.rfind("<answer>", 0, end := max(0, text.rfind("</answer>")))):   # the last pair, else all
        text = text[start + len("<answer>"):end]
    text = text.strip()
    scorers[name] = scorers.get(name) or gym.get_score_answer_fn(name)
    if name in EVALS | PARSES and not harmless(text, name in PARSES):
        text = ""
    return scorers[name](text, sample.metadata["entry"])

def harmless(text, formula):
    # Whether text, evaluated, is only a list of literals, or (formula) arithmetic on numbers, names and FUNCTIONS of them.
    # An attribute or a call of anything else could be a program; so could a string that a sympy function gets to parse.
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval"))) if len(text) < 10_000 else [None]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return not formula                   # eval() would not run it either; parse_expr might, after its rewriting
    own = (ast.BinOp, ast.operator) if formula else (ast.List, ast.Tuple)
    kinds = (ast.Expression, ast.Load, ast.UnaryOp, ast.unaryop, *own)
    for node in nodes:
        if isinstance(node, ast.Call):
            fine = formula and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
        elif isinstance(node, ast.Name):
            fine = not formula or len(node.id) == 1 or node.id in FUNCTIONS
        elif isinstance(node, ast.Constant):
            fine = not formula or isinstance(node.value, (int, float))
        else:
            fine = isinstance(node, kinds)
        if not fine:
            return False
    return True


# ---- Following instructions: IFEval (2311.07911) and IFBench (2507.02833) --------------------------------------------
def ifbench(cfg, sample):
    """1.0 if all of metadata["instruction_id_list"] hold, each with its dict of the list metadata["kwargs"], else 0.0."""
    names, kwargs = sample.metadata["instruction_id_list"], sample.metadata.get("kwargs") or []
    if unknown := [name for name in names if name not in INSTRUCTIONS]:
        raise ValueError(f"unknown instruction {unknown[0]!r}; there are {', '.join(INSTRUCTIONS)}; add it to INSTRUCTIONS")
    if not names or len(kwargs) != len(names):
        raise ValueError(f"{len(names)} instructions and {len(kwargs)} kwargs; give one dict each, {{}} for none")
    given = [{key: value for key, value in (own or {}).items() if value is not None} for own in kwargs]
    return float(all([INSTRUCTIONS[name](sample.answer.strip(), **own) for name, own in zip(names, given)]))

RELATIONS = {"at least": operator.ge, "at most": operator.le, "less than": operator.lt, "more than": operator.gt,
             "exactly": operator.eq}

def holds(count, relation, bound):
    if relation not in RELATIONS:
        raise ValueError(f"unknown relation {relation!r}; there are {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, bound)

def words(text):
    return re.findall(r"\w+", text)

def plain_words(text):                       # IFBench's: lower case, no ASCII punctuation
    return text.lower().translate(NO_PUNCTUATION).split()

def sentences(text):                         # ends at . ! or ? before white space; an abbreviation ends one too
    return [part for part in re.split(r"(?<=[.!?])\s+", text) if part]

def parts(text, between):                    # an empty one counts, but not before the first mark or after the last
    found = [part.strip() for part in text.split(between)]
    return found[not found[0]:len(found) - (not found[-1])]

def is_json(text):
    text = text.removeprefix("```json").removeprefix("```Json").removeprefix("```JSON").removeprefix("```").removesuffix("```")
    try:
        json.loads(text)
        return True
    except (ValueError, RecursionError):
        return False

def bullets(text):
    lines = [line.strip() for line in text.split("\n")]
    return sum(line.startswith("-") or line.startswith("*") and not line.startswith("**") for line in lines)

def first_word(text, num_paragraphs, nth_paragraph, first_word):
    found = [part for part in text.split("\n\n") if part.strip()]
    return (len(found) == num_paragraphs and nth_paragraph <= num_paragraphs
            and words(found[nth_paragraph - 1].lower())[:1] == [first_word.lower()])

def has_title(text):                         # <<title>>
    spans = [line[line.find("<<"):line.rfind(">>")] for line in text.split("\n") if "<<" in line and ">>" in line]
    return any(span.strip("<> ") for span in spans)

INSTRUCTIONS = {                             # t: the answer, stripped; the other arguments have the data set's names
    "keywords:existence": lambda t, keywords: all(word.lower() in t.lower() for word in keywords),
    "keywords:frequency": lambda t, keyword, frequency, relation: holds(t.lower().count(keyword.lower()), relation, frequency),
    "keywords:forbidden_words": lambda t, forbidden_words: not any(
        re.search(rf"(?<!\w){re.escape(word)}(?!\w)", t, re.IGNORECASE) for word in forbidden_words),
    "keywords:letter_frequency": lambda t, letter, let_frequency, let_relation: holds(
        t.lower().count(letter.lower()), let_relation, let_frequency),
    "length_constraints:number_words": lambda t, num_words, relation: holds(len(words(t)), relation, num_words),
    "length_constraints:number_sentences": lambda t, num_sentences, relation: holds(
        len(sentences(t)), relation, num_sentences),
    "length_constraints:number_paragraphs": lambda t, num_paragraphs: (    # separated by ***
        len(found := parts(t, "***")) == num_paragraphs and all(found)),
    "length_constraints:nth_paragraph_first_word": first_word,
    "detectable_content:number_placeholders": lambda t, num_placeholders: (
        len(re.findall(r"\[[^\[\]\n]*\]", t)) >= num_placeholders),
    "detectable_content:postscript": lambda t, postscript_marker: (
        postscript_marker.lower().replace(" ", "") in t.lower().replace(" ", "")),
    "detectable_format:number_bullet_lists": lambda t, num_bullets: bullets(t) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda t, num_highlights: (        # *so* or **so**
        len(re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", t)) >= num_highlights),
    "detectable_format:multiple_sections": lambda t, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", t)) >= num_sections),
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "detectable_format:constrained_response": lambda t: any(
        f"My answer is {word}." in t for word in ("yes", "no", "maybe")),
    "combination:two_responses": lambda t: len(found := parts(t, "******")) == 2 and all(found) and found[0] != found[1],
    "combination:repeat_prompt": lambda t, prompt_to_repeat: t.lower().startswith(prompt_to_repeat.strip().lower()),
    "startend:end_checker": lambda t, end_phrase: t.strip('"').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": lambda t: len(t) > 1 and t[0] == t[-1] == '"',
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "change_case:capital_word_frequency": lambda t, capital_frequency, capital_relation: holds(
        sum(word.isupper() for word in words(t)), capital_relation, capital_frequency),
    "punctuation:no_comma": lambda t: "," not in t,
    "count:word_count_range": lambda t, min_words, max_words: min_words <= len(words(t)) <= max_words,
    "count:unique_word_count": lambda t, N: len(set(plain_words(t))) >= N,
    "count:numbers": lambda t, N: len(re.findall(r"\d+", t.translate(NO_PUNCTUATION))) == N,
    "words:repeats": lambda t, small_n: max(Counter(plain_words(t)).values(), default=0) <= small_n,
    "words:no_consecutive": lambda t: all(a[0] != b[0] for a, b in zip(plain_words(t), plain_words(t)[1:])),
    "words:palindrome": lambda t: sum(word == word[::-1] and len(word) > 4 for word in plain_words(t)) >= 10,
    "format:list": lambda t, sep: t.count(sep) >= 2,
    "format:no_whitespace": lambda t: not re.search(r"\s", t)}


# ---- Programs --------------------------------------------------------------------------------------------------------
def code(cfg, sample):
    """1.0 if the last ```python block of the answer passes all of metadata["tests"], else 0.0: no share for some of them.
    tests: dicts {"input": stdin, "output": stdout} (compared word by word), or assert statements or other test code that calls
    the program's functions (a string or a list of them; with metadata["entry_point"] HumanEval's check() is called on it).
    Each run may take code_timeout_s, all of them 0.8 reward_timeout_s: what is slower is wrong, not an error."""
    tests, entry = sample.metadata.get("tests"), sample.metadata.get("entry_point")
    tests = [tests] if isinstance(tests, str) else tests
    forms = {"test code" if isinstance(test, str) else "pair" if isinstance(test, dict) and all(
        isinstance(test.get(key), str) for key in ("input", "output")) else "?" for test in tests or ()}
    if forms not in ({"test code"}, {"pair"}):
        raise ValueError('metadata["tests"] must be dicts {"input": str, "output": str}, or asserts (str); give one or more')
    program, memory_bytes = last_program(sample.answer), cfg.code_memory_mb << 20
    end_s = time.monotonic() + 0.8 * cfg.reward_timeout_s
    if forms == {"test code"}:
        if entry and any("def check(" in test for test in tests):
            tests = ["\n".join([*tests, f"check({entry})"])]
        idle = ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign     # statements that test nothing
        if all(isinstance(statement, idle) for test in tests for statement in ast.parse(test).body):
            raise ValueError('metadata["tests"] only defines functions; set metadata["entry_point"], or add the call')
        limit_s = min(cfg.code_timeout_s, end_s - time.monotonic())
        return program is not None and sandbox.run_tests(program, tests, limit_s, memory_bytes).passed
    for test in tests if program is not None else ():
        limit_s = min(cfg.code_timeout_s, end_s - time.monotonic())
        result = sandbox.run_python(program, test["input"], limit_s, memory_bytes) if limit_s > 0 else None
        if not result or result.timed_out or result.exit_code or result.stdout.split() != test["output"].split():
            return 0.0
    return float(program is not None)

def last_program(text):
    # The last closed block that says it is Python, else the last one that says nothing; None if there is neither.
    found, start = {}, None
    for fence in re.finditer(r"(?m)^[ \t]*```(.*)$", text):
        word = fence[1].strip()
        if start is None:
            language, start = "python" if word.lower() in ("python", "python3", "py") else word, fence.end() + 1
        elif not word:
            found[language], start = text[start:max(start, fence.start() - 1)], None
    return found.get("python", found.get(""))


# ---- The rest --------------------------------------------------------------------------------------------------------
def coin(cfg, sample):                       # repeatable
    return random.Random(f"{sample.index} {sample.response}").randint(0, 1)

async def remote_rm(cfg, sample):
    import asyncio
    import aiohttp
    if not cfg.rm_url:
        raise ValueError("rm_url is not set")
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0):  # of the limit, waited before the next try; 0: that was the last
            try:
                return await (await session.post(cfg.rm_url, json=body)).json(content_type=None)
            except aiohttp.ClientError as error:
                refused = 400 <= getattr(error, "status", 500) < 500 and error.status not in (408, 429)
                if refused or not share:     # a refusal would be one again: the request, or the address, is wrong
                    raise
            await asyncio.sleep(share * cfg.reward_timeout_s)

GRADERS = {"math": math_, "deepscaler": deepscaler, "dapo": dapo, "exact": exact, "f1": f1, "gpqa": gpqa, "ifbench": ifbench,
           "code": code, "reasoning_gym": reasoning_gym, "remote_rm": remote_rm, "random": coin}
NEEDS_LABEL = {"exact", "math", "deepscaler", "dapo", "f1"}
INLINE = {"exact", "f1", "random"}  # on the event loop where an answer is short: a trip to a worker takes 10 times longer
SLOW_IMPORTS = dict(math="math_verify", deepscaler="math_verify", dapo="math_verify", reasoning_gym="reasoning_gym")
SETTINGS = {"code": ("code_timeout_s", "code_memory_mb", "reward_timeout_s")}   # of cfg, sent to the worker process

def check_rm_type(name):
    """The grader without "boxed_"; ValueError for an unknown one. train.check asks before any GPU is touched."""
    if (grader := str(name).removeprefix("boxed_")) in GRADERS:
        if grader == "code":
            sandbox.check()
        return grader
    near = difflib.get_close_matches(grader, GRADERS, 1, 0.0)[0]
    raise ValueError(f"unknown rm_type {name!r}; did you mean {near!r}? There are {', '.join(GRADERS)}, each also as "
                     "boxed_<name>; a function of your own goes in custom_rm")
