"""
train.py: what happens when? Start both sides, then the loop: generate, train, sync, and save, evaluate, log on their cadence.

    python train.py configs/demo_cpu.py                          a whole run on a laptop, minutes
    python train.py configs/qwen3_4b_grpo.py --lr=2e-6           any field of configs/base.py; later wins
    python train.py configs/qwen3_4b_grpo.py --dry-run           the resolved config, the placement, the bytes; starts nothing
    python train.py configs/demo_cpu.py --resume                 go on with the newest run of this file (Ctrl-C saves)

    one step, colocated (both sides share the GPUs in turns)         separate GPUs
    engines   generate |sleep|................|wake w|sync|wake kv   engines   generate |.........|sync|
    trainers  .........|wake |ref, old, train |......|sync|sleep     trainers  .........| train   |sync|

    async_mode (separate GPUs): one step off                         engines   generate 1 |sync| generate 2 |sync|
                                                                     trainers  train 0    |sync| train 1    |sync|
    fully_async: the same, but nobody waits for answers: a sync interrupts them (fully_async.py)

Test:  pytest tests/test_loop.py
Knows nothing about: how anything is done. Every phase and every memory hand-over is a line of the loop below.
"""
import concurrent.futures
import contextlib
import dataclasses
import datetime
import gc
import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time

import algos
import buffer
import checks
import convert
import debug
import faults
import hookdata
import memory
import placement
import plan
import rewards
from configs import base


# ---- The loop --------------------------------------------------------------------------------------------------------
def train(cfg: base.Config, run_dir: pathlib.Path) -> bool:
    """One run, from the model folder to the last checkpoint in run_dir. -> False where a signal stopped it before its end"""
    with contextlib.ExitStack() as stack:
        cfg, engines, trainers, rollout, logs, first_step, num_rollout = start(cfg, run_dir, stack)
        stop = stop_on_signal(stack)         # after ray.init, which sets a handler of its own
        strikes = faults.Faults(cfg, engines, rollout, logs.print)

        if first_step == 0 and base.has_eval(cfg) and not cfg.skip_eval_before_train:
            with logs.phase("eval"):
                logs.before(rollout.evaluate(-1))

        logs.start_step()
        ahead = None                                             # async_mode: the next step's samples, being generated
        for step in range(first_step, num_rollout):
            last = step + 1 == num_rollout
            strikes.begin(step)
            with logs.phase("rollout"):                          # P groups of n Samples: tokens, masks, log-probs, rewards
                result = ahead.result() if ahead else rollout.generate(step)
            data_state = rollout.state_dict()                    # a resumed run asks for what comes after these samples
            if cfg.async_mode and not last:
                ahead = rollout.start(step + 1)                  # by the present weights, while these learn
            if cfg.save_debug_rollout_data:
                debug.dump(cfg, run_dir, step, result, rollout.data, data_state)
            with logs.phase("offload"):
                if cfg.offload_rollout:
                    engines.sleep()
                if cfg.offload_train:
                    trainers.wake()
            with logs.phase("train"):
                answer = learn(cfg, step, result, trainers) if trainers else None      # None: debug_rollout_only
            metrics = checks.examine(cfg, step, result, answer, logs.print) if trainers else dict(result.metrics)

            if ahead:
                with logs.phase("rollout"):                      # weights change between batches, never inside an answer
                    concurrent.futures.wait([ahead])
            if engines is not None and trainers is not None:
                with logs.phase("offload"):
                    if cfg.offload_rollout:
                        engines.wake(["weights"])
                with logs.phase("update_weights"):
                    metrics |= rollout.sync(lambda: trainers.push_weights(engines, step + 1), step + 1)
                with logs.phase("offload"):
                    if cfg.offload_train:
                        trainers.sleep()
                    if cfg.offload_rollout:
                        engines.wake(["kv_cache", "cuda_graph"])
            if base.has_eval(cfg) and (last or due(cfg.eval_interval, step)):
                with logs.phase("eval"):
                    metrics |= rollout.evaluate(step)
            logs.samples(step, result.samples)
            logs.step(step, metrics)
            if trainers is not None and (last or stop.is_set() or due(cfg.save_interval, step)):
                with logs.phase("save"):                         # after the log, so that a resumed run lacks no line
                    if cfg.offload_rollout:                      # but for its weights: nobody sends them before step + 1
                        engines.sleep(["kv_cache", "cuda_graph"])
                    if cfg.offload_train:
                        trainers.wake()
                    save(cfg, run_dir, step + 1, trainers, data_state)
                    if cfg.offload_train:
                        trainers.sleep()
                    if cfg.offload_rollout:
                        engines.wake(["kv_cache", "cuda_graph"])
            if stop.is_set() and not last:
                logs.print(f"stopped by a signal after step {step + 1}"
                           + (f"; go on with the same command and --resume={run_dir}" if trainers else ""))
                return False
        logs.finish()
        return True


