"""Integrations without their libraries: the error is the command that installs them."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from thinwire.errors import MissingExtra


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("hf", "transformers", "hf"), ("lightning", "lightning", "lightning"), ("titan", "torchtitan", "titan")],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"thinwire.integrations.{module}"
    for loaded in [name, *(other for other in sys.modules if other == package or other.startswith(f"{package}."))]:
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    command = re.escape(f"{package} is not installed; install it with: pip install 'thinwire[{extra}]'")
    with pytest.raises(MissingExtra, match=command):
        importlib.import_module(name)
