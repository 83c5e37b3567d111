from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from thinwire.errors import CheckpointError, MissingExtra
from thinwire.methods import RECIPES
from thinwire.training.build import check, lr_factor, make_method
from thinwire.training.config import (
    FREE,
    TrainConfig,
    config_text,
    from_json,
    meaning,
    read_config,
    resolve,
    to_json,
    validate,
)
from thinwire.workloads.language.workload import wanted_vocabulary


def resolved(**options: object) -> TrainConfig:
    return resolve(TrainConfig.of(**options), world_size=None, cores=4, home=Path("/home/someone"))


def test_every_default_is_filled_in_and_what_the_user_said_stays() -> None:
    config = resolved(steps=60, lr=0.5)
    assert (
        config.run.replicas,
        config.sync.sync_interval,
        config.optimizer.warmup_steps,
        config.output.eval_every,
    ) == (2, 30, 6, 10)
    assert config.optimizer.lr == 0.5
    assert config.model.threads == 2
    assert config.data.cache_dir == Path("/home/someone/.cache/thinwire")
    assert config.output.out == Path("runs/iso-loco-nano-seed0")


def test_threads_are_at_least_one_where_replicas_outnumber_cores() -> None:
    assert resolved(replicas=7).model.threads == 1


def test_ranks_of_a_replica_divide_the_ranks_that_torchrun_starts() -> None:
    config = TrainConfig.of(dp_shard=2, tp=2)
    assert resolve(config, world_size=12, cores=4, home=Path("/")).num_replicas == 3
    with pytest.raises(ValueError, match=r"10 ranks, 4 a replica; allowed multiples of 4 ranks; try torchrun with 8"):
        resolve(config, world_size=10, cores=4, home=Path("/"))


def test_degrees_of_one_rank_leave_the_hash_of_the_options_as_it_was_before_there_were_any() -> None:
    assert not {"dp_shard", "tp", "zero_stage"} & set(meaning(resolved()))
    assert meaning(resolved(dp_shard=2))["dp_shard"] == 2
    assert resolved(dp_shard=2).digest() != resolved().digest()


def test_world_size_of_torchrun_gives_the_replicas_and_contradicts_another_number() -> None:
    found = resolve(TrainConfig(), world_size=3, cores=4, home=Path("/"))
    assert found.num_replicas == 3
    with pytest.raises(ValueError, match="--replicas is not what torchrun starts; got 2; allowed torchrun's 3 ranks"):
        resolve(TrainConfig.of(replicas=2), world_size=3, cores=4, home=Path("/"))


def test_options_survive_json_and_keep_their_digest() -> None:
    config = resolved(overlap_steps="1,4", codec="e3m0", out=Path("runs/x"))
    again = from_json(json.loads(json.dumps(to_json(config))))
    assert again == config
    assert again.digest() == config.digest()


def test_the_digest_follows_what_is_computed_and_nothing_else() -> None:
    config = resolved()
    others = {"seed": 1, "lr": 0.1, "codec": "float32", "final_exchange": False, "steps": 7}
    for name, value in others.items():
        assert config.replace(**{name: value}).digest() != config.digest(), name
    for name in FREE:
        assert name not in meaning(config)
    assert config.replace(quiet=True, threads=9, out=Path("other")).digest() == config.digest()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is no configuration"),
        ("[]", "is no configuration"),
        ('{"run": {"steps": "ten"}}', "Expected `int`, got `str` - at `\\$.run.steps`"),
        ('{"run": {"steps": true}}', "Expected `int`, got `bool` - at `\\$.run.steps`"),
        ('{"run": 1}', "Expected `object`, got `int` - at `\\$.run`"),
        ('{"output": {"out": 1}}', "expected the name of a file, got 1"),
        ('{"run": {"stepps": 1}}', "unknown options run.stepps"),
        ('{"stepps": 1}', "unknown options stepps"),
        ('{"elastic": {"preserve_norm": true}}', "unknown options elastic.preserve_norm"),
    ],
)
def test_a_damaged_config_json_is_refused_by_name(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=reason):
        read_config(tmp_path)


