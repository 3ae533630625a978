"""
test_graders.py: what each grader says about answers that were graded by hand, hostile ones included.

Run:   pytest -q tests/test_graders.py       (real worker processes; 40 s and 4 minutes of hostile ones on two busy cores)
The number at the end of each line was written down before anything was run; where math-verify decides otherwise, the line
is in LIMITS, with both numbers.
"""
import ast
import asyncio
import importlib
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import graders
from buffer import Sample
from rewards import RewardError, Rewarder
from test_rewards import Config


def make(response, label=None, **metadata):
    return Sample(index=0, prompt="p", response=response, label=label, metadata=metadata)


@pytest.fixture(scope="module")
def rewarder():
    rewarder = Rewarder(2)
    yield rewarder
    rewarder.close()


def score(rewarder, sample, reward_key="score", **cfg):
    return asyncio.run(rewarder.score(Config(**cfg), sample, reward_key))


# ---- Answers graded by hand --------------------------------------------------------------------------------------------
MATH = [  # label, response, reward
    ("7", r"\boxed{7}", 1), ("7", r"\boxed{8}", 0), ("7", "It is 7.", 1), ("7", "It is 8.", 0), ("7", "", 0),
    ("7", "no idea", 0), ("42", r"So $x=\boxed{42}$.", 1), ("42", r"\boxed{x = 42}", 1), ("-3", r"\boxed{-3}", 1),
    # fractions and decimals
    (r"\frac{1}{2}", r"\boxed{0.5}", 1), ("0.5", r"\boxed{\frac12}", 1), ("1/2", r"\boxed{\dfrac{2}{4}}", 1),
    (r"\frac{1}{2}", r"\boxed{.5}", 1), (r"\frac{1}{3}", r"\boxed{0.5}", 0), (r"-\frac{3}{4}", r"\boxed{\frac{-3}{4}}", 1),
    (r"\frac{3}{4}", r"\boxed{-\frac{3}{4}}", 0), (r"\frac{7}{2}", r"\boxed{3.5}", 1), (r"\frac{1}{2}", r"\boxed{\frac{2}{1}}", 0),
    (r"1\frac{1}{2}", r"\boxed{1.5}", 1), (r"\frac{3}{7}", r"\boxed{3/7}", 1), ("0.25", r"\boxed{1/4}", 1),
    ("100", r"\boxed{100.0}", 1), ("0.1", r"\boxed{0.10}", 1), ("3.14", r"\boxed{\pi}", 0), ("0.05", r"\boxed{0.5}", 0),
    # percent, money, units, separators
    ("50\\%", r"\boxed{50\%}", 1), ("20", r"\boxed{20\%}", 1), ("5", r"\boxed{5\text{ cm}}", 1), ("5", r"\boxed{\$5}", 1),
    ("18", r"\boxed{18\text{ apples}}", 1), ("90", r"\boxed{90^\circ}", 1), ("1000", r"\boxed{1,000}", 1),
    ("1000000", r"\boxed{1{,}000{,}000}", 1), ("12", r"\boxed{12\,\mathrm{m}}", 1), ("1000", r"\boxed{1.000}", 0),
    ("5", r"\boxed{50\text{ mm}}", 0),
    # surds, powers, constants
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1), (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", 1),
    (r"\sqrt{2}", r"\boxed{1.414}", 0), (r"\sqrt{3}", r"\boxed{-\sqrt{3}}", 0), (r"2\pi", r"\boxed{\pi \cdot 2}", 1),
    ("1024", r"\boxed{2^{10}}", 1), (r"\sqrt[3]{8}", r"\boxed{2}", 1), (r"1+\sqrt{5}", r"\boxed{\sqrt 5 + 1}", 1),
    (r"e^2", r"\boxed{e^{2}}", 1), (r"\frac{4\pi}{3}", r"\boxed{\frac{4}{3}\pi}", 1), ("2^{-1}", r"\boxed{\frac{1}{2}}", 1),
    # formulas
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1), ("x^2+2x+1", r"\boxed{(x-1)^2}", 0), ("2x+3", r"\boxed{3+2x}", 1),
    ("x+y", r"\boxed{x-y}", 0), (r"\sin^2 x", r"\boxed{1-\cos^2 x}", 1), ("y=2x+1", r"\boxed{y = 1+2x}", 1),
    # sets, tuples, intervals, matrices, inequalities
    (r"\{1,2,3\}", r"\boxed{\{3,1,2\}}", 1), (r"\{1,2\}", r"\boxed{\{1,2,3\}}", 0), ("(1,2)", r"\boxed{(1,2)}", 1),
    ("(1,2)", r"\boxed{(2,1)}", 0), ("[0,1)", r"\boxed{[0,1)}", 1), (r"[0,\infty)", r"\boxed{[0, \infty)}", 1),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(-\infty, 1) \cup (2, \infty)}", 1), ("(0,1)", r"\boxed{(0,2)}", 0),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", 0), ("x>3", r"\boxed{x > 3}", 1),
    ("x>3", r"\boxed{x<3}", 0), (r"\emptyset", r"\boxed{\emptyset}", 1), ("1,2", r"\boxed{1, 2}", 1), ("1,2", r"\boxed{1}", 0),
    # boxes and thinking; a box that is cut off may have become 70
    ("3", r"\boxed{2} wait, \boxed{3}", 1), ("2", r"\boxed{2} wait, \boxed{3}", 0), ("4", r"\boxed{\boxed{4}}", 1),
    ("5", r"<think>\boxed{6}</think> It is \boxed{5}", 1), ("6", r"<think>\boxed{6}</think> It is \boxed{5}", 0),
    ("7", r"\fbox{8} then 7", 1), ("7", r"\boxed{7", 0), ("7", r"\boxed{}", 0), (r"\boxed{9}", r"\boxed{9}", 1),
    ("$11$", r"\boxed{11}", 1), ("7", r"$$\boxed{\;7\;}$$", 1), ("7", r"\boxed{\textbf{7}}", 1),
    # looks right, is wrong
    ("12", r"\boxed{21}", 0), ("123", r"\boxed{12}", 0), ("10", r"\boxed{1}", 0), ("0", r"\boxed{-1}", 0),
    ("7", r"\boxed{7 or 8}", 0), ("7", r"\boxed{\text{seven}}", 0), ("6", r"\boxed{2 \times 2}", 0), ("1", r"\boxed{\sin x}", 0),
    ("5", r"\boxed{\pm 5}", 0), (r"\frac{1}{3}", r"\boxed{0.333}", 0), (r"\frac13", r"\boxed{0.333333}", 0), ("101_2", r"\boxed{101}", 0),
    ("3:4", r"\boxed{4:3}", 0), ("3+4i", r"\boxed{3-4i}", 0), (r"\infty", r"\boxed{-\infty}", 0), (r"\log_{10} 2", r"\boxed{\ln 2}", 0),
    ("A", r"\boxed{B}", 0), ("5", r"\boxed{five}", 0), ("(1,2)", r"\boxed{[1,2]}", 0), ("(1,2)", r"\boxed{\{1,2\}}", 0),
    ("3.0001", r"\boxed{3}", 0), ("1000001", r"\boxed{1000000}", 0), ("0", r"\boxed{0.0000001}", 0), (r"\sqrt{x^2}", r"\boxed{x}", 0),
    ("12345678901234567890", r"\boxed{12345678901234567891}", 0), ("12", r"12 \boxed{}", 0), (r"\text{Monday}", r"\boxed{\text{Tuesday}}", 0),
    # looks wrong, is right
    (r"\pm 5", r"\boxed{5, -5}", 1), (r"\text{Monday}", r"\boxed{\text{Monday}}", 1), ("101_2", r"\boxed{101_2}", 1),
    ("10^{100}", r"\boxed{10 \cdot 10^{99}}", 1), ("3:4", r"\boxed{3:4}", 1), ("300000000", r"\boxed{3\times10^8}", 1),
    ("3+4i", r"\boxed{4i+3}", 1), (r"\infty", r"\boxed{\infty}", 1), ("10", r"\boxed{\binom{5}{2}}", 1), ("6", r"\boxed{3!}", 1),
    (r"\frac{n(n+1)}{2}", r"\boxed{\frac{n^2+n}{2}}", 1), ("A", r"\boxed{\text{(A)}}", 1), ("0.5", r"\boxed{50\%}", 1),
    ("50\\%", r"\boxed{0.5}", 1), (r"3\text{ hours}", r"\boxed{3}", 1), ("x=5", r"\boxed{5}", 1), ("5", r"\boxed{x \in \{5\}}", 1),
    ("x^2-1=0", r"\boxed{x^2=1}", 1), ("[1,2]", r"\boxed{1\le x\le 2}", 1), (r"\{1,2\}", r"\boxed{1, 2}", 1), ("17", "I think **17**", 1),
    ("17", "The answer is 17, not 18.", 1), (r"\frac{a}{b}", r"\boxed{a/b}", 1), ("2", r"\boxed{2 \pmod 5}", 1), ("1", "\\boxed{\u200f1}", 1),
    (r"\frac{\pi}{2}", r"\boxed{90^\circ}", 1), ("-1/2", r"\boxed{-\tfrac{1}{2}}", 1), ("0.1+0.2", r"\boxed{0.3}", 1), ("\u0661", r"\boxed{1}", 1)]
