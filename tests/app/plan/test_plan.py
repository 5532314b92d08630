"""`plimsoll plan` from the command line to its answer, on real configurations."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from app.cli import main
from app.plan import command, plot
from app.plan.options import KV_DTYPES
from model_runner.core.kv_dtypes import KV_DTYPES as PRICED

GIB = 1 << 30
DOCS = Path(__file__).parents[3] / "docs" / "plan.md"

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_70B_PARAMETERS = 70_553_706_496  # as its model card's safetensors say
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "vocab_size": 129280,
}


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--format", "json", *words]) == 0
    answered: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answered


def test_a_70b_model_on_four_cards(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", config_file(LLAMA_70B), "--device-memory", "h100", "--tensor-parallel", "4"]
    plan = answer(capsys, *words, "--context", "8K,128K", "--batch", "1,64")
    assert plan["weights_parameters"] == LLAMA_70B_PARAMETERS
    assert plan["weights_bytes"] == LLAMA_70B_PARAMETERS * 2 // 4
    budget = int(81559 * 2**20 * 0.9) - GIB - plan["weights_bytes"]
    assert plan["kv_budget_bytes"] == budget
    assert plan["growing_bytes_per_token"] == 2 * 80 * 2 * 128 * 2  # two heads on each device
    assert plan["max_sequences"] == {"8192": budget // (8191 * 81920), "131072": budget // (131071 * 81920)}
    one = plan["batches"][0]
    assert one["longest_context"] == 131072
    embedding = 128256 * 8192 * 2 // 4  # of which a step reads one row
    read = plan["weights_bytes"] - embedding + 131071 * 81920
    assert one["step_seconds"] == pytest.approx(read / 3.35e12)
    assert plan["allocated"]["served"] is False


def test_the_embedded_model_from_its_header(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = answer(capsys, "--device-memory", "2GiB", "--cache-dir", str(tmp_path), "--context", "1000")
    assert plan["weights_counted_from"] == "gguf"
    assert plan["weights_parameters"] == 134_515_008
    assert plan["growing_bytes_per_token"] == 23_040
    assert plan["allocated"] == {
        "served": True,
        "block_size": 16,
        "block_bytes": 16 * 23_040,
        "blocks": plan["kv_budget_bytes"] // (16 * 23_040),
        "groups": 1,
    }
    at = plan["contexts"][0]
    assert (at["sequence_bytes"], at["allocated_sequence_bytes"]) == (999 * 23_040, 63 * 16 * 23_040)
    assert at["step_seconds"] is None  # no bandwidth was named


def test_latents_and_experts(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", config_file(DEEPSEEK_V3), "--device-memory", "H200", "--tensor-parallel", "16"]
    plan = answer(capsys, *words, "--batch", "1,4096")
    assert plan["growing_bytes_per_token"] == 70_272  # every device keeps every latent
    assert [group["kind"] for group in plan["groups"]] == ["latent"]
    assert 670e9 < plan["weights_parameters"] < 673e9
    bandwidth = plan["memory_bandwidth_bytes_per_second"]
    one, many = plan["batches"]
    read_by_one = one["step_seconds"] * bandwidth - (one["longest_context"] - 1) * 70_272
    read_by_many = many["step_seconds"] * bandwidth - 4096 * (many["longest_context"] - 1) * 70_272
    assert read_by_one < 0.1 * plan["weights_bytes"]  # 8 of 256 experts, and what is no expert's
    embedding = 129280 * 7168 * 2 // 16
    assert read_by_many == pytest.approx(plan["weights_bytes"] - embedding)


def test_weights_are_read_off_a_safetensors_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        **LLAMA_70B,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    header = json.dumps(
        {
            "model.embed_tokens.weight": {"dtype": "BF16", "shape": [32, 64], "data_offsets": [0, 4096]},
            "lm_head.weight": {"dtype": "F8_E4M3", "shape": [32, 64], "data_offsets": [4096, 6144]},
        }
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(6144))
    words = ["--model", str(tmp_path), "--device-memory", "4GiB"]
    plan = answer(capsys, *words)
    assert (plan["weights_counted_from"], plan["weights_parameters"]) == ("safetensors", 4096)
    assert (plan["weights_bytes"], plan["weights_dtype"]) == (6144, "stored")
    assert answer(capsys, *words, "--dtype", "bfloat16")["weights_bytes"] == 8192


def test_a_quantised_cache_counts_its_scales(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", config_file(LLAMA_70B), "--device-memory", "256GiB", "--kv-dtype", "int8"]
    assert answer(capsys, *words)["growing_bytes_per_token"] == 2 * 80 * 8 * (128 + 4)


def test_the_table_says_both_lists(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        main(
            ["plan", "--device-memory", "4GiB", "--memory-bandwidth", "25GB/s", "--cache-dir", str(tmp_path)]
        )
        == 0
    )
    table = capsys.readouterr().out
    assert "23,040 bytes for as long as it grows" in table
    assert "What it needs, by layer group" in table
    assert "Plimsoll allocates" in table
    assert "tokens/s at most" in table


def test_without_room_it_says_how_many_devices_would_do(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", config_file(LLAMA_70B), "--device-memory", "H100"]) == 1
    assert "the weights take 131.42 GiB" in (message := capsys.readouterr().err)
    assert "--tensor-parallel 2" in message


def test_a_division_that_cannot_be_names_the_numbers_that_can(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", config_file(LLAMA_70B), "--device-memory", "H100", "--tensor-parallel"]
    assert main(["plan", *words, "24"]) == 1
    assert "num_attention_heads is 64" in (message := capsys.readouterr().err)
    assert "16 and 32 do" in message
    assert main(["plan", *words, "8"]) == 0
    assert "does not serve the model type" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--device-memory", "H101"], "did you mean H100"),
        (["--device-memory", "80GiB", "--context", "4k,lots"], "'lots' is not a number of tokens"),
        (["--device-memory", "A100"], "there is more than one A100; write A100-40GB or A100-80GB"),
        (["--device-memory", "H100-40GB"], "or a card's name"),
        (["--device-memory", "9" * 38 + "GiB"], "out of range"),
        (["--device-memory", "80GiB", "--memory-bandwidth", "0"], "more than nothing"),
        (["--device-memory", "80GiB", "--context", "4KK"], "'4KK' is not a number of tokens"),
        (["--device-memory", "80GiB", "--context", "٤٠٩٦"], "is not a number of tokens"),
        (["--device-memory", "80GiB", "--context", "9" * 38], "at most 4096M tokens"),
        (["--device-memory", "80GiB", "--context", "0"], "is not a number of tokens"),
        (["--device-memory", "80GiB", "--batch", "9" * 38], "out of range"),
        (["--device-memory", "80GiB", "--batch", "٨"], "is not a whole number"),
        (["--device-memory", "80GiB", "--plot", "line.pdf"], r".png, .svg, .html"),
        (["--device-memory", "80GiB", "--memory-bandwidth", "3TB/h"], "write 3.35TB/s"),
        (["--device-memory", "80GiB", "--contexts", "4096"], "did you mean --context"),
    ],
)
def test_what_is_asked_wrongly_is_told_what_to_write(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "no_such_model"}, "no model configuration that transformers can read"),
        ({"model_type": "t5"}, "no causal language model for 't5'"),
        ({"model_type": "bart"}, "is_encoder_decoder"),
        ({**LLAMA_70B, "max_position_embeddings": -5}, "max_position_embeddings: it is -5"),
        ("{", "no model configuration that transformers can read"),
        ("[1]", "it holds a list, not an object"),
        ({**LLAMA_70B, "quantization_config": "awq"}, "its quantization_config is a text, not an object"),
        ({**LLAMA_70B, "head_dim": 0}, "its head_dim is 0"),
        ({**LLAMA_70B, "model_type": None}, "its model_type is missing"),
        ({**LLAMA_70B, "vocab_size": 10**30}, "its vocab_size is 1e+30"),
        ({**LLAMA_70B, "num_hidden_layers": 10**7}, "its num_hidden_layers is 10000000"),
        ({**LLAMA_70B, "layer_types": 5}, "its layer_types is a number, not a list"),
        ({**LLAMA_70B, "torch_dtype": "float7"}, "its torch_dtype is 'float7'"),
        ({"model_type": "gemma3", "text_config": {"head_dim": -1}}, "its text_config.head_dim is -1"),
    ],
)
def test_what_cannot_be_planned_says_why(
    config: dict[str, Any] | str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    assert main(["plan", "--model", str(path), "--device-memory", "80GiB"]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")]
)
def test_the_load_line_is_drawn(
    suffix: str, begins: bytes, config_file: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    picture = tmp_path / f"line.{suffix}"
    words = ["--model", config_file(LLAMA_70B), "--device-memory", "H200", "--tensor-parallel", "2"]
    assert main(["plan", *words, "--plot", str(picture)]) == 0
    drawn = picture.read_bytes()
    assert drawn.startswith(begins)
    if suffix != "png":
        text = drawn.decode()
        assert text.count("<path") > 20
        assert "<img" not in text  # nothing is fetched
        assert "<script" not in text


def test_what_a_size_is_called_is_said_once(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    for size in ("400GiB", "409600MiB"):
        assert main(["plan", "--model", config_file(LLAMA_70B), "--device-memory", size]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("device")]
        assert line.split(maxsplit=1)[1].startswith("400 GiB;")


def test_on_the_picture_marks_are_whole_sequences_and_both_lines_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Figure] = []
    fill = plot._fill
    monkeypatch.setattr(plot, "_fill", lambda figure, report: (drawn.append(figure), fill(figure, report)))
    words = ["--device-memory", "4GiB", "--cache-dir", str(tmp_path), "--context", "3K,8K"]
    assert main(["plan", *words, "--plot", str(tmp_path / "line.png")]) == 0
    lines = drawn[0].axes[0].get_lines()
    marks = [line for line in lines if line.get_marker() == "o"]
    assert len(marks) == 2
    assert all(float(mark.get_ydata()[0]).is_integer() for mark in marks)
    by_label = {str(line.get_label()): line for line in lines}
    ours = by_label["as Plimsoll allocates"]
    load = by_label["the load line: memory is full"]
    assert ours.get_zorder() > load.get_zorder()
    assert ours.get_linewidth() < load.get_linewidth() / 2
    assert ours.get_color() != load.get_color()


def test_the_element_types_offered_are_those_that_are_priced() -> None:
    assert KV_DTYPES[1:] == tuple(PRICED)


def test_every_key_is_documented(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    documented = DOCS.read_text()
    plan = answer(capsys, "--device-memory", "2GiB", "--cache-dir", str(tmp_path))
    keys = set(plan) | set(plan["groups"][0]) | set(plan["contexts"][0]) | set(plan["batches"][0])
    keys |= set(plan["allocated"]) | {"reason"}
    assert sorted(key for key in keys if f"`{key}`" not in documented) == []


def test_a_description_that_fails_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command.sys, "executable", "/bin/false")
    with pytest.raises(command.StartupError, match="exit code 1"):
        command.describe("", str(tmp_path))


def test_what_is_drawn_is_said_on_it(
    config_file: Callable[[dict[str, Any]], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "line.html"
    words = ["--model", config_file(LLAMA_70B), "--device-memory", "H100", "--tensor-parallel", "4"]
    plan = answer(capsys, *words, "--context", "4K", "--plot", str(picture))
    page = picture.read_text()
    assert "config.json on 4 × H100" in page
    for label in ("the load line: memory is full", "sequences in the batch", "tokens per second, at most"):
        assert f"<!-- {label} -->" in page  # matplotlib draws text as outlines, and says it beside them
    assert f"<!-- {plan['max_sequences']['4096']} -->" in page
    assert "The largest batch at each context" in page  # the figures, to be copied


def test_a_picture_that_cannot_be_written(
    config_file: Callable[[dict[str, Any]], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", config_file(LLAMA_70B), "--device-memory", "H100", "--tensor-parallel", "4"]
    assert main(["plan", *words, "--plot", str(tmp_path / "no" / "line.png")]) == 2
    assert "can't be written" in capsys.readouterr().err


def test_a_state_space_model_is_as_dear_at_any_length(
    config_file: Callable[[dict[str, Any]], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mamba = {"model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560, "state_size": 16}
    words = ["--model", config_file(mamba), "--device-memory", "L4", "--context", "1,1M"]
    picture = tmp_path / "line.html"
    plan = answer(capsys, *words, "--plot", str(picture))
    assert plan["model_context"] is None
    assert "(the model states no longest)" in (page := picture.read_text())
    assert "The configuration states no longest context; 131,072 tokens are planned." in page
    assert "the model states none; planned up to 131,072" in page
    assert plan["fixed_bytes_per_sequence"] == 22_937_600
    assert plan["growing_bytes_per_token"] == 0
    assert len(set(plan["max_sequences"].values())) == 1
    assert "recurrent state" in plan["allocated"]["reason"]


def test_weights_of_an_unknown_number_format_are_said_to_be(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**LLAMA_70B, "quantization_config": {"quant_method": "hqq"}}
    words = ["--model", config_file(config), "--device-memory", "256GiB"]
    plan = answer(capsys, *words)
    assert (plan["weights_quantisation"], plan["weights_dtype"]) == ("hqq", "bfloat16")
    assert plan["weights_packing"] is None
    assert "they are quantised (hqq)" in plan["allocated"]["reason"]
    assert main(["plan", *words]) == 0
    assert "counted in bfloat16" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--model", words[1], "--device-memory", "H100"]) == 1
    assert "counted in bfloat16" in capsys.readouterr().err


def test_packed_weights_are_counted_as_the_configuration_tells(
    config_file: Callable[[dict[str, Any]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    model = config_file({**LLAMA_70B, "quantization_config": awq})
    plan = answer(capsys, "--model", model, "--device-memory", "80GiB")
    embeddings = 2 * 128256 * 8192 * 2
    assert plan["weights_dtype"] == "packed"
    assert plan["weights_packing"].startswith("4 bits a weight")
    assert plan["weights_bytes"] == pytest.approx(embeddings + 68.4524e9 * (0.5 + 2.5 / 128), rel=1e-3)
    assert main(["plan", "--model", model, "--device-memory", "80GiB"]) == 0
    assert "counted at 4 bits a weight" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--model", model, "--device-memory", "L4"]) == 1
    assert "counted at 4 bits a weight" in capsys.readouterr().err
    asked = answer(capsys, "--model", model, "--device-memory", "256GiB", "--dtype", "bfloat16")
    assert asked["weights_bytes"] == 2 * LLAMA_70B_PARAMETERS
