"""One running Triton server, from the deployment file to the last byte of shared memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from launcher import log
from launcher.admin import Admin
from launcher.command import Launch, call_threads, stub_environment
from launcher.deployment import PUBLIC, alias_names, load_deployment, python_models, write_aliases
from launcher.health import HealthServer
from launcher.probe import Probe, with_kernels
from launcher.settings import LauncherSettings, Ports, free_ports, reachable
from launcher.triton import find_triton
from launcher.triton_process import TritonProcess
from launcher.watchdog import ProcessWatchdog, reload_limit_s
from launcher.workfolder import WorkFolder
from orchestrator.core.deployment.config import ServingConfig
from orchestrator.core.deployment.drain_state import Drain, DrainAsker, finish_requests
from orchestrator.core.deployment.stubs import living_stubs
from orchestrator.core.errors import ServingError, abbreviated

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
DEFAULTS = LauncherSettings()
# How long Triton may take to end. It waits while any client keeps a connection open, even an idle one.
_EXIT_LIMIT_S = 5


class Server:
    """A Triton server that runs a deployment, as a context manager.

    Start it from a thread that outlives it: the kernel ends the server when that thread ends. `launcher.watchdog`
    repairs it while it serves.

    Args:
        config_path: the deployment file.
        repository: Triton's model repository; the project's own unless given.
        ports, host: where to listen; free ports unless given.
        env: added to the process environment, which it overrides (`SERVING_<KEY>` included).
        ready_limit_s: how long loading may take.
        hang_limit_s: how long the server may generate no token, though asked for one, until it is started again.
        stop_limit_s: how long `finish_requests` waits; Triton then has as long to end, but at most 5 s.
        log_level: error, warning, info or verbose.
        say: called with each line that the launcher itself prints.
        pass_on: called with each line of Triton's log, which has its own time.
    """

    def __init__(
        self,
        config_path: str | os.PathLike[str],
        *,
        repository: str | os.PathLike[str] | None = None,
        ports: Ports | None = None,
        host: str = DEFAULTS.host,
        env: Mapping[str, str] | None = None,
        ready_limit_s: float = DEFAULTS.ready_limit_s,
        hang_limit_s: float = DEFAULTS.hang_limit_s,
        stop_limit_s: int = DEFAULTS.stop_limit_s,
        log_level: str = DEFAULTS.log_level,
        say: Callable[[str], None] = log.print_event,
        pass_on: Callable[[str], None] = log.print_error,
    ) -> None:
        self.config_path = Path(os.path.abspath(config_path))
        self.repository = Path(repository or REPOSITORY).absolute()
        self.ports, self.host = ports or free_ports(), host
        self.models: list[str] = []
        self.drafters: tuple[str, ...] = ()
        self.started_in_s = 0.0
        self.stop_requested = self._stop_at_once = self._reload_requested = False
        self._environ = {**os.environ, **(env or {})}
        self._ready_limit_s, self._hang_limit_s, self._stop_limit_s = ready_limit_s, hang_limit_s, stop_limit_s
        self._log_level, self._say, self._pass_on = log_level, say, pass_on
        self._config: ServingConfig | None = None
        self._work: WorkFolder | None = None
        self._triton: TritonProcess | None = None
        self._watchdog: ProcessWatchdog | None = None
        self._health: HealthServer | None = None
        self._reloading = threading.Lock()
        self._key = secrets.token_hex(16)
        self._admin = Admin(reachable(host), self.ports.http, self._key)
        self.http_url, self.grpc_url, self.metrics_url, self.health_url = self.ports.urls(host)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until all its models are ready.

        Raises:
            ConfigError: the deployment, the ports or the installation are wrong.
            StartError: the server ended, or was not ready in time.
        """
        began_s = time.monotonic()
        config, models = self._load()
        self.ports.check_free(self.host)
        self._work = work = WorkFolder()
        public = [name for name in PUBLIC if name in models]
        probe = Probe(self.http_url, self.metrics_url, public, self._hang_limit_s / 2)
        try:
            self._health = HealthServer(self.host, self.ports.health, self, self.drain, probe)
            self._triton = triton = TritonProcess(
                find_triton(self._environ, work.path),
                work,
                self._admin,
                ready_limit_s=self._ready_limit_s,
                say=self._say,
                is_stopped=lambda: self.stop_requested,
            )
            self._warn_of_wheel(triton)
            in_python = self._configure(config, models)
            triton.start()
        except BaseException:
            self.stop(keeps_log=not self.stop_requested)
            raise
        self.started_in_s = time.monotonic() - began_s
        self._watchdog = ProcessWatchdog(
            triton,
            in_python,
            self._admin,
            probe,
            Drain(work.state, DrainAsker.RESTART),
            say=self._say,
            load_limit_s=reload_limit_s(self.started_in_s, self._ready_limit_s),
            stop_limit_s=self._stop_limit_s,
            probe_period_s=self._hang_limit_s / 2,
        )
        self._watchdog.start()

    def wait(self) -> str | None:
        """Block while the server is well, passing on its log; return what ended it, None if a stop was requested."""
        follower = log.LogFollower(self.log_path)
        while not self.stop_requested:
            if self._reload_requested:
                self._reload_requested = False
                threading.Thread(target=self._reload_and_say, name="reload", daemon=True).start()
            with contextlib.suppress(OSError):  # out of file descriptors or disk space: requests still run, read later
                for line in follower.new_text().splitlines():
                    self._pass_on(line)
            if failure := self.failure():
                return failure
            time.sleep(0.1)
        return None

    def failure(self) -> str | None:
        """Return in one line what is wrong with the running server, None if nothing is."""
        if self._watchdog:
            return self._watchdog.failure
        return self._triton.why_ended() if self._triton else "the server is not running"

    def why_not_live(self) -> str | None:
        """Return in one line why the server must be restarted, if so; while its models load, only if it has ended."""
        return self._watchdog.why_not_live() if self._watchdog else self.failure()

    def why_not_ready(self) -> str | None:
        """Return in one line why the server takes no requests now, None if it takes them."""
        if self._watchdog is None:
            return "the server's models are being loaded"
        if why := self._watchdog.why_not_ready():
            return why
        if self.drain.is_requested:
            return "the server is draining"
        return None if self._admin.is_ready() else "Triton does not say that it is ready"

    @property
    def drain(self) -> Drain:
        """The drain of the running server; it ends when the server is stopped."""
        return Drain(self._started.state)

    def finish_requests(self) -> bool:
        """Refuse new requests and wait for the running ones; return False if some still run at the limit.

        Without this, Triton would cut the running gRPC streams when it is told to stop.
        """
        return finish_requests(self.drain, self._stop_limit_s, lambda: self._stop_at_once, self._say)

    def reload(self) -> str:
        """Drain the server and restart it with the deployment file as it is now; return in words what has changed.

        Raises ConfigError if the file cannot be served; then nothing has changed. Raises ServingError if models cannot
        be loaded, one reload is under way, or the server still starts; in the first case `failure` says why it ends.
        """
        try:
            if self._watchdog is None or self._config is None:
                raise ServingError("the server's models are being loaded")
            if not self._reloading.acquire(blocking=False):
                raise ServingError("another reload is under way")
            try:
                config, models = self._load()
                done = f"reload: {_described(self._config, config)}"
                self._watchdog.restart(lambda: self._configure(config, models))
            finally:
                self._reloading.release()
        except ServingError as error:
            self._say(f"reload refused: {error}")
            raise
        self._say(done)
        return done

    def request_reload(self) -> None:
        """Make `wait` begin a reload soon; for signal handlers."""
        self._reload_requested = True

    def request_stop(self) -> None:
        """Make `start` and `wait` return soon, and `finish_requests` too on a second call; for signal handlers."""
        self._stop_at_once = self.stop_requested
        self.stop_requested = True

    def stop(self, keeps_log: bool = False) -> None:
        """End the server and remove its processes, shared memory and files, in bounded time; may be called twice.

        keeps_log: keep the log for a day, unless it is empty.
        """
        if self._health:
            self._health.close()
        for part in (self._watchdog, self._triton):
            if part:
                part.end()
        self._health = self._watchdog = self._triton = None
        if self._work and keeps_log and self.log():
            self._say(f"the server's log: {self._work.keep_log()}")
        elif self._work:
            self._work.remove()
        self._work = None

    def log(self) -> str:
        """Return what the server and its models have written."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def log_path(self) -> Path:
        """The server's log; it is removed with the server, except after a failed start."""
        return self._started.log

    def pids(self) -> dict[int, str]:
        """Return {process id: model name, or "tritonserver"} of the server's living processes."""
        if self._triton is None or (server := self._triton.pid) is None:
            return {}
        return {server: "tritonserver", **{stub.pid: model for stub, model in living_stubs(server).items()}}

    def shared_memory(self) -> dict[str, int]:
        """Return the server's shared-memory regions and their sizes in bytes."""
        return self._work.regions() if self._work else {}

    def ready_line(self) -> str:
        """Return one line that says where the server listens and what computes its models."""
        models = with_kernels(dict.fromkeys((*self.models, *self.drafters)), self.metrics_url)
        return (
            f"ready in {self.started_in_s:.1f} s: {self.http_url}, gRPC {self.grpc_url}, metrics {self.metrics_url}, "
            f"health {self.health_url}; models {', '.join(models)}"
        )

    @property
    def _started(self) -> WorkFolder:
        if self._work is None:
            raise ServingError("the server has not been started")
        return self._work

    def _load(self) -> tuple[ServingConfig, list[str]]:
        """Return the deployment as its file is now, and its Triton models; raises ConfigError."""
        config, models = load_deployment(self.config_path, self._environ, self.repository)
        return config, models + alias_names(config.aliases, models)

    def _configure(self, config: ServingConfig, models: list[str]) -> list[str]:
        """Set what Triton is started with; return the models that have a process."""
        work, triton = self._started, self._triton
        assert triton is not None
        self._config, self.drafters, self.models = config, config.drafters, models
        write_aliases(work.aliases, self.repository, alias_names(config.aliases, ()))
        launch = Launch(
            repositories=tuple(path for path in (self.repository, work.aliases) if path.exists()),
            models=tuple(models),
            host=self.host,
            ports=self.ports,
            key=self._key,
            region_prefix=work.region_prefix,
            exit_limit_s=min(self._stop_limit_s, _EXIT_LIMIT_S),
            log_level=self._log_level,
            uses_gpu=config.device != "cpu",
            call_threads=call_threads(self._environ, config.max_running),
        )
        triton.configure(launch, stub_environment(self._environ, self.config_path, work.state, launch))
        return python_models(models, launch.repositories)

    def _warn_of_wheel(self, triton: TritonProcess) -> None:
        if triton.is_from_wheel and self.host not in ("127.0.0.1", "::1", "localhost"):
            self._say(
                f"warning: listening on {self.host}; the wheel's Triton 2.51 is not safe on networks you do not trust"
            )

    def _reload_and_say(self) -> None:
        with contextlib.suppress(ServingError):  # `reload` has reported it
            self.reload()


def _described(before: ServingConfig, after: ServingConfig) -> str:
    """Return in words what has changed; the files that a key names may have changed, too."""
    pairs = {key: (getattr(before, key), getattr(after, key)) for key in ServingConfig.model_fields}
    words = [f"{key} {abbreviated(old)} -> {abbreviated(new)}" for key, (old, new) in pairs.items() if old != new]
    return ", ".join(words) or "no key has changed"