LIMITS = {  # (label, response) -> what math-verify 0.9 says, and why; the number in MATH is the right one
    (r"\frac13", r"\boxed{0.333333}"): (1, "decimals are compared to six places"),
    ("101_2", r"\boxed{101}"): (1, "the base is not read"),
    ("(1,2)", r"\boxed{\{1,2\}}"): (1, "a pair, an open interval and a set of two are not told apart"),
    ("[1,2]", r"\boxed{1\le x\le 2}"): (0, "a chain of inequalities is no interval"),
    ("2", r"\boxed{2 \pmod 5}"): (0, "the modulus is not read"),
    (r"\frac{\pi}{2}", r"\boxed{90^\circ}"): (0, "degrees are a unit, so 90"),
    ("1", "\\boxed{\u200f1}"): (0, "an invisible mark spoils a number"), ("\u0661", r"\boxed{1}"): (0, "no digits but 0 to 9")}

IF = "instruction_id_list"
def follow(name, response, reward, **kwargs):
    return "ifbench", response, None, {IF: [name], "kwargs": [kwargs]}, reward

OTHERS = [  # rm_type, response, label, metadata, reward
    ("deepscaler", r"\boxed{7}", "7", {}, 1), ("deepscaler", "7", "7", {}, 0), ("deepscaler", r"\boxed{7", "7", {}, 0),
    ("deepscaler", r"<think>7</think> \boxed{14/2}", "7", {}, 1), ("deepscaler", r"\boxed{7}<think></think>", "7", {}, 0),
    ("dapo", "Answer: 7", "7", {}, 1), ("dapo", "7", "7", {}, -1), ("dapo", "Answer: 8", "7", {}, -1),
    ("dapo", "ANSWER : $7$.", "7", {}, 1), ("dapo", "Answer: 7\nAnswer: 8", "7", {}, -1), ("dapo", "Answer:", "7", {}, -1),
    ("dapo", r"Answer: \frac{14}{2}", "7", {}, 1), ("boxed_dapo", r"\boxed{Answer: 7}", "7", {}, 1),
    ("exact", "7", 7, {}, 1), ("exact", " 7\n", "7", {}, 1), ("exact", "7.0", "7", {}, 0), ("exact", "Paris", "paris", {}, 0),
    ("boxed_exact", r"It is \boxed{Paris}", "Paris", {}, 1), ("boxed_exact", "Paris", "Paris", {}, 0),
    ("f1", "the cat", "a cat", {}, 1), ("f1", "cat dog", "cat", {}, 2 / 3), ("f1", "dog", "cat", {}, 0), ("f1", "Cat!", "cat", {}, 1),
    ("f1", "one two three four", "three four five six", {}, 0.5), ("boxed_f1", r"x \boxed{big cat} y", "cat", {}, 2 / 3),
    ("gpqa", "The answer is (B)", "B", {}, 1), ("gpqa", "The answer is B", "C", {}, 0), ("gpqa", r"\boxed{D}", "D", {}, 1),
    ("gpqa", "B\n", "B", {}, 1), ("gpqa", "Answer: $\\boxed{A}$", "A", {}, 1), ("gpqa", "A or B", "B", {}, 0),
    ("gpqa", "<think>Answer: A</think> Answer: B", "A", {}, 0), ("gpqa", "Answer: C", "iron", {"choices": ["a", "b", "iron"]}, 1),
    ("gpqa", "answer: b", "B", {}, 0), ("boxed_gpqa", r"Answer: A \boxed{B}", "B", {}, 1),
    follow("keywords:existence", "A cat sat.", 1, keywords=["cat", "SAT"]), follow("keywords:existence", "A dog.", 0, keywords=["cat"]),
    follow("keywords:frequency", "ho ho ho", 1, keyword="ho", frequency=3, relation="at least"),
    follow("keywords:frequency", "ho ho ho", 0, keyword="ho", frequency=3, relation="less than"),
    follow("keywords:forbidden_words", "a catalogue", 1, forbidden_words=["cat"]),
    follow("keywords:forbidden_words", "a Cat!", 0, forbidden_words=["cat"]),
    follow("keywords:letter_frequency", "Banana", 1, letter="a", let_frequency=3, let_relation="at least"),
    follow("length_constraints:number_words", "one two three", 1, num_words=3, relation="at least"),
    follow("length_constraints:number_words", "one two three", 0, num_words=3, relation="less than"),
    follow("length_constraints:number_sentences", "One. Two! Three?", 1, num_sentences=3, relation="at least"),
    follow("length_constraints:number_sentences", "One. Two!", 0, num_sentences=3, relation="at least"),
    follow("length_constraints:number_paragraphs", "a\n***\nb", 1, num_paragraphs=2),
    follow("length_constraints:number_paragraphs", "a\n***\n***\nb", 0, num_paragraphs=3),
    follow("length_constraints:nth_paragraph_first_word", "Hi you\n\n\"So be it", 1, num_paragraphs=2, nth_paragraph=2, first_word="so"),
    follow("length_constraints:nth_paragraph_first_word", "Hi you\n\nSo", 0, num_paragraphs=3, nth_paragraph=2, first_word="so"),
    follow("detectable_content:number_placeholders", "[name], [town]", 1, num_placeholders=2),
    follow("detectable_content:number_placeholders", "[name]", 0, num_placeholders=2),
    follow("detectable_content:postscript", "Bye.\nP. S. One more", 1, postscript_marker="P.S."),
    follow("detectable_content:postscript", "Bye.", 0, postscript_marker="P.S."),
    follow("detectable_format:number_bullet_lists", "* a\n- b\n**c**", 1, num_bullets=2),
    follow("detectable_format:number_bullet_lists", "* a", 0, num_bullets=2),
    follow("detectable_format:number_highlighted_sections", "*a b* and **c**", 1, num_highlights=2),
    follow("detectable_format:number_highlighted_sections", "2 * 3", 0, num_highlights=1),
    follow("detectable_format:multiple_sections", "Section 1 a\nSection 2 b", 1, section_spliter="Section", num_sections=2),
    follow("detectable_format:json_format", '```json\n{"a": [1]}\n```', 1), follow("detectable_format:json_format", "{'a': 1}", 0),
    follow("detectable_format:title", "<<A song>>\nla", 1), follow("detectable_format:title", "<< >>\nla", 0),
    follow("detectable_format:constrained_response", "My answer is maybe.", 1),
    follow("detectable_format:constrained_response", "maybe", 0),
    follow("combination:two_responses", "a\n******\nb", 1), follow("combination:two_responses", "a\n******\na", 0),
    follow("combination:repeat_prompt", "say hi! Hi.", 1, prompt_to_repeat="Say hi!"),
    follow("startend:end_checker", 'Well.\nThat is ALL.', 1, end_phrase="that is all."),
    follow("startend:end_checker", "That is all. Bye", 0, end_phrase="that is all."),
    follow("startend:quotation", '"so"', 1), follow("startend:quotation", '"', 0),
    follow("change_case:english_capital", "ALL OF IT 1!", 1), follow("change_case:english_capital", "ALL oF IT", 0),
    follow("change_case:english_lowercase", "all of it", 1), follow("change_case:english_lowercase", "All", 0),
    follow("change_case:capital_word_frequency", "NATO and the EU", 1, capital_frequency=2, capital_relation="at least"),
    follow("punctuation:no_comma", "a; b", 1), follow("punctuation:no_comma", "a, b", 0),
    follow("count:word_count_range", "a b c", 1, min_words=2, max_words=3), follow("count:word_count_range", "a", 0, min_words=2, max_words=3),
    follow("count:unique_word_count", "a A b!", 1, N=2), follow("count:numbers", "1,000 and 2.5", 1, N=2), follow("count:numbers", "1 2", 0, N=1),
    follow("words:repeats", "a b a", 0, small_n=1), follow("words:no_consecutive", "big cat", 1), follow("words:no_consecutive", "big bat", 0),
    follow("words:palindrome", "level " * 10, 1), follow("format:list", "!!a !!b", 1, sep="!!"), follow("format:no_whitespace", "a b", 0),
    follow("punctuation:no_comma", "<think>a, b</think> a", 1), follow("count:numbers", "1", 1, N=1, unused=None),
    ("ifbench", "a b", None, {IF: ["punctuation:no_comma", "format:no_whitespace"], "kwargs": [{}, None]}, 0)]


