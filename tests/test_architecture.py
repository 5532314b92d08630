"""The shape of the house, held by a walk over every import.

A module may import only from floors below its own. Heavy or foreign packages are confined to the rooms that
exist for them. Imports under `if TYPE_CHECKING:` count too: a type is a dependency of the reader.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the roof down. The first prefix that matches a module is its floor: exceptions stand before the rule.
FLOORS: list[tuple[str, int]] = [
    ("app.__main__", 99),
    ("app.cli", 98),
    ("app.serve", 96),
    ("app.calibrate", 97),
    ("app.bench", 96),
    ("app.plan.command", 96),
    ("app.plan.plot", 95),
    ("app.plan.report", 94),
    ("app.plan.memory", 94),
    ("app.plan.options", 93),
    ("app.plan.cards", 92),
    ("app.replay.command", 96),
    ("app.replay.standard", 95),
    ("app.replay.report", 95),
    ("app.replay.plot", 95),
    ("app.replay.options", 94),
    ("app.replay.presets", 93),
    ("app.replay.jobs", 92),
    ("app.replay.traces", 91),
    ("app.replay", 90),
    ("app.main", 90),
    ("app.routes", 85),
    ("app.middleware", 82),
    ("app.streaming", 80),
    ("app.responses", 78),
    ("app.assembly", 76),
    ("app.validation", 74),
    ("app.protocol", 72),
    ("app.connection", 71),
    ("app.errors", 70),
    ("app.preparation", 68),
    ("app.loading", 66),
    ("app.health", 66),
    ("app.leaving", 66),
    ("app.metrics", 66),
    ("app.levels", 65),
    ("app.tenancy", 64),
    ("app.command_line", 64),
    ("app.logs", 64),
    ("app.picture", 62),
    ("app.settings", 62),
    ("app.capacity", 62),
    ("app", 60),
    ("model_runner.build", 58),
    ("model_runner.describe", 58),
    ("model_runner.model_table", 58),
    ("model_runner.engine_process", 56),
    ("model_runner.async_engine", 56),
    ("model_runner.request_stream", 54),
    ("model_runner.door", 54),
    ("model_runner.supervisor", 54),
    ("model_runner.tokenizer", 53),
    ("model_runner.worker", 54),
    ("model_runner.model_files", 52),
    ("model_runner.replay.figures", 54),
    ("model_runner.replay.simulation", 53),
    ("model_runner.replay.fit", 50),
    ("model_runner.replay.routing", 52),
    ("model_runner.replay.replica", 51),
    ("model_runner.replay", 49),
    ("model_runner.engine", 50),
    ("model_runner.core.door_view", 49),
    ("model_runner.core.dispatcher", 48),
    ("model_runner.core.quotes", 47),
    ("model_runner.core.live_request", 46),
    ("model_runner.core.refusals", 46),
    ("model_runner.core.admission", 44),
    ("model_runner.core.scheduler", 44),
    ("model_runner.core.growth", 43),
    ("model_runner.core.step_batch", 43),
    ("model_runner.core.waits", 43),
    ("model_runner.core.obstacles", 43),
    ("model_runner.core.ledger", 42),
    ("model_runner.core.tenant_shares", 41),
    ("model_runner.core.policy", 41),
    ("model_runner.core.outlook", 40),
    ("model_runner.core.lengths", 39),
    ("model_runner.core.forecast", 41),
    ("model_runner.core.request", 42),
    ("model_runner.core.block_pool", 40),
    ("model_runner.core.fair_queue", 38),
    ("model_runner.core.capacity", 33),
    ("model_runner.core.weights", 22),
    ("model_runner.core.packing", 22),
    ("model_runner.core.config_checks", 22),
    ("model_runner.core.block_layout", 32),
    ("model_runner.core.kv_spec", 30),
    ("model_runner.core.config_layers", 28),
    ("model_runner.core.config_states", 26),
    ("model_runner.core.config_fields", 24),
    ("model_runner.core.layer_cache", 22),
    ("model_runner.core.kv_dtypes", 22),
    ("model_runner.core", 36),  # pace, output, tenants
    ("model_runner.messages", 34),
    ("model_runner", 10),  # config, types, errors
]

# Where a process is put together: the engine's, the one that describes a model to a planner, and the one that
# makes a table of the documentation.
ROOTS = ("model_runner.build", "model_runner.describe", "model_runner.model_table")

# package -> the only rooms that may import it
CONFINED: dict[str, tuple[str, ...]] = {
    "torch": ("model_runner.worker", "model_runner.build"),
    "transformers": ("model_runner.worker",),
    "safetensors": ("model_runner.worker",),
    "fastapi": ("app",),
    "starlette": ("app",),
    "uvicorn": ("app",),
    "pydantic": ("app",),
    "prometheus_client": ("app",),
    "matplotlib": ("app.picture",),
    "jinja2": ("model_runner.tokenizer",),
    "tokenizers": ("model_runner.tokenizer",),
    "zmq": ("model_runner",),
    "argparse": ("app", "model_runner.engine_process", "model_runner.describe"),
}

NOT_IN_CORE = {
    "torch", "transformers", "fastapi", "pydantic", "asyncio", "threading", "socket", "time", "datetime",
    "os", "random", "subprocess", "multiprocessing", "concurrent", "zmq", "logging", "pathlib", "sys",
    "secrets",
}  # fmt: skip

# The shared words live on the ground floor; core may use these and itself, nothing else of the project.
CORE_MAY_USE = (
    *("model_runner.core", "model_runner.types", "model_runner.errors", "model_runner.messages"),
    "model_runner.sizes",
)


def modules() -> Iterator[tuple[str, Path]]:
    for top in ("app", "model_runner"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path, module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write imports in full"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def floor(module: str) -> int:
    return next(level for prefix, level in FLOORS if within(module, prefix))


def room(module: str) -> str:
    return next(prefix for prefix, _ in FLOORS if within(module, prefix))


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_imports_only_from_below(module: str, path: Path) -> None:
    ours = {name for name, _ in modules()}
    for target in imports(path, module):
        if target in ours and room(target) != room(module):
            assert floor(target) < floor(module), f"{module} (floor {floor(module)}) imports {target}"


@pytest.mark.parametrize(("module", "path"), [pytest.param(m, p, id=m) for m, p in modules()])
def test_foreign_packages_stay_in_their_rooms(module: str, path: Path) -> None:
    for target in imports(path, module):
        rooms = CONFINED.get(target.split(".")[0])
        if rooms:
            assert any(within(module, room) for room in rooms), f"{module} imports {target}"


def test_core_is_pure() -> None:
    for module, path in modules():
        if not within(module, "model_runner.core"):
            continue
        for target in imports(path, module):
            assert target.split(".")[0] not in NOT_IN_CORE, f"{module} imports {target}"
            if within(target, "model_runner") or within(target, "app"):
                assert any(within(target, allowed) for allowed in CORE_MAY_USE), f"{module} imports {target}"


def test_only_the_composition_roots_know_the_worker() -> None:
    for module, path in modules():
        if within(module, "model_runner.worker") or module in ROOTS:
            continue
        for target in imports(path, module):
            assert not within(target, "model_runner.worker"), f"{module} imports {target}"


def test_the_api_process_never_loads_torch() -> None:
    """What the walk can't see: a library that pulls it in."""
    code = (
        "import sys, app.cli, app.serve, app.main, model_runner.async_engine, model_runner.tokenizer\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, model_runner; print(sum(name.startswith('model_runner') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "1"


def test_files_and_functions_stay_readable() -> None:
    too_long = []
    for top in ("app", "model_runner", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            text = path.read_text()
            if text.count("\n") > 420:
                too_long.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    lines = (node.end_lineno or node.lineno) - node.lineno + 1
                    if lines > 71:
                        too_long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert not too_long, "\n".join(too_long)
