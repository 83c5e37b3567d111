"""Sets on the disk: what is added, averaged and refused, with checkpoints of a few numbers."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from thinwire.cli.main import main
from thinwire.ensembles import CachedPrior, ExpertSet, expert_set
from thinwire.ensembles.expert_set import document_hash
from thinwire.errors import CheckpointError, DataError, ThinwireError
from thinwire.files import wait_for_lock


def run(folder: Path, value: float, *, shape: tuple[int, ...] = (3, 2), merges: str = "a b", count: int = 7) -> Path:
    """Write a folder as a finished run leaves it."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "summary.json").write_text('{"tokens": 640}')
    (folder / "model" / "tokenizer.json").write_text(json.dumps({"model": {"merges": [merges]}}))
    tensors = {"weight": torch.full(shape, value) / 3, "half": torch.tensor([value], dtype=torch.bfloat16),
               "count": torch.tensor(count)}  # fmt: skip
    safetensors.torch.save_file(tensors, folder / "model" / "model.safetensors", {"format": "pt"})
    return folder


def two(tmp_path: Path, **second: Any) -> ExpertSet:
    experts = ExpertSet(folder=tmp_path / "set").add(run(tmp_path / "a", 1.0), name="a", domain="prose")
    experts = experts.add(run(tmp_path / "b", 2.0, **second), name="b")
    experts.save()
    return experts


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model" / "model.safetensors")


def test_a_saved_set_is_read_again_from_its_folder_its_file_and_a_copy(tmp_path: Path) -> None:
    experts = two(tmp_path)
    (tmp_path / "set").rename(tmp_path / "copy")
    for place in ("copy", "copy/set.json"):
        found = ExpertSet.load(tmp_path / place)
        assert found.experts == experts.experts and found.names == ("a", "b")
    first, second = experts.experts
    assert (first.domain, second.domain, first.parameters, first.tokens) == ("prose", "b", 8, 640)
    assert found.checkpoint(first) == tmp_path / "copy" / "a"


def test_two_commands_that_add_experts_at_once_lose_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def noted_wait(descriptor: int, *, deadline_s: float) -> bool:
        waits.set()
        return wait_for_lock(descriptor, deadline_s=deadline_s)

    words = ["experts", "add", str(tmp_path / "set"), str(run(tmp_path / "b", 2.0)), "--name", "b"]
    other = threading.Thread(target=main, args=(words,))
    with ExpertSet.changing(tmp_path / "set") as before:
        monkeypatch.setattr(expert_set, "wait_for_lock", noted_wait)
        other.start()
        while not waits.wait(0.01) and other.is_alive():
            pass
        before.add(run(tmp_path / "a", 1.0), name="a").save()
    other.join()
    assert ExpertSet.load(tmp_path / "set").names == ("a", "b")
    monkeypatch.setattr(expert_set, "_CHANGE_S", 0.0)
    with (
        ExpertSet.changing(tmp_path / "set"),
        pytest.raises(ThinwireError, match="end or continue it"),
        ExpertSet.changing(tmp_path / "set"),
    ):
        pass


def test_a_merge_is_the_weighted_sum_and_with_weight_1_the_member_bit_for_bit(tmp_path: Path) -> None:
    experts = two(tmp_path)
    experts.merge(tmp_path / "mean", weights=experts.weights({"a": 0.25, "b": 0.75}))
    found = weights_of(tmp_path / "mean")
    one, other = weights_of(tmp_path / "a"), weights_of(tmp_path / "b")
    wanted = 0.25 * one["weight"].double() + 0.75 * other["weight"].double()
    assert torch.equal(found["weight"], wanted.float()) and found["half"] == 1.75 and found["count"] == 7
    assert found["half"].dtype == torch.bfloat16 and (tmp_path / "mean" / "config.json").exists()
    experts.branch(tmp_path / "same", weights=experts.weights({"a": 1.0}))
    assert all(torch.equal(weights_of(tmp_path / "same")[name], value) for name, value in one.items())