DOUBLE, ADD = "def double(x):\n    return 2 * x", "a, b = map(int, input().split())\nprint(a + b)"
SUMS, ASSERTS = [{"input": "1 2\n", "output": "3"}, {"input": "5 5", "output": "10\n"}], ["assert double(2) == 4", "assert double(0) == 0"]
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert [candidate(1)] == [2]\n"
PROGRAMS = [  # program, tests, entry_point, reward
    (ADD, SUMS, None, 1), (ADD.replace("+ b", "- b"), SUMS, None, 0), ("print(3)", SUMS, None, 0), ("", SUMS, None, 0),
    (ADD + "\nraise SystemExit(1)", SUMS, None, 0), (ADD + "\nraise SystemExit", SUMS, None, 1), ("x = = 1", SUMS, None, 0),
    ("print(' 3 ')", SUMS[:1], None, 1), ("print('3.0')", SUMS[:1], None, 0), ("print('3 3')", SUMS[:1], None, 0),
    (DOUBLE, ASSERTS, None, 1), ("double = lambda x: x + 2", ASSERTS, None, 0), (DOUBLE, "\n".join(ASSERTS), None, 1),
    (DOUBLE, CHECK, "double", 1), ("def double(x):\n    return 4", CHECK, "double", 0), ("", ASSERTS, None, 0),
    (DOUBLE, ["import math", "assert math.isclose(double(.5), 1)"], None, 1), ("import numpy\ndouble = lambda x: numpy.add(x, x)", ASSERTS, None, 1),
    # programs that would rather be believed than right
    ("import sys; sys.exit(0)", ASSERTS, None, 0), ("import os; os._exit(0)", ASSERTS, None, 0), ("quit()", ASSERTS, None, 0),
    ("print('all tests passed'); raise SystemExit", ASSERTS, None, 0), ("def double(x):\n    import os; os._exit(0)", ASSERTS, None, 0),
    ("class Yes:\n    def __eq__(self, other): return True\ndouble = lambda x: Yes()", ASSERTS, None, 0),
    ("class Yes(int):\n    __eq__ = lambda self, other: True\ndouble = lambda x: Yes(9)", ASSERTS, None, 0),
    ("class Yes:\n    def __eq__(self, other): return True\ndouble = lambda x: Yes()", CHECK, "double", 0),
    ("import builtins\nbuiltins.AssertionError = ValueError\ndouble = abs", ASSERTS, None, 0),
    ("import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None", ASSERTS, None, 0),
    ("import sys\nsys.excepthook = lambda *a: None\ndouble = abs", ASSERTS, None, 0),
    ("import atexit, os\natexit.register(lambda: os._exit(0))\ndouble = abs", ASSERTS, None, 0),
    ("def skip(frame, event, arg):\n    frame.f_trace_lines = False\n    return skip\nimport sys\nsys.settrace(skip)\ndouble = abs", ASSERTS, None, 0),
    ("double = eval(open(0).read().split('==')[1].split('\"')[0])", ASSERTS, None, 0), ("check = print\ndouble = abs", CHECK, "double", 0),
    ("import threading\ndouble = lambda x: x + x\nthreading.Thread(target=print).start()", ASSERTS, None, 1),
    ("class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x", ["assert P(1) == P(1)"], None, 1),
    ("while True: pass", SUMS, None, 0), ("while True: pass", ASSERTS, None, 0), ("x = [0] * 10**10", SUMS, None, 0)]


