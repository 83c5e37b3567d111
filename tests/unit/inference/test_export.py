"""Exported models: transformers opens them without code of ours, and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.trained_runs import TEXT, train
from thinwire.inference import TrainedModel, export_model, load_trained
from thinwire.training.config import TrainConfig
from thinwire.workloads.language import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    TransformerConfig,
    build_transformer,
    preset,
)
from thinwire.workloads.language.generation import Sampling, generate

pytestmark = pytest.mark.slow

AWKWARD = [
    "plain text", "", " ", "     many     spaces     ", "\n\n\t\n", "line\r\nend\n",
    "🙂👩\u200d👩\u200d👧 e\u0301 é ß 日本語 \u202e", "def f(x):\n    return x  # 3.14e-5\n", "<|endoftext|>",
    "a<|endoftext|>b", "it's 1,000's\u00a0of\u2028tokens", "\0\x7f",
]  # fmt: skip


def trained_of(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> TrainedModel:
    return TrainedModel(
        run_dir=folder, config=TrainConfig(), model=model.eval(), companion=tokenizer, step=1, is_final=True
    )


def opened(folder: Path) -> tuple[Any, Any]:
    """Open a folder as a user does, who has no code of ours."""
    return (
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False),
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return train(tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize(
    ("kind", "more"), [("linear attention", {"is_linear": True}), ("mixture of experts", {"num_experts": 4})]
)
def test_what_transformers_has_no_model_of_is_exported_under_our_names_alone(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    shape = TransformerConfig(vocab_size=257, dim=16, layers=1, heads=2, max_seq_len=16, **more)
    trained = trained_of(build_transformer(shape, seed=2), ByteTokenizer(), tmp_path)
    with pytest.raises(ValueError, match=rf"no model of our {kind}; got --to hf; .* try --to safetensors"):
        export_model(trained, tmp_path / "out", to="hf")
    export_model(trained, tmp_path / "out", to="safetensors")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "shape",
    [
        preset("nano", max_seq_len=128),
        preset("35m", vocab_size=2000, max_seq_len=1024),
        TransformerConfig(vocab_size=300, dim=48, layers=3, heads=3, mlp_dim=64, max_seq_len=64, tied_head=False),
    ],
    ids=["nano", "35m", "untied"],
)
def test_transformers_computes_the_same_logits(shape: TransformerConfig, tmp_path: Path) -> None:
    model = build_transformer(shape, seed=2)
    for name, parameter in model.named_parameters():
        if name.endswith("gain"):  # where all are 1, it does not matter whose they are
            nn.init.uniform_(parameter, 0.5, 2.0, generator=torch.Generator().manual_seed(len(name)))
    export_model(trained_of(model, ByteTokenizer(), tmp_path), tmp_path / "out", to="hf")
    exported, _ = opened(tmp_path / "out")
    tokens = torch.randint(shape.vocab_size, (1, shape.max_seq_len), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model(tokens), exported(input_ids=tokens).logits
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


def test_a_trained_run_opens_with_equal_logits_and_equal_greedy_text(run: TrainConfig, tmp_path: Path) -> None:
    trained = load_trained(run.run_dir)
    export_model(trained, tmp_path / "out", to="hf")
    exported, tokenizer = opened(tmp_path / "out")
    prompt = "12 replicas say"
    read = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ours, theirs = trained.model(read["input_ids"]), exported(**read).logits
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
        written = exported.generate(**read, do_sample=False, max_new_tokens=16)
    greedy = generate(trained.model, trained.tokenizer, prompt, sampling=Sampling(temperature=0.0, max_tokens=16))
    assert tokenizer.decode(written[0], skip_special_tokens=True) == prompt + "".join(greedy)


def test_a_checkpoint_is_exported_by_its_step(run: TrainConfig, tmp_path: Path) -> None:
    trained = load_trained(run.run_dir, step=4)
    export_model(trained, tmp_path / "out", to="hf")
    exported, _ = opened(tmp_path / "out")
    assert torch.equal(exported.get_input_embeddings().weight, trained.model.get_parameter("embedding.weight"))


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_the_tokenizer_gives_the_same_ids_on_awkward_text(kind: str, tmp_path: Path) -> None:
    tokenizer: Tokenizer = BpeTokenizer.train([TEXT, *AWKWARD], vocab_size=400) if kind == "bpe" else ByteTokenizer()
    model = build_transformer(TransformerConfig(vocab_size=tokenizer.vocab_size, dim=8, layers=1, heads=1))
    export_model(trained_of(model, tokenizer, tmp_path), tmp_path / "out", to="hf")
    _, theirs = opened(tmp_path / "out")
    assert isinstance(theirs, transformers.PreTrainedTokenizerFast)
    assert len(theirs) == tokenizer.vocab_size and theirs.eos_token_id == tokenizer.end_of_text
    for text in [*AWKWARD, "".join(AWKWARD)]:
        ids = tokenizer.encode([text])[0].tolist()
        assert theirs(text)["input_ids"] == ids, repr(text)
        assert theirs.decode(ids) == text
    assert theirs([*AWKWARD])["input_ids"] == [ids.tolist() for ids in tokenizer.encode(AWKWARD)]


def test_a_transformers_model_is_exported_with_its_own_architecture(tmp_path: Path) -> None:
    transformers.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "source")  # fmt: skip
    config = train(tmp_path, model=f"hf:{tmp_path / 'source'}", vocab_size=None, tokenizer="bytes")
    trained = load_trained(config.run_dir)
    export_model(trained, tmp_path / "out", to="hf")
    exported, tokenizer = opened(tmp_path / "out")
    assert type(exported).__name__ == "LlamaForCausalLM"
    read = tokenizer("a thin wire", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(exported(**read).logits, trained.model(read["input_ids"]), atol=1e-5, rtol=0)
        written = exported.generate(**read, do_sample=False, max_new_tokens=8)
    greedy = generate(trained.model, trained.tokenizer, "a thin wire", sampling=Sampling(temperature=0, max_tokens=8))
    assert tokenizer.decode(written[0], skip_special_tokens=True) == "a thin wire" + "".join(greedy)


def test_safetensors_are_the_files_of_the_runs_model_folder(run: TrainConfig, tmp_path: Path) -> None:
    export_model(load_trained(run.run_dir), tmp_path / "out", to="safetensors")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (run.run_dir / "model").iterdir()}
    assert json.loads(files["config.json"])["dim"] == 192


@pytest.mark.parametrize("to", ["hf", "safetensors"])
def test_others_may_read_the_weights_as_they_may_the_files_beside_them(
    run: TrainConfig, to: str, tmp_path: Path
) -> None:
    export_model(load_trained(run.run_dir), tmp_path / "out", to=to)
    modes = {
        path.stat().st_mode & 0o777 for path in [*(tmp_path / "out").iterdir(), *(run.run_dir / "model").iterdir()]
    }
    new = tmp_path / "new"
    new.touch()
    assert modes == {new.stat().st_mode & 0o777}


def test_a_folder_that_holds_something_is_left_alone(run: TrainConfig, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    trained = load_trained(run.run_dir)
    with pytest.raises(ValueError, match=r"--out is not empty; got .*; allowed a new or empty folder"):
        export_model(trained, tmp_path, to="hf")
    with pytest.raises(ValueError, match="unknown --to; got 'gguf'; allowed hf, safetensors"):
        export_model(trained, tmp_path / "out", to="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
