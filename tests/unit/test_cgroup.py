"""What memory limits leave, over made-up trees of control groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from helpers import make_ready

import extractor.servers.shm_budget
from extractor.core.errors import UsageError
from extractor.core.request import Limits
from extractor.dumps.dump_reader import Rank
from extractor.servers.shm_budget import headroom, shm_budget
from extractor.system.memory_limits import Bound, memory_bounds, tightest
from extractor.system.process_id import pid_namespace
from server_patch.directory import Directory

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712
MOUNT_V2 = "31 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


class Tree(dict[str, object]):
    """Files of a cgroup file system by path."""

    def __call__(self, path: PurePosixPath) -> str | None:
        value = self.get(str(path))
        return None if value is None else f"{value}\n"


def bounds_of(tree: Tree, cgroup: str, mountinfo: str) -> list[tuple[str, int, int]]:
    bounds = memory_bounds(cgroup, mountinfo, tree)
    assert bounds is not None
    return [(str(bound.directory), bound.limit_bytes, bound.free_bytes) for bound in bounds]


# --- version 2 ------------------------------------------------------------------------------------


def test_v2_leaves_what_is_not_used_and_page_cache_counts_as_free() -> None:
    tree = Tree({
        "/sys/fs/cgroup/a/memory.max": 8 * GIB,
        "/sys/fs/cgroup/a/memory.high": "max",
        "/sys/fs/cgroup/a/memory.current": 6 * GIB,
        "/sys/fs/cgroup/a/memory.stat": f"anon {GIB}\nshmem {2 * GIB}\ninactive_file {3 * GIB}",
    })  # fmt: skip
    assert bounds_of(tree, "0::/a\n", MOUNT_V2) == [("/sys/fs/cgroup/a", 8 * GIB, 5 * GIB)]


def test_v2_parents_count_and_the_tightest_is_reached_first() -> None:
    tree = Tree({
        "/sys/fs/cgroup/pod/memory.max": 10 * GIB,
        "/sys/fs/cgroup/pod/memory.current": 9 * GIB,
        "/sys/fs/cgroup/pod/box/memory.max": 8 * GIB,
        "/sys/fs/cgroup/pod/box/memory.current": 2 * GIB,
        "/sys/fs/cgroup/pod/box/in/memory.max": "max",
        "/sys/fs/cgroup/pod/box/in/memory.current": GIB,
    })  # fmt: skip
    found = memory_bounds("0::/pod/box/in\n", MOUNT_V2, tree)
    assert found is not None
    assert [bound.free_bytes for bound in found] == [6 * GIB, GIB]
    assert tightest(found) == Bound(
        directory=PurePosixPath("/sys/fs/cgroup/pod"), limit_bytes=10 * GIB, free_bytes=GIB
    )


def test_v2_throttles_from_memory_high_on() -> None:
    tree = Tree({
        "/sys/fs/cgroup/a/memory.max": 8 * GIB,
        "/sys/fs/cgroup/a/memory.high": 4 * GIB,
        "/sys/fs/cgroup/a/memory.current": GIB,
    })  # fmt: skip
    assert bounds_of(tree, "0::/a", MOUNT_V2) == [("/sys/fs/cgroup/a", 4 * GIB, 3 * GIB)]


def test_v2_in_a_container_its_own_group_is_the_root_of_what_is_seen() -> None:
    tree = Tree({
        "/sys/fs/cgroup/memory.max": 4 * GIB,
        "/sys/fs/cgroup/memory.current": GIB,
    })  # fmt: skip
    assert bounds_of(tree, "0::/", MOUNT_V2) == [("/sys/fs/cgroup", 4 * GIB, 3 * GIB)]


def test_v2_the_host_without_limits_has_none() -> None:
    tree = Tree({"/sys/fs/cgroup/user.slice/memory.max": "max",
                 "/sys/fs/cgroup/user.slice/memory.current": GIB})  # fmt: skip
    assert bounds_of(tree, "0::/user.slice", MOUNT_V2) == []
    assert tightest([]) is None


def test_more_used_than_allowed_leaves_nothing() -> None:
    tree = Tree({
        "/sys/fs/cgroup/a/memory.max": GIB,
        "/sys/fs/cgroup/a/memory.current": 2 * GIB,
    })  # fmt: skip
    assert bounds_of(tree, "0::/a", MOUNT_V2) == [("/sys/fs/cgroup/a", GIB, 0)]


# --- version 1 ------------------------------------------------------------------------------------


def test_v1_has_other_names_and_a_number_for_no_limit() -> None:
    base = "/sys/fs/cgroup/memory"
    tree = Tree({
        f"{base}/memory.limit_in_bytes": UNLIMITED_V1,
        f"{base}/memory.usage_in_bytes": 20 * GIB,
        f"{base}/job/memory.limit_in_bytes": 16 * GIB,
        f"{base}/job/memory.usage_in_bytes": 12 * GIB,
        f"{base}/job/memory.use_hierarchy": 1,
        f"{base}/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}",
        f"{base}/job/step/memory.limit_in_bytes": UNLIMITED_V1,
        f"{base}/job/step/memory.usage_in_bytes": GIB,
    })  # fmt: skip
    cgroup = "5:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/\n"
    assert bounds_of(tree, cgroup, MOUNT_V1) == [(f"{base}/job", 16 * GIB, 6 * GIB)]


def test_v1_a_parent_that_does_not_count_its_children_does_not_bound_them() -> None:
    base = "/sys/fs/cgroup/memory"
    tree = Tree({
        f"{base}/job/memory.limit_in_bytes": GIB,
        f"{base}/job/memory.usage_in_bytes": 0,
        f"{base}/job/memory.use_hierarchy": 0,
        f"{base}/job/step/memory.limit_in_bytes": 2 * GIB,
        f"{base}/job/step/memory.usage_in_bytes": 0,
        f"{base}/job/step/memory.use_hierarchy": 0,
    })  # fmt: skip
    assert bounds_of(tree, "4:memory:/job/step", MOUNT_V1) == [
        (f"{base}/job/step", 2 * GIB, 2 * GIB)
    ]


def test_v1_in_a_container_that_sees_its_part_of_the_tree_only() -> None:
    """Without a cgroup namespace, /proc/self/cgroup has the host's paths."""
    mount = "35 31 0:32 /docker/f00 /sys/fs/cgroup/memory ro master:11 - cgroup cgroup rw,memory\n"
    tree = Tree({
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GIB,
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": GIB,
        "/sys/fs/cgroup/memory/in/memory.limit_in_bytes": GIB,
        "/sys/fs/cgroup/memory/in/memory.usage_in_bytes": GIB // 4,
    })  # fmt: skip
    assert bounds_of(tree, "4:memory:/docker/f00/in", mount) == [
        ("/sys/fs/cgroup/memory/in", GIB, GIB - GIB // 4),
        ("/sys/fs/cgroup/memory", 2 * GIB, GIB),
    ]


# --- what cannot be seen --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "mountinfo"),
    [
        ("0::/../other\n", MOUNT_V2),  # beside the part that our namespace shows
        ("4:memory:/docker/bar\n", "35 31 0:32 /docker/f00 /c ro - cgroup cgroup rw,memory\n"),
        ("", MOUNT_V2),
        ("0::/a\n", ""),
        ("0::/a\n", "35 31 0:32 / /proc rw - proc\n"),
        ("5:cpu:/a\n", MOUNT_V1),
    ],
)
def test_another_containers_group_is_not_guessed(cgroup: str, mountinfo: str) -> None:
    assert memory_bounds(cgroup, mountinfo, Tree()) is None