def test_there_are_enough_cases():
    assert len(MATH) >= 60 and len(MATH) + len(OTHERS) + len(PROGRAMS) >= 150 and LIMITS.keys() <= {case[:2] for case in MATH}


@pytest.mark.parametrize("label, response, right", MATH)
def test_math(rewarder, label, response, right):
    got = score(rewarder, make(response, label), rm_type="math")
    limit = LIMITS.get((label, response))
    assert got == (right if limit is None else limit[0]), limit
    assert limit is None or limit[0] != right, "math-verify has learned it; take the line out of LIMITS"


@pytest.mark.parametrize("rm_type, response, label, metadata, reward", OTHERS)
def test_grader(rewarder, rm_type, response, label, metadata, reward):
    got = score(rewarder, make(response, label, **metadata), rm_type=rm_type)
    assert (got["score"] if isinstance(got, dict) else got) == pytest.approx(reward)


@pytest.mark.parametrize("program, tests, entry_point, reward", PROGRAMS)
def test_code(rewarder, program, tests, entry_point, reward):
    answer = f"So:\n```python\n{program}\n```\nIt prints\n```\n3\n```"
    assert score(rewarder, make(answer, tests=tests, entry_point=entry_point), rm_type="code", code_timeout_s=2.0) == reward


@pytest.mark.parametrize("text, program", [
    ("```python\na\n```", "a"), ("```py\na\n```\n```python3\nb\n```", "b"), ("```\na\n```", "a"), ("a", None), ("```python\na", None),
    ("```python\na\n```\n```\nout\n```", "a"), ("```cpp\na\n```", None), ("  ```Python\n  a\n  ```", "  a"), ("", None),
    ("```python\na\n```\n```python\nb", "a"), ("```python\n```", "")])
