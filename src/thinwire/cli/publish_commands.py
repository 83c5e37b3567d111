"""`thinwire publish`, `follow` and `fetch`: weights for all that follow, as patches in a folder, bucket or relay."""

from __future__ import annotations

import json as json_format
import os
import re
import secrets
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.argument_parsing import argument, command
from thinwire.cli.output import log, printable
from thinwire.errors import NotThere, ThinwireError, refusal
from thinwire.options import option
from thinwire.units import format_bytes

if TYPE_CHECKING:
    from thinwire.publish.subscriber import WeightSubscriber

_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Publish the weights of a model as the next version of a stream, and print its hash.

    A model is a safetensors file, a folder with some, or a finished run. Only what has changed since the version before
    is sent where that is fewer bytes. From a loop of your own use thinwire.WeightPublisher.
    """

    model: Path = argument("MODEL")
    """File or folder of weights."""
    to: str
    """Address of the stream, such as s3://bucket/run#SECRET or file:///folder#SECRET. Without a secret one is made."""
    code: str = option("exact-bf16", choices=("exact-bf16", "exact", "e3m0"))
    """exact-bf16: floats as bfloat16, bit for bit; exact: in their own types; e3m0: lossy where much has changed."""
    step: int = option(0, least=0)
    """Number of your own that followers see."""
    json: bool = False
    """Print one JSON object on stdout instead of lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """Follow published weights: write each version into a folder once it is verified. Ctrl-C ends it.

    A follower on a slow wire skips versions.
    """

    address: str = argument("ADDRESS")
    """Address of the stream, with its secret."""
    out: Path
    """Folder: model.safetensors, the files that were published beside it, and version.json, which is written last."""
    exec: str | None = None
    """Shell command after each version; it finds THINWIRE_VERSION, THINWIRE_STEP and THINWIRE_FOLDER."""
    also: tuple[str, ...] = ()
    """Further addresses of the same stream, read at the same time; repeatable."""
    versions: int = option(0, least=0)
    """Versions to write before it ends; 0 follows without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Fetch published weights by the hash that thinwire publish printed, from several sources at once.

    Every byte is verified; a source that sends wrong ones is named and not asked again.
    """

    hash: str = argument("HASH")
    """64 hexadecimal digits."""
    source: tuple[str, ...] = ()
    """Address of a stream that holds it, with its secret; repeatable."""
    out: Path
    """New or empty folder."""


@command("publish", PublishOptions)
def publish(options: PublishOptions) -> int:
    """Run `thinwire publish`."""
    if not options.model.exists():
        raise refusal("there is no such model", got=options.model, allowed="a file or folder of weights",
                      remedy="thinwire export RUN --to safetensors --out FOLDER")  # fmt: skip
    from thinwire.carriers.open import CarrierAddress, read_address
    from thinwire.publish.manifest import describe
    from thinwire.publish.model_files import read_model
    from thinwire.publish.publisher import WeightPublisher
    from thinwire.transport.secret import SECRET_BYTES, Secret

    address, made = read_address(options.to), ""
    if address.secret is None:
        address = CarrierAddress(place=address.place, secret=Secret(key=secrets.token_bytes(SECRET_BYTES)))
        made = address.text()
    tensors, files = read_model(options.model)
    problems: list[str] = []
    publisher = WeightPublisher(
        tensors, to=address.text(), code=options.code, files=files, in_background=False, on_problem=problems.append
    )
    version = publisher.publish(options.step)
    if version is None or publisher.newest is None:
        raise ThinwireError(problems[-1])
    found = {**describe(publisher.newest), "bytes_sent": publisher.bytes_sent, **({"address": made} if made else {})}
    if options.json:
        print(json_format.dumps(found), flush=True)
        return 0
    print(f"version {version}: {format_bytes(publisher.bytes_sent)} sent to {address.place}, {options.code}")
    print(f"hash {found['manifest_sha256']}")
    if made:
        print(f"follow it by this address, which is a secret: thinwire follow {made} --out FOLDER")
    return 0


@command("follow", FollowOptions, remedy="choose another --out")
def follow(options: FollowOptions) -> int:
    """Run `thinwire follow`."""
    from thinwire.publish.model_files import write_version

    subscriber = _subscriber((options.address, *options.also), name="follow")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    written = 0
    try:
        while not options.versions or written < options.versions:
            before = subscriber.bytes_received
            if not subscriber.wait(_WAIT_S) or subscriber.held is None:
                continue
            write_version(subscriber.held, subscriber.files(), options.out)
            written += 1
            manifest = subscriber.held.manifest
            print(
                f"version {manifest.version}, step {manifest.step}: {format_bytes(subscriber.bytes_received - before)} "
                f"received, {subscriber.num_skipped} versions skipped so far", flush=True,
            )  # fmt: skip
            if options.exec is not None:
                _run(options.exec, folder=options.out, version=manifest.version, step=manifest.step)
    except KeyboardInterrupt:
        log(f"stopped after version {subscriber.version}", command="follow")
    return 0


@command("fetch", FetchOptions, remedy="choose another --out")
def fetch(options: FetchOptions) -> int:
    """Run `thinwire fetch`."""
    if re.fullmatch(r"[0-9a-f]{64}", options.hash) is None:
        raise refusal("the hash is none", got=repr(options.hash[:70]), allowed="64 hexadecimal digits",
                      remedy="the line that thinwire publish printed")  # fmt: skip
    if not options.source:
        raise refusal(
            "there is no source", got="no --source", allowed="one or more", remedy="--source file:///folder#SECRET"
        )
    if options.out.exists() and any(options.out.iterdir()):
        raise refusal("the folder is not empty", got=options.out, allowed="a new or empty one", remedy="another --out")
    from thinwire.publish.model_files import write_version

    subscriber = _subscriber(options.source, name="fetch")
    subscriber.held = subscriber.fetch(bytes.fromhex(options.hash))
    write_version(subscriber.held, subscriber.files(), options.out)
    print(f"version {subscriber.version}: {format_bytes(subscriber.bytes_received)} received into {options.out}")
    return 0


def _subscriber(addresses: tuple[str, ...], *, name: str) -> WeightSubscriber:
    from thinwire.publish.subscriber import WeightSubscriber

    try:
        return WeightSubscriber(addresses, on_finding=lambda text: log(printable(text), command=name))
    except NotThere as error:
        raise NotThere(f"{error}; start the publisher first, or check the address") from error


def _run(text: str, *, folder: Path, version: int, step: int) -> None:
    added = {"THINWIRE_VERSION": str(version), "THINWIRE_STEP": str(step), "THINWIRE_FOLDER": str(folder)}
    code = subprocess.run(text, shell=True, env={**os.environ, **added}, check=False).returncode
    if code:
        log(f"--exec ended with {code} after version {version}; going on", command="follow")
