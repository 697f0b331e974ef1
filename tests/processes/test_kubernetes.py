"""The manifests for Kubernetes: right by the API's schema, and their pods run as they say.

Here a pod is a process in the network namespace of a cluster's host and in a process namespace of
its own, with the variables, names and probes of the manifest.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any, Dict, List

import psutil
import pytest

from experiments.cluster import Cluster, missing_requirements
from tests.jobs import ROOT, SECRET, environment, eventually
from tests.on_cluster import needs

yaml = pytest.importorskip("yaml", reason="PyYAML is missing")

FOLDER = ROOT / "examples" / "kubernetes"
DEADLINE_S = 60.0
SERVICE, JOB = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


@pytest.mark.parametrize("version", ["1.27", "1.30"])
def test_the_manifests_are_right_by_the_api_s_schema(version: str) -> None:
    schema = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    for manifest in (SERVICE, JOB):
        schema.validate(manifest, version, strict=True)
    wrong = {**JOB, "spec": {**JOB["spec"], "parallelism": "two", "completion": 2}}
    with pytest.raises(schema.ValidationError):
        schema.validate(wrong, version, strict=True)


def test_numbers_and_names_agree() -> None:
    job, service = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    values = {one["name"]: one.get("value") for one in CONTAINER["env"]}
    pods = JOB["spec"]["completions"]
    assert (JOB["spec"]["parallelism"], values["DMLC_NUM_WORKER"]) == (pods, str(pods))
    assert (POD["subdomain"], SERVICE["spec"]["selector"]) == (service, {"job-name": job})
    assert values["DMLC_PS_ROOT_URI"] == f"{job}-0.{service}"
    assert values["DMLC_PS_ROOT_URI"] in POD["initContainers"][0]["command"][-1]
    assert CONTAINER["ports"][0]["containerPort"] == int(values["DMLC_PS_ROOT_PORT"])
    assert POD["initContainers"][0]["image"] == CONTAINER["image"]
    said = (FOLDER / "Containerfile").read_text()
    assert f"-t {CONTAINER['image']} " in said


def test_the_image_gets_files_that_are_there_and_can_install_p3kv() -> None:
    said = (FOLDER / "Containerfile").read_text()
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (.*)$", said, re.MULTILINE)]
    assert copied
    for path in (one for line in copied for one in line):
        assert (ROOT / path).exists(), path
    # What the build reads must be among them.
    metadata = (ROOT / "pyproject.toml").read_text()
    for file in re.findall(r'readme = "(.*?)"', metadata):
        assert any(file in line for line in copied)


def variables(index: int) -> Dict[str, str]:
    """What a pod's container finds in its environment."""
    own = {one["name"]: one.get("value", SECRET) for one in CONTAINER["env"]}
    return environment(**own, JOB_COMPLETION_INDEX=index)


@pytest.mark.long
@needs(missing_requirements())
def test_the_pods_train_as_a_job_and_their_probes_say_so(cluster: Cluster) -> None:
    python, script = CONTAINER["args"]
    command = [{"python": sys.executable}[python], str(FOLDER / script), "20"]
    waits = POD["initContainers"][0]["command"]
    pods: List[subprocess.Popen] = []
    for index, host in enumerate(cluster.hosts):
        assert host.popen(waits, stdout=subprocess.DEVNULL).wait(DEADLINE_S) == 0
        pod = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        pods.append(
            host.popen(
                pod, env=variables(index), text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip

    unshare = psutil.Process(pods[1].pid)
    eventually(unshare.children)
    (first,) = unshare.children()

    def succeeds(probe: str) -> bool:
        inside = ["nsenter", "-t", str(first.pid), "--net", "--pid", "--mount"]
        return subprocess.run([*inside, *CONTAINER[probe]["exec"]["command"]]).returncode == 0

    assert not succeeds("readinessProbe")
    eventually(lambda: succeeds("readinessProbe"), DEADLINE_S)
    assert succeeds("livenessProbe")
    first.suspend()
    eventually(lambda: not succeeds("livenessProbe"))
    first.resume()
    said: List[Any] = [pod.communicate(timeout=DEADLINE_S)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    for index in range(2):
        assert f"worker {index} of 2: loss " in said[index]