def test_a_config_json_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = resolved(out=tmp_path)
    (tmp_path / "config.json").write_text(config_text(config))
    assert read_config(tmp_path) == config


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run of thinwire"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"steps": 0}, "--steps is too small; got 0; allowed 1 or more; try --steps 300"),
        ({"replicas": 0}, "--replicas is too small; got 0; allowed 1 or more"),
        ({"batch_size": 0}, "--batch-size is too small"),
        ({"warmup_steps": -1}, "--warmup-steps is too small; got -1; allowed 0 or more"),
        ({"checkpoint_every": -1}, "--checkpoint-every is too small"),
        ({"tokenizer": "words"}, "unknown --tokenizer; got 'words'; allowed auto, bpe, bytes"),
        ({"inner_optimizer": "adamx"}, "unknown --inner-optimizer; got .*; allowed adamw, adam, sgd, plain-sgd"),
        ({"lr": 0.0}, "--lr is not above 0; got 0.0"),
        ({"lr": float("nan")}, "--lr is not above 0; got nan"),
        ({"clip_norm": float("nan")}, "--clip-norm is too small; got nan"),
        ({"join_deadline_s": 0.0}, "--join-deadline-s is not above 0"),
        (
            {"model": "linear-nano", "cp": 2, "cp_policy": "helper"},
            "nano does not go with --cp-policy: it is",
        ),
        ({"model": "linear-35m", "stream_backward": 2}, "--model linear-35m does not go with --stream-backward: it is"),
        ({"model": "linear-nano", "tp": 2}, "try to leave --tp out"),
        ({"ep": 2}, "--ep is for mixtures of experts; got --model nano; .* try --model moe-nano"),
        ({"expert_code": "block-int8"}, "--expert-code is for mixtures of experts"),
        (
            {"model": "moe-nano", "expert_code": "block-int4"},
            "--expert-code is for ranks .* 2 or more --ep; try --ep 2",
        ),
        ({"model": "moe-nano", "ep": 2, "expert_code": "int3"}, "int3"),
        ({"model": "moe-nano", "ep": 3}, "--ep does not divide the experts .* got 3 ranks, 8 experts; .* try --ep 1"),
        ({"model": "moe-nano", "ep": 4, "dp_shard": 2}, "got 4 of 2 ranks; .* try --dp-shard 4, or --ep 2"),
        ({"model": "moe-nano", "pp": 2}, "--model moe-nano does not go with --pp: its loss"),
        ({"model": "moe-nano", "tp": 2}, "--model moe-nano does not go with --tp: ranks share whole"),
        ({"model": "moe-nano", "compile": True}, "does not go with --compile"),
        ({"model": "moe-nano", "stream_backward": 2}, "does not go with --stream-backward"),
        ({"model": "moe-nano", "elastic": True, "ranks_per_replica": 2}, "does not go with --ranks-per-replica"),
        ({"model": "moe-nano", "balance_over": "all"}, "unknown --balance-over; got 'all'"),
        ({"stream_backward": 8, "recompute": True}, "--stream-backward does not go with --recompute: it computes"),
        ({"stream_backward": 8, "compile": True}, "--stream-backward does not go with --compile: what the backward"),
        ({"keep_attention": True}, "--keep-attention is for layers .*; got no --recompute; .* try --recompute"),
        (
            {"keep_attention": True, "recompute": True, "cp": 2},
            "--keep-attention does not go with --cp: shared .* try --recompute alone",
        ),
        ({"stream_backward": 8, "pp": 2}, "--stream-backward does not go with --pp: a pipeline's schedule"),
        ({"stream_backward": 8, "tp": 2}, "--stream-backward does not go with --tp: chunks of"),
        (
            {"stream_backward": 17, "seq_len": 16},
            "more chunks than a sequence has tokens; got 17; allowed 1 to 16; try --stream-backward 8",
        ),
        ({"interface": "eth0", "address": "10.0.0.1"}, "--interface does not go with --address"),
        (
            {"sequences": "documents", "elastic": True},
            "--sequences documents does not go with --elastic: an",
        ),
        ({"sequences": "documents", "pp": 2}, "--sequences documents does not go with --pp: torch's pipelines"),
        ({"exchange": "ring"}, "unknown --exchange; got 'ring'; allowed auto, all-gather, two-phase"),
    ],
)
def test_a_value_out_of_its_range_is_refused_with_value_and_limit(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        validate(resolved(**options))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"method": "streming-diloco"}, "try streaming-diloco"),
        ({"model": "nan"}, "try nano"),
        ({"codec": "e3m1"}, "try e3m0"),
        ({"overlap_steps": "30"}, "--overlap-steps is not below --sync-interval, which is 30; got 30; allowed 0 to 29"),
        ({"overlap_steps": "1,2,3"}, "names 3 replicas, but 2 take part"),
        ({"overlap_steps": "1;2"}, "--overlap-steps is no number; got '1;2'"),
        ({"num_fragments": 9}, "num_fragments must be at most 7"),
        ({"blend": 1.0}, "--blend is out of its range; got 1.0"),
        ({"outer_lr": 0.0}, "--outer-lr is out of its range; got 0.0"),
        ({"method": "diloco", "overlap_steps": "2"}, "--overlap-steps does not go with --method diloco"),
        (
            {"method_option": ("outer_lr=0.5",), "outer_lr": 0.5},
            "outer_lr is given twice; got --method-option outer_lr and --outer-lr",
        ),
        ({"method_option": ("density=0.5",)}, "unknown option of --method iso-loco; got 'density'"),
        ({"method": "diloco", "pace": True}, "--pace does not go with --method diloco: it waits for every exchange"),
        (
            {"overlap_steps": "0", "pace": True},
            "--pace does not go with --method iso-loco: with --overlap-steps 0",
        ),
        ({"method": "noloco", "final_exchange": False}, "--no-final-exchange does not go with --method noloco"),
        ({"method": "noloco", "outer_momentum": 0.9}, "pull must be below 0.38"),
        ({"method": "co2", "overlap_steps": "2"}, "--overlap-steps does not go with --method co2"),
        ({"method": "slowmo", "pace": True}, "--pace does not go with --method slowmo"),
        ({"method": "all-reduce", "sync_interval": 5}, "--sync-interval does not go with --method all-reduce"),
        ({"method": "local-sgd", "outer_lr": 0.7}, "--outer-lr does not go with --method local-sgd"),
        ({"device": "tpu"}, "unknown --device; got 'tpu'; allowed cpu, cuda"),
    ],
)
def test_an_impossible_run_is_refused_before_it_starts(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(resolved(**options))


@pytest.mark.parametrize("method", [*RECIPES, "streaming_diloco"])
def test_every_method_runs_with_its_defaults(method: str) -> None:
    config = resolved(method=method)
    validate(config)
    check(config)
    assert make_method(config).name == method.replace("_", "-")


@pytest.mark.parametrize("method", ["dgc", "demo", "masha1", "MASHA2"])
def test_methods_that_an_adamw_would_spoil_get_plain_sgd_unless_another_is_named(method: str) -> None:
    assert resolved(method=method).optimizer.inner_optimizer == "plain-sgd"
    assert resolved(method=method, inner_optimizer="sgd").optimizer.inner_optimizer == "sgd"


def test_a_method_gets_the_options_that_were_given() -> None:
    method = make_method(resolved(sync_interval=7, overlap_steps="1,3", blend=0.25, codec="float32", num_fragments=2))
    assert method.schedule.sync_interval == 7
    assert "blend=0.25" in method.describe(num_replicas=2)
    assert "overlap_steps=(1, 3)" in method.describe(num_replicas=2)


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    config = resolved(steps=50, warmup_steps=5)
    factors = [lr_factor(step, config=config) for step in range(1, 51)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(earlier > later for earlier, later in pairwise(factors[4:]))
    assert factors[-1] == pytest.approx(0.1)
    constant = config.replace(schedule="constant", warmup_steps=0)
    assert {lr_factor(step, config=constant) for step in range(1, 51)} == {1.0}


def test_the_vocabulary_is_the_users_then_the_models() -> None:
    assert wanted_vocabulary(resolved()) == 2048
    assert wanted_vocabulary(resolved(vocab_size=300)) == 300


def test_a_logger_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for options in ({"tensorboard": True}, {"wandb": True}):
        with pytest.raises(MissingExtra, match=r"pip install 'thinwire\[report\]'"):
            check(resolved(**options))
