"""The paced program with the heartbeats of NVRx, after each step, as its guide says."""

from __future__ import annotations

import contextlib

import paced  # type: ignore[import-not-found]
from nvidia_resiliency_ext.fault_tolerance import (  # type: ignore[import-not-found]
    RankMonitorClient,
)
from nvidia_resiliency_ext.fault_tolerance.rank_monitor_client import (  # type: ignore[import-not-found]
    RankMonitorClientError,
)

monitor = RankMonitorClient()
without_heartbeat = paced.train_step


def train_step(*arguments: object) -> None:
    without_heartbeat(*arguments)
    # Slurm's SIGTERM ends the monitor before the rank has saved: the guide's own program would fail here.
    with contextlib.suppress(RankMonitorClientError):
        monitor.send_heartbeat()


if __name__ == "__main__":
    paced.train_step = train_step
    monitor.init_workload_monitoring()
    paced.main()
    with contextlib.suppress(RankMonitorClientError):
        monitor.shutdown_workload_monitoring()
