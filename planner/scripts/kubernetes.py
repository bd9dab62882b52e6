"""Manifests of Kubernetes: PyTorchJob, JobSet, or a plain indexed Job.

Sources: kubeflow.org/v1 PyTorchJob (Kubeflow's training operator), jobset.x-k8s.io/v1alpha2 JobSet, batch/v1
Job with completionMode Indexed, whose pods have the host names NAME-INDEX.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import yaml

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.formats.writing.written import written
from planner.formats.writing.yaml_dumper import Dumper
from planner.scripts.job import JobScript, comments, header, on_signals, pairs

KINDS = ("jobset", "pytorchjob", "job")

PORT = 29400

PLAN_FOLDER = "/etc/planner"

GRACE_S = 300
"""Seconds that a pod is given to end after SIGTERM."""

_GRACE = f"{GRACE_S} s before a pod that is evicted ends"
_GRACE_OF_TORCHRUN = "30 s before torchrun ends the ranks of a pod that is evicted"

MOST_MAP_BYTES = 1 << 20
"""Bytes that a ConfigMap may hold."""

Manifest = dict[str, Any]

COMMENTS = {
    "ConfigMap": "The plan, which every pod reads.",
    "Service": "Gives pods the names by which they find the first one.",
    "Job": "A pod for each node. Kubernetes numbers them (JOB_COMPLETION_INDEX); the file says how many "
    "they are (NNODES) and where they meet. A pod that fails ends the job.",
    "JobSet": "A pod for each node. Kubernetes numbers them (JOB_COMPLETION_INDEX); the file says how many "
    "they are (NNODES) and where they meet. After a failure all pods start again, at most three times.",
    "PyTorchJob": "A pod for each node, the first of which is the master. The operator tells each which one "
    "it is. After a failure they start again.",
}
"""The purpose of each document."""


def kubernetes_script(job: JobScript) -> str:
    """The manifests of a job, with the plan in a ConfigMap; each node is a pod."""
    kind = job.kind or KINDS[0]
    if kind not in KINDS:
        raise InputError(f"--kind {kind}: {nearest(kind, KINDS) or 'expected ' + ', '.join(KINDS)}")
    documents = {"jobset": _jobset, "pytorchjob": _pytorchjob, "job": _job}[kind](job)
    parts = [_text(document) for document in [_plan_map(job), *documents]]
    notes = [
        "# kubectl apply -f <this file>",
        *comments([on_signals(job, _GRACE if job.is_bundled() else _GRACE_OF_TORCHRUN)]),
    ]
    if job.image is None:
        notes.append("# Replace the image by one that has the planner (--image).")
    if job.volume_claim is None:
        notes.append("# Nothing is kept: --volume-claim NAME mounts a volume that all nodes share.")
    return "\n".join([*header(job), *notes]) + "\n---\n" + "---\n".join(parts)


def _text(document: Manifest) -> str:
    comment = textwrap.fill(COMMENTS[document["kind"]], 98, initial_indent="# ", subsequent_indent="# ")
    # As wide as its longest line: what is folded is hard to read, and to change.
    return f"{comment}\n" + yaml.dump(document, Dumper=Dumper, sort_keys=False, width=1 << 30)


def _plan_map(job: JobScript) -> Manifest:
    text = json.dumps(job.plan.model_dump(mode="json"), separators=(",", ":"))
    if len(text) > MOST_MAP_BYTES:
        raise InputError(
            f"{job.plan_file} has {len(text)} bytes, and a ConfigMap holds {MOST_MAP_BYTES}; put it on a "
            f"volume, "
            "and use --to shell as the command of the pods"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{job.job_name}-plan"},
        "data": {"plan.json": text},
    }


def _pod(job: JobScript, environment: list[Manifest], restart: str, subdomain: str | None = None) -> Manifest:
    """The template of a pod: one node."""
    limits: Manifest = {job.resource: job.devices} if job.resource else {"cpu": job.devices}
    mounts = [{"name": "plan", "mountPath": PLAN_FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Manifest] = [
        {"name": "plan", "configMap": {"name": f"{job.job_name}-plan"}},
        # The default of 64 MiB is too small for NCCL.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if job.volume_claim:
        mounts.append({"name": "workspace", "mountPath": job.mount})
        claim = written(job.volume_claim, "text", "--volume-claim")
        volumes.append({"name": "workspace", "persistentVolumeClaim": {"claimName": claim}})
    container: Manifest = {
        "name": "pytorch",
        "image": written(job.image or "planner:latest", "text", "--image"),
        "command": ["bash", "-c", _command(job)],
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "resources": {"limits": limits, "requests": dict(limits)},
        "volumeMounts": mounts,
    }
    if environment:
        container["env"] = environment
    if job.volume_claim:
        container["workingDir"] = job.mount
    spec: Manifest = {"restartPolicy": restart, "containers": [container], "volumes": volumes}
    if subdomain is not None:
        spec["subdomain"] = subdomain
    # Longer than a step and a checkpoint: SIGTERM saves and ends with 0.
    spec["terminationGracePeriodSeconds"] = GRACE_S
    return {"spec": spec}


def _command(job: JobScript) -> str:
    """The commands of a pod; `planner launch` reads the variables of all three kinds of objects."""
    if job.is_bundled():
        words = ["--plan", f"{PLAN_FOLDER}/plan.json", *job.arguments]
        lines = [" \\\n  ".join(["exec planner launch", *pairs(words)])]
    else:
        node = "${PET_NODE_RANK:-${RANK:-$JOB_COMPLETION_INDEX}}"
        address, port = "${PET_MASTER_ADDR:-$MASTER_ADDR}", "${PET_MASTER_PORT:-$MASTER_PORT}"
        lines = ["\n".join(job.node_lines(node, address, port))]
    return "\n".join([*job.before(), *lines])


def _nodes_environment(job: JobScript, first: str) -> list[Manifest]:
    """Environment variables that Kubernetes does not set itself; it only sets JOB_COMPLETION_INDEX."""
    values = {"NNODES": str(job.nodes), "MASTER_ADDR": first, "MASTER_PORT": str(PORT)}
    return [{"name": name, "value": value} for name, value in values.items()]


def _indexed(job: JobScript, pod: Manifest) -> Manifest:
    return {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": pod,
    }


def _jobset(job: JobScript) -> list[Manifest]:
    name = job.job_name
    attempt = {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}
    environment = [
        *_nodes_environment(job, f"{name}-node-0-0.{name}"),
        # By which a start after a failure goes on from what was saved, though it began from something else.
        {"name": "JOBSET_RESTART_ATTEMPT", "valueFrom": {"fieldRef": attempt}},
    ]
    pod = _pod(job, environment, "Never")
    jobs = [{"name": "node", "replicas": 1, "template": {"spec": _indexed(job, pod)}}]
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                # A lost pod starts all of them again, from what was saved.
                "failurePolicy": {"maxRestarts": 3},
                "replicatedJobs": jobs,
            },
        }
    ]


def _job(job: JobScript) -> list[Manifest]:
    name = job.job_name
    pod = _pod(job, _nodes_environment(job, f"{name}-0.{name}"), "Never", subdomain=name)
    pod["metadata"] = {"labels": {"app": name}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": name},
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }
    return [
        service,
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": _indexed(job, pod)},
    ]


def _pytorchjob(job: JobScript) -> list[Manifest]:
    # The operator itself sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK, of nodes, and torchrun's PET_*.
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    specs = {
        role: {"replicas": count, "restartPolicy": "OnFailure", "template": _pod(job, [], "OnFailure")}
        for role, count in replicas.items()
        if count
    }
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.job_name},
            "spec": {
                "nprocPerNode": str(job.devices),
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3},
                "pytorchReplicaSpecs": specs,
            },
        }
    ]
