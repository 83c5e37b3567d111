"""Accuracy and bytes of coded updates under Flower, of ten clients: codecs, sign masks, orthogonal tasks, adapters.

    .venv/flower/bin/python benchmarks/flower_clients.py codecs        # the table of codecs, IID and Dirichlet(0.3)
    .venv/flower/bin/python benchmarks/flower_clients.py tasks         # forgetting over four permuted tasks
    .venv/flower/bin/python benchmarks/flower_clients.py adapters      # CELLM: masked adapters of a small Llama

Results are appended to results/flower_clients.jsonl; `report` prints the tables of what is stored. Clients run in this
process, by the grid of the tests; bytes are those that Flower serialises, a client and round. Time is that of both
directions at 1 Mbit/s.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.serverapp.strategy import FedAdam, FedAvg  # noqa: E402

from tests.flower.in_process_grid import InProcessGrid  # noqa: E402
from thinwire.cli.flower_digits import HELD_OUT  # noqa: E402
from thinwire.integrations import flower as thin  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "flower_clients.jsonl"
CLIENTS, ROUNDS, SEEDS, WIDTH, WIDE = 10, 20, 3, 128, 1024
TASKS, TASK_ROUNDS = 4, 20
PRETRAIN, ADAPTER_ROUNDS = 600, 20


def zipped(**more: Any) -> thin.Uplink:
    """Return FedZip's uplink at 1 %."""
    return thin.Uplink("top-k", density=0.01, values="clusters", **more)


E3M0 = thin.Downlink("e3m0")
ROWS: dict[str, tuple[thin.Uplink, thin.Downlink | None, int, float]] = {
    "dense": (thin.Uplink("float32"), None, WIDTH, 0.0),
    "fp16": (thin.Uplink("float16"), thin.Downlink("float16"), WIDTH, 0.0),
    "E3M0": (thin.Uplink("e3m0"), E3M0, WIDTH, 0.0),
    "FedZip 1 %": (zipped(), E3M0, WIDTH, 0.0),
    "FedZip 1 %, no error feedback": (zipped(error_feedback=False), E3M0, WIDTH, 0.0),
    "top-k 2 %": (thin.Uplink("top-k", density=0.02), E3M0, WIDTH, 0.0),
    "sign": (thin.Uplink("sign-mean"), E3M0, WIDTH, 0.0),
    "sign mask, keep 0.5": (thin.Uplink("sign", sends="signs"), thin.Downlink("sign", sends="values"), WIDTH, 0.5),
    "dense, width 1024": (thin.Uplink("float32"), None, WIDE, 0.0),
    "E3M0, width 1024": (thin.Uplink("e3m0"), E3M0, WIDE, 0.0),
    "sign mask, keep 0.5, width 1024": (
        thin.Uplink("sign", sends="signs"), thin.Downlink("sign", sends="values"), WIDE, 0.5,
    ),
}  # fmt: skip


def all_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels in the recipe's order: the first ones are held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return (found.data[order] / 16).astype(np.float32), found.target[order]


def shares(labels: np.ndarray, split: str, seed: int) -> list[np.ndarray]:
    """Return the items of each client: at random, or each class by Dirichlet(0.3) over the clients."""
    rng = np.random.default_rng([seed, 1])
    if split == "IID":
        return np.array_split(rng.permutation(len(labels)), CLIENTS)
    while True:
        parts: list[list[int]] = [[] for _ in range(CLIENTS)]
        for digit in range(10):
            items = rng.permutation(np.flatnonzero(labels == digit))
            cuts = (np.cumsum(rng.dirichlet(np.full(CLIENTS, 0.3)))[:-1] * len(items)).astype(int)
            for part, some in zip(parts, np.split(items, cuts), strict=True):
                part += some.tolist()
        if min(map(len, parts)) >= 8:
            return [np.array(part) for part in parts]


def network(width: int, seed: int) -> nn.Module:
    """Build the network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def learn(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, seed: int, *, lr: float, adam: bool = False
) -> None:
    """Train for two epochs."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=lr) if adam else torch.optim.SGD(trained, lr=lr, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for batch in torch.randperm(len(labels), generator=generator).split(16):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()


