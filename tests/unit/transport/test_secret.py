"""The secret of a job: made once, readable by its owner alone, refused where it is anything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thinwire.errors import MissingExtra
from thinwire.transport.connect import connect
from thinwire.transport.secret import Secret, make_secret, need_pyzmq, read_secret


def test_what_is_made_is_read_again_and_only_its_owner_can(tmp_path: Path) -> None:
    path = tmp_path / "job.secret"
    made = make_secret(path)
    assert len(made.key) == 32 and read_secret(path).key == made.key
    assert path.stat().st_mode & 0o777 == 0o600
    assert make_secret(tmp_path / "other").key != made.key


def test_a_secret_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "job.secret"
    made = make_secret(path)
    with pytest.raises(ValueError, match=r"exists already, and a secret is not overwritten; got .*; try another name"):
        make_secret(path)
    assert read_secret(path).key == made.key
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="exists already"):
        make_secret(link)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"folder of the secret is missing; got {tmp_path / 'none'}; .* try mkdir -p"):
        make_secret(tmp_path / "none" / "job.secret")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_file_that_others_can_use_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "job.secret"
    make_secret(path)
    path.chmod(mode)
    with pytest.raises(
        ValueError, match=f"got {path} with mode {mode:04o}; allowed mode 0600 or 0400; try chmod 600 {path}"
    ):
        read_secret(path)
    path.chmod(0o400)
    read_secret(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"thinwire-secret-v1 \n",
        b"thinwire-secret-v1 " + b"a" * 63,
        b"thinwire-secret-v1 " + b"a" * 65,
        b"thinwire-secret-v1 " + b"g" * 64,
        b"thinwire-secret-v1 " + b"A" * 64,
        b"thinwire-secret-v2 " + b"a" * 64,
        b"thinwire-secret-v1 " + b"a" * 64 + b"\n\n",
        b"a" * 64,
        bytes(32),
        b"\xff" * 10_000_000,
    ],
    ids=lambda content: f"{len(content)}-{content[:24]!r}",
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.secret"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"holds no secret; got .*; allowed 'thinwire-secret-v1' and 64 hexadecimal digits"
    ):
        read_secret(path)


def test_a_file_that_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"got {tmp_path / 'none'}; .*; try thinwire secret {tmp_path / 'none'}"):
        read_secret(tmp_path / "none")
    with pytest.raises(
        ValueError, match=f"the secret cannot be read; got {tmp_path}: Is a directory; .* try thinwire secret"
    ):
        read_secret(tmp_path)


def test_a_secret_is_in_no_text_that_is_shown() -> None:
    secret = Secret(key=b"s" * 32)
    assert "sss" not in repr(secret) and (b"s" * 8).hex() not in repr(secret)
    assert secret.fingerprint != Secret(key=b"t" * 32).fingerprint
    assert len({secret.derive("a"), secret.derive("b"), secret.key}) == 3


def test_with_a_secret_the_ranks_of_a_replica_are_in_a_world_of_their_own_on_any_port(tmp_path: Path) -> None:
    make_secret(tmp_path / "job.secret")
    with pytest.raises(ValueError, match=r"got solo=False; allowed solo=True, .*; try connect\(solo=True\)"):
        connect(secret=tmp_path / "job.secret", ranks_per_replica=2)
    with pytest.raises(ValueError, match="port_range reach connections of thinwire's own"):
        connect(secret=tmp_path / "job.secret", ranks_per_replica=2, solo=True, port_range="29500-29600")


def test_a_process_alone_needs_no_wire_but_its_secret_is_checked(tmp_path: Path) -> None:
    make_secret(tmp_path / "job.secret")
    transport = connect(secret=tmp_path / "job.secret")
    assert transport.num_replicas == 1
    transport.close()
    with pytest.raises(ValueError, match="there is no secret"):
        connect(secret=tmp_path / "none")


def test_without_pyzmq_there_is_one_error_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingExtra, match=r"pyzmq is not installed; install it with: pip install 'thinwire\[wire\]'"):
        need_pyzmq()