def learn(cfg: base.Config, step: int, result, trainers) -> dict:
    """One rollout's samples through the trainers -> their metrics and seconds. With PPO the critic, which sleeps and wakes
    with them, goes before and after: V of each token goes in, the returns come out."""
    data = result.data or buffer.to_train_data(cfg, result.samples, result.rewards, result.examples)
    plan = buffer.plan(cfg, data, trainers.dp_size)              # optimizer steps x ranks x micro-batches; loss_weights too
    critic = trainers.critic
    if critic is None:
        return trainers.train(step, data, plan)                  # reference, old log-probs -> advantages -> optimizer steps
    critic_plan, begin = buffer.plan(critic.cfg, data, critic.dp_size), time.perf_counter()
    data["values"] = critic.values(data, critic_plan)
    values_s = time.perf_counter() - begin
    answer = trainers.train(step, data, plan, step >= cfg.num_critic_only_steps)
    data["returns"] = answer["returns"]
    answer["critic"] = critic.train(step, data, critic_plan)
    answer["critic"]["times"]["values_time"] = values_s
    return answer


def due(interval: int | None, step: int) -> bool:
    return interval is not None and (step + 1) % interval == 0


# ---- Starting --------------------------------------------------------------------------------------------------------
def start(cfg: base.Config, run_dir: pathlib.Path, stack: contextlib.ExitStack) -> tuple:
    """Bring both sides up, at the same time unless they share GPUs. Whatever was started is on the stack and ends with it."""
    import ray                               # heavy imports here: most errors in a config are found without them
    from transformers import AutoTokenizer

    from actor import Trainers
    from engines import Engines
    from fully_async import FullyAsyncRollout
    from logs import Logs
    from rollout import FileRollout, Rollout
    model_dir = resolve_model(cfg, run_dir)
    with reading_input():
        hf_config = convert.load_hf_config(model_dir)
        convert.HFReader(model_dir, hf_config)                   # refuses a damaged or incomplete model
        plan.check_model(cfg, hf_config)
        for other in filter(None, (cfg.ref_load, cfg.opd_teacher_load)):
            convert.check_same_shape(hf_config, other)
        if "hf_checkpoint" in cfg.critic:
            convert.check_critic(hf_config, cfg.critic["hf_checkpoint"], cfg.tensor_model_parallel_size)
        if cfg.opd_teacher_url and base.has_engines(cfg):
            check_server(cfg.opd_teacher_url)
        # The prompts are read before anything heavy starts: a broken line must not cost minutes.
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=cfg.sglang.get("trust_remote_code", False))
        context_len = hf_config.max_position_embeddings
        data = (hookdata.OwnData(cfg, tokenizer, context_len, run_dir) if cfg.data_source else
                buffer.DataSource(cfg, tokenizer, context_len))
        eval_data = {name: buffer.DataSource(base.eval_config(cfg, name), tokenizer, context_len)
                     for name in cfg.eval_prompt_data}
        num_rollout = cfg.num_rollout
        if num_rollout is None:
            num_rollout = max(1, len(data) * cfg.num_epoch // cfg.rollout_batch_size)
            cfg = dataclasses.replace(cfg, num_rollout=num_rollout)
        checkpoint, replay = latest_checkpoint(run_dir) if cfg.resume else None, None
        if cfg.load_debug_rollout_data:
            done = int(checkpoint.name.removeprefix("iter_")) if checkpoint else 0
            replay = debug.Replay(cfg, data, hf_config.vocab_size, range(done, num_rollout))
        places = placement.start_ray(cfg, stack)
    cfg = memory.share_memory(cfg, hf_config, places.gpu_bytes if places else 0)
    for problem in plan.problems(cfg, hf_config, places.gpu_bytes) if places and places.gpu_bytes else ():
        print(f"warning: {problem}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        trainers = engines = engines_up = None
        if not cfg.debug_rollout_only:
            trainers = Trainers(cfg, places)
            stack.callback(trainers.stop)
        if base.has_engines(cfg):
            engine_dir = convert.engine_folder(model_dir, run_dir) if cfg.rollout_quantization else model_dir
            engines = Engines(cfg, run_dir, engine_dir, places.engines if places else None)
            stack.callback(engines.stop)
            engines_up = pool.submit(engines.start)
            if cfg.colocate and cfg.device == "cuda":            # an engine takes a share of the memory that it finds free
                engines_up.result()
                if cfg.offload_rollout:
                    engines.sleep()
        others = {"ref": cfg.ref_load or model_dir} if cfg.use_kl_loss or cfg.kl_coef else {}
        if cfg.opd_teacher_load:
            others["teacher"] = cfg.opd_teacher_load
        disk_dir = str(pathlib.Path(cfg.update_weight_disk_dir or run_dir.parent) / run_dir.name / "weights")
        total_steps = num_rollout * cfg.num_steps_per_rollout
        facts = trainers.start(model_dir, others, total_steps, disk_dir) if trainers else {"attention": "none"}
        if engines_up:
            engines_up.result()

    extra = trainers.load(checkpoint) if checkpoint else {"step": 0}
    logs = stack.enter_context(Logs(cfg, run_dir, num_rollout, extra["step"]))
    logs.print(f"attention in training: {facts['attention']}")
    if data.skipped:
        logs.print(f"left out of prompt_data: {dict(data.skipped)}; {len(data)} prompts remain")
    if data.examples and data.examples.skipped:
        logs.print(f"left out of sft_data: {dict(data.examples.skipped)}; {len(data.examples)} rows remain")
    if engines is None:
        rollout = replay or FileRollout(cfg, data)
    else:
        kind = FullyAsyncRollout if cfg.fully_async else Rollout
        rollout = kind(cfg, engines, data, eval_data, run_dir, logs.groups_done)
    if engines is not None and trainers is not None:
        def resync(ranks):                   # engines that were replaced while others generate, and the trainers sleep
            if cfg.offload_train:
                trainers.wake("weights")
            trainers.push_weights(engines, None, only=ranks)     # asynchronous: maybe newer ones than the others have
            if cfg.offload_train:
                trainers.sleep()
        rollout.client.resync = resync
        if cfg.offload_rollout:
            engines.wake(["weights"])
        rollout.sync(lambda: trainers.push_weights(engines, extra["step"]), extra["step"])   # equal from here on, checked
        if cfg.offload_train:
            trainers.sleep()
        if cfg.offload_rollout:
            engines.wake(["kv_cache", "cuda_graph"])
    stack.callback(rollout.close)
    if checkpoint:
        rollout.load_state_dict(extra["data"])
    # Python's garbage collector looks through all objects every few steps, half a million after these imports: 0.3 s of
    # nothing in the middle of a rollout. What is there now stays to the end, so it need not look at it.
    gc.collect()
    gc.freeze()
    return cfg, engines, trainers, rollout, logs, extra["step"], num_rollout


def resolve_model(cfg: base.Config, run_dir: pathlib.Path) -> str:
    """hf_checkpoint -> a local folder: as it is, from the hub, written by a function, or the result of another run file."""
    source = cfg.hf_checkpoint
    if callable(source):
        folder = run_dir / "initial_model"
        if not (folder / "config.json").exists():
            part = folder.with_name(folder.name + ".part")       # never half a model under the final name
            shutil.rmtree(part, ignore_errors=True)
            import torch
            torch.manual_seed(cfg.seed)      # a random model is the run's own
            source(str(part))
            part.rename(folder)
        return str(folder)
    if base.has_stage(cfg):
        stage_dir = run_dir / f"stage_{pathlib.Path(source).stem}"
        if not (stage_dir / "done").exists():
            print(f"stage 1 of 2: {source}, in {stage_dir}", flush=True)
            if not launch(stage_config(cfg, stage_dir), stage_dir):
                sys.exit(f"stopped in the first stage; go on with the same command and --resume={run_dir}")
            (stage_dir / "done").touch()
            print("stage 2 of 2: this run, from the model that stage 1 made", flush=True)
        return str(max((stage_dir / "hf").glob("iter_*")))
    with reading_input():
        return str(convert.HFReader(source).folder)


@contextlib.contextmanager
def reading_input():
    """A ValueError in here is about what the user gave: main() prints its one line, which says how to mend it."""
    try:
        yield
    except ValueError as error:
        raise base.InputError(str(error)) from error


def stage_config(cfg: base.Config, stage_dir: pathlib.Path | None = None) -> base.Config:
    """The run file that goes first: its own settings, but our seeds and our machine."""
    inherited = {key: getattr(cfg, key) for key in ("seed", "rollout_seed", "device", "deterministic", "on_invariant")}
    inherited |= {"save_hf": True} | ({"ray_address": cfg.ray_address} if cfg.ray_address else {})
    if stage_dir and latest_checkpoint(stage_dir):
        inherited["resume"] = str(stage_dir)                     # it was stopped half-way
    return base.load(cfg.hf_checkpoint, [f"--{key}={value}" for key, value in inherited.items()])


def stop_on_signal(stack: contextlib.ExitStack) -> threading.Event:
    """SIGTERM or Ctrl-C: the step is finished and saved, then the run ends. A second one ends it at once."""
    stop = threading.Event()

    def handle(*_):
        if stop.is_set():
            sys.exit("stopped by a second signal; the last checkpoint, if there is one yet, is good")
        stop.set()
        os.write(1, b"stopping after this step; once more to stop now\n")       # print() may be what was interrupted
    if threading.current_thread() is threading.main_thread():
        for kind in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, kind, signal.signal(kind, handle))     # back to the old one when this run ends
    return stop


# ---- Checkpoints -----------------------------------------------------------------------------------------------------
def save(cfg: base.Config, run_dir: pathlib.Path, step: int, trainers, data_state: dict) -> None:
    """checkpoints/iter_<step>: weights, optimizer, RNG, data position, waiting groups; then the marker; then old ones go."""
    folder = run_dir / "checkpoints" / f"iter_{step:07d}"
    trainers.save(folder, {"step": step, "data": data_state}, run_dir / "hf" / folder.name if cfg.save_hf else None)
    marker = folder.parent / "latest_checkpointed_iteration.txt"
    marker.with_suffix(".part").write_text(str(step))
    os.replace(marker.with_suffix(".part"), marker)
    for parent in [run_dir / name for name in ("checkpoints", "hf", "checkpoints/critic", "hf/critic")]:
        for old in sorted(parent.glob("iter_*[0-9]"))[:-cfg.keep_checkpoints]:
            shutil.rmtree(old)


def latest_checkpoint(run_dir: pathlib.Path) -> pathlib.Path | None:
    marker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return run_dir / "checkpoints" / f"iter_{int(marker.read_text()):07d}" if marker.exists() else None


# ---- Command line ------------------------------------------------------------------------------------------------------
def check(cfg: base.Config) -> None:
    """What only other files know. All of it before anything is started."""
    algos.check(cfg)
    for one in (cfg, base.critic_config(cfg)):
        if one.megatron:
            import layers                    # and with it Megatron, as validate() has
            layers.check(one)
    for name in [cfg.rm_type] + [base.eval_config(cfg, n).rm_type for n in cfg.eval_prompt_data]:
        if name:
            rewards.check_rm_type(name)
    if base.has_stage(cfg):
        check(stage_config(cfg))
    sources = [cfg.hf_checkpoint if not base.has_stage(cfg) else None, cfg.ref_load, cfg.opd_teacher_load,
               cfg.critic.get("hf_checkpoint")]
    for source in sources:                   # a hub's name has one slash
        is_path = isinstance(source, str) and (source.startswith(("/", ".", "~")) or source.count("/") > 1)
        if is_path and not pathlib.Path(source).expanduser().is_dir():
            raise ValueError(f"model folder {source} not found; give a folder with config.json, or a hub name")
    if cfg.use_kl_loss and cfg.kl_loss_type == "k1" and not cfg.use_unbiased_kl:
        print("warning: as a loss, kl_loss_type='k1' has a gradient of mean zero on policy: it restrains nothing; use k2")


def check_data(cfg: base.Config) -> None:
    """ValueError for a data file that is not there, of the last stage too, before the first one takes its minutes."""
    for one in (cfg, *(base.eval_config(cfg, name) for name in cfg.eval_prompt_data)):
        for source in (one.prompt_data, one.sft_data):
            if isinstance(source, str) and source:
                buffer.data_file(source)
    if base.has_stage(cfg) and not cfg.resume:
        check_data(stage_config(cfg))


def check_server(url: str) -> None:
    """ValueError where no SGLang server of somebody else answers."""
    from engines import EngineError, call
    try:
        call("GET", f"{url}/health", None, 30.0)
    except EngineError as error:
        raise ValueError(f"no SGLang server answers at {url!r} (http://host:port); start it first: "
                         "python -m sglang.launch_server --model-path TEACHER --port ...") from error


def find_run_dir(cfg: base.Config, run_file: str) -> pathlib.Path:
    stem, root = pathlib.Path(run_file).stem, pathlib.Path(cfg.output_dir)
    if isinstance(cfg.resume, str):
        folder = pathlib.Path(cfg.resume)
        if not latest_checkpoint(folder) and not any(folder.glob("stage_*")):
            raise ValueError(f"--resume: {folder} holds no checkpoint; name the folder of a run, outputs/...")
    elif cfg.resume:
        runs = sorted(root.glob(f"{cfg.run_name or stem + '-*'}"), key=lambda p: p.stat().st_mtime)
        runs = [run for run in runs if latest_checkpoint(run)]
        if not runs:
            raise ValueError(f"--resume: no run of {run_file} with a checkpoint in {root}; "
                             "name its folder: --resume=outputs/...")
        folder = runs[-1]
    else:
        folder = root / (cfg.run_name or f"{stem}-{datetime.datetime.now():%Y%m%d-%H%M%S}")
        if (folder / "metrics.jsonl").exists():
            raise ValueError(f"{folder} holds a run already; add --resume to go on with it, or set another run_name")
    if cfg.resume and cfg.num_rollout and latest_checkpoint(folder):
        done = int(latest_checkpoint(folder).name.removeprefix("iter_"))
        if done == cfg.num_rollout:
            raise ValueError(f"--resume: {folder} is finished, {done} of {done} steps; --num_rollout={2 * done} goes on")
    return folder.absolute()


def launch(cfg: base.Config, run_dir: pathlib.Path) -> bool:
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / "config.json"
    before = json.loads(file.read_text()) if cfg.resume and file.exists() else {}
    base.save(cfg, file)
    for key, value in json.loads(file.read_text()).items():
        if key != "resume" and key in before and before[key] != value:
            print(f"resumed with another {key}: {before[key]!r} before, {value!r} now", flush=True)
    return train(cfg, run_dir)


def main() -> None:
    args = [a for a in sys.argv[1:] if a not in ("--dry-run", "--dry_run")]
    if not args or args[0].startswith("-"):
        sys.exit(__doc__)
    try:
        cfg = base.load(args[0], args[1:])
        check(cfg)
        if len(args) < len(sys.argv) - 1:
            print(base.describe(cfg), plan.dry_run(cfg, memory.share_memory), sep="\n")
            check_data(cfg)                  # last: without the data the rest is worth knowing too
            return
        check_data(cfg)
        run_dir = find_run_dir(cfg, args[0])
    except ValueError as error:
        sys.exit(f"error: {error}")          # the message is the remedy; a traceback would hide it
    print(f"run folder: {run_dir}", flush=True)
    try:
        launch(cfg, run_dir)
    except base.InputError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":                   # spawned processes import this file again
    main()