def test_last_program(text, program):
    assert graders.last_program(text) == program


@pytest.mark.parametrize("metadata, said", [
    ({}, "must be dicts"), ({"tests": []}, "must be dicts"), ({"tests": [{"input": "1"}]}, "must be dicts"), ({"tests": 3}, "iterable|must be"),
    ({"tests": ["assert 1", {"input": "", "output": ""}]}, "must be dicts"), ({"tests": CHECK}, "entry_point"),
    ({"tests": ["assert ="]}, "SyntaxError")])
def test_wrong_test_data_is_an_error_not_a_wrong_answer(rewarder, metadata, said):
    for text in ("```python\npass\n```", "no program"):
        with pytest.raises(RewardError, match=f"sample 0 from code.*({said})"):
            score(rewarder, make(text, **metadata), rm_type="code")


@pytest.mark.parametrize("metadata, said", [
    ({IF: ["keywords:existance"], "kwargs": [{}]}, "'keywords:existance'; there are keywords:existence"), ({IF: []}, "0 instructions"),
    ({IF: ["punctuation:no_comma"]}, "1 instructions and 0 kwargs"), ({}, "instruction_id_list"),
    ({IF: ["keywords:existence"], "kwargs": [{}]}, "keywords"), ({IF: ["count:numbers"], "kwargs": [{"n": 1}]}, "'n'"),
    ({IF: ["length_constraints:number_words"], "kwargs": [{"relation": "about", "num_words": 3}]}, "relation 'about'")])
