"""Pods on the local cluster: what a user of Kubernetes expects of them."""

import subprocess

import pytest

from e2e.cluster.access import ApiError, CommandError
from e2e.cluster.launch import Cluster
from tests.cluster.pods import PYTHON, SH, Pods, container, pod, server, wait_until

pytestmark = pytest.mark.cluster


def test_both_nodes_are_ready_with_eight_gpus(cluster: Cluster) -> None:
    nodes = cluster.api("GET", "/api/v1/nodes")["items"]

    assert {node["metadata"]["name"]: node["status"]["allocatable"]["nvidia.com/gpu"] for node in nodes} == {
        "node-a": "8",
        "node-b": "8",
    }


def test_pod_security_refuses_a_careless_pod(pods: Pods) -> None:
    careless = {"metadata": {"name": "careless"}, "spec": {"containers": [{"name": "c", "image": SH}]}}

    with pytest.raises(ApiError, match=r"403: .*violates PodSecurity"):
        pods.create(careless)


def test_an_unknown_image_is_not_pulled(pods: Pods) -> None:
    pods.create(pod("unknown", container(image="nowhere.invalid/x:1")))

    assert wait_until(lambda: pods.waiting("unknown")) in ("ErrImagePull", "ImagePullBackOff", "ContainerCreating")
    wait_until(lambda: pods.waiting("unknown") in ("ErrImagePull", "ImagePullBackOff"))
    assert "not in the catalogue" in pods.cluster.kubectl("events", "-n", pods.namespace, "--for=pod/unknown")


def test_an_image_volume_shows_the_images_files_and_nobody_can_write_there(pods: Pods) -> None:
    mounted = {"volumeMounts": [{"name": "model", "mountPath": "/mnt/model"}]}
    reads = container(
        args=("-c", "head -c 1 /mnt/model/tiny/config.json; touch /mnt/model/x || echo sealed"), **mounted
    )
    volume = {"name": "model", "image": {"reference": "registry.local/models/tiny:1"}}

    pods.create(pod("reader", reads, volumes=[volume], restartPolicy="Never"))
    pods.create(pod("broken", reads, volumes=[{"name": "model", "image": {"reference": "nowhere.invalid/x:1"}}]))

    assert pods.ended("reader") == "Succeeded"
    assert "{" in pods.log("reader")
    assert "sealed" in pods.log("reader")
    wait_until(lambda: pods.waiting("broken") in ("ErrImagePull", "ImagePullBackOff"))
    assert "nowhere.invalid/x:1" in pods.state("broken")["waiting"]["message"]


