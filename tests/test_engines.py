"""
test_engines.py: do the servers live, obey and die as engines.py says? Two real SGLang servers behind the real router.

Test:  pytest tests/test_engines.py      (about 70 s: four SGLang starts, most of it imports)
Left out on purpose: GPUs and placement groups; whether what is generated is right is tests/test_cpu.py.
"""
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest

from engines import Child, EngineError, Engines, call, free_port
from helpers import output_of, running_engines

LONG = 1600                                  # tokens of an answer: some seconds, in which something can be done to it
REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(scope="module")
def engines(tiny_model, tmp_path_factory):
    with running_engines(tmp_path_factory.mktemp("run"), tiny_model, rollout_num_gpus=2, max_engine_restarts=1) as engines:
        yield engines


def send(url: str, input_ids: list[int], max_new_tokens: int) -> dict:
    sampling = dict(temperature=1.0, max_new_tokens=max_new_tokens, ignore_eos=True)
    return call("POST", url + "/generate", dict(input_ids=input_ids, sampling_params=sampling, return_logprob=True), 400.0)


def in_flight(engines: Engines, requests: int) -> list[Future]:
    """Requests that are being generated when this returns, each with some tokens done and many to go."""
    def under_way() -> bool:
        loads = [load for url in engines.urls for load in call("GET", url + "/v1/loads?include=core", None, 30.0)["loads"]]
        done = sum(load["num_total_tokens"] for load in loads) / requests
        return sum(load["num_running_reqs"] for load in loads) == requests and 10 < done < LONG / 8

    pool = ThreadPoolExecutor(requests)
    for _ in range(10):                      # another try where they ended unseen
        futures = [pool.submit(send, engines.router_url, [5, 6, 7 + i], LONG) for i in range(requests)]
        while not all(future.done() for future in futures):
            if under_way():
                return futures
            time.sleep(0.01)
    raise AssertionError(f"{requests} requests were never seen under way")


def gone(processes: list[psutil.Process], limit_s: float) -> bool:
    """A zombie is gone too: its parent has only not asked for its exit code yet."""
    def dead(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
    end = time.monotonic() + limit_s
    while not all(map(dead, processes)) and time.monotonic() < end:
        time.sleep(0.1)
    return all(map(dead, processes))


# ---- Requests and control ----------------------------------------------------------------------------------------------
def test_both_engines_get_requests(engines):
    logs = [engines.log_dir / f"engine_{rank}.log" for rank in range(2)]
    before = [log.read_text().count("Prefill batch") for log in logs]
    with ThreadPoolExecutor(8) as pool:      # one prompt, as in a group: it must not stick to one engine
        answers = list(pool.map(lambda _: send(engines.router_url, [5] * 40, 4), range(8)))
    assert all(len(answer["output_ids"]) == 4 for answer in answers)
    assert all(log.read_text().count("Prefill batch") > n for log, n in zip(logs, before))


def test_post_reaches_all_or_says_who_refused(engines):
    assert [a["success"] for a in engines.post("/weights_checker", {"action": "checksum"})] == [True, True]
    assert len(engines.post("/weights_checker", {"action": "checksum"}, only=[1])) == 1
    version = {"abort_all_requests": False}
    engines.post("/update_weight_version", [version | {"new_version": "a"}, version | {"new_version": "b"}])
    assert engines.weight_versions() == ["a", "b"]
    with pytest.raises(EngineError) as error:
        engines.post("/update_weights_from_disk", [{"model_path": "/nowhere"}] * 2, only=[0, 1])
    for url in engines.urls:                 # who, what, which status, and the engine's own words
        assert f"POST {url}/update_weights_from_disk: status 400" in str(error.value)
    assert "nowhere" in str(error.value)
    with pytest.raises(EngineError, match="404"):
        engines.post("/no_such_endpoint", {})
    with pytest.raises(EngineError, match="no answer after .* of 1 s .*ConnectError"):
        call("GET", "http://127.0.0.1:9", None, 1.0)


def test_flush_forgets_prefixes(engines):
    prompt = list(range(3, 43))
    cached = [send(engines.urls[0], prompt, 2)["meta_info"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, len(prompt) - 1]    # all but the last token, whose logits are needed
    engines.flush_cache()
    assert send(engines.urls[0], prompt, 2)["meta_info"]["cached_tokens"] == 0


def test_abort_gives_back_what_there_is(engines):
    futures = in_flight(engines, 6)
    engines.abort_all()
    for future in futures:
        answer = future.result(timeout=400)
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) < LONG
        assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]


