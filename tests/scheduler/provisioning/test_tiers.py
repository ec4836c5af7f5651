"""The table of tiers, and the tier of a target."""

from __future__ import annotations

import math

import pytest

from scheduler.provisioning.tiers import Tier, require_room, tier_for, tiers_in

TABLE = """
[[tier]]
name = "batch"
tpot_slo_s = 0.2

[[tier]]
name = "chat"
tpot_slo_s = 0.05
min_instances = 1
max_instances = 4
"""


def test_a_table_is_read_with_the_strictest_tier_first() -> None:
    """Bounds of the number of instances are optional."""
    chat, batch = tiers_in(TABLE, "tiers.toml")
    assert chat == Tier(name="chat", tpot_slo_s=0.05, min_instances=1, max_instances=4)
    assert (batch.name, batch.min_instances) == ("batch", 0)


@pytest.mark.parametrize(
    ("target_s", "name"),
    [(0.05, "chat"), (0.07, "chat"), (0.2, "batch"), (9.0, "batch"), (0.02, None), (math.inf, None), (0.049, None)],
)
def test_a_request_belongs_to_the_loosest_tier_that_keeps_its_target(target_s: float, name: str | None) -> None:
    """One without a target, and one that is stricter than all tiers, belongs to none."""
    tier = tier_for(target_s, tiers_in(TABLE, "tiers.toml"))
    assert (None if tier is None else tier.name) == name


CHAT = '[[tier]]\nname = "chat"\ntpot_slo_s = 0.05\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"tiers.toml: tier: must be a list of tables"),
        ("tier = 3", r"tiers.toml: tier: must be a list of tables"),
        ("tiers = 3", r"tiers.toml: tiers: .*tier"),
        ("[[tier]", r"tiers.toml: is not TOML"),
        ('[[tier]]\nname = "chat"', r"tier\[0\].tpot_slo_s: is missing"),
        ("[[tier]]\ntpot_slo_s = 1", r"tier\[0\].name: is missing"),
        ('[[tier]]\nname = ""\ntpot_slo_s = 1', r"tier\[0\].name: must be a text"),
        ('[[tier]]\nname = "a"\ntpot_slo_s = 0', r"tier\[0\].tpot_slo_s: must be a number above 0"),
        ('[[tier]]\nname = "a"\ntpot_slo_s = "fast"', r"tier\[0\].tpot_slo_s: must be a number above 0"),
        (CHAT + "min_instances = -1", r"tier\[0\].min_instances: must be a whole number from 0 on"),
        (CHAT + "max_instances = 0", r"tier\[0\].max_instances: must be a whole number from 1 on"),
        (CHAT + "max_instances = 1.5", r"tier\[0\].max_instances: must be a whole number"),
        (CHAT + "min_instances = true", r"tier\[0\].min_instances: must be a whole number"),
        (CHAT + "min_instances = 3\nmax_instances = 2", r"tier\[0\].min_instances: 3 is more than max_instances 2"),
        (CHAT + "max_instance = 2", r"tier\[0\].max_instance: .*max_instances"),
        (CHAT + CHAT, r"tier\[1\].name: 'chat' is a duplicate"),
        (CHAT + CHAT.replace("chat", "talk"), r"tpot_slo_s: 'chat' and 'talk' have the same bound, 0.05 s"),
        ("\n".join(CHAT.replace("chat", f"t{number}") for number in range(65)), r"tier: must be at most 64 tables"),
    ],
)
def test_an_invalid_table_is_refused_by_field(text: str, error: str) -> None:
    """The error is one line, with the name of the file."""
    with pytest.raises(ValueError, match=error) as raised:
        tiers_in(text, "tiers.toml")
    assert "\n" not in str(raised.value)


def test_tiers_that_need_more_instances_than_there_may_be_are_refused() -> None:
    """The minimums of all tiers count together."""
    tiers = tiers_in(TABLE, "tiers.toml")
    require_room(tiers, 1)
    with pytest.raises(ValueError, match="min_instances: 1 in sum are more than max_instances 0"):
        require_room(tiers, 0)
