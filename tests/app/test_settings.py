from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.command_line import ENV_PREFIX, load_settings, options_table
from app.options import UsageError
from app.settings import OPTIONS, Settings
from app.tenant_file import read_tenants


def load(*argv: str, **environ: str) -> Settings:
    return load_settings(argv, environ)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_settings(argv, environ)
    return str(caught.value)


def test_defaults_serve_the_embedded_model_on_loopback() -> None:
    settings = load()
    assert settings == Settings()
    assert (settings.model, settings.served_model_name) == ("", "SmolLM2-135M-Instruct")
    assert (settings.host, settings.port) == ("127.0.0.1", 8000)
    assert settings.api_keys == ()


def test_the_command_line_comes_before_the_environment_and_that_before_the_default() -> None:
    assert load(PLIMSOLL_PORT="9000").port == 9000
    assert load("--port", "9001", PLIMSOLL_PORT="9000").port == 9001
    assert load("--port=9001").port == 9001


TENANTS = str(Path(__file__).with_name("tenants.toml"))

# One value of each option that differs from its default, and what becomes of it.
WRITTEN: dict[str, tuple[str, Any]] = {
    "model": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    "served_model_name": ("smol", "smol"),
    "dtype": ("float32", "float32"),
    "device": ("cuda:1", "cuda:1"),
    "max_model_len": ("auto", "auto"),
    "cache_dir": ("/var/cache/x", "/var/cache/x"),
    "num_threads": ("3", 3),
    "compile": ("off", "off"),
    "kv_cache_memory": ("512MiB", 2**29),
    "cpu_memory_utilization": ("0.25", 0.25),
    "gpu_memory_utilization": ("0.5", 0.5),
    "block_size": ("32", 32),
    "max_num_seqs": ("64", 64),
    "max_num_batched_tokens": ("2048", 2048),
    "target_itl_ms": ("50", 50.0),
    "admission": ("strict", "strict"),
    "overflow_risk": ("0.01", 0.01),
    "max_queue_requests": ("7", 7),
    "max_queue_seconds": ("5m", 300.0),
    "default_max_tokens": ("100", 100),
    "max_request_bytes": ("1MiB", 2**20),
    "max_prompts": ("4", 4),
    "max_concurrent_tokenizations": ("1", 1),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "max_connections": ("100", 100),
    "api_keys": ("a, b", ("a", "b")),
    "tenants": (TENANTS, read_tenants(TENANTS)),
    "tenant_header": ("X-Tenant", "x-tenant"),
    "max_tenant_labels": ("5", 5),
    "engine_step_timeout": ("5s", 5.0),
    "engine_start_timeout": ("20m", 1200.0),
    "shutdown_timeout": ("90", 90.0),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_a_flag_and_a_variable(option: Any) -> None:
    written, expected = WRITTEN[option.name]
    assert getattr(Settings(), option.name) != expected
    assert getattr(load(option.flag, written), option.name) == expected
    assert getattr(load(**{option.env(ENV_PREFIX): written}), option.name) == expected


def test_the_engine_is_asked_for_what_was_written() -> None:
    argv = [
        "--kv-cache-memory",
        "64MiB",
        "--max-model-len",
        "auto",
        "--dtype",
        "float32",
        "--max-num-seqs",
        "8",
    ]
    config = load(*argv).engine_config()
    assert config.kv_cache_memory_bytes == 64 * 2**20
    assert (config.max_model_len, config.max_model_len_auto) == (None, True)
    assert (config.dtype, config.max_num_seqs) == ("float32", 8)
    fixed = load("--max-model-len", "2048").engine_config()
    assert (fixed.max_model_len, fixed.max_model_len_auto) == (2048, False)


def test_the_door_is_asked_for_what_was_written() -> None:
    argv = ["--max-queue-requests", "5", "--max-queue-seconds", "2s", "--engine-step-timeout", "9"]
    policy = load(*argv).door_policy()
    assert (policy.max_queue_requests, policy.max_queue_seconds, policy.engine_step_timeout) == (5, 2.0, 9.0)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/models/tiny-q8.gguf", "tiny-q8"),
        ("models/deep/tiny.gguf", "tiny"),
    ],
)
def test_the_served_name_comes_from_the_model(model: str, name: str) -> None:
    assert load("--model", model).served_model_name == name