@pytest.mark.parametrize(
    ("second", "reason"),
    [({"shape": (2, 3)}, "got weight ('F32', 2, 3); allowed weight ('F32', 3, 2)"), ({"count": 8}, "equal count")],
)
def test_a_merge_of_unlike_members_is_refused_and_leaves_nothing(
    tmp_path: Path, second: dict[str, Any], reason: str
) -> None:
    experts = two(tmp_path, **second)
    with pytest.raises(ValueError, match="only like shapes are averaged") as refused:
        experts.merge(tmp_path / "out", weights=(0.6, 0.4))
    assert reason in str(refused.value) and not (tmp_path / "out").exists()
    experts.merge(tmp_path / "out", weights=(1.0, 0.0))  # the other member is not read
    with pytest.raises(ValueError, match=r"--out is not empty; .* try --out .*out-2"):
        experts.merge(tmp_path / "out", weights=(1.0, 0.0))


def test_members_that_do_not_fit_are_refused_with_a_remedy(tmp_path: Path) -> None:
    experts = two(tmp_path)
    with pytest.raises(ValueError, match=r"another tokenizer than the set, .* try thinwire train --init-from .*/set/a"):
        experts.add(run(tmp_path / "c", 1.0, merges="b c"), name="c")
    for name in ("a", "", "../c", "c/d", ".c", "x" * 65, "set.json"):
        with pytest.raises(ValueError, match="--name is no new name of an expert"):
            experts.add(tmp_path / "b", name=name)
    with pytest.raises(ValueError, match="--name is no new name of an expert"):
        ExpertSet(folder=tmp_path / "new").add(tmp_path / "b", name="Set.json")
    assert not (tmp_path / "new").exists(), "its folder would be in the place of the set's file"
    unfinished = run(tmp_path / "d", 1.0)
    (unfinished / "model" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no finished run .*; thinwire train --resume"):
        experts.add(unfinished, name="d")
    (unfinished / "model" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="is damaged"):
        experts.add(unfinished, name="d")
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == ["a", "b", "set.json"]


@pytest.mark.parametrize("given", [{"a": 0.5}, {"a": 1.5, "b": -0.5}, {"a": float("nan"), "b": 0.5}])
def test_weights_that_are_no_shares_are_refused_with_some_that_are(tmp_path: Path, given: dict[str, float]) -> None:
    experts = two(tmp_path)
    with pytest.raises(ValueError, match=r"no shares; .* allowed 0 or more, with the sum 1") as refused:
        experts.weights(given)
    remedy = dict(part.split("=") for part in str(refused.value).rpartition("try ")[2].split(","))
    assert sum(experts.weights({name: float(value) for name, value in remedy.items()})) == 1
    with pytest.raises(ValueError, match="unknown expert; got 'aa'; allowed a, b"):
        experts.weights({"aa": 1.0})
    with pytest.raises(ValueError, match="has no experts"):
        ExpertSet(folder=tmp_path).weights()


def changed(content: dict[str, Any], **expert: Any) -> str:
    return json.dumps({**content, "experts": [{**content["experts"][0], **expert}, *content["experts"][1:]]})


def test_a_hostile_set_file_is_refused_in_one_error(tmp_path: Path) -> None:
    two(tmp_path)
    path = tmp_path / "set" / "set.json"
    good = json.loads(path.read_text())
    outside = "is outside the set's folder"
    (tmp_path / "set" / "link").symlink_to(tmp_path / "a")
    cases = {
        changed(good, checkpoint="../a"): outside, changed(good, checkpoint=str(tmp_path / "a")): outside,
        changed(good, checkpoint="b/../../a"): outside, changed(good, checkpoint="link"): outside,
        changed(good, checkpoint="."): outside, changed(good, checkpoint="a\0"): "matching regex",
        changed(good, checkpoint="\ud800"): "matching regex",
        changed(good, name="b"): "two experts have the same name", changed(good, name="../x"): "matching regex",
        changed(good, tokenizer_sha256="0" * 64): "different tokenizers", changed(good, parameters=-1): ">= 0",
        changed(good, tokens=1 << 60): "<= ", changed(good, tokens=1.5): "Expected `int`",
        json.dumps({**good, "prior": {"weights": [0.5, 0.4], "documents": []}}): "2 weights of the sum 0.9",
        json.dumps({**good, "prior": {"weights": [1.0], "documents": []}}): "1 weights",
        json.dumps({**good, "prior": {"weights": [2.0, -1.0], "documents": []}}): "<= 1",
        json.dumps({"experts": {}}): "Expected `array`", "[]": "Expected `object`", "{": "no JSON",
        "[" * 100_000: "no JSON", '{"experts": [NaN]}': "no JSON",
    }  # fmt: skip
    for text, reason in cases.items():
        path.write_text(text)
        with pytest.raises(DataError, match="thinwire experts add") as refused:
            ExpertSet.load(tmp_path / "set")
        assert reason in str(refused.value), (text[:80], refused.value)
    path.write_text(changed(good, checkpoint="gone"))
    with pytest.raises(CheckpointError, match="gone holds no finished run"):
        ExpertSet.load(tmp_path / "set")
    with pytest.raises(DataError, match="cannot read"):
        ExpertSet.load(tmp_path / "nothing")
    path.unlink()
    os.mkfifo(path)  # opened plainly, it would be waited for
    with pytest.raises(DataError, match=r"set.json is no regular file; `thinwire experts add`"):
        ExpertSet.load(tmp_path / "set")


class Constant(torch.nn.Module):
    vocab_size, max_seq_len = 3, 8

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 3)


