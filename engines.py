"""
engines.py: how does an SGLang server live and die? Servers, the router before them, and the driver's hold on both.

    train.py: Engines --Ray--> Engine (actor) --Child--> sglang server (+ its scheduler) --> <run>/logs/engine_<rank>.log
                  |  \--HTTP: pause, flush, weights, sleep, wake---------------^    ^
                  \--Child--> sglang-router --requests of rollout.py----------------/   --> <run>/logs/router.log

Run:   with Engines(cfg, run_dir, model_path) as engines: ... engines.router_url ...       Test:  pytest tests/test_engines.py
Knows nothing about: samples, prompts, trainers, tensors. It gets a Config and reads its machine and engine fields.
Left out on purpose: engines over several nodes, prefill/decode separation, external engines; one server is one node's.
"""
import ctypes
import multiprocessing
import os
import pathlib
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

CONTROL_TIMEOUT_S = 300.0                    # one control request (pause, flush, a weight bucket), unless the caller says


class EngineError(RuntimeError):
    """A server that did not start, did not answer, or said no."""


# ---- The driver's side -------------------------------------------------------------------------------------------------
class Engines:
    """All engines of a run and their router. Every method is called on the driver, from one thread at a time."""

    def __init__(self, cfg, run_dir: str | pathlib.Path, model_path: str, placement: list[tuple] | None = None):
        """placement: one (placement_group, bundle_index, first_gpu_id) for each engine; None on a machine with no GPU."""
        self.cfg, self.model_path, self.placement = cfg, str(model_path), placement
        self.log_dir = pathlib.Path(run_dir).absolute() / "logs"
        self.num_engines = cfg.rollout_num_gpus // cfg.rollout_num_gpus_per_engine
        self.router = Router(cfg, self.log_dir / "router.log")
        self.actors: list = []               # Ray handles, by rank
        self.urls: list[str] = []            # by rank; a restart changes one
        self.restarts = 0                    # engine restarts in the whole run
        self.quiet = False                   # paused or asleep: cannot generate, so only asked whether they are there

    @property
    def router_url(self) -> str:
        return self.router.url

    def start(self) -> None:
        """Router and engines come up at the same time, within cfg.start_timeout_s; a failure takes all down again."""
        import ray                           # heavy, and the server processes that import this file need none of it
        limit_s, begin = self.cfg.start_timeout_s, time.monotonic()
        try:
            self.actors = [self._actor(rank) for rank in range(self.num_engines)]
            started = [actor.start.remote(limit_s) for actor in self.actors]
            self.router.start(limit_s)
            # The actors keep the limit themselves; 30 s more is for Ray, which may have no room to place an actor.
            self.urls = ray.get(started, timeout=limit_s + 30)
            self._register(limit_s - (time.monotonic() - begin))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.router.stop()                   # first, or it fills its log with the engines' deaths
        for actor in self.actors:
            self._end(actor)
        self.actors, self.urls = [], []

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    # -- control requests
    def post(self, path: str, payload: dict | list | None = None, timeout_s: float = CONTROL_TIMEOUT_S,
             only: list[int] | None = None) -> list[Any]:
        """The same request to all engines (or the ranks in `only`) at once -> their JSON answers, in that order.

        A list as payload gives each of them its own. Raises EngineError unless all of them agreed.
        """
        return call_all("POST", self._urls(only), path, payload, timeout_s)

    def pause(self, mode: str = "retract") -> None:
        self.quiet = True
        self.post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self.post("/continue_generation", {})
        self.quiet = False

    def flush_cache(self, timeout_s: float = 60.0) -> None:
        """Forget every cached prefix: it was computed with the old weights. Waits until the engines have no request."""
        self.post(f"/flush_cache?timeout={timeout_s}", timeout_s=timeout_s + 30)

    def abort_all(self) -> None:
        """Requests in flight come back at once with finish_reason "abort" and the tokens they have."""
        self.post("/abort_request", {"abort_all": True})

    def sleep(self, tags: list[str] | None = None) -> None:
        """Give GPU memory back: "weights", "kv_cache", "cuda_graph"; None is all of them."""
        self.flush_cache()                   # NOTE: SGLang's scheduler dies of an assertion when it is not idle here
        self.quiet = True
        self.post("/release_memory_occupation", {"tags": tags})

    def wake(self, tags: list[str] | None = None) -> None:
        self.post("/resume_memory_occupation", {"tags": tags})
        self.quiet = tags is not None and "kv_cache" not in tags   # the KV cache comes last

    def weight_versions(self) -> list[str]:
        return [info["weight_version"] for info in call_all("GET", self.urls, "/model_info", None, CONTROL_TIMEOUT_S)]

    # -- health
    def check(self) -> list[int]:
        """Ranks whose process is dead, or that give no sign of life for three health intervals."""
        with ThreadPoolExecutor(max(1, self.num_engines)) as pool:
            healthy = list(pool.map(self._healthy, range(self.num_engines)))
        return [rank for rank, ok in enumerate(healthy) if not ok]

    def _healthy(self, rank: int) -> bool:
        import ray
        limit_s = self.cfg.health_check_interval_s * 3
        try:
            if not ray.get(self.actors[rank].alive.remote(), timeout=limit_s):
                return False
            # /health_generate goes through the scheduler: one token, or a share in what is running anyway.
            path = "/health" if self.quiet else "/health_generate"
            return httpx_client(limit_s).get(self.urls[rank] + path).status_code == 200
        except (ray.exceptions.RayError, httpx.HTTPError):
            return False

    def restart(self, rank: int) -> None:
        """A new engine in the place of a dead one. NOTE: it has the weights of model_path; push the current ones."""
        import ray
        log = self.log_dir / f"engine_{rank}.log"
        self.restarts += 1
        if self.restarts > self.cfg.max_engine_restarts:
            raise EngineError(f"engine {rank} ({self.urls[rank]}) is down, and max_engine_restarts="
                              f"{self.cfg.max_engine_restarts} restarts are used up; its log {log} says why. "
                              f"Set max_engine_restarts higher to go on all the same.\n{tail(log)}")
        self.check_router()
        self.router.unregister(self.urls[rank])
        self._end(self.actors[rank])
        self.actors[rank] = self._actor(rank)
        limit_s = self.cfg.start_timeout_s
        self.urls[rank] = ray.get(self.actors[rank].start.remote(limit_s), timeout=limit_s + 30)
        self.router.register(self.urls[rank], limit_s)

    def check_router(self) -> bool:
        """Whether the router lives; a dead one is started again at the same address, with all engines."""
        if self.router.alive():
            return True
        self.router.start(self.cfg.start_timeout_s)
        self._register(self.cfg.start_timeout_s)
        return False

    # -- helpers
    def _register(self, timeout_s: float) -> None:
        with ThreadPoolExecutor(len(self.urls)) as pool:   # each waits about 1 s for its first health check
            list(pool.map(lambda url: self.router.register(url, timeout_s), self.urls))

    def _urls(self, only: list[int] | None) -> list[str]:
        return self.urls if only is None else [self.urls[rank] for rank in only]

    def _actor(self, rank: int):
        """An Engine as a Ray actor, in its place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        options, base_gpu_id = dict(num_cpus=0), 0
        if self.placement is not None:
            group, bundle, base_gpu_id = self.placement[rank]
            # The server finds its GPUs by base_gpu_id, so Ray must hide none of them, and a share of one GPU is enough
            # to sit in the bundle; the trainer of a colocated run sits there too.
            options |= dict(num_gpus=0.2, runtime_env=dict(env_vars={"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}),
                            scheduling_strategy=PlacementGroupSchedulingStrategy(
                                group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True))
        args = server_args(self.cfg, rank, self.model_path, base_gpu_id)
        cpu_engines = self.num_engines if self.cfg.device == "cpu" else 0
        return ray.remote(Engine).options(**options).remote(args, str(self.log_dir / f"engine_{rank}.log"), cpu_engines)

    @staticmethod
    def _end(actor) -> None:
        import ray
        try:
            ray.get(actor.stop.remote(), timeout=30)
        except ray.exceptions.RayError:      # dead, or busy starting; its servers hang on its life
            pass
        ray.kill(actor)


def server_args(cfg, rank: int, model_path: str, base_gpu_id: int) -> dict[str, Any]:
    """SGLang's ServerArgs of one engine; the user's own settings (cfg.sglang) go over ours."""
    args = dict(
        model_path=model_path, device=cfg.device, dtype=cfg.dtype, trust_remote_code=False,
        tp_size=cfg.rollout_num_gpus_per_engine, base_gpu_id=base_gpu_id,
        random_seed=cfg.rollout_seed + rank,     # engines must not draw the same numbers; sampling_seed goes over it
        enable_deterministic_inference=cfg.deterministic,
        grammar_backend="none",                  # constrained output is not used, and its import is slow
        log_level_http="warning")                # not a line for each request
    if cfg.rollout_max_context_len:
        args["context_length"] = cfg.rollout_max_context_len
    if cfg.device == "cpu":
        args |= dict(attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=True,
                     skip_server_warmup=True, mem_fraction_static=0.8, max_total_tokens=32768,   # tokens of KV cache
                     # A prompt cut in two, for lack of room in a batch, would differ in the last bit from a whole one.
                     chunked_prefill_size=-1)
    else:
        args |= dict(enable_memory_saver=cfg.offload_rollout)
    return args | cfg.sglang


# ---- One engine --------------------------------------------------------------------------------------------------------
class Engine:
    """A Ray actor that owns one SGLang server on its node."""

    def __init__(self, args: dict[str, Any], log: str, cpu_engines: int):
        """args: server_args(...); cpu_engines: how many engines share the CPU cores, 0 where GPUs compute."""
        import ray
        self.args, self.log, self.cpu_engines = args, pathlib.Path(log), cpu_engines
        self.host = ray.util.get_node_ip_address()
        self.child: Child | None = None

    def start(self, timeout_s: float) -> str:
        """Start the server and wait until it can generate -> its URL."""
        port = free_port(self.host)
        env = dict(NCCL_CUMEM_ENABLE="0",        # NOTE: as in the trainers, or the weight-update group hangs for ever
                   SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="0")   # the router's /health costs no token
        if self.cpu_engines:
            threads = max(1, len(os.sched_getaffinity(0)) // self.cpu_engines)
            env |= dict(OMP_NUM_THREADS=str(threads))
        self.child = Child("server", self.args | dict(host=self.host, port=port), self.log, env)
        url = f"http://{self.host}:{port}"
        self.child.wait_up(url + "/health", timeout_s)
        return url

    def alive(self) -> bool:
        return self.child is not None and self.child.alive()

    def pid(self) -> int:
        return self.child.process.pid

    def stop(self) -> None:
        if self.child:
            self.child.stop()


# ---- The router --------------------------------------------------------------------------------------------------------
class Router:
    """The stock sglang-router: one address for all engines."""

    def __init__(self, cfg, log: pathlib.Path):
        self.cfg, self.log = cfg, log
        self.child: Child | None = None
        self.url = ""

    def start(self, timeout_s: float) -> None:
        """Also after it died: same address, but it knows no engine yet."""
        if not self.url:
            import ray
            host = ray.util.get_node_ip_address()
            self.url = f"http://{host}:{free_port(host)}"
        host, port = self.url.removeprefix("http://").split(":")
        args = dict(
            host=host, port=int(port), policy=os.environ.get("POL","round_robin"), log_level="warn",balance_abs_threshold=int(os.environ.get("ABS","64")),balance_rel_threshold=1.0,
            request_timeout_secs=int(self.cfg.request_timeout_s) + 60,       # ours ends first, and says more
            disable_retries=True, disable_circuit_breaker=True,              # rollout.py retries, and counts
            health_check_interval_secs=1, health_success_threshold=1, health_failure_threshold=3,
            worker_startup_check_interval=1)
        self.child = Child("router", args, self.log, {})
        self.child.wait_up(self.url + "/liveness", timeout_s)

    def alive(self) -> bool:
        return self.child is not None and self.child.alive()

    def workers(self) -> dict[str, dict]:
        """url -> what the router knows about that engine."""
        answer = call_all("GET", [self.url], "/workers", None, 30.0)[0]
        return {worker["url"]: worker for worker in answer["workers"]}

    def register(self, url: str, timeout_s: float) -> None:
        """Add an engine and wait until requests reach it: the router answers 503 until its first health check."""
        call_all("POST", [self.url], "/workers", {"url": url}, 30.0)
        self._wait(lambda: self.workers().get(url, {}).get("is_healthy"), timeout_s, f"take up {url}")

    def unregister(self, url: str, timeout_s: float = 30.0) -> None:
        worker = self.workers().get(url)
        if worker:
            call_all("DELETE", [self.url], f"/workers/{worker['id']}", None, 30.0)
            self._wait(lambda: url not in self.workers(), timeout_s, f"let go of {url}")

    def _wait(self, condition, timeout_s: float, what: str) -> None:
        end = time.monotonic() + max(timeout_s, 1.0)
        while not condition():
            if time.monotonic() > end:
                raise EngineError(f"the router {self.url} did not {what} in {timeout_s:.0f} s; its log {self.log} ends:\n"
                                  f"{tail(self.log)}")
            time.sleep(0.1)

    def stop(self) -> None:
        if self.child:
            self.child.stop()


# ---- HTTP --------------------------------------------------------------------------------------------------------------
def httpx_client(timeout_s: float) -> httpx.Client:
    return httpx.Client(timeout=timeout_s, trust_env=False)   # a proxy of the environment is not for these addresses


def call_all(method: str, urls: list[str], path: str, payload: dict | list | None, timeout_s: float) -> list[Any]:
    """One request to each URL at the same time -> JSON answers (text where it is no JSON). Raises EngineError on any no."""
    payloads = payload if isinstance(payload, list) else [payload] * len(urls)
    assert len(payloads) == len(urls), f"{len(payloads)} payloads for {len(urls)} engines; give one dict, or one for each"
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        answers = [pool.submit(call, method, url + path, own, timeout_s) for url, own in zip(urls, payloads)]
        errors = [str(answer.exception()) for answer in answers if answer.exception()]
    if errors:
        raise EngineError("\n".join(errors))
    return [answer.result() for answer in answers]


def call(method: str, url: str, payload: dict | None, timeout_s: float) -> Any:
    begin = time.monotonic()
    try:
        with httpx_client(timeout_s) as client:
            answer = client.request(method, url, json=payload)
    except httpx.HTTPError as error:
        raise EngineError(f"{method} {url}: no answer after {time.monotonic() - begin:.1f} s of {timeout_s:.0f} s "
                          f"({type(error).__name__}: {error}); see its log in <run>/logs") from error
    try:
        body = answer.json()
    except ValueError:                       # some endpoints answer with text, some with nothing
        body = answer.text
    if answer.status_code >= 400 or (isinstance(body, dict) and body.get("success") is False):
        raise EngineError(f"{method} {url}: status {answer.status_code}: {answer.text[:2000]}")
    return body


# ---- Processes ---------------------------------------------------------------------------------------------------------
class Child:
    """One server process with all that it starts: its output in a log, its life tied to ours.

    we --stdin (the job; then only open)--> supervisor --fork--> server --> its own processes
    The end of stdin means that we are gone, however we went: the supervisor then kills its whole process group.
    """

    def __init__(self, kind: str, args: dict[str, Any], log: pathlib.Path, env: dict[str, str]):
        self.kind, self.log = kind, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as out:         # appended: a restarted engine's log keeps what ended the first one
            self.process = subprocess.Popen([sys.executable, os.path.abspath(__file__)], env=os.environ | env,
                                            stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True)
        self.process.stdin.write(pickle.dumps((kind, args)))
        self.process.stdin.flush()

    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_up(self, url: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with httpx_client(5.0) as client:
            while True:
                if not self.alive():
                    raise EngineError(f"the {self.kind} ended (exit code {self.process.returncode}) before it was up; "
                                      f"its log {self.log} ends:\n{tail(self.log)}")
                try:
                    if client.get(url).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass                     # not listening yet
                if time.monotonic() > end:
                    self.stop()
                    raise EngineError(f"the {self.kind} was not up in {timeout_s:.0f} s (start_timeout_s); "
                                      f"its log {self.log} ends:\n{tail(self.log)}")
                time.sleep(0.1)

    def stop(self) -> None:
        """Kill everything it started, and wait until that is gone (a GPU's memory is free only then)."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        for pid in [self.process.pid] + [member.pid for member in family]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(30)
        psutil.wait_procs(family, 30)
        self.process.stdin.close()


def supervise() -> None:
    """What a Child runs first. It forks before anything is imported or any thread exists."""
    kind, args = pickle.load(sys.stdin.buffer)
    server = os.fork()
    if server == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)   # PR_SET_PDEATHSIG: a killed supervisor takes the server along
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve_router(args) if kind == "router" else serve_sglang(args)
        return
    # The router holds Python's lock while it runs, so the watch must be another process's.
    threading.Thread(target=wait_for_status, args=(server,), daemon=True).start()
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def wait_for_status(server: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    os._exit(code if code >= 0 else 128 - code)      # a shell's way to name a signal


def serve_sglang(args: dict[str, Any]) -> None:
    if args["device"] == "cpu":
        # SGLang spawns its scheduler and detokenizer afresh, and each imports SGLang again: 11 s on two cores. With no
        # CUDA state to spoil, they can be forks of this process, which has all of it imported.
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda method, force=False: None   # SGLang insists on "spawn"
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    launch_server(ServerArgs(**args))


def serve_router(args: dict[str, Any]) -> None:
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs
    launch_router(RouterArgs(**args))


def free_port(host: str) -> int:
    """A port that nobody has now. NOTE: not from the range (32768 up) that the kernel gives to outgoing connections:
    a server binds it 20 s later, and by then one of those might have it."""
    while True:
        port = random.SystemRandom().randint(15000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError:
                continue


def tail(log: pathlib.Path, lines: int = 30) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


if __name__ == "__main__":                   # also imported by the processes that SGLang spawns
    supervise()
