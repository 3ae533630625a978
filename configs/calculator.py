"""
The world of the calculator agent: its tool, its questions, and how a conversation is graded.

    37*45 --model--> <tool_call> 37*45 </tool_call> --calculator--> 1665 --model--> 1665

Test:  pytest tests/test_agent.py
Knows nothing about: who teaches (calculator_sft.py), what is trained (calculator_cpu.py).
"""
import ast
import operator
import random

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """
    Works out an expression.

    Args:
        expression: whole numbers with + - * and parentheses, such as 37*45
    """
    def value(node):                         # a tree that we walk: eval() would run whatever the model writes
        match node:
            case ast.Expression(body=inner):
                return value(inner)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.Constant(value=number) if type(number) is int:
                return number
        raise ValueError("only whole numbers, + - * and parentheses")
    return str(value(ast.parse(expression.strip(), mode="eval")))


def questions(held_out: bool) -> list[dict]:
    """Every a+b, a-b, a*b of two-digit numbers in a fixed random order; every 100th is kept for evaluation."""
    texts = [f"{a}{sign}{b}" for a in range(10, 100) for b in range(10, 100) for sign in "+-*"]
    random.Random(0).shuffle(texts)
    return [{"input": text, "label": calculator(text)} for i, text in enumerate(texts) if (i % 100 == 0) == held_out]


async def right(args, sample) -> float:
    """A custom_rm: is what the model said last the label, digit by digit?"""
    last = sample.turns[-1]
    return float(last["role"] == "assistant" and "tool_calls" not in last and last["content"] == sample.label)


async def called(args, sample) -> float:
    """A custom_rm for evaluation: did it call the calculator?"""
    return float(any(turn["role"] == "tool" for turn in sample.turns))
