"""Power boost as a training process sees it: start, observe, close, and never a failure of its own.

One process per node has a session. It talks to a keeper, which is another process and makes every
NVML call; all talking is done by a thread, so the training thread does no more than put a step's
timings into a queue. `boost` trains on, with one warning, whatever goes wrong; `require` stops
before training where limits cannot be set.

If the training process dies in any way, the keeper sees it and restores the limits.
"""

from __future__ import annotations

import logging
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from megatron_ntp.device.budget import DomainShape, to_mw
from megatron_ntp.device.client import KeeperClient, KeeperOptions
from megatron_ntp.device.controller import BoostState, Controller, ControlSettings, Observation
from megatron_ntp.device.errors import DeviceError, Fault, PowerRequiredError
from megatron_ntp.device.model import ModelFile, PowerCurve, reduction_gap
from megatron_ntp.device.protocol import OpenReply, OpenRequest
from megatron_ntp.device.serve import DEFAULT_SOCKET
from megatron_ntp.device.settings import PowerSettings
from megatron_ntp.device.site import SitePower, load_site

log = logging.getLogger("megatron_ntp.power")

WATCH_EVERY_S = 2.0
CLOSE_TIMEOUT_S = 30.0
MAX_QUEUE = 1024


@dataclass(frozen=True)
class PowerStatus:
    """Where the boost is. `gap` is the share of a step that power will not win back."""

    state: BoostState
    gap: float
    nominal_mw: int = 0
    ceiling_mw: int = 0
    limit_mw: int = 0
    bound_by: str = ""
    measured_gap: float | None = None
    message: str = ""
    fault: Fault | None = None


