"""`--init-from RUN`: the model of an earlier run, or a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thinwire.errors import CheckpointError
from thinwire.files import write_whole
from thinwire.training.build import check
from thinwire.training.config import TrainConfig, config_text, resolve
from thinwire.training.summary import save_model
from thinwire.workloads.language.tokenizers import ByteTokenizer
from thinwire.workloads.language.workload import make_model, own_tokenizer


def config_of(tmp_path: Path, **options: object) -> TrainConfig:
    given = TrainConfig.of(**{"replicas": 1, **options})
    return resolve(given, world_size=None, cores=2, home=tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a finished run of nano on bytes."""
    run = tmp_path / "earlier"
    run.mkdir()
    config = config_of(tmp_path, tokenizer="bytes", seq_len=32, seed=7, out=run)
    write_whole(run / "config.json", config_text(config))
    save_model(run, make_model(config, vocab_size=257, device="cpu"), files=ByteTokenizer().files())
    return run


def test_weights_tokenizer_and_length_are_those_of_the_run(run: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, init_from=run, seed=1)
    check(config)
    assert (config.model.name, config.model.seq_len) == ("nano", 32)
    tokenizer = own_tokenizer(config)
    assert tokenizer is not None and tokenizer.to_json() == ByteTokenizer().to_json()
    model, drawn = (
        make_model(one, vocab_size=257, device="cpu") for one in (config, config_of(tmp_path, seq_len=32, seed=7))
    )
    for (name, a), b in zip(model.named_parameters(), drawn.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert config_of(tmp_path, init_from=run, seq_len=8).model.seq_len == 8


def test_what_contradicts_the_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--model 35m does not go with --init-from .* trained nano; got both"):
        config_of(tmp_path, init_from=run, model="35m")
    with pytest.raises(
        ValueError, match=r"--tokenizer does not go with --init-from .*; got both; .*leave --tokenizer out"
    ):
        check(config_of(tmp_path, init_from=run, tokenizer="bpe"))
    with pytest.raises(
        ValueError, match=r"--vocab-size does not go with --init-from .*; got both; .*leave --vocab-size out"
    ):
        check(config_of(tmp_path, init_from=run, vocab_size=300))


def test_a_run_without_a_model_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run"):
        config_of(tmp_path, init_from=tmp_path / "nothing")
    (run / "model" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read; got .*tokenizer\.json .*; try thinwire train --resume"):
        check(config_of(tmp_path, init_from=run))
    (run / "model" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="cannot start from the weights"):
        make_model(config_of(tmp_path, init_from=run), vocab_size=257, device="cpu")
    (run / "model" / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"a run writes at its end; got no .*safetensors; .* try thinwire train --resume"
    ):
        config_of(tmp_path, init_from=run)
