"""Digits learned by ten clients under Flower's simulation, with coded updates: the recipe `flower-digits`.

    thinwire recipes flower-digits            # runs this file
    thinwire recipes cp flower-digits         # copies it, to change it: python flower_digits.py

Nothing is downloaded: the images are a part of scikit-learn. A client gets a tenth of them.
"""

from __future__ import annotations

import logging
import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from thinwire.errors import MissingExtra
from thinwire.integrations import flower as thin

try:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
except ImportError as error:
    raise MissingExtra.of("flwr", extra="flower") from error

CLIENTS, ROUNDS, EPOCHS, BATCH, HELD_OUT = 10, 8, 2, 16, 360
UPLINK = thin.Uplink("e3m0")
DOWNLINK = thin.Downlink("e3m0")


def make_model() -> nn.Module:
    """Build a network of 9,610 parameters; the weights are the same for every caller."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def digits(client: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (items, 64) in [0, 1] and their digits (items,): a client's own, or None for the held-out ones."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    items = order[:HELD_OUT] if client is None else order[HELD_OUT + client :: CLIENTS]
    return torch.tensor(found.data[items] / 16, dtype=torch.float32), torch.tensor(found.target[items])


def accuracy(model: nn.Module) -> float:
    """Return the share of held-out digits that a model names."""
    images, labels = digits()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


client_app = ClientApp(mods=[thin.client_mod(UPLINK)])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's own digits: thinwire changes nothing here."""
    torch.set_num_threads(1)
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = digits(int(context.node_config["partition-id"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(int(message.content["config"]["server-round"]))
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(labels), "loss": float(loss.detach())})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Average the clients' updates, and print accuracy and bytes."""
    rounds, clients = int(context.run_config.get("rounds", ROUNDS)), int(context.run_config.get("clients", CLIENTS))
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy = thin.wrap(inner, UPLINK, down=DOWNLINK)
    model = make_model()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": accuracy(model)})

    result = strategy.start(
        grid, ArrayRecord(model.state_dict()), num_rounds=rounds, evaluate_fn=evaluate, train_config=ConfigRecord({})
    )
    final = result.evaluate_metrics_serverapp[rounds]["accuracy"]
    sent = sum(row.up_bytes + row.down_bytes for row in strategy.rounds)
    dense = sum(row.dense_up_bytes + row.dense_down_bytes for row in strategy.rounds)
    print(strategy.report())
    print(f"accuracy {final:.3f} after {rounds} rounds; {sent / 1e6:.2f} MB sent, {dense / 1e6:.2f} MB without a code")


def run() -> None:
    """Run it in Flower's simulation, one client after another: most of its time goes into starting processes."""
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_worker_niceness", "0")  # else a busy machine starts its processes last
    ray = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "log_to_driver": False}
    resources = {"init_args": ray, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)


if __name__ == "__main__":
    run()
