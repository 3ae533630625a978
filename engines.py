"""
engines.py: how does an SGLang server live and die? Servers, the router before them, and the driver's hold on both.

    train.py: Engines --Ray--> Engine (actor) --Child--> sglang server (+ scheduler) --> <run>/logs/engine_<rank>.log
                  |  +--HTTP: pause, flush, weights, sleep, wake---------^    ^
                  +--Child--> sglang-router --requests of client.py-----------/     --> <run>/logs/router.log

Run:   with Engines(cfg, run_dir, model_path) as engines: ... engines.router_url ...
Test:  pytest tests/test_engines.py
Knows nothing about: samples, prompts, trainers, tensors. It gets a Config and reads its machine and engine fields.
Left out on purpose: prefill/decode separation, external engines.
"""
import ctypes
import functools
import itertools
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

CONTROL_TIMEOUT_S = 300.0                    # one control request (pause, flush, ...) unless the caller says otherwise


class EngineError(RuntimeError):
    """A server that did not start, did not answer, or said no."""


# ---- The driver's side ----------------------------------------------------------------------------------------------
class Engines:
    """All engines of a run and their router. Lives on the driver, which restarts them from one thread at a time."""

    def __init__(self, cfg, run_dir: str | pathlib.Path, model_path: str, placement: list[list[tuple]] | None = None):
        """placement: of each engine, for each of its nodes, (placement_group, bundle, its GPUs there); None without GPUs."""
        self.cfg, self.model_path, self.placement = cfg, str(model_path), placement
        self.log_dir = pathlib.Path(run_dir).absolute() / "logs"
        self.num_engines = cfg.rollout_num_gpus // cfg.rollout_num_gpus_per_engine
        self.router = Router(cfg, self.log_dir / "router.log")
        self.actors: list[list] = []         # by rank: Ray handles, one for each node; the first answers HTTP
        self.urls: list[str] = []            # by rank; a restart changes one
        self.restarts = self.router_restarts = 0     # in the whole run
        self.paused, self.asleep = False, False  # cannot generate then, so check() only asks whether they are there

    @property
    def router_url(self) -> str:
        return self.router.url               # the same for the whole run

    def start(self) -> None:
        """Router and engines come up at the same time, within cfg.start_timeout_s; a failure takes all down again."""
        import ray                           # heavy, and the server processes that import this file need none of it
        limit_s, begin = self.cfg.start_timeout_s, time.monotonic()
        try:
            started = [self._start(rank) for rank in range(self.num_engines)]
            self.router.start(limit_s)
            # The actors keep the limit themselves; 30 s more is for Ray, which may have no room to place an actor.
            ray.get([one for own in started for one in own], timeout=limit_s + 30)      # the first failure ends the wait
            self.urls = [ray.get(own[0]) for own in started]
            self.router.register(self.urls, limit_s - (time.monotonic() - begin))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.router.stop()                   # first, or it fills its log with the engines' deaths
        self._end([actor for own in self.actors for actor in own])
        self.actors, self.urls = [], []

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.stop()

    # -- control: each of these asks all engines at the same time, and raises EngineError unless all agreed
    def post(self, path: str, payload: dict | list | None = None, timeout_s: float = CONTROL_TIMEOUT_S,
             only: list[int] | None = None) -> list[Any]:
        """The same request to all engines (or the ranks in `only`) -> their JSON answers, in that order.

        A list as payload gives each of them its own."""
        urls = self.urls if only is None else [self.urls[rank] for rank in only]
        return call_all("POST", urls, path, payload, timeout_s)

    def pause(self, mode: str = "abort") -> None:
        """Stop generating; new requests wait for resume(). What becomes of the ones in flight:

        "abort"    they come back as after abort_all(); the sender sends prompt and tokens again, and goes on with the
                   new weights. The one way in which the cache can be flushed and every token's weight version is right.
        "retract"  they stay and go on after resume(). NOTE: flush_cache() fails while there are any, prefixes computed
                   with the old weights are used again, and meta_info then gives all tokens the new weight version.
        """
        self.paused = True
        self.post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        self.post("/continue_generation", {})
        self.paused = False

    def flush_cache(self, timeout_s: float = 60.0) -> None:
        """Forget every cached prefix: it was computed with the old weights. Waits until no engine has a request."""
        self.post(f"/flush_cache?timeout={timeout_s}", timeout_s=timeout_s + 30)

    def abort_all(self) -> None:
        """Requests in flight come back at once with finish_reason "abort" and the tokens and log-probs they have. An engine
        that hangs is an EngineError as soon as check() would say so."""
        self.post("/abort_request", {"abort_all": True}, timeout_s=self.cfg.health_check_interval_s * 3)

    def sleep(self, tags: list[str] | None = None) -> None:
        """Give GPU memory back: "weights", "kv_cache", "cuda_graph"; None is all of them."""
        self.flush_cache()                   # NOTE: SGLang's scheduler dies of an assertion when it is not idle here
        self.asleep = True
        self.post("/release_memory_occupation", {"tags": tags})

    def wake(self, tags: list[str] | None = None) -> None:
        self.post("/resume_memory_occupation", {"tags": tags})
        self.asleep = tags is not None and "kv_cache" not in tags  # the KV cache comes last

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
        # /health_generate goes through the scheduler: one token, or a share in what is running anyway. It takes 1 s.
        path = "/health" if self.paused or self.asleep else "/health_generate"
        try:
            alive = ray.get([actor.alive.remote() for actor in self.actors[rank]], timeout=limit_s)
            call("GET", self.urls[rank] + path, None, limit_s)
            return all(alive)
        except (ray.exceptions.RayError, EngineError):
            return False

    def restart(self, rank: int) -> None:
        """A new engine in the place of a dead one. NOTE: it has the weights of model_path; push the current ones, then admit
        it: until then the router sends it nothing."""
        import ray
        log, limit_s = self.log_dir / f"engine_{rank}.log", self.cfg.start_timeout_s
        self.restarts += 1
        if self.restarts > self.cfg.max_engine_restarts:
            raise EngineError(f"engine {rank} ({self.urls[rank]}) is down and max_engine_restarts="
                              f"{self.cfg.max_engine_restarts} restarts are used up. Its log says why; where the "
                              f"machine is to blame, set max_engine_restarts higher. {log} ends:\n{tail(log)}")
        self.with_router(lambda: self.router.unregister(self.urls[rank]), rank)
        self._end(self.actors[rank])
        self.urls[rank] = ray.get(self._start(rank), timeout=limit_s + 30)[0]

    def admit(self, rank: int) -> None:
        self.with_router(lambda: self.router.register([self.urls[rank]], self.cfg.start_timeout_s), rank)

    def with_router(self, work: Callable, rank: int) -> None:
        """work(), which is about engine `rank`; once more where the router has died meanwhile."""
        try:
            work()
        except EngineError:
            if self.check_router([*self.check(), rank]):
                raise                        # it lives: something else is wrong
            work()

    def check_router(self, dead: list[int] = ()) -> bool:
        """Whether the router lives; one that does not is started again at the same address, with all engines but the dead."""
        if self.router.alive(self.cfg.health_check_interval_s * 3):
            return True
        self.router_restarts += 1
        self.router.stop()
        self.router.start(self.cfg.start_timeout_s)
        self.router.register([url for rank, url in enumerate(self.urls) if rank not in dead], self.cfg.start_timeout_s)
        return False

    def fault(self, rank: int, kind: str) -> None:
        """For inject_faults: "kill" or "hang"."""
        import ray
        ray.get(self.actors[rank][0].fault.remote(kind), timeout=30)

    def kill(self, ranks: list[int]) -> None:
        """What they were asked fails at once, and check() finds them."""
        import ray
        for rank in ranks:                   # wait(), not get(): one that is dead by now is no error
            ray.wait([self.actors[rank][0].fault.remote("kill")], timeout=30)

    # -- actors
    def _start(self, rank: int) -> list:
        """An engine's actors, one on each of its nodes, with their servers on the way -> Ray's promises of URLs, the head's
        first. It stands in self.actors from the beginning, so that stop() finds it also half-way."""
        import ray
        limit_s = self.cfg.start_timeout_s
        nodes = self.placement[rank] if self.placement is not None else [None]
        own = [self._actor(rank, node_rank, len(nodes), place) for node_rank, place in enumerate(nodes)]
        self.actors[rank:rank + 1] = [own]
        meet = ray.get(own[0].address.remote(), timeout=limit_s) if len(nodes) > 1 else None
        return [actor.start.remote(limit_s, meet) for actor in own]

    def _actor(self, rank: int, node_rank: int, nodes: int, place: tuple | None):
        """One node's part of an engine as a Ray actor, in its place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        options, gpus = dict(num_cpus=0), None
        if place is not None:
            group, bundle, gpus = place
            # A share of its first GPU is enough to sit there; the trainer of a colocated run sits there too.
            options |= dict(num_gpus=0.2, scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle))
        args = server_args(self.cfg, rank, self.model_path) | dict(nnodes=nodes, node_rank=node_rank)
        cpu_engines = self.num_engines if self.cfg.device == "cpu" else 0
        log = self.log_dir / f"engine_{rank}{f'_node_{node_rank}' if node_rank else ''}.log"
        return ray.remote(Engine).options(**options).remote(rank, args, str(log), cpu_engines, gpus)

    @staticmethod
    def _end(actors: list) -> None:
        import ray
        if actors:                           # one that is dead or busy starting does not stop: its server dies with it
            ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=30)
        for actor in actors:
            ray.kill(actor)


def server_args(cfg, rank: int, model_path: str) -> dict[str, Any]:
    """SGLang's ServerArgs of one engine; the user's own settings (cfg.sglang) go over ours."""
    args = dict(
        model_path=model_path, device=cfg.device, dtype=cfg.dtype, trust_remote_code=False,
        tp_size=cfg.rollout_num_gpus_per_engine,
        random_seed=cfg.rollout_seed + rank,     # engines must not draw the same numbers
        enable_deterministic_inference=cfg.deterministic,   # NOTE: a request's sampling_seed is ignored without it
        grammar_backend="none",                  # constrained output is not used, and its import is slow
        log_level_http="warning")                # not a line for each request
    if cfg.rollout_max_context_len:
        args["context_length"] = cfg.rollout_max_context_len
    if cfg.device == "cpu":
        args |= dict(attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=True,
                     skip_server_warmup=True,
                     sleep_on_idle=True,         # else an idle scheduler spins, and takes a core from the trainers
                     mem_fraction_static=0.8, max_total_tokens=32768,   # tokens of KV cache
                     # A prompt cut in two, for lack of room in a batch, would differ in the last bit from a whole one.
                     chunked_prefill_size=-1)
    else:
        args |= dict(enable_memory_saver=cfg.offload_rollout)
    if cfg.rollout_quantization:             # model_path is an fp8 folder then, and its config.json says so
        # NOTE: not "auto". That is DeepGEMM, which compiles for minutes at a first start, and on Blackwell rounds the scales
        # to powers of 2 and packs them once, at the start: a weight sync then finds parameters of another shape.
        args["fp8_gemm_runner_backend"] = "triton"
    return args | cfg.sglang


# ---- One engine -----------------------------------------------------------------------------------------------------
class Engine:
    """A Ray actor that owns one SGLang server, or one node's part of it."""

    def __init__(self, rank: int, args: dict[str, Any], log: str, cpu_engines: int, gpus: list[str] | None):
        """args: server_args(...); cpu_engines: how many engines share the CPU cores, 0 where GPUs compute; gpus: those."""
        self.args, self.log, self.cpu_engines, self.gpus = args, pathlib.Path(log), cpu_engines, gpus
        self.part = 2 + rank % 13            # whose ports are ours
        self.child: Child | None = None

    def address(self) -> str:
        """Where this engine's nodes may meet."""
        import ray
        host = ray.util.get_node_ip_address()
        return f"{host}:{free_port(host, self.part)}"

    def start(self, timeout_s: float, meet: str | None = None) -> str:
        """Start the server and wait until it can generate -> its URL (of other nodes than the first it only says: I am up)."""
        host, port = self.address().split(":")
        env = dict(NANOSLIME_ENGINE_MODEL=str(self.args["model_path"]),  # for mend.py, which SGLang's processes call
                   SGLANG_TIMEOUT_KEEP_ALIVE="3600",     # NOTE: 5 s by default, and the router's requests that start in just
                   #                               the moment when their idle connections are closed all fail
                   SGLANG_HEALTH_CHECK_TIMEOUT="3600",   # who asks says how long he waits; 20 s would kill a busy CPU engine
                   NCCL_CUMEM_ENABLE="0",        # NOTE: as in the trainers, or the weight-update group hangs for ever
                   SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="0")   # the router's /health costs no token
        if self.gpus:                        # Ray has shown this actor the first of them only
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        if self.cpu_engines:
            # NOTE: threads that wait for work by spinning take the core from whoever has it: beside a busy trainer an
            # engine fell from 4,400 to 60 tokens/s. Compiling three small functions takes 10 s and a C++ compiler.
            threads = max(1, len(os.sched_getaffinity(0)) // self.cpu_engines)
            env |= dict(OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE", TORCH_COMPILE_DISABLE="1")
        self.child = Child("server", self.args | dict(host=host, port=int(port), dist_init_addr=meet), self.log, env)
        url = f"http://{host}:{port}"
        self.child.wait_up(url + "/health", timeout_s)           # 200 only after the weights are loaded
        if self.args["node_rank"] == 0:
            call("POST", url + "/freeze_gc", None, timeout_s)    # see train.start
        return url

    def alive(self) -> bool:
        return self.child is not None and self.child.alive()

    def pid(self) -> int:
        return self.child.process.pid        # killing it kills the whole server

    def fault(self, kind: str) -> None:
        self.child.fault(kind)

    def stop(self) -> None:
        if self.child:
            self.child.stop()


# ---- The router -----------------------------------------------------------------------------------------------------
class Router:
    """The stock sglang-router: one address for all engines."""

    def __init__(self, cfg, log: pathlib.Path):
        self.cfg, self.log = cfg, log
        self.child: Child | None = None
        self.url = ""

    def start(self, timeout_s: float) -> None:
        """Also after it died: then at the same address, but it knows no engine yet."""
        if not self.url:
            import ray
            host = ray.util.get_node_ip_address()
            self.url = f"http://{host}:{free_port(host)}"
        host, port = self.url.removeprefix("http://").split(":")
        args = dict(
            host=host, port=int(port), log_level="warn",
            # FORK POINT: its default, cache_aware, follows the longest common prefix: with a shared system prompt all
            # of 64 requests went to one of two engines. In turns is even, and each engine prefills a prompt but once.
            policy="round_robin",
            request_timeout_secs=int(self.cfg.request_timeout_s) + 60,       # client.py's ends first, and says more
            disable_retries=True, disable_circuit_breaker=True,              # client.py retries, and counts
            health_check_interval_secs=1, health_success_threshold=1, health_failure_threshold=3,
            prometheus_host="127.0.0.1", prometheus_port=free_port("127.0.0.1"))   # or a second run finds 29000 taken
        self.child = Child("router", args, self.log, {})
        self.child.wait_up(self.url + "/liveness", timeout_s)

    def alive(self, limit_s: float) -> bool:
        try:
            call("GET", self.url + "/liveness", None, limit_s)
            return self.child.alive()
        except EngineError:
            return False

    def workers(self) -> dict[str, dict]:
        """url -> what the router knows about that engine."""
        return {worker["url"]: worker for worker in call("GET", self.url + "/workers", None, 30.0)["workers"]}

    def register(self, urls: list[str], timeout_s: float) -> None:
        """Add engines and wait until requests reach them: the router answers 503 until a first health check passed."""
        for url in urls:
            call("POST", self.url + "/workers", {"url": url}, 30.0)
        wait_until(lambda: all(self.workers().get(url, {}).get("is_healthy") for url in urls), timeout_s,
                   f"the router {self.url} did not take up {urls}", self.log)

    def unregister(self, url: str) -> None:
        worker = self.workers().get(url)
        if worker:
            call("DELETE", f"{self.url}/workers/{worker['id']}", None, 30.0)
            wait_until(lambda: url not in self.workers(), 30.0,
                       f"the router {self.url} did not let go of {url}", self.log)

    def stop(self) -> None:
        if self.child:
            self.child.stop()


# ---- HTTP -----------------------------------------------------------------------------------------------------------
def call_all(method: str, urls: list[str], path: str, payload: dict | list | None, timeout_s: float) -> list[Any]:
    """One request to each URL at the same time -> what call() returns, in order. EngineError names every no."""
    payloads = payload if isinstance(payload, list) else [payload] * len(urls)
    assert len(payloads) == len(urls), f"{len(payloads)} payloads for {len(urls)} engines; give one, or one for each"
    with ThreadPoolExecutor(max(1, len(urls))) as pool:
        answers = [pool.submit(call, method, url + path, own, timeout_s) for url, own in zip(urls, payloads)]
        errors = [str(answer.exception()) for answer in answers if answer.exception()]
    if errors:
        raise EngineError("\n".join(errors))
    return [answer.result() for answer in answers]


def call(method: str, url: str, payload: dict | None, timeout_s: float) -> Any:
    """-> the JSON answer (None: null); its text where it is none. SGLang may also say no with status 200."""
    begin = time.monotonic()
    try:
        # A proxy named in the environment is not for these addresses. verify=False: this is plain HTTP, and httpx would
        # load all certificates of the machine for each request, 15 ms.
        answer = httpx.request(method, url, json=payload, timeout=timeout_s, trust_env=False, verify=False)
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


def wait_until(condition: Callable[[], bool], timeout_s: float, complaint: str, log: pathlib.Path) -> None:
    end = time.monotonic() + max(timeout_s, 1.0)
    while not condition():
        if time.monotonic() > end:
            raise EngineError(f"{complaint} in {timeout_s:.0f} s; {log} ends:\n{tail(log)}")
        time.sleep(0.1)


# ---- Processes ------------------------------------------------------------------------------------------------------
class Child:
    """One server process with all that it starts: its output in a log, its life tied to ours.

    we --stdin (the job, then nothing)--> supervisor --fork--> server --> its own processes
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
        def up() -> bool:
            if not self.alive():
                raise EngineError(f"the {self.kind} ended (exit code {self.process.returncode}) before it was up; "
                                  f"{self.log} ends:\n{tail(self.log)}")
            try:
                call("GET", url, None, 5.0)
            except EngineError:              # not listening yet, or not ready
                return False
            return True
        try:
            wait_until(up, timeout_s, f"the {self.kind} {url} was not up (start_timeout_s)", self.log)
        except EngineError:
            self.stop()
            raise

    def fault(self, kind: str) -> None:
        """For inject_faults: kill -9, or stop all its processes where they are."""
        supervisor = psutil.Process(self.process.pid)
        if kind == "kill":
            supervisor.kill()                # the server goes with it
        for process in supervisor.children(recursive=True) if kind == "hang" else ():
            process.suspend()

    def stop(self) -> None:
        """Kill everything it started, and wait until that is gone (a GPU's memory is free only then)."""
        family = []
        if self.alive():                     # else its pid may be somebody else's by now, and what it started is dead
            supervisor = psutil.Process(self.process.pid)
            family = [*supervisor.children(recursive=True), supervisor]
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(family, 30)
        self.process.wait(30)
        self.process.stdin.close()


def supervise() -> None:
    """What a Child runs first. It forks before SGLang is imported or any thread exists."""
    kind, args = pickle.load(sys.stdin.buffer)
    server = os.fork()                       # the router never gives Python's lock away: the watch is another process's
    if server == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)   # PR_SET_PDEATHSIG: a killed supervisor takes the server along
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        serve_router(args) if kind == "router" else serve_sglang(args)
        return
    threading.Thread(target=exit_with, args=(server,), daemon=True).start()
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def exit_with(server: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    os._exit(code if code >= 0 else 128 - code)      # a shell's way to name a signal


def serve_sglang(args: dict[str, Any]) -> None:
    if args["device"] == "cpu":
        # SGLang spawns its scheduler and detokenizer afresh, and each imports SGLang again: 11 s on two cores. With
        # no CUDA state to spoil, they can be forks of this process, which has all of it imported.
        multiprocessing.set_start_method("fork")
        multiprocessing.set_start_method = lambda method, force=False: None   # SGLang insists on "spawn"
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs
    if "enable_return_routed_experts" in args and args["enable_return_routed_experts"]:
        always_return_routed_experts()
    launch_server(ServerArgs(**args))


def always_return_routed_experts() -> None:
    """NOTE: the router hands on those fields of a request that it knows, and return_routed_experts is none of them."""
    from sglang.srt.managers.io_struct import GenerateReqInput
    normalize = GenerateReqInput.normalize_batch_and_arguments

    def with_routes(request):
        request.return_routed_experts = True
        normalize(request)
    GenerateReqInput.normalize_batch_and_arguments = with_routes


def serve_router(args: dict[str, Any]) -> None:
    # NOTE: not sglang_router.launch_router, which imports all of SGLang (7 s) for a debugging aid.
    from sglang_router.router import Router as StockRouter
    from sglang_router.router_args import RouterArgs
    StockRouter.from_args(RouterArgs(**args)).start()


@functools.cache
def ports_of(part: int) -> Iterator[int]:
    """A thousand ports in random order, each once in this process."""
    return iter(random.SystemRandom().sample(range(15000 + part * 1000, 16000 + part * 1000), 1000))


def free_port(host: str, part: int = 0) -> int:
    """A port that nobody has now. NOTE: a server takes it up to 20 s later, so it is one that nobody will have by then: from a
    thousand of the caller's own (part 0: the router, 1: trainers, 2 to 14: engines), never one given before, and from below
    32768, where the kernel's range for outgoing connections begins."""
    problem = "all were given before"
    for port in itertools.islice(ports_of(part), 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                problem = error
    raise EngineError(f"no port of {host} can be taken ({problem}); is that this machine's address? Ray calls it so: start "
                      "Ray with --node-ip-address=...")


def tail(log: pathlib.Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no log)"


if __name__ == "__main__":
    supervise()