def test_a_missing_command_fails_the_start_and_is_named(pods: Pods) -> None:
    pods.create(pod("typo", container() | {"command": ["slipway-gatway"]}, restartPolicy="Never"))

    assert pods.ended("typo") == "Failed"
    terminated = pods.state("typo")["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (128, "StartError")
    assert "executable file not found in $PATH" in pods.cluster.kubectl(
        "events", "-n", pods.namespace, "--for=pod/typo"
    )


def test_logs_exec_input_and_exit_codes_pass_through_the_api(pods: Pods) -> None:
    pods.create(server("one"))
    pods.ready("one")

    assert "serving as uid 65532" in pods.log("one")
    assert pods.exec("one", "id", "-u").strip() == "65532"
    assert pods.cluster.kubectl("exec", "-i", "-n", pods.namespace, "one", "--", "cat", stdin="words") == "words"
    with pytest.raises(CommandError) as failed:
        pods.exec("one", "sh", "-c", "exit 7")
    assert failed.value.code == 7


def test_init_containers_come_first_and_sidecars_end_last(pods: Pods) -> None:
    models = {"volumeMounts": [{"name": "models", "mountPath": "/models"}]}
    sidecar = "trap 'echo sidecar ends; exit 0' TERM; while :; do sleep 0.1; done"
    pods.create(
        pod(
            "batch",
            container("main", args=("-c", "cat /models/w; sleep 0.5"), **models),
            initContainers=[
                container("fetch", args=("-c", "echo weights > /models/w"), **models),
                container("sidecar", args=("-c", sidecar), restartPolicy="Always"),
            ],
            restartPolicy="Never",
            terminationGracePeriodSeconds=10,
            volumes=[{"name": "models", "emptyDir": {}}],
        )
    )

    assert pods.ended("batch") == "Succeeded"
    assert pods.log("batch", "-c", "main") == "weights\n"
    assert "sidecar ends" in pods.log("batch", "-c", "sidecar")


LOOK = """
import os, pathlib, pwd
def refused(path):
    try: pathlib.Path(path).write_text("x")
    except OSError as error: return type(error).__name__ + " " + str(error.errno)
pathlib.Path("/scratch/x").write_text("x"); pathlib.Path("/dev/shm/x").write_text("x")
print(refused("/x"), refused("/usr/x"), refused("/tmp/x"), refused("/sys/kernel/x"), sep=";")
print(os.environ["HOME"], pwd.getpwuid(os.getuid()).pw_name, os.environ["HOSTNAME"])
print(sorted(os.listdir("/")), os.path.exists("/boot"), os.path.exists("/var/lib"))
print(sum(name.isdigit() for name in os.listdir("/proc")), os.stat("/dev/null").st_rdev == os.makedev(1, 3))
"""


def test_a_container_sees_its_own_files_and_writes_only_where_it_may(pods: Pods) -> None:
    look = container(image=PYTHON, args=("-c", LOOK), volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}])
    look["securityContext"] = look["securityContext"] | {"readOnlyRootFilesystem": True}
    volumes = [{"name": "scratch", "emptyDir": {}}]
    pods.create(pod("look", look, restartPolicy="Never", volumes=volumes, automountServiceAccountToken=False))

    assert pods.ended("look") == "Succeeded", pods.log("look")
    refusals, identity, root, processes = pods.log("look").splitlines()
    assert all(refusal.startswith(("OSError 30", "PermissionError 13", "OSError 1")) for refusal in refusals.split(";"))
    assert identity == "/tmp nonroot look"
    assert root.endswith("False False")
    assert processes == "1 True"


def test_the_images_of_slipway_find_their_commands_and_the_model(pods: Pods) -> None:
    version = pods.cluster.catalogue_version
    find = "command -v slipway-runtime && python -c 'import slipway_runtime, slipway_api' && ls /opt/slipway/models"
    runtime = container(image=f"slipway/runtime:{version}", args=("-c", find)) | {"command": ["sh"]}
    pods.create(pod("images", runtime, restartPolicy="Never"))

    assert pods.ended("images") == "Succeeded", pods.log("images")
    assert pods.log("images").endswith("/bin/slipway-runtime\nadapters\ntiny\n")


def test_deletion_runs_pre_stop_then_sigterm_and_waits_for_the_drain(pods: Pods) -> None:
    pods.create(server("two"))
    pods.ready("two")
    follow = [pods.cluster.tools / "kubectl", "logs", "-f", "-n", pods.namespace, "two"]
    with subprocess.Popen(follow, env=pods.cluster.environment(), stdout=subprocess.PIPE, text=True) as log:
        pods.delete("two")
        story, _ = log.communicate(timeout=30)

    pods.gone("two")
    assert [line for line in story.splitlines() if line in ("preStop", "SIGTERM", "drained")] == [
        "preStop",
        "SIGTERM",
        "drained",
    ]


def test_a_killed_program_is_restarted_and_the_crash_is_on_record(pods: Pods) -> None:
    pods.create(server("one"))
    pods.ready("one")

    assert pods.cluster.kill_container(pods.namespace, "one") >= 1

    wait_until(lambda: pods.status("one")["containerStatuses"][0]["restartCount"] == 1)
    last = pods.status("one")["containerStatuses"][0]["lastState"]["terminated"]
    assert (last["exitCode"], last["reason"]) == (137, "Error")
    pods.ready("one")


def test_thirty_pods_start_together(pods: Pods) -> None:
    names = [f"many-{index}" for index in range(30)]
    for name in names:
        pods.create(pod(name, container(args=("-c", "echo up; exec sleep 600"))))

    for name in names:
        pods.ready(name)
    assert len({pods.status(name)["podIP"] for name in names}) == 30