def test_wrong_instructions_are_an_error_not_a_wrong_answer(rewarder, metadata, said):
    with pytest.raises(RewardError, match=f"sample 0 from ifbench.*{said}"):
        score(rewarder, make("a", **metadata), rm_type="ifbench")


def test_rows_may_differ_in_grader_and_in_kind_of_reward(rewarder):
    """A dict with its reward_key from one grader, a number from another: both are what reward_key='score' trains on."""
    rows = [("Answer: 7", "7", {"rm_type": "dapo"}, 1.0), ("8", "7", {"rm_type": "dapo"}, -1.0), (r"\boxed{7}", "7", {}, 1.0),
            ("the cat", "cat", {"rm_type": "f1"}, 1.0), ("a, b", None, {"rm_type": "ifbench", IF: ["punctuation:no_comma"], "kwargs": [{}]}, 0.0)]
    for response, label, metadata, reward in rows:
        sample = make(response, label, **metadata)
        sample.reward = score(rewarder, sample, rm_type="math")
        assert sample.get_reward_value("score") == reward
    with pytest.raises(RewardError, match="sample 0 from mth.*did you mean 'math'"):
        score(rewarder, make("7", "7", rm_type="mth"), rm_type="math")


# ---- reasoning-gym -------------------------------------------------------------------------------------------------------
ENTRY = {"countdown": {"answer": "1 + 2 * 3", "metadata": {"numbers": [1, 2, 3], "target": 7}},
         "string_insertion": {"answer": "AB", "metadata": {}}, "spiral_matrix": {"answer": "1 2 3", "metadata": {}},
         "simple_integration": {"answer": "x**2 + C", "metadata": {"variable": "x", "integrand": "2*x"}},
         "polynomial_multiplication": {"answer": "x**2 - 1", "metadata": {}}}