def test_a_directory_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    assert load("--model", f"{tmp_path}/my-model/").served_model_name == "my-model"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kv-cache-mem", "1GiB"], "did you mean --kv-cache-memory?"),
        (["--ctx-size", "4096"], "here it is called --max-model-len"),
        (["--tensor-parallel-size=2"], "unknown option --tensor-parallel-size"),
        (["SmolLM"], "unexpected 'SmolLM'; every value has an option before it"),
        (["--port"], "expected one argument"),
        (["--port", "http"], "--port: 'http' is not a whole number"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--port", "1", "--port", "2"], "given 2 times"),
        (["--dtype", "bfloat"], "did you mean bfloat16?"),
        (["--block-size", "24"], "write 16 or 32"),
        (["--kv-cache-memory", "8G"], "8GiB or 8GB?"),
        (["--kv-cache-memory", "0"], "must be more than nothing"),
        (["--max-model-len", "long"], "is not a whole number"),
        (["--gpu-memory-utilization", "90"], "from 0.01 to 0.99"),
        (["--device", "gpu"], "write auto, cpu, cuda or cuda:0"),
        (["--max-queue-seconds", "2d"], "write 30s, 5m"),
        (["--engine-step-timeout", "0"], "from 0.1s to 24h"),
        (["--model", " "], "must not be empty"),
        (["--tenant-header", "x tenant"], "'x tenant' can't be the header; write for example x-tenant"),
        (["--tenant-header", "Authorization"], "can't be the header"),
        (["--tenants", "/nowhere.toml"], "--tenants: the file of tenants can't be read"),
    ],
)
def test_what_is_wrong_is_refused_with_what_to_write(argv: list[str], says: str) -> None:
    assert says in refusal(*argv)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--kv-cache-memory", "1GiB", "--gpu-memory-utilization", "0.5"],
            "--kv-cache-memory 1GiB and --gpu-memory-utilization 0.5 both size the KV cache",
        ),
        (["--device", "cpu", "--gpu-memory-utilization", "0.5"], "write --cpu-memory-utilization"),
        (["--device", "cuda:0", "--cpu-memory-utilization", "0.5"], "write --gpu-memory-utilization"),
        (["--max-num-seqs", "1024"], "write --max-num-seqs 512 or --max-num-batched-tokens 1024"),
        (["--max-num-batched-tokens", "128"], "write --max-num-seqs 128 or --max-num-batched-tokens 256"),
    ],
)
def test_contradictions_are_refused_with_what_to_write(argv: list[str], says: str) -> None:
    assert says in refusal(*argv)


def test_a_contradiction_names_where_each_side_was_written() -> None:
    said = refusal("--kv-cache-memory", "1GiB", PLIMSOLL_GPU_MEMORY_UTILIZATION="0.5")
    assert "--kv-cache-memory 1GiB and PLIMSOLL_GPU_MEMORY_UTILIZATION=0.5" in said


def test_unknown_variables_are_refused() -> None:
    assert "did you mean PLIMSOLL_KV_CACHE_MEMORY?" in refusal(PLIMSOLL_KV_CACHE_MEMROY="1GiB")
    assert "PLIMSOLL_PORT: 'x' is not" in refusal(PLIMSOLL_PORT="x")


def test_empty_variables_and_others_names_are_left_alone() -> None:
    assert load(PLIMSOLL_MODEL="", PATH="/bin", VLLM_PORT="x") == Settings()


def test_what_kubernetes_says_of_a_service_named_plimsoll_is_not_for_us() -> None:
    links = {
        "PLIMSOLL_PORT": "tcp://10.0.0.1:8000",
        "PLIMSOLL_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PLIMSOLL_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PLIMSOLL_SERVICE_HOST": "10.0.0.1",
        "PLIMSOLL_SERVICE_PORT_HTTP": "8000",
        "PLIMSOLL_BLUE_SERVICE_HOST": "10.0.0.2",
        "PLIMSOLL_BLUE_SERVICE_PORT": "8000",
        "PLIMSOLL_BLUE_PORT": "tcp://10.0.0.2:8000",
        "PLIMSOLL_BLUE_PORT_8000_TCP": "tcp://10.0.0.2:8000",
        "PLIMSOLL_BLUE_PORT_8000_TCP_ADDR": "10.0.0.2",
    }
    assert load(**links) == Settings()


def test_keys_from_flags_files_and_the_environment(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    assert load("--api-key", f"@{keys}", "--api-key", "three,four").api_keys == (
        "one",
        "two",
        "three",
        "four",
    )
    assert load(PLIMSOLL_API_KEY="a,b").api_keys == ("a", "b")
    assert "can't be read" in refusal("--api-key", f"@{tmp_path}/none")
    assert "holds no key" in refusal("--api-key", ",")


def test_keys_are_never_shown() -> None:
    settings = load("--api-key", "sesame")
    assert "sesame" not in repr(settings)
    assert "sesame" not in str(settings.engine_config())
    said = refusal("--api-key", "sesame", "--kv-cache-memory", "1GiB", "--cpu-memory-utilization", "0.3")
    assert "sesame" not in said


def test_a_key_of_either_kind_closes_the_server() -> None:
    assert not load().has_keys
    assert load("--api-key", "sesame").has_keys
    assert load("--tenants", TENANTS).has_keys


def test_a_tenant_that_nobody_can_be_is_refused(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.json"
    tenants.write_text('{"tenants": [{"name": "default"}, {"name": "key-2"}]}')
    assert "nobody can be tenant 'key-2'" in refusal("--tenants", str(tenants), "--api-key", "one")
    assert load("--tenants", str(tenants), "--api-key", "one,two").tenants
    assert load("--tenants", str(tenants), "--tenant-header", "x-tenant").tenants


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load("--help")
    assert left.value.code == 0
    shown = capsys.readouterr().out
    words = re.sub(r"\s+", " ", shown)
    for option in OPTIONS:
        assert f"{option.flag} {option.metavar}" in words
        assert option.env(ENV_PREFIX) in words
        assert re.sub(r"\s+", " ", option.help) in words
    assert "examples:" in shown
    assert max(len(line) for line in shown.splitlines()) <= 110


def test_the_examples_of_help_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.txt").write_text("k\n")
    from app.command_line import _EPILOG

    examples = [line.split()[2:] for line in _EPILOG.splitlines() if line.startswith("  plimsoll serve")]
    assert len(examples) == 2
    for words in examples:
        load(*words)


def test_the_table_holds_every_option() -> None:
    rows = options_table().splitlines()[2:]
    assert [row.split("`")[1].split()[0] for row in rows] == [option.flag for option in OPTIONS]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
