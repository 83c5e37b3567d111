"""The files of the cluster launchers: each by its own project's schema, which rejects ten mistakes in each."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

LAUNCH = Path(__file__).resolve().parents[2] / "examples" / "launch"
# SkyPilot and dstack are too large for the environment of all tests: 500 MB.
PACKAGES = {
    "kubernetes_validate": ("kubernetes-validate", "1.37.0"), "kubeflow_trainer_api": ("kubeflow-trainer-api", "2.3.0"),
    "sky": ("skypilot", "0.14.1"), "jsonschema": ("jsonschema", "4.26.0"), "dstack": ("dstack", "0.22.5"),
}  # fmt: skip
Place = Sequence[str | int]
# A mistake: where, and what is there instead. A name that starts with ">" renames the key, None removes it.
Mistake = tuple[Place, Any]


def library(name: str) -> Any:
    """Return a project's module, or skip the test where it is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        package, version = PACKAGES[name.partition(".")[0]]
        pytest.skip(f"{package} is not installed (pip install {package}=={version}; docs/launchers.md says how)")
    return importlib.import_module(name)


def check_kubernetes(document: dict[str, Any]) -> None:
    library("kubernetes_validate").validate(document, "1.37", strict=True)


def check_kubeflow(document: dict[str, Any]) -> None:
    """Read and write a document: the models ignore names that they do not know, and these are gone afterwards."""
    models = library("kubeflow_trainer_api.models")
    kind = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob"}[document["kind"]]
    # the API server asks for it; the models allow any
    group = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1"}[document["kind"]]
    found = getattr(models, kind).from_dict(document)
    assert found.to_dict() == document
    assert document["apiVersion"] == group
    if kind.startswith("Jobset"):  # a JobSet holds plain Jobs, whose schema is stricter
        for job in document["spec"]["replicatedJobs"]:
            check_kubernetes({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **job["template"]})


def check_skypilot(document: dict[str, Any]) -> None:
    schemas = library("sky.utils.schemas")
    jsonschema = library("jsonschema")
    jsonschema.validate(document, schemas.get_task_schema())
    jsonschema.validate(document["resources"], schemas.get_resources_schema())


def check_dstack(document: dict[str, Any]) -> None:
    library("dstack._internal.core.models.configurations").parse_apply_configuration(document)


