"""Names of other libraries that they do not promise to keep, in one table with the versions that the tests passed with.

`check_hooks` runs when an integration is built: an override that its library no longer calls would train, and be wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib.metadata import version

from thinwire.errors import ThinwireError

# What the tests have passed with; other versions are not refused, only untried.
TRIED_VERSIONS = {
    "transformers": "5.23", "trl": "1.16", "peft": "0.21", "accelerate": "1.15", "lightning": "2.6",
    "torchtitan": "0.3",
}  # fmt: skip
# Methods that thinwire overrides or calls, and attributes that it sets, by package.
HOOKS: dict[str, tuple[str, ...]] = {
    "transformers": (
        "create_optimizer", "evaluation_loop", "save_model", "log", "push_to_hub", "init_hf_repo", "_load_best_model",
        "_push_from_checkpoint", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler",
        "_globalstep_last_logged", "_initial_global_step", "is_fsdp_enabled",
    ),
    "lightning": (
        "setup_environment", "setup_optimizers", "optimizer_step", "training_step", "on_train_end", "on_exception",
        "on_validation_start", "on_validation_end", "lightning_module_state_dict", "save_checkpoint",
        "load_optimizer_state_dict", "root_device", "parallel_devices", "_default_root_dir", "_root_dir", "_save_dir",
        "epoch_loop",
        "automatic_optimization", "manual_optimization", "optim_progress", "optim_step_progress",
    ),
    "torchtitan": ("optimizers", "state_dict", "load_state_dict", "step", "zero_grad"),
}  # fmt: skip


def check_hooks(package: str, kinds: Iterable[type]) -> None:
    """Refuse a version of a package that lacks a name of the table.

    Args:
        package: A key of `HOOKS`.
        kinds: The package's classes: each name is an attribute of one of them or of a base, or used in its code.

    Raises:
        ThinwireError: A name is missing; names it, the version and those that were tried.
    """
    known: set[str] = set()
    for kind in {base for one in kinds for base in one.__mro__}:
        known |= set(vars(kind))
        for found in vars(kind).values():
            function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
            known |= set(getattr(getattr(function, "__code__", None), "co_names", ()))
    if missing := [name for name in HOOKS[package] if name not in known]:
        raise ThinwireError(
            f"{package} {version(package)} has no {missing[0]}, which thinwire needs; tried was {package} "
            f"{TRIED_VERSIONS[package]}: pip install '{package}=={TRIED_VERSIONS[package]}.*'"
        )
