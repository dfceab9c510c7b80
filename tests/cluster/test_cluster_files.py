"""cluster.yaml, the RayJob manifest and the commands of docs/clusters.md, as far as one machine can check them."""

from __future__ import annotations

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.cluster.commands import RAYTP, ROOT, check, lines_of, shell_blocks

CLUSTER = (ROOT / "cluster.yaml").read_text()
RAYJOB = (ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text()
DOCUMENT = (ROOT / "docs" / "clusters.md").read_text()


def cluster_config() -> dict[str, Any]:
    return yaml.safe_load(CLUSTER)


def commented(text: str, title: str) -> dict[str, Any]:
    """The YAML in the comments under a title."""
    section = text.split(f"# {title}\n# ---", 1)[1].split("\n#\n# ", 2)
    return yaml.safe_load("\n".join(re.findall(r"^#   (.*)$", "\n#\n# ".join(section[:2]), re.MULTILINE)))


def validated(config: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` does it, up to the first question to the cloud."""
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def commands_in_comments(text: str) -> list[str]:
    return re.findall(r"^#   ((?:ray|raytp) .*?)(?:\s{3,}.*)?$", text, re.MULTILINE)


def test_cluster_yaml_is_what_ray_up_takes() -> None:
    types = validated(cluster_config())["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    assert types["head"]["max_workers"] == 0
    assert types["gpu_worker"]["min_workers"] == 0
    assert types["gpu_worker"]["resources"]["GPU"] == 4


def test_cluster_yaml_can_be_changed_as_its_comments_say() -> None:
    google = validated(cluster_config() | commented(CLUSTER, "Google Cloud"))
    assert google["provider"]["type"] == "gcp"
    assert google["available_node_types"]["gpu_worker"]["min_workers"] == 0

    own = cluster_config() | commented(CLUSTER, "Your own machines")
    del own["available_node_types"], own["head_node_type"]
    [node_type] = validated(own)["available_node_types"].values()
    assert node_type["max_workers"] == len(own["provider"]["worker_ips"])


def test_a_mistake_in_cluster_yaml_would_be_seen() -> None:
    with pytest.raises(jsonschema.ValidationError):
        validated(cluster_config() | {"idle_timeout": 10})


@pytest.mark.parametrize(
    "kind", ["setup_commands", "head_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"]
)
def test_the_commands_of_cluster_yaml_are_shell(kind: str) -> None:
    config = cluster_config()
    assert config[kind]
    for command in config[kind]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
        for part in command.split(";"):
            if part.strip().startswith("ray "):
                [words] = lines_of(part.replace("$RAY_HEAD_IP", "192.168.0.10"))
                check(words)


def test_the_commands_at_the_head_of_cluster_yaml_exist_and_fit_its_workers() -> None:
    gpus = cluster_config()["available_node_types"]["gpu_worker"]["resources"]["GPU"]
    commands = commands_in_comments(CLUSTER)
    found = [check(lines_of(command)[0]) for command in commands]
    assert {"ray up", "ray exec raytp", "ray submit examples/submit_batch.py", "ray down"} <= set(found)
    sizes = [int(size) for command in commands for size in re.findall(r" -t (\d+)", command)]
    assert sizes
    assert max(sizes) <= gpus


def test_the_commands_of_the_document_exist() -> None:
    commands = [command for block in shell_blocks(DOCUMENT) for command in lines_of(block)]
    found = {check(command) for command in commands}
    assert found >= {"ray job submit raytp", "ray submit examples/submit_batch.py", "ray up", "ray exec ray status"}
    with pytest.raises(Exception, match="No such option"):
        check(["ray", "job", "submit", "--", "raytp", "batch", "a", "b", "--no-such-option"])


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def exactly(required: tuple[str, ...], **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*required], "additionalProperties": False}


CONTAINER = exactly(
    ("name", "image", "resources"),
    name=TEXT,
    image=TEXT,
    env={"type": "array", "items": exactly(("name",), name=TEXT, value=TEXT, valueFrom={"type": "object"})},
    ports={"type": "array", "items": exactly(("containerPort",), containerPort=NUMBER, name=TEXT)},
    resources=exactly(("requests", "limits"), requests=TEXTS, limits=TEXTS),
    volumeMounts={"type": "array", "items": exactly(("name", "mountPath"), name=TEXT, mountPath=TEXT)},
)
POD = exactly(
    ("spec",),
    metadata={"type": "object"},
    spec=exactly(
        ("containers",),
        containers={"type": "array", "items": CONTAINER, "minItems": 1},
        volumes={
            "type": "array",
            "items": exactly(
                ("name",),
                name=TEXT,
                persistentVolumeClaim=exactly(("claimName",), claimName=TEXT, readOnly=FLAG),
                emptyDir=exactly((), medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
            ),
        },
        tolerations={
            "type": "array",
            "items": exactly(
                (),
                key=TEXT,
                operator={"enum": ["Exists", "Equal"]},
                value=TEXT,
                effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            ),
        },
        nodeSelector=TEXTS,
    ),
)
CLUSTER_SPEC = exactly(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=exactly((), mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=exactly(
        (),
        idleTimeoutSeconds=NUMBER,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        version={"enum": ["v1", "v2"]},
        resources={"type": "object"},
    ),
    headGroupSpec=exactly(("template",), rayStartParams=TEXTS, template=POD, serviceType=TEXT),
    workerGroupSpecs={
        "type": "array",
        "items": exactly(
            ("groupName", "template"),
            groupName=TEXT,
            replicas=NUMBER,
            minReplicas=NUMBER,
            maxReplicas=NUMBER,
            numOfHosts=NUMBER,
            idleTimeoutSeconds=NUMBER,
            rayStartParams=TEXTS,
            template=POD,
        ),
    },
)
RAYJOB_SCHEMA = exactly(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=exactly(("name",), name={"type": "string", "maxLength": 47}, namespace=TEXT, labels=TEXTS),
    spec=exactly(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        activeDeadlineSeconds=NUMBER,
        backoffLimit=NUMBER,
        suspend=FLAG,
        entrypointNumCpus={"type": "number"},
        entrypointNumGpus={"type": "number"},
        rayClusterSpec=CLUSTER_SPEC,
    ),
)
"""Of KubeRay's CRD and Kubernetes' pods, the fields that a manifest like this one may have, by their API references.

The whole CRD holds Kubernetes' pod schema several times over and is larger than this project.
"""


def rayjob_spec() -> dict[str, Any]:
    return yaml.safe_load(RAYJOB)["spec"]


def pod_specs() -> list[dict[str, Any]]:
    cluster = rayjob_spec()["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_the_rayjob_has_the_fields_of_kuberays_crd() -> None:
    manifest = yaml.safe_load(RAYJOB)
    jsonschema.validate(manifest, RAYJOB_SCHEMA)
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["minReplicas"] = "0"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, RAYJOB_SCHEMA)


def test_the_rayjobs_pods_hold_together() -> None:
    images = set()
    for pod in pod_specs():
        for container in pod["containers"]:
            images.add(container["image"])
            assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")  # Kubernetes demands it
    assert len(images) == 1  # the same raytp, Python and Ray everywhere
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={rayjob_spec()['rayClusterSpec']['rayVersion']}\n" in pins
    assert f"rayproject/ray:{rayjob_spec()['rayClusterSpec']['rayVersion']}-" in DOCUMENT


def test_the_rayjob_scales_gpus_from_none_to_what_its_command_takes() -> None:
    spec = rayjob_spec()
    [words] = lines_of(spec["entrypoint"])
    assert check(words) == "raytp"
    context = RAYTP.make_context("raytp", words[1:2])
    arguments = RAYTP.commands["batch"].make_context("batch", words[2:], parent=context).params
    assert arguments["device"] == "cuda"
    head, worker = pod_specs()
    assert "nvidia.com/gpu" not in head["containers"][0]["resources"]["limits"]
    assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert int(worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) >= arguments["tensor_parallel_size"]
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"]) == (0, 0)
    assert group["maxReplicas"] >= 1
    assert spec["rayClusterSpec"]["enableInTreeAutoscaling"]
    mounts = [mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]]
    for path in (arguments["input"], arguments["output"], str(arguments["summary"])):
        assert any(Path(path).is_relative_to(mount) for mount in mounts), path


def test_the_document_names_files_that_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", DOCUMENT):
        if not target.startswith("https://"):
            assert (ROOT / "docs" / target).exists(), target