def test_requests_live_on_over_a_weight_update(engines):
    """pause -> flush -> (weights) -> resume, with requests in flight that are sent again with the tokens they had."""
    futures = in_flight(engines, 6)
    engines.pause()
    late = ThreadPoolExecutor(1).submit(send, engines.router_url, [9, 9, 9], 5)    # waits for resume()
    engines.flush_cache()
    engines.post("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
    assert engines.check() == [], "a paused engine is not a dead one"
    assert not late.done()
    engines.resume()
    for i, future in enumerate(futures):
        part = future.result(timeout=400)
        assert part["meta_info"]["weight_version"] != "7", "these tokens are the old weights'"
        rest = send(engines.router_url, [5, 6, 7 + i] + part["output_ids"], 20)
        assert 0 < len(part["output_ids"]) < LONG and len(rest["output_ids"]) == 20
        assert rest["meta_info"]["weight_version"] == "7"
    assert late.result(timeout=400)["meta_info"]["weight_version"] == "7"


def test_retracted_requests_complete_but_block_the_flush(engines):
    futures = in_flight(engines, 4)
    engines.pause("retract")
    with pytest.raises(EngineError, match="flush_cache"):
        engines.flush_cache(timeout_s=0.5)
    engines.resume()
    for future in futures:
        answer = future.result(timeout=400)
        assert answer["meta_info"]["finish_reason"]["type"] == "length" and len(answer["output_ids"]) == LONG


def test_sleep_and_wake(engines):
    engines.sleep()
    assert engines.check() == []
    engines.wake(["weights"])
    engines.wake(["kv_cache", "cuda_graph"])
    assert engines.check() == []
    assert len(send(engines.router_url, [5, 6], 3)["output_ids"]) == 3


# ---- Life and death ----------------------------------------------------------------------------------------------------
def test_a_failed_start_shows_the_log(tmp_path):
    child = Child("router", dict(no_such_argument=1), tmp_path / "router.log", {})
    with pytest.raises(EngineError, match=r"(?s)router ended \(exit code 1\).*no_such_argument"):
        child.wait_up("http://127.0.0.1:9/", 120.0)


def test_a_dead_router_comes_back_at_its_address(engines):
    url = engines.router_url
    os.kill(engines.router.child.process.pid, signal.SIGKILL)
    engines.router.child.process.wait(10)
    assert engines.check_router() is False
    assert engines.check_router() is True and engines.router_url == url
    assert set(engines.router.workers()) == set(engines.urls)
    assert len(send(url, [5, 6], 3)["output_ids"]) == 3


def test_a_router_that_dies_while_an_engine_is_replaced(engines):
    """Just before the new engine is announced to it."""
    url, restarts = engines.router_url, engines.router_restarts
    engines.router.unregister(engines.urls[0])
    os.kill(engines.router.child.process.pid, signal.SIGKILL)
    engines.router.child.process.wait(10)
    engines.admit(0)
    assert set(engines.router.workers()) == set(engines.urls) and engines.router_restarts == restarts + 1
    assert len(send(url, [5, 6], 3)["output_ids"]) == 3


def test_a_dead_engine_is_found_and_replaced_but_not_for_ever(engines):
    """The last test of these engines: one of them stays dead."""
    import ray

    def kill(rank: int) -> None:
        supervisor = psutil.Process(ray.get(engines.actors[rank][0].pid.remote()))
        family = supervisor.children(recursive=True)
        family[0].kill()                     # the HTTP server; its scheduler and the supervisor must follow
        assert gone([supervisor, *family], 60.0)

    kill(1)
    assert engines.check() == [1]
    dead = engines.urls[1]
    engines.restart(1)
    assert engines.check() == [] and engines.restarts == 1
    assert set(engines.router.workers()) == {engines.urls[0]}, "it has no weights yet, so nobody is sent to it"
    engines.admit(1)
    assert set(engines.router.workers()) == set(engines.urls) and dead not in engines.urls
    for _ in range(4):                       # both in turns
        assert len(send(engines.router_url, [5, 6], 3)["output_ids"]) == 3
    kill(1)
    with pytest.raises(EngineError, match=r"(?s)engine 1 .*max_engine_restarts=1 .*engine_1.log ends:\n.+"):
        engines.restart(1)


def test_ports_are_given_once_and_from_the_callers_part():
    ports = [free_port("127.0.0.1", part=3) for _ in range(50)]
    assert len(set(ports)) == 50 and all(18000 <= port < 19000 for port in ports)


def test_nothing_survives_a_killed_driver(tiny_model, tmp_path):
    """SIGKILL, so nobody can clean up: each process must notice by itself."""
    driver = f"""
import ray, time
from engines import Engines
from helpers import make_cfg
if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False)
    engines = Engines(make_cfg(rollout_num_gpus=1), {str(tmp_path)!r}, {tiny_model!r})    # kept: else Python ends them
    engines.start()
    print("\\nup\\n", end="", flush=True)      # in one piece: Ray prints here too
    time.sleep(600)
"""
    (tmp_path / "driver.py").write_text(driver)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([REPO, os.path.join(REPO, "tests")])}
    process = subprocess.Popen([sys.executable, str(tmp_path / "driver.py")], env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert any(line == "up\n" for line in process.stdout), "the driver ended before its engine was up"
        # By their logs: what Ray's daemons have started need not be the driver's descendants.
        servers = [p for p in psutil.process_iter() if output_of(p).startswith(str(tmp_path))]
        assert len(servers) >= 6, "two supervisors, the router, the server, its scheduler and detokenizer"
    finally:
        process.kill()
    assert gone(servers, 120.0)