# --- the budget -----------------------------------------------------------------------------------

LIMITS = Limits(max_prompt_tokens=4096, vocab_size=1000, chunk_tokens=4096)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Tree:
    """A tmpfs with 100 GiB free on a machine with 64 GiB of memory; no groups yet."""
    tree = Tree({
        "/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB",
        "/proc/self/mountinfo": MOUNT_V2,
        "/proc/self/cgroup": "0::/client",
        "/proc/77/cgroup": "0::/server",
    })  # fmt: skip
    monkeypatch.setattr(extractor.servers.shm_budget, "file_system_type", lambda path: "tmpfs")
    monkeypatch.setattr(extractor.servers.shm_budget, "free_bytes", lambda path: 100 * GIB)
    monkeypatch.setattr(extractor.servers.shm_budget, "_read", tree)
    return tree


def rank(**changes: object) -> Rank:
    return Rank(
        directory=Directory(-1, Path("/dev/shm/x/boot/0")), ready=make_ready(pid=77, **changes)
    )


def limit(tree: Tree, group: str, limit_bytes: int) -> None:
    tree[f"/sys/fs/cgroup/{group}/memory.max"] = limit_bytes
    tree[f"/sys/fs/cgroup/{group}/memory.current"] = 0


def test_dumps_count_to_the_group_of_the_server_not_to_ours(machine: Tree) -> None:
    limit(machine, "client", 2 * GIB)
    limit(machine, "server", 8 * GIB)
    room = headroom([rank()])
    assert (room.free_bytes, room.sure_bytes, room.doubt) == (8 * GIB, 8 * GIB, None)
    assert "8.0 GiB of the control group /sys/fs/cgroup/server" in room.what
    assert shm_budget([rank()], None, limits=LIMITS) == 4 * GIB
    with pytest.raises(Exception, match=r"--shm-budget is 9\.0 GiB, the memory limit of 8\.0 GiB"):
        shm_budget([rank()], 9 * GIB, limits=LIMITS)


