"""
test_placement.py: who gets which GPU, on several nodes too.

Run:   pytest tests/test_placement.py     (a real Ray with two nodes on this machine; their GPUs are only counted)
"""
import contextlib
import dataclasses

import pytest

import placement
from helpers import make_cfg


def nodes(*sizes):
    return [(f"node{n}", str(gpu)) for n, size in enumerate(sizes) for gpu in range(size)]


def test_engines_lie_on_one_node():
    # 3 trainers and 2 engines of 2 on nodes of 4 and 3: cut in order, an engine would get the last GPU of one and the first
    # of the other.
    places = nodes(4, 3)
    trainers, engines = placement.assign(places, 3, 2, 2, colocate=False)
    held = [[[places[bundle] for bundle in part] for part in engine] for engine in engines]
    assert held == [[[("node0", "2"), ("node0", "3")]], [[("node1", "1"), ("node1", "2")]]]
    assert [places[i] for i in trainers] == [("node0", "0"), ("node0", "1"), ("node1", "0")]


def test_colocated_both_sides_have_every_gpu():
    shuffled = [("node1", "1"), ("node0", "0"), ("node1", "0"), ("node0", "1")]      # as Ray hands bundles out
    trainers, engines = placement.assign(shuffled, 4, 2, 2, colocate=True)
    assert trainers == [1, 3, 2, 0] and engines == [[[1, 3]], [[2, 0]]]


def test_an_engine_spans_nodes_only_where_none_is_wide_enough():
    places = nodes(4, 4, 4)
    _, (engine,) = placement.assign(places, 4, 1, 8, colocate=False)
    assert [[places[i] for i in part] for part in engine] == [nodes(4, 4, 4)[4:8], nodes(4, 4, 4)[8:]]
    _, engines = placement.assign(places, 4, 2, 4, colocate=False)
    assert [[places[part[0]][0] for part in engine] for engine in engines] == [["node1"], ["node2"]]
    _, (engine,) = placement.assign(places, 4, 1, 6, colocate=False)     # not 2 + 4: SGLang wants as many on each node
    assert [[places[i] for i in part] for part in engine] == [nodes(4, 4, 4)[5:8], nodes(4, 4, 4)[8:11]]


def test_no_room_is_said():
    with pytest.raises(ValueError, match="only 0 of 1 engines find 4 GPUs on one node.*rollout_num_gpus_per_engine lower"):
        placement.assign(nodes(3, 1), 0, 1, 4, colocate=False)


def test_gpus_that_are_not_the_first_ones():
    """As with CUDA_VISIBLE_DEVICES=9,10,2 on a shared machine: an engine is told which, so they may be any."""
    places = [("node0", gpu) for gpu in ("9", "10", "2")]
    trainers, (engine,) = placement.assign(places, 1, 1, 2, colocate=False)
    assert engine == [[0, 1]] and trainers == [2]


def test_a_cluster_of_two_nodes(monkeypatch):
    import ray
    from ray.cluster_utils import Cluster
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=4, num_gpus=4, include_dashboard=False)
    try:
        with contextlib.ExitStack() as stack:
            cfg = make_cfg(device="cuda", actor_num_gpus=2, critic_num_gpus=1, critic=dict(lr=1e-5),
                           rollout_num_gpus=4, rollout_num_gpus_per_engine=2,
                           ray_address=cluster.address, start_timeout_s=240.0)
            found = placement.start_ray(cfg, stack)
            group = found.trainers[0][0]
            places = placement.ask_bundles(group, 7, placement.where, 240.0)
            assert len({node for node, _ in places}) == 2        # seven GPUs do not fit on one node
            assert len(found.trainers) == 2 and len(found.critics) == 1
            used = [bundle for _, bundle in found.trainers + found.critics]
            for (_, bundle, gpus), in found.engines:
                node, gpu = places[bundle]
                own = [places.index((node, one)) for one in gpus]
                assert own[0] == bundle and len(own) == 2 and not set(own) & set(used)
                used += own
            assert sorted(used) == list(range(7))
            stack.close()
            monkeypatch.setenv("RAY_ADDRESS", cluster.address)   # as in a job of `ray job submit`
            with pytest.raises(ValueError, match="the run needs 9 GPUs, the Ray cluster has 8; .*add nodes"):
                placement.start_ray(dataclasses.replace(cfg, actor_num_gpus=4, ray_address=None), stack)
            monkeypatch.delenv("RAY_ADDRESS")
            stack.close()
            with pytest.raises(ValueError, match="no Ray cluster at ray_address='127.0.0.1:9' .*ray start --head"):
                placement.start_ray(dataclasses.replace(cfg, ray_address="127.0.0.1:9"), stack)
    finally:
        ray.shutdown()
        cluster.shutdown()
