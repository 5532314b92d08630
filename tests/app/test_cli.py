from __future__ import annotations

import subprocess
import sys

import pytest

from app import cli
from app.version import plimsoll_version
from model_runner.errors import DoesNotFit


def test_alone_it_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "plimsoll COMMAND" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert "bench" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"plimsoll {plimsoll_version()}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serv"], "unknown command 'serv'; did you mean serve?"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["bench", "--concurency", "1"], "did you mean --concurrency?"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert shown.err.startswith("plimsoll: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_start_that_fails_is_one_message_and_exit_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(settings: object) -> int:
        raise DoesNotFit("The weights need 16 GiB, and there are 8.")

    monkeypatch.setattr("app.serve.serve", refuse)
    monkeypatch.setattr("os.environ", {})
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "plimsoll: The weights need 16 GiB, and there are 8.\n"


def test_python_dash_m_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "app", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"plimsoll {plimsoll_version()}\n")


def test_the_help_of_serve_needs_neither_torch_nor_the_web_framework() -> None:
    script = (
        "import sys; from app import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'fastapi')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
