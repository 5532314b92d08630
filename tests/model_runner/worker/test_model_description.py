"""What a model is, from every place where its files may lie. The weights are zeros behind a header."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from model_runner.core.kv_spec import KVCacheSpec
from model_runner.errors import ModelNotPriced, ModelNotServable, StartupError
from model_runner.worker.model_config import resolve
from model_runner.worker.model_description import describe
from model_runner.worker.weight_parts import Part, parts

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 32,
}
EMBEDDING = 32 * 64
# Embedding and output; four attention matrices; three of the feed-forward; three norms.
PARAMETERS = 2 * EMBEDDING + 4 * 64 * 64 + 3 * 64 * 128 + 3 * 64


def safetensors(tensors: dict[str, tuple[str, list[int], int]]) -> bytes:
    """{name: (dtype, shape, bytes)} as a whole file of zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


STORED = safetensors(
    {
        "model.embed_tokens.weight": ("BF16", [32, 64], 4096),
        "lm_head.weight": ("BF16", [32, 64], 4096),
        "model.layers.0.mlp.experts.0.up_proj.weight": ("F8_E4M3", [8, 4], 32),
    }
)


def write(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def weights_of(model: Path | str) -> dict[str, Any]:
    weights: dict[str, Any] = describe(str(model), "unused")["weights"]
    return weights


def test_a_config_alone_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path) / "config.json"
    weights = weights_of(path)
    assert (weights["source"], weights["parameters"], weights["stored_bytes"]) == ("config", PARAMETERS, None)
    assert (weights["unread_parameters"], weights["unread"]) == (EMBEDDING, ("input embedding",))
    assert weights_of(tmp_path) == weights  # the folder of it, too


def test_counting_does_not_write_into_the_configuration(tmp_path: Path) -> None:
    assert describe(str(write(tmp_path)), "unused")["config"].get("dtype") is None
    write(tmp_path, torch_dtype="float16")
    assert describe(str(tmp_path), "unused")["config"]["dtype"] == "float16"


def test_a_tied_embedding_is_read_whole(tmp_path: Path) -> None:
    weights = weights_of(write(tmp_path, tie_word_embeddings=True))
    assert (weights["parameters"], weights["unread_parameters"]) == (PARAMETERS - EMBEDDING, 0)


def test_a_tied_output_that_the_files_hold_once_more_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(STORED)
    tied = weights_of(write(tmp_path, tie_word_embeddings=True))
    assert (tied["stored_bytes"], tied["parameters"]) == (4096 + 32, EMBEDDING + 32)
    assert (tied["stored_unread_bytes"], tied["unread"]) == (0, ())
    assert weights_of(write(tmp_path, tie_word_embeddings=False))["stored_bytes"] == 2 * 4096 + 32


def test_the_type_of_a_nested_decoder_is_the_wholes_where_it_says_none(tmp_path: Path) -> None:
    whole = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    path = tmp_path / "config.json"
    for text, expected in (({}, "float32"), ({"dtype": "float16"}, "float16")):
        fields = {**whole, "torch_dtype": "float32", "text_config": {**CONFIG, **text}}
        path.write_text(json.dumps(fields))
        assert describe(str(path), "unused")["config"]["dtype"] == expected