def test_a_budget_too_small_is_told_by_a_prompt_that_the_server_takes(machine: Tree) -> None:
    for most, told in ((4096, "1,024"), (100, "100")):
        with pytest.raises(UsageError, match=f"does not hold one prompt of {told} tokens"):
            shm_budget([rank()], 1, limits=replace(LIMITS, max_prompt_tokens=most))


def test_of_several_servers_the_one_with_least_room_counts(machine: Tree) -> None:
    limit(machine, "server", 8 * GIB)
    limit(machine, "other", 3 * GIB)
    machine["/proc/78/cgroup"] = "0::/other"
    other = Rank(directory=Directory(-1, Path("/dev/shm/x/boot/1")), ready=make_ready(pid=78))
    assert headroom([rank(), other]).free_bytes == 3 * GIB


def test_without_a_limit_the_machines_memory_bounds_a_larger_tmpfs(machine: Tree) -> None:
    room = headroom([rank(pid_namespace=pid_namespace())])
    assert (room.free_bytes, room.what) == (64 * GIB, "this machine's memory has left")
    assert room.doubt is None


def test_a_server_that_cannot_be_seen_is_taken_to_have_our_limit_and_that_is_said(
    machine: Tree,
) -> None:
    limit(machine, "client", 2 * GIB)
    limit(machine, "server", 8 * GIB)
    for unseen in (rank(pid_namespace="pid:[1]"), rank()):
        room = headroom([unseen])
        assert (room.free_bytes, room.sure_bytes) == (2 * GIB, 64 * GIB)
        assert room.doubt is not None
        assert "cannot be seen from here" in room.doubt
        assert shm_budget([unseen], None, limits=LIMITS) == GIB
        # Whoever names a budget may know better; but not better than the machine.
        assert shm_budget([unseen], 5 * GIB, limits=LIMITS) == 5 * GIB
        with pytest.raises(Exception, match=r"--shm-budget is 65\.0 GiB"):
            shm_budget([unseen], 65 * GIB, limits=LIMITS)
        machine["/proc/77/cgroup"] = "0::/../elsewhere"  # seen, but its group is not


def test_no_room_in_the_group_is_told_as_such(machine: Tree) -> None:
    limit(machine, "server", 4096)
    with pytest.raises(Exception, match=r"the memory limit of 4\.0 KiB .* does not hold one"):
        shm_budget([rank()], None, limits=LIMITS)


def test_on_a_disk_dumps_are_no_memory(machine: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(machine, "server", GIB)
    monkeypatch.setattr(extractor.servers.shm_budget, "file_system_type", lambda path: "ext4")
    assert headroom([rank()]).free_bytes == 100 * GIB


# FIXME
