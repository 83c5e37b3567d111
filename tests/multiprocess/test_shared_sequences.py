"""Sequences that real processes share over gloo: exact, with counted bytes, and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from processes import run, values
from torch.nn import functional
from training_runs import DOCUMENTS, OPTIONS, Started, finish, result

from thinwire import sequences

SITES, SEQ_LEN, HEADS, WIDTH = (0, 0, 1, 1), 16, 4, 6
POLICIES = ("helper", "two-level", "heads+sites")


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, heads, SEQ_LEN, WIDTH, generator=generator, dtype=torch.float64) for heads in (HEADS, 2, 2)]


def share_each(policies: list[str]) -> dict[str, Any]:
    import torch.distributed as dist

    from thinwire.transport import group_peers

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for policy in policies:
        if policy == policies[-1]:  # as tensors of a GPU travel
            group_peers.carrier_of = lambda *_: torch.device("cpu")
        seen: list[tuple[Any, int, int]] = []
        peers = group_peers.GroupPeers(dist.group.WORLD, on_message=lambda *one: seen.append(one))  # noqa: B023
        attend: Any = sequences.attention(peers, heads=HEADS, kv_heads=2, policy=policy, sites=SITES)
        attend.peers.sent_bytes = dict.fromkeys(range(4), 0)
        seen.clear()
        own = attend.own_positions(SEQ_LEN)
        query, key, value = (one[:, :, own].requires_grad_() for one in inputs())
        attended = attend(query, key, value)
        attended.square().sum().backward()
        gradients = [one.grad for one in (query, key, value)]
        assert sum(n for way, _, n in seen if way == "sent") == sum(peers.sent_bytes.values())
        found[policy] = {
            "own": own.tolist(), "sent": list(attend.peers.sent_bytes.values()),
            "tensors": [one.flatten().tolist() for one in (attended, *gradients)],
        }  # fmt: skip
    dist.destroy_process_group()
    return found


def test_attention_over_gloo_is_exact_and_sends_the_bytes_of_its_formula() -> None:
    ranks = values(run(share_each, num_ranks=4, arguments={"policies": list(POLICIES)}))
    query, key, value = (one.requires_grad_() for one in inputs())
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    attended.square().sum().backward()
    wanted = [attended.detach(), query.grad, key.grad, value.grad]
    for policy in POLICIES:
        plan = sequences.sequence_plan(policy, sites=SITES, heads=HEADS, kv_heads=2)
        how = {"batch": 1, "seq_len": SEQ_LEN, "head_dim": WIDTH, "item_bytes": 8, "log_sum_bytes": 8}
        passes = [plan.sent_bytes(**how, backward=backward) for backward in (False, True)]
        for rank, found in enumerate(ranks):
            counted = {(rank, target): count for target, count in enumerate(found[policy]["sent"]) if count}
            predicted = {way: sum(sent.get(way, 0) for sent in passes) for way in passes[0].keys() | passes[1].keys()}
            assert counted == {way: count for way, count in predicted.items() if way[0] == rank}, (policy, rank)
            for numbers, whole in zip(found[policy]["tensors"], wanted, strict=True):
                own = whole[:, :, found[policy]["own"]]  # type: ignore[index]
                assert (torch.tensor(numbers, dtype=torch.float64).view_as(own) - own).abs().max() < 1e-10


def test_a_run_that_shares_sequences_trains_as_one_process_and_resumes(tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (texts / f"{number}.txt").write_text(text)
    more = ["--steps", "8", "--data", str(texts), "--cache-dir", str(texts / ".cache"), "--no-samples", *OPTIONS]
    shared = finish(
        Started(
            ["--replicas", "1", "--cp", "2", "--cp-policy", "helper", "--cp-sites", "0,1", "--out", str(out), *more]
        )
    )
    alone = finish(Started(["--replicas", "1", "--out", str(tmp_path / "alone"), *more]))
    assert result(shared)["wire_bytes_sent"] > 0 == result(alone)["wire_bytes_sent"], "keys cross a border"
    assert abs(result(shared)["val_loss"] - result(alone)["val_loss"]) < 1e-3
    for folder in (out, out / "ranks" / "1"):
        shutil.rmtree(folder / "checkpoints" / "step-00000008")
    (out / "summary.json").unlink()
    resumed = finish(Started(["--resume", str(out), "--quiet", "--json"]))
    assert result(resumed)["global_parameters_sha256"] == result(shared)["global_parameters_sha256"]
