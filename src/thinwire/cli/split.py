"""`thinwire split serve`: serves the middle layers of a model to clients that hold texts and labels."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.argument_parsing import command, parse_options
from thinwire.cli.output import log
from thinwire.errors import refusal, unknown_name
from thinwire.options import option
from thinwire.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import nn

_HF = "hf:"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Serve the middle layers of a model to clients that keep texts, labels, head and tail to themselves.

    A client calls thinwire.split.connect with the same secret, and thinwire.split.around with its own layers. Without
    --lr the layers are frozen. Activations are not private: this host can learn much of the texts from them.
    """

    model: str
    """hf:PATH or hf:NAME for a model of transformers, or the folder of a thinwire run."""
    layers: str
    """Layers to serve, such as 2:30 for those with numbers 2 to 29."""
    secret: Path
    """File of the secret that both owners have; make it with thinwire secret FILE."""
    address: str = "::"
    """IP address to listen on; :: is all."""
    port: int = option(29500, least=0, most=65535)
    """Port to listen on; 0 takes a free one."""
    lr: float | None = option(None, above=0, usual=1e-4)
    """Train the layers with AdamW at this learning rate. Default: they are frozen."""
    state: Path | None = None
    """File for trained layers and optimizer, written after each step; a restarted server goes on from it."""
    most_clients: int = option(8, least=1)
    """Clients at once."""
    most_bytes: str = "4GB"
    """What is kept for gradients, of all clients; beyond it a pass is computed again."""
    most_tokens: int = option(65536, least=1)
    """Tokens of one pass."""
    device: str = "cpu"
    """cpu or cuda."""


@command("split")
def main(arguments: Sequence[str]) -> int:
    """Run the command; see `thinwire split serve --help`.

    Returns:
        0 after SIGINT or SIGTERM, 1 for an error while running, 2 for wrong options.
    """
    action, *rest = arguments or ("",)
    if action in ("-h", "--help"):
        rest = ["--help"]
    elif action != "serve":
        raise unknown_name("action of thinwire split", action, ("serve",))
    options = parse_options(ServeOptions, rest, prog="thinwire split serve", basic="model layers secret port lr state")
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", options.layers)
    if found is None or int(found[1]) >= int(found[2]):
        raise refusal("--layers are no layers", got=repr(options.layers), allowed="FIRST:END, without END",
                      remedy="--layers 2:30")  # fmt: skip
    layers = range(int(found[1]), int(found[2]))
    if (options.lr is None) != (options.state is None):
        raise refusal(
            "trained layers are kept in a file, so that a restarted server goes on",
            got="--lr alone" if options.state is None else "--state alone", allowed="--lr with --state, or neither",
            remedy="--lr 1e-4 --state body.pt",
        )  # fmt: skip
    most_bytes = round(parse_bytes(options.most_bytes))
    from thinwire.transport.secret import need_pyzmq, read_secret

    need_pyzmq()
    secret = read_secret(options.secret)
    import torch

    from thinwire.split import BodyServer, middle_layers

    model = _model(options.model, device=options.device)
    body = middle_layers(model, layers).requires_grad_(options.lr is not None)
    optimizer = None if options.lr is None else torch.optim.AdamW(body.parameters(), lr=options.lr)
    server = BodyServer(
        body, layers=layers, secret=secret, optimizer=optimizer, state=options.state,
        address=options.address, port=options.port, most_clients=options.most_clients, most_bytes=most_bytes,
        most_tokens=options.most_tokens, say=lambda text: log(text, command="split"),
    )  # fmt: skip
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    size = sum(one.numel() * one.element_size() for one in body.parameters())
    state = "frozen" if optimizer is None else f"trained, kept in {options.state}"
    print(
        f"layers {options.layers} of {options.model} at port {server.port}: {format_bytes(size)}, {state}", flush=True
    )
    try:
        server.serve(until=is_over.is_set)
    finally:
        server.close()
    return 0


def _model(name: str, *, device: str) -> nn.Module:
    if name.startswith(_HF):
        from thinwire.training.build import check_device
        from thinwire.workloads.language.hf import build_hf_model

        check_device(device)
        return build_hf_model(name[len(_HF) :], device=device).model
    from thinwire.inference import load_trained

    return load_trained(Path(name), device=device).model