def codec_run(name: str, split: str, seed: int) -> dict[str, Any]:
    """Return one row's accuracies by round, and its bytes."""
    up, down, width, keep = ROWS[name]
    images, labels = all_digits()
    test = torch.from_numpy(images[:HELD_OUT]), torch.from_numpy(labels[:HELD_OUT])
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    own = [(torch.from_numpy(images[part]), torch.from_numpy(labels[part])) for part in shares(labels, split, seed)]
    model = network(width, seed)
    rules: list[Any] = []
    if keep:
        up = thin.Uplink("sign", sends="signs", tag=thin.sign_mask(model, keep=keep, seed=seed))
        rules = [thin.MajoritySigns()]
    state = (lambda: thin.mask_state(model)) if keep else model.state_dict
    app = ClientApp(mods=[thin.client_mod(up)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        thin.load_subset(model, message.content["arrays"].to_torch_state_dict())
        part, round = own[int(context.node_config["partition-id"])], int(message.content["config"]["server-round"])
        learn(model, *part, seed * 1000 + round, lr=0.003 if keep else 0.1, adam=bool(keep))
        metrics = MetricRecord({"num-examples": len(part[1])})
        return Message(RecordDict({"arrays": ArrayRecord(state()), "metrics": metrics}), reply_to=message)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        thin.load_subset(model, arrays.to_torch_state_dict())
        with torch.no_grad():
            return MetricRecord({"accuracy": float((model(test[0]).argmax(1) == test[1]).float().mean())})

    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up, down=down, rules=rules)
    result = strategy.start(
        InProcessGrid(app, CLIENTS), ArrayRecord(state()), num_rounds=ROUNDS, evaluate_fn=evaluate,
        train_config=ConfigRecord({}),
    )  # fmt: skip
    later = strategy.rounds[1:]  # the first download is a whole model
    curve = [result.evaluate_metrics_serverapp[round]["accuracy"] for round in range(1, ROUNDS + 1)]
    return {
        "kind": "codec", "name": name, "split": split, "seed": seed, "accuracy": curve,
        "kb_up": statistics.mean(row.up_bytes / row.clients / 1000 for row in later),
        "kb_down": statistics.mean(row.down_bytes / row.asked / 1000 for row in later),
        "kb_first_down": strategy.rounds[0].down_bytes / CLIENTS / 1000,
        "rejected": sum(row.num_rejected for row in strategy.rounds),
    }  # fmt: skip


def tasks_run(is_orthogonal: bool, seed: int) -> dict[str, Any]:
    """Return accuracies of all tasks after each of four permuted tasks, and the uplink's bytes."""
    images, labels = all_digits()
    rng = np.random.default_rng([seed, 2])
    orders = [np.arange(64), *(rng.permutation(64) for _ in range(TASKS - 1))]
    test = torch.from_numpy(images[:HELD_OUT]), torch.from_numpy(labels[:HELD_OUT])
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    own = [(torch.from_numpy(images[part]), torch.from_numpy(labels[part])) for part in shares(labels, "IID", seed)]
    model, up, task = network(WIDTH, seed), thin.Uplink("float32"), 0
    app = ClientApp(mods=[thin.client_mod(up)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, targets = own[int(context.node_config["partition-id"])]
        round = int(message.content["config"]["server-round"])
        learn(model, inputs[:, orders[task]], targets, seed * 1000 + task * 100 + round, lr=0.05)
        record = ArrayRecord(model.state_dict())
        metrics = MetricRecord({"num-examples": len(targets)})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    @app.query("sketch")
    def sketch(message: Message, context: Context) -> Message:
        inputs, _ = own[int(context.node_config["partition-id"])]
        return thin.sketch_reply(message, context, model, [inputs[:, orders[task]]])

    rules = [thin.OrthogonalTasks(eps=0.96)] if is_orthogonal else []
    strategy = thin.wrap(FedAvg(fraction_evaluate=0.0), up, rules=rules)
    grid, arrays, accuracies = InProcessGrid(app, CLIENTS), ArrayRecord(model.state_dict()), []
    for task in range(TASKS):
        arrays = strategy.start(grid, arrays, num_rounds=TASK_ROUNDS).arrays
        if is_orthogonal:
            strategy.end_task(grid, arrays)
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            accuracies.append(
                [float((model(test[0][:, order]).argmax(1) == test[1]).float().mean()) for order in orders[: task + 1]]
            )
    best = [accuracies[one][one] - accuracies[-1][one] for one in range(TASKS - 1)]
    return {
        "kind": "tasks", "name": "orthogonal" if is_orthogonal else "FedAvg", "seed": seed, "accuracies": accuracies,
        "forgetting": statistics.mean(best), "final": statistics.mean(accuracies[-1]),
        "up_bytes": sum(row.up_bytes for row in strategy.rounds),
        "ranks": {name: one.shape[1] for name, one in rules[0].bases.items()} if rules else {},
    }  # fmt: skip


def masked(up: float, down: float, **tiers: float) -> tuple[thin.Uplink, thin.Downlink]:
    """Return CELLM's codes of two densities."""
    return (
        thin.Uplink("top-k", density=up, error_feedback=False, tiers=tiers),
        thin.Downlink("top-k", density=down, sends="values", tiers=tiers),
    )


# codes, the adapters that are trained, and whether the server steps by Adam
ADAPTERS: dict[str, tuple[thin.Uplink, thin.Downlink | None, str, bool]] = {
    "dense": (thin.Uplink("float32"), None, "lora_", False),
    "CELLM 1/4 of B": (*masked(1 / 4, 1 / 4), "lora_B", False),
    "CELLM 1/8 of B": (*masked(1 / 8, 1 / 8), "lora_B", False),
    "Adam: dense": (thin.Uplink("float32"), None, "lora_", True),
    "Adam: CELLM 1/4": (*masked(1 / 4, 1 / 4), "lora_", True),
    "Adam: CELLM 1/8": (*masked(1 / 8, 1 / 8), "lora_", True),
    "Adam: CELLM tiers 1/16, 1/4, 1": (*masked(1 / 4, 1 / 4, phone=1 / 16, pc=1.0), "lora_", True),
    "Adam: top-k 1/16 with feedback, E3M0 down": (thin.Uplink("top-k", density=1 / 16), E3M0, "lora_", True),
    "Adam: sign-mean, E3M0 down": (thin.Uplink("sign-mean"), E3M0, "lora_", True),
    "Adam: E3M0 both ways": (thin.Uplink("e3m0"), E3M0, "lora_", True),
}  # fmt: skip


def text_batches(text: torch.Tensor, count: int, seed: int, size: int = 8) -> torch.Tensor:
    """Return random windows of a text, (count, size, 65)."""
    starts = torch.randint(len(text) - 65, (count, size), generator=torch.Generator().manual_seed(seed))
    return text[starts[..., None] + torch.arange(65)]


def llama_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next bytes."""
    logits = model(input_ids=batch[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@functools.cache
def pretrained(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a Llama of 0.14 million parameters that read Python's library, and that text in swapped case."""
    import transformers

    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    raw = b"".join(one.read_bytes() for one in files)[:1_500_000]
    text = torch.tensor(list(raw))
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for batch in text_batches(text[:1_000_000], PRETRAIN, seed, size=16):
        optimizer.zero_grad()
        llama_loss(base, batch).backward()
        optimizer.step()
    return base, torch.tensor(list(raw.swapcase()))


def adapters_run(name: str, seed: int) -> dict[str, Any]:
    """Return the held-out loss of adapters for text in swapped case, by round, and the bytes of both directions."""
    import peft

    base, other = pretrained(seed)
    torch.manual_seed(seed)
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    held_out = text_batches(other[1_200_000:], 8, seed, size=32)
    up, down, trained_names, has_adam = ADAPTERS[name]
    for parameter, one in model.named_parameters():
        one.requires_grad_(trained_names in parameter)
    app = ClientApp(mods=[thin.client_mod(up)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        thin.load_subset(model, message.content["arrays"].to_torch_state_dict())
        client, round = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
        own = other[client * 100_000 : (client + 1) * 100_000]
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05 if has_adam else 0.3, momentum=0.9)
        for batch in text_batches(own, 4, seed * 10_000 + round * 10 + client):
            optimizer.zero_grad()
            llama_loss(model, batch).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 32})
        content = RecordDict({"arrays": ArrayRecord(thin.subset_state(model)), "metrics": metrics})
        return Message(content, reply_to=message)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round % 5:
            return MetricRecord({"loss": 0.0})
        thin.load_subset(model, arrays.to_torch_state_dict())
        with torch.no_grad():
            return MetricRecord({"loss": statistics.mean(float(llama_loss(model, batch)) for batch in held_out)})

    tiers = ["phone", "", "pc"] if up.tiers else [""]
    grid = InProcessGrid(app, CLIENTS, lambda node: {"tier": tiers[node % len(tiers)]})
    adam = FedAdam(fraction_evaluate=0.0, eta=5e-3, beta_2=0.999, tau=1e-8)
    strategy = thin.wrap(adam if has_adam else FedAvg(fraction_evaluate=0.0), up, down=down)
    start = ArrayRecord(thin.subset_state(model))
    result = strategy.start(grid, start, num_rounds=ADAPTER_ROUNDS, evaluate_fn=evaluate)
    later = strategy.rounds[1:]
    return {
        "kind": "adapters", "name": name, "split": None, "seed": seed,
        "loss": [result.evaluate_metrics_serverapp[round]["loss"] for round in range(0, ADAPTER_ROUNDS + 1, 5)],
        "kb_up": statistics.mean(row.up_bytes / row.clients / 1000 for row in later),
        "kb_down": statistics.mean(row.down_bytes / row.asked / 1000 for row in later),
    }  # fmt: skip


def stored(kind: str) -> list[dict[str, Any]]:
    """Return the stored results of a kind."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [one for one in map(json.loads, lines) if one["kind"] == kind]


def report() -> None:
    """Print the tables of the docs."""
    print("| split | code | accuracy, seeds 0, 1, 2 | mean | kB up | kB down | s at 1 Mbit/s | factor |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for split in ("IID", "Dirichlet 0.3"):
        dense = {}
        for name in ROWS:
            runs = [one for one in stored("codec") if (one["name"], one["split"]) == (name, split)]
            if not runs:
                continue
            ends = [one["accuracy"][-1] for one in sorted(runs, key=lambda one: one["seed"])]
            up, down = (statistics.mean(one[key] for one in runs) for key in ("kb_up", "kb_down"))
            dense.setdefault("width" in name, up + down)
            seconds, factor = (up + down) * 8 / 1000, dense["width" in name] / (up + down)
            print(f"| {split} | {name} | {' '.join(f'{one:.3f}' for one in ends)} | {statistics.mean(ends):.3f} | "
                  f"{up:.2f} | {down:.2f} | {seconds:.3f} | {factor:.1f} |")  # fmt: skip
    print("\n| rule | forgetting, seeds 0, 1, 2 | final accuracy | uplink |\n| --- | --- | --- | --- |")
    for name in ("FedAvg", "orthogonal"):
        if runs := [one for one in stored("tasks") if one["name"] == name]:
            lost = " ".join(f"{one['forgetting']:.3f}" for one in runs)
            final = statistics.mean(one["final"] for one in runs)
            print(f"| {name} | {lost} | {final:.3f} | {runs[0]['up_bytes'] / 1e6:.2f} MB |")
    print("\n| adapters | loss, seeds 0, 1, 2 | over dense | kB up | kB down | factor |")
    print("| --- | --- | --- | --- | --- | --- |")
    ends = {(one["name"], one["seed"]): one["loss"][-1] for one in stored("adapters")}
    float32 = 2 * next((one["kb_up"] for one in stored("adapters") if one["name"] == "dense"), 0.0)  # both ways
    for name in ADAPTERS:
        if runs := [one for one in stored("adapters") if one["name"] == name]:
            dense = "Adam: dense" if name.startswith("Adam") else "dense"
            more = statistics.mean(one["loss"][-1] / ends[dense, one["seed"]] - 1 for one in runs)
            up, down = (statistics.mean(one[key] for one in runs) for key in ("kb_up", "kb_down"))
            losses = " ".join(f"{one['loss'][-1]:.3f}" for one in sorted(runs, key=lambda one: one["seed"]))
            print(f"| {name} | {losses} | {100 * more:+.1f} % | {up:.2f} | {down:.2f} | {float32 / (up + down):.1f} |")


def main() -> None:
    """Run what is asked for and not stored yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("codecs", "tasks", "adapters", "report"))
    what = parser.parse_args().what
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    done = {
        (one["name"], one.get("split"), one["seed"]) for kind in ("codec", "tasks", "adapters") for one in stored(kind)
    }
    for seed in range(SEEDS):
        jobs: list[tuple[str, str | None, Any]] = []
        if what == "codecs":
            jobs = [(name, split, codec_run) for split in ("IID", "Dirichlet 0.3") for name in ROWS]
        if what == "tasks":
            jobs = [
                ("FedAvg", None, lambda _, seed: tasks_run(False, seed)),
                ("orthogonal", None, lambda _, seed: tasks_run(True, seed)),
            ]
        if what == "adapters":
            jobs = [(name, None, adapters_run) for name in ADAPTERS]
        for name, split, job in jobs:
            if (name, split, seed) in done:
                continue
            found = job(name, split, seed) if what == "codecs" else job(name, seed)
            with RESULTS.open("a") as file:
                file.write(json.dumps(found) + "\n")
    report()


if __name__ == "__main__":
    main()
