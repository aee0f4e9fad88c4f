"""Budgets: what a site states, and what that leaves for each survivor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ntp.device.budget import BoardPower, DomainBudget, DomainShape, plan_budgets
from megatron_ntp.device.errors import DeviceError, Fault
from megatron_ntp.device.nvml import PowerScope
from megatron_ntp.device.site import SitePower, load_site, parse_site

BOARD = BoardPower(200_000, 700_000)
CONFIGS = sorted((Path(__file__).parents[2] / "configs/power").glob("*.yaml"))


def one(
    site: Mapping[str, object], alive: int, nominal_w: int = 500, gpus: int = 8
) -> DomainBudget:
    shape = DomainShape("r0", gpus, alive)
    return plan_budgets(parse_site(site, "test"), BOARD, [shape], nominal_w * 1000)["r0"]


@pytest.mark.parametrize(
    ("site", "alive", "ceiling_w", "bound_by"),
    [
        ({}, 8, 500, "no dead GPU"),
        ({}, 7, 571, "domain budget"),  # 8/7 of nominal, in whole watts
        ({}, 6, 666, "domain budget"),
        ({}, 5, 700, "board maximum"),
        ({"gpu": {"max_w": 550}}, 7, 550, "site maximum"),
        ({"gpu": {"dead_w": 100}}, 7, 557, "domain budget"),
        ({"domain": {"num_gpus": 8, "budget_w": 4200}}, 7, 600, "domain budget"),
        ({"domain": {"num_gpus": 8, "budget_w": 5600}}, 7, 700, "board maximum"),
    ],
)
def test_ceiling_rule(site: dict[str, object], alive: int, ceiling_w: int, bound_by: str) -> None:
    budget = one(site, alive)
    assert (budget.ceiling_mw, budget.bound_by) == (ceiling_w * 1000, bound_by)
    assert budget.has_headroom == (ceiling_w > 500)


def test_no_headroom_where_nominal_is_the_boards_maximum() -> None:
    budget = one({}, 7, nominal_w=700)
    assert not budget.has_headroom and budget.bound_by == "board maximum"


def test_a_job_with_part_of_a_domain_gets_its_share() -> None:
    site = {"domain": {"num_gpus": 8, "budget_w": 4800}}
    budget = one(site, alive=3, gpus=4)
    assert budget.budget_mw == 2_400_000 and budget.ceiling_mw == 700_000
    assert one(site, alive=4, gpus=5).bound_by == "board maximum"


def test_rack_budget_is_shared_by_reduced_domains() -> None:
    site = parse_site(
        {
            "domain": {"num_gpus": 8, "budget_w": 5600},
            "rack": {"num_domains": 4, "budget_w": 16_000},
        },
        "test",
    )
    shapes = [DomainShape("a", 8, 7), DomainShape("b", 8, 7), DomainShape("c", 8, 8)]
    budgets = plan_budgets(site, BOARD, shapes, 500_000)
    # The rack has 32 x 500 = 16 000 W; two dead GPUs free 1000 W for 14 survivors.
    assert budgets["a"].ceiling_mw == budgets["b"].ceiling_mw == 571_000
    assert budgets["a"].bound_by == "rack budget"
    assert budgets["c"].ceiling_mw == 500_000 and budgets["c"].bound_by == "no dead GPU"
    alone = plan_budgets(site, BOARD, shapes[:1], 500_000)["a"]
    assert alone.ceiling_mw == 571_000 and alone.bound_by == "rack budget"


def test_domains_in_different_racks_do_not_share() -> None:
    site = parse_site(
        {
            "domain": {"num_gpus": 8, "budget_w": 5600},
            "rack": {"num_domains": 1, "budget_w": 4400, "host_pattern": "(r[0-9]+)-.*"},
        },
        "test",
    )
    racks = [site.rack.name_of(host) for host in ("r1-n1", "r2-n1")]
    assert racks == ["r1", "r2"] and site.rack.name_of("elsewhere") == ""
    shapes = [DomainShape(rack, 8, 7, rack) for rack in racks]
    for budget in plan_budgets(site, BOARD, shapes, 500_000).values():
        assert budget.ceiling_mw == 628_000 and budget.bound_by == "rack budget"


@pytest.mark.parametrize(
    ("site", "nominal_w", "message"),
    [
        ({}, 100, "200 W to 700 W"),
        ({}, 701, "200 W to 700 W"),
        ({"gpu": {"max_w": 600}}, 650, "200 W to 600 W"),
        ({"domain": {"num_gpus": 8, "budget_w": 4000}}, 501, "exceed its budget of 4000 W"),
        ({"domain": {"num_gpus": 4}}, 500, "the site's domains have 4"),
        (
            {"domain": {"num_gpus": 8}, "rack": {"num_domains": 2, "budget_w": 7900}},
            500,
            "100 W over its budget of 7900 W",
        ),
    ],
)
def test_what_cannot_hold_is_refused(site: dict[str, object], nominal_w: int, message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        one(site, 8, nominal_w)
    assert caught.value.fault is Fault.OUT_OF_RANGE


@given(
    nominal_w=st.integers(200, 700),
    dead_w=st.integers(0, 150),
    extra_w=st.integers(0, 3000),
    rack_extra_w=st.integers(0, 3000),
    alive=st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_no_budget_is_ever_exceeded(
    nominal_w: int, dead_w: int, extra_w: int, rack_extra_w: int, alive: list[int]
) -> None:
    site = parse_site(
        {
            "gpu": {"dead_w": dead_w},
            "domain": {"num_gpus": 8, "budget_w": 8 * nominal_w + extra_w},
            "rack": {"num_domains": 4, "budget_w": 32 * nominal_w + rack_extra_w},
        },
        "test",
    )
    shapes = [DomainShape(f"r{index}", 8, count) for index, count in enumerate(alive)]
    budgets = plan_budgets(site, BOARD, shapes, nominal_w * 1000)
    dead_mw = dead_w * 1000
    used_mw = (4 - len(shapes)) * 8 * nominal_w * 1000
    for shape in shapes:
        budget = budgets[shape.name]
        assert nominal_w * 1000 <= budget.ceiling_mw <= BOARD.max_mw
        assert budget.ceiling_mw % 1000 == 0
        domain_mw = shape.num_alive * budget.ceiling_mw + shape.num_dead * dead_mw
        assert domain_mw <= (8 * nominal_w + extra_w) * 1000
        used_mw += domain_mw
    assert used_mw <= (32 * nominal_w + rack_extra_w) * 1000


# ---- site files ----


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_site_file_loads_and_leaves_headroom(path: Path) -> None:
    site = load_site(path)
    assert site.scope is PowerScope.GPU
    gpus = site.domain.num_gpus
    assert gpus and site.gpu.nominal_w and site.gpu.max_w
    shape = DomainShape("r0", gpus, gpus - 1)
    board = BoardPower(200_000, int(site.gpu.max_w * 1000))
    budget = plan_budgets(site, board, [shape], int(site.gpu.nominal_w * 1000))["r0"]
    assert budget.has_headroom


def test_site_files_are_shipped() -> None:
    assert [path.name for path in CONFIGS] == ["node8.yaml", "rack72.yaml"]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "must map"),
        ({"gpus": {}}, "unknown gpus; known are gpu, domain, rack, scope"),
        ({"gpu": {"nominal": 500}}, "unknown nominal"),
        ({"gpu": {"nominal_w": "500"}}, "gpu.nominal_w is '500'"),
        ({"gpu": {"max_w": -1}}, "number of watts"),
        ({"gpu": {"max_w": True}}, "number of watts"),
        ({"domain": {"num_gpus": 0}}, "count of at least 1"),
        ({"domain": {"num_gpus": 7.5}}, "count of at least 1"),
        ({"gpu": {"nominal_w": 600, "max_w": 500}}, "above gpu.max_w"),
        ({"gpu": {"min_w": 600, "max_w": 500}}, "above gpu.max_w"),
        ({"gpu": {"nominal_w": 500, "dead_w": 600}}, "dead_w 600 is above"),
        ({"domain": {"budget_w": 5000}}, "needs domain.num_gpus"),
        ({"rack": {"budget_w": 5000}}, "needs rack.num_domains"),
        ({"rack": {"host_pattern": "r[0-9"}}, "no regular expression"),
        ({"rack": {"host_pattern": "r[0-9]"}}, "needs a group"),
        ({"scope": "board"}, "'gpu' or 'module'"),
        (
            {"gpu": {"nominal_w": 500}, "domain": {"num_gpus": 8, "budget_w": 3999}},
            "healthy domain would be over budget",
        ),
        (
            {
                "gpu": {"nominal_w": 500},
                "domain": {"num_gpus": 8},
                "rack": {"num_domains": 2, "budget_w": 7999},
            },
            "healthy rack would be over budget",
        ),
    ],
)
def test_contradictions_in_a_site_file(found: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_site(found, "site.yaml")


def test_unreadable_site_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_site(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("gpu: {nominal_w: 500")
    with pytest.raises(ValueError, match="cannot be read"):
        load_site(broken)


def test_empty_site_is_everything_from_nvml() -> None:
    assert parse_site({}, "test") == SitePower()
