"""Result of a run: the global model on disk, its hash, one object of numbers, and samples of text."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from thinwire.averaging.exchange import codec_at
from thinwire.errors import DesyncError
from thinwire.files import make_readable, replace_whole, write_whole
from thinwire.recording.metrics import ReplicaCounts
from thinwire.runlog.run_numbers import all_reduce_bytes, times_fewer
from thinwire.training.build import make_method
from thinwire.training.config import TrainConfig
from thinwire.version import __version__
from thinwire.workloads.language.hf import has_adapters, merged, save_adapters
from thinwire.workloads.workload import Workload


def parameters_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters: the bytes of each, in the order of their names.

    Example:
        >>> parameters_sha256(nn.Linear(1, 1)) == parameters_sha256(nn.Linear(2, 1))
        False
    """
    return tensors_sha256(dict(model.named_parameters()))


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors: the bytes of each, in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(raw.numpy().tobytes())
    return digest.hexdigest()


def replica_note(reading: ReplicaCounts, *, sha256: str) -> dict[str, Any]:
    """Return a replica's result for the others, with times rounded as in its last line."""
    return {
        "sha256": sha256, "samples": reading.samples, "time_s": round(max(reading.time_s, 1e-4), 4),
        "stalled_s": round(reading.stalled_s, 4),
        "payload_bytes": reading.sent.payload_bytes, "wire_bytes_sent": reading.sent.wire_bytes,
        "wire_bytes_received": reading.received.wire_bytes, "peak_bits_per_s": reading.peak_bits_per_s,
    }  # fmt: skip


def summarise(
    config: TrainConfig, notes: Sequence[Mapping[str, Any]], *, shown: Sequence[float], parameters: int,
    num_fragments: int,
) -> dict[str, Any]:  # fmt: skip
    """Put the replicas' notes together; `shown` is loss and metric of the global parameters."""
    hashes = [note["sha256"] for note in notes]
    if len(set(hashes)) > 1:
        told = ", ".join(f"replica {replica}: {sha256[:12]}" for replica, sha256 in enumerate(hashes))
        raise DesyncError(
            f"the replicas ended with different global parameters ({told}); something changed parameters outside the "
            f"optimizer, or the hosts run different code; resume from a checkpoint before that"
        )
    count = len(notes)

    def mean(name: str) -> float:
        return sum(float(note[name]) for note in notes) / count

    method = make_method(config)
    codecs = [getattr(exchange, "codec", None) for exchange in method.exchanges(count)]
    lossy = (codec_at(codec, 1).name for codec in codecs if codec is not None)
    wall_s = max(note["time_s"] for note in notes)
    samples = sum(note["samples"] for note in notes)
    measures = config.workload.card.measures
    payload_bytes, sent_bytes = mean("payload_bytes"), mean("wire_bytes_sent")
    all_reduce = all_reduce_bytes(parameters=parameters, num_replicas=count, steps=config.run.steps)
    times = times_fewer(all_reduce, sent_bytes)
    return {
        "method": config.sync.method.replace("_", "-"), "replicas": count, "steps": config.run.steps,
        **measures.counted(samples, per_s=round(samples / wall_s, 2)), **measures.evaluated(shown), "wall_s": wall_s,
        "payload_bytes": round(payload_bytes), "wire_bytes_sent": round(sent_bytes),
        "wire_bytes_received": round(mean("wire_bytes_received")),
        "mean_bits_per_s": round(8 * sent_bytes / wall_s, 1), "step_s": round(wall_s / config.run.steps, 5),
        "peak_bits_per_s": round(max(note["peak_bits_per_s"] for note in notes), 1),
        "compute_utilisation": round(sum(1 - note["stalled_s"] / note["time_s"] for note in notes) / count, 8),
        "global_parameters_sha256": notes[0]["sha256"], "model": config.model.name, "data": config.data.source,
        "parameters": parameters, "sync_interval": config.sync.sync_interval or 1,
        "overlap_steps": getattr(method.schedule, "overlap_steps", 0),
        "codec": config.sync.codec or next((name for name in lossy if name != "float32"), "float32"),
        "num_fragments": num_fragments,
        "allreduce_bytes": round(all_reduce), "all_reduce_dtype": "float32",
        "times_fewer_bytes": None if times is None else round(times, 2), "seed": config.run.seed,
        "machine": describe_machine(config.model.device), "thinwire_version": __version__,
    }  # fmt: skip


