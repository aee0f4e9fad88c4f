"""What several device tests build: keepers, requests and site files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_ntp.device.budget import DomainShape
from megatron_ntp.device.grants import Access, OwnRights
from megatron_ntp.device.keeper import Keeper
from megatron_ntp.device.nvml import DeviceLayer
from megatron_ntp.device.protocol import OpenRequest
from megatron_ntp.device.site import SitePower, parse_site
from megatron_ntp.device.state import LimitStore

# 500 W found and nominal, 700 W boards, and a feed that carries 8 boards at 700 W.
ROOMY: dict[str, object] = {
    "gpu": {"nominal_w": 500, "max_w": 700},
    "domain": {"num_gpus": 8, "budget_w": 5600},
}


def roomy_site() -> SitePower:
    return parse_site(ROOMY, "roomy")


def site_file(folder: Path, text: str = "") -> Path:
    path = folder / "site.yaml"
    path.write_text(
        text or "gpu: {nominal_w: 500, max_w: 700}\ndomain: {num_gpus: 8, budget_w: 5600}\n"
    )
    path.chmod(0o644)
    return path


def make_keeper(
    layer: DeviceLayer,
    store: LimitStore,
    site: SitePower | None = None,
    access: Access | None = None,
) -> Keeper:
    return Keeper(layer, store, site or SitePower(), access or OwnRights(), claim_timeout_s=0)


def request(
    uuids: Sequence[str],
    num_gpus: int = 8,
    nominal_w: float | None = None,
    job_id: str = "job-1",
    dead: Sequence[str] = (),
) -> OpenRequest:
    shape = DomainShape("r0", num_gpus, len(uuids))
    return OpenRequest(
        job_id=job_id,
        gpu_uuids=tuple(uuids),
        domain="r0",
        domains=(shape,),
        dead_uuids=tuple(dead),
        nominal_mw=None if nominal_w is None else int(nominal_w * 1000),
    )


def all_to(uuids: Sequence[str], watts: float) -> dict[str, int]:
    return {uuid: int(watts * 1000) for uuid in uuids}