class PowerSession:
    """One node's power during one attempt of a job."""

    def __init__(
        self,
        settings: PowerSettings,
        job_id: str = "",
        options: KeeperOptions | None = None,
        control: ControlSettings | None = None,
    ) -> None:
        self.settings = settings
        self._site = SitePower()
        self._job_id = job_id or f"pid-{os.getpid()}"
        self._options = _keeper_options(settings, options or KeeperOptions())
        self._control = replace(
            control or ControlSettings(), target_gap=settings.ntp_power_target_gap
        )
        self._status = PowerStatus(BoostState.OFF, 0.0)
        self._client: KeeperClient | None = None
        self._controller: Controller | None = None
        self._board = ""
        self._warned: set[object] = set()
        self._tells = True
        self._request: OpenRequest | None = None
        self._queue: deque[Observation] = deque(maxlen=MAX_QUEUE)
        self._wake, self._stop, self._idle = (threading.Event() for _ in range(3))
        self._thread: threading.Thread | None = None

    @classmethod
    def from_settings(
        cls, settings: PowerSettings, job_id: str = "", control: ControlSettings | None = None
    ) -> PowerSession:
        """A session that has not started. A site file that cannot be read is an error here."""
        session = cls(settings, job_id, control=control)
        if settings.is_on and settings.ntp_power_site is not None:
            session._site = load_site(Path(settings.ntp_power_site))
        return session

    @property
    def site(self) -> SitePower:
        """What the site states, as far as this process may read it (a helper has its own file)."""
        return self._site

    @property
    def may_use_helper(self) -> bool:
        """Whether the node's helper may come to set limits; it wants to know dead GPUs by name."""
        settings = self.settings
        named = settings.ntp_power_socket is not None or settings.ntp_power_command is not None
        return named or DEFAULT_SOCKET.exists()

    def rack_of(self, host: str) -> str:
        """The rack of a host, for DomainShape.rack; "" where the site does not tell racks apart."""
        return self._site.rack.name_of(host)

    # ---- what the training process calls ----

    def start(
        self,
        gpu_uuids: Sequence[str],
        domain: DomainShape,
        domains: Sequence[DomainShape] = (),
        dead_uuids: Sequence[str] = (),
        expected_gap: float | None = None,
        say: bool = True,
    ) -> PowerStatus:
        """Brings this node's GPUs to the nominal limit and, in a reduced domain, starts to boost.

        Called once, before the first step, by one process per node. `gpu_uuids` are the GPUs of the
        node that train, `domain` is the scale-up domain they belong to (it may span nodes),
        `domains` are those of the job that may share its rack. `expected_gap` is the share of a
        step that the others would wait for this replica without power; default: as GPUs are
        missing. At 0 limits are held at nominal. `say=False` leaves it to the caller to tell what
        is returned, and `status` later; only what goes wrong under way is still said here. Returns
        what happened; `state` OFF with a message is a failure that training need not care about.
        """
        if not self.settings.is_on:
            return self._status
        self._tells, gap = say, expected_gap
        if gap is None:
            gap = reduction_gap(domain.num_gpus, domain.num_alive)
        self._status = PowerStatus(BoostState.OFF, gap)
        request = OpenRequest(
            job_id=self._job_id,
            gpu_uuids=tuple(gpu_uuids),
            domain=domain.name,
            domains=tuple(domains) or (domain,),
            dead_uuids=tuple(dead_uuids),
            nominal_mw=_optional_mw(self.settings.ntp_power_nominal),
        )
        try:
            reply = self._open(request)
            self._set(reply.nominal_mw, only_from=reply.found_mw)
        except DeviceError as error:
            self._fail(error)
            return self._status
        self._start_control(reply, gap)
        return self._status

    def observe(self, step: int, wait_s: float, step_s: float) -> None:
        """Takes a step's timings; costs the training thread microseconds.

        `wait_s`: how long the healthy replicas waited for this one in gradient sync; negative if it
        waited for them. `step_s`: the whole step.
        """
        if self._thread is not None:
            self._queue.append(Observation(step, wait_s, step_s))
            self._wake.set()

    def remaining_gap(self) -> float:
        """The share of a step that this replica will lag behind, for the batch policy.

        0.0 where it keeps pace, or where nobody has to (a healthy domain, or power off).
        """
        return self._status.gap

    def status(self) -> PowerStatus:
        return self._status

    def is_busy(self) -> bool:
        """Whether steps that were handed in are still being worked on."""
        return self._thread is not None and (bool(self._queue) or not self._idle.is_set())

    def close(self) -> None:
        """Restores the limits and ends. It may be called twice, and need not be called at all."""
        self._stop.set()
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)
            if thread.is_alive():
                self._warn("close", "power: the keeper hangs; it restores limits when it can")
        if self._client is not None:
            self._client.abandon()
            self._client = None

    def __enter__(self) -> PowerSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- start ----

    def _open(self, request: OpenRequest) -> OpenReply:
        """The first keeper that may set limits: the one asked for, else our own, else a helper."""
        settings = self.settings
        ways: list[Callable[[], KeeperClient]] = []
        if settings.ntp_power_socket is not None:
            socket_path = Path(settings.ntp_power_socket)
            ways.append(lambda: KeeperClient.connect(socket_path))
        elif settings.ntp_power_command is not None:
            command = shlex.split(settings.ntp_power_command)
            ways.append(lambda: KeeperClient.start_command(command))
        else:
            ways.append(lambda: KeeperClient.start(self._options))
            if DEFAULT_SOCKET.exists():
                ways.append(lambda: KeeperClient.connect(DEFAULT_SOCKET))
        for way in ways:
            client = way()
            try:
                reply = client.open(request)
            except DeviceError as error:
                client.abandon()
                if error.fault is not Fault.NO_PERMISSION or way is ways[-1]:
                    raise
            else:
                self._client, self._request, self._board = client, request, reply.board
                return reply
        raise AssertionError("the last way either answers or raises")

    def _start_control(self, reply: OpenReply, gap: float) -> None:
        curve = self._load_curve()
        state = BoostState.RAISING if reply.has_headroom else BoostState.NO_HEADROOM
        self._status = PowerStatus(
            state=state if gap > 0 else BoostState.HOLDING,
            gap=curve.gap_at(gap, reply.nominal_mw, reply.ceiling_mw) if gap > 0 else 0.0,
            nominal_mw=reply.nominal_mw,
            ceiling_mw=reply.ceiling_mw,
            limit_mw=reply.nominal_mw,
            bound_by=reply.bound_by,
        )
        for line in reply.settled:
            log.info("power: limits of an earlier job: %s", line)
        if self._tells:
            self._say_what_to_expect(reply, gap)
        if gap > 0:
            self._controller = Controller(
                reply.nominal_mw, reply.ceiling_mw, gap, curve, self._control
            )
        self._thread = threading.Thread(target=self._run, name="ntp-power", daemon=True)
        self._thread.start()

    def _say_what_to_expect(self, reply: OpenReply, gap: float) -> None:
        nominal_w, ceiling_w = reply.nominal_mw / 1000, reply.ceiling_mw / 1000
        if gap <= 0:
            log.info("power: healthy domain at its nominal limit of %g W", nominal_w)
        elif reply.has_headroom:
            log.info(
                "power: gap of %.1f %% to close; nominal %g W, ceiling %g W by %s, %.1f %% of the "
                "gap expected to stay",
                100 * gap,
                nominal_w,
                ceiling_w,
                reply.bound_by,
                100 * self._status.gap,
            )
        else:
            log.warning(
                "power: no headroom: %g W is nominal and, by %s, also the ceiling; the batch "
                "policy has to cover a gap of %.1f %%",
                nominal_w,
                reply.bound_by,
                100 * gap,
            )

    def _load_curve(self) -> PowerCurve:
        if self.settings.ntp_power_model is None:
            return PowerCurve()
        try:
            return ModelFile.load(Path(self.settings.ntp_power_model)).curve(self._board)
        except (ValueError, DeviceError) as error:
            self._warn("model", f"{error}; assuming the default curve")
            return PowerCurve()

    # ---- the thread ----

    def _run(self) -> None:
        next_watch_s = 0.0
        while not self._stop.is_set():
            self._idle.set()
            self._wake.wait(WATCH_EVERY_S)
            self._idle.clear()
            self._wake.clear()
            if self._controller is None or self._client is None:
                self._queue.clear()
                continue
            try:
                if time.monotonic() >= next_watch_s:
                    next_watch_s = time.monotonic() + WATCH_EVERY_S
                    self._apply(self._controller.watch(self._client.readings()))
                self._control_step(self._controller)
            except DeviceError as error:
                self._stop_boosting(error)
        self._finish()

    def _control_step(self, controller: Controller) -> None:
        while self._queue and not self._stop.is_set():
            controller.observe(self._queue.popleft())
            self._apply(controller.decide())
        self._publish(controller)

    def _apply(self, limit_mw: int | None) -> None:
        if limit_mw is not None and self._controller is not None:
            self._controller.applied(self._set(limit_mw))
            self._queue.clear()  # steps that ended meanwhile ran under the old limit

    def _publish(self, controller: Controller) -> None:
        before = self._status
        self._status = replace(
            before,
            state=controller.state,
            gap=controller.remaining_gap(),
            ceiling_mw=controller.ceiling_mw,
            limit_mw=controller.limit_mw,
            measured_gap=controller.measured_gap,
        )
        if self._tells and controller.state is not before.state:
            log.info(
                "power: %s at %g W of %g W, gap %.1f %%",
                controller.state.value,
                controller.limit_mw / 1000,
                controller.ceiling_mw / 1000,
                100 * (controller.measured_gap or 0.0),
            )

    def _set(self, limit_mw: int, only_from: Mapping[str, int] | None = None) -> int:
        """Sets all GPUs to one limit; returns the lowest one obeyed, or raises the first fault."""
        assert self._client is not None and self._request is not None
        found, uuids = only_from or {}, self._request.gpu_uuids
        wanted = {uuid: limit_mw for uuid in uuids if found.get(uuid) != limit_mw}
        if not wanted:
            return limit_mw
        results = self._client.set_limits(wanted)
        for uuid, result in results.items():
            if result.fault is not None:
                raise DeviceError(result.fault, result.message, uuid)
        return min(result.limits.enforced_mw for result in results.values() if result.limits)

    def _stop_boosting(self, error: DeviceError) -> None:
        """After a failure under way: back to nominal as far as that works, and no more control.

        A keeper that died left the limits as they were: a new one settles that when it opens.
        """
        controller, self._controller = self._controller, None
        assert controller is not None
        self._warn(error.fault, f"power: boost ends, training goes on: {error}")
        gap = max(0.0, controller.measured_gap or controller.expected_gap)
        self._status = replace(
            self._status, state=BoostState.OFF, gap=gap, message=str(error), fault=error.fault
        )
        self._learn(controller)
        try:
            if (
                error.fault is Fault.FAILED
                and self._client is not None
                and self._request is not None
            ):
                self._client.abandon()
                self._open(self._request)
            self._set(controller.nominal_mw)
        except DeviceError as second:
            log.info("power: not all GPUs are back at nominal: %s", second)

    def _finish(self) -> None:
        if self._controller is not None:
            self._learn(self._controller)
        if self._client is None:
            return
        try:
            settled = self._client.close()
        except DeviceError as error:
            self._warn("close", f"power: the keeper restores limits by itself: {error}")
            return
        for entry in settled:
            if not entry.is_over:
                self._warn(
                    entry.uuid,
                    f"power: {entry.uuid}: {entry.outcome.value} ({entry.detail}); run "
                    "`megatron-ntp power restore` on this node",
                )

    def _learn(self, controller: Controller) -> None:
        if self.settings.ntp_power_model is None or not controller.samples():
            return
        try:
            model = ModelFile.load(Path(self.settings.ntp_power_model))
            model.learn(self._board, controller.samples())
            model.save()
        except (ValueError, OSError, DeviceError) as error:
            self._warn("model", f"power: what was measured cannot be saved: {error}")

    # ---- failures ----

    def _fail(self, error: DeviceError) -> None:
        if self._client is not None:
            self._client.abandon()
            self._client = None
        if self.settings.ntp_power == "require":
            raise PowerRequiredError(f"--ntp-power require: {error}") from error
        self._status = replace(self._status, message=str(error), fault=error.fault)
        if self._tells:
            self._warn(error.fault, f"power: no boost, training goes on: {error}")

    def _warn(self, key: object, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", text)


def _keeper_options(settings: PowerSettings, base: KeeperOptions) -> KeeperOptions:
    site, state_dir = settings.ntp_power_site, settings.ntp_power_state_dir
    return replace(
        base,
        site=base.site if site is None else Path(site),
        state_dir=base.state_dir if state_dir is None else Path(state_dir),
        deadline_s=settings.ntp_power_deadline,
    )


def _optional_mw(watts: float | None) -> int | None:
    return None if watts is None else to_mw(watts)