def describe_machine(device: str) -> dict[str, Any]:
    """Return what numbers of speed depend on, without the host's name."""
    machine: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}", "cores": os.cpu_count(),
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    if device == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    return machine


def save_model(run_dir: Path, model: nn.Module, *, files: Mapping[str, str]) -> None:
    """Write `model/` with the global parameters in place, and `adapters/` where there are some: see `write_model`."""
    folder = run_dir / "model"
    folder.mkdir(exist_ok=True)
    if has_adapters(model):
        save_adapters(model, run_dir / "adapters")
    write_model(folder, model, files=files)


def save_companion(run_dir: Path, *, files: Mapping[str, str]) -> None:
    """Write files such as the tokenizer into `model/`, where checkpoints of a run that has not finished need them too.

    A full disk ends no run here: `save_model` writes them again.
    """
    folder = run_dir / "model"
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)


def write_model(folder: Path, model: nn.Module, *, files: Mapping[str, str]) -> None:
    """Write weights under their plain names, the shape, and files such as the tokenizer; readable without thinwire.

    Adapters are added to the model's weights for good.
    """
    wrapped: Any = merged(model) if has_adapters(model) else getattr(model, "model", None)
    if hasattr(wrapped, "save_pretrained"):
        wrapped.save_pretrained(str(folder), safe_serialization=True)
    else:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        replace_whole(folder / "model.safetensors", lambda path: save_tensors(tensors, path))
        shape = getattr(model, "config", None)
        if dataclasses.is_dataclass(shape) and not isinstance(shape, type):
            write_whole(folder / "config.json", json.dumps(dataclasses.asdict(shape), indent=2) + "\n")
    for name, content in files.items():
        write_whole(folder / name, content)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, *, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, with the mode of the files beside them: the library's own is 0600."""
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    make_readable(path)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`; its presence says that the run has finished."""
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")


SAMPLES = "samples.json"


def begin_samples(
    run_dir: Path, workload: Workload, model: nn.Module, data: Any, *, warn: Callable[[str], None]
) -> None:  # fmt: skip
    """Write `samples.json`: held-out inputs as prompts, and what the untrained model makes of them.

    Each has the keys `prompt`, `before` and `after`; the last one is empty until `finish_samples`. A file that is
    there stays, so that a resumed run keeps what its model wrote before training.
    """
    path = run_dir / SAMPLES
    if path.exists() or workload.samples is None:
        return
    with _not_essential(warn):
        prompts = workload.samples.prompts(data)
        texts = workload.samples.answers(model, workload.companion(data), prompts)
        samples = [{"prompt": prompt, "before": text, "after": ""} for prompt, text in zip(prompts, texts, strict=True)]
        write_whole(path, json.dumps(samples, indent=2) + "\n")


def finish_samples(
    run_dir: Path, workload: Workload, model: nn.Module, companion: Any, *, warn: Callable[[str], None]
) -> None:  # fmt: skip
    """Add what the trained model makes of the prompts to `samples.json`, if the run has one."""
    path = run_dir / SAMPLES
    if not path.exists() or workload.samples is None:
        return
    with _not_essential(warn):
        samples = json.loads(path.read_text(encoding="utf-8"))
        texts = workload.samples.answers(model, companion, [sample["prompt"] for sample in samples])
        for sample, text in zip(samples, texts, strict=True):
            sample["after"] = text
        write_whole(path, json.dumps(samples, indent=2) + "\n")


@contextlib.contextmanager
def _not_essential(warn: Callable[[str], None]) -> Iterator[None]:
    """Turn a failure into a warning: a run is worth more than its samples, and models of transformers vary."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(f"no samples of the model's text: {reason}; --no-samples leaves them out")
