"""The Dockerfile as its linter reads it, and the promises it makes in words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_is_multi_stage_and_unprivileged() -> None:
    text = DOCKERFILE.read_text()
    assert len(re.findall(r"^FROM ", text, flags=re.MULTILINE)) == 2
    final = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001", final, flags=re.MULTILINE)
    for promise in ("HEALTHCHECK", "VOLUME /var/cache/plimsoll", "STOPSIGNAL SIGTERM"):
        assert promise in final


def test_its_health_does_not_hang_on_a_port() -> None:
    """The command line may name another than the environment."""
    (line,) = re.findall(r"^HEALTHCHECK .*$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert line.endswith('CMD ["plimsoll", "health"]')


def test_what_it_copies_exists() -> None:
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), flags=re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name