JOB: Place = ("spec", "template", "spec")
CONTAINER: Place = (*JOB, "containers", 0)
SET: Place = ("spec", "replicatedJobs", 0)
SET_JOB: Place = (*SET, "template", "spec")
RANK: Place = (*SET_JOB, "template", "spec", "containers", 0)
FILES: list[tuple[str, int, Callable[[dict[str, Any]], None], list[Mistake]]] = [
    ("kubernetes-job.yaml", 0, check_kubernetes, [
        (("apiVersion",), "v9"), (("kind",), "Secrets"), (("metadata",), "thinwire-join"), (("type",), 3),
        (("stringData",), ">stringdata"), (("stringData", "THINWIRE_JOIN"), 5), (("stringData",), ["x"]),
        (("metadata", "name"), ["x"]), (("metadata", "name"), ">nmae"), (("type",), ">typ"),
    ]),
    ("kubernetes-job.yaml", 1, check_kubernetes, [
        (("apiVersion",), "batch/v9"), (("kind",), "Jobb"), (("spec", "parallelism"), ">paralelism"),
        (("spec", "completions"), "two"), (("spec", "template"), None), ((*JOB, "restartPolicy"), ">restartpolicy"),
        ((*JOB, "containers"), None), ((*CONTAINER, "command"), "thinwire join"), ((*CONTAINER, "envFrom"), ">envfrom"),
        ((*CONTAINER, "resources", "limits"), ">limit"),
    ]),
    ("jobset.yaml", 0, check_kubeflow, [
        (("apiVersion",), "jobset.x-k8s.io/v1"), (("spec", "network", "enableDNSHostnames"), ">enableDnsHostnames"),
        (("spec", "failurePolicy", "maxRestarts"), "many"), (("spec", "replicatedJobs"), ">replicatedJob"),
        ((*SET, "name"), None), ((*SET, "replicas"), ">replica"), ((*SET_JOB, "completionMode"), ">completionmode"),
        ((*SET_JOB, "parallelism"), "two"), ((*RANK, "env", 0, "valueFrom"), ">valuesFrom"),
        ((*RANK, "ports", 0, "containerPort"), None),
    ]),
    ("trainjob.yaml", 0, check_kubeflow, [
        (("apiVersion",), "trainer.kubeflow.org/v1"), (("spec", "runtimeRef"), None),
        (("spec", "runtimeRef", "name"), None), (("spec", "trainer"), ">trainner"),
        (("spec", "trainer", "numNodes"), "two"), (("spec", "trainer", "numNodes"), ">nodes"),
        (("spec", "trainer", "command"), "torchrun"), (("spec", "trainer", "env", 0, "name"), None),
        (("spec", "trainer", "resourcesPerNode"), ">resources"), (("metadata", "name"), 7),
    ]),
    ("skypilot.yaml", 0, check_skypilot, [
        (("num_nodes",), "two"), (("num_nodes",), ">nodes"), (("resources", "accelerators"), ">accelerator"),
        (("resources", "use_spot"), "no"), (("envs",), ["STEPS"]), (("envs",), ">env"), (("run",), 3),
        (("setup",), ["pip"]), (("workdir",), 1), (("resources", "use_spot"), ">spot"),
    ]),
    ("dstack.yaml", 0, check_dstack, [
        (("type",), "tasks"), (("type",), None), (("nodes",), "two"), (("nodes",), ">node"),
        (("commands",), ">command"), (("commands",), 3), (("env",), ">envs"), (("resources", "gpu"), ">gpus"),
        (("resources", "gpu"), "24GBB:1"),
        (("max_duration",), "4 fortnights"),
    ]),
]  # fmt: skip


def document_of(name: str, number: int) -> dict[str, Any]:
    found = list(yaml.safe_load_all((LAUNCH / name).read_text()))[number]
    assert isinstance(found, dict)
    return found


def with_mistake(document: dict[str, Any], mistake: Mistake) -> dict[str, Any]:
    place, change = mistake
    wrong = copy.deepcopy(document)
    holder: Any = wrong
    for step in place[:-1]:
        holder = holder[step]
    before = holder.pop(place[-1])
    if isinstance(change, str) and change.startswith(">"):
        holder[change[1:]] = before
    elif change is not None:
        holder[place[-1]] = change
    return wrong


@pytest.mark.parametrize(
    ("name", "number", "check", "mistakes"), FILES, ids=[f"{name}-{number}" for name, number, *_ in FILES]
)
def test_a_file_passes_its_own_projects_schema_and_ten_mistakes_do_not(
    name: str, number: int, check: Callable[[dict[str, Any]], None], mistakes: list[Mistake]
) -> None:
    document = document_of(name, number)
    check(document)
    accepted = []
    for mistake in mistakes:
        wrong = with_mistake(document, mistake)
        try:
            check(wrong)
        except (Exception, SystemExit):
            continue
        accepted.append(mistake)
    assert accepted == [] and len(mistakes) == 10


def test_every_file_of_a_launcher_is_checked_or_run() -> None:
    run = {"train.py", "torchrun.sh", "mpirun.sh", "slurm.sbatch", "slurm-site.sbatch"}
    assert {path.name for path in LAUNCH.iterdir() if path.is_file()} == run | {name for name, *_ in FILES}
    page = (LAUNCH.parents[1] / "docs" / "launchers.md").read_text()
    assert all(f"{package}=={version}" in page for package, version in PACKAGES.values() if package != "jsonschema")
    for path in LAUNCH.iterdir():
        assert not path.is_file() or f"examples/launch/{path.name}" in page
