"""
test_style.py: is it still an afternoon's reading? Line totals beside their budgets, who imports whom, settings that nobody reads.

    *.py, configs/*.py --ast--> lines, imports, cfg.<name>   against the tables BUDGET and MAY_IMPORT

Run:   pytest tests/test_style.py -s        prints the totals
"""
import ast
import pathlib
import tomllib

import pytest

from configs import base

ROOT = pathlib.Path(base.__file__).parent.parent
BUDGET = {                                   # lines
    "configs/base.py": 480, "configs/validate.py": 400, "configs/shapes.py": 150,
    "train.py": 400, "placement.py": 140, "memory.py": 60, "mend.py": 40, "plan.py": 330, "sizes.py": 120, "checks.py": 90,
    "faults.py": 60, "debug.py": 290, "logs.py": 200, "bench.py": 290,
    "sample.py": 140, "buffer.py": 500, "chat.py": 150, "rollout.py": 460, "rollout_metrics.py": 80, "fully_async.py": 200, "client.py": 340, "agent.py": 165,
    "hooks.py": 180, "hookdata.py": 180, "endpoint.py": 240, "completions.py": 120, "engines.py": 500,
    "rewards.py": 110, "workers.py": 170, "graders.py": 300, "sandbox.py": 150, "confine.py": 160,
    "algos.py": 480, "logprobs.py": 150, "model.py": 620, "layers.py": 375, "moe.py": 190, "actor.py": 450,
    "weights_sync.py": 400, "convert.py": 510, "checkpoints.py": 120, "fp8.py": 110, "families.py": 600,
    "cpu.py": 175, "gloo.py": 110, "ranks.py": 110}
RUN_FILE = 60                                # lines of any other configs/*.py
MAY_IMPORT = {                               # of our own modules; who is not here: none
    "base": "configs",
    "train": "actor algos buffer checks configs convert debug engines faults fully_async hookdata layers logs memory placement plan "
             "rewards rollout",
    "debug": "algos buffer checks configs rollout sample",
    "buffer": "chat hooks sample",
    "rollout": "agent algos buffer client configs engines hookdata hooks rewards rollout_metrics sample",
    "rollout_metrics": "sample",
    "fully_async": "hooks rollout sample",
    "client": "buffer configs engines sample",
    "agent": "chat sample workers",
    "hooks": "configs sample workers",
    "hookdata": "buffer chat hooks rewards sample",
    "endpoint": "agent chat client completions sample workers",
    "openai_agent_cpu": "configs endpoint",
    "rewards": "graders workers",
    "graders": "sandbox",
    "sandbox": "confine",
    "algos": "logprobs",
    "actor": "algos buffer configs convert engines layers model weights_sync",
    "model": "algos buffer convert families layers logprobs moe ranks",
    "layers": "logprobs moe",
    "moe": "logprobs",
    "ranks": "gloo logprobs",
    "weights_sync": "convert engines families fp8",
    "fp8": "families",
    "convert": "checkpoints families fp8",
    "checkpoints": "buffer configs engines families model",
    "memory": "plan",
    "plan": "configs families fp8 sizes",
    "sizes": "configs families",
    "bench": "algos buffer checks configs engines layers model train",
}
FILES = sorted([*ROOT.glob("*.py"), *(p for p in ROOT.glob("configs/*.py") if p.name != "__init__.py")])
OURS = {p.stem for p in ROOT.glob("*.py")} | {"configs"}
each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))


def tree(path):
    return ast.parse(path.read_text())


def imported(path) -> set[str]:
    """Top-level names of all imports, those inside functions too."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names & OURS


def test_line_budgets():
    over, total = [], 0
    print()
    for path in FILES:
        name = str(path.relative_to(ROOT))
        lines, budget = len(path.read_text().splitlines()), BUDGET.get(name, RUN_FILE if path.parent != ROOT else 0)
        total += lines
        print(f"{name:32} {lines:5} of {budget}")
        if lines > budget * 1.1:
            over.append(f"{name} has {lines} lines, the budget is {budget} (+10%)")
    print(f"{'all':32} {total:5} of {sum(BUDGET.values())}")
    assert not over, "; ".join(over) + ": cut, or talk about the budget in BUDGET"


def test_every_file_is_installed():
    installed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    assert sorted(installed) == sorted(path.stem for path in ROOT.glob("*.py")), "py-modules in pyproject.toml"


@each_file
def test_imports(path):
    allowed = set(MAY_IMPORT.get(path.stem, "configs" if path.parent != ROOT else "").split())
    extra = imported(path) - allowed
    assert not extra, f"{path.name} may import {sorted(allowed)} of ours, not {sorted(extra)}"


@each_file
def test_opens_with_a_docstring(path):
    doc = ast.get_docstring(tree(path))
    assert doc, f"{path.name} opens with no docstring"
    if path.parent == ROOT:
        assert doc.startswith(f"{path.name}: "), f"the docstring of {path.name} starts with its name and what it answers"


@each_file
def test_line_length(path):
    long = [(i, len(line)) for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) >= 128]
    assert not long, f"{path.name}: (line, characters) over 127: {long}"


def settings_read(path) -> set[str]:
    """x of each cfg.x, self.cfg.x and args.x."""
    reads = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if (isinstance(owner, ast.Name) and owner.id in ("cfg", "args")) or (isinstance(owner, ast.Attribute) and owner.attr == "cfg"):
                reads.add(node.attr)
    return reads


def test_every_setting_is_read():
    """A setting that only base.py knows does nothing, and the run would not tell."""
    files = [p for p in ROOT.glob("*.py") if p.stem not in ("bench", "convert", "families")]
    if not {"rollout", "actor", "train", "weights_sync"} <= {p.stem for p in files}:
        pytest.skip("rollout.py, actor.py, train.py or weights_sync.py is not written yet")
    unread = base.FIELDS.keys() - {"global_batch_size"} - set().union(*map(settings_read, files))
    assert not unread, f"nobody reads {sorted(unread)}; read them or delete them from configs/base.py"


def test_every_setting_that_is_read_exists():
    """cfg is a Config everywhere but in families.py, where it is a Hugging Face config; argparse's namespace is not ours."""
    known = base.FIELDS.keys() | {"run_file", "overrides"}       # and what Rollout.args adds for hooks:
    known |= {"tokenizer", "context_len", "end_ids", "generate", "workers", "rollout"}
    for path in ROOT.glob("*.py"):
        if path.stem not in ("convert", "families"):
            assert not settings_read(path) - known, f"{path.name} reads {sorted(settings_read(path) - known)}: no such setting"
