"""The model of a run, from its result and from its checkpoints, and its loss on text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.trained_runs import TEXT, train
from thinwire.elastic.global_state import GlobalState
from thinwire.errors import CheckpointError, DataError
from thinwire.inference import evaluate, load_trained, read_texts
from thinwire.runlog.run_folder import read_run
from thinwire.training.checkpoints.global_checkpoints import GlobalCheckpoints
from thinwire.training.config import TrainConfig, config_text, read_config
from thinwire.training.summary import parameters_sha256
from thinwire.workloads.language.corpus import divide
from thinwire.workloads.language.sources import Document

pytestmark = pytest.mark.slow

# Two characters of one byte, one of four, line ends, and a document that is shorter than the sequence.
DOCUMENTS = ["12 replicas say 🙂 little\n\n   over a thin wire. " * 9, "é", "and it carries 13.\n"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Return a run whose result holds the global parameters of step 6, which replicas have trained on from."""
    return train(tmp_path_factory.mktemp("diloco"), final_exchange=False)


def test_the_result_is_what_the_run_has_hashed(config: TrainConfig) -> None:
    trained = load_trained(config.run_dir)
    assert (trained.is_final, trained.step, trained.model.training) == (True, 7, False)
    assert parameters_sha256(trained.model) == read_run(config.run_dir).finished().global_parameters_sha256


def test_a_checkpoint_holds_the_global_parameters_and_not_those_of_a_replica(config: TrainConfig) -> None:
    last, earlier = load_trained(config.run_dir, step=7), load_trained(config.run_dir, step=4)
    assert (last.is_final, last.step, earlier.step, earlier.replica) == (False, 7, 4, None)
    # without a final exchange, the result is the round after step 6; each replica has done one more step
    assert parameters_sha256(last.model) == read_run(config.run_dir).finished().global_parameters_sha256
    assert parameters_sha256(earlier.model) != parameters_sha256(last.model)


def test_a_checkpoint_of_a_method_without_global_parameters_is_a_replica_s(tmp_path: Path) -> None:
    config = train(tmp_path, method="eager")
    own = load_trained(config.run_dir, step=4)
    assert (own.replica, load_trained(config.run_dir).replica) == (0, None)
    for path in config.run_dir.glob("checkpoints/*/replica-0.*"):
        path.unlink()
    other = load_trained(config.run_dir, step=4)
    assert other.replica == 1 and parameters_sha256(other.model) != parameters_sha256(own.model)


def test_a_run_that_has_not_finished_gives_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    config = train(tmp_path, method="all-reduce", sync_interval=None)
    expected = parameters_sha256(load_trained(config.run_dir, step=7).model)
    (config.run_dir / "model" / "model.safetensors").unlink()
    trained = load_trained(config.run_dir)
    assert (trained.is_final, trained.step, parameters_sha256(trained.model)) == (False, 7, expected)
    # a host may hold one replica alone, and its newest file may be damaged
    for path in config.run_dir.glob("checkpoints/*/replica-0.*"):
        path.unlink()
    damaged = config.run_dir / "checkpoints" / "step-00000007" / "replica-1.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert load_trained(config.run_dir).step == 4


def test_an_elastic_run_gives_its_newest_checkpoint(config: TrainConfig, tmp_path: Path) -> None:
    elastic = read_config(config.run_dir).replace(elastic=True, out=tmp_path)
    (tmp_path / "config.json").write_text(config_text(elastic))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes((config.run_dir / "model" / "tokenizer.json").read_bytes())
    parameters = {name: torch.full_like(p, 0.5) for name, p in load_trained(config.run_dir).model.named_parameters()}
    GlobalCheckpoints(tmp_path / "checkpoints").write(GlobalState(step=40, parameters=parameters))
    trained = load_trained(tmp_path)
    assert (trained.is_final, trained.step) == (False, 40)
    assert all(bool((parameter == 0.5).all()) for parameter in trained.model.parameters())


def test_what_is_not_there_is_named_with_a_remedy(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no run \(no config\.json\); give the --out folder"):
        load_trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 5; take one of its checkpoints: 4, 7"):
        load_trained(config.run_dir, step=5)
    (tmp_path / "config.json").write_bytes((config.run_dir / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"no checkpoint yet: the first comes after step 4; let the run go on"):
        load_trained(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing, so token ids have no meaning"):
        load_trained(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_bytes((config.run_dir / "model" / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not the model of this run: .*--step"):
        load_trained(tmp_path)
    with pytest.raises(ValueError, match="unknown --device; got 'tpu'; allowed cpu, cuda"):
        load_trained(config.run_dir, device="tpu")


def test_the_loss_is_that_of_a_plain_loop_over_windows(config: TrainConfig) -> None:
    trained = load_trained(config.run_dir)
    end = [trained.tokenizer.end_of_text]
    tokens = end + [token for text in DOCUMENTS for token in [*trained.tokenizer.encode([text])[0].tolist(), *end]]
    assert (len(tokens) - 1) % 32, "the last window must be a short one"
    nats = 0.0
    for begin in range(0, len(tokens) - 1, 32):
        window = torch.tensor(tokens[begin : begin + 33])
        nats += float(F.cross_entropy(trained.model(window[None, :-1])[0].double(), window[1:], reduction="sum"))
    found = evaluate(trained, DOCUMENTS, batch_size=3)
    num_bytes = len("".join(DOCUMENTS).encode())
    assert (found.num_tokens, found.num_bytes) == (len(tokens) - 1, num_bytes)
    assert found.loss == pytest.approx(nats / (len(tokens) - 1), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)


def test_a_batch_size_changes_nothing_but_the_order_of_sums(config: TrainConfig) -> None:
    trained = load_trained(config.run_dir)
    losses = [evaluate(trained, DOCUMENTS, batch_size=size).loss for size in (1, 2, 100)]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    reported: list[tuple[int, int]] = []
    found = evaluate(trained, DOCUMENTS, batch_size=1, on_tokens=lambda done, total: reported.append((done, total)))
    assert reported[0] == (32, found.num_tokens) and reported[-1] == (found.num_tokens, found.num_tokens)


def test_no_text_is_refused(config: TrainConfig) -> None:
    with pytest.raises(DataError, match=r"^--data holds no text; give"):
        evaluate(load_trained(config.run_dir), [])


def test_texts_are_those_of_the_data_or_what_the_run_held_out(config: TrainConfig, tmp_path: Path) -> None:
    trained = load_trained(config.run_dir)
    (tmp_path / "other.txt").write_text("é" * 10)
    assert list(read_texts(trained, data=str(tmp_path / "other.txt"), max_bytes=None)) == ["é" * 10]
    assert list(read_texts(trained, data=str(tmp_path / "other.txt"), max_bytes=5)) == ["é" * 2]
    split = divide([Document(origin="", text=TEXT)], fraction=0.02, name="text")
    assert list(read_texts(trained, data=None, max_bytes=None)) == [TEXT[split.cut :]]
    with pytest.raises(DataError, match=r"--data names no file or folder; got .*nothing.txt"):
        list(read_texts(trained, data=str(tmp_path / "nothing.txt"), max_bytes=None))