@pytest.mark.parametrize("name, answer, reward", [
    ("countdown", "1 + 2*3", 1), ("countdown", "(1+2)*3", 0.05), ("countdown", "7", 0.05), ("countdown", "", 0.01),
    ("countdown", "<answer>9</answer> no <answer>2*3+1</answer>.", 1), ("string_insertion", "AB", 1), ("string_insertion", "['A', 'B']", 0.1),
    ("string_insertion", "AC", 0), ("spiral_matrix", "1 2 3", 1), ("spiral_matrix", "[1, 2, 3]", 0.1), ("spiral_matrix", "1 2", 0),
    ("simple_integration", "x**2", 1), ("simple_integration", "x**2 + C", 1), ("simple_integration", "2*x", 0),
    ("polynomial_multiplication", "(x - 1)*(x + 1)", 0), ("polynomial_multiplication", "x**2 - 1", 1)])
def test_reasoning_gym_by_hand(rewarder, name, answer, reward):
    assert score(rewarder, make(answer, rm_type="reasoning_gym", source_dataset=name, entry=ENTRY[name])) == reward


@pytest.mark.parametrize("name", ENTRY)
def test_reasoning_gym_runs_no_answer(rewarder, name, tmp_path):
    """Its own scorers would: they call eval(), or sympy's parse_expr, on the answer."""
    file = tmp_path / "was_here"
    write = f"open({str(file)!r}, 'w').write('x')"
    quiet = f"exec({write!r})"
    for answer in (write, quiet, f"[{write}]", f"x + {write}", f"sin({write!r})", f"(lambda: {write})()", f"{{{write}}}", f"f'{{{write}}}'",
                   f"[0 for _ in [{write}]]", f"1 if {write} else 2", f"__import__('os').system('touch {file}')", f"5! + {write}", f"sqrt(x, key={write})",
                   f"().__class__.__base__.__subclasses__()[{write}]", f"(y := {write})"):
        got = score(rewarder, make(f"<answer>{answer}</answer>", rm_type="reasoning_gym", source_dataset=name, entry=ENTRY[name]))
        assert got <= 0.05 and not file.exists(), answer


def test_reasoning_gym_has_no_other_scorer_that_evaluates():
    package = Path(importlib.util.find_spec("reasoning_gym").origin).parent
    found = {path.stem for path in package.rglob("*.py") if re.search(r"\b(eval|exec|parse_expr|sympify|S)\(\s*\w*answer", path.read_text())}
    import reasoning_gym
    reasoning_gym.get_score_answer_fn("countdown")
    trusted = {"number_sorting"}  # eval(entry["answer"]): our data
    assert found - trusted <= graders.EVALS | graders.PARSES and graders.EVALS | graders.PARSES <= found