def test_a_cached_prior_loads_only_the_most_probable_members(tmp_path: Path) -> None:
    two(tmp_path)
    opened: list[Path] = []

    def open_model(folder: Path) -> torch.nn.Module:
        opened.append(folder)
        return Constant()

    experts = ExpertSet.load(tmp_path / "set", open_model=open_model)
    for options, reason in (
        ({"prior": "cached"}, "try --prior cached --development FILE"),
        ({"prior": "bayes"}, "unknown --prior; got 'bayes'; allowed uniform, updating, cached, average"),
        ({"prior": "uniform", "most_members": 1}, "--most-members chooses by a cached prior"),
    ):
        with pytest.raises(ValueError) as refused:
            experts.ensemble(**options)
        assert reason in str(refused.value)
    prior = CachedPrior(weights=(0.2, 0.8), documents=())
    cached = ExpertSet(folder=experts.folder, experts=experts.experts, prior=prior, open_model=open_model)
    assert cached.ensemble("cached").prior.tolist() == pytest.approx([0.2, 0.8]) and len(opened) == 2
    assert cached.ensemble("cached", most_members=1).names == ("b",) and opened[2:] == [tmp_path / "set" / "b"]
    with pytest.raises(ValueError, match="got 3 with --prior cached; allowed 1 to 2"):
        cached.ensemble("cached", most_members=3)
    assert cached.add(run(tmp_path / "c", 3.0), name="c").prior is None, "a prior is of the members that it knew"
    tokenizer = tmp_path / "set" / "a" / "model" / "tokenizer.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()), indent=4))
    assert experts.ensemble().names == ("a", "b"), "spaces change no tokenizer"
    tokenizer.write_text("{}")
    with pytest.raises(CheckpointError, match=r"another tokenizer than set.json says"):
        experts.ensemble()


def test_a_document_that_a_prior_was_computed_on_is_refused() -> None:
    prior = CachedPrior(weights=(1.0,), documents=(document_hash("some text"),))
    prior.check("other text")
    with pytest.raises(DataError, match=r"begins 'some text'.*; give --development of other text"):
        prior.check("some text")
