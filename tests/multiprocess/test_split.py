"""A server of middle layers is killed in the middle of steps; the client's loss curve does not change."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from thinwire.cli.main import main
from thinwire.codecs.activation_code import ActivationCode
from thinwire.split import RemoteBody, around, connect
from thinwire.transport.secret import make_secret

WIDTH, LAYERS = 16, 4
TOKENS = torch.randint(61, (5, 2, 6), generator=torch.Generator().manual_seed(1))


class Server:
    """`thinwire split serve` as a process, which can be killed and started again at the same port."""

    def __init__(self, folder: Path, *more: str) -> None:
        self._words = [
            sys.executable, "-m", "thinwire.cli.main", "split", "serve", "--model", f"hf:{folder / 'model'}",
            "--layers", "1:3", "--secret", str(folder / "job.secret"), "--address", "127.0.0.1", *more,
        ]  # fmt: skip
        self.port = 0
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([*self._words, "--port", str(self.port)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"at port (\d+)", self.process.stdout.readline())
        assert found is not None
        self.port = int(found[1])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2
        )
    ).save_pretrained(tmp_path / "model")
    make_secret(tmp_path / "job.secret")
    return tmp_path


def curve(folder: Path, server: Server, *, is_killed: bool) -> tuple[list[float], RemoteBody]:
    """Train five steps of two passes, and return the losses; kill the server at three kinds of moments."""
    body = connect(f"127.0.0.1:{server.port}", secret=folder / "job.secret", code=ActivationCode())
    model: Any = around(transformers.LlamaForCausalLM.from_pretrained(folder / "model"), head=1, tail=1, body=body)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step, tokens in enumerate(TOKENS):
        for number, row in enumerate(tokens):
            restart = None
            if is_killed and (step, number) == (1, 1):  # while a pass is asked for and not answered
                server.process.send_signal(signal.SIGSTOP)
                restart = threading.Thread(target=_restart_later, args=(server,))
                restart.start()
            loss = model(input_ids=row[None], labels=row[None]).loss
            if restart is not None:
                restart.join()
            if is_killed and (step, number) == (2, 0):  # between a pass and its gradient
                server.kill()
                server.start()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if is_killed and step == 3:  # between the gradients and their step
            server.kill()
            server.start()
        body.step()
    body.close()
    return losses, body


def _restart_later(server: Server) -> None:
    time.sleep(0.3)
    server.kill()
    server.start()


@pytest.mark.parametrize("more", [[], ["--lr", "1e-2", "--state"]], ids=["frozen", "trained"])
def test_a_server_killed_in_mid_step_changes_no_loss(folder: Path, more: list[str]) -> None:
    found = {}
    for is_killed in (False, True):
        state = [str(folder / f"body-{is_killed}.pt")] if more else []
        server = Server(folder, *more, *state)
        try:
            found[is_killed], body = curve(folder, server, is_killed=is_killed)
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.process.communicate()
        if not is_killed:
            assert server.process.returncode == 0
            numel, passes, code = TOKENS.shape[2] * WIDTH, TOKENS.shape[0] * TOKENS.shape[1], ActivationCode()
            assert body.sent_bytes == {
                "forward": passes * code.payload_bytes(numel),
                "gradient": passes * code.payload_bytes(numel, is_forward=False),
            }
    assert found[True] == found[False] and found[False][-1] < found[False][0]


def test_wrong_options_of_the_command_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["split", "serve", "--model", f"hf:{folder / 'model'}", "--secret", str(folder / "job.secret")]
    for words, code, text in (
        (["split"], 2, "unknown action of thinwire split"),
        ([*given, "--layers", "3"], 2, "try --layers 2:30"),
        ([*given, "--layers", "2:9"], 2, "there are no such layers; got 2:9; allowed 0:4; try 1:3"),
        ([*given, "--layers", "1:3", "--lr", "1"], 2, "try --lr 1e-4 --state body.pt"),
        ([*given, "--layers", "1:3", "--lr", "0"], 2, "--lr is not above 0"),
        ([*given[:4], "--layers", "1:3", "--secret", str(folder / "none")], 2, "there is no secret on this host"),
        (["split", "serve", "--model", str(folder / "run"), "--layers", "1:3", *given[4:]], 1, "run"),
    ):
        assert main(words) == code, words
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("thinwire")]
        assert len(lines) == 1 and text in lines[0], lines