# ---- Hostile answers -------------------------------------------------------------------------------------------------------
MB10 = 10 * 2**20
HOSTILE = {
    "program": "__import__('os').system('touch /tmp/nanoslime_was_here')", "powers": r"\boxed{9**9**9**9**9}", "latex powers": r"\boxed{9^{9^{9^{9}}}}",
    "braces": r"\boxed{" + "{" * MB10, "boxes": r"\boxed{" * 100_000, "parentheses": r"\boxed{" + "(" * 50_000 + "1" + ")" * 50_000 + "}",
    "fractions": r"\boxed{" + r"\frac{1}{" * 3000 + "1" + "}" * 3000 + "}", "letters": "a" * MB10, "spaces": "Answer" + " " * MB10 + "!",
    "lines": "\n" * MB10, "tags": "<answer>" * (MB10 // 8), "closing": "</answer>" * (MB10 // 9), "thinking": "</think>" * (MB10 // 8),
    "dots": "." * MB10 + "x", "stars": "*" * MB10, "angles": "<" * MB10 + "\n>>", "brackets": "[" * MB10, "fences": "```python\n" * (MB10 // 10),
    "ticks": "`" * MB10, "digits": r"\boxed{" + "9" * 90_000 + "}", "long box": r"\boxed{" + "1+" * MB10 + "1}", "answers": "Answer: 7 " * (MB10 // 10),
    "nul": "\0Answer: \0\\boxed{7\0}", "surrogate": "Answer: \ud800 \\boxed{\udfff7}", "right to left": "\u202e\\boxed{\u200f7}\u202c Answer: 7\u200f",
    "backslashes": r"\boxed{" + "\\" * MB10, "word": "\\boxed{" + "a-" * 40_000 + "}", "code": "```python\n" + "(" * 200_000 + "\n```"}
TASKS = {"math": {}, "boxed_math": {}, "deepscaler": {}, "dapo": {}, "exact": {}, "f1": {}, "gpqa": {}, "random": {},
         "code": {"tests": ASSERTS}, "reasoning_gym": {"source_dataset": "countdown", "entry": ENTRY["countdown"]},
         "ifbench": {IF: list(graders.INSTRUCTIONS), "kwargs": [  # all at once, with the arguments each has
             {key: {"keywords": ["a"], "forbidden_words": ["b"], "relation": "at least", "let_relation": "at least",
                    "capital_relation": "at least"}.get(key, 1 if re.match("n|N|small|min|max|.*freq", key) else "a")
              for key in check.__code__.co_varnames[1:check.__code__.co_argcount]} if hasattr(check, "__code__") else {}
             for check in graders.INSTRUCTIONS.values()]}}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_answer_costs_at_most_the_limit(rewarder, text):
    """A number, or an error that says it timed out; the loop and the next answer do not suffer. 14 s: limit, start, a slow machine."""
    for rm_type, metadata in TASKS.items():
        label, start_s = "B" if rm_type == "gpqa" else "7", time.monotonic()
        try:
            got = score(rewarder, make(HOSTILE[text], label, **metadata), rm_type=rm_type, reward_timeout_s=10.0, code_timeout_s=2.0)
            assert isinstance(got, (float, dict)), rm_type
        except RewardError as error:
            assert "timed out" in str(error) or "RecursionError" in str(error) or "surrogate" in str(error), (rm_type, str(error)[:500])
        assert time.monotonic() - start_s < 10 + 30, rm_type
    assert not Path("/tmp/nanoslime_was_here").exists()
    assert score(rewarder, make(r"\boxed{7}", "7"), rm_type="math") == 1.0


def test_no_grader_evaluates():
    """eval, exec, compile and their like are in confine.py alone, which runs where nothing can be harmed."""
    root = Path(graders.__file__).parent
    for name in ("graders.py", "rewards.py", "sandbox.py"):
        called = {node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "") for node in ast.walk(ast.parse((root / name).read_text()))
                  if isinstance(node, ast.Call)}
        assert not called & {"eval", "exec", "parse_expr", "sympify", "literal_eval", "system", "popen"}, name
        assert "compile" not in called or name == "rewards.py"