def test_headers_tell_bytes_and_parts_without_a_tokenizer(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").write_bytes(STORED)
    weights = weights_of(tmp_path)
    assert (weights["source"], weights["parameters"]) == ("safetensors", 2 * EMBEDDING + 32)
    assert (weights["stored_bytes"], weights["stored_expert_bytes"]) == (8224, 32)
    assert weights["stored_unread_bytes"] == 4096


def test_an_index_names_its_files_and_others_are_not_counted(tmp_path: Path) -> None:
    (write(tmp_path) / "part.safetensors").write_bytes(STORED)
    (tmp_path / "consolidated.safetensors").write_bytes(STORED)  # the same weights in another format
    index = {"metadata": {"total_size": 1}, "weight_map": {"lm_head.weight": "part.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_of(tmp_path)["stored_bytes"] == 8224


def test_a_copy_of_the_weights_under_another_name_is_not_counted(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(STORED)
    assert weights_of(tmp_path)["stored_bytes"] == 8224  # they are all there is
    other = safetensors({"lm_head.weight": ("F32", [32, 64], 8192)})
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(other)
    assert weights_of(tmp_path)["stored_bytes"] == 8192
    (tmp_path / "model.safetensors").write_bytes(STORED)  # which transformers prefers to shards
    assert weights_of(tmp_path)["stored_bytes"] == 8224


def test_half_a_download_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    (write(tmp_path) / "model-00001-of-00002.safetensors").write_bytes(STORED)
    weights = weights_of(tmp_path)
    assert (weights["source"], weights["parameters"]) == ("config", PARAMETERS)
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(safetensors({"norm": ("BF16", [64], 128)}))
    assert weights_of(tmp_path)["stored_bytes"] == 2 * 4096 + 32 + 128


def test_an_index_alone_tells_the_total(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 123456}, "weight_map": {"lm_head.weight": "part.safetensors"}}
    (write(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = weights_of(tmp_path)
    assert (weights["stored_bytes"], weights["stored_expert_bytes"]) == (123456, None)
    assert weights["parameters"] == PARAMETERS


def test_packed_elements_are_not_taken_for_parameters(tmp_path: Path) -> None:
    folder = write(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    packed = {"model.layers.0.self_attn.q_proj.qweight": ("I32", [8, 64], 2048)}
    (folder / "model.safetensors").write_bytes(safetensors(packed))
    weights = weights_of(folder)
    assert (weights["stored_bytes"], weights["parameters"]) == (2048, PARAMETERS)
    assert weights["quantisation"] == "gptq"


def test_without_files_packed_weights_are_counted_as_the_configuration_tells(tmp_path: Path) -> None:
    weights = weights_of(write(tmp_path, quantization_config={"quant_method": "fp8"}))
    linear = 4 * 64 * 64 + 3 * 64 * 128
    assert (weights["parameters"], weights["packed_parameters"]) == (PARAMETERS, linear)
    assert weights["packed_bytes"] == linear + 7 * 4  # and a scale of each
    assert weights["packing"] == "1 byte a weight"
    other = weights_of(write(tmp_path, quantization_config={"quant_method": "hqq"}))
    assert (other["packing"], other["packed_parameters"], other["quantisation"]) == (None, 0, "hqq")


def test_the_experts_of_gpt_oss_take_what_its_files_do(tmp_path: Path) -> None:
    quantisation = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": quantisation}))
    weights = weights_of(path)  # the class's defaults are gpt-oss-120b's
    rest = 2 * (weights["parameters"] - weights["packed_parameters"])
    assert rest + weights["packed_bytes"] == 65_248_815_744  # as the index of its files has it
    assert weights["packed_bytes"] == weights["packed_expert_bytes"]


TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def test_towers_and_looked_up_tables_are_held_and_not_read(tmp_path: Path) -> None:
    text = {**CONFIG, "model_type": "gemma3_text", "head_dim": 8}
    path = tmp_path / "config.json"
    vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **TOWER}
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": vision}))
    weights = weights_of(path)
    path.write_text(json.dumps(text))
    alone = weights_of(path)
    assert (weights["unread"], weights["uncounted"]) == (("towers",), ())
    assert weights["parameters"] - alone["parameters"] == weights["unread_parameters"] > 0
    assert alone["unread"] == ()  # its embedding is the output's too


def test_a_tower_that_cannot_be_made_is_said_to_be_uncounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model_runner.worker.model_description._WHOLE", ())
    text = {**CONFIG, "model_type": "gemma3_text", "head_dim": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert weights_of(path)["uncounted"] == ("vision_config",)


def test_names_tell_what_a_step_does_not_read() -> None:
    of = parts(
        [
            "model.embed_tokens_per_layer.weight",
            "model.vision_tower.encoder.layers.0.mlp.fc1.weight",
            "model.layers.1.mlp.experts.0.up_proj.weight",
            "model.layers.1.mlp.shared_experts.up_proj.weight",
            "model.layers.2.mlp.experts.0.up_proj.weight",
            "mtp.layers.0.mlp.up_proj.weight",
            "model.embed_tokens.weight",
        ],
        layers=2,
    )
    assert list(of.values()) == [
        Part.EMBEDDING,
        Part.TOWER,
        Part.EXPERT,
        Part.READ,
        Part.MTP,
        Part.MTP,
        Part.READ,  # the output is this one, too
    ]


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("model.safetensors", "not one", "not a whole safetensors file"),
        ("model.safetensors.index.json", "{}", "not an index"),
        ("model.safetensors.index.json", "[]", "not an index"),
        (
            "model.safetensors.index.json",
            '{"metadata": {"total_size": -5}, "weight_map": {"a": "b.safetensors"}}',
            "total_size is -5",
        ),
        ("config.json", "[]", "no model configuration: it holds a list"),
        ("config.json", '{"model_type": "no_such_type"}', "no model configuration.*: Unrecognized[^,]*$"),
        (
            "config.json",
            '{"model_type": "llama", "num_attention_heads": 0}',
            "num_attention_heads is 0, and must be",
        ),
        ("config.json", '{"model_type": "llama", "num_hidden_layers": "32"}', "num_hidden_layers"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, file: str, content: str, expected: str) -> None:
    (write(tmp_path) / file).write_text(content)
    with pytest.raises(StartupError, match=expected):
        describe(str(tmp_path), "unused")


def test_a_window_that_the_models_class_does_not_have_slides_nothing(tmp_path: Path) -> None:
    for model_type, kind in (("llama", "full"), ("mistral", "sliding")):
        write(tmp_path, model_type=model_type, sliding_window=8)
        spec = KVCacheSpec.from_config(describe(str(tmp_path), "unused")["config"])
        assert [(group.kind, len(group.layers)) for group in spec.groups] == [(kind, 1)]


def test_what_is_not_there(tmp_path: Path) -> None:
    for model in (tmp_path / "config.json", tmp_path / "no" / "such" / "folder"):
        with pytest.raises(StartupError, match="There is no file or directory"):
            describe(str(model), "unused")
    with pytest.raises(StartupError, match="can't be read"):
        describe(str(tmp_path), "unused")  # a folder without config.json


@pytest.mark.parametrize("heads", [0, "8", 8.5, [8], {}])
def test_fields_that_are_no_numbers_are_no_tracebacks(heads: Any) -> None:
    with pytest.raises(ModelNotPriced):
        resolve({**CONFIG, "num_attention_heads": heads})


# -- the hub, played by a server of our own ------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """One model, owner/small, as the hub answers for it: metadata of files by HEAD, bytes by ranges."""

    files: dict[str, bytes]
    sent: list[int]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        content = self.files.get(name) if "/owner/small/resolve/" in self.path else None
        if content is None:
            self.send_response(404)
            code = "EntryNotFound" if "/owner/small/" in self.path else "RepoNotFound"
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        whole = len(content)
        if wanted := self.headers.get("Range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content = content[int(first) : int(last or whole - 1) + 1]
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(content) - 1}/{whole}")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if with_body:
            self.sent.append(len(content))
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    handler = type("TheHub", (Hub,), {"files": {"config.json": json.dumps(CONFIG).encode()}, "sent": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", endpoint)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield handler
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def test_of_a_hub_model_only_headers_are_fetched(hub: type[Hub]) -> None:
    hub.files["model.safetensors"] = STORED + bytes(5_000_000)
    weights = weights_of("owner/small")
    assert (weights["source"], weights["stored_bytes"]) == ("safetensors", 8224)
    assert sum(hub.sent) < 500_000


def test_a_hub_model_without_safetensors_is_counted(hub: type[Hub]) -> None:
    assert weights_of("owner/small")["parameters"] == PARAMETERS


def test_a_model_that_the_hub_does_not_have(hub: type[Hub]) -> None:
    with pytest.raises(StartupError, match="can't be read from the Hugging Face hub"):
        describe("owner/other", "unused")


def test_a_hub_model_that_transformers_does_not_know(hub: type[Hub]) -> None:
    hub.files["config.json"] = b'{"model_type": "no_such_type"}'
    with pytest.raises(ModelNotServable, match="no model configuration"):
        describe("owner/small", "unused")
